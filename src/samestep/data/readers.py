"""Rows of .jsonl, .json, .csv, .tsv, .parquet, .txt and .tar files, also compressed as .gz or .zst;
and the paths of images.

The loaders of `datasets` change values: dates become timestamps, NA becomes null, a CSV line with a
field too many shifts its columns. So these files are read here, a span at a time, and `datasets`
does all else: see rows.py.
"""

import codecs
import csv
import io
import itertools
import json
import os
import tarfile
from collections.abc import Callable, Container, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
from datasets import Features
from pyarrow.parquet import ParquetFile

from samestep.base.console import one_line
from samestep.data import tables
from samestep.data.folders import COMPRESSIONS, IMAGES, TABLES, file_ending
from samestep.data.hub import class_names, name_classes
from samestep.data.tables import Columns, Row

SPAN = 8_000_000  # bytes of a .jsonl or .txt file that a process reads at a time
DOCUMENT = 1_000_000  # bytes of a document, of which a larger .txt file has several
TAR_TEXTS = {"txt": "text", "cls": "label"}  # columns of files in a .tar by their extensions
SEARCHED = 1 << 16  # bytes in which the end of a line is looked for where a document may be cut

csv.field_size_limit(2**31 - 1)  # 131,072 characters otherwise


class Span(NamedTuple):
    """Rows that one process reads one after the other: a file, or bytes of it from a line's start.

    Of .parquet the numbers are row groups. `lines`: lines before the span, of .parquet rows.
    """

    path: str
    start: int = 0
    stop: int | None = None  # None: the end of the file
    lines: int = 0
    size: int = 0  # in bytes, about
    document: int = 0  # bytes of a document at most; 0: a file is one


# ---- Spans ---------------------------------------------------------------------------------------


def spans_of(path: Path, held_out: float = 0, cuts: bool = True) -> list[Span]:
    """The spans of a file. They follow from its content, and not from the number of processes.

    With `cuts` a large .txt file is cut into documents; with `held_out` so finely that this part of
    it can be held out.
    """
    size, ending = path.stat().st_size, file_ending(path)
    whole = Span(str(path), size=size)
    if ending in IMAGES:
        return [whole]
    is_packed = path.suffix.lower() in COMPRESSIONS
    if cuts and ending not in TABLES:
        document, longest = DOCUMENT, 1.5 * DOCUMENT
        if held_out:
            # A power of two: the documents stay the same while the text grows a little.
            wanted = int(size * held_out)
            document = longest = min(1 << max(wanted.bit_length() - 1, 0), DOCUMENT)
        if is_packed or size > longest:
            whole = whole._replace(document=document)
    if size < 1.5 * SPAN:
        return [whole]
    if ending == ".parquet":
        return _cut_parquet(whole)
    if not is_packed and (ending == ".jsonl" or whole.document):
        return list(_cut_at_lines(whole))
    return [whole]


def _cut_at_lines(whole: Span) -> Iterator[Span]:
    """Spans of about SPAN bytes. Reads the file once, to count its lines for messages."""
    start, lines = 0, 0
    with open(whole.path, "rb") as file:
        while block := _read_block(file, SPAN, whole.document):
            stop = start + len(block)
            yield whole._replace(start=start, stop=stop, lines=lines, size=len(block))
            start, lines = stop, lines + block.count(b"\n")


def _read_block(file: io.BufferedReader, size: int, is_text: int) -> bytes:
    """About `size` bytes up to the end of a line; a long line of text is cut between characters."""
    block = file.read(size)
    if not block.endswith(b"\n"):
        block += file.readline(min(size, SEARCHED) if is_text else -1)
    for _ in range(3 if is_text else 0):  # bytes of a character that has begun
        if file.peek(1)[:1] and file.peek(1)[0] & 0xC0 == 0x80:
            block += file.read(1)
    return block


def _cut_parquet(whole: Span) -> list[Span]:
    try:
        with ParquetFile(whole.path) as table:
            groups = [table.metadata.row_group(i) for i in range(table.num_row_groups)]
            facts = [(each.total_byte_size, each.num_rows) for each in groups]
    except (pyarrow.ArrowException, OSError):  # reading it says what is wrong
        return [whole]
    spans, rows = [], 0
    for number, (size, more) in enumerate(facts):
        spans.append(whole._replace(start=number, stop=number + 1, lines=rows, size=size))
        rows += more
    return spans or [whole]


# ---- Reading -------------------------------------------------------------------------------------


class Place:
    """Where a reader is: the file and, once in one, the line or row. str() is for messages."""

    def __init__(self, span: Span):
        self.path = one_line(span.path, 200)
        self.number = span.lines
        self.unit = "line"
        self.columns: list[str] = []  # where a file names them before its rows

    def __str__(self) -> str:
        return f"{self.path}, {self.unit} {self.number}" if self.number else self.path


Reader = Callable[[Span, Columns | None, Place], Iterator[Any]]


def read_span(
    span: Span, columns: Columns | None, optional: Container[str] = (), field: str = "data"
) -> Iterator[Row]:
    """Read the rows of a span, each with the values of the roles in `columns`, and its place.

    Without `columns` all are read under their own names. A column of a role in `optional` may be
    missing.

    A file that is no table has its text in the role text, and the name of its folder as the label.
    Raises ValueError with file and line for what cannot be read, and for a missing column; and
    ConnectionError for a store out of reach.
    """
    place = Place(span)
    read = READERS.get(file_ending(span.path))
    try:
        if read:
            yield from _read_table(read, span, columns, optional, place)
        elif file_ending(span.path) in IMAGES:
            yield {"image": span.path, "label": _folder_of(span.path)}, str(place)
        else:
            for row in _read_text(span, columns or {"text": "text", "label": "label"}, place):
                yield row, str(place)
    except MemoryError:
        raise
    except Exception as error:  # each library has its own errors for what a file holds
        text = f"task.{field}: cannot read {place}: {_describe(error)}"
        if "://" in span.path and not isinstance(error, ValueError | csv.Error):
            raise ConnectionError(text) from None
        raise ValueError(text) from None


def _read_table(
    read: Reader, span: Span, columns: Columns | None, optional: Container[str], place: Place
) -> Iterator[Row]:
    is_first = not span.start
    for row in read(span, columns, place):
        if not isinstance(row, dict):
            raise ValueError(f"not an object: {row!r:.60}")
        if is_first:  # what a later row lacks is null
            tables.check_columns(place.columns or [*row], columns, optional)
            is_first = False
        row = tables.select_columns(row, columns)
        yield _locate_image(row, place, span) if "image" in (columns or ()) else (row, str(place))


def _locate_image(row: dict, place: Place, span: Span) -> Row:
    """A row of a table with the path of its image from here: it is relative to the table."""
    image = row["image"]
    if isinstance(image, dict) and not image.get("bytes"):
        image = image.get("path")
    shown = str(place)
    if isinstance(image, str) and image.strip():
        shown += f": {one_line(image, 100)}"
        image = os.path.join(os.path.dirname(span.path), image)
    return {**row, "image": image}, shown


def _folder_of(path: str) -> str:
    """The name of a file's folder, in which bytes that are not UTF-8 are written as \\xe9."""
    return os.fsencode(Path(path).absolute().parent.name).decode(errors="backslashreplace")


def _describe(error: Exception) -> str:
    """The problem in one line."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte 0x{error.object[error.start]:02x} is not UTF-8; save it as UTF-8"
    if isinstance(error, json.JSONDecodeError):
        return f"invalid JSON at column {error.colno}: {error.msg}"
    if isinstance(error, csv.Error) and "new-line" in str(error):
        return "a line ends with \\r alone; save it with \\n line ends"
    if "set_int_max_str_digits" in str(error):
        return "a number has more than 4,300 digits; write it as text"
    return one_line(error)


def _open(span: Span) -> io.BufferedReader:
    """The content of a file from the start of a span, decompressed, without the byte order mark
    that some programs write."""
    path = span.path
    compression = COMPRESSIONS.get(os.path.splitext(path.lower())[1])
    if "://" in path:
        file = open_url(path)
        if compression:
            file = io.BufferedReader(pyarrow.CompressedInputStream(file, compression), 2**16)
    elif not compression:
        file = open(path, "rb")  # noqa: SIM115
    elif not os.path.getsize(path):  # pyarrow takes it for no rows
        raise ValueError("it has 0 bytes: it is truncated")
    else:  # fsspec reads .zst only with a package more
        packed: Any = pyarrow.CompressedInputStream(path, compression)
        file = io.BufferedReader(packed, 2**16)
    if span.start:
        file.seek(span.start)
    elif file.peek(3)[:3] == codecs.BOM_UTF8:
        file.read(3)
    return file


def open_url(path: str) -> Any:
    """A file of a store, by fsspec."""
    import fsspec

    return io.BufferedReader(fsspec.open(path, "rb").open(), 2**20)


def _lines(file: io.BufferedReader, span: Span, place: Place) -> Iterator[bytes]:
    """The lines of a span; each becomes the place."""
    offset = 0 if span.stop is None else file.tell()
    while (span.stop is None or offset < span.stop) and (line := file.readline()):
        offset += len(line)
        place.number += 1
        yield line


def _decode(data: bytes, place: Place) -> str:
    """Text; an error has its line as the place."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        place.number = max(place.number, 1) + data.count(b"\n", 0, error.start)
        raise


def _read_jsonl(span: Span, columns: Columns | None, place: Place) -> Iterator[Any]:
    with closing(_open(span)) as file:
        # Split as bytes: JSON may hold characters that str.splitlines takes for line ends.
        for line in _lines(file, span, place):
            if line.strip():
                yield json.loads(line.decode())


def _read_json(span: Span, columns: Columns | None, place: Place) -> Iterator[Any]:
    """The objects of a list, or of lines, since many programs name .jsonl so."""
    with closing(_open(span)) as file:
        content = _decode(file.read(), place)
    try:
        rows = json.loads(content)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and content.lstrip()[:1] == "{":
            yield from _read_jsonl(span, columns, place)
            return
        place.number = error.lineno
        raise
    place.unit = "row"
    if isinstance(rows, dict):  # one line
        rows = [rows]
    if not isinstance(rows, list):
        raise ValueError("it holds no list of objects")
    for place.number, row in enumerate(rows, 1):
        yield row


def _read_csv(span: Span, columns: Columns | None, place: Place) -> Iterator[dict]:
    mark, names, last = tables.SEPARATORS[file_ending(span.path)], [], 0
    with closing(_open(span)) as file:
        rows = csv.reader(map(bytes.decode, _lines(file, span, place)), delimiter=mark, strict=True)
        try:
            for row in rows:
                if mark == "\t" and place.number > last + 1 and any(mark in each for each in row):
                    hint = 'write a text with " as "...""...", or save the rows as .jsonl'
                    text = f'a " takes the lines to {place.number} as one text; {hint}'
                    place.number = last + 1
                    raise ValueError(text)
                last = place.number
                if row and not names:
                    names = place.columns = row
                elif row and len(row) != len(names):
                    expected = f"the first line has {len(names)} fields"
                    raise ValueError(f"{expected}, this one {len(row)}")
                # Perhaps after a mark of UTF-8. One name alone may be a text.
                elif row[1:] and row[1:] == names[1:] and row[0].lstrip("\ufeff") == names[0]:
                    raise ValueError("the column names stand here again: remove the line")
                elif row:
                    yield dict(zip(names, row, strict=True))
        except csv.Error as error:
            if "unexpected end of data" not in str(error):
                raise
            place.number = last + 1
            raise ValueError('a " is opened and never closed') from None
    if not names:
        raise ValueError("it is empty: it has no column names")


def _read_parquet(span: Span, columns: Columns | None, place: Place) -> Iterator[dict]:
    place.unit = "row"
    # Otherwise memory grows with the file, or with its largest group of rows.
    content: Any = open_url(span.path) if "://" in span.path else span.path
    with ParquetFile(content, pre_buffer=False, buffer_size=2**20) as table:
        names = place.columns = table.schema_arrow.names
        wanted = tables.column_names(columns or {})
        # datasets does not know the types of some others, such as maps.
        fields = [each for each in table.schema_arrow if each.name in wanted]
        schema = pyarrow.schema(fields, table.schema_arrow.metadata)
        classes = class_names(Features.from_arrow_schema(schema))
        if columns is not None:
            names = [name for name in wanted if name in names]
        groups = range(span.start, table.num_row_groups if span.stop is None else span.stop)
        for batch in table.iter_batches(256, row_groups=groups, columns=names):
            for row in batch.to_pylist():
                place.number += 1
                yield name_classes(row, classes)


def _read_text(span: Span, columns: Columns, place: Place) -> Iterator[dict]:
    if "group" in columns:
        raise ValueError(f"a text has no column {columns['group']}; leave out task.group_column")
    blank: dict[str, Any] = dict.fromkeys(columns)
    if "label" in columns:
        blank["label"] = _folder_of(span.path)
    with closing(_open(span)) as file:
        if not span.document:
            yield blank | {"text": _decode(file.read(), place)}
            return
        place.number += 1
        offset = 0 if span.stop is None else file.tell()
        while span.stop is None or offset < span.stop:
            if span.stop is not None and span.stop - offset <= span.document:
                block = file.read(span.stop - offset)
            else:
                block = _read_block(file, span.document, span.document)
            if not block:
                return
            text = _decode(block, place)
            if not text.isspace():
                yield blank | {"text": text}
            offset += len(block)
            place.number += block.count(b"\n")


def _read_tar(span: Span, columns: Columns | None, place: Place) -> Iterator[dict]:
    """The samples of a WebDataset: files whose names are equal up to the first dot. A row has the
    keys of the .json, the .txt as `text`, and the .cls as `label`."""
    place.unit = "sample"
    with closing(_open(span)) as file, tarfile.open(fileobj=file, mode="r|") as archive:
        files = (each for each in archive if each.isfile())
        for _, own in itertools.groupby(files, lambda each: _split_name(each.name)[0]):
            place.number += 1
            row: dict[str, Any] = {}
            for each in own:
                ending = _split_name(each.name)[1].lower()
                if ending == "json":
                    row |= json.load(archive.extractfile(each))
                elif ending in TAR_TEXTS:
                    row[TAR_TEXTS[ending]] = archive.extractfile(each).read().decode()
            yield row


def _split_name(name: str) -> tuple[str, str]:
    """The key of a file in a WebDataset, and its ending: what follows the first dot."""
    folder, base = os.path.split(name)
    key, _, ending = base.partition(".")
    return os.path.join(folder, key), ending


READERS: dict[str, Reader] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
    ".tar": _read_tar,  # as a shard of a stream
}
