"""The long proof: `make torture KILLS=100` kills, damages and stops runs, and prints the figures.

Whatever does not hold ends the program with an assertion.
"""

import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import same
import test_checkpoints
import test_core
import test_mirror
import test_stopping
from conftest import BakedProject, digest, make_tiny, newest
from samestep.state import checkpoints

CHAIN = [*test_stopping.CHAIN, "--max_steps", 300]
# A save in the background is nearly always in flight.
BACKGROUND = ["--async_save", "true", "--save_every", 1]
EXACT = ["--exact", "true", "--micro_batch_size", 1]


def survivors(root, start, kills, draw, longest, loses_disk=False):
    """Kills runs at random moments of their whole life, until they end, or five times; then one
    ends, and its folder is given. loses_disk: whether a kill takes the folder, too."""
    while kills > 0:
        output = Path(tempfile.mkdtemp(dir=root)) / "run"
        for _ in range(min(5, kills)):
            run = start(output)
            time.sleep(draw.uniform(0.5, longest))
            if run.poll() is not None:
                break
            test_stopping.kill_all(run)
            kills -= 1
            if loses_disk:
                shutil.rmtree(output, ignore_errors=True)
        run = start(output)
        printed = run.communicate()[0]
        assert run.returncode == 0, printed
        yield output
        shutil.rmtree(output)
        print(f"{kills} kills are left", file=sys.stderr, flush=True)


def training_kills(tiny, root, kills, draw, processes, flags=(), harmless=(), mirrored=False):
    """The runs have the next number of `processes` in turn, and the bytes of an undisturbed one.
    mirrored: whether each lives in a bucket, and loses its disk at a kill."""
    numbers, whole = itertools.cycle(processes), Path(tempfile.mkdtemp(dir=root)) / "whole"
    tiny.train(processes[0], *CHAIN, *flags, "--output_dir", whole, timeout=3600)

    def start(output):
        number = next(numbers)
        words = [*CHAIN, *flags, *harmless, "--output_dir", output]
        if mirrored:
            words += ["--mirror", f"s3://runs/{output.parent.name}"]
        hardware = "cpu_multi" if number > 1 else "cpu"
        return tiny.launch(f"accelerate --num_processes {number}", hardware, *words)

    for output in survivors(root, start, kills, draw, 15 if flags else 9, mirrored):
        same.check_same(whole, output)


def own_script_kills(root, kills, draw):
    """The same with a script of one's own, with exact, in turns on two processes and on one."""
    launchers = itertools.cycle(("torchrun", "accelerate"))

    def start(output):
        flags = ["--exact", "--micro_batch_size", 4, "--max_steps", 200, "--folder", output]
        return test_core.start(next(launchers), *flags)

    began = time.monotonic()
    (whole,) = [digest(newest(output)) for output in survivors(root, start, 1, draw, 1)]
    for output in survivors(root, start, kills, draw, time.monotonic() - began):
        assert digest(newest(output)) == whole


def mirrored_script_kills(root, kills, draw):
    """A script of one's own whose disk is lost at each kill, in turns on two processes and one."""
    launchers = itertools.cycle((["torchrun", "--nproc-per-node=2"], ["python"]))

    def start(output):
        mirror = f"s3://runs/{output.parent.name}"
        words = ["--folder", output, "--mirror", mirror, "--seconds", 0.05, "--max_steps", 100]
        command = [*next(launchers), test_mirror.OWN, *map(str, words)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        project = BakedProject(root)
        env = project.env(ACCELERATE_USE_CPU="true")
        return subprocess.Popen(command, env=env, **project.apart(), **pipes)

    (whole,) = [digest(newest(output)) for output in survivors(root, start, 1, draw, 2, True)]
    for output in survivors(root, start, kills, draw, 14, True):
        assert digest(newest(output)) == whole


def main_mirrored(root, kills, draw):
    with test_mirror.serve():
        training_kills(make_tiny(root / "tiny"), root, kills, draw, (1, 2), EXACT, mirrored=True)
        mirrored_script_kills(root, kills, draw)
    print(f"survived: {kills} kills of train.py and of a script, each without its disk")


def checkpoint_files(root):
    """Crash points survived, with kinds of damage detected and no false alarm in 100."""
    points = test_checkpoints.crash_at_each_call(root / "crash")
    for number, damage in enumerate(test_checkpoints.DAMAGES):
        folder = root / f"damage-{number}"
        test_checkpoints.test_a_damaged_checkpoint_is_passed_over_named_and_kept(folder, damage)
    for step in range(100):
        path = test_checkpoints.save(root / "intact", step)
        assert checkpoints.verify(path)["step"] == step
    assert checkpoints.find_checkpoint(root / "intact", "auto")[2] == []
    return points


def main():
    kills = int(os.environ.get("KILLS", 100))
    fewer, few = max(5, kills // 3), max(1, kills // 50)
    seed = int(os.environ.get("SEED", random.SystemRandom().randrange(10**6)))
    print(f"KILLS={kills} SEED={seed}", file=sys.stderr, flush=True)
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="torture", ignore_cleanup_errors=True) as folder:
        root = Path(folder)
        if os.environ.get("MIRROR") == "1":
            return main_mirrored(root, kills, draw)
        tiny, points = make_tiny(root / "tiny"), checkpoint_files(root)
        for number, flags in ((kills, ()), (fewer, BACKGROUND)):
            training_kills(tiny, root, number // 2, draw, [1], harmless=flags)
            training_kills(tiny, root, number - number // 2, draw, [2], harmless=flags)
        training_kills(tiny, root, fewer, draw, (1, 3, 2, 4), EXACT)
        own_script_kills(root, fewer, draw)
        signals = test_stopping.SIGNALS * few
        for number, case in enumerate(signals):
            test_stopping.stop(tiny, root / f"stop-{number}", *case)
        for number in range(50):
            tiny.train(2, "--max_steps", 2, "--output_dir", root / f"exit-{number}", timeout=3600)
    print(
        f"survived: {kills} kills, {fewer} with saves in the background, {fewer} after which "
        f"exact went on with another number of processes, {points} crash points; "
        f"{len(test_checkpoints.DAMAGES)} kinds of damage detected, and 0 false alarms of 100; "
        f"{len(signals)} stop signals honoured, 50 clean exits"
    )


if __name__ == "__main__":
    main()
