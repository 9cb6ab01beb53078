"""Where the rows of a task come from: files, folders or the Hub.

Errors in the data are a ValueError of one line.
"""

import copy
import functools
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from samestep.base.console import one_line
from samestep.base.fields import (
    NOTHING,
    Fraction,
    check_fields,
    check_ignored_fields,
    local_path,
)
from samestep.data import hub, splits
from samestep.data.tables import COMPRESSIONS, TABLES, file_ending

LONGEST_PERIOD = 100_000  # largest sum of weights, as in samestep/settings/contract.py
HELD_OUT = "validation_fraction validation_rows group_column"  # fields that say which rows
ValidationRows = Annotated[int, Field(ge=1, le=10**9)]


class WeightedData(NamedTuple):
    """One of several sources of data, and its share of the samples of a step."""

    data: str
    weight: int
    name: str  # short, for metrics


class Source(NamedTuple):
    """A part of a dataset, as train.py orders its samples: see samestep/settings/contract.py."""

    name: str
    rows: int
    weight: int


@dataclass
class DataConfig:
    """The data fields that all tasks share."""

    # Data
    data: str = ""
    """Training rows: a file, a folder, or the name of a data set on the Hub."""
    data_config: str = ""
    """Data set on the Hub: its configuration, also called subset."""
    data_split: str = "train"
    """Data set on the Hub: the training split."""
    data_revision: str = ""
    """Data set on the Hub: the commit, 40 hex digits, because names and branches move on."""
    validation_data: str = ""
    """Validation rows: a file or a folder; empty: the files of `data` that are named validation,
    valid, val or dev, or without these a fraction of the training rows, which is held out."""
    validation_split: str = ""
    """Data set on the Hub: the validation split; empty: as for validation_data."""
    validation_fraction: Fraction = 0.1
    """Fraction of the training rows held out for evaluation, about. A hash of each row's content
    decides: the choice is the same on every machine, equal rows stay on one side, and no row is
    held out of more data that was trained on before, but the only one that a class had."""
    validation_rows: ValidationRows = 1000
    """Most rows that are held out, however many there are: an evaluation of 1,000 rows takes about
    a tenth of the time of 100 steps of 32 samples."""
    group_column: str = ""
    """Column whose value says what belongs together (a patient, a conversation): rows with one
    value are all held out, or none; empty: rows that are equal."""
    incomplete_rows: Literal["refuse", "skip"] = "refuse"
    """Rows without a text, label or answer: end the run, or count and skip them."""
    cache_dir: str = field(default=".cache/data", metadata=NOTHING)
    """Folder for prepared data; each combination of data and settings has a subfolder."""


def check_data_config(cfg: DataConfig, shipped: Iterable[str], reads_groups: bool = False) -> None:
    """Raises ValueError for fields of DataConfig that cannot work, before any row is read.

    `shipped`: names of data that the task brings along. `reads_groups`: whether the task reads
    group_column. Makes a list in `data` a text.
    """
    cfg.data = data_as_text(cfg.data)
    streaming = getattr(cfg, "streaming", None)  # None: the task has no such field
    for _, own in by_source(cfg):
        for name in ("data", "validation_data"):
            if "://" in getattr(own, name) and not streaming:
                hint = "; --task.streaming true reads shards there" * (streaming is not None)
                url = one_line(getattr(own, name), 100)
                raise ValueError(f"task.{name}: {url} is a URL: download the data first{hint}")
        rules = [("data", own.data, "a path, or a name"), ("cache_dir", own.cache_dir, "a folder")]
        check_fields(own, rules)
        local_path(own.cache_dir, "cache_dir")
        local_path(own.validation_data, "validation_data")
        on_hub = own.data not in shipped and hub.is_hub_name(own.data)
        no_hub = f"because task.data, {one_line(own.data, 60)}, is not a data set on the Hub"
        split = on_hub and not own.validation_data
        held_out = not (own.validation_data or own.validation_split)
        check_ignored_fields(
            own,
            [
                ("data_config data_split data_revision validation_split", on_hub, no_hub),
                ("validation_split", split, "beside task.validation_data"),
                (HELD_OUT, held_out, "when validation rows are given"),
                ("group_column", reads_groups, "with this task"),
                ("group_column", own.data not in shipped, f"where task.data is {own.data}"),
            ],
        )


# ---- Several sources -----------------------------------------------------------------------------


def by_source(
    cfg: Any, endings: Iterable[str] | Callable[[str], Iterable[str]] = ()
) -> list[tuple[WeightedData, Any]]:
    """Each source that cfg.data names, and the config with its data alone.

    validation_data is that of the first: it is read once. If it is empty, it becomes the source
    itself where that has files with these endings for validation (`splits.py`): `walk` takes, of
    such a folder, for each field those that are meant.
    """
    found = []
    for each in split_data(cfg.data):
        given = "" if found else cfg.validation_data
        read = endings(each.data) if callable(endings) else endings
        if not cfg.validation_data and "validation" in count_splits(each.data, read):
            where = f"where {one_line(each.data, 60)} has files for validation"
            check_ignored_fields(cfg, [(HELD_OUT, False, where)])
            given = each.data
        own = copy.copy(cfg)  # `replace` would read the fields of the model
        own.data, own.validation_data = each.data, given
        found.append((each, own))
    return found


def data_as_text(data: str | list[dict]) -> str:
    """`data` as text: a list of {path, weight} becomes PATH:WEIGHT,PATH:WEIGHT.

    Raises ValueError for other entries.
    """
    if isinstance(data, str):
        return data
    for each in data:
        whole = type(each.get("weight", 1)) is int and isinstance(each.get("path"), str)
        if not whole or {*each} - {"path", "weight"} or "," in each["path"]:
            raise ValueError(
                f"task.data: an entry is {one_line(each, 100)}; give a path, without a comma, and "
                "a whole weight: {path: a.jsonl, weight: 2}"
            )
    return ",".join(f"{each['path']}:{each.get('weight', 1)}" for each in data)


def split_data(data: str) -> list[WeightedData]:
    """The sources that `data` names, as a.jsonl:2,b.jsonl; a weight that is not given is 1.

    Raises ValueError for weights that cannot be, and for a source that is named twice.
    """
    if os.path.lexists(local_path(data, "data")) or not re.search(r",|:\d+$", data):
        return [WeightedData(data, 1, data)]
    found: list[tuple[str, int]] = []
    for part in data.split(","):
        name, weight = re.fullmatch(r"(.*?)(?::(-?[\d.]+))?", part.strip(), re.DOTALL).groups()
        if not name or weight and not (weight.isdecimal() and int(weight)):
            raise ValueError(
                f"task.data: one of its sources is {one_line(repr(part), 60)}; give each as "
                "PATH:WEIGHT, with a whole weight of at least 1"
            )
        found.append((name, int(weight or 1)))
    paths, weights = zip(*found, strict=True)
    if len({os.path.realpath(local_path(path, "data")) for path in paths}) < len(paths):
        raise ValueError(f"task.data: {one_line(data, 100)} names a source twice; add its weights")
    if sum(weights) // math.gcd(*weights) > LONGEST_PERIOD:
        raise ValueError(
            f"task.data: the weights {', '.join(map(str, weights))} are too fine; give some in "
            f"about the same proportion, with a sum of at most {LONGEST_PERIOD:,}"
        )
    names = [Path(path).name or path for path in paths]
    names = names if len({*names}) == len(names) else paths
    return [WeightedData(*each, name) for each, name in zip(found, names, strict=True)]


# ---- Files ---------------------------------------------------------------------------------------

# Folders, in each the names of files with their splits, and the number of others by their endings.
Listed = list[tuple[str, dict[str, str], Counter]]
READABLE = (".txt", *TABLES, *COMPRESSIONS)
IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")


def list_files(data: str, endings: Iterable[str], field: str = "data") -> list[Path]:
    """The files with these endings: `data` itself, or all below it, sorted by path."""
    listed = walk(data, endings, field)
    return sorted(Path(folder, name) for folder, names, _ in listed for name in names)


def walk(data: str, endings: Iterable[str], field: str) -> list[tuple[str, list[str], Counter]]:
    """Each folder from `data` down: its path, the sorted names of its files with these endings, and
    the number of its other files by their endings. A file is all of its folder.

    Of a folder that holds several splits, those files alone that `field` means. Raises ValueError
    if there are none, or if one is unreachable: a class or a part of the rows would be missing
    unnoticed.
    """
    listed = walk_all(data, endings, field)
    if not any(names for _, names, _ in listed):
        others = sum((own for *_, own in listed), Counter())
        packed = f" (text also compressed: {' or '.join(COMPRESSIONS)})"
        raise ValueError(
            f"task.{field}: nothing to read at {one_line(data, 100) or 'an empty path'}"
            f"{describe_skipped(others)}; pass --task.{field} PATH, a file or folder of "
            f"{', '.join(endings)}{packed}"
        )
    if counts := count_all(listed):
        split = splits.choose(counts, field, data)
        listed = [
            (folder, {name: own for name, own in names.items() if own == split}, others)
            for folder, names, others in listed
        ]
    return [(folder, [*names], others) for folder, names, others in listed]


def count_splits(data: str, endings: Iterable[str], field: str = "data") -> Counter:
    """The number of files with these endings of each split; empty: the folder is not divided."""
    root = local_path(data, field)
    if not (data and endings and root.is_dir()):
        return Counter()
    return list_splits(data, tuple(endings), field, root.stat().st_mtime_ns)


@functools.cache  # a start asks several times, and there may be a million files
def list_splits(data: str, endings: tuple[str, ...], field: str, changed: int) -> Counter:
    """`count_splits` of a folder; `changed`: when it did last."""
    return count_all(walk_all(data, endings, field))


def count_all(listed: Listed) -> Counter:
    """`splits.count` of the files. Of images alone, folders that lie side by side are classes
    unless all are named like splits: `test tube` beside `bottle` is one."""
    filled = [(os.path.dirname(folder), names) for folder, names, _ in listed if names]
    own = [split for _, names in filled for split in names.values()]
    if "" in own and {above for above, _ in filled} == {listed[0][0]}:
        if all(name.lower().endswith(IMAGES) for _, names in filled for name in names):
            return Counter()
    return splits.count(own)


def walk_all(data: str, endings: Iterable[str], field: str) -> Listed:
    """`walk` over all splits, with that of each file.

    Lists folders, and asks the system about no file. Hidden files do not count: notebooks and file
    managers keep copies in them. Raises ValueError for what is neither file nor folder, as a broken
    link, since its rows would be missing.
    """
    root = local_path(data, field)
    if not (data and os.path.lexists(root)):
        return []
    if not is_folder(root, field):
        return [(str(root.parent), *choose_files([root.name], endings))]
    seen: set[tuple[int, int]] = set()  # folders by device and inode: links may lead back
    to_visit, found = [str(root)], []
    while to_visit:
        path = to_visit.pop()
        status = os.stat(path)
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        files, below = [], []
        with os.scandir(path) as entries:
            for entry in entries:
                if not entry.name.startswith("."):
                    (below if is_folder(entry, field) else files).append(entry.name)
        to_visit += [os.path.join(path, name) for name in sorted(below, reverse=True)]
        above = splits.split_of(os.path.relpath(path, root))
        found.append((path, *choose_files(sorted(files), endings, above)))
    return found


def is_folder(path: Path | os.DirEntry, field: str) -> bool:
    """Whether it is a folder, not a file. Raises ValueError for what is neither."""
    if path.is_file():
        return False
    if not path.is_dir():
        problem = "is a broken link" if os.path.islink(path) else "is neither file nor folder"
        shown = one_line(os.fspath(path), 100)
        raise ValueError(f"task.{field}: {shown} {problem}: fix or remove it")
    return True


def choose_files(
    names: list[str], endings: Iterable[str], above: str = ""
) -> tuple[dict[str, str], Counter]:
    """The names with these endings, and the number of the others by their endings.

    Each name with its split: that of the folders `above`, or its own. The name of an image says
    none.
    """
    chosen, others, plain = {}, Counter(), tuple(endings)
    for name in names:
        low = name.lower()
        if low.endswith(plain) or file_ending(name) in plain:
            chosen[name] = above or (splits.split_of(name) if low.endswith(READABLE) else "")
        else:
            others["".join(Path(name).suffixes[-2:])[-20:] or "no ending"] += 1
    return chosen, others


def list_endings(counts: Counter) -> str:
    """Numbers of files by ending, the most first, ten at most."""
    most = sorted(counts.items(), key=lambda each: (-each[1], each[0]))[:10]
    return ", ".join(f"{number:,} {one_line(ending, 20)}" for ending, number in most)


def describe_skipped(others: Counter) -> str:
    """The number of skipped files by ending, as part of a sentence; empty: none."""
    number = others.total()
    text = f" (skipped {number:,} other file{'s' * (number > 1)}: {list_endings(others)})"
    return text * (number > 0)


def class_of(file: Path, root: Path, field: str) -> str:
    """The name of a file's folder, below `root` or below the folder of a split there.

    Raises ValueError for a file elsewhere.
    """
    *above, own = file.relative_to(root).parts[:-1] or ("", "")
    if above and not (len(above) == 1 and splits.split_of(above[0])):
        raise ValueError(
            f"task.{field}: {one_line(file, 150)} is not in the folder of its class; it should "
            f"be {one_line(root / 'CLASS' / file.name, 150)}"
        )
    return own


def print_skipped_files(cfg: DataConfig, endings: Iterable[str], shipped: bool = False) -> None:
    """Prints the splits of the data, the endings of its files, and those that are not read.

    Raises ValueError for a text whose folder is not that of a class.
    """
    local = "" if shipped or hub.is_hub_name(cfg.data) else cfg.data
    if counts := count_splits(local, endings):
        splits.print_split(counts, cfg.data, cfg.validation_data == cfg.data)
    given = cfg.validation_data if cfg.validation_data != local else ""
    for name, data in (("data", local), ("validation_data", given)):
        listed, root = walk(data, endings, name) if data else [], local_path(data, name)
        for folder, names, _ in listed:
            text = next((n for n in names if file_ending(n) == ".txt"), "")
            if text and hasattr(cfg, "label_column") and root in Path(folder).parents:
                class_of(Path(folder, text), root, name)
        every = walk_all(data, endings, name) if hasattr(cfg, "label_column") else []
        kinds = {Path(folder): {*map(file_ending, names)} for folder, names, _ in every}
        above = {path.parent for path, own in kinds.items() if path != root and own - {*TABLES}}
        empty = [path.name for path, own in kinds.items() if path.parent in above and not own]
        if empty:
            text = f"{one_line(data, 100)}: nothing to read in the folders of classes "
            print(f"Preparing data: {text}{one_line(', '.join(empty), 200)}", flush=True)
        read = Counter(file_ending(each) for _, names, _ in listed for each in names)
        others = sum((own for *_, own in listed), Counter())
        if others or len(read) > 1:  # one of them may describe the data
            text = f"{one_line(data, 100)}: {list_endings(read)}{describe_skipped(others)}"
            print(f"Preparing data: {text}", flush=True)


# ---- Rows ----------------------------------------------------------------------------------------


def field_of(split: str, cfg: DataConfig) -> str:
    """The field that names the rows of a split."""
    if split == "train" or not (cfg.validation_data or cfg.validation_split):
        return "data"
    return "validation_data" if cfg.validation_data else "validation_split"


class IncompleteRow(ValueError):
    """A row has no label, no text or no answer."""


class UselessRow(IncompleteRow):
    """A row from which nothing can be learnt: it is counted and left out, whatever the config."""


def require_texts(row: dict) -> None:
    """Raises ValueError for a row in which a text is missing, empty (but for a prompt), or none."""
    for role, value in row.items():
        blank = role != "prompt" and not str(value).strip()
        if value is None or value != value or blank:  # tables have NaN for null
            raise IncompleteRow(f"the {role} is empty")
        if not isinstance(value, str):
            raise ValueError(f"the {role} is {one_line(repr(value), 60)} but must be text")


def leave_out(
    error: ValueError, place: str, cfg: DataConfig, field: str, left_out: Counter
) -> None:
    """Counts a row that is left out, by its reason; raises ValueError if it must not be."""
    incomplete = isinstance(error, IncompleteRow)
    if isinstance(error, UselessRow):
        add_left_out(left_out, {f"{error} (the first: {place})": 1})
        return
    if not incomplete or cfg.incomplete_rows == "refuse":
        hint = "; --task.incomplete_rows skip leaves such rows out" * incomplete
        raise ValueError(f"task.{field}: {place}: {error}{hint}") from None
    reason = re.sub(r"\d+", "N", str(error).partition(" (")[0])  # the same for rows alike
    add_left_out(left_out, {f"incomplete: {reason} (the first: {place})": 1})


def add_left_out(left_out: Counter, more: dict[str, int]) -> None:
    """Adds numbers of rows by their reasons; of two places of a reason the first stays."""
    known = {text.partition(" (the first: ")[0]: text for text in left_out}
    for text, number in more.items():
        left_out[known.get(text.partition(" (the first: ")[0], text)] += number


def say_prepared(
    rows: str, read: int, train: int, evaluated: str, left_out: Counter, remark: str = ""
) -> None:
    """Prints what became of the `rows` that were read. `left_out`: how many, by the reason."""
    text = f"{read:,} {rows} read, {train:,} to train on, {evaluated} to evaluate on"
    reasons = ", ".join(f"{number:,} {reason}" for reason, number in left_out.items() if number)
    text += f"; left out: {reasons}" * bool(reasons) + remark
    print(f"Prepared: {text}", flush=True)


def say_overlap(number: int, total: int, least: str = "") -> None:
    if number:
        text = f"{least}{number:,} of {total:,} validation rows are training rows too"
        print(f"Preparing data: {text}: evaluation will look better than it is", flush=True)


def break_long_words(texts: Iterable[str]) -> Iterator[str]:
    """The texts with a space after every 1,000 characters without one, for BPE training.

    Its time grows with the square of a word's length: a word of 3 MB would take hours.
    """
    for text in texts:
        yield re.sub(r"(\S{1000})(?=\S)", r"\1 ", text)
