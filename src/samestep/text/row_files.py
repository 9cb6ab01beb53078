"""Rows whose tokens are of any number: prepared in units, kept in files, read through memory maps.

Each unit of the input (units.py) writes its rows, those to train on and those held out, as
little-endian arrays: a file for each column, and for a column of varying length another with the
place where each row's values end.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from samestep.base.files import remove
from samestep.base.workers import Tell, do_units
from samestep.data import hub, sources
from samestep.data.sources import DataConfig, Source, WeightedData
from samestep.data.tables import Columns, Row
from samestep.text import units
from samestep.text.token_rows import FACTS, UnitWriter, read_facts
from samestep.text.units import Notes, Unit, read_unit

BATCH_SIZE = 1_000_000  # characters that are encoded in one call
MOST_MAPS = 200  # units that a process has open, of some eight files each, of 4,096 at most
Arrays = dict[str, Any]  # for each column an array (N, ...), or a list of N arrays (T,)
# Rows to their columns, and how many rows each column of varying length was cut in.
Encode = Callable[[list[Row], str], tuple[Arrays, dict[str, int]]]


# ---- Reading the input ---------------------------------------------------------------------------


class RowReader(NamedTuple):
    """The rows of a source: where they are, and what they are used for."""

    name: str
    cfg: DataConfig  # with `data` of this source
    columns: Columns
    endings: tuple[str, ...]
    check: Callable[[dict], None]  # changes a row to what the task uses, or raises ValueError
    key: Callable[[dict], str]  # rows of one key are all held out, or none
    texts: Callable[[dict], Iterable[str]] | None  # a vocabulary is learnt from them
    label: Callable[[dict], str | float] | None = None
    shipped: list[Row] | None = None  # the rows, if cfg.data names data that the task brings along

    @property
    def fields(self) -> list[str]:
        """The fields of cfg that name training rows and, if they are given, validation rows."""
        on_hub = self.shipped is None and hub.is_hub_name(self.cfg.data)
        fields = ["data_split" if on_hub else "data"]
        if self.cfg.validation_data:
            return [*fields, "validation_data"]
        return fields + ["validation_split"] * bool(on_hub and self.cfg.validation_split)


class Input(NamedTuple):
    """The rows to train on of a source, or rows to evaluate on."""

    name: str  # for metrics
    reader: RowReader
    notes: Notes


def scan(readers: list[RowReader], folder: Path, purpose: str) -> list[Input]:
    """Checks rows, the first pass: those of each source to `train` on, or the rows for `validation`
    that are given. Raises ValueError where there are none."""
    inputs = []
    for number, reader in enumerate(readers):
        for field in reader.fields:
            if field.startswith("validation") != (purpose == "validation"):
                continue
            notes = units.scan_field(
                reader.cfg,
                field,
                folder / f"scan-{field}-{number}",
                reader.endings,
                reader.columns,
                reader.check,
                reader.key,
                reader.texts,
                reader.shipped,
                label=reader.label,
            )
            is_file = field == "validation_data" and reader.cfg.validation_data != reader.cfg.data
            name = Path(reader.cfg.validation_data).name if is_file else reader.name
            inputs.append(Input(name, reader, notes))
    return inputs


def read_sample(folder: Path, held: set[int]) -> Iterator[str]:
    """The texts of training rows that a vocabulary is learnt from."""
    return units.read_sample(sorted(folder.glob("scan-data*")), held)


def say_overlap(train: list[Input], given: list[Input]) -> None:
    """Prints how many of the validation rows are training rows too."""
    known = units.count_known([each.notes for each in train], [each.notes for each in given])
    sources.say_overlap(known, sum(each.notes.rows for each in given))


def count_rows(train: list[Input], given: list[Input], held: set[int]) -> tuple[int, int]:
    """The rows to train on, and those to evaluate on."""
    every = sum(each.notes.rows for each in train)
    inside = sum(units.count_held(each.notes, held) for each in train)
    return every - inside, inside + sum(each.notes.rows for each in given)


# ---- Writing -------------------------------------------------------------------------------------


def write(
    folder: Path, train: list[Input], given: list[Input], held: set[int], encode: Encode
) -> list[dict]:
    """Encodes the rows of training and, if they are given, of validation: the second pass.

    `encode(rows, part)` returns the columns; one is `length`, the tokens of each row. Returns the
    facts of each unit, and its source's name.
    """
    todo = [
        (each, unit, is_given)
        for inputs, is_given in ((train, False), (given, True))
        for each in inputs
        for unit in each.notes.units
    ]

    def work(number: int, tell: Tell) -> None:
        if not read_unit(folder, number, verify=True):
            source, unit, is_given = todo[number]
            out = UnitWriter(folder, number)
            write_unit(out, source.reader, unit, held, is_given, encode, tell)

    do_units(work, [sum(piece.size for piece in unit) for _, unit, _ in todo], "Preparing data")
    return [read_unit(folder, i) | {"source": each.name} for i, (each, *_) in enumerate(todo)]


def write_unit(
    out: UnitWriter, reader: RowReader, unit: Unit, held: set[int], given: bool, encode: Encode,
    tell: Tell,
) -> None:  # fmt: skip
    """Writes the rows of a unit; `given`: all of them are for evaluation."""
    facts: dict[str, Any] = {}
    for rows, hashes, is_held, size in batches_of(reader, unit, held):
        part = "validation" if given or is_held else "train"
        columns, cut = encode(rows, part)
        own = facts.setdefault(part, {"rows": 0, "columns": {}, "values": {}})
        own["rows"] += len(rows)
        if is_held:
            out.append(f"{part}.hash", np.array(hashes, "<u8"))
        for name, values in columns.items():
            if isinstance(values, list):
                lengths = np.array([len(each) for each in values])
                total, longest, cuts = own["values"].get(name, (0, 0, 0))
                out.append(f"{part}.{name}.ends", (total + lengths.cumsum()).astype("<i8"))
                most = max(longest, int(lengths.max()))
                own["values"][name] = total + int(lengths.sum()), most, cuts + cut.get(name, 0)
                values = np.concatenate(values)
            values = values.astype(values.dtype.newbyteorder("<"), copy=False)
            out.append(f"{part}.{name}", values)
            own["columns"][name] = [values.dtype.str, values.shape[1:]]
        tell(size)
    out.commit(facts)


def batches_of(
    reader: RowReader, unit: Unit, held: set[int]
) -> Iterator[tuple[list[Row], list[int], bool, int]]:
    """Rows of about BATCH_SIZE characters, their hashes, whether they are held out, their size."""
    waiting: dict[bool, list[tuple[Row, int]]] = {False: [], True: []}
    sizes = {False: 0, True: 0}

    def take(is_held: bool) -> tuple[list[Row], list[int], bool, int]:
        rows, hashes = zip(*waiting[is_held], strict=True)
        taken = [*rows], [*hashes], is_held, sizes[is_held]
        waiting[is_held], sizes[is_held] = [], 0
        return taken

    for piece in unit:
        for row, place in piece.read(reader.columns, ()):
            try:
                reader.check(row)
            except sources.IncompleteRow:  # the first pass has refused it, or counted it
                continue
            hashed = units.hash_of(reader.key(row))
            waiting[hashed in held].append(((row, place), hashed))
            sizes[hashed in held] += len(str(row))
            if sizes[hashed in held] > BATCH_SIZE:
                yield take(hashed in held)
    for is_held in (False, True):
        if waiting[is_held]:
            yield take(is_held)


def token_dtype(tokenizer: Any) -> str:
    """The smallest type for the ids of all tokens."""
    return "<u2" if max(tokenizer.get_vocab().values()) < 2**16 else "<u4"


def finish(folder: Path, done: list[dict], constants: dict[str, int | float]) -> dict[str, Any]:
    """Writes what the units have in common; the facts for the index of the prepared folder.

    `constants` are in each row. Rows that are held out get, in each source, the order of their
    hashes.
    """
    parts: dict[str, Any] = {}
    named: dict[str, dict[str, int]] = {}  # the rows of each source
    for part in ("train", "validation"):
        own = [(number, facts[part]) for number, facts in enumerate(done) if part in facts]
        rows = sum(facts["rows"] for _, facts in own)
        named[part] = dict.fromkeys((each["source"] for each in done if part in each), 0)
        for each in done:
            if part in each:
                named[part][each["source"]] += each[part]["rows"]
        names = own[0][1]["columns"]
        ragged = [name for name in names if name in own[0][1]["values"]]
        parts[part] = {"columns": names, "ragged": ragged}
        parts[part]["units"] = [(number, facts["rows"]) for number, facts in own]
        lengths = np.lib.format.open_memmap(folder / f"{part}-sizes.npy", "w+", "<i4", (rows,))
        start = 0
        for number, facts in own:
            stop = start + facts["rows"]
            dtype = names["length"][0]
            lengths[start:stop] = np.fromfile(folder / f"{number:06}.{part}.length", dtype)
            start = stop
        hashes = [folder / f"{number:06}.{part}.hash" for number, _ in own]
        if hashes[0].exists():
            all_hashes = np.concatenate([np.fromfile(file, "<u8") for file in hashes])
            source = np.repeat(np.arange(len(named[part])), [*named[part].values()])
            order = np.lexsort((all_hashes, source)).astype("<i8")
            lengths[:] = lengths[order]
            np.save(folder / f"{part}-order.npy", order)
        lengths.flush()
    facts = {"parts": parts, "constants": constants}
    (folder / FACTS).write_text(json.dumps(facts | {"sources": named}), encoding="utf-8")
    for scanned in folder.glob("scan-*"):
        remove(scanned)
    files = {name: value for each in done for name, value in each["files"].items()}
    content = json.dumps([sorted((n, digest) for n, (_, digest) in files.items()), facts])
    return {"content": hashlib.sha256(content.encode()).hexdigest(), "hashed": files}


def describe_lengths(done: list[dict], name: str, parts: Iterable[str]) -> tuple[str, int]:
    """The tokens of a column, as part of a sentence; how many rows were cut."""
    own = [facts[part] for facts in done for part in parts if part in facts]
    rows = sum(facts["rows"] for facts in own)
    totals, longest, cut = zip(*(facts["values"][name] for facts in own), strict=True)
    return f"{sum(totals) / rows:.0f} tokens on average, {max(longest):,} at most", sum(cut)


# ---- Reading -------------------------------------------------------------------------------------


class RowFiles(torch.utils.data.Dataset):
    """The rows of a part, train or validation: dicts of numbers and arrays.

    Token ids are int32 (T,). They lie source by source, with the weights in `data`.
    `constants` are in each row, besides those of the folder. Pickled, it is a path.
    """

    def __init__(
        self,
        folder: Path,
        part: str,
        data: list[WeightedData],
        constants: dict[str, Any] | None = None,
    ):
        self.arguments = (folder, part, data, constants)
        self.folder, self.part, facts = folder, part, read_facts(folder)
        weights = {each.name: each.weight for each in data}
        self.sources = [
            Source(name, rows, weights.get(name, 1), None, 1)
            for name, rows in facts["sources"][part].items()
        ]
        constants = facts["constants"] | (constants or {})
        self.constants = {
            name: np.float32(value) if isinstance(value, float) else np.int64(value)
            for name, value in constants.items()
        }
        own = facts["parts"][part]
        self.columns, self.ragged, self.units = own["columns"], {*own["ragged"]}, own["units"]
        self.ends = np.cumsum([0, *(rows for _, rows in self.units)]).tolist()
        order = folder / f"{part}-order.npy"
        self.order = np.load(order, mmap_mode="r") if order.exists() else None
        self.maps: dict[int, dict[str, tuple]] = {}

    def __reduce__(self):  # pickled, a memory map would become a copy
        return RowFiles, self.arguments

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, i: int) -> dict[str, Any]:
        if not 0 <= i < len(self):
            raise IndexError(i)
        place = i if self.order is None else int(self.order[i])
        number = bisect_right(self.ends, place) - 1
        place -= self.ends[number]
        row = dict(self.constants)
        for name, (values, ends) in self.open_unit(number).items():
            if ends is None:
                row[name] = values[place]
                continue
            found = values[ends[place - 1] if place else 0 : ends[place]]
            row[name] = found.astype(np.uint8 if found.dtype == np.uint8 else np.int32)
        return row

    def open_unit(self, number: int) -> dict[str, tuple[np.ndarray, np.ndarray | None]]:
        """For each column of a unit its values and, if their number varies, where rows end."""
        if number not in self.maps:
            if len(self.maps) >= MOST_MAPS:
                self.maps.clear()
            start = f"{self.units[number][0]:06}.{self.part}"
            self.maps[number] = {}
            for name, (dtype, shape) in self.columns.items():
                values, ends = map_file(self.folder / f"{start}.{name}", dtype), None
                if name in self.ragged:
                    ends = map_file(self.folder / f"{start}.{name}.ends", "<i8")
                self.maps[number][name] = values.reshape(-1, *shape), ends
        return self.maps[number]

    def sizes(self) -> np.ndarray:
        """The `length` of each row, int32 (N,), memory-mapped."""
        return np.load(self.folder / f"{self.part}-sizes.npy", mmap_mode="r")


def map_file(path: Path, dtype: str) -> np.ndarray:
    """The numbers of a file; an empty one cannot be mapped."""
    if not path.stat().st_size:
        return np.zeros(0, dtype)
    return np.asarray(np.memmap(path, dtype, "r"))
