"""Measures what the recipe `finetune` takes off the held-out loss of few rows.

    make bench-small                                       # in the template: a table, a .json
    python benchmarks/small_data.py --cases chats-49       # one of them

A small model of each task is trained first, by the default recipe, on bundled data. Then a case is
fine-tuned: by the recipe's own line; with the flags that a line of this run advises; and with four
pairs of rate and steps. The rows are of Python's library, dates and digits, those held out of the
same source. The loss of a new head counts from equal probabilities of the classes.
"""

import argparse
import json
import math
import random
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import compare

HELD_OUT = 50
PAIRS = (("1e-4", "80"), ("3e-4", "80"), ("1e-3", "80"), ("1e-3", "200"))  # rate, steps
# Of preferences, whose model is pulled away from where it was.
SOFT_PAIRS = (("5e-6", "80"), ("5e-5", "80"), ("5e-5", "200"), ("2e-4", "80"))
BASES = {
    "causal_lm": "--max_steps 300 --task.context_length 256 --global_batch_size 8".split(),
    "text_classification": "--max_steps 100".split(),
    "image_classification": "--max_steps 300".split(),
    "seq2seq": "--max_steps 600".split(),
}
COUNTS, CHATS = (20, 49, 200, 1000), ("--task.context_length", "256")
# Task, task of the pretrained model, rows to train on, new classes; further flags.
CASES: dict[str, tuple] = {
    **{f"chats-{count}": ("causal_lm", "causal_lm", count, 0, *CHATS) for count in COUNTS},
    "texts-40": ("text_classification", "text_classification", 40, 4, "--task.max_length", "256"),
    "images-30": ("image_classification", "image_classification", 30, 2),
    "pairs-60": ("seq2seq", "seq2seq", 60, 0),
    "preferences-60": ("preference", "causal_lm", 60, 0, "--task.max_length", "128"),
}


def rows_of(task: str) -> Iterator[dict]:
    """Rows that no pretrained model has seen in this form."""
    from samestep.data import demo_data

    if task == "causal_lm":
        yield from demo_data.docstring_rows("chat")
    elif task == "preference":
        yield from demo_data.docstring_rows("pair")
    elif task == "seq2seq":  # the day first
        for row in demo_data.date_rows():
            year, month, day = row["target"].split("-")
            yield {**row, "target": f"{day}.{month}.{year}"}
    elif task == "image_classification":
        for row in demo_data.digit_rows():
            yield {"image": row["image"]["bytes"], "label": ["even", "odd"][row["label"] % 2]}
    else:  # functions of other packages than those of the pretrained model
        library = Path(sysconfig.get_path("stdlib"))
        for name in ("http", "logging", "tkinter", "urllib"):
            for file in sorted((library / name).glob("*.py")):
                parts = re.split(r"\n(?=    def |def )", file.read_text("utf-8"))[1:]
                yield from ({"text": part, "label": name} for part in parts if len(part) > 120)


def write_rows(task: str, count: int, folder: Path) -> list[str]:
    """Rows to train on and to evaluate on, as files; the flags that name them."""
    rows = [*rows_of(task)]
    random.Random(0).shuffle(rows)
    parts = iter(rows)
    files = []
    for name, number in (("held", HELD_OUT), ("mine", count)):
        chosen = [*islice(parts, number)]
        folder.mkdir(parents=True, exist_ok=True)
        for i, row in enumerate(chosen):
            if "image" in row:
                (folder / f"{name}-{i}.bmp").write_bytes(row["image"])
                row["image"] = f"{name}-{i}.bmp"
        files.append(folder / f"{name}.jsonl")
        files[-1].write_text("".join(json.dumps(row) + "\n" for row in chosen))
    return ["--task.validation_data", str(files[0]), "--task.data", str(files[1])]


def train(project: Path, *words: str) -> str:
    """What train.py prints."""
    env = compare.environment()
    command = [sys.executable, "train.py", *words]
    result = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"train.py {' '.join(words)} failed:\n{(result.stdout + result.stderr)[-3000:]}")
    return result.stdout + result.stderr


def loss_of(output: Path) -> float:
    """The last eval_loss of a run."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line["eval_loss"] for line in lines if "eval_loss" in line][-1]


def measure_case(
    name: str, asked: argparse.Namespace, projects: dict[str, Path], folder: Path
) -> dict:
    """The loss before, and after each of the runs of a case."""
    task, base, count, classes, *more = CASES[name]
    project, runs = projects[task], folder / "runs" / name
    model = projects[base] / "runs" / "base" / "model"
    given = ["--config", "configs/train/finetune.yaml", "--tracker", "none", *more]
    given += ["--task.model_name_or_path", str(model), "--micro_batch_size", "16"]
    given += [*write_rows(task, count, folder / name), "--check_export", "false"]
    given += ["--eval_every", "0", "--save_every", "0", "--num_workers", "0"]

    def run(kind: str, *words: str) -> str:
        return train(project, *given, "--output_dir", str(runs / kind), *words)

    found = {"rows": count, "before": math.log(classes) if classes else 0.0}
    printed = run("own")
    lines = [json.loads(line) for line in (runs / "own" / "metrics.jsonl").open()]
    first = next(line["few_rows_loss"] for line in lines if "few_rows_loss" in line)
    found |= {"first": first, "before": found["before"] or first, "own": loss_of(runs / "own")}
    found["said"] = [line for line in printed.splitlines() if " give " in line or "epochs" in line]
    advice = [line.partition(" give ")[2] for line in found["said"] if "--learning_rate" in line]
    if advice:
        run("advised", *advice[-1].partition(" --output_dir")[0].split())
        found["advised"] = loss_of(runs / "advised")
    pairs = SOFT_PAIRS if task == "preference" else PAIRS
    for rate, steps in () if asked.without_pairs else pairs:
        flags = ["--learning_rate", rate, "--max_steps", steps, "--global_batch_size", "8"]
        run(f"{rate}-{steps}", *flags)
        found[f"{rate} x {steps}"] = loss_of(runs / f"{rate}-{steps}")
    print(json.dumps({name: found}), flush=True)
    return found


def measure(asked: argparse.Namespace, folder: Path) -> dict:
    """The losses of all cases, by name."""
    projects = {}
    for task in (*BASES, "preference"):
        projects[task] = (asked.projects or folder / "projects").resolve() / task
        if not projects[task].exists():
            projects[task].parent.mkdir(parents=True, exist_ok=True)
            shutil.move(compare.bake(folder / task, task=task), projects[task])
        if task in BASES and not (projects[task] / "runs" / "base" / "model").exists():
            flags = ["--check_export", "false", "--tracker", "none", "--output_dir", "runs/base"]
            train(projects[task], *BASES[task], "--eval_every", "0", "--save_every", "0", *flags)
    losses = {name: measure_case(name, asked, projects, folder) for name in asked.cases}
    return {"losses": losses}


def describe(report: dict) -> str:
    """The table: losses, and what each run takes off as a part of what the best pair does."""
    columns = ["rows", "before", "recipe", "advised", "best pair", "recipe takes off", "advised"]
    table = []
    for name, found in report["losses"].items():
        pairs = {key: loss for key, loss in found.items() if " x " in key}
        pairs = pairs or {"without": found["own"]}
        best = min(pairs, key=lambda key: pairs[key])
        most = found["before"] - pairs[best]
        advised = found.get("advised", found["own"])
        parts = [f"{(found['before'] - loss) / most:.0%}" for loss in (found["own"], advised)]
        losses = [f"{loss:.4f}" for loss in (found["before"], found["own"], advised)]
        table.append([name, *losses, f"{pairs[best]:.4f} ({best})", *parts])
    return compare.markdown(columns, table)


def main() -> None:
    parser = compare.parser_of(__doc__, "small-data")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--without_pairs", action="store_true", help="the recipe and its advice")
    parser.add_argument("--projects", type=Path, help="folder that keeps the pretrained models")
    compare.publish(parser.parse_args(), measure, describe)


if __name__ == "__main__":
    main()
