"""Rows whose tokens are of any number: prepared in units, kept in files, read through memory maps.

Each unit of the input (units.py) writes its rows, those to train on and those held out, as
little-endian arrays: a file for each column, and for a column of varying length another with the
place where each row's values end.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from samestep.base.console import one_line
from samestep.data import sources, splits
from samestep.data.sources import Source, WeightedData
from samestep.data.tables import Columns, Row
from samestep.text import units
from samestep.text.unit_files import UnitWriter, finish_folder, map_file, read_facts
from samestep.text.units import Batch, Input, Reader

BLOCK = 1000  # texts in one call of a tokenizer, which bounds its memory
MOST_MAPS = 200  # units that a process has open, of some eight files each, of 4,096 at most
PARTS = ("train", "validation")
Arrays = dict[str, Any]  # for each column an array (N, ...), or a list of N arrays (T,)
# Rows to their columns, and how many rows each column of varying length was cut in.
Encode = Callable[[list[Row], str], tuple[Arrays, dict[str, int]]]


# ---- Reading the input ---------------------------------------------------------------------------


def list_readers(
    cfg: Any,
    endings: Iterable[str],
    columns: Columns,
    shipped: dict[str, Callable[[], Iterator[Row]]],
    key: Callable[[dict], str],
    group_key: Callable[[dict], str],
    **how: Any,
) -> list[Reader]:
    """A Reader of each source of cfg. `shipped` gives the rows of data that the task brings along.

    `how`: other fields of a Reader. Rows of one `group_key` are all held out, or none. Where
    validation rows are given, `key` says which rows are equal.
    """
    readers = []
    for each, own in sources.by_source(cfg, endings):
        rows = [*shipped[each.data]()] if each.data in shipped else None
        sources.print_skipped_files(own, endings, rows is not None)
        readers.append(Reader(each.name, own, endings, columns, key=key, shipped=rows, **how))
    if any(reader.fields[1:] for reader in readers):
        return readers
    return [each._replace(key=group_key) for each in readers]


def scan(readers: list[Reader], folder: Path, part: str) -> list[Input]:
    """The first pass over the rows to `train` on, or the rows for `validation` that are given."""
    return [
        units.scan(reader, field, folder / f"scan-{part}-{number}")
        for number, reader in enumerate(readers)
        for field in reader.fields
        if field.startswith("validation") == (part == "validation")
    ]


def hold_out(
    train: list[Input], cfg: Any, problem: Callable[[Input, str], str], by_label: bool = False
) -> set[int]:
    """The hashes of the rows that are held out of each source: see `units.hold_out`.

    Raises ValueError with the words of `problem(source, its name)` where there are none.
    """
    held: set[int] = set()
    most = max(1, cfg.validation_rows // len(train))
    for each in train:
        own = units.hold_out(each, cfg.validation_fraction, most, by_label=by_label)
        if not own:
            raise ValueError(f"task.data: {problem(each, one_line(each.reader.cfg.data, 100))}")
        held |= own
    return held


def count_rows(train: list[Input], held: set[int]) -> int:
    """The rows to train on."""
    inside = [splits.is_in(rows["hash"], held).sum() for own in train for rows in own.notes()]
    return sum(each.rows for each in train) - int(sum(inside))


# ---- Writing -------------------------------------------------------------------------------------


def encode_texts(
    texts: dict[str, list[str]],
    tokenizer: Any,
    limit: int,
    names: Iterable[str] = ("input_ids",),
) -> tuple[dict[str, list[np.ndarray]], int]:
    """Columns of tokens, int32 (T,) each, and how many rows were cut.

    `texts`: for each argument of the tokenizer those of all rows. Rows of more than `limit` tokens
    lose their end, but not the special tokens after it.
    """
    columns: dict[str, list[np.ndarray]] = {name: [] for name in names}
    (first, *_), cut = texts.values(), 0
    for start in range(0, len(first), BLOCK):
        block = {name: each[start : start + BLOCK] for name, each in texts.items()}
        encoded = tokenizer(**block, verbose=False)
        for i, ids in enumerate(encoded["input_ids"]):
            tokens = {name: encoded[name][i] for name in columns}
            if len(ids) > limit:
                row = {name: each[i] for name, each in block.items()}
                tokens = tokenizer(**row, truncation=True, max_length=limit)
                cut += 1
            for name, values in columns.items():
                values.append(np.array(tokens[name], np.int32))
    return columns, cut


def token_dtype(tokenizer: Any) -> str:
    """The smallest type for the ids of all tokens."""
    return "<u2" if max(tokenizer.get_vocab().values()) < 2**16 else "<u4"


def write(folder: Path, inputs: list[Input], held: set[int], encode: Encode) -> list[dict]:
    """Encodes the rows, of training and then of validation if they are given: the second pass.

    `encode(rows, part)` returns the columns; one is `length`, the tokens of each row. Returns the
    facts of each unit, and its source's name.
    """

    def write_unit(out: UnitWriter, source: Input, batches: Iterator[Batch]) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        for batch in batches:
            part = PARTS[source.given or batch.is_held]
            columns, cut = encode(batch.rows, part)
            own = facts.setdefault(part, {"rows": 0, "columns": {}, "values": {}})
            own["rows"] += len(batch.rows)
            if batch.is_held:
                out.append(f"{part}.hash", np.array(batch.hashes, "<u8"))
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
        return facts

    done = units.write(folder, inputs, held, write_unit)
    return [{**facts, "source": source.name} for source, facts in done]


def finish(
    folder: Path, inputs: list[Input], done: list[dict], constants: dict[str, int | float]
) -> dict[str, Any]:
    """Writes what the units have in common; the facts for the index of the prepared folder.

    Prints how many rows of the `inputs` were read, and what became of them. `constants` are in each
    row. Rows that are held out get, in each source, the order of their hashes.
    """
    parts: dict[str, Any] = {}
    named: dict[str, dict[str, int]] = {}  # the rows of each source
    for part in PARTS:
        own = [(number, facts[part]) for number, facts in enumerate(done) if part in facts]
        named[part] = {}
        for each in done:
            if part in each:
                rows = named[part].get(each["source"], 0)
                named[part][each["source"]] = rows + each[part]["rows"]
        columns = own[0][1]["columns"]
        ragged = [name for name in columns if name in own[0][1]["values"]]
        counts = [(number, facts["rows"]) for number, facts in own]
        parts[part] = {"columns": columns, "ragged": ragged, "units": counts}

        def read(name: str, dtype: str, part: str = part, counts: list = counts) -> np.ndarray:
            files = [folder / f"{number:06}.{part}.{name}" for number, _ in counts]
            return np.concatenate([np.fromfile(file, dtype) for file in files])

        lengths = read("length", columns["length"][0])
        if (folder / f"{own[0][0]:06}.{part}.hash").exists():
            source = np.repeat(np.arange(len(named[part])), [*named[part].values()])
            order = np.lexsort((read("hash", "<u8"), source)).astype("<i8")
            lengths = lengths[order]
            np.save(folder / f"{part}-order.npy", order)
        np.save(folder / f"{part}-sizes.npy", lengths.astype("<i4"))
    left_out = sum((each.left_out for each in inputs), Counter())
    train, evaluated = (sum(named[part].values()) for part in PARTS)
    total = train + evaluated + left_out.total()
    sources.say_prepared("rows", total, train, f"{evaluated:,}", left_out)
    facts = {"parts": parts, "constants": constants}
    files = sorted((name, digest) for each in done for name, (_, digest) in each["files"].items())
    return finish_folder(folder, done, {**facts, "sources": named}, [files, facts])


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
