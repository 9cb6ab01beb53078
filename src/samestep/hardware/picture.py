"""Draws hardware.png: the devices side by side, all-reduce over size, scaling over processes."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator, StrMethodFormatter

from samestep.base.console import one_line
from samestep.hardware.report import short
from samestep.hardware.slow import behind

COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"]  # Okabe-Ito, as in samestep plot
GREY = "#555555"
TITLE: dict[str, Any] = {"loc": "left", "fontsize": 10}
LEGEND: dict[str, Any] = {"frameon": False, "fontsize": 8, "borderaxespad": 0.2}
MOST_BARS = 16  # with more there is no room for their numbers

Figures = list[dict[str, Any]]  # those of a section of hardware.json


def named(figures: Figures, start: str) -> Figures:
    """The figures whose names begin so."""
    return [each for each in figures if each["name"].startswith(start)]


def by_process(figures: Figures) -> dict[int, float]:
    """The largest value of each process."""
    best: dict[int, float] = {}
    for each in figures:
        rank = int(each["where"])
        best[rank] = max(best.get(rank, 0.0), each["value"])
    return dict(sorted(best.items()))


def draw_products(axes: Axes, figures: Figures) -> None:
    """The best matrix product of each format, a bar for each device, or of many a dot."""
    formats = list(dict.fromkeys(each["name"].split(",")[0] for each in figures))
    width = 0.8 / len(formats)
    for i, name in enumerate(formats):
        group = named(figures, f"{name},")
        best = by_process(group)
        places = [rank + (i + 0.5) * width - 0.4 for rank in best]
        label = name.rpartition(" ")[2]
        peak = group[0].get("peak")
        label += f" (peak {peak:,g})" if peak else ""
        if len(best) > MOST_BARS:
            axes.plot(list(best), list(best.values()), ".", color=COLORS[i], label=label)
            continue
        bars = axes.bar(places, list(best.values()), 0.92 * width, color=COLORS[i], label=label)
        if len(best) * len(formats) <= MOST_BARS:
            axes.bar_label(bars, fmt=short, fontsize=7, padding=2)
    label_devices(axes, figures, "matrix products, of the best size", "TFLOP/s")
    axes.margins(y=0.3)  # room for the legend
    axes.set_ylim(0, None)
    axes.legend(loc="upper center", ncols=3, columnspacing=1, handlelength=1.2, **LEGEND)


def draw_devices(axes: Axes, figures: Figures) -> None:
    """The training step of each device alone; slow ones have another color."""
    speeds = by_process(figures)
    slow = behind(list(speeds.values()))
    colors = [COLORS[1] if i in slow else COLORS[0] for i in range(len(speeds))]
    bars = axes.bar(list(speeds), list(speeds.values()), 0.6, color=colors)
    if len(speeds) <= MOST_BARS:
        axes.bar_label(bars, fmt=short, fontsize=7, padding=2)
    title = "training step of each device alone" + ", slow ones orange" * bool(slow)
    label_devices(axes, figures, title, "samples / s")


def label_devices(axes: Axes, figures: Figures, title: str, unit: str) -> None:
    """Numbers of processes below the bars."""
    ranks = sorted({int(each["where"]) for each in figures})
    axes.set_title(title, **TITLE)
    axes.set(xlabel="process", ylabel=unit, xlim=(ranks[0] - 0.7, ranks[-1] + 0.7))
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.margins(y=0.12)


def draw_links(axes: Axes, figures: Figures) -> None:
    """The bus bandwidth of each collective operation over the size of the message."""
    kinds = list(dict.fromkeys(each["name"].split()[0] for each in figures))
    for i, kind in enumerate(kinds):
        curve = named(figures, f"{kind} ")
        sizes, speeds = zip(*((each["size"], each["value"]) for each in curve), strict=True)
        style: dict[str, Any] = {"color": COLORS[i], "linewidth": 1.8 if i == 0 else 1}
        axes.plot(sizes, speeds, marker="o", markersize=4, label=kind.replace("_", "-"), **style)
    names = {each["size"]: each["name"].rpartition(", ")[2] for each in figures}
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(names), list(names.values()))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set(xlabel="size of the message", ylabel="bus bandwidth, GB/s", ylim=(0, None))
    axes.set_title("collective operations", **TITLE)
    axes.legend(loc="upper left", **LEGEND)


def draw_scaling(axes: Axes, figures: Figures) -> None:
    """Samples per second over processes, with the line of an ideal machine."""
    counts, speeds = zip(*((each["size"], each["value"]) for each in figures), strict=True)
    ideal = [speeds[0] * count / counts[0] for count in counts]
    axes.plot(counts, ideal, color=GREY, linestyle="--", linewidth=1, label="ideal")
    axes.plot(counts, speeds, color=COLORS[0], marker="o", linewidth=1.8, label="measured")
    for count, speed, best in zip(counts, speeds, ideal, strict=True):
        place: dict[str, Any] = {"textcoords": "offset points", "xytext": (0, -13), "ha": "center"}
        axes.annotate(f"{speed / best:.0%}", (count, speed), fontsize=8, **place)
    axes.set_title("training together, one micro-batch for each process", **TITLE)
    axes.set(xlabel="processes", ylabel="samples / s", ylim=(0, None))
    axes.margins(x=0.1)
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.legend(loc="upper left", **LEGEND)


def draw(content: dict[str, Any], output: Path) -> Path:
    """Draws the bench section of a hardware.json; returns the picture's path.

    Panels without figures are left out. Raises ValueError if none is left.
    """
    section = content["bench"]
    figures = section["figures"]
    panels = [
        (draw_products, named(figures, "matmul")),
        (draw_devices, named(figures, "training step alone")),
        (draw_links, [each for each in figures if " busbw" in each["name"]]),
        (draw_scaling, named(figures, "training together")),
    ]
    panels = [(function, found) for function, found in panels if found]
    if not panels:
        raise ValueError("there is no figure to draw")
    rows = -(-len(panels) // 2)
    figure = Figure(figsize=(10, 3.4 * rows + 0.4), dpi=150)
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
    grid = figure.subplots(rows, min(len(panels), 2), squeeze=False).flatten()
    for axes, (function, found) in zip(grid, panels, strict=False):
        function(axes, found)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
        axes.set_axisbelow(True)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    names = [each.partition(": ")[2].rpartition(" on ") for each in section["facts"]["devices"]]
    kinds, hosts = Counter(name for name, _, _ in names), sorted({host for *_, host in names})
    title = ", ".join(f"{number} x {name}" for name, number in kinds.items())
    title += f" on {hosts[0]}" if len(hosts) == 1 else f" on {len(hosts)} machines"
    figure.suptitle(one_line(title, 100), parse_math=False, fontsize=11, weight="bold")

    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        figure.savefig(temporary, format="png")
        os.replace(temporary, output)
    finally:
        temporary.unlink(missing_ok=True)
    return output


def try_draw(content: dict[str, Any], output: Path) -> Path | str:
    """The picture that `draw` makes, or the reason why there is none."""
    try:
        return draw(content, output)
    except Exception as error:  # a picture is not worth a report, whatever the library raises
        return f"none: {one_line(error)}"
