"""Draws the figure of README.md: losses on 1, 2 and 4 processes, beside a plain Accelerate script.

    make figure      # in the template: docs/reproducible.png, its numbers and its receipt
    make receipt     # the first of its runs alone: docs/receipt.json, unless a loss differs
    make audit       # trains 20 steps of that receipt on 2 processes, and compares the states
    python benchmarks/figure.py --plain         # the plain script alone, beside the runs there are

Each run trains the same recipe with `exact: true`, on CPU processes. The last one is killed with
kill -9, and resumed by the same command, until it has been killed five times. The program ends with
an error where the losses or the weights of two runs differ. Kernels and BLAS take the instructions
that each x86-64 has: others would round in another way. plain.py trains the same model for an epoch
on the 1,600 rows of these runs, in their order. On one process its losses are those of train.py:
to 1e-6 at first, until the training has amplified the rounding.
"""

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from compare import HERE, about_machine, bake, environment, say

DOCS = HERE.parent / "docs"
RECEIPT = DOCS / "receipt.json"
STEPS, KILLS = 200, 5
INSTRUCTIONS = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}
RECIPE = {
    "exact": "true",
    "max_steps": STEPS,
    "global_batch_size": 8,
    "micro_batch_size": 2,
    "warmup_steps": 10,
    "learning_rate": 1e-2,
    "eval_every": 0,
    "save_every": 10,
    "keep_every": 50,
    "log_every": 1,
    "task.context_length": 64,
    "task.vocab_size": 1024,
    "task.hidden_size": 64,
    "task.num_layers": 2,
    "task.num_heads": 4,
}
FLAGS = [f"--{name}={value}" for name, value in RECIPE.items()]
COLORS = ("#bfdbfe", "#60a5fa", "#1d4ed8", "#c2410c")
# Writes what plain.py trains: the rows of RECIPE's steps, in their order, and its model.
PREPARE = """
import sys
import numpy as np
import task, torch
from samestep.core.batches import seed_everything
from samestep.core.order import sample_ids
from samestep.project.startup import read_config, read_data
from train import Config
cfg = read_config(Config, None, sys.argv[2:])
_, bound, (rows, _), _ = read_data(cfg, task)
positions = np.arange(cfg.max_steps * cfg.global_batch_size)
columns = bound.collate([rows[i] for i in sample_ids(positions, len(rows), cfg.seed).tolist()])
rows = [dict(zip(columns, values)) for values in zip(*columns.values())]
rows = [{name: row[name] for name in ("input_ids", "labels")} for row in rows]
torch.save(rows, sys.argv[1] + "/rows.pt")
seed_everything(cfg.seed)
bound.build_model().save_pretrained(sys.argv[1] + "/model")
"""


def launch(processes: int, *words: str) -> list[str]:
    hardware = "cpu" if processes == 1 else "cpu_multi"
    command = ["launch", "--config_file", f"configs/accelerate/{hardware}.yaml"]
    return [*command, "--num_processes", str(processes), *words]


def start(project: Path, processes: int, output: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "samestep"]
    command += launch(processes, "train.py", "--output_dir", output, *FLAGS)
    with open(project / f"{processes}.log", "a") as log:
        return subprocess.Popen(
            command, cwd=project, env=environment(**INSTRUCTIONS), stdout=log, stderr=log
        )


def losses(output: Path) -> dict[int, float]:
    """The loss of each step that metrics.jsonl has; a step that was trained again has the last."""
    file = output / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    found = {}
    for line in lines:
        if '"loss"' in line and line.endswith("}"):
            values = json.loads(line)
            found[values["step"]] = values["loss"]
    return found


def kill(run: subprocess.Popen) -> None:
    """kill -9 of the launcher and all that it started."""
    for process in [*psutil.Process(run.pid).children(recursive=True), psutil.Process(run.pid)]:
        process.kill()
    run.wait()


def train(project: Path, processes: int, kills: int = 0) -> dict:
    """Trains to the end: the losses, the SHA-256 of the model, and the steps of the kills."""
    output, draw, killed = f"runs/{processes}-{kills}", random.Random(0), []
    for number in range(kills):
        step = STEPS * number // kills + draw.randint(3, STEPS // kills)
        say(f"{processes} processes, kill {number + 1} at step {step}")
        run = start(project, processes, output)
        while run.poll() is None and max(losses(project / output), default=0) < step:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.2))
        kill(run)
        killed.append(max(losses(project / output)))
    say(f"{processes} processes, to the end")
    if start(project, processes, output).wait():
        sys.exit((project / f"{processes}.log").read_text()[-3000:])
    weights = (project / output / "model" / "model.safetensors").read_bytes()
    digest = hashlib.sha256(weights).hexdigest()
    return {"losses": losses(project / output), "sha256": digest, "killed_after_steps": killed}


def train_plain(project: Path) -> dict[str, list[float]]:
    """The losses of plain.py on 1, 2 and 4 processes."""
    folder, options = project / "plain", {"cwd": project, "env": environment(**INSTRUCTIONS)}
    folder.mkdir()
    prepare = [sys.executable, "-c", PREPARE, str(folder), *FLAGS]
    subprocess.run(prepare, check=True, **options)
    found = {}
    for processes in (1, 2, 4):
        say(f"plain Accelerate, {processes} processes")
        words = launch(processes, str(HERE / "plain.py"), str(folder))
        command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", *words]
        subprocess.run(command, check=True, **options)
        name = "1 process" if processes == 1 else f"{processes} processes"
        found[name] = json.loads((folder / f"losses-{processes}.json").read_text())
    return found


def ask(project: Path, *words: str) -> int:
    """The exit code of a verb."""
    command = [sys.executable, "-m", "samestep", *words]
    return subprocess.run(command, cwd=project, env=environment(**INSTRUCTIONS)).returncode


def write_receipt(project: Path) -> str:
    """Writes the receipt of the run on one process; the last entry of its chain."""
    if ask(project, "receipt", "runs/1-0", "--output", str(RECEIPT)):
        sys.exit("the run has no receipt")
    return json.loads(RECEIPT.read_text())["chain"]


def differences(curves: list[list[float]]) -> list[float]:
    """By step, the largest difference from the first curve."""
    longest = max(len(curve) for curve in curves[1:])
    pairs = [[(c[i], curves[0][i]) for c in curves[1:] if i < len(c)] for i in range(longest)]
    return [max(abs(mine - first) for mine, first in each) for each in pairs]


def draw(report: dict, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ours = {name: [*run["losses"].values()] for name, run in report["runs"].items()}
    figure, axes = pyplot.subplots(
        2, 2, figsize=(12, 6), sharex=True, sharey="row", height_ratios=(3, 1)
    )
    titles = (
        "train.py, exact: true",
        "plain Accelerate script, 8 rows per process (split_batches=False)",
    )
    shown = zip(axes.T, titles, (ours, report["plain"]), (14, 2), strict=True)
    for (upper, lower), title, curves, width in shown:
        for number, ((name, curve), color) in enumerate(zip(curves.items(), COLORS, strict=False)):
            wide = max(width - 4 * number, 2)
            steps = range(1, len(curve) + 1)
            upper.plot(steps, curve, color=color, linewidth=wide, label=name)
        apart = differences([*curves.values()])
        lower.plot(range(1, len(apart) + 1), apart, color="#374151", linewidth=1.5)
        upper.set_title(title, fontsize=12)
        upper.legend(fontsize=10, edgecolor="none", framealpha=1, loc="upper right")
        lower.set(xlabel="step", xlim=(0, STEPS + 1))
        text = f"largest difference from the same step on 1 process: {max(apart):.3g}"
        lower.set_title(text, fontsize=10, loc="right")
    upper, lower = axes[:, 0]
    for step in [step for run in report["runs"].values() for step in run["killed_after_steps"]]:
        upper.axvline(step, color=COLORS[-1], linewidth=1, linestyle=":")
        place = {"transform": upper.get_xaxis_transform(), "fontsize": 8}
        upper.text(step, 0.02, " kill", color=COLORS[-1], **place)
    upper.set_ylabel("training loss")
    lower.set_ylabel("difference")
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, dpi=100)


def write(report: dict) -> None:
    (DOCS / "reproducible.json").write_text(json.dumps(report, indent=1) + "\n")
    draw(report, DOCS / "reproducible.png")
    print(f"docs/reproducible.png, whose runs took {report['seconds']} s")


def main() -> None:
    began, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="figure"))
    try:
        project = bake(folder)
        if "--audit" in sys.argv:
            words = ["--steps", "0:20", "--processes", "2", "--anyway"]
            sys.exit(ask(project, "audit", str(RECEIPT), *words))
        if "--plain" in sys.argv:
            report = json.loads((DOCS / "reproducible.json").read_text())
            write(report | {"plain": train_plain(project)})
            return
        runs = {"1 process": train(project, 1)}
        if "--receipt" in sys.argv:
            known = json.loads((DOCS / "reproducible.json").read_text())["runs"]["1 process"]
            if known != json.loads(json.dumps(runs["1 process"])):
                sys.exit("the losses are not those of docs/reproducible.json: make figure")
            write_receipt(project)
            return
        runs |= {f"{number} processes": train(project, number) for number in (2, 4)}
        runs[f"2 processes, killed {KILLS} times"] = train(project, 2, KILLS)
        chain = write_receipt(project)
        plain = train_plain(project)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    steps = range(1, STEPS + 1)
    by_step = [[run["losses"][step] for run in runs.values()] for step in steps]
    largest = max(max(values) - min(values) for values in by_step)
    digests = {run["sha256"] for run in runs.values()}
    if len(digests) > 1 or largest > 0:
        sys.exit(f"the runs differ by {largest}, their weights are {digests}")
    report = {"command": "make figure", **about_machine(), "load": os.getloadavg()[0]}
    report |= {"seconds": round(time.monotonic() - began), "recipe": RECIPE}
    report |= {"largest_difference": largest, "sha256": digests.pop()}
    report |= {"chain": chain, "runs": runs, "plain": plain}
    write(report)


if __name__ == "__main__":
    main()
