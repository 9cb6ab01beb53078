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
_OF_LOSS = (("eval_loss", "o--", "validation"), ("unigram_loss", "x:", "unigram loss"))
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
    # Computed tokens are nearly all tokens: their panel would repeat that one.
    rates = [key for key in of_train if key.endswith(RATE) and not key.startswith("computed_")]
    rates = ["loss", "lr", *dict.fromkeys(rates)]
    keys = [*rates, *list(dict.fromkeys(filter(_is_score, of_evals)))[:_MAX_SCORES]]
    rows = len(keys) // 2  # the loss beside two columns of the others
    figure = Figure(figsize=(13, max(2.2 * rows, 4.4)), dpi=120, layout="constrained")
    grid = figure.add_gridspec(rows, 4)
    places = [grid[:, :2], *(grid[i // 2, 2 + i % 2] for i in range(len(keys) - 1))]
    panels = dict(zip(keys, map(figure.add_subplot, places), strict=True))
    for number, (run, (train, evals)) in enumerate(zip(runs, data, strict=True)):
        name = one_line(run.resolve().name if len(runs) == 1 else run, 50)
        later = len(runs) - 1 - number  # runs that are drawn over this one, which is wider
        look: Any = {"color": f"C{number % 10}", "linewidth": 1.5 + 2.5 * min(later, 3)}
        look |= {"alpha": 0.45 if later else 1.0, "markersize": 4 + look["linewidth"]}
        for key, axes in panels.items():
            of_key = train if key in rates else evals
            cells = column(of_key, key)
            style = "s-" if sum(map(math.isfinite, cells)) == 1 else "-"  # a point has no line
            axes.plot(list(of_key), cells, style, label=name, **look)
        for key, style, label in _OF_LOSS:
            if any(map(math.isfinite, cells := column(evals, key))):
                panels["loss"].plot(list(evals), cells, style, label=f"{name}, {label}", **look)
    for key, axes in panels.items():
        label = one_line(key.replace(RATE, " / s").replace("_", " "), 24)
        axes.set(ylabel=label, xlabel="optimizer step")
    panels["loss"].legend(fontsize="small")
    return save_figure(figure, output)
