"""Figures of a run, or of several: loss, scores, learning rate and throughput."""

import math
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from samestep.base import run_folder
from samestep.base.console import one_line
from samestep.base.pictures import save_figure

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
    lines = run_folder.read_metrics(run)  # of a step that was repeated, the last one counts
    train: Rows = {line["step"]: line for line in lines if "loss" in line}
    evals: Rows = {line["step"]: line for line in lines if "eval_loss" in line}
    if not train:
        raise ValueError(f"{file} has no training line yet; the first comes after log_every steps")
    return dict(sorted(train.items())), dict(sorted(evals.items()))


def column(rows: Rows, key: str) -> list[float]:
    """The value of each row; NaN, a gap in the curve, where it is not a finite number."""
    cells = [row.get(key) for row in rows.values()]
    return [c if isinstance(c, int | float) and math.isfinite(c) else math.nan for c in cells]


def _find_panels(data: list[tuple[Rows, Rows]]) -> list[str]:
    """The keys that get a panel: the loss, the learning rate, throughputs, and some scores. Of a
    single source its loss is one, eval_loss/NAME."""
    scores: dict[str, None] = {}
    rates: dict[str, None] = {}
    for train, evals in data:
        for key in [key for row in evals.values() for key in row]:
            of_source = "/" in key and not key.startswith("eval_loss/")
            if key not in _NOT_SCORES and not key.endswith(RATE) and not of_source:
                scores[key] = None
        rates |= dict.fromkeys(key for row in train.values() for key in row if key.endswith(RATE))
    return ["loss", "lr", *rates, *list(scores)[:_MAX_SCORES]]


@rc_context(_STYLE)
def draw(runs: list[Path], output: Path) -> Path:
    """Draws one run, or compares several, in the file `output`, as was logged; returns it.

    Raises ValueError if there is nothing to draw.
    """
    data = [read_metrics(run) for run in runs]
    keys = _find_panels(data)
    figure = Figure(figsize=(8, 2.2 * len(keys)), dpi=150, layout="constrained")
    panels = figure.subplots(len(keys), sharex=True)
    for number, (run, (train, evals)) in enumerate(zip(runs, data, strict=True)):
        name = one_line(run.resolve().name if len(runs) == 1 else run, 50)
        color = f"C{number % 10}"
        for axes, key in zip(panels, keys, strict=True):
            rows = train if key in ("loss", "lr") or key.endswith(RATE) else evals
            axes.plot(list(rows), column(rows, key), color=color, label=name)
        # Evaluations have dots, since a single one has no line.
        losses = column(evals, "eval_loss")
        panels[0].plot(list(evals), losses, "o--", color=color, label=f"{name}, validation")
    for axes, key in zip(panels, keys, strict=True):
        axes.set_ylabel(one_line(key.replace(RATE, " / s").replace("_", " "), 24))
    panels[0].legend(fontsize="small")
    panels[-1].set_xlabel("optimizer step")
    return save_figure(figure, output)
