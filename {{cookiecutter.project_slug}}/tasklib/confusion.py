"""What a classifier confuses: scores from a table of counts, in numbers, in words, in a picture.

A table is float64 (C, C): rows of class i that were taken for class j. Where a row has any number
of labels it is (C, 2, 2), a table for each label: absent or there, not said or said.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tasklib.messages import one_line

# scikit-learn and matplotlib take 1 s to import: they wait for what needs them.

SHOWN = 30  # classes in a text or picture: of more, those with the most mistakes


def cells(table: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What was right, what was said, and how often: as scikit-learn takes labels and weights.

    A label's table becomes cells in which all other labels are absent, and nobody said so.
    """
    where = np.nonzero(table.numpy())
    often = table.numpy()[where]
    if table.ndim == 2:
        return *where, often
    one = np.eye(len(table), dtype=int)[where[0]]
    return one * where[1][:, None], one * where[2][:, None], often


def scores(table: torch.Tensor) -> dict[str, float]:
    """Accuracy and macro F1; of several labels a row, micro and macro F1."""
    from sklearn.metrics import accuracy_score, f1_score

    right, said, often = cells(table)
    settings = {"sample_weight": often, "zero_division": 0}
    found = {}
    if table.ndim == 2:
        found["accuracy"] = accuracy_score(right, said, sample_weight=often)
    else:
        found["micro_f1"] = f1_score(right, said, average="micro", **settings)
    found["macro_f1"] = f1_score(right, said, average="macro", **settings)
    return {name: float(score) for name, score in found.items()}


def report(table: torch.Tensor, names: list[str], folder: Path) -> dict[str, Any]:
    """The scores of each class as text, and for one class a row a picture, confusion.png."""
    from sklearn.metrics import precision_recall_fscore_support

    from tasklib.pictures import try_picture

    each = range(len(names))
    right, said, often = cells(table)
    columns = precision_recall_fscore_support(
        right, said, labels=each, sample_weight=often, zero_division=0
    )
    if table.ndim == 3:
        mistakes = table[:, 0, 1] + table[:, 1, 0]
    else:
        mistakes = table.sum(0) + table.sum(1) - 2 * table.diagonal()
    shown = sorted(sorted(each, key=lambda i: -mistakes[i])[:SHOWN])
    about = (
        f"the {SHOWN} of {len(names)} classes with the most mistakes" if len(names) > SHOWN else ""
    )
    short = [one_line(names[i], 24) for i in shown]
    wide = max(map(len, short))
    lines = [about, f"{'':{wide}}  precision  recall     f1    rows"]
    for i, name in zip(shown, short, strict=True):
        precision, recall, f1, rows = (column[i] for column in columns)
        lines.append(f"{name:{wide}}  {precision:9.3f}  {recall:6.3f}  {f1:5.3f}  {rows:6,.0f}")
    found: dict[str, Any] = {"classes": "\n".join(lines)}
    if table.ndim == 2:
        title = f"{table.trace():,.0f} of {table.sum():,.0f} are right"
        title = f"{title}; {about}".removesuffix("; ")
        path = folder / "confusion.png"
        found["confusion"] = try_picture(draw, table.numpy(), shown, short, title, path)
    return found


def draw(table: np.ndarray, shown: list[int], names: list[str], title: str, path: Path) -> Path:
    """Which rows of a class (down) were taken for which (across): numbers, coloured by share."""
    from matplotlib.figure import Figure

    from tasklib.pictures import save_figure

    counts = table[np.ix_(shown, shown)]
    shares = counts / np.maximum(table.sum(1)[shown][:, None], 1)
    side = 2.2 + 0.45 * len(shown)
    figure = Figure(figsize=(max(side, 4.8), max(side, 4)), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.imshow(shares**0.5, cmap="Blues", vmin=0, vmax=1)  # the root makes rare mistakes visible
    for (i, j), number in np.ndenumerate(counts):
        if number:
            color = "white" if shares[i, j] > 0.4 else "black"
            text = f"{number:.0f}" if number < 10_000 else f"{number / 1000:.0f}k"
            axes.text(j, i, text, ha="center", va="center", color=color, fontsize=8)
    slanted = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(range(len(shown)), names, **(slanted if max(map(len, names)) > 2 else {}))
    axes.set_yticks(range(len(shown)), names)
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        label.set_parse_math(False)  # a name may contain dollars
    axes.set(xlabel="predicted class", ylabel="true class")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.suptitle(title, fontsize=10)
    return save_figure(figure, path)
