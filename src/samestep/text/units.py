"""The rows of a task, read on all cores in bounded memory, in units that follow from the data.

A first pass (`scan`) checks every row and notes its hash and size. From the notes follow the rows
that are held out, and the texts that a vocabulary is learnt from. A second pass (`write`) makes
files of the rows. The result is the same on any number of cores, and after any interruption.
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
BATCH = 1_000_000  # characters that are encoded in one call
PARTS = ("train", "validation")
# Of a row; size in bytes; label: a number, or the place of a text among the unit's labels.
NOTED = np.dtype([("hash", "<u8"), ("size", "<i8"), ("label", "<f8")])


@dataclass
class RowKind:
    """What a task reads of its rows, and which of them are held out."""

    endings: Iterable[str]  # of files
    columns: Callable[[Any], Columns]  # of the config of a source
    # Changes a row to what the task uses, or raises ValueError; what it returns is counted.
    check: Callable[[dict], list[str] | None]
    key: Callable[[dict], str]  # equal rows have one key
    texts: Callable[[dict], Iterable[str]]  # that a vocabulary is learnt from
    nothing_held: str  # what to say of {data} of which no row can be held out
    # The rows of data that the task brings along, by its name.
    shipped: dict[str, Callable[[], Iterable[Row]]]
    group: Callable[[dict], str] | None = None  # rows of one group are all held out, or none
    label: Callable[[dict], str | float] | None = None
    optional: Container[str] = ()  # roles
    long_texts: bool = False  # a .txt file may be cut
    by_label: bool = False  # each label keeps a row to train on, and one is held out
    most_bytes: int = 0  # that are held out; 0: cfg.validation_rows rows


class Piece(NamedTuple):
    """Rows that are read one after the other: a file or a part of it, or rows `span` of `rows`."""

    size: int  # bytes of the input
    path: Path | None = None
    span: Span = tables.WHOLE
    rows: Callable[[int, int], Iterator[Row]] | None = None
    text: int | None = None  # the hash of the beginning of the long text that it is a part of
    is_held: bool = False  # out, for evaluation


Unit = list[Piece]


@dataclass(eq=False)
class Input:
    """The rows of a source that a field of its config names, and what the first pass found."""

    cfg: Any  # a DataConfig with `data` of this source
    field: str  # data or data_split, validation_data or validation_split
    name: str  # for metrics
    kind: RowKind
    shipped: list[Row] | None  # the rows, if the task brings them along
    units: list[Unit] = field(default_factory=list)  # after the first pass those of the second
    rows: int = 0  # that can be used
    size: int = 0  # bytes of text
    left_out: Counter = field(default_factory=Counter)  # rows, by the reason
    counts: Counter = field(default_factory=Counter)  # what `check` returned
    # Of each unit: what is noted of its rows, and the texts of their labels.
    noted: list[tuple[Path, list[str]]] = field(default_factory=list)
    share: float = 1.0  # of a single text, that is trained on

    @property
    def is_validation(self) -> bool:
        """Whether all rows are for evaluation."""
        return self.field.startswith("validation")

    @property
    def data(self) -> str:
        """The name of the data, for messages."""
        cfg = self.cfg
        return one_line(cfg.validation_data if self.field == "validation_data" else cfg.data, 100)

    @property
    def is_single_text(self) -> bool:
        """Whether it is one text, which is cut in two to hold some of it out."""
        return self.rows == 1 and self.kind.long_texts

    def notes(self) -> Iterator[np.ndarray]:
        """For each unit an array of NOTED."""
        return (map_file(file, NOTED) for file, _ in self.noted)

    def count_repeated(self) -> int:
        """Rows that are equal to an earlier one."""
        hashes = np.concatenate([each["hash"] for each in self.notes()])
        return len(hashes) - len(np.unique(hashes))

    def read(self, piece: Piece, cursor: Cursor | None = None) -> Iterator[Row]:
        """The rows of a piece; of a long text its blocks."""
        if piece.rows:
            return piece.rows(piece.span.start, piece.span.stop)
        if piece.text is not None:
            place = one_line(piece.path, 200)
            texts = tables.read_text(piece.path, self.field, piece.span)
            return (({"text": text}, place) for text in texts)
        how = (self.kind.columns(self.cfg), self.field, self.kind.optional, piece.span, cursor)
        return tables.read_rows(piece.path, *how)


def inputs_of(cfg: Any, kind: RowKind) -> list[Input]:
    """The rows of all sources, and those to evaluate on. Prints the files that are not read."""
    inputs = []
    for source, own in sources.by_source(cfg, kind.endings):
        rows = [*kind.shipped[own.data]()] if own.data in kind.shipped else None
        sources.print_skipped_files(own, kind.endings, rows is not None)
        on_hub = rows is None and hub.is_hub_name(own.data)
        inputs.append(Input(own, "data_split" if on_hub else "data", source.name, kind, rows))
        if own.validation_data:
            other = own.validation_data != own.data
            name = Path(own.validation_data).name if other else source.name
            inputs.append(Input(own, "validation_data", name, kind, rows))
        elif on_hub and own.validation_split:
            inputs.append(Input(own, "validation_split", source.name, kind, rows))
    return inputs


def parts_of(inputs: list[Input]) -> tuple[list[Input], list[Input]]:
    """Those to train on, and those to evaluate on if they are given."""
    train = [each for each in inputs if not each.is_validation]
    return train, [each for each in inputs if each.is_validation]


# ---- Units ---------------------------------------------------------------------------------------


def hash_of(text: str) -> int:
    """64 bits for a text, the same on every machine."""
    return int.from_bytes(sha256(text.encode()).digest()[:8], "big")


def unit_size(total: int) -> int:
    """Bytes of a unit of so much data: a sixteenth, within limits."""
    return min(max(total // 16, SMALLEST), LARGEST)


def cut_evenly(total: int, parts: int) -> list[tuple[int, int]]:
    return [*pairwise(np.linspace(0, total, parts + 1).astype(int).tolist())]


def pieces_of(source: Input) -> list[Piece]:
    """All rows of a source in pieces."""
    cfg, name, columns = source.cfg, source.field, source.kind.columns(source.cfg)
    if name == "data" and source.shipped is not None:
        shipped = source.shipped
        rows, total = len(shipped), sum(len(str(row)) for row, _ in shipped)
        read = lambda start, stop: iter(shipped[start:stop])  # noqa: E731
    elif name.endswith("split"):
        split = getattr(cfg, name)
        dataset = hub.open_columns(cfg, split, columns, name, source.kind.optional)
        rows, total, place = len(dataset), dataset.data.nbytes, f"{cfg.data}, split {split}"
        read = lambda start, stop: hub.read_range(dataset, columns, place, start, stop)  # noqa: E731
    else:
        files = sources.list_files(getattr(cfg, name), source.kind.endings, name)
        size = unit_size(sum(file.stat().st_size for file in files))
        return [*chain(*(split_file(source, file, size) for file in files))]
    return [
        Piece(total * (stop - start) // max(rows, 1), None, Span(start, stop), read)
        for start, stop in cut_evenly(rows, max(total // unit_size(total), 1))
    ]


def split_file(source: Input, path: Path, size: int) -> list[Piece]:
    """A file in pieces of about `size` bytes, where that is possible before it is read."""
    total, ending = path.stat().st_size, path.suffix.lower()
    whole, packed = Piece(total, path), ending in tables.COMPRESSIONS
    is_text = source.kind.long_texts and tables.file_ending(path) not in tables.TABLES
    if is_text and total > size * (0.1 if packed else 1.5):  # it counts by its beginning
        beginning = tables.read_text(path, source.field, Span(0, tables.BLOCK))
        whole = whole._replace(text=hash_of(next(beginning, "")))
        if packed:
            return [whole._replace(span=Span(lines=None))]
    if whole.text is not None or total > 1.5 * size and ending == ".jsonl":
        bounds = cut_evenly(total, -(-total // size))
        spans = [Span(*each, None if each[0] else 0) for each in bounds]
        spans[-1] = spans[-1]._replace(stop=None)
        return [whole._replace(size=total // len(spans), span=span) for span in spans]
    return split_parquet(whole, size) if total > size and ending == ".parquet" else [whole]


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


def do_all(
    folder: Path, units: list[tuple[Input, Unit]], what: str, work: Callable[..., None]
) -> list[dict]:
    """Calls `work(out, source, unit, tell)` for each unit that is not done; the facts of all."""

    def do(number: int, tell: Tell) -> None:
        if not is_done(folder, number):
            work(UnitWriter(folder, number), *units[number], tell)

    do_units(do, [sum(piece.size for piece in unit) for _, unit in units], what)
    return [read_unit(folder, number) for number in range(len(units))]


# ---- The first pass ------------------------------------------------------------------------------


def scan(cfg: Any, folder: Path, kind: RowKind) -> tuple[list[Input], set[int]]:
    """Reads all rows once and checks them, and chooses those that are held out.

    Returns the inputs, and the hashes of the rows that are held out. The notes are in folders of
    `folder`. Raises ValueError for a row that cannot be used, and where there is none to train on
    or to hold out.
    """
    inputs = inputs_of(cfg, kind)
    train, validation = parts_of(inputs)
    kind.key = kind.key if validation else kind.group or kind.key
    for number, source in enumerate(inputs):
        scan_input(source, folder / f"scan-{number}")
    if validation:
        say_overlap(train, validation)
        return inputs, set()
    held: set[int] = set()
    most = (kind.most_bytes or max(len(train), cfg.validation_rows)) / len(train)
    for source in train:
        if not source.is_single_text:
            own = hold_out(source, cfg.validation_fraction, most)
            if not own:
                raise ValueError(f"task.data: {kind.nothing_held.format(data=source.data)}")
            held |= own
    return inputs, held


def scan_input(source: Input, folder: Path) -> None:
    """Reads the rows of an input, and notes what was found."""
    folder.mkdir(exist_ok=True)
    pieces = pieces_of(source)
    total = sum(piece.size for piece in pieces)
    units = [(source, unit) for unit in group(pieces, unit_size(total))]
    share = min(1, SPARE * SAMPLE / max(total, 1))  # of the texts, by their hash
    least = 2**64 if source.is_validation else (1 - share) * 2**64

    def work(out: UnitWriter, source: Input, unit: Unit, tell: Tell) -> None:
        scan_unit(out, source, unit, least, unit_size(total), tell)

    for number, facts in enumerate(do_all(folder, units, "Preparing data, first pass", work)):
        source.noted.append((folder / f"{number:06}.rows", facts["labels"]))
        source.units += cut_unit(units[number][1], facts["cuts"])
        sources.add_left_out(source.left_out, facts["left_out"])
        source.counts.update(facts["counts"])
        source.size += facts["size"]
    source.rows = sum(map(len, source.notes()))
    if not source.rows:
        data = one_line(getattr(source.cfg, source.field), 100)
        raise ValueError(f"task.{source.field}: there are no rows in {data}")


def scan_unit(
    out: UnitWriter, source: Input, unit: Unit, least: float, cut_at: int, tell: Tell
) -> None:
    """Notes the rows of a unit, and the texts of those with a hash of at least `least`.

    `cut_at`: bytes after which a file may be cut for the second pass.
    """
    kind, cuts = source.kind, []
    counts, left_out = Counter(), Counter()
    noted: list[tuple] = []
    labels: dict[str, int] = {}  # and their numbers
    total = 0  # bytes of text
    learns = not source.cfg.model_name_or_path

    def note_text(row: dict) -> tuple[int, int]:
        """The hash and size of a row, whose text may be kept."""
        nonlocal total
        key = kind.key(row)
        hashed, size = hash_of(key), len(key.encode())
        total += size
        tell(size)
        if learns and hashed >= least:
            line = json.dumps([hashed, [*kind.texts(row)]], ensure_ascii=False)
            out.append("sample", f"{line}\n".encode())
        return hashed, size

    out.append("sample", b"")
    for index, piece in enumerate(unit):
        if piece.text is not None:
            size = sum(note_text(row)[1] for row, _ in source.read(piece))
            if not piece.span.start:
                compressed = piece.span.stop is None  # its size is known now
                noted.append((piece.text, size if compressed else piece.path.stat().st_size, 0))
            continue
        cursor = Cursor(piece.path, piece.span) if piece.path else None
        may_be_cut = cursor and piece.span == tables.WHOLE
        begun = Span()
        for row, place in source.read(piece, cursor):
            try:
                counts.update(kind.check(row) or [])
            except ValueError as error:
                sources.leave_out(error, place, source.cfg, source.field, left_out)
                continue
            value = kind.label(row) if kind.label else 0
            if isinstance(value, str):
                value = labels.setdefault(value, len(labels))
            noted.append((*note_text(row), value))
            if len(noted) == 10_000:  # a file that is read whole has many more
                out.append("rows", np.array(noted, NOTED))
                noted.clear()
            if may_be_cut and cursor.offset - begun.start >= cut_at:
                cuts.append([index, begun.start, cursor.offset, begun.lines])
                begun = Span(cursor.offset, None, cursor.lines)
        if begun.start:
            cuts.append([index, begun.start, None, begun.lines])
    out.append("rows", np.array(noted, NOTED))
    facts = {"cuts": cuts, "labels": [*labels], "counts": counts, "left_out": left_out}
    out.commit({**facts, "size": total})


def cut_unit(unit: Unit, cuts: list[list]) -> list[Unit]:
    """The unit, or several where the first pass has found out where large files can be cut."""
    units: list[Unit] = [[]]
    for index, piece in enumerate(unit):
        spans = [Span(*span) for number, *span in cuts if number == index]
        parts = [piece._replace(span=s, size=piece.size // len(spans)) for s in spans]
        if parts:
            units += [*([part] for part in parts), []]
        else:
            units[-1].append(piece)
    return [unit for unit in units if unit]


# ---- What is held out, and what a vocabulary is learnt from --------------------------------------


def hold_out(source: Input, fraction: float, most: float) -> set[int]:
    """The hashes of the rows that are held out, at most `most` rows, or bytes: `splits.hold_out`.

    Without `by_label` all rows have one label.
    """
    numbers: dict[str, int] = {}

    def labelled() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for rows, (_, labels) in zip(source.notes(), source.noted, strict=True):
            strata = np.zeros(len(rows), int)
            if source.kind.by_label:
                own = [numbers.setdefault(label, len(numbers)) for label in labels]
                strata = np.array(own, int)[rows["label"].astype(int)]
            yield rows["hash"], strata

    limits = splits.extremes(labelled())
    rows = np.concatenate(
        [each[splits.is_candidate(each["hash"], limits, fraction)] for each in source.notes()]
    )
    sizes = rows["size"] if source.kind.most_bytes else np.ones(len(rows))
    return splits.hold_out(rows["hash"], sizes, limits, fraction, most)


def say_overlap(train: list[Input], validation: list[Input]) -> None:
    """Prints how many of the validation rows are training rows too."""
    rows = np.concatenate([each["hash"] for source in validation for each in source.notes()])
    known = np.zeros(len(rows), bool)
    for each in chain.from_iterable(source.notes() for source in train):
        known |= np.isin(rows, each["hash"])
    sources.say_overlap(int(known.sum()), len(rows))


def learn_vocabulary(
    cfg: Any, folder: Path, inputs: list[Input], held: Container[int], **special: Any
) -> None:
    """Learns the vocabulary of a new model from rows to train on, unless it is there.

    `special`: the tokens that `tokenizing.learn_vocabulary` takes.
    """
    if not cfg.model_name_or_path and not (folder / tokenizing.FILE).exists():
        train, _ = parts_of(inputs)
        size = sum(each.size for each in train)
        part = f"{SAMPLE / 1e6:,.0f} MB, chosen by hash, of " * (size > SAMPLE)
        text = f"learning a vocabulary from {part}{size / 1e6:,.1f} MB"
        print(f"Preparing data: {text}", flush=True)
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


def batches_of(source: Input, unit: Unit, held: Container[int], tell: Tell) -> Iterator[Batch]:
    """The rows of a unit; `held`: the hashes of those that are held out."""
    kind = source.kind
    waiting = {is_held: Batch([], [], is_held) for is_held in (False, True)}
    for piece in unit:
        if piece.text is not None:
            yield from batches_of_text(source, piece, held, tell)
            continue
        for row, place in source.read(piece):
            try:
                kind.check(row)
            except sources.IncompleteRow:  # the first pass has refused it, or counted it
                continue
            key = kind.key(row)
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
                    tell(batch.size)
                    waiting[is_held] = Batch([], [], is_held)
    yield from (batch for batch in waiting.values() if batch.rows)


def batches_of_text(
    source: Input, piece: Piece, held: Container[int], tell: Tell
) -> Iterator[Batch]:
    """The blocks of a part of a long text."""
    is_held, begins = piece.is_held or piece.text in held, not piece.span.start
    for block, following in pairwise(chain(source.read(piece), [None])):
        ends, size = following is None and piece.span.stop is None, len(block[0]["text"].encode())
        yield Batch([block], [piece.text], is_held, size, begins, ends)
        tell(size)
        begins = False


def write(
    folder: Path,
    inputs: list[Input],
    held: Container[int],
    encode: Callable[[UnitWriter, Input, Iterator[Batch]], dict],
) -> list[dict]:
    """`encode` writes the batches of each unit and returns what is to be known of them.

    Returns these facts of each unit, with the place of its input as "input".
    """
    todo = [(each, unit) for each in inputs for unit in each.units]

    def work(out: UnitWriter, source: Input, unit: Unit, tell: Tell) -> None:
        facts = encode(out, source, batches_of(source, unit, held, tell))
        out.commit({**facts, "input": inputs.index(source)})

    return do_all(folder, todo, "Preparing data", work)
