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
SEPARATOR_NAMES = {",": "commas", "\t": "tabs"}
MAX_EXPANSION = 200  # largest allowed ratio of content to compressed file; text reaches about 10
BLOCK = 1 << 20  # bytes of a .txt file that are read at once
# Byte order marks of encodings that are refused. That of UTF-32 begins with that of UTF-16.
MARKS = {codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32"}
MARKS |= {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}
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
        with open_at(self.path) as file:
            before = sum(iter_counts(file, self.start))
        return f"{one_line(self.path, 200)}, line {before + self.number}"


def iter_counts(file: io.BufferedReader, size: int) -> Iterator[int]:
    """The number of line ends in each block of the next `size` bytes."""
    while size > 0 and (block := file.read(min(size, BLOCK))):
        size -= len(block)
        yield block.count(b"\n")


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
    return inner if inner in (".txt", *TABLES[:-1]) else ending


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
    gets None. If `columns` is None, all columns are read under their own names. A .txt file is one
    row: its text, and the name of its folder as the label. A `cursor` of the caller tells where the
    next row begins. Raises ValueError with the place.
    """
    cursor, ending = cursor or Cursor(path, span), file_ending(path)
    try:
        if ending == ".parquet":
            yield from _read_parquet(columns, optional, cursor)
        elif ending in SEPARATORS:
            yield from _read_csv(SEPARATORS[ending], columns, optional, cursor)
        elif ending == ".jsonl":
            yield from _read_jsonl(columns, optional, cursor)
        else:
            with open_at(path) as file:
                content = file.read()
            if ending == ".txt":
                row = {"text": content.decode(), "label": path.absolute().parent.name}
                row = {role: replace_surrogates(row.get(role)) for role in columns or row}
                yield row, cursor.where
            else:
                yield from _read_json(content, columns, optional, cursor)
    except MemoryError:
        raise
    except Exception as error:  # each library has its own
        raise _read_error(error, field, cursor) from None


def _read_error(error: Exception, field: str, cursor: Cursor) -> ValueError:
    at, problem = cursor.place, one_line(error)
    if isinstance(error, UnicodeDecodeError):
        if at == cursor.where:
            at = f"{at}, line {error.object.count(10, 0, error.start) + 1}"
        problem = f"byte 0x{error.object[error.start]:02x} is not UTF-8; save it as UTF-8"
    elif isinstance(error, json.JSONDecodeError):
        at = f"{at}, line {error.lineno}" if at == cursor.where else at
        problem = f"invalid JSON at column {error.colno}: {error.msg}"
    return ValueError(f"task.{field}: cannot read {at}: {problem}")


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


def _read_csv(
    usual: str, columns: Columns | None, optional: Container[str], cursor: Cursor
) -> Iterator[Row]:
    where, last_line, start = cursor.where, cursor.lines, cursor.offset
    csv.field_size_limit(2**31 - 1)
    with open_at(cursor.path, cursor) as file:
        lines = _decode_lines(file, cursor)
        try:
            if start:  # a later part
                with open_at(cursor.path) as first:
                    header = _read_header(_decode_lines(first, Cursor(cursor.path, WHOLE)))
            else:
                header = _read_header(lines)
            cursor.place = where
            required = {role: columns[role] for role in columns or () if role not in optional}
            mark = detect_separator(header, usual, {*column_names(required)})
            if mark != usual and columns is not None and not start:
                found, expected = (SEPARATOR_NAMES.get(each, each) for each in (mark, usual))
                print(
                    f"Preparing data: {where}: the fields seem to be separated by {found}, not by "
                    f"{expected}",
                    flush=True,
                )
            table = csv.DictReader(itertools.chain([header], lines), strict=True, delimiter=mark)
            check_columns(table.fieldnames or [], columns, optional)
            last_line = cursor.lines
            for row in table:
                if None in row or None in row.values():
                    extra, expected = row.pop(None, []), len(table.fieldnames)
                    number = len(extra) + sum(value is not None for value in row.values())
                    raise ValueError(f"the first line has {expected} fields, this one {number}")
                yield select_columns(row, columns), cursor.place
                last_line = cursor.lines
        except csv.Error as error:
            if "unexpected end of data" not in str(error):
                raise
            cursor.place = f"{where}, line {last_line + 1}"
            raise ValueError('a " is opened and never closed') from None


def _read_header(lines: Iterator[str]) -> str:
    """The row with the names of the columns; a quoted one may go on in the next line."""
    header = ""
    for line in lines:
        # Excel's hint is no header; the separator is detected anyway.
        if header or not re.fullmatch(r'"?sep=."?\s*', line):
            header += line
            if header.count('"') % 2 == 0 or not re.search(r'(^|[,;\t|])"', header):
                break
    return header


def _decode_lines(file: io.BufferedReader, cursor: Cursor) -> Iterator[str]:
    """Lines of the part with their own line ends; the cursor follows."""
    for line in cursor.read_lines(file):
        # Old programs end a line with \r alone, and the csv module refuses it inside one.
        for part in re.split(rb"(?<=\r)(?!\n)", line) if b"\r" in line[:-2] else [line]:
            if part:
                yield part.decode()


def _read_jsonl(columns: Columns | None, optional: Container[str], cursor: Cursor) -> Iterator[Row]:
    with open_at(cursor.path, cursor) as file:
        # Split as bytes: JSON may hold characters that Python's str.splitlines takes for line ends.
        for line in cursor.read_lines(file):
            if line.strip():
                yield from _json_row(json.loads(line), columns, optional, cursor.place)


def _read_json(
    content: bytes, columns: Columns | None, optional: Container[str], cursor: Cursor
) -> Iterator[Row]:
    for number, entry in enumerate(parse_json_rows(content), 1):
        is_line = isinstance(entry, bytes)
        cursor.place = f"{cursor.where}, {'line' if is_line else 'row'} {number}"
        if not is_line or entry.strip():
            row = json.loads(entry) if is_line else entry
            yield from _json_row(row, columns, optional, cursor.place)


def _json_row(
    row: Any, columns: Columns | None, optional: Container[str], place: Any
) -> Iterator[Row]:
    if not isinstance(row, dict):
        raise ValueError(f"not an object: {row!r:.60}")
    check_columns(list(row), columns, optional)
    yield select_columns(row, columns), place


def read_text(path: Path, field: str, span: Span, cursor: Cursor | None = None) -> Iterator[str]:
    """A part of a .txt file in blocks of about 1 MB, which end where a word ends.

    A part begins at the first such place after its start, and ends at the first one after its stop,
    so that parts that meet in the file leave nothing out. Raises ValueError with the place.
    """
    cursor, data, offset = cursor or Cursor(path, span), b"", span.start
    try:
        with open_at(path, cursor) as file:
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
    except MemoryError:
        raise
    except Exception as error:
        raise _read_error(error, field, cursor) from None


def find_cut(data: bytes) -> int:
    """The first place after a line's end, else before a space, else before a character."""
    found = re.search(rb"(?<=\n)(?=\S)", data) or re.search(rb"(?<=\S)(?=\s)", data)
    found = found or re.search(rb"(?=[\x00-\x7f\xc0-\xff])", data)
    return found.start() if found else 0


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

    A .txt file, and a .json file that begins with a list of small objects, are not read to the end.
    """
    if file_ending(path) == ".txt":
        text = next(read_text(path, "data", WHOLE), "")
        return {"text": text, "label": path.absolute().parent.name}
    if file_ending(path) == ".json":
        with contextlib.suppress(ValueError), open_at(path) as file:
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


# The compressed file that was read last, and how far: the next part may begin where it ended.
_half_read: dict[Path, tuple[io.BufferedReader, int]] = {}


@contextlib.contextmanager
def open_at(path: Path, cursor: Cursor | None = None) -> Iterator[io.BufferedReader]:
    """The content of a file, from the offset of a cursor on, or without one from its start.

    The cursor of a part of unknown lines is moved to the first line that begins in the part.
    """
    compressed, offset = path.suffix.lower() in COMPRESSIONS, cursor.offset if cursor else 0
    with contextlib.ExitStack() as stack:
        file, reached = _half_read.pop(path, (None, 0)) if offset else (None, 0)
        if file is None or reached > offset:
            file, reached = open_decompressed(path), 0
        stack.callback(file.close)
        if not compressed:
            file.seek(offset - reached, os.SEEK_CUR)
        else:
            while reached < offset and (block := file.read(min(BLOCK, offset - reached))):
                reached += len(block)
        if cursor and offset and cursor.span.lines is None and file_ending(path) == ".jsonl":
            file.seek(-1, os.SEEK_CUR)
            cursor.offset += len(file.readline()) - 1
            cursor.first = cursor.offset
        yield file
        if compressed and cursor and cursor.span.stop is not None:
            _half_read.clear()
            _half_read[path] = (file, cursor.offset)
            stack.pop_all()


def open_decompressed(path: Path) -> io.BufferedReader:
    """The bytes of a file, decompressed, without the byte order mark that some programs write."""
    compressed = path.suffix.lower() in COMPRESSIONS
    file: Any = io.BufferedReader(Decompressed(path), 2**16) if compressed else open(path, "rb")
    try:
        start = file.peek(4)[:4]
        for mark, encoding in MARKS.items():
            if start.startswith(mark):
                raise ValueError(f"it is {encoding}; save it as UTF-8")
        if start.startswith(codecs.BOM_UTF8):
            file.read(3)
    except BaseException:
        file.close()
        raise
    return file


# ---- Columns -------------------------------------------------------------------------------------


def detect_separator(header: str, usual: str, wanted: set[str]) -> str:
    """The separator of a header: `usual`, unless only another one yields the wanted columns.

    If no separator yields them, the first one that divides the header.
    """
    marks = (usual, ",", ";", "\t", "|")
    lines = [*io.StringIO(header, newline="")]  # several, of a name in quotes
    names = {mark: next(csv.reader(lines, delimiter=mark), []) for mark in marks}
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
