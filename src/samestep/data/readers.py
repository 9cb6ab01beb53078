"""Rows of .jsonl, .json, .csv, .tsv, .parquet, .txt and .md files, on a disk or in a store.

The loaders of `datasets` change values: dates become timestamps, NA becomes null, a CSV line with a
field too many shifts its columns. So these files are read here, one after the other, each from its
start to its end; `datasets` does all else.

A reader gets the columns that are wanted, {name: whether it must be there}, and yields a row with
these as they stand in the file, and the number of its line (of .json and .parquet: of the row).
"""

import csv
import gzip
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pyarrow
from datasets import Dataset, Features, Image
from pyarrow.parquet import ParquetFile

from samestep.base.console import one_line
from samestep.data.files import IMAGES, PACKED, File, file_ending

Columns = dict[str, bool]  # whether each column that is read must be there
_Numbered = Iterator[tuple[int, Any]]

DOCUMENT = 64_000  # characters of a document, of which a larger .txt or .md file has several

csv.field_size_limit(2**31 - 1)  # 131,072 characters otherwise


class Place(NamedTuple):
    """Where a row stands; str() is for messages."""

    path: str
    line: int = 0  # of .json, .parquet and the Hub the row; 0: it is the file
    unit: str = "line"

    def __str__(self) -> str:
        return f"{self.path}, {self.unit} {self.line}" if self.line else self.path


Row = tuple[dict[str, Any], Place]


# ---- Files ---------------------------------------------------------------------------------------


def read_file(file: File, columns: Columns | None, field: str = "data") -> Iterator[Row]:
    """The rows of a file, each with its place. What a row lacks is None; without `columns` all are
    read. A file that is no table has the columns `text` or `image`, and `label`, its folder's name.

    Raises ValueError, which names the last line that was read, for what cannot be read, and for a
    missing column; ConnectionError for a store out of reach.
    """
    path, ending, number = file.path, file_ending(file.path), 0
    unit = "row" if ending in (".json", ".parquet") else "line"
    shown = one_line(path, 200)
    read = _READERS.get(ending, _read_image if ending in IMAGES else _read_text)
    try:
        is_first = True
        for number, row in read(path, columns):
            if not isinstance(row, dict):
                raise ValueError(f"not an object: {row!r:.60}")
            if columns is not None:
                if is_first:  # what a later row lacks is null
                    _check_columns(row, columns)
                    is_first = False
                row = {name: row.get(name) for name in columns}
                row = replace_surrogates(row) if ending in _READERS else row
            yield row, Place(shown, number, unit)
    except MemoryError:
        raise
    except Exception as error:  # each library has its own errors for what a file holds
        after = f" after {unit} {number}" if number else ""
        text = f"task.{field}: cannot read {shown}{after}: {one_line(error)}"
        if "://" in path and not isinstance(error, ValueError | csv.Error):
            raise ConnectionError(text) from None
        raise ValueError(text) from None


def _check_columns(existing: Iterable[str], columns: Columns | None) -> None:
    """Raises ValueError for a column that is missing, or there twice; names the existing ones."""
    names = list(existing)
    for name, must in (columns or {}).items():
        number = names.count(name)
        if number > 1 or must and not number:
            problem = "more than one column" if number else "no column"
            shown = one_line(", ".join(names[:20]), 100)
            hint = "name the right one with --task.*_column"
            raise ValueError(f"{problem} {one_line(name, 60)} among {shown}; {hint}")


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        name = next(each for each in found if names.count(each) > 1)
        raise ValueError(f"the key {name!r:.60} is there twice in an object; remove one")
    return found


parse_json = json.JSONDecoder(object_pairs_hook=_object_of).decode  # json.loads keeps the last


def replace_surrogates(value: Any) -> Any:
    """JSON can spell half of a surrogate pair, which is not a character: `?` replaces it."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode(errors="replace").decode()
    if isinstance(value, list):
        return [replace_surrogates(each) for each in value]
    if isinstance(value, dict):
        return {replace_surrogates(key): replace_surrogates(each) for key, each in value.items()}
    return value


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _drop_nulls(each) for key, each in value.items() if each is not None}
    return [_drop_nulls(each) for each in value] if isinstance(value, list) else value


def _open_text(path: str) -> Any:
    """The text of a file, decompressed, without the mark of UTF-8. Only \\n ends a line; a
    \\r before it stays."""
    how: dict[str, Any] = {"encoding": "utf-8-sig", "newline": "\n"}
    if "://" in path:
        import fsspec

        return fsspec.open(path, "rt", compression="infer", **how)
    return (gzip.open if path.lower().endswith(PACKED) else open)(path, "rt", **how)


# ---- Readers -------------------------------------------------------------------------------------


def _read_image(path: str, columns: Columns | None) -> _Numbered:
    yield 0, {"image": path, "label": _folder_of(path)}


def _read_text(path: str, columns: Columns | None) -> _Numbered:
    """Documents of about DOCUMENT characters, cut at the ends of lines."""
    number = 1
    with _open_text(path) as file:
        while text := file.read(DOCUMENT):
            text += file.readline(DOCUMENT)
            if "\0" in text:  # UTF-16 without a mark
                raise ValueError("it has zero bytes: save it as UTF-8")
            if not text.isspace():
                yield number, {"text": text, "label": _folder_of(path)}
            number += text.count("\n")


def _folder_of(path: str) -> str:
    """The name of a file's folder, in which bytes that are not UTF-8 are written as \\xe9."""
    return os.fsencode(Path(path).absolute().parent.name).decode(errors="backslashreplace")


def _read_jsonl(path: str, columns: Columns | None) -> _Numbered:
    with _open_text(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, parse_json(line)


def _read_json(path: str, columns: Columns | None) -> _Numbered:
    """The objects of a list, one object, or lines of them, since many programs name .jsonl so."""
    with _open_text(path) as file:
        text = file.read()
    try:
        rows = parse_json(text)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise
        return _read_jsonl(path, columns)
    return enumerate([rows] if isinstance(rows, dict) else rows, 1)


def _read_csv(path: str, columns: Columns | None) -> _Numbered:
    mark = "\t" if file_ending(path) == ".tsv" else ","
    with _open_text(path) as file:
        rows = csv.reader(file, delimiter=mark, strict=True)
        names = next(filter(None, rows), [])
        if not names:
            raise ValueError("it is empty: it has no column names")
        _check_columns(names, columns)
        last = rows.line_num
        for row in rows:
            number = rows.line_num
            if mark == "\t" and number > last + 1 and any(mark in each for each in row):
                hint = 'write a text with " as "...""...", or save the rows as .jsonl'
                raise ValueError(f'a " takes the lines to {number} as one text; {hint}')
            last = number
            if row and len(row) != len(names):
                problem = f"line {number} has {len(row)} fields"
                raise ValueError(f"{problem}, the first line {len(names)}")
            # Perhaps after a mark of UTF-8. One name alone may be a text.
            if row[1:] and row[1:] == names[1:] and row[0].lstrip("\ufeff") == names[0]:
                raise ValueError(f"line {number} has the column names again: remove it")
            if row:
                yield number, dict(zip(names, row, strict=True))


def _read_parquet(path: str, columns: Columns | None) -> _Numbered:
    content: Any = path
    if "://" in path:
        import fsspec

        content = fsspec.open(path, "rb").open()
    # Otherwise memory grows with the file, or with its largest group of rows.
    with ParquetFile(content, pre_buffer=False, buffer_size=2**20) as table:
        names = table.schema_arrow.names
        _check_columns(names, columns)
        # datasets does not know the types of some columns, such as maps.
        fields = [each for each in table.schema_arrow if each.name in (columns or ())]
        schema = pyarrow.schema(fields, table.schema_arrow.metadata)
        classes = _class_names(Features.from_arrow_schema(schema))
        read = names if columns is None else schema.names
        number = 0
        for batch in table.iter_batches(256, columns=read):
            for row in batch.to_pylist():
                number += 1
                yield number, _read_cells(row, classes)


_READERS: dict[str, Callable[[str, Columns | None], _Numbered]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
}


# ---- The Hub -------------------------------------------------------------------------------------

# What is downloaded stays there, since offline it is all there is: a preparation has a cache of its
# own, which is removed.
_CACHE = os.environ.get("HF_DATASETS_CACHE")


def load_split(name: str, config: str, split: str, revision: str, field: str) -> Any:
    """A split of a dataset on the Hub, downloaded once: a `datasets.Dataset`.

    Raises ValueError unless `revision` is a commit; the message gives the newest one.
    """
    if not re.fullmatch("[0-9a-f]{40}", revision):
        raise _unknown_commit(name, revision or "main")
    datasets.disable_progress_bars()
    cache_dir = _CACHE or os.path.join(datasets.config.HF_CACHE_HOME, "datasets")
    how = {"split": split, "revision": revision, "cache_dir": cache_dir}
    try:
        found = datasets.load_dataset(name, config or None, **how)
        if not any(revision in each["filename"] for each in found.cache_files):
            raise ValueError("the Hub cannot be reached, and this disk has another commit of it")
    except Exception as error:  # each library underneath has its own
        if isinstance(error, datasets.exceptions.DatasetGenerationError):  # says nothing itself
            error = error.__cause__ or error
        where = f"{name}, config {config or 'default'}, split {split}"
        text = f"cannot load {where} from the Hub: {one_line(error)}"
        raise ValueError(f"task.{field}: {text}") from None
    return found


def _unknown_commit(name: str, revision: str) -> ValueError:
    """An error that gives the newest commit of a branch."""
    from huggingface_hub import HfApi

    try:
        commit = HfApi().dataset_info(name, revision=revision).sha
    except Exception as error:
        text = "is neither here nor on the Hub, or the Hub cannot be reached"
        return ValueError(f"task.data: {name} {text}: {one_line(error)}")
    text = f"write --task.data_revision {commit}, which is {revision} of {name} now"
    return ValueError(f"task.data_revision: datasets on the Hub change; {text}")


def read_dataset(dataset: Dataset, columns: Columns | None, data: str, field: str) -> Iterator[Row]:
    """The rows of a dataset of the Hub, each with its place: with names in place of the numbers of
    classes. Without `columns` all are read. Raises ValueError for a missing column."""
    try:
        _check_columns(dataset.column_names, columns)
    except ValueError as error:
        raise ValueError(f"task.{field}: {data}: {error}") from None
    columns = columns or dict.fromkeys(dataset.column_names, True)
    part = dataset.select_columns([name for name in columns if name in dataset.column_names])
    for name in part.column_names:  # decoded images would not fit into memory
        if isinstance(part.features[name], Image):
            part = part.cast_column(name, Image(decode=False))
    classes = _class_names(part.features)
    for number, row in enumerate(part, 1):
        row = dict.fromkeys(columns) | _read_cells(row, classes)
        yield replace_surrogates(row), Place(one_line(data, 200), number, "row")


def _class_names(features: dict[str, Any]) -> dict[str, list[str] | None]:
    """The names of the classes of each column; None: it has none."""
    return {c: getattr(getattr(f, "feature", f), "names", None) for c, f in features.items()}


def _read_cells(row: dict[str, Any], classes: dict[str, list[str] | None]) -> dict[str, Any]:
    """The row of a table with names in place of the numbers of classes, of which -1, no class,
    becomes None; and without null keys inside objects, which have the keys of all rows."""
    for column, value in row.items():
        row[column] = _drop_nulls(value)
        names = classes.get(column)
        if names and isinstance(value, list):
            row[column] = [names[i] for i in value if i >= 0]
        elif names and isinstance(value, int):
            row[column] = names[value] if value >= 0 else None
    return row
