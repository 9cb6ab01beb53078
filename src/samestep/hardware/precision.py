"""Trains the same steps in fp32 and in mixed precision: speed, memory, losses and scores."""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, median

import torch

from samestep.base.files import remove
from samestep.hardware.project import Project
from samestep.hardware.report import Section
from samestep.processes.ranks import Failed, Ranks, UserError, as_user_error
from samestep.report.curves import draw

WARM_UP = 2  # lines of metrics that do not count
LAST = 5  # lines of metrics whose mean loss is that of the end


@as_user_error()
def run(
    options: argparse.Namespace, project: Project | None, ranks: Ranks, device: torch.device
) -> Section:
    """Trains twice on one device, each run in a process of its own, and compares the runs."""
    settings = {
        "max_steps": options.steps,
        "num_epochs": 0,
        "eval_every": max(options.steps // 4, 1),
        "save_every": 0,
        "log_every": max(options.steps // 50, 1),
        "tracker": "none",
        "resume": "never",
    }
    for name in (word.removeprefix("--").partition("=")[0] for word in options.flags):
        if name in (*settings, "output_dir", "check", "eval_only"):
            advice = "give --steps" if name in ("max_steps", "num_epochs") else "leave it out"
            raise UserError(f"precision decides on --{name} itself; {advice}")
    flags = [f"--{name}={value}" for name, value in settings.items()]
    folder = options.report / "precision"
    mark = folder / ".of-hardware"
    if folder.exists() and not mark.exists():  # a folder of someone else is not replaced
        raise UserError(f"{folder} has other content; remove it, or give another --report")
    remove(folder)
    mark.mkdir(parents=True)
    runs = {"fp32": folder / "fp32", options.mixed: folder / options.mixed}
    for format, output in reversed(runs.items()):  # fp32 last: it is never refused
        env = os.environ | {"ACCELERATE_MIXED_PRECISION": format.replace("fp32", "no")}
        command = [sys.executable, "train.py", *options.flags, *flags, f"--output_dir={output}"]
        code = subprocess.run(command, env=env).returncode
        if code:
            raise (UserError if code == 2 else Failed)(f"the run in {format} ended with {code}")
    section = Section("precision", {"device": str(device), "steps": str(options.steps)})
    section.facts |= compare(runs)
    section.lines.append(f"curves: {draw([*runs.values()], options.report / 'precision.png')}")
    return section


def compare(runs: dict[str, Path]) -> dict[str, dict[str, float]]:
    """Figures of both runs by what they are, with a ratio or a difference."""
    lines = [
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in runs.values()
    ]
    trained = [[each for each in own if "grad_norm" in each] for own in lines]
    scores = [[each for each in own if "eval_loss" in each][-1:] for own in lines]
    losses = [  # null: not finite
        [math.nan if each["loss"] is None else each["loss"] for each in own] for own in trained
    ]
    first, other = runs
    found: dict[str, dict[str, float]] = {}

    def add(name: str, values: Iterable[float], ratio: bool = False) -> None:
        was, now = values
        change = {f"{other} / {first}": now / was} if ratio else {"difference": now - was}
        found[name] = {first: was, other: now, **change}

    for key in (key for key in trained[0][-1] if key.endswith("s_per_second")):
        add(key, (median(each[key] for each in own[WARM_UP:] or own) for own in trained), True)
    add("peak_memory_gb", (own[-1]["peak_memory_gb"] for own in trained), True)
    add("loss, mean of the last lines", (mean(own[-LAST:]) for own in losses))
    away = [abs(b - a) / (abs(a) or 1) for a, b in zip(*losses, strict=True)]
    found["losses of a step"] = {"largest difference, relative": max(away)}
    for one, its in zip(*scores, strict=True):
        for key, value in one.items():
            if isinstance(value, float) and isinstance(its.get(key), float):
                add(key, (value, its[key]))
    return found
