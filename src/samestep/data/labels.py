"""Labels of rows: a class, several labels, or a number; parsed, checked, turned into arrays.

row["label"] is what a file holds until `parse_row_label` has made it the name of a class, a list of
names, or a float.
"""

import ast
import contextlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np

from samestep.base.console import one_line
from samestep.data.sources import IncompleteRow
from samestep.data.tables import Row

SINGLE, MULTI, NUMBER = "single_label_classification", "multi_label_classification", "regression"
LARGEST_NUMBER = 1e18  # the sum of the squares of many such numbers is finite in float32
MANY = 20  # classes that are numbers: more of them are rather to be learnt as numbers
TRUTHS = {"0": False, "1": True, "0.0": False, "1.0": True, "false": False, "true": True}


# ---- Parsing -------------------------------------------------------------------------------------


def split_names(text: str) -> list[str]:
    """Names with commas between them; an empty text has none."""
    return [name.strip() for name in text.split(",")] if text else []


def require_value(name: str, value: Any) -> None:
    """Raises IncompleteRow for null, for blanks, and for NaN, which tables use for null."""
    if value is None or value != value or not str(value).strip():
        raise IncompleteRow(f"the {name} is {'NaN' if value != value else 'empty'}")


def parse_row_label(row: dict, columns: list[str], problem_type: str) -> None:
    """Replaces row["label"]; `columns`: those of 0 and 1, if there is one for each label.

    Raises IncompleteRow for a missing label, ValueError for one that does not fit the problem type.
    """
    if not columns:
        if not (row["label"] == "" and problem_type == MULTI):  # a row may have none of the labels
            require_value("label", row["label"])
        row["label"] = parse_label(row["label"], problem_type)
        return
    if not isinstance(row["label"], dict):
        raise ValueError(f"a .txt file has no column {one_line(columns[0], 60)}")
    names = []
    for name, value in row["label"].items():
        shown = f"label {one_line(name, 60)}"
        require_value(shown, value)
        truth = TRUTHS.get(str(value).strip().lower())
        if truth is None:
            raise ValueError(f"the {shown} is {one_line(repr(value), 60)} but must be 0 or 1")
        if truth:
            names.append(name)
    row["label"] = names


def parse_label(value: Any, problem_type: str) -> Any:
    """A class's name, a list of names, or a number; raises ValueError for anything else."""
    shown = one_line(repr(value), 60)
    if problem_type == NUMBER:
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not abs(number) <= LARGEST_NUMBER:
            raise ValueError(f"the label is {shown}, not a finite number of at most 1e18")
        return number
    bracketed = isinstance(value, str) and value.strip()[:1] + value.strip()[-1:] == "[]"
    parts = parse_list(value.strip()) if bracketed else value if isinstance(value, list) else None
    if problem_type == SINGLE:
        if parts is not None:
            raise ValueError(f"the label {shown} is a list: --task.problem_type {MULTI} reads it")
        return parse_class(value)
    if isinstance(value, str) and not bracketed:
        parts = value.split(";")
    if parts is not None and all(isinstance(part, str | int) for part in parts):
        return sorted({str(part).strip() for part in parts} - {""})
    raise ValueError(f"the label is {shown}, not a list of names, or text with ; between")


def parse_class(value: Any) -> str:
    """The name of a class; raises ValueError for anything else."""
    whole = isinstance(value, float | Decimal) and value % 1 == 0  # with nulls 1 is 1.0
    if whole or isinstance(value, str | int):
        return str(int(value) if whole else value).strip()
    raise ValueError(f"the label is {one_line(repr(value), 60)}, not text or a whole number")


def parse_list(text: str) -> list | None:
    """A list as JSON, Python or NumPy writes it; None: the text is none."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text)
    # NumPy writes ['a' 'b'], which Python would join to one word.
    text = re.sub(r"(['\"])\s+(?=['\"])", r"\1,", text)
    with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
        return ast.literal_eval(text)
    return None


# ---- Names ---------------------------------------------------------------------------------------


def labels_in(row: dict) -> list[str]:
    """The names of a row's class or labels."""
    return row["label"] if isinstance(row["label"], list) else [row["label"]]


def collect_names(found: Iterable[str], columns: list[str], data: str) -> list[str]:
    """The names of all labels: those of the columns, or those `found` in rows, sorted, whole
    numbers by their value.

    Raises ValueError unless there are two, of which some row has one, and for one in two spellings.
    """
    found = {*found}
    if twice := min((name for name in found if f"{name}.0" in found and not columns), default=""):
        spellings = f"{one_line(twice, 60)} and {one_line(twice, 60)}.0"
        raise ValueError(f"task.data: {one_line(data, 100)} has the labels {spellings}: write one")
    names = columns or sorted(found)
    if not columns and all(name.isdecimal() and len(name) < 100 for name in names):
        names = sorted(names, key=int)
    if len(names) < 2 or not found:
        present = f"only the label {one_line(names[0], 60)}" if len(names) == 1 else "no label"
        raise ValueError(f"task.data: {one_line(data, 100)} has {present}: nothing to learn")
    return names


def check_known(row: dict, names: list[str], known: Container[str]) -> None:
    """Raises ValueError for a label of the row that is not `known`; `names` are those that are."""
    for name in labels_in(row):
        if name not in known:
            some = one_line(", ".join(names[:20]), 200) + ", ..." * (len(names) > 20)
            raise ValueError(
                f"class {one_line(repr(name), 60)} is not in the training data, which has {some}"
            )


def describe_labels(
    counts: Counter, rows: int, names: list[str], problem_type: str
) -> tuple[str, str]:
    """How labels are distributed over the training rows, and a warning; empty: nothing is odd.

    `counts`: the rows with each label.
    """
    kind = "classes" if problem_type == SINGLE else "labels"
    name, most = (counts.most_common(1) or [(names[0], 0)])[0]
    largest = f"the largest {one_line(name, 60)} with {most / rows:.1%} of the rows"
    once, warning = sum(number == 1 for number in counts.values()), ""
    if 2 * once > rows:
        warning = (
            f"{len(names):,} {kind} of {rows:,} rows, {once:,} of them in one row alone: are "
            "task.label_column and task.problem_type right?"
        )
    elif problem_type == SINGLE and len(names) > MANY and all(map(str.isdecimal, names)):
        warning = (
            f"the {len(names):,} classes are whole numbers; if their order means something, give "
            f"--task.problem_type {NUMBER}"
        )
    return f"{len(names)} {kind}, {largest}", warning


# ---- Arrays --------------------------------------------------------------------------------------


def encode_labels(rows: list[Row], names: list[str], problem_type: str) -> np.ndarray:
    """Classes, int64 (N,); labels as 0 or 1, float32 (N, C); or numbers, float64 (N,)."""
    numbers = {name: i for i, name in enumerate(names)}
    if problem_type == SINGLE:
        return np.array([numbers[row["label"]] for row, _ in rows])
    if problem_type == NUMBER:
        return np.array([row["label"] for row, _ in rows], np.float64)
    labels = np.zeros((len(rows), len(names)), np.float32)
    for i, (row, _) in enumerate(rows):
        labels[i, [numbers[name] for name in row["label"]]] = 1
    return labels


def balanced_weights(counts: np.ndarray) -> np.ndarray:
    """The weight of a row of each class, float32 (C,), inverse to the rows of the class, (C,); the
    mean over the rows is 1."""
    return (counts.sum() / (counts > 0).sum() / np.maximum(counts, 1)).astype(np.float32)


class Numbers(NamedTuple):
    """The numbers of a part: their mean and standard deviation, and whether they differ."""

    mean: float
    std: float
    differ: bool


def describe_numbers(parts: Callable[[], Iterable[np.ndarray]]) -> Numbers:
    """The same on any machine, however the numbers are divided; `parts` is called several times.

    The deviation of equal numbers is 1. Models learn numbers as standard deviations from the mean:
    the loss of others may be so large that nothing is learnt.
    """
    ranges = [(len(each), each.min(), each.max()) for each in parts() if len(each)]
    count, lows, highs = zip(*ranges, strict=True)
    mean = math.fsum(value for each in parts() for value in each.tolist()) / sum(count)
    squares = ((value - mean) ** 2 for each in parts() for value in each.tolist())
    variance, differ = math.fsum(squares) / sum(count), min(lows) < max(highs)
    return Numbers(mean, math.sqrt(variance) if variance and differ else 1.0, bool(differ))


def standardize(numbers: np.ndarray, train: Numbers, part: Numbers) -> dict[str, np.ndarray]:
    """Columns of labels in standard deviations from the mean of the training rows, float32 (N,).

    `spread` is the squared distance from the mean of this part, which r2 needs.
    """
    # The mean of equal numbers may differ from them in the last digit.
    spread = ((numbers - part.mean) / train.std) ** 2 * part.differ
    return {
        "labels": ((numbers - train.mean) / train.std).astype(np.float32),
        "spread": spread.astype(np.float32),
    }
