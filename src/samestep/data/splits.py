"""Splits that a folder of data holds, by the names of its files and folders, as `datasets` sees it.

A word of KEYWORDS counts with a space, a dash, a dot, an underscore or a digit beside it, or
nothing: train.jsonl, wiki_test-00001.txt, dev/. The outermost folder decides, then the file.
"""

import re
from collections import Counter
from collections.abc import Iterable

from samestep.base.console import one_line

KEYWORDS = {
    "test": "test|testing|eval|evaluation",
    "validation": "validation|valid|dev|val",
    "train": "train|training",
}
PATTERNS = {
    split: re.compile(rf"(?<![^-._ 0-9])({words})(?![^-._ 0-9])", re.IGNORECASE)
    for split, words in KEYWORDS.items()
}


def split_of(path: str) -> str:
    """The split of a file or folder by its path below the data; empty: it has none."""
    for name in path.split("/"):
        for split, pattern in PATTERNS.items():
            if pattern.search(name):
                return split
    return ""


def count(found: Iterable[str]) -> Counter:
    """How many files each split has, by their `split_of`; empty: the files are not divided.

    "train" beside names that say nothing is no split: it may be a class, or the title of a text.
    """
    counts = Counter(found)
    return counts if len(counts) > 1 and {*counts} != {"train", ""} else Counter()


def choose(counts: Counter, field: str, data: str) -> str:
    """The split that a field means, data or validation_data. Where none is named train, the other
    files are to train on. Raises ValueError if there are none."""
    split = "validation"
    if field == "data":
        split = "train" if "train" in counts else ""
    if not counts[split]:
        there = " and ".join(sorted({*counts} - {""}))
        raise ValueError(
            f"task.{field}: {one_line(data, 100)} holds files for {there}, by their names, and "
            f"none to {'train' if field == 'data' else 'evaluate'} on; name the right one"
        )
    return split


def say(counts: Counter, data: str, evaluates: bool) -> None:
    """Prints what is done with the splits; `evaluates`: on the one for validation."""
    train = choose(counts, "data", data)
    text = f"{counts[train]:,} file{'s' * (counts[train] > 1)} to train on"
    unread = {name: counts[name] for name in ("validation", "test", "") if name != train}
    if evaluates:
        text += f", {unread.pop('validation'):,} to evaluate on"
    others = [f"{number:,} for {name or 'no split'}" for name, number in unread.items() if number]
    text += f"; not read: {', '.join(others)}" * bool(others)
    print(f"Preparing data: {one_line(data, 100)} has, by the names: {text}", flush=True)
