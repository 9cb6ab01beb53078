"""Rows of texts or images as a `datasets.DatasetDict` with the splits train and validation.

`datasets` reads them in several processes into Arrow files, by readers.py. What is wrong with a row
travels in a column, so that the error is that of the first wrong row, with any number of processes.
"""

import json
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute as pc
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

from samestep.base.console import one_line
from samestep.base.workers import count_cores
from samestep.data import hub, readers, sources, splits
from samestep.data.building import build
from samestep.data.readers import Span
from samestep.data.tables import TABLES, Columns, Row, column_names, file_ending

Normalize = Callable[[dict], tuple[dict, list[str]]]  # the stored row, and remarks to count
# What is noted of a row beside its content; int64, since datasets has no column for 2**63 and more.
NOTES = {
    "input": Value("int32"),
    "hash": Value("int64"),  # of the content
    "side": Value("int64"),  # a hash: rows with one are all held out, or none
    "size": Value("int64"),  # bytes of the content
    "problem": Value("string"),  # an error that ends the run
    "skipped": Value("string"),  # why the row is left out
    "remarks": Value("string"),  # lines
}
TABLE = 2_000_000  # bytes of content that are written at a time
HUB_ROWS = 10_000  # of a span


def num_processes(rows: int) -> int | None:
    """Return `num_proc` for `map` over so many rows: the cores of this process at most.

    None: this process alone.
    """
    number = min(count_cores(), rows)
    return number if number > 1 else None


def first_columns(cfg: Any, extensions: Iterable[str], field: str = "data") -> list[str]:
    """Return the names of the columns of a source's first row; `cfg.data` is this source alone."""
    if hub.is_hub_name(cfg.data) and field != "validation_data":
        hub.check_commit(cfg)
        split = cfg.validation_split if field == "validation_split" else cfg.data_split
        return hub.load_hub_split(cfg, split).column_names
    for path in sources.list_files(getattr(cfg, field), extensions, field):
        for row, _ in readers.read_span(readers.spans_of(path)[0], None):
            return [*row]
    return []


# ---- Inputs --------------------------------------------------------------------------------------


@dataclass
class Input:
    """The rows that a field of a source's config names."""

    cfg: Any  # a DataConfig with `data` of this source
    field: str  # data or data_split, validation_data or validation_split
    name: str  # for metrics
    columns: Columns
    optional: Container[str]  # roles
    spans: list[Span]
    bundled: Callable[[], Iterable[Row]] | None = None
    dataset: Dataset | None = None  # of the Hub

    @property
    def is_validation(self) -> bool:
        return self.field.startswith("validation")

    @property
    def data(self) -> str:
        """The name of the data, for messages."""
        cfg = self.cfg
        return one_line(cfg.validation_data if self.field == "validation_data" else cfg.data, 100)

    def read(self, span: Span) -> Iterator[Row]:
        if self.bundled:
            return iter(self.bundled())
        if self.dataset is not None:
            return hub.read_range(self.dataset, self.columns, span.path, span.start, span.stop)
        return readers.read_span(span, self.columns, self.optional, self.field)


def inputs_of(
    cfg: Any,
    columns: Callable[[Any], Columns],
    bundled: dict[str, Callable[[], Iterable[Row]]],
    extensions: tuple[str, ...],
    optional: Container[str],
) -> list[Input]:
    """The rows of all sources, and those to evaluate on. Prints the files that are not read."""
    inputs = []
    found = sources.by_source(cfg, extensions)
    is_divided = any(own.validation_data or own.validation_split for _, own in found)
    for source, own in found:
        is_bundled = own.data in bundled
        sources.print_skipped_files(own, extensions, is_bundled)
        on_hub = not is_bundled and hub.is_hub_name(own.data)
        fields = {"data_split" if on_hub else "data": source.name}
        if own.validation_data:
            other = own.validation_data != own.data
            fields["validation_data"] = Path(own.validation_data).name if other else source.name
        elif on_hub and own.validation_split:
            fields["validation_split"] = source.name
        roles = columns(own)
        if own.group_column:
            roles = {**roles, "group": own.group_column}
        for field, name in fields.items():
            each = Input(own, field, name, roles, optional, [])
            if field == "data" and is_bundled:
                each.bundled = bundled[own.data]
                each.spans = [Span(own.data)]
            elif field.endswith("split"):
                open_split(each)
            else:
                each.spans = spans_of_files(own, field, extensions, is_divided)
            inputs.append(each)
    return inputs


def open_split(source: Input) -> None:
    """Loads a split of the Hub."""
    cfg, split = source.cfg, getattr(source.cfg, source.field)
    hub.check_commit(cfg)
    source.dataset = hub.open_columns(cfg, split, source.columns, source.field, source.optional)
    rows, total = len(source.dataset), source.dataset.data.nbytes
    place = f"{cfg.data}, split {split}"
    for start in range(0, rows, HUB_ROWS):
        stop = min(start + HUB_ROWS, rows)
        source.spans.append(Span(place, start, stop, size=total * (stop - start) // rows))


def spans_of_files(
    cfg: Any, field: str, extensions: tuple[str, ...], is_divided: bool
) -> list[Span]:
    """The spans of all files. A single text is cut so finely that a part can be held out, unless
    there are validation rows."""
    files = sources.list_files(getattr(cfg, field), extensions, field)
    document = 0
    if not is_divided and len(files) == 1 and file_ending(files[0]) not in TABLES:
        wanted = int(files[0].stat().st_size * cfg.validation_fraction)
        # A power of two: the documents stay the same while the text grows a little.
        document = min(1 << max(wanted.bit_length() - 1, 0), readers.DOCUMENT)
    return [span for file in files for span in readers.spans_of(file, document)]


# ---- Reading -------------------------------------------------------------------------------------


def hash_of(text: str) -> int:
    """64 bits for a text, the same on every machine."""
    return int.from_bytes(sha256(text.encode()).digest()[:8], "big", signed=True)


def key_of(row: dict[str, Any]) -> str:
    """Text that equal rows have in common; a text is its own."""
    return row["text"] if [*row] == ["text"] else json.dumps(row, default=str)


@dataclass
class RowMaker:
    """Makes what is stored out of what is read, in each process."""

    inputs: list[Input]
    normalize: Normalize
    features: dict[str, Any]
    group: Callable[[dict], str] | None
    key: Callable[[dict], str]

    @property
    def names(self) -> list[str]:
        """The names of the sources, those to train on first."""
        ordered = sorted(self.inputs, key=lambda each: each.is_validation)
        return [*dict.fromkeys(each.name for each in ordered)]

    @property
    def stored(self) -> Features:
        """The columns of what is stored, with NOTES."""
        features = {"source": ClassLabel(names=self.names), "place": Value("string"), **NOTES}
        for name, feature in self.features.items():
            is_text = getattr(feature, "dtype", "") == "string"  # of which 2 GB fit into a column
            features[name] = Value("large_string") if is_text else feature
        return Features({name: features[name] for name in [*self.features, *features]})

    def tables(self, units: list[list[tuple[int, Span]]]) -> Iterator[pyarrow.Table]:
        """The rows of these spans as tables of about TABLE bytes."""
        schema, waiting, size = self.stored.arrow_schema, [], 0
        for row in self.rows(units):
            waiting.append(row)
            size += row["size"] + 100
            if size > TABLE:
                yield pyarrow.Table.from_pylist(waiting, schema)
                waiting, size = [], 0
        if waiting:
            yield pyarrow.Table.from_pylist(waiting, schema)

    def rows(self, units: list[list[tuple[int, Span]]]) -> Iterator[dict[str, Any]]:
        """The rows of these spans with NOTES, source and place; the last one may be a problem."""
        notes = {"hash": 0, "side": 0, "size": 0, "problem": "", "skipped": "", "remarks": ""}
        blank = dict.fromkeys(self.features) | notes
        for number, span in (each for unit in units for each in unit):
            source = self.inputs[number]
            origin = {"input": number, "source": self.names.index(source.name)}
            try:
                for row, place in source.read(span):
                    yield blank | self.make(row, place, source) | origin | {"place": place}
            except ValueError as error:
                yield blank | origin | {"problem": str(error), "place": ""}
                return

    def make(self, row: dict[str, Any], place: str, source: Input) -> dict[str, Any]:
        """The row as it is stored, with its notes. Raises ValueError for one that ends the run."""
        group = row.pop("group", None)
        try:
            if source.cfg.group_column and group in (None, ""):
                raise sources.IncompleteRow("the group is empty")
            stored, remarks = self.normalize(row)
        except ValueError as error:
            left_out: Counter = Counter()
            sources.leave_out(error, place, source.cfg, source.field, left_out)
            return {"skipped": next(iter(left_out))}
        key = self.key(stored)
        hashed = side = hash_of(key)
        if group is not None:
            side = hash_of(group if isinstance(group, str) else json.dumps(group, default=str))
        elif self.group:
            side = hash_of(self.group(stored))
        size = len(key.encode()) + len(stored.get("bytes") or b"")
        notes = {"hash": hashed, "side": side, "size": size}
        return stored | notes | {"remarks": "\n".join(remarks)}


def units_of(inputs: list[Input]) -> list[list[tuple[int, Span]]]:
    """All spans in order, in units of about SPAN bytes, of which a process reads several."""
    units: list[list[tuple[int, Span]]] = []
    room = 0
    for number, source in enumerate(inputs):
        for span in source.spans:
            if not units or room < span.size:
                units.append([])
                room = readers.SPAN
            units[-1].append((number, span))
            room -= span.size
    return units


def read_all(maker: RowMaker) -> Dataset:
    """Read the rows of all inputs, in order, in several processes.

    Raises ValueError for the first row that cannot be used.
    """
    units = units_of(maker.inputs)
    for head in islice(maker.rows(units[:1]), 100):  # what is wrong everywhere is said at once
        if head["problem"]:
            raise ValueError(head["problem"])
    rows = build(maker.tables, maker.stored, units, num_processes(len(units)))
    problems = rows.data.column("problem")
    place = pc.index(pc.not_equal(problems, ""), True).as_py()
    if place >= 0:
        raise ValueError(problems[place].as_py())
    return rows


# ---- Splits --------------------------------------------------------------------------------------


def load_rows(
    cfg: Any,
    normalize: Normalize,
    features: dict[str, Any],
    *,
    columns: Callable[[Any], Columns],
    bundled: dict[str, Callable[[], Iterable[Row]]],
    extensions: tuple[str, ...],
    optional: Container[str] = (),
    group: Callable[[dict], str] | None = None,
    stratify: str = "",
    key: Callable[[dict], str] = key_of,
    maximum_bytes: int = 0,
    plural: str = "rows",
    nothing_held: str = "all rows of {data} are equal; add others, to hold some out",
    remark_line: str = "in {number:,} {plural} {remark}",
) -> DatasetDict:
    """Read the rows of cfg.data into a DatasetDict of train and validation, and print what is read.

    normalize    gets a row {role: value} and returns what is stored of it, and remarks to count.
                 Raises IncompleteRow (cfg.incomplete_rows decides), UselessRow (left out), or
                 ValueError, which ends the run.
    features     the columns that `normalize` returns; text becomes large_string. Added are
                 "source", a ClassLabel of the sources' names, and "place", file and line.
    columns      gets the config of one source and returns {role: column}.
    bundled      functions that return (row, place) pairs, by the name that cfg.data has.
    optional     roles whose column may be missing: they are None.
    group        of a stored row: rows with one group are all held out, or none. By default, and
                 where validation rows are given, the content; cfg.group_column replaces it.
    stratify     a column: of each of its values a row is held out, and one is trained on.
    key          of a stored row: text that equal rows have in common, by default all of it.
    maximum_bytes  that are held out; 0: cfg.validation_rows rows.

    The result is the same for any number of processes. Raises ValueError for the first row that
    cannot be used, and where there is none to train on or to hold out.
    """
    inputs = inputs_of(cfg, columns, bundled, extensions, optional)
    rows = read_all(RowMaker(inputs, normalize, features, group, key))
    notes = {name: rows.data.column(name) for name in NOTES}
    is_skipped = pc.not_equal(notes["skipped"], "")
    left_out: Counter = Counter()
    for text in notes["skipped"].filter(is_skipped).to_pylist():
        sources.add_left_out(left_out, {text: 1})
    numbers = np.where(is_skipped.to_numpy(), -1, notes["input"].to_numpy())
    places = [np.flatnonzero(numbers == number) for number in range(len(inputs))]
    for number, source in enumerate(inputs):
        if not len(places[number]):
            data = one_line(getattr(source.cfg, source.field), 100)
            raise ValueError(f"task.{source.field}: there are no rows in {data}")
        own = pc.and_(pc.not_equal(notes["remarks"], ""), pc.equal(notes["input"], number))
        remarks = pc.value_counts(notes["remarks"].filter(own)).to_pylist()
        print_columns(source, len(places[number]), extensions, plural)
        print_remarks(source, len(places[number]), remarks, plural, remark_line)
    hashes = notes["hash"].to_numpy().view(np.uint64)
    train = [own for own, source in zip(places, inputs, strict=True) if not source.is_validation]
    given = [own for own, source in zip(places, inputs, strict=True) if source.is_validation]
    equal = sum(len(own) - len(np.unique(hashes[own])) for own in train)
    if given:
        validation = np.concatenate(given)
        known = np.isin(hashes[validation], hashes[np.concatenate(train)])
        sources.say_overlap(int(known.sum()), len(validation))
    else:
        sides = notes["side"].to_numpy().view(np.uint64)
        sizes = notes["size"].to_numpy() if maximum_bytes else np.ones(len(rows))
        maximum = maximum_bytes or max(len(train), cfg.validation_rows)
        strata = np.zeros(len(rows), int)
        if stratify:
            values = pc.fill_null(rows.data.column(stratify), "")
            strata = np.unique(values.to_numpy(), return_inverse=True)[1]
        held: set[int] = set()
        for own, source in zip(places, inputs, strict=True):
            most = maximum / len(train)
            found = hold_out(sides[own], sizes[own], strata[own], cfg.validation_fraction, most)
            if not found:
                raise ValueError(f"task.data: {nothing_held.format(data=source.data)}")
            held |= found
        is_held = splits.is_in(sides, held)
        validation = np.concatenate([own[is_held[own]] for own in places])
        train = [own[~is_held[own]] for own in places]
        for own, source in zip(train, inputs, strict=True):
            if not len(own):
                text = f"all rows of {source.data} are held out, since other sources have them too"
                raise ValueError(f"task.data: {text}")
    chosen = {"train": np.concatenate(train), "validation": validation}
    remark = f"; {equal:,} are equal to others" if equal else ""
    evaluated = f"{len(validation):,}"
    sources.say_prepared(plural, len(rows), len(chosen["train"]), evaluated, left_out, remark)
    rows = rows.remove_columns([*NOTES])
    return DatasetDict({split: keep(rows, places) for split, places in chosen.items()})


def keep(rows: Dataset, places: np.ndarray) -> Dataset:
    """The rows at these places, in ascending order. (`select` would read each row through a list of
    indices, which takes 0.1 ms.)"""
    mask = np.zeros(len(rows), bool)
    mask[places] = True

    def choose(table: Any, numbers: list[int]) -> Any:
        return table.filter(pyarrow.array(mask[numbers[0] : numbers[-1] + 1]))

    chosen = rows.with_format("arrow").map(choose, batched=True, with_indices=True, batch_size=200)
    return chosen.with_format(None)


def hold_out(
    sides: np.ndarray, sizes: np.ndarray, strata: np.ndarray, fraction: float, maximum: float
) -> set[int]:
    """The hashes of the rows of a source that are held out: see `splits.hold_out`."""
    limits = splits.extremes([(sides, strata)])
    chosen = splits.is_candidate(sides, limits, fraction)
    return splits.hold_out(sides[chosen], sizes[chosen], limits, fraction, maximum)


def print_columns(source: Input, rows: int, extensions: tuple[str, ...], plural: str) -> None:
    """Prints the number of rows, and the columns that are read and not read."""
    names = []
    if source.dataset is not None or file_ending(source.spans[0].path) in TABLES:
        names = first_columns(source.cfg, extensions, source.field)
    text = f"{rows:,} {plural} of {source.data}{describe_columns(names, source.columns)}"
    print(f"Preparing data: {text}", flush=True)


def describe_columns(names: list[str], columns: Columns) -> str:
    """The columns that are read and not read, as part of a sentence; empty: there are none."""
    wanted = column_names(columns)
    read = ", ".join(name for name in names if name in wanted)
    unread = ", ".join(name for name in names if name not in wanted)
    if not names:
        return ""
    text = f", from {one_line(read, 200)}"
    return f"{text} (not read: {one_line(unread, 200)})" if unread else text


def print_remarks(
    source: Input, rows: int, remarks: list[dict[str, Any]], plural: str, form: str
) -> None:
    """Prints how many rows each remark is made of. `remarks`: values, of one or more lines, and
    counts."""
    total: Counter = Counter()
    for each in remarks:
        for line in each["values"].splitlines():
            total[line] += each["counts"]
    for remark, number in sorted(total.items()):
        known = {"number": number, "rows": rows, "plural": plural, "data": source.data}
        print(f"Preparing data: {form.format(remark=remark, **known)}", flush=True)
