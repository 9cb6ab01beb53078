"""Which rows are for evaluation: those of files named so, as `datasets` sees it, or those held out.

A word of KEYWORDS counts with a space, a dash, a dot, an underscore or a digit beside it, or
nothing: train.jsonl, wiki_test-00001.txt, dev/. The outermost folder decides, then the file.
"""

import re
from collections import Counter
from collections.abc import Iterable

import numpy as np

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
ANY = re.compile("|".join(KEYWORDS.values()), re.IGNORECASE)


def split_of(path: str) -> str:
    """The split of a file or folder by its path below the data; empty: it has none."""
    if not ANY.search(path):  # of most files, of which there may be a million
        return ""
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


def print_split(counts: Counter, data: str, evaluates: bool) -> None:
    """Prints what is done with the splits; `evaluates`: on the one for validation."""
    train = choose(counts, "data", data)
    text = f"{counts[train]:,} file{'s' * (counts[train] > 1)} to train on"
    unread = {name: counts[name] for name in ("validation", "test", "") if name != train}
    if evaluates:
        text += f", {unread.pop('validation'):,} to evaluate on"
    others = [f"{number:,} for {name or 'no split'}" for name, number in unread.items() if number]
    text += f"; not read: {', '.join(others)}" * bool(others)
    print(f"Preparing data: {one_line(data, 100)} has, by the names: {text}", flush=True)


# ---- Rows that are held out ----------------------------------------------------------------------


def extremes(parts: Iterable[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """The smallest hash of each label, and the largest: uint64 (labels,).

    `parts`: the hashes of rows, uint64 (N,), and their labels, int (N,).
    """
    smallest: dict[int, int] = {}
    largest: dict[int, int] = {}
    for hashes, labels in parts:
        order = np.lexsort((hashes, labels))
        found, starts = np.unique(labels[order], return_index=True)
        ends = [*starts, len(order)][1:]
        for label, start, end in zip(found.tolist(), starts, ends, strict=True):
            low, high = int(hashes[order[start]]), int(hashes[order[end - 1]])
            smallest[label] = min(smallest.get(label, low), low)
            largest[label] = max(largest.get(label, high), high)
    first, last = ([*each.values()] for each in (smallest, largest))
    return np.array(first, np.uint64), np.array(last, np.uint64)


def is_candidate(hashes: np.ndarray, limits: tuple, fraction: float) -> np.ndarray:
    """Whether rows may be held out, bool (N,): those with a hash in the first `fraction` of all
    hashes, and the first of each label, but never the last. `limits`: see `extremes`."""
    first, last = limits
    small = hashes < fraction * 2.0**64
    return (small | np.isin(hashes, first)) & ~np.isin(hashes, last)


def hold_out(
    hashes: np.ndarray, sizes: np.ndarray, limits: tuple, fraction: float, most: float
) -> set[int]:
    """The hashes of the rows that are held out: about `fraction`, of each label at least one.

    Equal rows have one hash. A threshold decides, and not a rank: of data that grows, no row is
    held out that was trained on, but the only row that a label had. The smallest hashes are taken
    while their sizes add up to at most `most`, but at least one, and the first of each label before
    the others.
    """
    chosen = is_candidate(hashes, limits, fraction)
    values, inverse = np.unique(hashes[chosen], return_inverse=True)
    weights = np.bincount(inverse, sizes[chosen], len(values))
    order = np.argsort(~np.isin(values, limits[0]), kind="stable")
    held: set[int] = set()
    weight = 0.0
    for value, size in zip(values[order].tolist(), weights[order].tolist(), strict=True):
        if weight + size <= most:
            held.add(value)
            weight += size
        elif held:
            break
    return held or {*values[order][:1].tolist()}


def is_in(hashes: np.ndarray, held: set[int]) -> np.ndarray:
    """Whether each row, by its hash, is held out: bool (N,)."""
    return np.isin(hashes, np.fromiter(held, np.uint64, len(held)))
