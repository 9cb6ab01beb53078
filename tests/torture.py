"""The long proof: `make torture KILLS=100` kills, damages and stops runs, and prints the figures.

Every figure is counted here and now; whatever does not hold ends the program with an assertion.
"""

import contextlib
import hashlib
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import test_checkpoints
import test_exact
import test_stopping
from conftest import bake, lines, make_tiny
from samestep.checkpoint import checkpoints

CHAIN = [*test_stopping.CHAIN, "--max_steps", 300]
# A save in the background is nearly always in flight.
BACKGROUND = ["--async_save", "true", "--save_every", 1]
EXACT = ["--exact", "true", "--micro_batch_size", 1]


def chains(what, root, kills, start, check, seconds):
    """Kills runs at random moments of their whole life, until they end, or five times.

    `start(output, number)` starts a run of this chain, `seconds()` later it is killed; then one
    ends, and `check(output, number)` compares it with an undisturbed one. Gives the kills, of which
    each was survived, and the seconds from each kill in training to the next new step.
    """
    tried, until_new = 0, []
    for number in itertools.count():
        if tried >= kills:
            return tried, until_new
        output = Path(tempfile.mkdtemp(dir=root)) / "run"
        for _ in range(min(5, kills - tried)):
            seen = max((line["step"] for line in written(output)), default=0)
            began, new = time.monotonic(), None
            run, last = start(output, number), began + seconds()
            while time.monotonic() < last and run.poll() is None:
                if not new and any(line["step"] > seen for line in written(output)):
                    new = time.monotonic() - began
                time.sleep(0.02)
            if new and seen:
                until_new.append(new)
            if run.poll() is not None:
                assert run.returncode == 0, run.communicate()[0]
                break
            test_stopping.kill_all(run)
            tried += 1
        run = start(output, number)
        printed = run.communicate()[0]
        assert run.returncode == 0, printed
        check(output, number)
        shutil.rmtree(output)
        print(f"{what}: {tried} survived", file=sys.stderr, flush=True)


def written(output):
    """The training lines of a run that may not have begun."""
    return lines(output, "loss") if (output / "metrics.jsonl").exists() else []


def training_kills(tiny, root, kills, draw, processes, check_same_end, alike=(), flags=()):
    """Each run has the next number of `processes`. An undisturbed run of that number, or of one
    process for `alike`, which change what is computed, is its measure; `flags` change no number."""
    unbroken, numbers = {}, itertools.cycle(processes)
    for each in [1] if alike else processes:
        unbroken[each] = root / f"unbroken-{each}-{len(alike)}"
        if not unbroken[each].exists():
            tiny.train(each, *CHAIN, *alike, "--output_dir", unbroken[each], timeout=3600)

    def start(output, number):
        each = next(numbers) if alike else processes[number % len(processes)]
        words = [*CHAIN, *alike, *flags, "--output_dir", output]
        hardware = "cpu_multi" if each > 1 else "cpu"
        return tiny.launch(f"accelerate --num_processes {each}", hardware, *words)

    def check(output, number):
        check_same_end(output, unbroken[1 if alike else processes[number % len(processes)]])

    what, longest = f"kills {[*alike, *flags]}", 15 if alike else 9
    return chains(what, root, kills, start, check, lambda: draw.uniform(0.5, longest))


def preparation_kills(root, kills, draw):
    """Chains of the preparation of 24 MB of text, whose files have the bytes of one that ended."""
    project, rows = bake(root / "prepare", tracker="none"), root / "rows.jsonl"
    words = (project.path / "docs" / "hardware.md").read_text().split()
    with open(rows, "w") as file:
        while file.tell() < 24_000_000:
            text = " ".join(draw.choices(words, k=draw.randint(20, 400)))
            file.write(json.dumps({"text": text}) + "\n")

    def start(cache, _):
        flags = ["--task.data", rows, "--task.cache_dir", cache]
        command = [sys.executable, "-m", "samestep", "prepare", *map(str, flags)]
        options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=project.path, env=project.env(), **options)

    def digests(cache):
        (folder,) = (each for each in cache.iterdir() if each.is_dir())
        files = sorted(each for each in folder.iterdir() if each.name != "index")
        return {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in files}

    def check(cache, _):
        assert digests(cache) == digests(root / "undisturbed")

    began = time.monotonic()
    assert start(root / "undisturbed", 0).wait() == 0
    whole = time.monotonic() - began
    seconds = lambda: draw.uniform(0.3, 1) * whole  # noqa: E731
    return chains("kills of preparations", root, kills, start, check, seconds)


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
        tiny, draws = make_tiny(root / "tiny"), [random.Random(seed) for _ in range(4)]
        points, damages = checkpoint_files(root)
        same, exact = test_stopping.check_same_end, test_exact.check_same_end
        tried, seconds = training_kills(tiny, root, kills, draws[0], (1, 2), same)
        begun, _ = training_kills(tiny, root, fewer, draws[1], (1, 2), same, flags=BACKGROUND)
        changes, _ = training_kills(tiny, root, fewer, draws[2], (1, 3, 2, 4), exact, EXACT)
        stops, _ = preparation_kills(root, fewer, draws[3])
        signals = test_stopping.SIGNALS * few
        for number, case in enumerate(signals):
            test_stopping.stop(tiny, root / f"stop-{number}", *case)
        for number in range(50):
            tiny.train(2, "--max_steps", 2, "--output_dir", root / f"exit-{number}", timeout=3600)
    print(
        f"survived: {tried} kills, {begun} with saves in the background, {changes} after which "
        f"exact went on with another number of processes, {stops} of preparations, {points} crash "
        f"points; {damages} kinds of damage detected, and 0 false alarms of 100; {len(signals)} "
        f"stop signals honoured, 50 clean exits; {statistics.median(seconds):.1f} s from a kill to "
        f"the next new step (median of {len(seconds)})"
    )


if __name__ == "__main__":
    main()
