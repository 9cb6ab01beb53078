"""The input of a task in units of bounded size, each read by one process, and what is in them.

Units follow from the input alone, so the result is the same on any number of cores. A first pass,
`scan`, checks every row and notes its hash and size. From the notes follow the rows that are held
out, and the texts that a vocabulary is learnt from.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from samestep.base.console import one_line
from samestep.base.files import fsync, read_json_object
from samestep.base.workers import Tell, do_units
from samestep.data import hub, sources, tables
from samestep.data.tables import Columns, Cursor, Row, Span

SMALLEST, LARGEST = 4_000_000, 32_000_000  # bytes of a unit
SAMPLE = 50_000_000  # bytes of text that a vocabulary is learnt from
SPARE = 4  # times as many bytes of files are kept, as files hold more than text
LOOKED_AT = 200_000  # rows, at first, to find those to hold out
CUT_BY_BYTES = (".jsonl", ".txt")
NOTED, LABEL = [("hash", "<u8"), ("size", "<i8")], [("label", "<f8")]  # of a row; size in bytes


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
        return self.path is not None and self.span != tables.WHOLE and ends_txt(self.path)

    def hash_of_text(self) -> int:
        """Of a long text, which counts by its beginning."""
        return hash_of(next(tables.read_text(self.path, self.field, Span(0, tables.BLOCK)), ""))

    def read(
        self, columns: Columns, optional: Container[str], cursor: Cursor | None = None
    ) -> Iterator[Row]:
        """The rows; of a long text, the blocks of this part."""
        if self.rows:
            yield from self.rows(self.span.start, self.span.stop)
        elif self.is_text:
            place = one_line(self.path, 200)
            for text in tables.read_text(self.path, self.field, self.span, cursor):
                yield {"text": text}, place
        else:
            yield from tables.read_rows(self.path, columns, self.field, optional, self.span, cursor)


Unit = list[Piece]


def ends_txt(path: Path) -> bool:
    return tables.file_ending(path) == ".txt"


def unit_size(total: int) -> int:
    """Bytes of a unit of so much data: a sixteenth, within limits."""
    return min(max(total // 16, SMALLEST), LARGEST)


def split_file(path: Path, name: str, size: int, long_texts: bool) -> list[Piece]:
    """A file in pieces of about `size` bytes, where that is possible before it is read."""
    total = path.stat().st_size
    whole = Piece(name, total, path)
    ending = path.suffix.lower()
    if total > 1.5 * size and ending in CUT_BY_BYTES and (long_texts or ending != ".txt"):
        bounds = np.linspace(0, total, -(-total // size) + 1).astype(int).tolist()
        spans = [
            Span(start, stop if stop < total else None, None if start else 0)
            for start, stop in zip(bounds, bounds[1:], strict=False)
        ]
        return [Piece(name, total // len(spans), path, span) for span in spans]
    if long_texts and ending in tables.COMPRESSIONS and ends_txt(path) and 10 * total > size:
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
    return pieces or [whole]


def split_rows(
    read: Callable[[int, int], Iterator[Row]], rows: int, total: int, name: str, size: int
) -> list[Piece]:
    """Rows that are found by their numbers, in pieces of about `size` of their `total` bytes."""
    bounds = np.linspace(0, rows, max(total // size, 1) + 1).astype(int).tolist()
    return [
        Piece(name, total * (stop - start) // max(rows, 1), None, Span(start, stop), read)
        for start, stop in zip(bounds, bounds[1:], strict=False)
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


def list_pieces(
    cfg: sources.DataConfig,
    name: str,
    endings: Iterable[str],
    columns: Columns,
    shipped: list[Row] | None,
    optional: Container[str],
    long_texts: bool,
) -> list[Piece]:
    """The pieces of the data that a field names: data, data_split, validation_data or _split."""
    if shipped is not None:
        total = sum(len(str(row)) for row, _ in shipped)
        read = lambda start, stop: iter(shipped[start:stop])  # noqa: E731
        return split_rows(read, len(shipped), total, name, unit_size(total))
    if name in ("data_split", "validation_split"):
        split = getattr(cfg, name)
        dataset = hub.open_columns(cfg, split, columns, name, optional)
        read = lambda start, stop: hub.read_range(  # noqa: E731
            dataset, columns, f"{cfg.data}, split {split}", start, stop
        )
        total = dataset.data.nbytes
        return split_rows(read, len(dataset), total, name, unit_size(total))
    files = sources.list_files(getattr(cfg, name), endings, name)
    size = unit_size(sum(file.stat().st_size for file in files))
    return [piece for file in files for piece in split_file(file, name, size, long_texts)]


# ---- The first pass ------------------------------------------------------------------------------


@dataclass
class Notes:
    """What the first pass found in a number of units."""

    units: list[Unit]  # for the second pass: a file that was one piece may now be several
    rows: int = 0  # that can be used
    skipped: int = 0
    first: str = ""  # that was skipped
    size: int = 0  # bytes of text
    counts: Counter = field(default_factory=Counter)  # what `check` returned
    files: list[Path] = field(default_factory=list)  # hashes and sizes of the rows

    def hashes(self) -> Iterator[np.ndarray]:
        """Arrays with the fields hash, uint64, and size, in bytes; and label, where there is one:
        a number, or the place of a text among those of `labelled`."""
        for file in self.files:
            yield np.load(file, mmap_mode="r")

    def labelled(self) -> Iterator[tuple[np.ndarray, list[str]]]:
        """The arrays of `hashes`, each with the texts of its labels."""
        for file, rows in zip(self.files, self.hashes(), strict=True):
            yield rows, read_json_object(file.with_suffix(".json")).get("labels", [])


def hash_of(text: str) -> int:
    """64 bits for a text, the same on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def scan(
    units: list[Unit],
    folder: Path,
    columns: Columns,
    optional: Container[str],
    check: Callable[[dict], list[str] | None],
    key: Callable[[dict], str],
    texts: Callable[[dict], Iterable[str]] | None,
    skip: bool,
    what: str,
    label: Callable[[dict], str | float] | None = None,
) -> Notes:
    """Reads all rows once and checks them; the notes are in `folder`.

    `check` changes a row to what the task uses, or raises ValueError; what it returns is counted.
    `key`: equal rows have equal keys. `texts`: those of a row, from which a vocabulary is learnt;
    samples of them are kept. `skip`: leave out rows that raise IncompleteRow. `label`: what is
    noted of a row besides, a text or a number.
    """
    folder.mkdir(exist_ok=True)
    sizes = [sum(piece.size for piece in unit) for unit in units]
    share = min(1, SPARE * SAMPLE / max(sum(sizes), 1))  # of the rows, by their hash
    cut_at = unit_size(sum(sizes))

    def work(number: int, tell: Tell) -> None:
        if read_unit(folder, number, verify=True):
            return
        facts: dict = {"skipped": 0, "first": "", "size": 0, "cuts": []}
        counts: Counter = Counter()
        noted: list[tuple] = []
        labels: dict[str, int] = {}  # and their numbers
        path, kind = folder / f"{number:06}", NOTED + LABEL * bool(label)
        with open(f"{path}.sample", "w", encoding="utf-8") as sample, open(path, "wb") as notes:

            def write_notes() -> None:
                np.array(noted, kind).tofile(notes)
                noted.clear()

            for index, piece in enumerate(units[number]):
                cursor = Cursor(piece.path, piece.span) if piece.path else None
                cuts = cursor and piece.span == tables.WHOLE and not ends_txt(piece.path)
                begun, seen, before = Span(), 0, facts["size"]
                for row, place in piece.read(columns, optional, cursor):
                    try:
                        counts.update([] if piece.is_text else check(row) or [])
                    except ValueError as error:
                        incomplete = isinstance(error, sources.IncompleteRow)
                        if not (incomplete and skip):
                            hint = "; --task.incomplete_rows skip leaves such rows out" * incomplete
                            message = f"task.{piece.field}: {place}: {error}{hint}"
                            raise ValueError(message) from None
                        facts["skipped"] += 1
                        facts["first"] = facts["first"] or f"{place}: {error}"
                        continue
                    text = key(row)
                    size, hashed = len(text.encode()), hash_of(text)
                    if not piece.is_text:
                        value = label(row) if label else 0
                        if isinstance(value, str):
                            value = labels.setdefault(value, len(labels))
                        noted.append((hashed, size, *[value] * bool(label)))
                        if len(noted) == 10_000:  # a file that is read whole has many more
                            write_notes()
                    facts["size"] += size
                    if texts and hashed >= (1 - share) * 2**64:
                        line = json.dumps([hashed, [*texts(row)]], ensure_ascii=False)
                        sample.write(line + "\n")
                    position = cursor.offset - cursor.span.start if cursor else seen + size
                    tell(position - seen)
                    seen = position
                    if cuts and cursor.offset - begun.start >= cut_at:
                        facts["cuts"].append([index, begun.start, cursor.offset, begun.lines])
                        begun = Span(cursor.offset, None, cursor.lines)
                if begun.start:
                    facts["cuts"].append([index, begun.start, None, begun.lines])
                if piece.is_text and not piece.span.start:
                    whole = piece.span.stop is None  # compressed: its size is known now
                    size = facts["size"] - before if whole else piece.path.stat().st_size
                    noted.append((piece.hash_of_text(), size))
            write_notes()
        rows = np.memmap(path, kind, "r") if path.stat().st_size else np.zeros(0, kind)
        np.save(f"{path}.npy", rows)
        path.unlink()
        facts |= {"rows": len(rows), "labels": [*labels], "files": {}}
        for file in (path.with_suffix(".npy"), path.with_suffix(".sample")):
            fsync(file)
            facts["files"][file.name] = [file.stat().st_size, hash_of_file(file)]
        facts["counts"] = counts
        write_json(path.with_suffix(".json"), facts)

    do_units(work, sizes, what)
    notes = Notes([])
    for number, unit in enumerate(units):
        facts = read_json_object(folder / f"{number:06}.json")
        notes.rows, notes.skipped = notes.rows + facts["rows"], notes.skipped + facts["skipped"]
        notes.first, notes.size = notes.first or facts["first"], notes.size + facts["size"]
        notes.counts.update(facts["counts"])
        notes.files.append(folder / f"{number:06}.npy")
        notes.units += cut_unit(unit, facts["cuts"])
    return notes


def scan_field(
    cfg: sources.DataConfig,
    name: str,
    folder: Path,
    endings: Iterable[str],
    columns: Columns,
    check: Callable[[dict], list[str] | None],
    key: Callable[[dict], str],
    texts: Callable[[dict], Iterable[str]] | None,
    shipped: list[Row] | None = None,
    optional: Container[str] = (),
    label: Callable[[dict], str | float] | None = None,
    long_texts: bool = False,
    nothing: str = "there are no rows",
) -> Notes:
    """`scan` of the rows that a field names. Prints the number of rows that are left out.

    `shipped`: training rows that the task brings along. Validation rows teach no vocabulary. Raises
    ValueError if there is no row, with the words of `nothing`.
    """
    held = name.startswith("validation")
    pieces = list_pieces(
        cfg, name, endings, columns, None if held else shipped, optional, long_texts
    )
    units = group(pieces, unit_size(sum(piece.size for piece in pieces)))
    texts, skip = None if held else texts, cfg.incomplete_rows == "skip"
    what = "Preparing data, first pass"
    notes = scan(units, folder, columns, optional, check, key, texts, skip, what, label)
    if notes.skipped:
        number = f"{notes.skipped:,} incomplete rows of {notes.skipped + notes.rows:,}"
        print(f"Preparing data: left out {number}, the first: {notes.first}", flush=True)
    if not notes.rows:
        raise ValueError(f"task.{name}: {nothing} in {one_line(getattr(cfg, name), 100)}")
    return notes


def write_json(path: Path, value: dict) -> None:
    """A JSON file that is there whole, or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value), encoding="utf-8")
    fsync(partial)
    partial.rename(path)


def hash_of_file(path: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
        return digest.hexdigest()


def read_unit(folder: Path, number: int, verify: bool = False) -> dict:
    """The facts of a unit; empty: it is not done, or, to `verify`, its bytes are other ones."""
    facts = read_json_object(folder / f"{number:06}.json")
    for name, (size, digest) in facts.get("files", {}).items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            return {}
        if verify and hash_of_file(path) != digest:
            return {}
    return facts


def cut_unit(unit: Unit, cuts: list[list]) -> list[Unit]:
    """The unit, or several where the first pass has found out where large files can be cut."""
    units, rest = [], []
    for index, piece in enumerate(unit):
        spans = [Span(*span) for number, *span in cuts if number == index]
        if not spans:
            rest.append(piece)
            continue
        parts = [piece._replace(span=s, size=piece.size // len(spans)) for s in spans]
        units += [rest] * bool(rest) + [[part] for part in parts]
        rest = []
    return units + [rest] * bool(rest)


# ---- What is held out ----------------------------------------------------------------------------


def hold_out(
    notes: Notes, fraction: float, most: float, size_of_row: bool = False, by_label: bool = False
) -> set[int]:
    """The hashes of the rows that are held out: the smallest ones, `by_label` of each label.

    About `fraction` of the rows, in whole groups of equal rows, but at most `most` rows or, if
    `size_of_row`, bytes; at least one group, and of each label not all.
    """
    numbers: dict[str, int] = {}
    totals, lasts = Counter(), {}
    for rows, strata in stratified(notes, by_label, numbers):
        found, inverse, counts = np.unique(strata, return_inverse=True, return_counts=True)
        largest = np.zeros(len(found), np.uint64)
        np.maximum.at(largest, inverse, rows["hash"])
        facts = (found.tolist(), counts.tolist(), largest.tolist())
        for stratum, count, last in zip(*facts, strict=True):
            totals[stratum] += count
            lasts[stratum] = max(lasts.get(stratum, 0), last)
    kept = {*lasts.values()}
    limit = min(1, LOOKED_AT / max(notes.rows, 1))  # the rest might not fit into memory
    while True:
        chosen, chosen_strata = [np.zeros(0, NOTED)], [np.zeros(0, int)]
        for rows, strata in stratified(notes, by_label, numbers):
            small = rows["hash"] < limit * 2**64
            chosen.append(rows[["hash", "size"]][small])
            chosen_strata.append(strata[small])
        rows = np.concatenate(chosen)
        weight = rows["size"].sum() if size_of_row else len(rows)
        if limit == 1 or weight > most or len(rows) > fraction * notes.rows:
            break
        limit = min(1, 2 * limit)
    hashes, firsts, inverse, counts = np.unique(
        rows["hash"], return_index=True, return_inverse=True, return_counts=True
    )
    sizes = np.bincount(inverse, rows["size"], len(hashes)) if size_of_row else counts
    strata = np.concatenate(chosen_strata)[firsts]
    groups = [*zip(*(each.tolist() for each in (hashes, strata, counts, sizes)), strict=True)]
    groups = [group for group in groups if group[0] not in kept]
    held: set[int] = set()
    taken, weight = Counter(), 0
    for value, stratum, count, size in groups:
        if taken[stratum] + count / 2 > fraction * totals[stratum]:
            continue
        if weight + size <= most:
            held.add(value)
            taken[stratum], weight = taken[stratum] + count, weight + size
        elif held:
            break
    if groups and not held:
        known = np.bincount(strata)
        held.add(max(groups, key=lambda group: known[group[1]])[0])
    return held


def stratified(
    notes: Notes, by_label: bool, numbers: dict[str, int]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The noted rows, and the number of each row's label, int (N,); `numbers` grows with them."""
    for rows, labels in notes.labelled():
        strata = np.zeros(len(rows), int)
        if by_label:
            own = [numbers.setdefault(label, len(numbers)) for label in labels]
            strata = np.array(own, int)[rows["label"].astype(int)]
        yield rows, strata


def is_in(hashes: np.ndarray, held: set[int]) -> np.ndarray:
    """Whether each row, by its hash, is held out: bool (N,)."""
    return np.isin(hashes, np.fromiter(held, np.uint64, len(held)))


def count_held(notes: Notes, held: set[int]) -> int:
    """The rows that are held out."""
    return sum(int(is_in(rows["hash"], held).sum()) for rows in notes.hashes())


def count_repeated(notes: Notes) -> int:
    """Rows that are equal to an earlier one."""
    parts, repeated = max(1, notes.rows >> 22), 0
    for part in range(parts):
        lower, upper = (part << 64) // parts, ((part + 1) << 64) // parts - 1
        chosen = [
            each["hash"][(each["hash"] >= lower) & (each["hash"] <= upper)]
            for each in notes.hashes()
        ]
        hashes = np.concatenate([*chosen, np.zeros(0, np.uint64)])
        repeated += len(hashes) - len(np.unique(hashes))
    return repeated


def count_known(train: list[Notes], validation: list[Notes]) -> int:
    """Validation rows that are training rows too."""
    empty = np.zeros(0, np.uint64)
    hashes = [each["hash"] for notes in validation for each in notes.hashes()]
    rows = np.concatenate([*hashes, empty])
    values = np.unique(rows)
    known = np.zeros(len(values), bool)
    for notes in train:
        for each in notes.hashes():
            known |= np.isin(values, each["hash"])
    return int(np.isin(rows, values[known]).sum())


def read_sample(folders: list[Path], held: Container[int]) -> Iterator[str]:
    """The kept texts of rows that are not held out, about SAMPLE bytes at most."""

    def lines() -> Iterator[tuple[int, str]]:
        for folder in folders:
            for file in sorted(folder.glob("*.sample")):
                with open(file, encoding="utf-8") as sample:
                    for line in sample:
                        hashed = int(line[1 : line.index(",")])
                        if hashed not in held:
                            yield hashed, line

    found = np.fromiter(((hashed, len(line)) for hashed, line in lines()), NOTED)
    found = found[np.argsort(found["hash"])[::-1]]
    number = int(np.searchsorted(np.cumsum(found["size"]), SAMPLE))
    least = int(found["hash"][: number + 1].min(initial=2**64 - 1))
    for hashed, line in lines():
        if hashed >= least:
            yield from json.loads(line)[1]
