"""Draws the curves of a run, or compares runs: loss, learning rate and throughput.

    python plot.py runs/a                                   writes runs/a/curves.png
    python plot.py runs/a runs/b                            compares them in curves.png, here
    python plot.py runs/a runs/b --output figures/ab.pdf    elsewhere; .png, .svg or .pdf

A run is a folder with a metrics.jsonl, finished or not. train.py draws its own at the end.
"""

import argparse
import json
import math
import os
import warnings
from collections.abc import Callable
from difflib import get_close_matches
from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from tracking import one_line, protect_output

Rows = dict[int, dict[str, Any]]  # lines of metrics.jsonl by their step

COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]  # Okabe-Ito
DASHES = ["-", "--", ":", "-."]  # the next one each time the colors are used up
GREY = "#555555"
MANY = 40  # from here on, points are averaged and dots left out
LARGEST = 3.5e38  # the largest number that is drawn: a little more than that of fp32
MOST = 5  # baselines in a picture, and units of throughput
FORMATS = (".png", ".svg", ".pdf")

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


def smooth(values: list[float]) -> list[float]:
    """Averages over 8% of the values: centred, so no lag; fewer in the steep start."""
    sums = [0.0, *accumulate(0.0 if math.isnan(value) else value for value in values)]
    counts = [0, *accumulate(not math.isnan(value) for value in values)]
    means = []
    for i, value in enumerate(values):
        reach = min(i, len(values) // 25)
        low, high = i - reach, min(i + reach + 1, len(values))
        known = not math.isnan(value)
        means.append((sums[high] - sums[low]) / (counts[high] - counts[low]) if known else value)
    return means


def names(runs: list[Path]) -> list[str]:
    """The ends of the runs' paths, as long as it takes to tell them apart; long names are cut."""
    paths = [Path(os.path.realpath(run)).parts for run in runs]
    length = 1
    while len({path[-length:] for path in paths}) < len(paths):
        length += 1
    return [one_line("/".join(path[-length:]), 50) for path in paths]


# ---- Drawing -------------------------------------------------------------------------------------


def plot(axes: Axes, rows: Rows, values: list[float], **style: Any) -> None:
    """Draws one curve over the steps; few points show as dots, so that one alone can be seen."""
    if len(values) < 15:
        style = {"marker": "o", "markersize": 4, **style}
    axes.plot(list(rows), values, **style)


def draw(runs: list[Path], output: Path) -> Path:
    """Draws one run, or several compared, into the file `output`; ValueError: nothing to draw."""
    runs = list({os.path.realpath(run): run for run in runs}.values())
    data = [read(run) for run in runs]
    alone = len(runs) == 1

    # Three panels share the steps. At 200 dpi the picture has twice the pixels that a README shows.
    figure = Figure(figsize=(8, 6 if alone else 5.6 + 0.2 * len(runs)), dpi=200)
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.06)
    panels = figure.subplots(3, 1, sharex=True, height_ratios=[3, 1, 1])
    loss_axes, lr_axes, rate_axes = panels
    halo = [withStroke(linewidth=3, foreground="white")]
    note: dict[str, Any] = {"fontsize": 9, "textcoords": "offset points", "path_effects": halo}

    baselines, units = set(), set()
    for i, (name, (train, evals)) in enumerate(zip(names(runs), data, strict=True)):
        style: dict[str, Any] = {"color": COLORS[i % len(COLORS)], "linewidth": 1.4}
        style["linestyle"] = DASHES[i // len(COLORS) % len(DASHES)]

        # Learning rate and throughput, which is not averaged: a slow start would seem to be longer.
        plot(lr_axes, train, column(train, "lr"), **style)
        for key in list(train.values())[-1]:
            if key.endswith("_per_second"):
                units.add(one_line(key.removesuffix("_per_second"), 30))
                plot(rate_axes, train, column(train, key), **{**style, "linewidth": 0.9})

        # Training loss: many values as their average. It is thin where runs are compared.
        losses = column(train, "loss")
        if alone and len(losses) >= MANY:
            plot(loss_axes, train, losses, color=style["color"], linewidth=0.8, alpha=0.4)
        look: dict[str, Any] = {"label": "training"} if alone else {"linewidth": 0.8, "alpha": 0.7}
        shown = losses if len(losses) < MANY else smooth(losses)
        plot(loss_axes, train, shown, **{**style, **look})

        # Validation loss, and the value that it ends with.
        scores = column(evals, "eval_loss")
        final = f"{scores[-1]:#.4g}" if scores else "–"
        if len(scores) < MANY:
            style |= {"marker": "o", "markersize": 5.5, "markeredgecolor": "white"}
        if not alone:
            plot(loss_axes, evals, scores, **style, zorder=3, label=f"{final}   {name}")
        elif scores:
            style["color"] = COLORS[1]
            plot(loss_axes, evals, scores, **style, zorder=3, label="validation")
            end = (max(evals), scores[-1])
            loss_axes.annotate(final, end, (8, 0), va="center", color=style["color"], **note)

        # What needs no learning, drawn once for all runs that share it. An accuracy is no loss.
        for key in list(evals.values())[-1] if evals else ():
            if key == "unigram_loss" or ("baseline" in key and "accuracy" not in key):
                baselines.add((one_line(key.replace("_", " "), 50), column(evals, key)[-1]))

    # Baselines, then title and legend above the panel, where they hide no curve.
    for label, value in sorted(baselines)[:MOST]:
        if not math.isnan(value):
            loss_axes.axhline(value, color=GREY, linewidth=0.8, linestyle=(0, (5, 4)), zorder=1)
            place = ((1, value), (-4, 3), loss_axes.get_yaxis_transform())
            look = {"ha": "right", "color": GREY, "parse_math": False, **note}
            loss_axes.annotate(f"{label} {value:#.4g}", *place, **look)
    if alone:
        loss_axes.set_title(names(runs)[0], loc="left", weight="bold", parse_math=False)
        look = {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": 2}
    else:
        look = {"loc": "lower left", "bbox_to_anchor": (0, 1), "alignment": "left"}
        look["title"] = "final validation loss of each run (dots; thin: training loss)"
    for text in loss_axes.legend(frameon=False, borderaxespad=0.2, **look).get_texts():
        text.set_parse_math(False)  # a name may contain dollars

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
    rate_axes.yaxis.set_major_locator(MaxNLocator(5, steps=steps))
    lr_axes.yaxis.set_major_locator(MaxNLocator(5, steps=steps))
    figure.align_ylabels()

    return save(figure, output)


def save(figure: Figure, output: Path) -> Path:
    """Writes a picture: whoever looks meanwhile sees the old one or the new one, never half."""
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # a name in letters that the font lacks
            figure.savefig(temporary, format=output.suffix[1:] or "png")
        os.replace(temporary, output)
    finally:
        temporary.unlink(missing_ok=True)
    return output


def attempt_picture(function: Callable[..., Path], *arguments: Any) -> Path | str:
    """The picture that a function draws, or why there is none: it is not worth a run."""
    try:
        return function(*arguments)
    except Exception as error:  # each of many libraries below has its own
        return f"no picture: {one_line(error)}"


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
        print(one_line(draw(args.runs, output), 5000))
    except Exception as error:  # matplotlib's, besides OSError and ValueError
        parser.error(error)


if __name__ == "__main__":
    main()
