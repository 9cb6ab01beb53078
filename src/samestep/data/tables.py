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
from typing import Any, NamedTuple

from samestep.base.console import one_line

# pyarrow takes 0.2 s to import: the functions that need it import it.

Row = tuple[dict[str, Any], str]
Columns = dict[str, str | list[str]]  # for each role its column, or several
TABLES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}  # for all but .parquet, which compresses itself
SEPARATORS = {".csv": ",", ".tsv": "\t"}
BLOCK = 1 << 20  # bytes of a .txt file that are read at once
SEARCHED = 1 << 16  # bytes in which a place is looked for where a .txt file may be cut


# ---- Parts of files ------------------------------------------------------------------------------


class Span(NamedTuple):
    """A part of a file: the rows that begin in it.

    `start` and `stop` are bytes of the content, decompressed; of .parquet, row groups. `lines` is
    the number of lines, of .parquet rows, before the part; None: unknown, and `start` may be
    anywhere in a line.
    """

    start: int = 0
    stop: int | None = None  # None: to the end
    lines: int | None = 0


WHOLE = Span()


class Line:
    """The place of a line that is counted from the start of a part; str() counts those before."""

    def __init__(self, path: Path, start: int, number: int):
        self.path, self.start, self.number = path, start, number

    def __str__(self) -> str:
        number, left = self.number, self.start
        with open_at(self.path) as file:
            while left > 0 and (block := file.read(min(left, BLOCK))):
                number, left = number + block.count(b"\n"), left - len(block)
        return f"{one_line(self.path, 200)}, line {number}"


class Cursor:
    """How far a file has been read: the place for messages, and where the next row begins."""

    def __init__(self, path: Path, span: Span):
        self.path, self.span, self.where = path, span, one_line(path, 200)
        self.place: Any = self.where  # of the last entry that was read
        self.offset = self.first = span.start  # before the next row, and before the first
        self.lines = span.lines or 0

    def read_lines(self, file: io.BufferedReader) -> Iterator[bytes]:
        """The lines that begin in the part; each becomes the place."""
        stop = self.span.stop
        while (stop is None or self.offset < stop) and (line := file.readline()):
            self.offset, self.lines = self.offset + len(line), self.lines + 1
            self.place = f"{self.where}, line {self.lines}"
            if self.span.lines is None:
                self.place = Line(self.path, self.first, self.lines)
            yield line


def file_ending(path: Path | str) -> str:
    """A file's ending in lower case. A compressed file has the inner one: .csv for rows.CSV.GZ."""
    stem, ending = os.path.splitext(str(path).lower())
    inner = os.path.splitext(stem)[1] if ending in COMPRESSIONS else ""
    return inner if inner and inner != ".parquet" else ending


# The compressed file that was read last, and how far: the next part may begin where it ended.
_half_read: dict[Path, tuple[io.BufferedReader, int]] = {}


@contextlib.contextmanager
def open_at(path: Path, cursor: Cursor | None = None) -> Iterator[io.BufferedReader]:
    """The content of a file, decompressed, from the offset of a cursor on; or without one from its
    start, without the byte order mark that some programs write.

    The cursor of a part of unknown lines is moved to the first line that begins in the part.
    """
    compressed, offset = path.suffix.lower() in COMPRESSIONS, cursor.offset if cursor else 0
    with contextlib.ExitStack() as stack:
        file, reached = _half_read.pop(path, (None, 0)) if offset else (None, 0)
        if file is None or reached > offset:
            file, reached = _open(path), 0
        stack.callback(file.close)
        if not compressed:
            file.seek(offset - reached, os.SEEK_CUR)
        while compressed and reached < offset and file.read(min(BLOCK, offset - reached)):
            reached = min(reached + BLOCK, offset)
        if cursor and offset and cursor.span.lines is None and file_ending(path) == ".jsonl":
            file.seek(-1, os.SEEK_CUR)
            cursor.offset += len(file.readline()) - 1
            cursor.first = cursor.offset
        yield file
        if compressed and cursor and cursor.span.stop is not None:
            _half_read.clear()
            _half_read[path] = (file, cursor.offset)
            stack.pop_all()


def _open(path: Path) -> io.BufferedReader:
    if compression := COMPRESSIONS.get(path.suffix.lower()):
        import pyarrow

        if not path.stat().st_size:  # pyarrow takes it for no rows
            raise ValueError("it has 0 bytes: it is truncated")
        packed: Any = pyarrow.CompressedInputStream(str(path), compression)
        file = io.BufferedReader(packed, 2**16)
    else:
        file = open(path, "rb")
    if file.peek(3)[:3] == codecs.BOM_UTF8:
        file.read(3)
    return file


# ---- Rows ----------------------------------------------------------------------------------------


def read_rows(
    path: Path,
    columns: Columns | None,
    field: str = "data",
    optional: Container[str] = (),
    span: Span = WHOLE,
    cursor: Cursor | None = None,
) -> Iterator[Row]:
    """The rows of one file, or of a part of it. `columns` maps each role to its column.

    A role with several columns gets a dict of their values; an optional role without its column
    gets None. If `columns` is None, all columns are read under their own names. A file that is no
    table is one row: its text, and the name of its folder as the label. A `cursor` of the caller
    tells where the next row begins. Raises ValueError with the place.
    """
    cursor, ending = cursor or Cursor(path, span), file_ending(path)
    with _errors_as_lines(field, cursor):
        if ending == ".parquet":
            yield from _read_parquet(columns, optional, cursor)
        elif ending in SEPARATORS:
            yield from _read_csv(columns, optional, cursor)
        elif ending not in TABLES:
            with open_at(path) as file:
                row = {"text": file.read().decode(), "label": path.absolute().parent.name}
            yield {role: replace_surrogates(row.get(role)) for role in columns or row}, cursor.where
        else:
            is_first = not cursor.span.start
            for row in _read_jsonl(cursor) if ending == ".jsonl" else _read_json(cursor):
                if not isinstance(row, dict):
                    raise ValueError(f"not an object: {row!r:.60}")
                if is_first:  # what a later row lacks is null
                    check_columns(list(row), columns, optional)
                is_first = False
                yield select_columns(row, columns), cursor.place


@contextlib.contextmanager
def _errors_as_lines(field: str, cursor: Cursor) -> Iterator[None]:
    """Each library has its own errors for what a file holds: all become a ValueError of one line,
    with the place."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        at, problem = cursor.place, one_line(error)
        if isinstance(error, UnicodeDecodeError):
            if at == cursor.where:
                at = f"{at}, line {error.object.count(10, 0, error.start) + 1}"
            problem = f"byte 0x{error.object[error.start]:02x} is not UTF-8; save it as UTF-8"
        elif isinstance(error, json.JSONDecodeError):
            at = f"{at}, line {error.lineno}" if at == cursor.where else at
            problem = f"invalid JSON at column {error.colno}: {error.msg}"
        elif isinstance(error, csv.Error) and "new-line" in problem:
            problem = "a line ends with \\r alone; save it with \\n line ends"
        raise ValueError(f"task.{field}: cannot read {at}: {problem}") from None


def _read_parquet(
    columns: Columns | None, optional: Container[str], cursor: Cursor
) -> Iterator[Row]:
    from pyarrow.parquet import ParquetFile

    start, stop, number = cursor.span.start, cursor.span.stop, cursor.lines
    # Otherwise memory grows with the file, or with its largest group of rows.
    with ParquetFile(cursor.path, pre_buffer=False, buffer_size=2**20) as table:
        existing = table.schema_arrow.names
        check_columns(existing, columns, optional)
        names = existing if columns is None else column_names(columns)
        groups = range(start, table.num_row_groups if stop is None else stop)
        names = [name for name in names if name in existing]
        for batch in table.iter_batches(256, row_groups=groups, columns=names):
            for row in batch.to_pylist():
                number += 1
                yield select_columns(row, columns), f"{cursor.where}, row {number}"


def _read_csv(columns: Columns | None, optional: Container[str], cursor: Cursor) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)
    mark = SEPARATORS[file_ending(cursor.path)]
    with open_at(cursor.path) as file:
        rows = csv.reader(map(bytes.decode, file), delimiter=mark, strict=True)
        names = next(filter(None, rows), [])  # empty lines may stand before it
    check_columns(names, columns, optional)
    with open_at(cursor.path, cursor) as file:
        lines = map(bytes.decode, cursor.read_lines(file))
        last_line, is_header = cursor.lines, not cursor.span.start
        try:
            for row in csv.reader(lines, delimiter=mark, strict=True):
                if mark == "\t" and cursor.lines > last_line + 1 and any(mark in c for c in row):
                    cursor.place = f"{cursor.where}, line {last_line + 1}"
                    hint = 'write a text with " as "...""...", or save the rows as .jsonl'
                    raise ValueError(f'a " takes the lines to {cursor.lines} as one text; {hint}')
                if row and not is_header:
                    if len(row) != len(names):
                        expected = f"the first line has {len(names)} fields"
                        raise ValueError(f"{expected}, this one {len(row)}")
                    # Perhaps after a mark of UTF-8. One name alone may be a text.
                    if [] != row[1:] == names[1:] and row[0].lstrip("\ufeff") == names[0]:
                        raise ValueError("the column names stand here again: remove the line")
                    yield select_columns(dict(zip(names, row, strict=True)), columns), cursor.place
                last_line, is_header = cursor.lines, is_header and not row
        except csv.Error as error:
            if "unexpected end of data" not in str(error):
                raise
            cursor.place = f"{cursor.where}, line {last_line + 1}"
            raise ValueError('a " is opened and never closed') from None


def _read_jsonl(cursor: Cursor) -> Iterator[Any]:
    with open_at(cursor.path, cursor) as file:
        # Split as bytes: JSON may hold characters that Python's str.splitlines takes for line ends.
        for line in cursor.read_lines(file):
            if line.strip():
                yield json.loads(line.decode())


def _read_json(cursor: Cursor) -> Iterator[Any]:
    """The objects of a JSON file: its list, or its lines, since many programs name .jsonl so."""
    with open_at(cursor.path) as file:
        content = file.read().decode()
    try:
        value = json.loads(content)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and content.lstrip()[:1] == "{":
            yield from _read_jsonl(cursor)
            return
        raise
    if not isinstance(value, list):
        raise ValueError("it holds no list of objects")
    for number, row in enumerate(value, 1):
        cursor.place = f"{cursor.where}, row {number}"
        yield row


def read_text(path: Path, field: str, span: Span, cursor: Cursor | None = None) -> Iterator[str]:
    """A part of a .txt file in blocks of about 1 MB, which end where a word ends.

    A part begins at the first such place after its start, and ends at the first one after its stop,
    so that parts that meet in the file leave nothing out. Raises ValueError with the place.
    """
    cursor, data, offset = cursor or Cursor(path, span), b"", span.start
    with _errors_as_lines(field, cursor), open_at(path, cursor) as file:
        if offset:
            data = file.read(SEARCHED)
            cut = find_cut(data)
            data, offset = data[cut:], offset + cut
        while span.stop is None or offset < span.stop:
            left = BLOCK if span.stop is None else span.stop - offset
            size = left if left <= BLOCK + SEARCHED else BLOCK
            data += file.read(max(size + SEARCHED - len(data), 0))
            cursor.offset = offset + len(data)
            if not data:
                return
            cut = min(size + find_cut(data[size : size + SEARCHED]), len(data))
            try:
                text = data[:cut].decode()
            except UnicodeDecodeError as error:
                cursor.place = Line(path, offset, data.count(b"\n", 0, error.start) + 1)
                raise
            yield text
            data, offset = data[cut:], offset + cut


def find_cut(data: bytes) -> int:
    """The first place after a line's end, else before a space, else before a character."""
    found = re.search(rb"(?<=\n)(?=\S)", data) or re.search(rb"(?<=\S)(?=\s)", data)
    found = found or re.search(rb"(?=[\x00-\x7f\xc0-\xff])", data)
    return found.start() if found else 0


def first_columns(path: Path) -> list[str]:
    """The columns of a file's first row; empty: it has none."""
    if file_ending(path) not in TABLES:
        return ["text", "label"]
    return [*next((row for row, _ in read_rows(path, None)), {})]


# ---- Columns -------------------------------------------------------------------------------------


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
