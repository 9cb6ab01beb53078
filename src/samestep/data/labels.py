"""Labels of rows: a class, several labels, or a number; parsed, checked, turned into arrays.

A label is what a file holds until `read_label` has made it the name of a class, a list of names, or
a float.
"""

import contextlib
import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from samestep.base.console import one_line
from samestep.base.files import read_json_object
from samestep.data import columns
from samestep.data.sources import field_of, require_value

SINGLE, MULTI, NUMBER = "single_label_classification", "multi_label_classification", "regression"
LARGEST_NUMBER = 1e18  # the sum of the squares of many such numbers is finite in float32
FILE = "labels.json"  # in the folder of prepared data


# ---- Parsing -------------------------------------------------------------------------------------


def read_label(row: dict, cfg: Any) -> Any:
    """The label of a row as it stands in a file: see the head of this module.

    Raises IncompleteRow for a missing label, ValueError for one that does not fit the problem type.
    """
    value = row[cfg.label_column]
    if not (value == "" and cfg.problem_type == MULTI):  # a row may have none of the labels
        require_value("label", value)
    return parse_label(value, cfg.problem_type)


def parse_label(value: Any, problem_type: str) -> Any:
    """A class's name, a list of names, or a number; raises ValueError for anything else."""
    shown = f"{value!r:.60}"
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
    if parts and isinstance(parts, list) and all(part in (0, 1) for part in parts):
        hint = "give the names of the labels, as text"
        raise ValueError(f"the label {shown} is a vector of 0 and 1; {hint}")
    if parts is not None and all(isinstance(part, str | int) for part in parts):
        return sorted({str(part).strip() for part in parts} - {""})
    raise ValueError(f"the label is {shown}, not a list of names, or text with ; between")


def parse_class(value: Any) -> str:
    """The name of a class; raises ValueError for anything else."""
    whole = isinstance(value, float | Decimal) and value % 1 == 0  # with nulls 1 is 1.0
    if whole or isinstance(value, str | int):
        return str(int(value) if whole else value).strip()
    raise ValueError(f"the label is {value!r:.60}, not text or a whole number")


def parse_list(text: str) -> list | None:
    """A list as JSON; None: the text is none."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text)
    return None


# ---- Labels of prepared rows ---------------------------------------------------------------------


def encode(
    rows: datasets.DatasetDict, cfg: Any, folder: Path, is_given: bool
) -> datasets.DatasetDict:
    """The rows with numbers in place of `label`, for the loss:

    - labels: classes, int64; several labels as 0 or 1, float32 (C,); or numbers in standard
      deviations from the mean of the training rows, float32
    - weight: of the row in the loss, float32

    Names, or mean and deviation, are saved in `folder`; if they are there, a run resumes, and keeps
    them. Classes are those of all rows of cfg.data, also of those that are held out; where rows to
    evaluate on are given, as `is_given` says, of the training rows alone.

    Raises ValueError for labels that cannot be trained on, and for unknown ones.
    """
    known = read_json_object(folder / FILE)
    if cfg.problem_type == NUMBER:
        numbers = columns.values_of(rows["train"], "label")
        known = known or describe_numbers(numbers)
        shown = f"mean {known['mean']:.6g}, standard deviation {known['std']:.4g}"
        about = f"{shown}: such an error is a loss of 1"
        if numbers.min() == numbers.max():
            about = f"all numbers are {known['mean']:.6g}: nothing to learn"
    else:
        own = [rows["train"]] if is_given else [*rows.values()]
        names = known.get("names") or collect_names(datasets.concatenate_datasets(own), cfg)
        known = {"names": names}
    encoded = {split: encode_split(part, known, cfg, split) for split, part in rows.items()}
    if cfg.problem_type != NUMBER:
        counts = count(encoded["train"]["labels"], len(names))
        about = describe_labels(counts, len(rows["train"]), names)
        if cfg.class_weights == "balanced":
            # Inverse to the rows of the class; the mean over the rows is 1.
            weights = counts.sum() / (counts > 0).sum() / np.maximum(counts, 1)
            encoded["train"]["weight"] = weights.astype(np.float32)[encoded["train"]["labels"]]
    (folder / FILE).write_text(json.dumps(known), encoding="utf-8")
    print(f"Preparing data: {one_line(about, 500)}", flush=True)
    for split, found in encoded.items():
        part = rows[split].remove_columns("label")
        for name, array in found.items():
            part = part.add_column(name, [*array] if array.ndim > 1 else array)
        rows[split] = part
    return rows


def encode_split(
    rows: datasets.Dataset, known: dict[str, Any], cfg: Any, split: str
) -> dict[str, np.ndarray]:
    """The columns of `encode` for these rows; `known`: what it saves.

    Raises ValueError for a label that is not in its names.
    """
    if cfg.problem_type == NUMBER:
        return standardize(columns.values_of(rows, "label"), known)
    check_known(rows, known["names"], cfg, split)
    found, lengths = label_lists(rows)
    unique, places = np.unique(found, return_inverse=True)
    number_of = {name: number for number, name in enumerate(known["names"])}
    numbers = np.array([number_of[name] for name in unique], int)[places]
    labels = numbers
    if cfg.problem_type == MULTI:
        labels = np.zeros((len(rows), len(number_of)), np.float32)
        labels[np.repeat(np.arange(len(rows)), lengths), numbers] = 1
    return {"labels": labels, "weight": np.ones(len(rows), np.float32)}


def read(folder: Path) -> dict[str, Any]:
    """What `encode` has saved: names, or mean and std."""
    return read_json_object(folder / FILE)


def label_lists(rows: datasets.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """The names of each row's labels, as one array, and the number of names of each row."""
    values = rows.data.column("label").combine_chunks()
    if not pa.types.is_list(values.type):
        return values.to_numpy(zero_copy_only=False), np.ones(len(values), int)
    lengths = pc.list_value_length(values).to_numpy()
    return values.flatten().to_numpy(zero_copy_only=False), lengths


def collect_names(rows: datasets.Dataset, cfg: Any) -> list[str]:
    """The names of all labels in rows, sorted, whole numbers by their value.

    Raises ValueError unless there are two, of which some row has one, and for one in two spellings.
    """
    found = {*np.unique(label_lists(rows)[0])}
    for name in sorted(found):
        other = name.lower() if name in ("False", "True") else f"{name}.0"
        if other in found:
            raise ValueError(f"task.data: {cfg.data} has the labels {name} and {other}: write one")
    names = sorted(found)
    if all(name.isdecimal() and len(name) < 100 for name in names):
        names = sorted(names, key=int)
    if len(names) < 2:
        present = f"only the label {names[0]:.60}" if len(names) == 1 else "no label"
        raise ValueError(f"task.data: {cfg.data} has {present}: nothing to learn")
    return names


def check_known(rows: datasets.Dataset, names: list[str], cfg: Any, split: str) -> None:
    """Raises ValueError for a label that is not in `names`."""
    found, lengths = label_lists(rows)
    if unknown := {*found} - {*names}:
        name = min(unknown)
        row = int(np.repeat(np.arange(len(rows)), lengths)[found == name][0])
        some = ", ".join(names)
        owner = "run that resumes" if split == "train" else "training data"
        raise ValueError(
            f"task.{field_of(split, cfg)}: {rows[row]['place']}: class "
            f"{name!r:.60} is not in the {owner}, which has {some:.200}"
        )


def count(labels: np.ndarray, number: int) -> np.ndarray:
    """The rows with each label (C,)."""
    return labels.sum(0) if labels.ndim == 2 else np.bincount(labels, minlength=number)


def describe_labels(counts: np.ndarray, rows: int, names: list[str]) -> str:
    """How labels are distributed over the training rows. `counts`: of each label."""
    most = int(counts.argmax())
    share = f"{names[most]:.60} with {counts[most] / rows:.1%} of the rows"
    once = int((counts == 1).sum())
    return f"{len(names):,} classes or labels, the largest {share}; {once:,} have one row"


def describe_numbers(numbers: np.ndarray) -> dict[str, float]:
    """Mean and standard deviation; that of equal numbers is 1.

    Models learn numbers as standard deviations from the mean: the loss of others may be so large
    that nothing is trained.
    """
    mean = math.fsum(numbers) / len(numbers)
    variance = math.fsum((numbers - mean) ** 2) / len(numbers)
    if numbers.min() == numbers.max():
        variance = 0.0
    return {"mean": mean, "std": math.sqrt(variance) or 1.0}


def standardize(numbers: np.ndarray, known: dict[str, float]) -> dict[str, np.ndarray]:
    """Columns for the numbers of a split, float32 (N,): see `encode`."""
    return {
        "labels": ((numbers - known["mean"]) / known["std"]).astype(np.float32),
        "weight": np.ones(len(numbers), np.float32),
    }
