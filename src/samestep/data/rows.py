"""Rows of texts or images as a `datasets.DatasetDict` with the splits train and validation.

One process reads all rows, file after file, into an Arrow file; the first wrong row ends it.
"""

import dataclasses
import json
import math
import os
import uuid
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from datasets.arrow_writer import ArrowWriter

from samestep.base.console import one_line
from samestep.data import files, readers, sources
from samestep.data.files import File
from samestep.data.readers import Columns, Place, Row
from samestep.data.sources import DataConfig, split_data

_Bundled = Mapping[str, Callable[[], Iterable[dict]]]
_WRITTEN = 2_000_000  # bytes of content that are written at a time
MOST_NAMES = 10_000  # of files, in the type of the column "file": they are read at each start
_SPLITS = ("train", "validation")
NOTES = ("source", "place", "file", "line")  # columns beside the content of rows
_HEAD = 20_000_000  # bytes of the beginnings of shards that are prepared, of a stream
_LEAST_HEADS, _MOST_HEADS = 16, 1000  # shards of these


# ---- Inputs --------------------------------------------------------------------------------------


@dataclass
class Input:
    """The rows that a field names: of a source, or those to evaluate on."""

    field: str  # data or data_split, validation_data or validation_split
    data: str  # as the config has it
    name: str  # for metrics
    files: list[File] = dataclasses.field(default_factory=list)
    dataset: Dataset | None = None  # of the Hub, or bundled
    columns: Columns = dataclasses.field(default_factory=dict)  # that are read
    paths: str = ""  # a column of paths that are relative to their table
    most: float = math.inf  # bytes of each file that are read, about
    empty: set[File] = dataclasses.field(default_factory=set)  # without rows

    @property
    def is_validation(self) -> bool:
        return self.field.startswith("validation")

    @cached_property
    def first(self) -> dict:
        """The first row, with all its columns; empty: there is none."""
        return next((row for row, _ in self._read(None)), {})

    @property
    def unused(self) -> list[str]:
        """Columns of the first row that are not read."""
        is_table = not self.files or files.file_ending(self.files[0].path) in files.TABLES
        return [name for name in self.first if name not in self.columns] if is_table else []

    def rows(self) -> Iterator[Row]:
        """Its rows as they stand in the files, each with its place."""
        return self._read(self.columns)

    def _read(self, columns: Columns | None) -> Iterator[Row]:
        if self.dataset is not None:
            yield from readers.read_dataset(self.dataset, columns, self.data, self.field)
        for file in self.files:
            place, size = None, 0
            for row, place in readers.read_file(file, columns, self.field):
                if self.paths and files.file_ending(file.path) in files.TABLES:
                    row[self.paths] = _relative_to(file.path, row.get(self.paths))
                yield row, place
                if self.most < math.inf:
                    size += sum(len(str(value)) for value in row.values())
                    if size >= self.most:
                        break
            if place is None:
                self.empty.add(file)


def _relative_to(table: str, value: Any) -> Any:
    """The path in a cell of a table, seen from here; any other value as it is."""
    if isinstance(value, dict) and not value.get("bytes"):  # as `datasets` writes images
        value = value.get("path")
    if isinstance(value, str) and value.strip():
        return os.path.join(os.path.dirname(table), value)
    return value


def find_inputs(
    cfg: DataConfig, bundled: _Bundled, endings: tuple[str, ...], in_classes: bool = False
) -> list[Input]:
    """The rows of all sources, and then those to evaluate on, if there are any.

    Of a folder whose files are named for several splits those to train on, and, unless
    cfg.validation_data names others, those to evaluate on. `in_classes`: the folder of a file is
    its class, but for tables.
    """
    if getattr(cfg, "streaming", False):
        return _find_shards(cfg)
    inputs, given = [], []
    for source in split_data(cfg.data):
        data, name = source.data, source.name
        if data in bundled:
            dataset = Dataset.from_list([*bundled[data]()])
            inputs.append(Input("data", data, name, dataset=dataset))
        elif sources.is_hub_name(data):
            for field, found in (("data_split", inputs), ("validation_split", given)):
                if split := getattr(cfg, field):
                    options = (data, cfg.data_config, split, cfg.data_revision)
                    rows = readers.load_split(*options, field)
                    found.append(Input(field, f"{data}, split {split}", name, dataset=rows))
        else:
            wanted = _SPLITS[:1] if cfg.validation_data else _SPLITS
            chosen = _list_data(data, "data", wanted, endings, in_classes)
            inputs.append(Input("data", data, name, chosen["train"]))
            if not chosen["train"]:
                text = f"{one_line(data, 100)} has no file to train on, by the names"
                raise ValueError(f"task.data: {text}; name the right one")
            if chosen["validation"]:
                given.append(Input("validation_data", data, name, chosen["validation"]))
    if data := cfg.validation_data:
        chosen = _list_data(data, "validation_data", _SPLITS[1:], endings, in_classes)
        name = inputs[0].name if data == inputs[0].data else Path(data).name
        given.append(Input("validation_data", data, name, chosen["validation"]))
    return [*inputs, *given]


def _list_data(
    data: str, field: str, wanted: tuple[str, ...], endings: tuple[str, ...], in_classes: bool
) -> dict[str, list[File]]:
    """The files of a path, of each split that is wanted. Prints how many there are."""
    found, others = files.list_files(data, field, endings)
    if in_classes:
        files.check_class_folders(found, field)
    chosen: dict[str, list[File]] = {split: [] for split in _SPLITS}
    for split in wanted:
        chosen[split] = files.choose(found, split, in_classes, wanted[0])
    read = {*chosen["train"], *chosen["validation"]}
    others += [each for each in found if each not in read]
    if len(read) + len(others) > 1:
        train, held = (len(chosen[split]) for split in _SPLITS)
        text = f"{train:,} files to train on, {held:,} to evaluate on, "
        text += f"{len(others):,} not read{_first(others)}"
        print(f"Preparing data: {one_line(data, 100)} has {text}", flush=True)
    return chosen


def _first(found: list[File]) -> str:
    """The first of these files, for a message."""
    return f" (the first: {one_line(found[0].name, 100)})" if found else ""


def _find_shards(cfg: DataConfig) -> list[Input]:
    """The beginnings of shards of a stream: of some to train on, and of those to evaluate on. All
    rows of shards that are named to evaluate on are read."""
    train, held, others = files.split_shards(cfg)
    text = f"{len(train):,} shards to train on, {len(held):,} to evaluate on, {others:,} not read"
    print(f"Preparing data: {one_line(cfg.data, 100)} has {text}", flush=True)
    mean = sum(each.size for each in train) // len(train) + 1
    count = min(len(train), max(_LEAST_HEADS, _HEAD // mean), _MOST_HEADS)
    heads = [train[i * len(train) // count] for i in range(count)]
    most = math.inf if cfg.validation_data else _HEAD
    return [
        Input("data", cfg.data, "stream", heads, most=_HEAD / len(heads)),
        Input("validation_data", cfg.data, "stream", held, most=most),
    ]


# ---- Reading -------------------------------------------------------------------------------------


def hash_of(text: str) -> int:
    """64 bits for a text, the same on every machine."""
    return int.from_bytes(sha256(text.encode()).digest()[:8], "big")


def key_of(row: dict[str, Any]) -> str:
    """Text that equal rows have in common; a text is its own."""
    return row["text"] if [*row] == ["text"] else json.dumps(row, default=str)


@dataclass
class RowFormat:
    """What is stored of the rows of a task."""

    normalize: Callable[[dict], dict]
    """Gets a row as it stands in a file, and returns what is stored of it. Raises IncompleteRow
    (cfg.incomplete_rows decides), or ValueError, which ends the run."""
    features: dict[str, Any]
    """The columns that `normalize` returns; text becomes large_string."""
    key: Callable[[dict], str] = key_of
    """Of a stored row: text that equal rows have in common, by default all of it."""
    group: Callable[[dict], str] | None = None
    """Of a stored row: rows with one group are all held out, or none; by default the content.
    cfg.group_column replaces it."""


def stored_rows(
    source: Input, form: RowFormat, cfg: DataConfig, left_out: list[str]
) -> Iterator[tuple[dict, str | None, Place]]:
    """What is stored of each row, its group, and its place. `left_out` gets an entry for each
    other row: the first says its place, later ones are empty.

    Raises ValueError for the first row that cannot be used.
    """
    for row, place in source.rows():
        try:
            group = _group_of(row[cfg.group_column]) if cfg.group_column else None
            stored = form.normalize(row)
        except sources.IncompleteRow as error:
            if cfg.incomplete_rows == "refuse":
                hint = "--task.incomplete_rows skip leaves such rows out"
                raise ValueError(f"task.{source.field}: {place}: {error}; {hint}") from None
            left_out.append("" if left_out else f"{place}: {error}")
        except ValueError as error:
            raise ValueError(f"task.{source.field}: {place}: {error}") from None
        else:
            yield stored, group, place


def _group_of(value: Any) -> str:
    """A group as text. Tables with nulls have 1.0 for 1."""
    sources.require_value("group", value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, str) else json.dumps(value, default=str)


def load_rows(inputs: list[Input], cfg: DataConfig, form: RowFormat) -> DatasetDict:
    """Read the rows of these inputs as splits train and validation, and print what is read.

    Of a stream the rows to train on are the beginnings of some shards: what tokenizers are made
    from. Columns that are added to those of `form` are "source", a ClassLabel of the names of the
    sources, and the place as "place", a text, and as "file" and "line", numbers.

    Raises ValueError for the first row that cannot be used, and where there is none to train on or
    to hold out.
    """
    names = [*dict.fromkeys(each.name for each in inputs)]
    hashes, sides, counts = array("Q"), array("Q"), []
    left_out: list[str] = []
    paths = [one_line(file.path, 200) for each in inputs for file in each.files]
    paths += [one_line(each.data, 200) for each in inputs if not each.files]
    numbers = {path: number for number, path in enumerate(dict.fromkeys(paths))}

    def read() -> Iterator[dict[str, Any]]:
        for source in inputs:
            before = len(hashes)
            if cfg.group_column:
                source.columns = {**source.columns, cfg.group_column: True}
            for stored, group, place in stored_rows(source, form, cfg, left_out):
                key = form.key(stored)
                if group is None:
                    group = form.group(stored) if form.group else key
                hashes.append(hash_of(key))
                sides.append(hashes[-1] if group == key else hash_of(group))
                number = {"source": names.index(source.name), "file": numbers[place.path]}
                yield {**stored, **number, "place": str(place), "line": place.line}
            counts.append(len(hashes) - before)
            if not counts[-1]:
                shown = ", ".join(each.name for each in source.files[:3])
                text = f"there are no rows in {source.data}" + (f" ({shown})" if shown else "")
                raise ValueError(f"task.{source.field}: {one_line(text, 300)}")

    notes = {"source": ClassLabel(names=names), "place": Value("string"), "line": Value("int64")}
    few = len(numbers) <= MOST_NAMES
    notes["file"] = ClassLabel(names=[*numbers]) if few else Value("int64")
    rows = _write(read(), {**form.features, **notes})
    said = [f"{len(rows):,} rows of {', '.join(names)}"]
    if columns := dict.fromkeys(name for each in inputs for name in each.columns):
        said[0] += f", from {', '.join(columns)}"
    if left_out:
        said[0] += f"; {len(left_out):,} left out (the first: {left_out[0]})"
    if unused := dict.fromkeys(name for each in inputs for name in each.unused):
        said.append(f"columns that are not used: {', '.join(unused)}")
    if empty := sorted(file for each in inputs for file in each.empty):
        said.append(f"{len(empty):,} files without rows{_first(empty)}")
    for text in said:
        print(f"Preparing data: {one_line(text, 500)}", flush=True)
    is_held = _hold_out_rows(inputs, counts, np.array(hashes), np.array(sides), cfg)
    text = f"{(~is_held).sum():,} rows to train on, {is_held.sum():,} to evaluate on"
    print(f"Prepared: {text}", flush=True)
    return DatasetDict({"train": _keep(rows, ~is_held), "validation": _keep(rows, is_held)})


def _write(rows: Iterable[dict[str, Any]], columns: dict[str, Any]) -> Dataset:
    """Rows in an Arrow file in the cache of `datasets`."""
    kinds = {}
    for name, kind in columns.items():
        is_text = getattr(kind, "dtype", "") == "string"  # of which 2 GB fit into a column
        kinds[name] = Value("large_string") if is_text else kind
    features = Features(kinds)
    path = Path(datasets.config.HF_DATASETS_CACHE, f"{uuid.uuid4().hex}.arrow")
    path.parent.mkdir(parents=True, exist_ok=True)
    waiting: list[dict] = []
    with ArrowWriter(features=features, path=str(path)) as writer:

        def write_waiting() -> None:
            writer.write_table(pyarrow.Table.from_pylist(waiting, features.arrow_schema))
            waiting.clear()

        size = 0
        for row in rows:
            waiting.append(row)
            size += 100 + sum(len(each) for each in row.values() if hasattr(each, "__len__"))
            if size > _WRITTEN:
                write_waiting()
                size = 0
        write_waiting()
        writer.finalize()
    return Dataset.from_file(str(path))


# ---- Splits --------------------------------------------------------------------------------------


def _hold_out_rows(
    inputs: list[Input], counts: list[int], hashes: np.ndarray, sides: np.ndarray, cfg: DataConfig
) -> np.ndarray:
    """Which rows are evaluated on, bool (N,): those that are given for it, or some of each source.

    counts    of rows of each input.
    hashes    of the content of rows, uint64 (N,).
    sides     of what belongs together, uint64 (N,): all held out, or none.

    Raises ValueError for a source of which no row is left to train on.
    """
    is_held = np.repeat([each.is_validation for each in inputs], counts)
    if is_held.any():
        known = np.isin(hashes[is_held], hashes[~is_held]).sum()
        if known:
            text = f"{known:,} of {is_held.sum():,} validation rows are training rows too"
            print(f"Preparing data: {text}: evaluation will look better than it is", flush=True)
        return is_held
    most = max(cfg.validation_rows // len(inputs), 1)
    ends = np.cumsum(counts).tolist()
    own = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
    held = [hold_out(sides[each], cfg.validation_fraction, most) for each in own]
    is_held = np.isin(sides, np.concatenate(held))
    for source, each in zip(inputs, own, strict=True):
        if is_held[each].all():
            why = "all are equal, or belong together, or other sources have them too"
            if each.stop - each.start == 1:
                why = "its only row is evaluated on"
            text = f"no row of {source.data} is left to train on: {why}; add others"
            raise ValueError(f"task.data: {text}")
    return is_held


def hold_out(sides: np.ndarray, fraction: float, most: int) -> np.ndarray:
    """The sides that are held out: those below a fraction of all hashes, as many as have at most so
    many rows, at least one.

    A threshold decides, and not a rank: of data that grows, no row is held out that was trained on.
    """
    ordered, sizes = np.unique(sides, return_counts=True)
    is_held = (ordered < fraction * 2.0**64) & (np.cumsum(sizes) <= most)
    return ordered[: max(int(is_held.sum()), 1)]


def _keep(rows: Dataset, mask: np.ndarray) -> Dataset:
    """The rows of a mask. (`select` would read each row through a list of indices: 0.1 ms.)"""

    def choose(table: Any, numbers: list[int]) -> Any:
        return table.filter(pyarrow.array(mask[numbers[0] : numbers[-1] + 1]))

    chosen = rows.with_format("arrow").map(choose, batched=True, with_indices=True, batch_size=50)
    return chosen.with_format(None)
