"""Curves of a run, or of several: loss, scores, learning rate and throughput."""

import json
import math
import os
from collections.abc import Container
from difflib import get_close_matches
from itertools import accumulate
from pathlib import Path
from textwrap import fill
from typing import Any

import yaml
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator, NullFormatter, StrMethodFormatter

from samestep.base.console import one_line
from samestep.base.fields import flatten
from samestep.base.pictures import save_figure

Rows = dict[int, dict[str, Any]]  # lines of metrics.jsonl by their step

COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]  # Okabe-Ito
COLORS += ["#332288", "#7FD42A", "#7B4B2A", "#FF1493", "#999933"]  # far from these in CIELAB
DASHES = ["-", "--", ":", "-."]  # the next one each time the colors are used up
GREY = "#555555"
MARK_TRAINING, MARK_EVALUATIONS = 15, 40  # curves with fewer points get markers
MAX_NUMBER = 3.5e38  # larger numbers are not drawn: just above the maximum of fp32
MAX_LABELS = 5  # baselines in a picture, scores in a panel, units of throughput
NICE = [1, 2, 5, 10]  # steps of the ticks
STYLE: Any = {
    "text.parse_math": False,  # a name may contain dollars
    "lines.linewidth": 1.4,
    "legend.frameon": False,
    "legend.borderaxespad": 0.2,
    "legend.fontsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.xmargin": 0.01,
    "axes.ymargin": 0.05,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
}
FORMATS = (".png", ".svg", ".pdf")
NOT_SCORES = ("step", "samples", "epoch", "eval_loss", "unigram_loss")  # keys of evaluation lines
# Settings that do not change the result. (Asking train.Config would import torch.)
NOT_COMPARED = """output_dir resume timeout num_workers eval_every save_every keep_checkpoints
    log_every export max_skipped_steps check_export tracker project upload_code
    async_save profile_steps task.cache_dir
    task.sample_prompt task.merge_lora task.trust_remote_code""".split()

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
            except (ValueError, RecursionError):  # an incomplete line: killed, or still writing
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


def is_of_source(key: str, names: Container[str]) -> bool:
    """Whether this score of an evaluation with these scores is that of a single source."""
    score = key.partition("/")[0]
    return score != key and score in names


def group_scores(evaluations: list[Rows]) -> list[list[str]]:
    """The names of the runs' scores, a list for each panel: scores between 0 and 1, then others.

    The last panel has the losses of single sources, eval_loss/NAME; their other scores are left
    out.
    """
    inside, outside, losses = [], [], []
    names = dict.fromkeys(key for evals in evaluations for row in evals.values() for key in row)
    for key in names:
        if key not in NOT_SCORES and "baseline" not in key and not key.endswith("_per_second"):
            values = [v for evals in evaluations for v in column(evals, key) if not math.isnan(v)]
            if values and is_of_source(key, names):
                losses += [key] * key.startswith("eval_loss/")
            elif values:
                (inside if 0 <= min(values) <= max(values) <= 1 else outside).append(key)
    groups = [inside, outside] if inside else [outside[:1], outside[1:]]
    return [keys[:MAX_LABELS] for keys in (*groups, losses) if keys]


def read_settings(run: Path) -> dict[str, Any]:
    """The compared settings in config.yaml of a run, by flag; empty if it cannot be read."""
    try:
        settings = flatten(yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError, RecursionError, yaml.YAMLError):
        return {}
    return {name: value for name, value in settings.items() if name not in NOT_COMPARED}


def differing_settings(runs: list[Path]) -> list[list[str]]:
    """For each run the settings in which the runs differ, as `learning_rate 0.001`."""
    settings = [read_settings(run) for run in runs]
    known = [each for each in settings if each]
    names = dict.fromkeys(name for each in known for name in each)
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


def draw_curve(axes: Axes, rows: Rows, values: list[float], **style: Any) -> None:
    """Draws a curve over the steps. Few points get markers, since a single one has no line."""
    if len(values) < MARK_TRAINING:
        style = {"marker": "x", "markersize": 4} | style
    axes.plot(list(rows), values, **style)


def draw_evaluations(axes: Axes, rows: Rows, values: list[float], **style: Any) -> None:
    """Draws a curve with a dot for each evaluation, if there are not too many."""
    dots: dict[str, Any] = {"marker": "o", "markersize": 5.5, "markeredgecolor": "white"}
    axes.plot(list(rows), values, **(dots if len(values) < MARK_EVALUATIONS else {}), **style)


def annotate(axes: Axes, text: str, place: tuple, offset: tuple, **style: Any) -> None:
    """Writes a text beside a place, on a white halo."""
    halo = [withStroke(linewidth=3, foreground="white")]
    look: dict[str, Any] = {"textcoords": "offset points", "path_effects": halo, **style}
    axes.annotate(text, place, offset, fontsize=9, **look)


def draw_scores(axes: Axes, keys: list[str], evaluations: list[Rows]) -> None:
    """Draws a panel of scores. Colours tell the scores of one run apart, or else the runs."""
    single, handles = len(evaluations) == 1, []
    for j, key in enumerate(keys):
        name, shown = one_line(key.replace("_", " "), 40), GREY
        dashes: Any = "-" if single else DASHES[j % len(DASHES)]
        for i, evals in enumerate(evaluations):
            values = column(evals, key)
            color = COLORS[(j + 1 if single else i) % len(COLORS)]
            draw_evaluations(axes, evals, values, color=color, linestyle=dashes)
        if single:
            known = {step: v for step, v in zip(evals, values, strict=True) if not math.isnan(v)}
            end, final = max(known.items())
            name, shown = f"{name} {final:#.4g}", color
        handles.append(Line2D([], [], color=shown, linestyle=dashes, label=name))
    axes.margins(y=0.08)  # for the dots
    label = "scores" if len(keys) > 1 else one_line(keys[0].replace("_", " "), 16)
    axes.set_ylabel(f"validation\n{label}")
    if len(keys) > 1:
        axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(keys))
    elif single:
        annotate(axes, f"{final:#.4g}", (end, final), (8, 0), va="center", color=COLORS[1])
    low, high = axes.dataLim.intervaly
    if 0 < 20 * low < high and high > 1:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=NICE))


@rc_context(STYLE)
def draw(runs: list[Path], output: Path) -> Path:
    """Draws one run, or compares several, in the file `output`; returns it.

    Raises ValueError if there is nothing to draw.
    """
    runs = list({os.path.realpath(run): run for run in runs}.values())
    data = [read_metrics(run) for run in runs]
    single, scores = len(runs) == 1, group_scores([evals for _, evals in data])

    # Make the panels, which share the steps. 200 dpi are twice the pixels that a README shows.
    height = (6 if single else 5.6 + 0.2 * len(runs)) + 1.4 * len(scores)
    figure = Figure(figsize=(8, height), dpi=200)
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.06)
    heights = [3, *[1.2] * len(scores), 1, 1]
    panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    loss_axes, *score_axes, lr_axes, rate_axes = panels

    baselines, units, smoothed = set(), set(), False
    differing = [[]] if single else differing_settings(runs)
    for i, (name, (train, evals)) in enumerate(zip(short_names(runs), data, strict=True)):
        style: dict[str, Any] = {"color": COLORS[i % len(COLORS)]}
        style["linestyle"] = DASHES[i // len(COLORS) % len(DASHES)]

        # Draw learning rate and throughput. Averaging would make a slow start look longer.
        draw_curve(lr_axes, train, column(train, "lr"), **style)
        for key in list(train.values())[-1]:
            if key.endswith("_per_second"):
                unit = one_line(key.removesuffix("_per_second").replace("_", " "), 30)
                units.add(fill(unit, 12))  # a longer line would reach the next panel's label
                draw_curve(rate_axes, train, column(train, key), **style, linewidth=0.9)

        # Draw the training loss: if it has many values, their means. A single run shows both.
        losses, label = column(train, "loss"), "training"
        if (width := smoothing_window(losses)) > 1:
            label, smoothed = f"training, mean of {width} values", True
            if single:
                faint: dict[str, Any] = {"linewidth": 0.8, "alpha": 0.4, **style}
                draw_curve(loss_axes, train, losses, **faint, label="training, as logged")
        look: dict[str, Any] = {"linewidth": 0.8, "alpha": 0.7}
        draw_curve(
            loss_axes, train, smooth(losses), **style, **({"label": label} if single else look)
        )

        # Draw the validation loss, and write its final value.
        losses, label = column(evals, "eval_loss"), "validation"
        final = f"{losses[-1]:#.4g}" if losses else "–"
        if single:
            style["color"] = COLORS[1]
        else:
            more = [f"and {len(differing[i]) - 3} more"] if len(differing[i]) > 3 else []
            settings = one_line(", ".join([*differing[i][:3], *more]), 80)
            label = "   ".join(filter(None, [final, name, settings]))
        if losses or not single:
            draw_evaluations(loss_axes, evals, losses, **style, zorder=3, label=label)
        if losses and single:
            place = (max(evals), losses[-1])
            annotate(loss_axes, final, place, (8, 0), va="center", color=style["color"])

        # Collect the losses that need no learning, for one line each. An accuracy is not a loss.
        newest = list(evals.values())[-1] if evals else {}
        for key in newest:
            baseline = key == "unigram_loss" or ("baseline" in key and "accuracy" not in key)
            if baseline and not is_of_source(key, newest):
                baselines.add((one_line(key.replace("_", " "), 50), column(evals, key)[-1]))

    # Draw the baselines, then title and legends: above the panels, where they hide no curve.
    ends = [column(evals, "eval_loss")[-1] for _, evals in data if evals]
    for label, value in sorted(baselines)[:MAX_LABELS]:
        if not math.isnan(value):
            side = -1 if any(end > value for end in ends) else 1  # away from the curves' ends
            loss_axes.axhline(value, color=GREY, linewidth=0.8, linestyle=(0, (5, 4)), zorder=1)
            right = {"xycoords": loss_axes.get_yaxis_transform(), "ha": "right", "color": GREY}
            right["va"] = "bottom" if side > 0 else "top"
            annotate(loss_axes, f"{label} {value:#.4g}", (1, value), (-4, 3 * side), **right)
    loss_axes.margins(y=0.09)  # room for the labels of the baselines
    if single:  # the title is above the legend, since it may be long
        loss_axes.set_title(short_names(runs)[0], loc="left", pad=22, weight="bold")
        loss_axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3)
    else:
        label = "validation loss: its final value, the run"
        label += ", settings that differ" if any(differing) else ""
        lines = [Line2D([], [], color=GREY, label=label)]
        label = "training loss" + (", mean over about 8% of the run" if smoothed else "")
        lines.append(Line2D([], [], color=GREY, linewidth=0.8, label=label))
        handles = [*lines, *loss_axes.get_legend_handles_labels()[0]]
        loss_axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1))
    for axes, keys in zip(score_axes, scores, strict=True):
        draw_scores(axes, keys, [evals for _, evals in data])

    # Format the axes.
    loss_axes.set(ylabel="loss")
    lr_axes.set(ylabel="learning rate", ylim=(0, None))
    lr_axes.ticklabel_format(axis="y", scilimits=(-2, 4))
    rate = " or\n".join(sorted(units)[:MAX_LABELS]) + " / s" if units else "throughput"
    rate_axes.set(xlabel="optimizer step", ylabel=rate, ylim=(0, None))
    rate_axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    rate_axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    rate_axes.xaxis.set_major_locator(MaxNLocator(10, steps=NICE, integer=True, min_n_ticks=1))
    for axes in (lr_axes, rate_axes):
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=NICE))
    figure.align_ylabels()
    return save_figure(figure, output)
