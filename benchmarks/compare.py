"""Compares a baked project with other ways to train, on the same work.

    make bench                                       # in the template: a table, a .json
    make bench-steps                                 # the project with and without `exact`
    python benchmarks/compare.py --sizes small --rounds 2 --steps 5

The peers are those of peers.py. A process of each waits while another one trains: a round lets
each of them train some steps, in turn. So what slows the machine for a while slows all of them.
Before that their work is counted, and has to be the same: items in the loss, FLOPs, and the losses.
"""

import argparse
import datetime
import json
import math
import os
import platform
import random
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from statistics import median

import numpy as np

import work
from peers import PEERS
from work import SIZES, Work

HERE = Path(__file__).resolve().parent
PACKAGES = "torch accelerate transformers tokenizers lightning datasets".split()
# Prepares the data, as train.py would, and saves the rows and the order of the samples.
PREPARE = """
import sys
import numpy as np
import task
import torch
from samestep.step.order import sample_ids
from samestep.prepared.run_data import read_data
from samestep.run.startup import read_config
from train import Config
cfg = read_config(Config, None, sys.argv[1:])
_, bound, (rows, _), _ = read_data(cfg, task)
torch.save(bound.collate([rows[i] for i in range(len(rows))]), cfg.output_dir + "/rows.pt")
positions = np.arange(min(32_000, 20 * len(rows)))
np.save(cfg.output_dir + "/order.npy", sample_ids(positions, len(rows), cfg.seed))
"""


# ---- The peers' processes ------------------------------------------------------------------------


def environment(**extra: str) -> dict[str, str]:
    """The variables of a process: one thread, no network, no settings of the user."""
    foreign = ("ACCELERATE_", "WANDB_", "OMP_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    fixed = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    fixed |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**env, **fixed, "ACCELERATE_USE_CPU": "true", **extra}


class Run:
    """One peer in one or several processes of a program."""

    def __init__(self, name: str, todo: Work, processes: int):
        Path(todo.output).mkdir(parents=True)
        self.name, self.log = name, Path(todo.output, "log.txt")
        env = environment(BENCH_WORK=todo.to_json())
        if processes > 1:
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            env |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
            env |= {"TORCHELASTIC_RUN_ID": "bench"}
        command, pipe = [sys.executable, str(HERE / "peers.py"), name], subprocess.PIPE
        self.ranks = []
        for rank in range(processes):
            if processes > 1:
                env |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with open(self.log, "a") as log:
                process = subprocess.Popen(
                    command, env=env, stdin=pipe, stdout=pipe, stderr=log, text=True
                )
            self.ranks.append(process)

    def answers(self) -> list:
        """The next line of each process: what was counted, then seconds."""
        lines = [process.stdout.readline() for process in self.ranks]
        if not all(lines):
            self.end()
            sys.exit(f"{self.name} failed:\n{self.log.read_text(errors='replace')[-3000:]}")
        return [json.loads(line) for line in lines]

    def train(self, steps: int) -> float:
        """Trains some steps: seconds a step."""
        for process in self.ranks:
            print(steps, file=process.stdin, flush=True)
        return max(self.answers()) / steps

    def end(self) -> None:
        for process in self.ranks:
            process.kill()
            process.communicate()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# ---- The work, and measuring it ------------------------------------------------------------------


def bake(folder: Path, sources: Path = HERE.parent, **answers: str) -> Path:
    """A project of the default answers but for these, by the template of a checkout."""
    from cookiecutter.main import cookiecutter

    say("baking a project")
    project = cookiecutter(
        str(sources),
        no_input=True,
        output_dir=str(folder),
        default_config={"replay_dir": str(folder), "cookiecutters_dir": str(folder)},
        extra_context={"tracker": "none", **answers},
    )
    return Path(project)


def prepare(project: Path, todo: Work, folder: Path) -> Work:
    """The same work with the data that the project prepares for it, in this new folder."""
    folder.mkdir()
    command = [sys.executable, "-c", PREPARE, *work.flags(todo), "--output_dir", str(folder)]
    options = {"cwd": project, "env": environment(), "capture_output": True, "text": True}
    printed = subprocess.run(command, **options)
    if printed.returncode:
        sys.exit(f"no data:\n{printed.stderr}")
    return replace(todo, project=str(project), data=str(folder), output=str(folder))


def count(run: Run, micro_batches: int) -> dict:
    """What the peer did in its first steps: FLOPs and loss items of a step, and losses."""
    answers, losses, tokens = run.answers(), [], []
    counted = min(len(each["losses"]) for each in answers)
    for first in range(0, counted - micro_batches + 1, micro_batches):
        step = [each for own in answers for each in own["losses"][first : first + micro_batches]]
        tokens.append(sum(items for _, items in step))
        losses.append(math.fsum(loss for loss, _ in step) / tokens[-1])
    gflop = sum(each["flops"] for each in answers) / 1e9
    return {"gflop": gflop, "tokens": tokens[0], "losses": losses}


def check_same_work(counts: dict[str, dict], counted: int) -> None:
    """Ends the program unless all peers did the same: tokens, FLOPs to 1 %, losses to 0.1 %."""
    first, reference = next(iter(counts.items()))
    for name, found in counts.items():
        pairs = list(zip(found["losses"], reference["losses"], strict=False))
        far = max(abs(mine / theirs - 1) for mine, theirs in pairs)
        same = (
            len(pairs) >= counted - 1  # a peer that reads a batch ahead is a step behind
            and found["tokens"] == reference["tokens"]
            and abs(found["gflop"] / reference["gflop"] - 1) < 0.01
            and far < 1e-3  # of 20 steps, in which AdamW lets rounding grow
        )
        if not same:
            sys.exit(f"{name} does not do the work of {first}:\n{found}\n{reference}")


def time_steps(todo: Work, peers: list[str], processes: int, rounds: int, steps: int) -> dict:
    """For each peer: what was counted, and the seconds of a step in each round."""
    runs, found = {}, {}
    try:
        for name in peers:
            output = f"{todo.output}/{name}-{processes}"
            runs[name] = Run(name, replace(todo, output=output), processes)
            found[name] = count(runs[name], todo.micro_batches) | {"seconds": []}
        check_same_work(found, todo.counted)
        for number in range(rounds):
            say(f"{Path(todo.output).name}, {processes} x CPU: round {number + 1} of {rounds}")
            for name in random.sample(peers, len(peers)):
                runs[name].train(1)  # its data comes back into the caches
                found[name]["seconds"].append(runs[name].train(steps))
    finally:
        for run in runs.values():
            run.end()
    return found


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(asked: argparse.Namespace, folder: Path) -> dict:
    project, found = bake(folder), {processes: {} for processes in asked.processes}
    for name in asked.sizes:
        todo = prepare(project, SIZES[name], folder / name)
        rounds, steps = asked.rounds or todo.rounds, asked.steps or todo.steps
        for processes in asked.processes:
            if asked.micro_batch:
                todo = replace(todo, micro_batches=todo.batch // processes // asked.micro_batch)
            found[processes][name] = time_steps(todo, asked.peers, processes, rounds, steps)
    return {"peers": asked.peers, "steps": found}


# ---- The table, and the program ------------------------------------------------------------------


def ratios(values: list[float], others: list[float]) -> tuple[float, float, float]:
    """Of the ratios within a round the median, and the range of the middle half."""
    low, median, high = np.percentile(np.divide(values, others), [25, 50, 75]).tolist()
    return median, low, high


def describe(report: dict) -> str:
    """A row for each peer: milliseconds of a step of the first, of the others the ratio to it."""
    first, *others = report["peers"]
    columns, rows = ["a step"], [[peer] for peer in report["peers"]]
    for processes, sizes in report["steps"].items():
        for size, found in sizes.items():
            seconds = found[first]["seconds"]
            columns.append(f"{size}, processes: {processes}")
            rows[0].append(f"{1e3 * median(seconds):.1f} ms")
            for row, peer in zip(rows[1:], others, strict=True):
                values = ratios(found[peer]["seconds"], seconds)
                row.append("{:.2f} ({:.2f}-{:.2f})".format(*values))
    return markdown(columns, rows)


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def about(report: dict) -> str:
    """A sentence about the machine."""
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    return (
        f"{report['device']}, one thread a process, load {report['load'][0]:.1f} before and "
        f"{report['load'][1]:.1f} after; {versions}; {report['date']}."
    )


def about_machine() -> dict:
    """Processor, versions, date, and the load at the beginning."""
    file = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", file.read_text()) if file.exists() else None
    device = f"{model[1] if model else platform.machine()}, {os.cpu_count()} cores"
    installed = {each.name: each.version for each in metadata.distributions()}
    versions = {name: installed[name] for name in PACKAGES if name in installed}
    versions = {"python": platform.python_version(), **versions}
    date, load = datetime.date.today().isoformat(), [os.getloadavg()[0]]
    return {"device": device, "versions": versions, "date": date, "load": load}


def parser_of(about: str, name: str) -> argparse.ArgumentParser:
    """The parser of a benchmark, with the flags that all have."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--output", type=Path, default=HERE / "results", help="folder of results")
    parser.add_argument("--name", default=name, help="name of the file of results")
    return parser


def publish(asked: argparse.Namespace, measure: Callable, describe: Callable) -> None:
    """Prints the tables of what measure(asked, folder) found, and writes it to the .json."""
    report = about_machine()
    with tempfile.TemporaryDirectory(prefix="bench", ignore_cleanup_errors=True) as folder:
        report |= measure(asked, Path(folder))
    report["load"].append(os.getloadavg()[0])
    print(f"{describe(report)}\n\n{about(report)}")
    path = asked.output / f"{asked.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report) + "\n")
    print(path)


def main() -> None:
    parser = parser_of(__doc__, "cpu")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=[*SIZES])
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=[*PEERS][:-1])
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--micro_batch", type=int, help="samples, instead of those of work.py")
    parser.add_argument("--rounds", type=int, help="likewise")
    parser.add_argument("--steps", type=int, help="steps in a round, likewise")
    publish(parser.parse_args(), measure, describe)


if __name__ == "__main__":
    main()
