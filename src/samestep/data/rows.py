"""Rows of texts or images as a `datasets.DatasetDict` with the splits train and validation.

One process reads all rows, file after file, into an Arrow file; the first wrong row ends it.
"""

import itertools
import json
import uuid
from array import array
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from datasets.arrow_writer import ArrowWriter

from samestep.base.console import one_line
from samestep.data import readers
from samestep.data.inputs import Input, RowFormat, name_first
from samestep.data.sources import DataConfig

_WRITTEN = 2_000_000  # bytes of content that are written at a time
MOST_NAMES = 10_000  # of files, in the type of the column "file": they are read at each start
NUMBERS = ("source", "file", "line")  # of a row: where it comes from
NOTES = (*NUMBERS, "place")  # columns beside the content of rows


# ---- Reading -------------------------------------------------------------------------------------


def key_of(row: dict[str, Any]) -> str:
    """Text that equal rows have in common; a text is its own."""
    return row["text"] if [*row] == ["text"] else json.dumps(row, default=str)


def hash_of(text: str) -> int:
    """64 bits for a text, the same on every machine."""
    return int.from_bytes(sha256(text.encode()).digest()[:8], "big")


def load_rows(
    inputs: list[Input], cfg: DataConfig, form: RowFormat | Callable[[Input, dict], RowFormat]
) -> DatasetDict:
    """Read the rows of these inputs as splits train and validation, and print what is read.

    `form`: the format, or what gets a source and its first row, and returns their format. All have
    the same features. Rows to evaluate on that belong to a source have its format.

    Of a stream the rows to train on are the beginnings of some shards: what tokenizers are made
    from. Columns that are added are "source", a ClassLabel of the names of the sources, and the
    place as "place", a text, and as "file" and "line", numbers.

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
            own = [each.form for each in inputs if each.name == source.name]
            source.form = form if isinstance(form, RowFormat) else own[0]
            source.choose = form
            for stored, group, place in readers.read(source, cfg, left_out):
                key = (source.form.key or key_of)(stored)
                if group is None:
                    group = source.form.group(stored) if source.form.group else key
                hashes.append(hash_of(key))
                sides.append(hashes[-1] if group == key else hash_of(group))
                number = {"source": names.index(source.name), "file": numbers[place.path]}
                yield {**stored, **number, "place": str(place), "line": place.line}
            counts.append(len(hashes) - before)
            if not counts[-1]:
                shown = ", ".join(each.name for each in source.files[:3])
                nothing = "are no rows" if source.is_table else "is no text"
                text = f"there {nothing} in {source.data}" + (f" ({shown})" if shown else "")
                raise ValueError(f"task.{source.field}: {one_line(text, 300)}")

    notes = {"source": ClassLabel(names=names), "place": Value("string"), "line": Value("int64")}
    few = len(numbers) <= MOST_NAMES
    notes["file"] = ClassLabel(names=[*numbers]) if few else Value("int64")
    written = read()
    first = next(written)  # the format is known
    rows = _write(itertools.chain([first], written), {**inputs[0].form.features, **notes})
    said = [f"{len(rows):,} rows of {', '.join(names)}"]
    if columns := dict.fromkeys(name for each in inputs for name in each.columns):
        said[0] += f", from {', '.join(columns)}"
    if left_out:
        said[0] += f"; {len(left_out):,} left out (the first: {left_out[0]})"
    tables = [each for each in inputs if each.is_table]
    if unused := dict.fromkeys(n for each in tables for n in each.names if n not in each.columns):
        said.append(f"columns that are not used: {', '.join(unused)}")
    if empty := sorted(file for each in inputs for file in each.empty):
        said.append(f"{len(empty):,} files without rows{name_first(empty)}")
    for text in said:
        print(f"Preparing data: {one_line(text, 500)}", flush=True)
    is_held = _hold_out_rows(inputs, counts, np.array(hashes), np.array(sides), cfg)
    text = f"{(~is_held).sum():,} rows to train on, {is_held.sum():,} to evaluate on"
    print(f"Prepared: {text}", flush=True)
    return DatasetDict({"train": _keep(rows, ~is_held), "validation": _keep(rows, is_held)})


def _size_of(value: Any) -> int:
    """Bytes of a value, about."""
    if isinstance(value, dict):
        return sum(map(_size_of, value.values()))
    if isinstance(value, list) and value and not isinstance(value[0], int | float):
        return sum(map(_size_of, value))
    return len(value) if hasattr(value, "__len__") else 8


def _write(rows: Iterable[dict[str, Any]], columns: dict[str, Any]) -> Dataset:
    """Rows in an Arrow file."""
    kinds = {}
    for name, kind in columns.items():
        is_text = getattr(kind, "dtype", "") == "string"  # of which 2 GB fit into a column
        kinds[name] = Value("large_string") if is_text else kind
    features = Features(kinds)

    def tables() -> Iterator[pyarrow.Table]:
        waiting: list[dict] = []
        size = 0
        for row in rows:
            waiting.append(row)
            size += 100 + sum(map(_size_of, row.values()))
            if size > _WRITTEN:
                yield pyarrow.Table.from_pylist(waiting, features.arrow_schema)
                waiting, size = [], 0
        yield pyarrow.Table.from_pylist(waiting, features.arrow_schema)

    return write_tables(tables(), features)


def write_tables(tables: Iterable[pyarrow.Table], features: Any) -> Any:
    """A dataset of these tables, in an Arrow file in the cache of `datasets`."""
    path = Path(datasets.config.HF_DATASETS_CACHE, f"{uuid.uuid4().hex}.arrow")
    path.parent.mkdir(parents=True, exist_ok=True)
    with ArrowWriter(features=features, path=str(path)) as writer:
        for table in tables:
            writer.write_table(table)
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
