"""Rows of a prepared `datasets.Dataset` as numpy arrays: what a step trains on; and digests of its
columns.

Only values count in a digest: not how Arrow has cut them into chunks and files, which the number of
processes and the library's version decide.
"""

import contextlib
import hashlib
import itertools
import json
import os
import platform
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from samestep.base.files import read_json_object, replace_text
from samestep.data.sources import split_data
from samestep.step.inputs import Source

_BLOCK = 1000  # rows that are read at once: documents may have a megabyte
_TEXTS = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
_DIGESTS = "digests.json"  # beside the files of a saved split: the digests of its columns


# ---- Columns -------------------------------------------------------------------------------------


def chunks_of(dataset: Any, name: str) -> Iterator[pa.Array]:
    """The values of a column in parts, in the order that the dataset gives its rows."""
    for table in dataset.select_columns([name]).with_format("arrow").iter(_BLOCK):
        yield from table.column(name).chunks


def values_of(dataset: Any, name: str) -> np.ndarray:
    """A column of numbers (N,), in the order that the dataset gives its rows."""
    found = [chunk.to_numpy(zero_copy_only=False) for chunk in chunks_of(dataset, name)]
    return np.concatenate(found or [np.zeros(0, np.int64)])


def lengths_of(dataset: Any, name: str) -> np.ndarray:
    """The lengths of a column of lists, int64 (N,), in the order of the rows."""
    found = [pc.list_value_length(chunk).to_numpy() for chunk in chunks_of(dataset, name)]
    return np.concatenate(found or [np.zeros(0)]).astype(np.int64)


def cells_of(column: pa.ChunkedArray) -> list[Any]:
    """The values of a column as numpy has them: of lists views of one array."""
    column = column.combine_chunks()
    if not pa.types.is_nested(column.type):
        return [*column.to_numpy(zero_copy_only=False)]
    values = column.values.to_numpy()
    return [values[start:end] for start, end in itertools.pairwise(column.offsets.tolist())]


# ---- Rows ----------------------------------------------------------------------------------------


def rows_of(columns: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows as dicts, of columns of equal length."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


class Rows(torch.utils.data.Dataset):
    """Rows of some columns: dicts of numpy arrays (T,) for lists, and of numbers, in the order that
    the dataset gives them, also after select, filter or shuffle.

    `sized`: columns whose lengths are the size of a row. Sources and their weights are those of
    cfg.data.
    """

    def __init__(self, dataset: Any, names: list[str], sized: list[str], cfg: Any):
        self.dataset, self.names, self.sized = dataset, names, sized
        self.table = dataset.select_columns(names).with_format("arrow")
        if "source" in dataset.column_names:
            numbers = values_of(dataset, "source")
            if (np.diff(numbers) < 0).any():  # their weights could not be kept
                text = "rows of several sources are mixed; sort them by source"
                raise ValueError(f"task.views: {text}")
            weights = {each.name: each.weight for each in split_data(cfg.data)}
            names = getattr(dataset.features["source"], "names", None) or ["data"]
            counts = zip(names, np.bincount(numbers).tolist(), strict=False)  # the last may lack
            self.sources = [Source(n, rows, weights.get(n, 1)) for n, rows in counts if rows]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.__getitems__([i])[0]

    def __getitems__(self, places: list[int]) -> list[dict[str, Any]]:
        return rows_of(self.columns(places))

    def columns(self, places: list[int]) -> dict[str, list]:
        """The values of these rows in each column, as numpy has them."""
        table = self.table[places]
        return {name: cells_of(table.column(name)) for name in table.column_names}

    def sizes(self) -> np.ndarray:
        """The size of each row, int (N,)."""
        return np.sum([lengths_of(self.dataset, name) for name in self.sized], axis=0)

    def digest(self) -> str:
        shown = {*self.names, "source"} & {*self.dataset.column_names}
        return digest(self.dataset, sorted(shown))


# ---- Digests -------------------------------------------------------------------------------------


def digest(dataset: Any, names: Iterable[str] = ()) -> str:
    """64 hex digits for columns of a dataset, by default all: names, types and values in order.

    Those of a split that was saved with `store_digests` are not read again while the stamps of its
    files are the same.
    """
    names = sorted(names or dataset.column_names)
    stored = {}
    if dataset.cache_files:
        facts = read_json_object(_folder_of(dataset) / _DIGESTS)
        if facts.get("fingerprint") == dataset._fingerprint:  # no rows are chosen or moved
            stored = facts["columns"] if facts["files"] == _stamps_of(dataset) else {}
    total = hashlib.sha256(str(len(dataset)).encode())
    for name in names:
        total.update(f"{name} {stored.get(name) or _digest_column(dataset, name)}\n".encode())
    return total.hexdigest()


def store_digests(dataset: Any) -> None:
    """Writes the digests of all columns beside the files of a dataset that was loaded from disk."""
    columns = {name: _digest_column(dataset, name) for name in dataset.column_names}
    facts = {"fingerprint": dataset._fingerprint, "files": _stamps_of(dataset), "columns": columns}
    path = _folder_of(dataset) / _DIGESTS
    # Others write it too.
    partial = path.with_name(f".{_DIGESTS}-{platform.node()[:60]}-{os.getpid()}")
    replace_text(path, json.dumps(facts), partial)


def is_intact(dataset: Any, verify: bool = False) -> bool:
    """Whether a split holds what `store_digests` knows of it.

    It is read where the stamps of its files differ, as those of a copied disk do, or to `verify`.
    """
    facts = read_json_object(_folder_of(dataset) / _DIGESTS)
    if not verify and facts.get("files") == _stamps_of(dataset):
        return True
    found = {name: _digest_column(dataset, name) for name in dataset.column_names}
    if found != facts.get("columns"):
        return False
    with contextlib.suppress(OSError):  # on a read-only disk it is read each time
        store_digests(dataset)
    return True


def _folder_of(dataset: Any) -> Path:
    return Path(dataset.cache_files[0]["filename"]).parent


def _stamps_of(dataset: Any) -> dict[str, list[int]]:
    """Name, size, time and inode of each file of a dataset."""
    found = {}
    for each in dataset.cache_files:
        path = Path(each["filename"])
        status = path.stat()
        found[path.name] = [status.st_size, status.st_mtime_ns, status.st_ino]
    return found


def _digest_column(dataset: Any, name: str) -> str:
    """64 hex digits for the type and the values of a column, in the order of the rows, the same
    however Arrow has cut them: missing values, the lengths of lists and texts, and the values have
    a hash each."""
    hashes: dict[str, Any] = defaultdict(hashlib.sha256)
    sizes: Counter = Counter()  # of what was added, by the same names

    def add(array: pa.Array, place: str) -> None:
        """Adds the values of a column, or of what lies inside it at a place."""
        kind = array.type
        if isinstance(kind, pa.ExtensionType):
            return add(array.storage, place)
        if pa.types.is_dictionary(kind):
            return add(array.dictionary_decode(), place)
        if array.null_count:
            missing = np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))
            hashes[f"{place} missing"].update((missing + sizes[place]).astype("<i8"))
        sizes[place] += len(array)
        if pa.types.is_fixed_size_list(kind) or is_list(kind):
            lengths = pc.list_value_length(array).fill_null(0)
            hashes[f"{place} lengths"].update(lengths.to_numpy().astype("<i8"))
            add(array.flatten(), f"{place}[]")
        elif pa.types.is_struct(kind):
            for field, values in zip(kind, array.flatten(), strict=True):
                add(values, f"{place}.{field.name}")
        elif kind in _TEXTS:
            texts = array.cast(pa.large_binary()).fill_null(b"")
            hashes[f"{place} lengths"].update(pc.binary_length(texts).to_numpy().astype("<i8"))
            hashes[place].update(b"".join(texts.to_pylist()))
        elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
            values = array.fill_null(0).to_numpy()
            hashes[place].update(np.ascontiguousarray(values, values.dtype.newbyteorder("<")))
        else:  # truth values, times, decimals
            hashes[place].update("".join(f"{each!r}\n" for each in array.to_pylist()).encode())

    for chunk in chunks_of(dataset, name):
        add(chunk, "")
    digests = {place: each.hexdigest() for place, each in hashes.items()}
    facts = json.dumps([repr(dataset.features[name]), sizes, digests], sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()


def is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)
