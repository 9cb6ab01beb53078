"""Rows of .txt, .jsonl, .json, .csv, .tsv and .parquet files, also compressed as .gz or .zst.

A row is a pair: a dict with a value for each role that a task asks for (text, label, ...), and its
place (file and line), which error messages name.
"""

import codecs
import contextlib
import csv
import io
import itertools
import json
import os
import re
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Any

from tasklib.messages import one_line

# pyarrow takes 0.2 s to import: the functions that need it import it.

Row = tuple[dict[str, Any], str]
Columns = dict[str, str | list[str]]  # for each role its column, or several
TABLES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}  # for all but .parquet, which compresses itself
SEPARATORS = {".csv": ",", ".tsv": "\t"}
SEPARATOR_NAMES = {",": "commas", "\t": "tabs"}
MAX_EXPANSION = 200  # largest allowed ratio of content to compressed file; text reaches about 10


def file_ending(path: Path | str) -> str:
    """A file's ending in lower case. A compressed file has the inner one: .csv for rows.CSV.GZ."""
    stem, ending = os.path.splitext(str(path).lower())
    inner = os.path.splitext(stem)[1] if ending in COMPRESSIONS else ""
    return inner if inner in (".txt", *TABLES[:-1]) else ending


def read_rows(
    path: Path, columns: Columns | None, field: str = "data", optional: Container[str] = ()
) -> Iterator[Row]:
    """The rows of one file. `columns` maps each role to its column.

    A role with several columns gets a dict of their values; an optional role without its column
    gets None. If `columns` is None, all columns are read under their own names. A .txt file is one
    row: its text, and the name of its folder as the label. Raises ValueError with the place.
    """
    where, ending = one_line(path, 200), file_ending(path)
    place = [where]  # of the last entry that was read, for messages
    try:
        if ending == ".parquet":
            yield from _read_parquet(path, columns, optional, place)
            return
        with open_decompressed(path) as file:
            if ending == ".txt":
                row = {"text": file.read().decode(), "label": path.absolute().parent.name}
                yield {role: replace_surrogates(row.get(role)) for role in columns or row}, where
            elif ending in SEPARATORS:
                yield from _read_csv(file, SEPARATORS[ending], columns, optional, place)
            else:
                yield from _read_json(file, ending, columns, optional, place)
    except MemoryError:
        raise
    except Exception as error:  # each library has its own
        at, problem = place[0], one_line(error)
        if isinstance(error, UnicodeDecodeError):
            if at == where:
                at = f"{where}, line {error.object.count(10, 0, error.start) + 1}"
            problem = f"byte 0x{error.object[error.start]:02x} is not UTF-8; save it as UTF-8"
        elif isinstance(error, json.JSONDecodeError):
            at = f"{where}, line {error.lineno}" if at == where else at
            problem = f"invalid JSON at column {error.colno}: {error.msg}"
        raise ValueError(f"task.{field}: cannot read {at}: {problem}") from None


def _read_parquet(
    path: Path, columns: Columns | None, optional: Container[str], place: list[str]
) -> Iterator[Row]:
    from pyarrow.parquet import ParquetFile

    where, number = place[0], 0
    # Otherwise memory grows with the file, or with its largest group of rows.
    with ParquetFile(path, pre_buffer=False, buffer_size=2**20) as table:
        existing = table.schema_arrow.names
        check_columns(existing, columns, optional)
        names = existing if columns is None else column_names(columns)
        columns_here = [name for name in names if name in existing]
        for batch in table.iter_batches(256, columns=columns_here):  # rows: they may hold images
            for row in batch.to_pylist():
                number += 1
                yield select_columns(row, columns), f"{where}, row {number}"


def _read_csv(
    file: io.BufferedReader,
    usual: str,
    columns: Columns | None,
    optional: Container[str],
    place: list[str],
) -> Iterator[Row]:
    where, last_line = place[0], 0

    def decode_lines() -> Iterator[str]:
        """Lines with their own line ends; `place` follows."""
        lines = io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="")
        for number, line in enumerate(lines, 1):
            place[0] = f"{where}, line {number}"
            yield line if line.isascii() else line.encode(errors="surrogateescape").decode()

    csv.field_size_limit(2**31 - 1)
    lines = decode_lines()
    header = next(lines, "")
    if re.fullmatch(r'"?sep=."?\s*', header):  # Excel's hint; the separator is detected anyway
        header = next(lines, "")
    required = {role: name for role, name in (columns or {}).items() if role not in optional}
    mark = detect_separator(header, usual, {*column_names(required)})
    if mark != usual and columns is not None:
        found, expected = (SEPARATOR_NAMES.get(each, each) for each in (mark, usual))
        print(
            f"Preparing data: {where}: the fields seem to be separated by {found}, not by "
            f"{expected}",
            flush=True,
        )
    table = csv.DictReader(itertools.chain([header], lines), strict=True, delimiter=mark)
    try:
        check_columns(table.fieldnames or [], columns, optional)
        for row in table:
            if None in row or None in row.values():
                extra, expected = row.pop(None, []), len(table.fieldnames)
                number = len(extra) + sum(value is not None for value in row.values())
                raise ValueError(f"the first line has {expected} fields, this one {number}")
            yield select_columns(row, columns), place[0]
            last_line = table.line_num
    except csv.Error as error:
        if "unexpected end of data" not in str(error):
            raise
        place[0] = f"{where}, line {last_line + 1}"
        raise ValueError('a " is opened and never closed') from None


def _read_json(
    file: io.BufferedReader,
    ending: str,
    columns: Columns | None,
    optional: Container[str],
    place: list[str],
) -> Iterator[Row]:
    where = place[0]
    # Split as bytes: JSON may hold characters that Python's str.splitlines takes for line ends.
    entries = parse_json_rows(file.read()) if ending == ".json" else file
    for number, entry in enumerate(entries, 1):
        is_line = isinstance(entry, bytes)
        place[0] = f"{where}, {'line' if is_line else 'row'} {number}"
        if is_line and not entry.strip():
            continue
        row = json.loads(entry) if is_line else entry
        if not isinstance(row, dict):
            raise ValueError(f"not an object: {row!r:.60}")
        check_columns(list(row), columns, optional)
        yield select_columns(row, columns), place[0]


def parse_json_rows(content: bytes) -> list:
    """The objects of a JSON file: its list, or the only list of objects in its object.

    A file with an object on each line, which many programs name .json too, gives its lines.
    """
    try:
        value = json.loads(content)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and content.lstrip()[:1] == b"{":
            return content.splitlines()
        raise
    if isinstance(value, dict):
        lists = {
            name: each
            for name, each in value.items()
            if isinstance(each, list) and each and all(isinstance(row, dict) for row in each)
        }
        if len(lists) > 1:
            names = one_line(", ".join(lists), 60)
            raise ValueError(f"it has several lists of objects: {names}; save each as its own file")
        value = next(iter(lists.values()), value)
    if not isinstance(value, list):
        raise ValueError("it holds neither a list of objects nor an object with one such list")
    return value


def read_first_row(path: Path) -> dict | None:
    """The first row of a file, by the names of its columns; None: it has none.

    A .json file that begins with a list of small objects is not read to its end.
    """
    if file_ending(path) == ".json":
        with contextlib.suppress(ValueError), open_decompressed(path) as file:
            text = file.read(2**20).decode(errors="ignore").lstrip()
            if text.startswith("["):
                row = json.JSONDecoder().raw_decode(text[1:].lstrip())[0]
                if isinstance(row, dict) and row:
                    return row
    return next((row for row, _ in read_rows(path, None)), None)


# ---- Compression ---------------------------------------------------------------------------------


class Decompressed(io.RawIOBase):
    """The content of a compressed file. Far too much of it, as in a zip bomb, is an error."""

    def __init__(self, path: Path):
        import pyarrow

        self.left = max(MAX_EXPANSION * path.stat().st_size, 2**28)
        compressed = pyarrow.OSFile(str(path))
        compression = COMPRESSIONS[path.suffix.lower()]
        self.stream = pyarrow.CompressedInputStream(compressed, compression)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            number = self.stream.readinto(buffer)
        except OSError as error:
            raise ValueError(
                f"it is damaged, or its ending names another compression ({error})"
            ) from None
        self.left -= number
        if self.left < 0:
            raise ValueError(
                f"its content is more than {MAX_EXPANSION} times its size; decompress it if that "
                "is right"
            )
        return number


@contextlib.contextmanager
def open_decompressed(path: Path) -> Iterator[io.BufferedReader]:
    """The bytes of a file, decompressed, without the byte order mark that some programs write."""
    compressed = path.suffix.lower() in COMPRESSIONS
    with io.BufferedReader(Decompressed(path), 2**16) if compressed else open(path, "rb") as file:
        start = file.peek(3)[:3]
        if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise ValueError("it is UTF-16; save it as UTF-8")
        if start == codecs.BOM_UTF8:
            file.read(3)
        yield file


# ---- Columns -------------------------------------------------------------------------------------


def detect_separator(header: str, usual: str, wanted: set[str]) -> str:
    """The separator of a header: `usual`, unless only another one yields the wanted columns.

    If no separator yields them, the first one that divides the header.
    """
    marks = (usual, ",", ";", "\t", "|")
    names = {mark: next(csv.reader([header], delimiter=mark), []) for mark in marks}
    right = [mark for mark in marks if wanted and wanted <= {*names[mark]}]
    return next(iter(right + [mark for mark in marks if len(names[mark]) > 1]), usual)


def column_names(columns: Columns) -> list[str]:
    """The columns of all roles, each once."""
    names = [[name] if isinstance(name, str) else name for name in columns.values()]
    return sorted({*itertools.chain(*names)})


def check_columns(
    existing: Iterable[str], columns: Columns | None, optional: Container[str] = ()
) -> None:
    """Raises ValueError for a missing or ambiguous column; names the existing ones and the flag."""
    names = list(existing)
    if columns and not names:
        raise ValueError("it is empty: it has no column names")
    for role in columns or {}:
        for name in column_names({role: columns[role]}):
            number = names.count(name)
            if number > 1 or (number == 0 and role not in optional):
                shown = one_line(", ".join(names[:20]), 100)
                problem = "more than one column" if number else "no column"
                field = f"{role}_column" + "s" * (name != columns[role])
                raise ValueError(
                    f"{problem} {one_line(name, 60)} among {shown}; name the right one with "
                    f"--task.{field}"
                )


def select_columns(row: dict, columns: Columns | None) -> dict[str, Any]:
    """The values of each role; call `check_columns` before."""
    if columns is None:
        return replace_surrogates(row)
    return {
        role: replace_surrogates(row.get(name))
        if isinstance(name, str)
        else {each: replace_surrogates(row.get(each)) for each in name}
        for role, name in columns.items()
    }


def replace_surrogates(value: Any) -> Any:
    """JSON can spell half of a surrogate pair, which is not a character: `?` replaces it."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, list):
        return [replace_surrogates(each) for each in value]
    if isinstance(value, dict):
        return {key: replace_surrogates(each) for key, each in value.items()}
    return value
