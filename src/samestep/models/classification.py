"""How well a model answers: scores of classes or numbers, a report in words and in pictures.

A table is float64 (C, C): entry i, j counts the rows of class i that the model took for class j.
Where a row has any number of labels it is (C, 2, 2): for each label, the rows without it and with
it, by the answer, without it and with it.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from samestep.base.console import one_line
from samestep.base.errors import attempt
from samestep.base.files import save_figure

# scikit-learn and matplotlib take 1 s to import: they wait for the functions that need them.

Sums = dict[str, torch.Tensor]
SHOWN = 30  # most classes in a picture


# ---- Classes -------------------------------------------------------------------------------------


def count_answers(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The table of a batch, float32: logits (B, C); labels, classes (B,), or 0 and 1 (B, C).

    No product of matrices: autocast would round its counts above 256.
    """
    if labels.ndim == 1:
        classes = logits.shape[1]
        places = labels * classes + logits.argmax(1)
        table = torch.zeros(classes**2, device=logits.device)
        table.index_add_(0, places, torch.ones_like(places, dtype=table.dtype))
        return table.view(classes, classes)
    true, predicted = (torch.stack([1 - x, x]) for x in (labels, (logits > 0).float()))
    return (true[:, None] * predicted).sum(2).permute(2, 0, 1)


def _weighted_answers(table: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(true, predicted, weight) as scikit-learn takes them: a row for each entry that is not 0. In
    that of an entry of a label's table, other labels are absent and were not predicted."""
    entries = np.nonzero(table.numpy())
    weight = table.numpy()[entries]
    if table.ndim == 2:
        return entries[0], entries[1], weight
    label = np.eye(len(table), dtype=int)[entries[0]]
    return label * entries[1][:, None], label * entries[2][:, None], weight


def score_table(table: torch.Tensor) -> dict[str, float]:
    """Accuracy, or micro F1 where rows have several labels, and macro F1: the mean over the classes
    that rows have or the model predicted."""
    from sklearn.metrics import f1_score

    true, predicted, weight = _weighted_answers(table)
    options: dict[str, Any] = {"sample_weight": weight, "zero_division": 0}
    micro, macro = (
        float(f1_score(true, predicted, average=kind, **options)) for kind in ("micro", "macro")
    )
    return {"accuracy" if table.ndim == 2 else "micro_f1": micro, "macro_f1": macro}


def report_table(table: torch.Tensor, names: list[str], folder: Path) -> dict[str, Any]:
    """The scores of each class as text, and, where a row has one class of a few, confusion.png."""
    from sklearn.metrics import classification_report

    true, predicted, weight = _weighted_answers(table)
    shown = [one_line(name, 24) for name in names]
    options: dict[str, Any] = {"labels": range(len(names)), "target_names": shown}
    options |= {"sample_weight": weight, "digits": 3, "zero_division": 0}
    text = classification_report(true, predicted, **options)
    lines = [each for each in text.rstrip().split("\n") if "samples avg" not in each]  # of entries
    report: dict[str, Any] = {"classes": "\n".join(["", *lines])}
    if table.ndim == 2 and len(names) <= SHOWN:
        path = folder / "confusion.png"
        report["confusion"] = attempt("no picture", _draw_confusion, table.numpy(), shown, path)
    return report


def _draw_confusion(table: np.ndarray, names: list[str], path: Path) -> Path:
    """The counts of true (down) and predicted (across) classes."""
    from matplotlib.figure import Figure
    from sklearn.metrics import ConfusionMatrixDisplay

    side = max(2.2 + 0.45 * len(names), 4)
    figure = Figure(figsize=(side + 1.5, side), dpi=150, layout="constrained")
    labels = [name.replace("$", r"\$") for name in names]  # no formulas
    options: dict[str, Any] = {"cmap": "Blues", "xticks_rotation": 45, "values_format": ",.0f"}
    ConfusionMatrixDisplay(table, display_labels=labels).plot(ax=figure.subplots(), **options)
    return save_figure(figure, path)


# ---- Numbers -------------------------------------------------------------------------------------


def score_errors(sums: Sums, deviation: float) -> dict[str, float]:
    """mae and rmse in the unit of the numbers, and r2.

    `sums` over all rows: loss, squared errors; error, absolute errors; numbers; squares of numbers;
    all in standard deviations; rows. `deviation`: the standard deviation.
    """
    rows, squares, loss = (float(sums[name]) for name in ("rows", "squares", "loss"))
    spread = squares - float(sums["numbers"]) ** 2 / rows  # around their own mean
    differ = spread > 1e-6 * squares  # equal numbers have no spread to explain
    return {
        "mae": float(sums["error"]) / rows * deviation,
        "rmse": math.sqrt(loss / rows) * deviation,
        "r2": 1 - loss / spread if differ else 0.0,
    }
