"""Curves of a run, or of several: loss, scores, learning rate and throughput."""

import json
import math
import os
from difflib import get_close_matches
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, StrMethodFormatter

from samestep.base.console import one_line
from samestep.base.fields import flatten
from samestep.base.pictures import save_figure

Rows = dict[int, dict[str, Any]]  # lines of metrics.jsonl by their step

FORMATS = (".png", ".svg", ".pdf")
DASHES = ["-", "--", ":", "-."]  # the next one each time matplotlib's ten colors are used up
MARKED = 40  # curves with fewer points get dots
MAX_PANELS, MAX_BASELINES = 6, 5  # panels of scores, lines of losses without learning
MAX_NUMBER = 3.5e38  # larger numbers are not drawn: just above the maximum of fp32
# A name may contain dollars, which would begin a formula.
STYLE: Any = {"text.parse_math": False, "axes.grid": True, "grid.alpha": 0.4, "font.size": 9}
NOT_SCORES = ("step", "samples", "epoch", "eval_loss", "unigram_loss")  # keys of evaluation lines
NOT_COMPARED = ("output_dir", "resume", "project", "task.cache_dir")  # settings


# ---- Reading the runs ----------------------------------------------------------------------------


def read_metrics(run: Path) -> tuple[Rows, Rows]:
    """The training lines and the evaluation lines of a run, in the order of their steps.

    Raises ValueError if there is no run, or no training line in it yet.
    """
    file = run / "metrics.jsonl"
    if not file.is_file():
        found = list(run.glob("*/metrics.jsonl")) or list(run.parent.glob("*/metrics.jsonl"))
        near = get_close_matches(str(run), [str(path.parent) for path in found], n=5, cutoff=0)
        problem = f"{run} has no metrics.jsonl" if run.is_dir() else f"there is no folder {run}"
        raise ValueError(f"{problem}; runs near it: {', '.join(near) or 'none'}")
    train: Rows = {}
    evals: Rows = {}
    with open(file, encoding="utf-8", errors="replace", newline="\n") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:  # an incomplete line: killed, or still writing
                continue
            # A resumed run repeats the steps since its checkpoint: the last line of a step counts.
            step = row.get("step") if isinstance(row, dict) else None
            if type(step) is int and 0 <= step < 2**53:  # floats are exact up to here
                if "loss" in row:
                    train[step] = row
                if "eval_loss" in row:
                    evals[step] = row
    if not train:
        raise ValueError(f"{file} has no training line yet; the first comes after log_every steps")
    return dict(sorted(train.items())), dict(sorted(evals.items()))


def column(rows: Rows, key: str) -> list[float]:
    """The value of each row. NaN, a gap in the curve, stands for all but fp32 numbers."""
    cells = [row.get(key) for row in rows.values()]
    return [
        float(c) if type(c) in (int, float) and abs(c) <= MAX_NUMBER else math.nan for c in cells
    ]


def smoothing_window(values: list[float]) -> int:
    """The number of values in a moving average: odd, about 8% of all."""
    return 2 * (len(values) // 25) + 1


def smooth(values: list[float]) -> list[float]:
    """Moving averages over a centred window, so without lag.

    The window shrinks towards both ends: a full one would flatten the steep start.
    """
    sums = [0.0, *accumulate(0.0 if math.isnan(value) else value for value in values)]
    counts = [0, *accumulate(not math.isnan(value) for value in values)]
    means = []
    for i, value in enumerate(values):
        reach = min(i, smoothing_window(values) // 2)
        low, high = i - reach, min(i + reach + 1, len(values))
        known = not math.isnan(value)
        means.append((sums[high] - sums[low]) / (counts[high] - counts[low]) if known else value)
    return means


def is_of_source(key: str, names: Any) -> bool:
    """Whether this score of an evaluation with these scores is that of a single source."""
    score = key.partition("/")[0]
    return score != key and score in names


def find_panels(data: list[tuple[Rows, Rows]]) -> list[str]:
    """The keys that get a panel: scores, the learning rate, throughputs.

    Of a single source it is its loss, eval_loss/NAME; its other scores are left out.
    """
    scores, rates = [], {}
    names = dict.fromkeys(key for _, evals in data for row in evals.values() for key in row)
    for key in names:
        shown = key not in NOT_SCORES and "baseline" not in key and not key.endswith("_per_second")
        if is_of_source(key, names) and not key.startswith("eval_loss/"):
            shown = False
        values = [value for _, evals in data for value in column(evals, key)]
        if shown and not all(map(math.isnan, values)):
            scores.append(key)
    for train, _ in data:
        rates |= dict.fromkeys(k for k in list(train.values())[-1] if k.endswith("_per_second"))
    return [*scores[:MAX_PANELS], "lr", *rates]


def find_baselines(data: list[tuple[Rows, Rows]]) -> list[tuple[str, float]]:
    """The losses that need no learning, in the last evaluations. An accuracy is not a loss."""
    found = set()
    for _, evals in data:
        newest = list(evals.values())[-1] if evals else {}
        for key in newest:
            is_loss = key == "unigram_loss" or ("baseline" in key and "accuracy" not in key)
            if is_loss and not is_of_source(key, newest):
                found.add((one_line(key.replace("_", " "), 50), column(evals, key)[-1]))
    return [each for each in sorted(found) if not math.isnan(each[1])][:MAX_BASELINES]


def differing_settings(runs: list[Path]) -> list[list[str]]:
    """For each run the settings in which the runs differ, as `learning_rate 0.001`."""
    settings: list[dict[str, Any]] = []
    for run in runs:
        try:
            text = (run / "config.yaml").read_text(encoding="utf-8")
            settings.append(flatten(yaml.safe_load(text)))
        except (OSError, ValueError, AttributeError, yaml.YAMLError):  # the others are compared
            settings.append({})
    known = [each for each in settings if each]
    names = dict.fromkeys(name for each in known for name in each if name not in NOT_COMPARED)
    differ = [name for name in names if len({repr(each.get(name)) for each in known}) > 1]

    def show(value: Any) -> str:
        text = value if value and isinstance(value, str) else json.dumps(value, default=str)
        return one_line(text, 40)

    return [[f"{name} {show(each[name])}" for name in differ if name in each] for each in settings]


def short_names(runs: list[Path]) -> list[str]:
    """The last parts of the runs' paths, as many as tell them apart, in at most 50 characters."""
    paths = [Path(os.path.realpath(run)).parts for run in runs]
    length = 1
    while len({path[-length:] for path in paths}) < len(paths):
        length += 1
    return [one_line("/".join(path[-length:]), 50) for path in paths]


# ---- Drawing -------------------------------------------------------------------------------------


def plot(axes: Axes, rows: Rows, values: list[float], **style: Any) -> None:
    """Draws a curve over the steps. Few points get dots, since a single one has no line."""
    dots: dict[str, Any] = {"marker": "o", "markersize": 4} if len(values) < MARKED else {}
    axes.plot(list(rows), values, **dots, **style)


def final(values: list[float]) -> str:
    """The last value of a curve, in four digits; a dash if there is none."""
    return f"{values[-1]:#.4g}" if values else "–"


@rc_context(STYLE)
def draw(runs: list[Path], output: Path) -> Path:
    """Draws one run, or compares several, in the file `output`; returns it.

    Raises ValueError if there is nothing to draw.
    """
    runs = list({os.path.realpath(run): run for run in runs}.values())
    data = [read_metrics(run) for run in runs]
    single, keys = len(runs) == 1, find_panels(data)
    differing = [[]] if single else differing_settings(runs)

    # Make the panels, which share the steps. 200 dpi are twice the pixels that a README shows.
    height = 3.6 + 1.2 * len(keys) + (0 if single else 0.2 * len(runs))
    figure = Figure(figsize=(8, height), dpi=200, layout="constrained")
    FigureCanvasAgg(figure)
    ratios = [3, *[1] * len(keys)]
    loss_axes, *panels = figure.subplots(len(ratios), 1, sharex=True, height_ratios=ratios)

    for i, (name, (train, evals)) in enumerate(zip(short_names(runs), data, strict=True)):
        color, dashes = f"C{i % 10}", DASHES[i // 10 % len(DASHES)]

        # Draw the losses: of a single run what was logged and its mean, too.
        losses, scored = column(train, "loss"), column(evals, "eval_loss")
        if single:
            width = smoothing_window(losses)
            if width > 1:
                plot(loss_axes, train, losses, color=color, alpha=0.4, label="training, as logged")
            label = f"training, mean of {width} values" if width > 1 else "training"
            plot(loss_axes, train, smooth(losses), color=color, label=label)
            label = f"validation {final(scored)}"
            if scored:
                plot(loss_axes, evals, scored, color="C1", label=label)
        else:
            faint: dict[str, Any] = {"linewidth": 0.8, "alpha": 0.5}
            plot(loss_axes, train, smooth(losses), color=color, linestyle=dashes, **faint)
            more = [f"and {len(differing[i]) - 3} more"] if len(differing[i]) > 3 else []
            settings = one_line(", ".join([*differing[i][:3], *more]), 80)
            label = "   ".join(filter(None, [final(scored), name, settings]))
            plot(loss_axes, evals, scored, color=color, linestyle=dashes, label=label)

        # Draw the others. Averaging a throughput would make a slow start look longer.
        for axes, key in zip(panels, keys, strict=True):
            rows = train if key == "lr" or key.endswith("_per_second") else evals
            plot(axes, rows, column(rows, key), color=color, linestyle=dashes)

    for label, value in find_baselines(data):
        loss_axes.axhline(value, color="grey", linestyle="--", label=f"{label} {value:#.4g}")

    # Title and legend are above the panels, where they hide no curve.
    title = short_names(runs)[0] if single else "validation loss, and training loss in faint"
    loss_axes.set_title(title, loc="left", fontsize="medium")
    figure.legend(loc="outside upper left", ncols=2 if single else 1, frameon=False)

    # Format the axes.
    loss_axes.set_ylabel("loss")
    for axes, key in zip(panels, keys, strict=True):
        label = one_line(key.removesuffix("_per_second").replace("_", " "), 24)
        low, high = axes.dataLim.intervaly
        if key == "lr" or key.endswith("_per_second"):
            label = "learning rate" if key == "lr" else f"{label} / s"
            axes.set_ylim(0, None)
        elif single:
            label += f"\n{final(column(data[0][1], key))}"
        if key.endswith("_per_second"):
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        elif 0 < 20 * low < high and high > 1:  # as of perplexities
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_ylabel(label)
    panels[-1].set_xlabel("optimizer step")
    panels[-1].xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    panels[-1].xaxis.set_major_locator(MaxNLocator(10, integer=True, min_n_ticks=1))
    figure.align_ylabels()
    return save_figure(figure, output)
