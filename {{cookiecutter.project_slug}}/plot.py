"""Draws the curves of a run, or compares runs: loss, scores, learning rate and throughput.

    python plot.py runs/a                                   writes runs/a/curves.png
    python plot.py runs/a runs/b                            compares them in curves.png, here
    python plot.py runs/a runs/b --output figures/ab.pdf    elsewhere; .png, .svg or .pdf

A run is a folder with a metrics.jsonl, finished or not. train.py draws its own at the end. Of runs
that are compared, the settings that differ are printed.
"""

import argparse
import json
import math
import os
from difflib import get_close_matches
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from tasklib.pictures import save_figure, try_picture
from training.checkpoints import flatten
from training.console import one_line, protect_output

Rows = dict[int, dict[str, Any]]  # lines of metrics.jsonl by their step

COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]  # Okabe-Ito
DASHES = ["-", "--", ":", "-."]  # the next one each time the colors are used up
GREY = "#555555"
FEW, MANY = 15, 40  # from here on, points of training and of evaluations are not marked
LARGEST = 3.5e38  # the largest number that is drawn: a little more than that of fp32
MOST = 5  # baselines in a picture, scores in a panel, units of throughput
ABOVE = {"frameon": False, "borderaxespad": 0.2, "fontsize": 9}  # of legends above a panel
FORMATS = (".png", ".svg", ".pdf")
NO_SCORES = ("step", "samples", "epoch", "eval_loss", "unigram_loss")
# Settings that do not change what is learnt.
IGNORED = """output_dir resume timeout num_workers eval_every save_every keep_checkpoints log_every
    export max_skipped_steps tracker project upload_code task.cache_dir task.sample_prompt
    task.merge_lora task.trust_remote_code""".split()

# ---- Reading the runs ----------------------------------------------------------------------------


def read(run: Path) -> tuple[Rows, Rows]:
    """Returns a run's training lines and its evaluation lines, in the order of their steps."""
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
            except (ValueError, RecursionError):  # torn: the run was killed, or is writing it now
                continue
            # A resumed run repeats the steps since its checkpoint: the last line of a step counts.
            step = row.get("step") if isinstance(row, dict) else None
            if type(step) is int and 0 <= step < 2**53:  # what the axis can tell apart
                if "loss" in row:
                    train[step] = row
                if "eval_loss" in row:
                    evals[step] = row
    if not train:
        raise ValueError(f"{file} has no training line yet; the first comes after log_every steps")
    return dict(sorted(train.items())), dict(sorted(evals.items()))


def column(rows: Rows, key: str) -> list[float]:
    """One value a row; what is not a number of fp32 is NaN, a gap in the curve."""
    cells = [row.get(key) for row in rows.values()]
    return [float(c) if type(c) in (int, float) and abs(c) <= LARGEST else math.nan for c in cells]


def window(values: list[float]) -> int:
    """Of how many values a smoothed one is the mean: 8%, an odd number."""
    return 2 * (len(values) // 25) + 1


def smooth(values: list[float]) -> list[float]:
    """Means over a window: centred, so no lag; of fewer values in the steep start."""
    sums = [0.0, *accumulate(0.0 if math.isnan(value) else value for value in values)]
    counts = [0, *accumulate(not math.isnan(value) for value in values)]
    means = []
    for i, value in enumerate(values):
        reach = min(i, window(values) // 2)
        low, high = i - reach, min(i + reach + 1, len(values))
        known = not math.isnan(value)
        means.append((sums[high] - sums[low]) / (counts[high] - counts[low]) if known else value)
    return means


def score_panels(evaluations: list[Rows]) -> list[list[str]]:
    """The scores of the runs' evaluations, for two panels: those from 0 to 1, and the others."""
    inside, outside = [], []
    for key in dict.fromkeys(key for evals in evaluations for row in evals.values() for key in row):
        if key not in NO_SCORES and "baseline" not in key and not key.endswith("_per_second"):
            values = [v for evals in evaluations for v in column(evals, key) if not math.isnan(v)]
            if values:
                (inside if 0 <= min(values) <= max(values) <= 1 else outside).append(key)
    groups = [inside, outside] if inside else [outside[:1], outside[1:]]
    return [keys[:MOST] for keys in groups if keys]


def settings(run: Path) -> dict[str, Any]:
    """What config.yaml of a run says, by the names of flags; nothing where it cannot be read."""
    file = run / "config.yaml"
    try:
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        found = flatten(yaml.safe_load(text))
    except (OSError, ValueError, AttributeError, RecursionError, yaml.YAMLError):
        return {}
    return {name: value for name, value in found.items() if name not in IGNORED}


def differences(runs: list[Path]) -> list[list[str]]:
    """For each run its settings that are not those of all, as `learning_rate 0.001`."""
    found = [settings(run) for run in runs]
    read = [each for each in found if each]
    every = dict.fromkeys(name for each in read for name in each)
    differ = [name for name in every if len({repr(each.get(name)) for each in read}) > 1]
    return [[f"{name} {shown(each[name])}" for name in differ if name in each] for each in found]


def shown(value: Any) -> str:
    """A setting as it is written in YAML; long ones are cut."""
    return one_line(
        value if value and isinstance(value, str) else json.dumps(value, default=str), 40
    )


def in_short(settings: list[str], longest: int) -> str:
    """The first of some settings, at most three, and the number of the others."""
    number = min(3, len(settings))
    while number > 1 and len(", ".join(settings[:number])) > longest:
        number -= 1
    others = len(settings) - number
    return ", ".join(settings[:number] + [f"and {others} more"] * (others > 0))


def names(runs: list[Path]) -> list[str]:
    """The ends of the runs' paths, as long as it takes to tell them apart; long names are cut."""
    paths = [Path(os.path.realpath(run)).parts for run in runs]
    length = 1
    while len({path[-length:] for path in paths}) < len(paths):
        length += 1
    return [one_line("/".join(path[-length:]), 50) for path in paths]


# ---- Drawing -------------------------------------------------------------------------------------


def plot(axes: Axes, rows: Rows, values: list[float], dots: bool = False, **style: Any) -> None:
    """Draws one curve over the steps; few points are marked, so that one alone can be seen."""
    if dots and len(values) < MANY:
        style |= {"marker": "o", "markersize": 5.5, "markeredgecolor": "white"}
    elif len(values) < FEW:
        style |= {"marker": "x", "markersize": 4}
    axes.plot(list(rows), values, **style)


def draw_scores(axes: Axes, keys: list[str], evaluations: list[Rows], note: dict) -> None:
    """Draws a panel of scores: of one run in a colour each, of several in the runs' colours."""
    alone, handles = len(evaluations) == 1, []
    for j, key in enumerate(keys):
        name = one_line(key.replace("_", " "), 40)
        for i, evals in enumerate(evaluations):
            values = column(evals, key)
            style: dict[str, Any] = {"color": COLORS[(j + 1 if alone else i) % len(COLORS)]}
            style |= {"linewidth": 1.4, "linestyle": "-" if alone else DASHES[j % len(DASHES)]}
            plot(axes, evals, values, dots=True, **style)
        if alone:
            known = {step: v for step, v in zip(evals, values, strict=True) if not math.isnan(v)}
            end, final = max(known.items())
            name = f"{name} {final:#.4g}"
        handles.append(Line2D([], [], **style | ({} if alone else {"color": GREY}), label=name))
    what = "scores" if len(keys) > 1 else one_line(keys[0].replace("_", " "), 16)
    axes.set_ylabel(f"validation\n{what}", parse_math=False)
    if len(keys) > 1:
        above = {"loc": "lower right", "bbox_to_anchor": (1, 1), **ABOVE, "ncols": len(keys)}
        for text in axes.legend(handles=handles, **above).get_texts():
            text.set_parse_math(False)
    elif alone:
        axes.annotate(f"{final:#.4g}", (end, final), (8, 0), va="center", color=COLORS[1], **note)
    low, high = axes.dataLim.intervaly
    if 0 < 20 * low < high and high > 1:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))


def draw(runs: list[Path], output: Path) -> Path:
    """Draws one run, or several compared, into the file `output`; ValueError: nothing to draw."""
    runs = list({os.path.realpath(run): run for run in runs}.values())
    data = [read(run) for run in runs]
    alone, scores = len(runs) == 1, score_panels([evals for _, evals in data])

    # The panels share the steps. At 200 dpi the picture has twice the pixels that a README shows.
    height = (6 if alone else 5.6 + 0.2 * len(runs)) + 1.4 * len(scores)
    figure = Figure(figsize=(8, height), dpi=200)
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.06)
    heights = [3, *[1.2] * len(scores), 1, 1]
    panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    loss_axes, *score_axes, lr_axes, rate_axes = panels
    halo = [withStroke(linewidth=3, foreground="white")]
    note: dict[str, Any] = {"fontsize": 9, "textcoords": "offset points", "path_effects": halo}

    baselines, units, smoothed = set(), set(), False
    told = differences(runs) if not alone else [[]]
    for i, (name, (train, evals)) in enumerate(zip(names(runs), data, strict=True)):
        style: dict[str, Any] = {"color": COLORS[i % len(COLORS)], "linewidth": 1.4}
        style["linestyle"] = DASHES[i // len(COLORS) % len(DASHES)]

        # Learning rate and throughput, which is not averaged: a slow start would seem to be longer.
        plot(lr_axes, train, column(train, "lr"), **style)
        for key in list(train.values())[-1]:
            if key.endswith("_per_second"):
                units.add(one_line(key.removesuffix("_per_second"), 30))
                plot(rate_axes, train, column(train, key), **{**style, "linewidth": 0.9})

        # Training loss: many values as their means, beside the values themselves in a run alone.
        losses, label = column(train, "loss"), "training"
        if (width := window(losses)) > 1:
            label, smoothed = f"training, mean of {width} values", True
            if alone:
                look = {"linewidth": 0.8, "alpha": 0.4, "label": "training, as logged"}
                plot(loss_axes, train, losses, color=style["color"], **look)
        look = {"label": label} if alone else {"linewidth": 0.8, "alpha": 0.7}
        plot(loss_axes, train, smooth(losses), **{**style, **look})

        # Validation loss, and the value that it ends with.
        losses = column(evals, "eval_loss")
        final = f"{losses[-1]:#.4g}" if losses else "–"
        if not alone:
            label = "   ".join([final, name, *filter(None, [in_short(told[i], 80 - len(name))])])
            plot(loss_axes, evals, losses, dots=True, **style, zorder=3, label=label)
        elif losses:
            style["color"] = COLORS[1]
            plot(loss_axes, evals, losses, dots=True, **style, zorder=3, label="validation")
            end = (max(evals), losses[-1])
            loss_axes.annotate(final, end, (8, 0), va="center", color=style["color"], **note)

        # What needs no learning, drawn once for all runs that share it. An accuracy is no loss.
        for key in list(evals.values())[-1] if evals else ():
            if key == "unigram_loss" or ("baseline" in key and "accuracy" not in key):
                baselines.add((one_line(key.replace("_", " "), 50), column(evals, key)[-1]))

    # Baselines, then title and legends above the panels, where they hide no curve.
    for label, value in sorted(baselines)[:MOST]:
        if not math.isnan(value):
            loss_axes.axhline(value, color=GREY, linewidth=0.8, linestyle=(0, (5, 4)), zorder=1)
            place = ((1, value), (-4, 3), loss_axes.get_yaxis_transform())
            look = {"ha": "right", "color": GREY, "parse_math": False, **note}
            loss_axes.annotate(f"{label} {value:#.4g}", *place, **look)
    loss_axes.margins(y=0.09)  # room for these words
    if alone:
        look = {"loc": "left", "pad": 22, "weight": "bold", "parse_math": False}
        loss_axes.set_title(names(runs)[0], **look)  # above the legend: it may be long
        legend = loss_axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, **ABOVE)
    else:
        label = "validation loss: its final value, the run" + ", settings that differ" * any(told)
        key = [Line2D([], [], color=GREY, linewidth=1.4, label=label)]
        label = "training loss" + ", mean over about 8% of the run" * smoothed
        key.append(Line2D([], [], color=GREY, linewidth=0.8, label=label))
        handles = [*key, *loss_axes.get_legend_handles_labels()[0]]
        legend = loss_axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), **ABOVE)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a name may contain dollars

    # Scores.
    for axes, keys in zip(score_axes, scores, strict=True):
        draw_scores(axes, keys, [evals for _, evals in data], note)

    # Axes.
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#DDDDDD", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.margins(x=0.01)
    loss_axes.set(ylabel="loss")
    lr_axes.set(ylabel="learning rate", ylim=(0, None))
    lr_axes.ticklabel_format(axis="y", scilimits=(-2, 4))
    rate = " or\n".join(sorted(units)[:MOST]) + " / s" if units else "throughput"
    rate_axes.set(xlabel="optimizer step", ylim=(0, None))
    rate_axes.set_ylabel(rate, parse_math=False)
    rate_axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    rate_axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    steps = [1, 2, 5, 10]
    rate_axes.xaxis.set_major_locator(MaxNLocator(10, steps=steps, integer=True, min_n_ticks=1))
    for axes in (lr_axes, rate_axes):
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=steps))
    figure.align_ylabels()

    return save_figure(figure, output)


def try_draw(runs: list[Path], output: Path) -> Path | str:
    """Draws, or says in words why it could not: a picture is not worth a run."""
    return try_picture(draw, runs, output)


# ---- Command line --------------------------------------------------------------------------------


def main() -> None:
    protect_output()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = lambda problem: parser.exit(2, f"plot.py: {one_line(problem)}\n")
    parser.add_argument("runs", nargs="+", type=Path, metavar="run", help="a folder such as runs/a")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where the picture goes")
    args = parser.parse_args()
    output = args.output or (args.runs[0] if len(args.runs) == 1 else Path()) / "curves.png"
    try:
        if args.output and not output.parent.is_dir():
            raise ValueError(f"--output {output}: there is no folder {output.parent}")
        if output.is_dir():
            raise ValueError(f"--output {output} is a folder; name a file: {output / 'curves.png'}")
        if output.exists() and not output.is_file():
            raise ValueError(f"--output {output} is a pipe or a device; name a file")
        if output.suffix and output.suffix.lower() not in FORMATS:
            raise ValueError(f"--output {output}: its name must end with {', '.join(FORMATS)}")
        picture = draw(args.runs, output)
        for run, differ in zip(args.runs, differences(args.runs), strict=True):
            if differ:
                print(f"{one_line(run, 200)}: {one_line(', '.join(differ), 5000)}")
        print(one_line(picture, 5000))
    except Exception as error:  # matplotlib's, besides OSError and ValueError
        parser.error(error)


if __name__ == "__main__":
    main()
