"""The long proof: `make torture KILLS=100` kills, damages and stops runs, and prints the figures.

Every figure is counted here and now; whatever does not hold ends the program with an assertion.
"""

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
EXACT = [*CHAIN, "--exact", "true", "--micro_batch_size", 1]


class Folders:
    """Temporary folders, as pytest's tmp_path_factory makes them."""

    def __init__(self):
        self.root = Path(tempfile.mkdtemp(prefix="torture"))

    def mktemp(self, name):
        return Path(tempfile.mkdtemp(prefix=name, dir=self.root))


def chains(what, folders, kills, start, check, seconds):
    """Kills runs at random moments of their whole life, until they end, or five times.

    `start(output, number)` starts a run of this chain, `seconds()` later it is killed; then one
    ends, and `check(output, number)` compares it with an undisturbed one. Gives kills tried, kills
    survived, and the seconds from each kill in training to the next new step.
    """
    tried, survived, until_new, number = 0, 0, [], 0
    while tried < kills:
        output, chain, ended = folders.mktemp("chain") / "run", 0, False
        while chain < 5 and tried < kills and not ended:
            seen = max((line["step"] for line in written(output)), default=0)
            began, new = time.monotonic(), None
            run, last = start(output, number), began + seconds()
            while time.monotonic() < last and run.poll() is None:
                if not new and any(line["step"] > seen for line in written(output)):
                    new = time.monotonic() - began
                time.sleep(0.02)
            ended = run.poll() is not None
            assert not ended or run.returncode == 0, run.communicate()[0]
            if not ended:
                test_stopping.kill_all(run)
                chain, tried = chain + 1, tried + 1
            if new and seen:
                until_new.append(new)
        run = start(output, number)
        printed = run.communicate()[0]
        assert run.returncode == 0, printed
        check(output, number)
        survived, number = survived + chain, number + 1
        shutil.rmtree(output)
        print(f"{what}: {survived} of {tried} survived", file=sys.stderr, flush=True)
    return tried, survived, until_new


def kill_chains(tiny, folders, kills, draw, *flags):
    """Chains of one and two processes; `flags` change how they save, not what they compute."""
    hardware, unbroken = ("cpu", "cpu_multi"), []
    for processes in (1, 2):
        unbroken.append(folders.mktemp("unbroken") / "run")
        tiny.train(processes, *CHAIN, "--output_dir", unbroken[-1])

    def start(output, number):
        words = [*CHAIN, *flags, "--output_dir", output]
        return tiny.launch("accelerate", hardware[number % 2], *words)

    def check(output, number):
        test_stopping.check_same_end(output, unbroken[number % 2])

    return chains("kills", folders, kills, start, check, lambda: draw.uniform(0.5, 9))


def exact_chains(tiny, folders, kills, draw):
    """Chains that go on with another number of processes each time: 1, 3, 2, 4, 1, ..."""
    unbroken, numbers = folders.mktemp("unbroken") / "run", itertools.cycle((1, 3, 2, 4))
    tiny.train(1, *EXACT, "--output_dir", unbroken)

    def start(output, _):
        processes = next(numbers)
        launcher, hardware = f"accelerate --num_processes {processes}", "cpu_multi"
        return tiny.launch(
            launcher, hardware if processes > 1 else "cpu", *EXACT, "--output_dir", output
        )

    def check(output, _):
        test_exact.check_same_end(output, unbroken)

    return chains("exact kills", folders, kills, start, check, lambda: draw.uniform(0.5, 15))


def preparation_kills(folders, kills, draw):
    """Chains of the preparation of 24 MB of text, whose files have the bytes of one that ended."""
    project = bake(folders.mktemp("prepare"), tracker="none")
    rows = folders.mktemp("rows") / "rows.jsonl"
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
        assert digests(cache) == digests(undisturbed)

    undisturbed, began = folders.mktemp("undisturbed"), time.monotonic()
    assert start(undisturbed, 0).wait() == 0
    whole = time.monotonic() - began
    what = "kills of preparations"
    return chains(what, folders, kills, start, check, lambda: draw.uniform(0.3, 1) * whole)


def written(output):
    """The training lines of a run that may not have begun."""
    return lines(output, "loss") if (output / "metrics.jsonl").exists() else []


def checkpoint_files(folders):
    """Crash points survived, kinds of damage detected, false alarms of 100 intact checkpoints."""
    test_checkpoints.test_a_crash_at_any_call_to_the_disk_leaves_a_valid_checkpoint(
        folders.mktemp("crash")
    )
    folder = folders.mktemp("points")
    for step in (1, 2):
        test_checkpoints.save(folder, step)
    points = len(test_checkpoints.run_until(folder, 10**9))
    for damage in test_checkpoints.DAMAGES:
        test_checkpoints.test_a_damaged_checkpoint_is_passed_over_named_and_kept(
            folders.mktemp("damage"), damage
        )
    intact = folders.mktemp("intact")
    for step in range(100):
        assert checkpoints.verify(test_checkpoints.save(intact, step))["step"] == step
    assert checkpoints.find_checkpoint(intact, "auto")[2] == []
    return points, len(test_checkpoints.DAMAGES)


def share_of_saving(folders):
    """The share of training time that checkpoints take in the default recipe."""
    project = bake(folders.mktemp("default"), tracker="none")
    project.train(1, timeout=600)
    metrics = lines(project.path / "runs" / "default", "step")
    saving = sum(line["save_seconds"] for line in metrics if "save_seconds" in line)
    training = [line for line in metrics if "tokens_per_second" in line]
    tokens = 64 * 32 * 10  # of a line: the recipe's context, batch and log_every
    return saving / (saving + sum(tokens / line["tokens_per_second"] for line in training))


def main():
    """Runs all of it; the seed makes the moments of the kills repeatable, as far as they are."""
    kills = int(os.environ.get("KILLS", 100))
    seed = int(os.environ.get("SEED", random.SystemRandom().randrange(10**6)))
    print(f"KILLS={kills} SEED={seed}", file=sys.stderr, flush=True)
    folders = Folders()
    tiny = make_tiny(folders.mktemp("tiny"))
    try:
        share = share_of_saving(folders)
        points, damages = checkpoint_files(folders)
        tried, survived, seconds = kill_chains(tiny, folders, kills, random.Random(seed))
        begun, intact, _ = kill_chains(
            tiny, folders, max(5, kills // 3), random.Random(seed), *BACKGROUND
        )
        changes, same, _ = exact_chains(tiny, folders, max(5, kills // 3), random.Random(seed))
        stops, prepared, _ = preparation_kills(folders, max(5, kills // 3), random.Random(seed))
        signals = test_stopping.SIGNALS * max(1, kills // 50)
        for case in signals:
            test_stopping.stop(tiny, folders.mktemp("stop") / "run", *case)
        for _ in range(50):
            tiny.train(2, "--max_steps", 2, "--output_dir", folders.mktemp("exit") / "run")
    finally:
        shutil.rmtree(folders.root, ignore_errors=True)
    print(
        f"{survived} of {tried} kills survived, {intact} of {begun} with saves in the background, "
        f"{same} of {changes} after which exact went on with another number of processes, "
        f"{prepared} of {stops} kills of preparations, {points} of {points} crash points, "
        f"{damages} of {damages} kinds of damage detected and 0 false alarms of 100, "
        f"{len(signals)} of {len(signals)} stop signals honoured, 50 of 50 clean exits; "
        f"{statistics.median(seconds):.1f} s from a kill to the next new step (median of "
        f"{len(seconds)}); {100 * share:.2f} % of training time in checkpoints"
    )


if __name__ == "__main__":
    main()
