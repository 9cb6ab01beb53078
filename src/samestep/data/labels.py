"""Labels of rows: a class, several labels, or a number; parsed, checked, turned into arrays.

A label is what a file holds until `read_label` has made it the name of a class, a list of names, or
a float.
"""

import contextlib
import json
import math
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from samestep.base.console import one_line
from samestep.base.files import read_json_object
from samestep.data import views
from samestep.data.sources import field_of, require_value

SINGLE, MULTI, NUMBER = "single_label_classification", "multi_label_classification", "regression"
_LARGEST_NUMBER = 1e18  # the sum of the squares of many such numbers is finite in float32
FILE = "labels.json"  # in the folder of prepared data


# ---- Parsing -------------------------------------------------------------------------------------


def read_label(row: dict, cfg: Any) -> Any:
    """The label of a row as it stands in a file: see the head of this module.

    Raises IncompleteRow for a missing label, ValueError for one that does not fit the problem type.
    """
    value = row[cfg.label_column]
    if not (value == "" and cfg.problem_type == MULTI):  # a row may have none of the labels
        require_value("label", value)
    shown = f"{value!r:.60}"
    if cfg.problem_type == NUMBER:
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not abs(number) <= _LARGEST_NUMBER:
            raise ValueError(f"the label is {shown}, not a finite number of at most 1e18")
        return number
    parts = value if isinstance(value, list) else None
    bracketed = isinstance(value, str) and value.strip()[:1] + value.strip()[-1:] == "[]"
    if bracketed:
        with contextlib.suppress(ValueError, RecursionError):
            parts = json.loads(value.strip())
    if cfg.problem_type == SINGLE:
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


# ---- Labels of prepared rows ---------------------------------------------------------------------


def learn(rows: datasets.DatasetDict, cfg: Any, folder: Path, is_given: bool) -> dict[str, Any]:
    """Names of all labels, or mean and deviation of numbers: what `encode` needs.

    They are saved in `folder`; if they are there, a run resumes, and keeps them. Names are those of
    all rows of cfg.data, also of those that are held out; where rows to evaluate on are given, as
    `is_given` says, of the training rows alone. Mean and deviation are those of the training rows.

    Raises ValueError for labels that cannot be trained on, and for unknown ones.
    """
    known = read(folder)
    if getattr(cfg, "problem_type", SINGLE) == NUMBER:
        numbers = views.values_of(rows["train"], "label")
        known = known or _describe_numbers(numbers)
        shown = f"mean {known['mean']:.6g}, standard deviation {known['std']:.4g}"
        about = f"{shown}: such an error is a loss of 1"
        if numbers.min() == numbers.max():
            about = f"all numbers are {known['mean']:.6g}: nothing to learn"
    else:
        known = {"names": known.get("names") or _collect_names(rows, cfg, is_given)}
        for split, part in rows.items():
            _check_known(part, known["names"], cfg, split)
        about = _describe_labels(count(rows["train"]), len(rows["train"]))
    (folder / FILE).write_text(json.dumps(known), encoding="utf-8")
    print(f"Preparing data: {one_line(about, 500)}", flush=True)
    return known


def encode(labels: list, known: dict[str, Any]) -> dict[str, Any]:
    """Columns of a batch of rows for the loss, from what `learn` knows:

    - labels: classes, int64; several labels as 0 or 1, float32 (C,); or numbers in standard
      deviations from the mean of the training rows, float32
    - weight: of the row in the loss, float32, 1: `balance` changes it
    """
    weights = np.ones(len(labels), np.float32)
    if "mean" in known:
        numbers = (np.array(labels) - known["mean"]) / known["std"]
        return {"labels": numbers.astype(np.float32), "weight": weights}
    number_of = {name: number for number, name in enumerate(known["names"])}
    if isinstance(labels[0], str):
        return {"labels": [number_of[name] for name in labels], "weight": weights}
    found = np.zeros((len(labels), len(number_of)), np.float32)
    for row, names in zip(found, labels, strict=True):
        row[[number_of[name] for name in names]] = 1
    return {"labels": [*found], "weight": weights}


def balance(rows: datasets.Dataset) -> datasets.Dataset:
    """Rows whose weight is inverse to the number of rows of their class; the mean weight is 1."""
    labels = views.values_of(rows, "labels")
    counts = np.bincount(labels)
    weights = counts.sum() / (counts > 0).sum() / np.maximum(counts, 1)
    weights = weights.astype(np.float32)[labels]
    return rows.remove_columns("weight").add_column("weight", weights)


def parse_names(text: str) -> list[str]:
    """The names of classes in a field, as a,b; or a JSON list, since names may have commas."""
    found = json.loads(text) if text.startswith("[") else text.split(",")
    return [name.strip() for name in found if name.strip()]


def keep_names(names: list[str], folder: Path) -> str:
    """The names of classes in `folder`, which a run that resumes keeps; or these, saved there: as
    `parse_names` reads them. Raises ValueError where there are none."""
    known = read(folder).get("names") or names
    if not known:
        raise ValueError("task.data: no row has a class to learn; add rows with labels")
    (folder / FILE).write_text(json.dumps({"names": known}), encoding="utf-8")
    return json.dumps(known)


def read(folder: Path) -> dict[str, Any]:
    """What `learn` has saved: names, or mean and std."""
    return read_json_object(folder / FILE)


def count(rows: datasets.Dataset) -> Counter:
    """The number of rows with each label."""
    found: Counter = Counter()
    for chunk in views.chunks_of(rows, "label"):
        found.update((chunk.flatten() if views.is_list(chunk.type) else chunk).to_pylist())
    return found


def _collect_names(rows: datasets.DatasetDict, cfg: Any, is_given: bool) -> list[str]:
    """The names of all labels, sorted, whole numbers by their value: see `learn`.

    Raises ValueError unless there are two, and for one in two spellings.
    """
    own = [rows["train"]] if is_given else [*rows.values()]
    found = {name for part in own for name in count(part)}
    names = sorted(found)
    for name in names:
        other = name.lower() if name in ("False", "True") else f"{name}.0"
        if other in found:
            raise ValueError(f"task.data: {cfg.data} has the labels {name} and {other}: write one")
    if all(name.isdecimal() and len(name) < 100 for name in names):
        names = sorted(names, key=int)
    if len(names) < 2:
        present = f"only the label {names[0]:.60}" if len(names) == 1 else "no label"
        raise ValueError(f"task.data: {cfg.data} has {present}: nothing to learn")
    return names


def _check_known(rows: datasets.Dataset, names: list[str], cfg: Any, split: str) -> None:
    """Raises ValueError for a label that is not in `names`."""
    unknown = {*count(rows)} - {*names}
    if not unknown:
        return
    for row in rows:
        own = row["label"] if isinstance(row["label"], list) else [row["label"]]
        for name in {*own} & unknown:
            owner = "run that resumes" if split == "train" else "training data"
            raise ValueError(
                f"task.{field_of(split, cfg)}: {row['place']}: class {name!r:.60} is not in the "
                f"{owner}, which has {', '.join(names):.200}"
            )


def _describe_labels(counts: Counter, rows: int) -> str:
    """How labels are distributed over the training rows."""
    name, most = counts.most_common(1)[0] if counts else ("none", 0)
    once = sum(each == 1 for each in counts.values())
    share = f"{name:.60} with {most / rows:.1%} of the rows"
    return f"{len(counts):,} classes or labels, the largest {share}; {once:,} have one row"


def _describe_numbers(numbers: np.ndarray) -> dict[str, float]:
    """Mean and standard deviation; that of equal numbers is 1.

    Models learn numbers as standard deviations from the mean: the loss of others may be so large
    that nothing is trained.
    """
    mean = math.fsum(numbers) / len(numbers)
    variance = math.fsum((numbers - mean) ** 2) / len(numbers)
    if numbers.min() == numbers.max():
        variance = 0.0
    return {"mean": mean, "std": math.sqrt(variance) or 1.0}
