"""The input of a task in units of bounded size, each read by one process, and what is in them.

Units follow from the input alone, so the result is the same on any number of cores. A first pass,
`scan`, checks every row and notes its hash and size. From the notes follow the rows that are held
out, and the texts that a vocabulary is learnt from. A second pass, `write`, makes files of them.
"""

import json
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from samestep.base.console import one_line
from samestep.base.workers import Tell, do_units
from samestep.data import hub, sources, splits, tables
from samestep.data.tables import Columns, Cursor, Row, Span
from samestep.text import tokenizing
from samestep.text.unit_files import UnitWriter, is_done, map_file, read_unit

SMALLEST, LARGEST = 4_000_000, 32_000_000  # bytes of a unit
SAMPLE = 50_000_000  # bytes of text that a vocabulary is learnt from
SPARE = 4  # times as many bytes of files are kept, as files hold more than text
LOOKED_AT = 200_000  # rows, at first, to find those to hold out
BATCH = 1_000_000  # characters that are encoded in one call
PARTS = ("train", "validation")
# Of a row; size in bytes; label: a number, or the place of a text among the unit's labels.
NOTED = np.dtype([("hash", "<u8"), ("size", "<i8"), ("label", "<f8")])


class Reader(NamedTuple):
    """How the rows of a source are read."""

    name: str  # for metrics
    cfg: Any  # a DataConfig with `data` of this source
    endings: Iterable[str]
    columns: Columns
    # Changes a row to what the task uses, or raises ValueError; what it returns is counted.
    check: Callable[[dict], list[str] | None]
    key: Callable[[dict], str]  # rows of one key are all held out, or none
    texts: Callable[[dict], Iterable[str]] | None = None  # a vocabulary is learnt from them
    label: Callable[[dict], str | float] | None = None
    shipped: list[Row] | None = None  # the rows, if cfg.data names data that the task brings along
    optional: Container[str] = ()  # roles
    long_texts: bool = False  # a .txt file may be cut

    @property
    def fields(self) -> list[str]:
        """The fields of cfg that name training rows and, if they are given, validation rows."""
        on_hub = self.shipped is None and hub.is_hub_name(self.cfg.data)
        fields = ["data_split" if on_hub else "data"]
        if self.cfg.validation_data:
            fields.append("validation_data")
        elif on_hub and self.cfg.validation_split:
            fields.append("validation_split")
        return fields


# ---- Pieces --------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Rows that are read one after the other: a file or a part of it, or rows `span` of `rows`."""

    field: str  # the one of the config that names the data
    size: int  # bytes of the input
    path: Path | None = None
    span: Span = tables.WHOLE
    rows: Callable[[int, int], Iterator[Row]] | None = None
    held: bool = False  # out, for evaluation

    @property
    def is_text(self) -> bool:
        """Whether it is a part of one long text."""
        return self.path is not None and self.span != tables.WHOLE and is_text(self.path)

    def hash_of_text(self) -> int:
        """Of a long text, which counts by its beginning."""
        return hash_of(next(tables.read_text(self.path, self.field, Span(0, tables.BLOCK)), ""))

    def read(
        self, columns: Columns, optional: Container[str] = (), cursor: Cursor | None = None
    ) -> Iterator[Row]:
        """The rows; of a long text, the blocks of this part."""
        if self.rows:
            yield from self.rows(self.span.start, self.span.stop)
        elif self.is_text:
            place = one_line(self.path, 200)
            for text in tables.read_text(self.path, self.field, self.span):
                yield {"text": text}, place
        else:
            yield from tables.read_rows(self.path, columns, self.field, optional, self.span, cursor)


Unit = list[Piece]


def is_text(path: Path) -> bool:
    """Whether the whole file is one text."""
    return tables.file_ending(path) not in tables.TABLES


def hash_of(text: str) -> int:
    """64 bits for a text, the same on every machine."""
    return int.from_bytes(sha256(text.encode()).digest()[:8], "big")


def unit_size(total: int) -> int:
    """Bytes of a unit of so much data: a sixteenth, within limits."""
    return min(max(total // 16, SMALLEST), LARGEST)


def cut_evenly(total: int, parts: int) -> list[tuple[int, int]]:
    return [*pairwise(np.linspace(0, total, parts + 1).astype(int).tolist())]


def split_file(path: Path, name: str, size: int, long_texts: bool) -> list[Piece]:
    """A file in pieces of about `size` bytes, where that is possible before it is read."""
    total = path.stat().st_size
    whole = Piece(name, total, path)
    ending = path.suffix.lower()
    packed, long_text = ending in tables.COMPRESSIONS, long_texts and is_text(path)
    if total > 1.5 * size and (ending == ".jsonl" or long_text and not packed):
        bounds = cut_evenly(total, -(-total // size))
        spans = [
            Span(start, stop if stop < total else None, None if start else 0)
            for start, stop in bounds
        ]
        return [whole._replace(size=total // len(spans), span=span) for span in spans]
    if long_text and packed and 10 * total > size:
        return [whole._replace(span=Span(lines=None))]
    if total > size and ending == ".parquet":
        return split_parquet(whole, size)
    return [whole]


def split_parquet(whole: Piece, size: int) -> list[Piece]:
    """A .parquet file by its groups of rows."""
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(whole.path) as table:
            groups = [table.metadata.row_group(i) for i in range(table.num_row_groups)]
            facts = [(each.total_byte_size, each.num_rows) for each in groups]
    except Exception:  # reading it will say what is wrong
        return [whole]
    pieces, start, rows, first, weight = [], 0, 0, 0, 0
    for number, (count, more) in enumerate(facts, 1):
        weight, rows = weight + count, rows + more
        if weight >= size or number == len(facts):
            pieces.append(whole._replace(size=weight, span=Span(start, number, first)))
            start, first, weight = number, rows, 0
    return pieces


def list_pieces(reader: Reader, name: str) -> list[Piece]:
    """The pieces of the data that a field names: data, data_split, validation_data or _split."""
    cfg, shipped, columns = reader.cfg, reader.shipped, reader.columns
    if name == "data" and shipped is not None:
        rows, total = len(shipped), sum(len(str(row)) for row, _ in shipped)
        read = lambda start, stop: iter(shipped[start:stop])  # noqa: E731
    elif name in ("data_split", "validation_split"):
        split = getattr(cfg, name)
        dataset = hub.open_columns(cfg, split, columns, name, reader.optional)
        rows, total, place = len(dataset), dataset.data.nbytes, f"{cfg.data}, split {split}"
        read = lambda start, stop: hub.read_range(dataset, columns, place, start, stop)  # noqa: E731
    else:
        files = sources.list_files(getattr(cfg, name), reader.endings, name)
        size = unit_size(sum(file.stat().st_size for file in files))
        return [
            piece for file in files for piece in split_file(file, name, size, reader.long_texts)
        ]
    return [
        Piece(name, total * (stop - start) // max(rows, 1), None, Span(start, stop), read)
        for start, stop in cut_evenly(rows, max(total // unit_size(total), 1))
    ]


def group(pieces: Iterable[Piece], size: int) -> list[Unit]:
    """Pieces that follow each other, in units of about `size` bytes."""
    units: list[Unit] = []
    room = 0
    for piece in pieces:
        if not units or room < piece.size:
            units.append([])
            room = size
        units[-1].append(piece)
        room -= piece.size
    return units


# ---- The first pass ------------------------------------------------------------------------------


@dataclass
class Input:
    """The rows to train on of a source, or rows to evaluate on, and what the first pass found."""

    name: str  # for metrics
    reader: Reader
    field: str  # of the config, names them
    units: list[Unit]  # for the second pass: a file that was one piece may now be several
    rows: int = 0  # that can be used
    size: int = 0  # bytes of text
    left_out: Counter = field(default_factory=Counter)  # rows, by the reason
    counts: Counter = field(default_factory=Counter)  # what `check` returned
    # Of each unit: what is noted of its rows, and the texts of their labels.
    noted: list[tuple[Path, list[str]]] = field(default_factory=list)
    share: float = 1.0  # of a single text, that is trained on

    @property
    def given(self) -> bool:
        """Whether all rows are for evaluation."""
        return self.field.startswith("validation")

    @property
    def shown(self) -> str:
        """The data, for messages."""
        cfg = self.reader.cfg
        return one_line(cfg.validation_data if self.field == "validation_data" else cfg.data, 100)

    def notes(self) -> Iterator[np.ndarray]:
        """For each unit an array of NOTED."""
        return (map_file(file, NOTED) for file, _ in self.noted)


def scan(reader: Reader, name: str, folder: Path) -> Input:
    """Reads all rows that a field names once and checks them; the notes are in `folder`.

    Validation rows teach no vocabulary. Raises ValueError for a row that cannot be used, and if
    there is none.
    """
    folder.mkdir(exist_ok=True)
    pieces = list_pieces(reader, name)
    total = sum(piece.size for piece in pieces)
    share = min(1, SPARE * SAMPLE / max(total, 1))  # of the rows, by their hash
    least = 2**64 if name.startswith("validation") else (1 - share) * 2**64
    cut_at = unit_size(total)
    units = group(pieces, cut_at)

    def work(number: int, tell: Tell) -> None:
        if not is_done(folder, number):
            scan_unit(UnitWriter(folder, number), reader, units[number], least, cut_at, tell)

    sizes = [sum(piece.size for piece in unit) for unit in units]
    do_units(work, sizes, "Preparing data, first pass")
    data = getattr(reader.cfg, name)
    is_file = name == "validation_data" and data != reader.cfg.data
    found = Input(Path(data).name if is_file else reader.name, reader, name, [])
    for number, unit in enumerate(units):
        facts = read_unit(folder, number)
        found.rows, found.size = found.rows + facts["rows"], found.size + facts["size"]
        sources.add_left_out(found.left_out, facts["left_out"])
        found.counts.update(facts["counts"])
        found.noted.append((folder / f"{number:06}.rows", facts["labels"]))
        found.units += cut_unit(unit, facts["cuts"])
    if not found.rows:
        raise ValueError(f"task.{name}: there are no rows in {one_line(data, 100)}")
    return found


def scan_all(readers: list[Reader], folder: Path) -> list[Input]:
    """The first pass over the rows of all sources, and over the rows to evaluate on."""
    every = [(reader, field) for reader in readers for field in reader.fields]
    return [scan(*each, folder / f"scan-{number}") for number, each in enumerate(every)]


def scan_unit(
    out: UnitWriter, reader: Reader, unit: Unit, least: float, cut_at: int, tell: Tell
) -> None:
    """Notes the rows of a unit, and the texts of those with a hash of at least `least`.

    `cut_at`: bytes after which a file may be cut for the second pass.
    """
    facts: dict = {"rows": 0, "size": 0, "cuts": []}
    counts, left_out = Counter(), Counter()
    noted: list[tuple] = []
    labels: dict[str, int] = {}  # and their numbers

    def write_notes() -> None:
        out.append("rows", np.array(noted, NOTED))
        facts["rows"] += len(noted)
        noted.clear()

    def note_text(row: dict) -> tuple[int, int]:
        """The hash and size of a row, whose text may be kept."""
        key = reader.key(row)
        hashed, size = hash_of(key), len(key.encode())
        facts["size"] += size
        tell(size)
        if reader.texts and hashed >= least:
            line = json.dumps([hashed, [*reader.texts(row)]], ensure_ascii=False)
            out.append("sample", f"{line}\n".encode())
        return hashed, size

    out.append("sample", b"")
    for index, piece in enumerate(unit):
        if piece.is_text:
            size = sum(note_text(row)[1] for row, _ in piece.read(reader.columns))
            if not piece.span.start:
                compressed = piece.span.stop is None  # its size is known now
                size = size if compressed else piece.path.stat().st_size
                noted.append((piece.hash_of_text(), size, 0))
            continue
        cursor = Cursor(piece.path, piece.span) if piece.path else None
        may_be_cut = cursor and piece.span == tables.WHOLE and not is_text(piece.path)
        begun = Span()
        for row, place in piece.read(reader.columns, reader.optional, cursor):
            try:
                counts.update(reader.check(row) or [])
            except ValueError as error:
                sources.leave_out(error, place, reader.cfg, piece.field, left_out)
                continue
            value = reader.label(row) if reader.label else 0
            if isinstance(value, str):
                value = labels.setdefault(value, len(labels))
            noted.append((*note_text(row), value))
            if len(noted) == 10_000:  # a file that is read whole has many more
                write_notes()
            if may_be_cut and cursor.offset - begun.start >= cut_at:
                facts["cuts"].append([index, begun.start, cursor.offset, begun.lines])
                begun = Span(cursor.offset, None, cursor.lines)
        if begun.start:
            facts["cuts"].append([index, begun.start, None, begun.lines])
    write_notes()
    out.commit({**facts, "labels": [*labels], "counts": counts, "left_out": left_out})


def cut_unit(unit: Unit, cuts: list[list]) -> list[Unit]:
    """The unit, or several where the first pass has found out where large files can be cut."""
    units, rest = [], []
    for index, piece in enumerate(unit):
        spans = [Span(*span) for number, *span in cuts if number == index]
        if not spans:
            rest.append(piece)
            continue
        parts = [piece._replace(span=s, size=piece.size // len(spans)) for s in spans]
        units += [rest, *([part] for part in parts)]
        rest = []
    return [unit for unit in [*units, rest] if unit]


# ---- The second pass -----------------------------------------------------------------------------


@dataclass
class Batch:
    """Rows of about BATCH characters, all held out or none."""

    rows: list[Row]
    hashes: list[int]
    is_held: bool
    size: int = 0  # about the bytes of the input
    begins: bool = True  # whether the text begins with it, and ends: only a part of a long one
    ends: bool = True  # does not


def batches_of(source: Input, unit: Unit, held: Container[int]) -> Iterator[Batch]:
    """The rows of a unit; `held`: the hashes of those that are held out."""
    reader = source.reader
    waiting = {is_held: Batch([], [], is_held) for is_held in (False, True)}
    for piece in unit:
        if piece.is_text:
            yield from batches_of_text(piece, held)
            continue
        for row, place in piece.read(reader.columns, reader.optional):
            try:
                reader.check(row)
            except sources.IncompleteRow:  # the first pass has refused it, or counted it
                continue
            key = reader.key(row)
            hashed = hash_of(key)
            parts = {hashed in held: row}
            if source.share < 1:
                end = int(len(key) * source.share)
                parts = {False: {"text": key[:end]}, True: {"text": key[end:]}}
            for is_held, part in parts.items():
                batch = waiting[is_held]
                batch.rows.append((part, place))
                batch.hashes.append(hashed)
                batch.size += len(key)
                if batch.size > BATCH:
                    yield batch
                    waiting[is_held] = Batch([], [], is_held)
    yield from (batch for batch in waiting.values() if batch.rows)


def batches_of_text(piece: Piece, held: Container[int]) -> Iterator[Batch]:
    """The blocks of a part of a long text."""
    hashed = piece.hash_of_text()
    is_held, begins = piece.held or hashed in held, not piece.span.start
    for block, following in pairwise(chain(piece.read({"text": "text"}), [None])):
        ends = following is None and piece.span.stop is None
        yield Batch([block], [hashed], is_held, len(block[0]["text"].encode()), begins, ends)
        begins = False


def write(
    folder: Path,
    inputs: list[Input],
    held: Container[int],
    encode: Callable[[UnitWriter, Input, Iterator[Batch]], dict],
) -> list[tuple[Input, dict]]:
    """`encode` writes the batches of each unit and returns what is to be known of them.

    Returns these facts of each unit, and whose they are.
    """
    todo = [(each, unit) for each in inputs for unit in each.units]

    def work(number: int, tell: Tell) -> None:
        if is_done(folder, number):
            return
        source, unit = todo[number]
        out = UnitWriter(folder, number)

        def told() -> Iterator[Batch]:
            for batch in batches_of(source, unit, held):
                yield batch
                tell(batch.size)

        out.commit(encode(out, source, told()))

    do_units(work, [sum(piece.size for piece in unit) for _, unit in todo], "Preparing data")
    return [(each, read_unit(folder, number)) for number, (each, _) in enumerate(todo)]


# ---- What is held out, and what a vocabulary is learnt from --------------------------------------


def hold_out(
    source: Input, fraction: float, most: float, size_of_row: bool = False, by_label: bool = False
) -> set[int]:
    """The hashes of the rows that are held out, at most `most` rows or, if `size_of_row`, bytes.

    See `splits.hold_out`; without `by_label` all rows have one label.
    """
    numbers: dict[str, int] = {}

    def labelled() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for rows, (_, labels) in zip(source.notes(), source.noted, strict=True):
            strata = np.zeros(len(rows), int)
            if by_label:
                own = [numbers.setdefault(label, len(numbers)) for label in labels]
                strata = np.array(own, int)[rows["label"].astype(int)]
            yield rows["hash"], strata

    limits = splits.extremes(labelled())
    looked_at = min(fraction, LOOKED_AT / max(source.rows, 1))  # the rest might not fit into memory
    while True:
        rows = np.concatenate(
            [each[splits.is_candidate(each["hash"], limits, looked_at)] for each in source.notes()]
        )
        sizes = rows["size"] if size_of_row else np.ones(len(rows))
        if looked_at == fraction or sizes.sum() > most:
            return splits.hold_out(rows["hash"], sizes, limits, looked_at, most)
        looked_at = min(fraction, 2 * looked_at)


def choose_held(
    inputs: list[Input], fraction: float, most: float, problem: Callable[[Input], str], **how: Any
) -> set[int]:
    """The hashes of the rows that are held out, of each source so many (`hold_out`); none where
    validation rows are given.

    Raises ValueError, with the words of `problem(source)`, where there are none to hold out.
    """
    train, given = ([each for each in inputs if each.given == value] for value in (False, True))
    held: set[int] = set()
    if given:
        say_overlap(train, given)
        return held
    for each in train:
        if each.rows == 1 and each.reader.long_texts:  # it is cut in two
            continue
        own = hold_out(each, fraction, most / len(train), **how)
        if not own:
            raise ValueError(f"task.data: {problem(each)}")
        held |= own
    return held


def count_repeated(source: Input) -> int:
    """Rows that are equal to an earlier one; counted in parts, which bounds the memory."""
    parts, repeated = max(1, source.rows >> 22), 0
    for part in range(parts):
        noted = (each["hash"] for each in source.notes())
        hashes = np.concatenate([each[each % parts == part] for each in noted])
        repeated += len(hashes) - len(np.unique(hashes))
    return repeated


def say_overlap(train: list[Input], given: list[Input]) -> None:
    """Prints how many of the validation rows are training rows too."""
    rows = np.concatenate([each["hash"] for source in given for each in source.notes()])
    known = np.zeros(len(rows), bool)
    for each in chain.from_iterable(source.notes() for source in train):
        known |= np.isin(rows, each["hash"])
    sources.say_overlap(int(known.sum()), len(rows))


def learn_vocabulary(
    cfg: Any, folder: Path, train: list[Input], held: Container[int], **special: Any
) -> None:
    """Learns the vocabulary of a new model from rows that are not held out, unless it is there.

    `special`: the tokens that `tokenizing.learn_vocabulary` takes.
    """
    if not cfg.model_name_or_path and not (folder / tokenizing.FILE).exists():
        size = sum(each.size for each in train) / 1e6
        part = f"{SAMPLE / 1e6:,.0f} MB, chosen by hash, of " * (size * 1e6 > SAMPLE)
        print(f"Preparing data: learning a vocabulary from {part}{size:,.1f} MB", flush=True)
        texts = read_sample(train, held)
        tokenizing.learn_vocabulary(texts, cfg.vocab_size, folder, **special)


def read_sample(inputs: list[Input], held: Container[int]) -> Iterator[str]:
    """The kept texts of rows that are not held out, about SAMPLE bytes at most."""

    def lines() -> Iterator[tuple[int, str]]:
        for file, _ in chain.from_iterable(each.noted for each in inputs):
            with open(file.with_suffix(".sample"), encoding="utf-8") as sample:
                for line in sample:
                    hashed = int(line[1 : line.index(",")])
                    if hashed not in held:
                        yield hashed, line

    found = np.fromiter(((hashed, len(line), 0) for hashed, line in lines()), NOTED)
    found = found[np.argsort(found["hash"])[::-1]]
    number = int(np.searchsorted(np.cumsum(found["size"]), SAMPLE))
    least = int(found["hash"][: number + 1].min(initial=2**64 - 1))
    for hashed, line in lines():
        if hashed >= least:
            yield from json.loads(line)[1]
