"""Figures of a run, or of several: loss, scores, learning rate and throughput."""

import math
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from samestep.base import run_folder
from samestep.base.console import one_line
from samestep.base.files import save_figure

Rows = dict[int, dict[str, Any]]  # lines of metrics.jsonl by their step

RATE = "_per_second"  # ends the names of throughputs
_MAX_SCORES = 4  # panels of scores
# A name may contain dollars, which would begin a formula.
_STYLE: Any = {"text.parse_math": False, "axes.grid": True, "grid.alpha": 0.4, "font.size": 9}
_NOT_SCORES = ("step", "samples", "epoch", "eval_loss", "unigram_loss")  # keys of evaluation lines


def read_metrics(run: Path) -> tuple[Rows, Rows]:
    """Read the training lines and the evaluation lines of a run, in the order of their steps.

    Raises ValueError if there is no training line in it yet.
    """
    file = run / "metrics.jsonl"
    file.stat()  # raises FileNotFoundError
    lines = sorted(run_folder.read_metrics(run), key=lambda line: line["step"])
    train: Rows = {line["step"]: line for line in lines if "loss" in line}
    evals: Rows = {line["step"]: line for line in lines if "eval_loss" in line}
    if not train:
        raise ValueError(f"{file} has no training line yet; the first comes after log_every steps")
    return train, evals


def column(rows: Rows, key: str) -> list[float]:
    """The value of each row; NaN, a gap in the curve, where it is not a finite number."""
    cells = [row.get(key) for row in rows.values()]
    return [c if isinstance(c, int | float) and math.isfinite(c) else math.nan for c in cells]


def _is_score(key: str) -> bool:
    """Whether it is a number of evaluations that gets a panel; of a source it is its loss."""
    of_source = "/" in key and not key.startswith("eval_loss/")
    return key not in _NOT_SCORES and not key.endswith(RATE) and not of_source


@rc_context(_STYLE)
def draw(runs: list[Path], output: Path) -> Path:
    """Draws one run, or compares several, in the file `output`, as was logged; returns it.

    Raises ValueError if there is nothing to draw.
    """
    data = [read_metrics(run) for run in runs]
    of_train = [key for train, _ in data for row in train.values() for key in row]
    of_evals = [key for _, evals in data for row in evals.values() for key in row]
    rates = ["loss", "lr", *dict.fromkeys(key for key in of_train if key.endswith(RATE))]
    keys = [*rates, *list(dict.fromkeys(filter(_is_score, of_evals)))[:_MAX_SCORES]]
    figure = Figure(figsize=(8, 2.2 * len(keys)), dpi=150, layout="constrained")
    panels = figure.subplots(len(keys), sharex=True)
    for number, (run, (train, evals)) in enumerate(zip(runs, data, strict=True)):
        name = one_line(run.resolve().name if len(runs) == 1 else run, 50)
        color = f"C{number % 10}"
        for axes, key in zip(panels, keys, strict=True):
            rows = train if key in rates else evals
            axes.plot(list(rows), column(rows, key), color=color, label=name)
        # Evaluations have dots, since a single one has no line.
        losses = column(evals, "eval_loss")
        panels[0].plot(list(evals), losses, "o--", color=color, label=f"{name}, validation")
    for axes, key in zip(panels, keys, strict=True):
        axes.set_ylabel(one_line(key.replace(RATE, " / s").replace("_", " "), 24))
    panels[0].legend(fontsize="small")
    panels[-1].set_xlabel("optimizer step")
    return save_figure(figure, output)
