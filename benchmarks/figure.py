"""Draws the figure of README.md: losses on 1, 2 and 4 processes, beside a plain Accelerate script.

    make figure      # in the template: docs/reproducible.png, its numbers and its receipt
    make receipt     # the first of its runs alone: docs/receipt.json, unless a loss differs
    make audit       # trains 20 steps of that receipt on 2 processes, and compares the states

Each run trains the same recipe with `exact: true`, on CPU processes. The last one is killed with
kill -9, and resumed by the same command, until it has been killed five times. The program ends with
an error where the losses or the weights of two runs differ. Kernels and BLAS take the instructions
that each x86-64 has: others would round in another way. plain.py trains the same model for an epoch
on the 1,600 rows of these runs, in their order: with the global batch fixed, and with a batch size
for each process. On one process its losses are those of train.py: to 1e-6 at first, until the
training has amplified the rounding.
"""

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas
import psutil
import torch
from matplotlib.figure import Figure

import work
from compare import HERE, about_machine, bake, environment, prepare, say
from work import SIZES

DOCS = HERE.parent / "docs"
NUMBERS = DOCS / "reproducible.json"
RECEIPT = str(DOCS / "receipt.json")
STEPS, KILLS = 200, 5
INSTRUCTIONS = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}
FLAGS = work.flags(
    SIZES["small"],
    exact="true",
    max_steps=STEPS,
    micro_batch_size=2,
    learning_rate=1e-2,
    lr_schedule="cosine",
    warmup_steps=10,
    save_every=10,
    keep_every=50,
    log_every=1,
)
RECIPE = {f.removeprefix("--"): v for f, v in zip(FLAGS[::2], FLAGS[1::2], strict=True)}
COLORS = ("#bfdbfe", "#60a5fa", "#1d4ed8", "#c2410c")


def start(project: Path, processes: int, *words: str) -> subprocess.Popen:
    """A script under accelerate launch."""
    hardware = "cpu" if processes == 1 else "cpu_multi"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    command += [f"configs/accelerate/{hardware}.yaml", "--num_processes", str(processes), *words]
    with open(project / f"{processes}.log", "a") as log:
        return subprocess.Popen(command, cwd=project, env=environment(), stdout=log, stderr=log)


def finish(project: Path, processes: int, *words: str) -> None:
    """Runs a script to its end; where it fails, that is the end."""
    say(f"{processes} processes, to the end: {words[0]}")
    if start(project, processes, *words).wait():
        sys.exit((project / f"{processes}.log").read_text()[-3000:])


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
    words = ["train.py", "--output_dir", output, *FLAGS]
    for number in range(kills):
        step = STEPS * number // kills + draw.randint(3, STEPS // kills)
        say(f"{processes} processes, kill {number + 1} at step {step}")
        run = start(project, processes, *words)
        while run.poll() is None and max(losses(project / output), default=0) < step:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.2))
        kill(run)
        killed.append(max(losses(project / output)))
    finish(project, processes, *words)
    weights = (project / output / "model" / "model.safetensors").read_bytes()
    digest = hashlib.sha256(weights).hexdigest()
    return {"losses": losses(project / output), "sha256": digest, "killed_after_steps": killed}


def train_plain(project: Path) -> dict[str, dict[str, list[float]]]:
    """The losses of plain.py on 1, 2 and 4 processes, in both ways: the rows, their order and the
    model at its beginning are those of the runs."""
    folder, found = project / "plain", {"split": {}, "losses": {}}
    todo = prepare(project, SIZES["small"], folder)
    rows = work.build_dataset(todo)
    torch.save([rows[i] for i in range(STEPS * todo.batch)], folder / "rows.pt")
    work.build_model(todo).save_pretrained(folder / "model")
    for way, flags in (("split", ["--split"]), ("losses", [])):
        for processes in (1, 2, 4):
            finish(project, processes, str(HERE / "plain.py"), str(folder), *flags)
            name = "1 process" if processes == 1 else f"{processes} processes"
            found[way][name] = json.loads((folder / f"{way}-{processes}.json").read_text())
    return found


def ask(project: Path, *words: str) -> None:
    """Runs a subcommand of samestep; where it fails, that is the end."""
    command = [sys.executable, "-m", "samestep", *words]
    code = subprocess.run(command, cwd=project, env=environment()).returncode
    if code:
        sys.exit(code)


def draw(runs: dict, plain: dict[str, dict[str, list[float]]], file: Path) -> None:
    """Losses above, and below the largest difference of a step from the run on one process."""
    ours = {name: [*run["losses"].values()] for name, run in runs.items()}
    figure = Figure(figsize=(14, 6))
    axes = figure.subplots(2, 3, sharex=True, sharey="row", height_ratios=(2, 1))
    parts = (
        ("train.py, exact: true", ours, 14),
        ("plain script, global batch of 8 (split_batches=True)", plain["split"], 2),
        ("plain script, 8 rows per process (the default)", plain["losses"], 2),
    )
    for (upper, lower), (title, curves, width) in zip(axes.T, parts, strict=True):
        table = pandas.DataFrame({name: pandas.Series(curve) for name, curve in curves.items()})
        steps = table.index + 1
        for number, name in enumerate(table):
            wide = max(width - 4 * number, 2)
            upper.plot(steps, table[name], color=COLORS[number], linewidth=wide, label=name)
        first = table.pop("1 process")
        apart = table.sub(first, axis=0).abs().max(axis=1)
        lower.plot(steps, apart, color="#374151", linewidth=1.5)
        upper.set_title(title, fontsize=11)
        legend = upper.legend(fontsize=10, edgecolor="none", loc="upper right")
        for line in legend.get_lines():
            line.set_linewidth(4)
        lower.set(xlabel="step", xlim=(0, STEPS + 1))
        text = f"largest difference from the same step on 1 process: {apart.max():.2g}"
        lower.set_title(text, fontsize=10, loc="right")
        if rest := sorted({len(curve) for curve in curves.values()} - {len(first)}):
            words = f"{len(first)}, {rest[-1]} and {rest[0]} steps: not the same training"
            lower.text(0.99, 0.06, words, transform=lower.transAxes, ha="right", fontsize=8)
    upper, lower = axes[:, 0]
    for step in [step for run in runs.values() for step in run["killed_after_steps"]]:
        upper.axvline(step, ymax=0.6, color=COLORS[-1], linewidth=1, linestyle=":")
        place = {"transform": upper.get_xaxis_transform(), "fontsize": 8}
        upper.text(step, 0.02, " kill", color=COLORS[-1], **place)
    upper.set_ylabel("training loss")
    lower.set_ylabel("difference")
    lower.set_yscale("symlog", linthresh=1e-7)
    lower.set_ylim(-3e-8, 2)
    lower.set_yticks([0, 1e-6, 1e-4, 1e-2, 1], ["0", "1e-6", "1e-4", "0.01", "1"])
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, dpi=100)


def make_figure(project: Path) -> None:
    """Writes the picture, its numbers and its receipt."""
    began, report = time.monotonic(), {"command": "make figure", **about_machine()}
    first = train(project, 1)
    runs = {"1 process": first}
    runs |= {f"{number} processes": train(project, number) for number in (2, 4)}
    runs[f"2 processes, killed {KILLS} times"] = train(project, 2, KILLS)
    for name, run in runs.items():
        if (run["losses"], run["sha256"]) != (first["losses"], first["sha256"]):
            sys.exit(f"{name}: the losses or the weights are not those of 1 process")
    plain = train_plain(project)
    report |= {"seconds": round(time.monotonic() - began), "recipe": RECIPE}
    report |= {"runs": runs, "plain": plain["losses"], "plain_split": plain["split"]}
    ask(project, "receipt", "runs/1-0", "--output", RECEIPT)
    NUMBERS.write_text(json.dumps(report, indent=1) + "\n")
    draw(runs, plain, NUMBERS.with_suffix(".png"))
    print(f"docs/reproducible.png, whose runs took {report['seconds']} s")


def make_receipt(project: Path) -> None:
    """Writes the receipt of the first run alone, unless it is not that of the figure."""
    run, known = train(project, 1), json.loads(NUMBERS.read_text())["runs"]["1 process"]
    if json.loads(json.dumps(run)) != known:
        sys.exit("the losses are not those of docs/reproducible.json: make figure")
    ask(project, "receipt", "runs/1-0", "--output", RECEIPT)


def main() -> None:
    os.environ.update(INSTRUCTIONS)  # of this process, and of those that it starts
    with tempfile.TemporaryDirectory(prefix="figure", ignore_cleanup_errors=True) as folder:
        project = bake(Path(folder))
        if "--audit" in sys.argv:
            ask(project, "audit", RECEIPT, *"--steps 0:20 --processes 2 --anyway".split())
        elif "--receipt" in sys.argv:
            make_receipt(project)
        else:
            make_figure(project)


if __name__ == "__main__":
    main()
