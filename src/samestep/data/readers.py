"""Rows of .jsonl, .json, .csv, .tsv, .parquet, .txt and .md files, on a disk or in a store.

The loaders of `datasets` change values: dates become timestamps, NA becomes null, a CSV line with a
field too many shifts its columns. So these files are read here, one after the other, each from its
start to its end; `datasets` does all else.

A reader shows `_columns_of` the first row of a file, with all its columns, and gets those to read.
Then it yields all rows with these as they stand in the file, each with the number of its line (of
.json and .parquet: of the row).
"""

import csv
import gzip
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
from datasets import Audio, Features, Image, List
from pyarrow.parquet import ParquetFile

from samestep.base.console import one_line
from samestep.data.files import IMAGES, PACKED, TABLES, File, file_ending
from samestep.data.inputs import Columns, Input
from samestep.data.sources import DataConfig, IncompleteRow, require_value

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


# ---- Rows ----------------------------------------------------------------------------------------


def read(
    source: Input, cfg: DataConfig, left_out: list[str]
) -> Iterator[tuple[dict, str | None, Place]]:
    """Yield what is stored of each row of an input, its group, and its place. Notes files without
    rows. `left_out` gets an entry for each row that is skipped: the first says its place, later
    ones are empty.

    Raises ValueError for the first row that cannot be used.
    """
    source.group = cfg.group_column
    for file in source.files or [File(source.data, "", 0)]:
        place, size = None, 0
        for row, place in _read_file(file.path, source):
            if source.most < math.inf:
                size += sum(len(str(value)) for value in row.values())
            try:
                group = _group_of(row[cfg.group_column]) if cfg.group_column else None
                stored = source.form.normalize(row)
            except IncompleteRow as error:
                if cfg.incomplete_rows == "refuse":
                    hint = "--task.incomplete_rows skip leaves such rows out"
                    raise ValueError(f"task.{source.field}: {place}: {error}; {hint}") from None
                left_out.append("" if left_out else f"{place}: {error}")
            except ValueError as error:
                raise ValueError(f"task.{source.field}: {place}: {error}") from None
            else:
                yield stored, group, place
            if size >= source.most:
                break
        if place is None:
            source.empty.add(file)


def _group_of(value: Any) -> str:
    """A group as text. Tables with nulls have 1.0 for 1."""
    require_value("group", value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _relative_to(table: str, value: Any) -> Any:
    """The path in a cell of a table, seen from here; any other value as it is."""
    if isinstance(value, list):
        return [_relative_to(table, each) for each in value]
    if isinstance(value, dict) and "path" in value and not value.get("bytes"):
        value = value["path"]  # as `datasets` writes images
    if isinstance(value, str) and value.strip():
        return os.path.join(os.path.dirname(table), value)
    return value


def _read_file(path: str, source: Input) -> Iterator[tuple[dict[str, Any], Place]]:
    """Yield the rows of a file, or of a dataset of the Hub, each with its place. What a row lacks
    is None. A file that is no table has the columns `text` or `image`, and `label`, its folder's
    name.

    Raises ValueError, which names the last line that was read, for what cannot be read, and for a
    missing column; ConnectionError for a store out of reach.
    """
    number, shown = 0, one_line(path, 200)
    ending = "hub" if source.dataset is not None else file_ending(path)
    unit = "row" if ending in (".json", ".parquet", "hub") else "line"
    read_rows = _READERS.get(ending, _read_image if ending in IMAGES else _read_text)
    columns: Columns = {}
    try:
        for number, row in read_rows(path, source):
            if not isinstance(row, dict):
                raise ValueError(f"not an object: {row!r:.60}")
            if not columns:  # what a later row lacks is null
                columns = _columns_of(source, row, [*row])
            row = {name: row.get(name) for name in columns}
            if ending in _READERS:
                row = replace_surrogates(row)
            if source.form and ending in TABLES:
                row |= {name: _relative_to(path, row[name]) for name in source.form.paths}
            yield row, Place(shown, number, unit)
    except Exception as error:  # each library has its own errors for what a file holds
        if isinstance(error, MemoryError) or str(error).startswith("task."):  # it has its field
            raise
        after = f" after {unit} {number}" if number and f"{error}"[:5] != "line " else ""
        text = f"task.{source.field}: cannot read {shown}{after}: {one_line(error)}"
        if "://" in path and not isinstance(error, ValueError | csv.Error):
            raise ConnectionError(text) from None
        raise ValueError(text) from None


def _columns_of(source: Input, first: dict, names: list[str]) -> Columns:
    """Return the columns to read of a file with columns of these names. The first row of all files
    chooses the format.

    Raises ValueError for a column that is missing, or there twice.
    """
    if not source.columns:
        source.form = source.form or source.choose(source, first)
        source.names, source.columns = [*first], {**source.form.columns}
        if source.group:
            source.columns[source.group] = True
    for name, must in source.columns.items():
        number = names.count(name)
        if number > 1 or must and not number:
            problem = "more than one column" if number else "no column"
            shown = one_line(", ".join(names[:20]), 100)
            hint = source.form.hint
            raise ValueError(f"{problem} {one_line(name, 60)} among {shown}; {hint}")
    return source.columns


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


def drop_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: drop_nulls(each) for key, each in value.items() if each is not None}
    return [drop_nulls(each) for each in value] if isinstance(value, list) else value


def _open_text(path: str) -> Any:
    """The text of a file, decompressed, without the mark of UTF-8. Only \\n ends a line; a
    \\r before it stays."""
    how: dict[str, Any] = {"encoding": "utf-8-sig", "newline": "\n"}
    if "://" in path:
        import fsspec

        return fsspec.open(path, "rt", compression="infer", **how)
    return (gzip.open if path.lower().endswith(PACKED) else open)(path, "rt", **how)


# ---- Readers -------------------------------------------------------------------------------------


def _read_image(path: str, source: Input) -> _Numbered:
    yield 0, {"image": path, "label": _folder_of(path)}


def _read_text(path: str, source: Input) -> _Numbered:
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


def _read_jsonl(path: str, source: Input) -> _Numbered:
    with _open_text(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    row = parse_json(line)
                except json.JSONDecodeError as error:  # of which each line is line 1
                    place = f"line {number}, character {error.pos + 1}"
                    raise ValueError(f"{place}: {error.msg}") from None
                yield number, row


def _read_json(path: str, source: Input) -> _Numbered:
    """The objects of a list, one object, or lines of them, since many programs name .jsonl so."""
    with _open_text(path) as file:
        text = file.read()
    try:
        rows = parse_json(text)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise
        return _read_jsonl(path, source)
    return enumerate([rows] if isinstance(rows, dict) else rows, 1)


def _read_csv(path: str, source: Input) -> _Numbered:
    mark = "\t" if file_ending(path) == ".tsv" else ","
    with _open_text(path) as file:
        rows = csv.reader(file, delimiter=mark, strict=True)
        names = next(filter(None, rows), [])
        if not names:
            raise ValueError("it is empty: it has no column names")
        is_first, last = True, rows.line_num
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
                cells = dict(zip(names, row, strict=True))
                if is_first:
                    _columns_of(source, cells, names)
                    is_first = False
                yield number, cells


def _read_parquet(path: str, source: Input) -> _Numbered:
    content: Any = path
    if "://" in path:
        import fsspec

        content = fsspec.open(path, "rb").open()
    # Otherwise memory grows with the file, or with its largest group of rows.
    with ParquetFile(content, pre_buffer=False, buffer_size=2**20) as table:
        if not table.metadata.num_rows:
            return
        [first] = next(table.iter_batches(1)).to_pylist()
        columns = _columns_of(source, _read_cells(first, {}), table.schema_arrow.names)
        # datasets does not know the types of some columns, such as maps.
        fields = [each for each in table.schema_arrow if each.name in columns]
        schema = pyarrow.schema(fields, table.schema_arrow.metadata)
        source.features = features = Features.from_arrow_schema(schema)
        number = 0
        for batch in table.iter_batches(256, columns=schema.names):
            for row in batch.to_pylist():
                number += 1
                yield number, _read_cells(row, features)


def _read_dataset(path: str, source: Input) -> _Numbered:
    """Rows of the Hub, with names in place of the numbers of classes."""
    dataset = source.dataset
    for name, kind in dataset.features.items():  # decoded images would not fit into memory
        if isinstance(kind, Image | Audio):
            dataset = dataset.cast_column(name, type(kind)(decode=False))
        elif isinstance(kind, List) and isinstance(kind.feature, Image):
            dataset = dataset.cast_column(name, List(Image(decode=False)))
    if not len(dataset):
        return
    columns = _columns_of(source, _read_cells(dataset[0], {}), dataset.column_names)
    part = dataset.select_columns([name for name in columns if name in dataset.column_names])
    source.features = part.features
    for number, row in enumerate(part, 1):
        yield number, _read_cells(row, part.features)


def _read_cells(row: dict[str, Any], features: Any) -> dict[str, Any]:
    """The row of a table with names in place of the numbers of classes, of which -1, no class,
    becomes None; and without null keys inside objects, which have the keys of all rows."""
    return {name: _with_names(drop_nulls(row[name]), features.get(name)) for name in row}


def _with_names(value: Any, feature: Any) -> Any:
    """A value with the names of classes, where its feature has names; inside lists without -1."""
    names = getattr(feature, "names", None)
    if names and isinstance(value, int):
        return names[value] if value >= 0 else None
    inner = getattr(feature, "feature", feature)
    if isinstance(value, list) and getattr(inner, "names", None):
        return [inner.names[i] for i in value if i >= 0]
    if isinstance(value, list) and isinstance(inner, dict):
        return [_with_names(each, inner) for each in value]
    if isinstance(value, dict) and isinstance(inner, dict):
        return {name: _with_names(each, inner.get(name)) for name, each in value.items()}
    return value


_READERS: dict[str, Callable[[str, Input], _Numbered]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
    "hub": _read_dataset,
}
