"""The long proof: `make torture KILLS=100` kills, damages and stops runs, and prints the figures.

Every figure is counted here and now; whatever does not hold ends the program with an assertion.
"""

import contextlib
import itertools
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

import test_checkpoints
import test_core
import test_exact
import test_stopping
from conftest import digest, make_tiny, newest
from samestep.core import checkpoints

CHAIN = [*test_stopping.CHAIN, "--max_steps", 300]
# A save in the background is nearly always in flight.
BACKGROUND = ["--async_save", "true", "--save_every", 1]
EXACT = ["--exact", "true", "--micro_batch_size", 1]


def training_kills(tiny, root, kills, draw, processes, check_same_end, alike=(), flags=()):
    """Kills runs at random moments of their whole life, until they end, or five times; then one
    ends, and has the bytes of an undisturbed one.

    Each run has the next number of `processes`. An undisturbed run of that number, or of one
    process for `alike`, which change what is computed, is its measure; `flags` change no number.
    Gives the kills, of which each was survived.
    """
    numbers, unbroken = itertools.cycle(processes), {}
    for each in [1] if alike else processes:
        unbroken[each] = root / f"unbroken-{each}-{len(alike)}"
        if not unbroken[each].exists():
            tiny.train(each, *CHAIN, *alike, "--output_dir", unbroken[each], timeout=3600)

    def start(each):
        words = [*CHAIN, *alike, *flags, "--output_dir", output]
        hardware = "cpu_multi" if each > 1 else "cpu"
        return tiny.launch(f"accelerate --num_processes {each}", hardware, *words)

    tried, longest = 0, 15 if alike else 9
    while tried < kills:
        output, own = Path(tempfile.mkdtemp(dir=root)) / "run", next(numbers)
        for _ in range(min(5, kills - tried)):
            run = start(next(numbers) if alike else own)
            time.sleep(draw.uniform(0.5, longest))
            if run.poll() is not None:
                assert run.returncode == 0, run.communicate()[0]
                break
            test_stopping.kill_all(run)
            tried += 1
        run = start(next(numbers) if alike else own)
        printed = run.communicate()[0]
        assert run.returncode == 0, printed
        check_same_end(output, unbroken[1 if alike else own])
        shutil.rmtree(output)
        print(f"kills {[*alike, *flags]}: {tried} survived", file=sys.stderr, flush=True)
    return tried


def own_script_kills(root, kills, draw):
    """The same with a script of one's own, with exact, in turns on two processes and on one."""
    launchers = itertools.cycle(("torchrun", "accelerate"))

    def start(output):
        flags = ["--exact", "--micro_batch_size", 4, "--max_steps", 200, "--folder", output]
        return test_core.start(next(launchers), *flags)

    def end(output):
        run = start(output)
        printed = run.communicate()[0]
        assert run.returncode == 0, printed
        return digest(newest(output))

    began, tried = time.monotonic(), 0
    whole, longest = end(root / "own"), time.monotonic() - began
    while tried < kills:
        output = Path(tempfile.mkdtemp(dir=root)) / "run"
        for _ in range(min(5, kills - tried)):
            run = start(output)
            time.sleep(draw.uniform(0.5, longest))
            if run.poll() is not None:
                break
            test_stopping.kill_all(run)
            tried += 1
        assert end(output) == whole
    print(f"kills of a script of one's own: {tried} survived", file=sys.stderr, flush=True)


def checkpoint_files(root):
    """Crash points survived, kinds of damage detected, false alarms of 100 intact checkpoints."""
    points = test_checkpoints.crash_at_each_call(root / "crash")
    for number, damage in enumerate(test_checkpoints.DAMAGES):
        folder = root / f"damage-{number}"
        test_checkpoints.test_a_damaged_checkpoint_is_passed_over_named_and_kept(folder, damage)
    for step in range(100):
        path = test_checkpoints.save(root / "intact", step)
        assert checkpoints.verify(path)["step"] == step
    assert checkpoints.find_checkpoint(root / "intact", "auto")[2] == []
    return points, len(test_checkpoints.DAMAGES)


def main():
    """Runs all of it; the seed makes the moments of the kills repeatable, as far as they are."""
    kills = int(os.environ.get("KILLS", 100))
    fewer, few = max(5, kills // 3), max(1, kills // 50)
    seed = int(os.environ.get("SEED", random.SystemRandom().randrange(10**6)))
    print(f"KILLS={kills} SEED={seed}", file=sys.stderr, flush=True)
    root = Path(tempfile.mkdtemp(prefix="torture"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        tiny, draws = make_tiny(root / "tiny"), [random.Random(seed) for _ in range(3)]
        points, damages = checkpoint_files(root)
        same, exact = test_stopping.check_same_end, test_exact.check_same_end
        tried = training_kills(tiny, root, kills, draws[0], (1, 2), same)
        begun = training_kills(tiny, root, fewer, draws[1], (1, 2), same, flags=BACKGROUND)
        changes = training_kills(tiny, root, fewer, draws[2], (1, 3, 2, 4), exact, EXACT)
        own_script_kills(root, fewer, draws[0])
        signals = test_stopping.SIGNALS * few
        for number, case in enumerate(signals):
            test_stopping.stop(tiny, root / f"stop-{number}", *case)
        for number in range(50):
            tiny.train(2, "--max_steps", 2, "--output_dir", root / f"exit-{number}", timeout=3600)
    print(
        f"survived: {tried} kills, {begun} with saves in the background, {changes} after which "
        f"exact went on with another number of processes, {points} crash "
        f"points; {damages} kinds of damage detected, and 0 false alarms of 100; {len(signals)} "
        "stop signals honoured, 50 clean exits"
    )


if __name__ == "__main__":
    main()
