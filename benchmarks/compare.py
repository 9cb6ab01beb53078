"""Compares a baked project with other ways to train, on the same work.

    make bench                                       # in the template: a table, a .json
    python benchmarks/compare.py --sizes small --rounds 2 --steps 5

The peers are those of peers.py. A process of each waits while another one trains: a round lets
each of them train some steps, in turn. So what slows the machine for a while slows all of them.
Before that their work is counted, and has to be the same: items in the loss, FLOPs, and the losses.
"""

import argparse
import contextlib
import datetime
import json
import math
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from statistics import median

import numpy as np

import work
from peers import PEERS
from work import SIZES, Size, Work

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
PACKAGES = "torch accelerate transformers tokenizers lightning datasets trl".split()
PLAIN, BAKED = "plain loop", "baked project"
# Prepares the data, as train.py would, and saves the rows and the order of the samples.
PREPARE = """
import sys
import numpy as np
import task
import torch
from samestep.core.order import sample_ids
from samestep.project.startup import read_config, read_data
from train import Config
cfg = read_config(Config, None, sys.argv[1:])
_, bound, (rows, _), _ = read_data(cfg, task)
torch.save(bound.collate([rows[i] for i in range(len(rows))]), cfg.output_dir + "/rows.pt")
steps = min(4000, 20 * len(rows) // cfg.global_batch_size)
positions = np.arange(steps * cfg.global_batch_size)
np.save(cfg.output_dir + "/order.npy", sample_ids(positions, len(rows), cfg.seed))
"""


# ---- The peers' processes ------------------------------------------------------------------------


def environment(**extra: str) -> dict[str, str]:
    """The variables of a process: one thread, no network, no settings of the user."""
    foreign = ("ACCELERATE_", "WANDB_", "OMP_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    fixed = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**env, **fixed, "ACCELERATE_USE_CPU": "true", **extra}


class Run:
    """One peer in one or several processes of a program."""

    def __init__(self, name: str, todo: Work, processes: int, **extra: str):
        Path(todo.output).mkdir(parents=True)
        self.name, self.size, self.log = name, todo.size, Path(todo.output, "log.txt")
        self.ranks, pipe = [], subprocess.PIPE
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for rank in map(str, range(processes)):
            env = environment(BENCH_WORK=todo.to_json(), **extra)
            if processes > 1:
                env |= {**meeting, "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
                env |= {"RANK": rank, "LOCAL_RANK": rank, "TORCHELASTIC_RUN_ID": "bench"}
            command = [sys.executable, str(HERE / "peers.py"), name]
            with open(self.log, "a") as log:
                process = subprocess.Popen(
                    command, env=env, stdin=pipe, stdout=pipe, stderr=log, text=True
                )
            self.ranks.append(process)

    def answers(self) -> list[dict]:
        """The next line of each process."""
        lines = [process.stdout.readline() for process in self.ranks]
        if not all(lines):
            self.end()
            sys.exit(f"{self.name} failed:\n{self.log.read_text(errors='replace')[-3000:]}")
        return [json.loads(line) for line in lines]

    def train(self, steps: int) -> dict:
        """Trains some steps: seconds a step, CPU seconds a step of all processes, ..."""
        for process in self.ranks:
            print(steps, file=process.stdin, flush=True)
        answers = self.answers()
        return {
            "seconds": max(each["seconds"] for each in answers) / steps,
            "cpu": sum(each["cpu"] for each in answers) / steps,
        }

    def end(self) -> None:
        for process in self.ranks:
            process.kill()
            process.communicate()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# ---- The work ------------------------------------------------------------------------------------


def bake(folder: Path, sources: Path = HERE.parent, **answers: str) -> Path:
    """A project of the default answers but for these, by the template of a checkout."""
    from cookiecutter.main import cookiecutter

    say("baking a project")
    elsewhere = {"replay_dir": str(folder), "cookiecutters_dir": str(folder)}
    template = shutil.ignore_patterns(".git", ".venv", "demo", "runs", "__pycache__", ".*_cache")
    shutil.copytree(sources, folder / "template", ignore=template)
    return Path(
        cookiecutter(
            str(folder / "template"),
            no_input=True,
            output_dir=str(folder),
            default_config=elsewhere,
            extra_context={"tracker": "none", **answers},
        )
    )


def prepare(project: Path, size: Size, folder: Path) -> Work:
    """The work of this size, with the data that the project prepares for it."""
    folder.mkdir()
    command = [sys.executable, "-c", PREPARE, *work.flags(size), "--output_dir", str(folder)]
    printed = subprocess.run(
        command, cwd=project, env=environment(), capture_output=True, text=True
    )
    if printed.returncode:
        sys.exit(f"no data:\n{printed.stderr}")
    return Work(size, str(project), str(folder), str(folder))


def count(run: Run) -> dict:
    """What the peer did in its first steps: FLOPs and loss items of a step, and losses."""
    answers, size = run.answers(), run.size.micro_batches
    losses, tokens = [], []
    for first in range(0, min(len(each["losses"]) for each in answers) - size + 1, size):
        step = [each for own in answers for each in own["losses"][first : first + size]]
        tokens.append(sum(terms for _, terms in step))
        losses.append(math.fsum(loss for loss, _ in step) / tokens[-1])
    return {
        "gflop": sum(each["flops"] for each in answers) / 1e9,
        "tokens": tokens[0],
        "losses": losses,
    }


def check_same_work(counts: dict[str, dict], counted: int) -> None:
    """Ends the program unless all peers did the same: tokens, FLOPs to 1 %, losses to 0.1 %."""
    reference = counts[PLAIN]
    for name, found in counts.items():
        pairs = list(zip(found["losses"], reference["losses"], strict=False))
        far = max(abs(mine / theirs - 1) for mine, theirs in pairs)
        same = (
            len(pairs) >= counted - 1  # a peer that reads a batch ahead is a step behind
            and found["tokens"] == reference["tokens"]
            and abs(found["gflop"] / reference["gflop"] - 1) < 0.01
            and far < 1e-3  # of 20 steps, in which AdamW lets rounding grow
        )
        found["loss_difference"] = far
        if not same:
            sys.exit(f"{name} does not do the work of {PLAIN}:\n{found}\n{reference}")


# ---- Measuring -----------------------------------------------------------------------------------


def time_steps(todo: Work, peers: list[str], processes: int, rounds: int, steps: int) -> dict:
    """For each peer: what was counted, and seconds and CPU seconds a step in each round."""
    name, runs, found = Path(todo.output).name, {}, {}
    try:
        for peer in peers:
            output = f"{todo.output}/{peer}-{processes}"
            todo_here = Work(todo.size, todo.project, todo.data, output)
            runs[peer] = Run(peer, todo_here, processes)
            found[peer] = count(runs[peer])
        check_same_work(found, todo.size.counted)
        take_turns(runs, found, f"{name}, {processes} x CPU", rounds, steps)
    finally:
        for run in runs.values():
            run.end()
    return found


def take_turns(runs: dict[str, Run], found: dict[str, dict], name: str, rounds: int, steps: int):
    """Adds to what was found of each run its seconds and CPU seconds a step in each round."""
    names = [*runs]
    for number in range(rounds):
        say(f"{name}: round {number + 1} of {rounds}")
        for each in names[number % len(names) :] + names[: number % len(names)]:
            runs[each].train(1)  # its data comes back into the caches
            timed = runs[each].train(steps)
            for clock, seconds in timed.items():
                found[each].setdefault(clock, []).append(seconds)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- Showing -------------------------------------------------------------------------------------


def ratios(values: list[float], others: list[float]) -> tuple[float, float, float]:
    """Of the ratios within a round the median, and the range of the middle half."""
    low, median, high = np.percentile(np.divide(values, others), [25, 50, 75]).tolist()
    return median, low, high


def describe(report: dict) -> str:
    """Rows of peers; for each size the step, its ratio to the plain loop, that of its CPU time."""
    columns = ["", "processes"]
    for name in report["sizes"]:
        gflop = next(iter(report["steps"].values()))[name][PLAIN]["gflop"]
        columns += [f"ms a step of {gflop:.2g} GFLOP", "wall time", "CPU time"]
    rows = []
    for processes, sizes in report["steps"].items():
        for peer in report["peers"]:
            row = [peer, processes]
            for found in sizes.values():
                mine, plain = found[peer], found[PLAIN]
                ratio, low, high = ratios(mine["seconds"], plain["seconds"])
                row.append(f"{1e3 * median(mine['seconds']):.1f}")
                row.append(f"{ratio:.3f} ({low:.3f} to {high:.3f})")
                row.append(f"{ratios(mine['cpu'], plain['cpu'])[0]:.3f}")
            rows.append(row)
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


def write_page(command: str, text: str) -> None:
    """Replaces what stands between the marks of this command in docs/benchmarks.md."""
    begin, end = f"<!-- {command} -->", f"<!-- end of {command} -->"
    before, rest = PAGE.read_text().split(begin)
    after = rest.split(end)[1]
    PAGE.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def about_machine() -> dict:
    """Processor, versions and date."""
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        model = names[0] if names else model
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    date = datetime.date.today().isoformat()
    return {"device": f"{model}, {os.cpu_count()} cores", "versions": found, "date": date}


# ---- A program -----------------------------------------------------------------------------------


def parser_of(about: str, name: str) -> argparse.ArgumentParser:
    """The parser of a benchmark, with the flags that all have."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--output", type=Path, default=HERE / "results", help="folder of results")
    parser.add_argument("--name", default=name, help="name of the file of results")
    parser.add_argument("--docs", action="store_true", help="write the tables into docs/")
    return parser


def publish(asked: argparse.Namespace, command: str, measure: Callable, describe: Callable) -> None:
    """Calls measure(asked, folder) for what it adds to a report; prints the report's tables, and
    writes it to the .json, and if that is asked for the tables to the page."""
    folder = Path(tempfile.mkdtemp(prefix="bench"))
    report: dict = {**about_machine(), "load": [os.getloadavg()[0]]}
    try:
        report |= measure(asked, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report["load"].append(os.getloadavg()[0])
    text, path = f"{describe(report)}\n\n{about(report)}", asked.output / f"{asked.name}.json"
    print(text)
    asked.output.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(path)
    if asked.docs:
        write_page(command, text)


def measure(asked: argparse.Namespace, folder: Path) -> dict:
    peers = [PLAIN, *(name for name in asked.peers if name != PLAIN)]
    project, found = bake(folder), {processes: {} for processes in asked.processes}
    for name in asked.sizes:
        size, todo = SIZES[name], prepare(project, SIZES[name], folder / name)
        rounds, steps = asked.rounds or size.rounds, asked.steps or size.steps
        for processes in asked.processes:
            found[processes][name] = time_steps(todo, peers, int(processes), rounds, steps)
    return {"peers": peers, "sizes": asked.sizes, "steps": found}


def main() -> None:
    parser = parser_of(__doc__, "cpu")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=[*SIZES])
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=[*PEERS])
    parser.add_argument("--processes", nargs="+", choices=("1", "2"), default=["1", "2"])
    parser.add_argument("--rounds", type=int, help="instead of those of work.py")
    parser.add_argument("--steps", type=int, help="steps in a round, likewise")
    publish(parser.parse_args(), "make bench", measure, describe)


if __name__ == "__main__":
    main()
