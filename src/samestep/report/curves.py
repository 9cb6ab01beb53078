"""Figures of a run, or of several: loss, scores, learning rate and throughput."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from samestep.base import run_folder
from samestep.base.console import one_line
from samestep.base.pictures import save_figure

Rows = dict[int, dict[str, Any]]  # lines of metrics.jsonl by their step

DASHES = ["-", "--", ":", "-."]  # the next one each time matplotlib's ten colors are used up
MAX_SCORES = 6  # panels of scores
RATE = "_per_second"  # ends the names of throughputs
# A name may contain dollars, which would begin a formula.
STYLE: Any = {"text.parse_math": False, "axes.grid": True, "grid.alpha": 0.4, "font.size": 9}
NOT_SCORES = ("step", "samples", "epoch", "eval_loss", "unigram_loss")  # keys of evaluation lines


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


def smooth(values: list[float]) -> list[float]:
    """Means over a centered window of about 8 % of the values, which do not lag. Gaps stay.

    The ends are mirrored through their last points, so that a steep start is not flattened.
    """
    reach = len(values) // 25
    series = pd.Series(np.pad(values, reach, mode="reflect", reflect_type="odd"))
    means = series.rolling(2 * reach + 1, center=True, min_periods=1).mean().where(series.notna())
    return means[reach : reach + len(values)].tolist()


def find_panels(data: list[tuple[Rows, Rows]]) -> list[str]:
    """The keys that get a panel: scores, the learning rate, throughputs.

    Of a single source it is its loss, eval_loss/NAME; its other scores are left out.
    """
    scores: dict[str, None] = {}
    rates: dict[str, None] = {}
    for train, evals in data:
        for key in [key for row in evals.values() for key in row]:
            of_source = "/" in key and not key.startswith("eval_loss/")
            if key not in NOT_SCORES and not key.endswith(RATE) and not of_source:
                scores[key] = None
        rates |= dict.fromkeys(key for row in train.values() for key in row if key.endswith(RATE))
    return [*list(scores)[:MAX_SCORES], "lr", *rates]


def plot(axes: Axes, rows: Rows, values: list[float], **style: Any) -> None:
    """Draws a curve over the steps. Few points get dots, since a single one has no line."""
    dots: dict[str, Any] = {"marker": "o", "markersize": 4} if len(values) < 40 else {}
    axes.plot(list(rows), values, **dots, **style)


def final(values: list[float]) -> str:
    """The last value of a curve, in four digits; a dash if there is none."""
    return f"{values[-1]:#.4g}" if values else "–"


@rc_context(STYLE)
def draw(runs: list[Path], output: Path) -> Path:
    """Draws one run, or compares several, in the file `output`; returns it.

    Raises ValueError if there is nothing to draw.
    """
    data = [read_metrics(run) for run in runs]
    single, keys = len(runs) == 1, find_panels(data)
    names = [one_line(run.resolve().name if single else run, 50) for run in runs]

    # Make the panels beside the loss, which share its steps. 160 dpi: a README shows half of them.
    height = max(4.5, 1.25 * len(keys)) + (0 if single else 0.2 * len(runs))
    figure = Figure(figsize=(12, height), dpi=160, layout="constrained")
    grid = figure.add_gridspec(len(keys), 2, width_ratios=[3, 2])
    loss_axes = figure.add_subplot(grid[:, 0])
    panels = [figure.add_subplot(grid[row, 1], sharex=loss_axes) for row in range(len(keys))]

    for i, (name, (train, evals)) in enumerate(zip(names, data, strict=True)):
        style: dict[str, Any] = {"color": f"C{i % 10}", "linestyle": DASHES[i // 10 % len(DASHES)]}
        losses, scored = column(train, "loss"), column(evals, "eval_loss")
        if single:
            plot(loss_axes, train, losses, alpha=0.4, label="training, as logged", **style)
            plot(loss_axes, train, smooth(losses), label="training, smoothed", **style)
            if scored:
                plot(loss_axes, evals, scored, color="C1", label=f"validation {final(scored)}")
            unigram = column(evals, "unigram_loss")[-1:]
            if unigram and not math.isnan(unigram[0]):
                label = f"unigram loss {final(unigram)}"
                loss_axes.axhline(unigram[0], color="grey", linestyle="--", label=label)
        else:
            plot(loss_axes, train, smooth(losses), linewidth=0.8, alpha=0.5, **style)
            plot(loss_axes, evals, scored, label=f"{final(scored)}   {name}", **style)
        for axes, key in zip(panels, keys, strict=True):
            rows = train if key == "lr" or key.endswith(RATE) else evals
            plot(axes, rows, column(rows, key), **style)

    # Title and legend are above the panels, where they hide no curve.
    title = names[0] if single else "validation loss, and training loss in faint"
    loss_axes.set_title(title, loc="left", fontsize="medium")
    figure.legend(loc="outside upper left", ncols=2 if single else 1, frameon=False)
    loss_axes.set_ylabel("loss")
    for axes, key in zip(panels, keys, strict=True):
        label = {"lr": "learning rate"}.get(key, key.replace(RATE, " / s").replace("_", " "))
        axes.set_ylabel(one_line(label, 24), fontsize="x-small")
        if key == "lr" or key.endswith(RATE):
            axes.set_ylim(0, None)
    for axes in panels[:-1]:
        axes.tick_params(labelbottom=False)
    for axes in (loss_axes, panels[-1]):
        axes.set_xlabel("optimizer step")
    panels[-1].xaxis.set_major_locator(MaxNLocator(10, integer=True, min_n_ticks=1))
    figure.align_ylabels()
    return save_figure(figure, output)
