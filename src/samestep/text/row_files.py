"""Rows whose tokens are of any number: prepared in units, kept in files, read through memory maps.

Each unit of the input (units.py) writes its rows, those to train on and those held out, as
little-endian arrays: a file for each column, and for a column of varying length another with the
place where each row's values end.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from samestep.data import sources
from samestep.data.sources import Source, WeightedData
from samestep.data.tables import Row
from samestep.text import units
from samestep.text.unit_files import UnitWriter, finish_folder, map_some, read_facts
from samestep.text.units import PARTS, Batch, Input

Arrays = dict[str, Any]  # for each column an array (N, ...), or a list of N arrays (T,)
# Rows to their columns, and how many rows each column of varying length was cut in.
Encode = Callable[[list[Row], str], tuple[Arrays, dict[str, int]]]


# ---- Writing -------------------------------------------------------------------------------------


def encode_texts(
    texts: dict[str, list[str]], tokenizer: Any, limit: int, names: Iterable[str] = ("input_ids",)
) -> tuple[dict[str, list[np.ndarray]], int]:
    """Columns of tokens, int32 (T,) each, and how many rows were cut.

    `texts`: for each argument of the tokenizer those of all rows. Rows of more than `limit` tokens
    lose their end, but not the special tokens after it.
    """
    encoded, cut = tokenizer(**texts, verbose=False), 0
    columns = {name: [np.array(ids, np.int32) for ids in encoded[name]] for name in names}
    for i, ids in enumerate(encoded["input_ids"]):
        if len(ids) > limit:
            row = {argument: each[i] for argument, each in texts.items()}
            tokens = tokenizer(**row, truncation=True, max_length=limit)
            for name, values in columns.items():
                values[i] = np.array(tokens[name], np.int32)
            cut += 1
    return columns, cut


def token_dtype(tokenizer: Any) -> str:
    """The smallest type for the ids of all tokens."""
    return "<u2" if max(tokenizer.get_vocab().values()) < 2**16 else "<u4"


def write(
    folder: Path,
    inputs: list[Input],
    held: set[int],
    encode: Encode,
    names: dict[str, tuple[str, int]],
    constants: dict[str, int | float] | None = None,
) -> dict[str, Any]:
    """Encodes the rows, of training and then of validation if they are given: the second pass.

    `encode(rows, part)` returns the columns; one is `length`, the tokens of each row. `names`: of
    some columns their names for people, and the most tokens, at which they were cut. `constants`
    are in each row. Returns what `cache.prepare` wants.

    Prints how many rows were read, and what became of them. Rows that are held out get, in each
    source, the order of their hashes.
    """

    def write_unit(out: UnitWriter, source: Input, batches: Iterator[Batch]) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        for batch in batches:
            part = PARTS[source.is_validation or batch.is_held]
            arrays, cut = encode(batch.rows, part)
            own = facts.setdefault(part, {"rows": 0, "cut": Counter(), "columns": {}, "ragged": []})
            own["rows"] += len(batch.rows)
            own["cut"].update(cut)
            if batch.is_held:
                out.append(f"{part}.hash", np.array(batch.hashes, "<u8"))
            own["ragged"] = [name for name in arrays if isinstance(arrays[name], list)]
            for name, values in arrays.items():
                if name in own["ragged"]:
                    ends = np.cumsum([len(each) for each in values])
                    values = np.concatenate(values)
                values = values.astype(values.dtype.newbyteorder("<"), copy=False)
                before = out.append(f"{part}.{name}", values) // values.itemsize
                if name in own["ragged"]:
                    out.append(f"{part}.{name}.ends", (before + ends).astype("<i8"))
                own["columns"][name] = [values.dtype.str, values.shape[1:]]
        return facts

    inputs = [*chain(*units.parts_of(inputs))]  # in the order that is part of the identity
    done = units.write(folder, inputs, held, write_unit)
    parts: dict[str, Any] = {}
    rows: dict[str, Counter] = {}  # of each source
    for part in PARTS:
        own = {number: facts[part] for number, facts in enumerate(done) if part in facts}
        starts = [folder / f"{number:06}.{part}" for number in own]
        rows[part] = Counter()
        for number, facts in own.items():
            rows[part][inputs[done[number]["input"]].name] += facts["rows"]
        first = next(iter(own.values()))
        parts[part] = {name: first[name] for name in ("columns", "ragged")}
        parts[part]["units"] = [(number, facts["rows"]) for number, facts in own.items()]
        sizes = read_column(starts, "length", first["columns"]["length"][0])
        if Path(f"{starts[0]}.hash").exists():
            source = np.repeat(np.arange(len(rows[part])), [*rows[part].values()])
            order = np.lexsort((read_column(starts, "hash", "<u8"), source)).astype("<i8")
            sizes = sizes[order]
            np.save(folder / f"{part}-order.npy", order)
        np.save(folder / f"{part}-sizes.npy", sizes.astype("<i4"))
        for name, (shown, most) in names.items():
            ends = [np.fromfile(f"{start}.{name}.ends", "<i8") for start in starts]
            lengths = np.concatenate([np.diff(each, prepend=0) for each in ends])
            cut = sum(facts["cut"].get(name, 0) for facts in own.values())
            size = f"{lengths.mean():.0f} tokens on average, {lengths.max():,} at most"
            size += f" ({cut:,} cut to {most:,})" * bool(cut)
            print(f"Prepared {part}: {shown} of {size}", flush=True)
    left_out = sum((each.left_out for each in inputs), Counter())
    train, evaluated = (sum(rows[part].values()) for part in PARTS)
    total = train + evaluated + left_out.total()
    sources.say_prepared("rows", total, train, f"{evaluated:,}", left_out)
    shared = {"parts": parts, "constants": constants or {}}
    files = sorted((name, digest) for each in done for name, (_, digest) in each["files"].items())
    return finish_folder(folder, done, {**shared, "sources": rows}, [files, shared])


def read_column(starts: list[Path], name: str, dtype: str) -> np.ndarray:
    """A column of the units whose files begin so."""
    return np.concatenate([np.fromfile(f"{start}.{name}", dtype) for start in starts])


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
        self.constants = {
            name: np.float32(value) if isinstance(value, float) else np.int64(value)
            for name, value in {**facts["constants"], **(constants or {})}.items()
        }
        own = facts["parts"][part]
        self.columns, self.ragged, self.units = own["columns"], {*own["ragged"]}, own["units"]
        self.ends = np.cumsum([0, *(rows for _, rows in self.units)]).tolist()
        order = folder / f"{part}-order.npy"
        self.order = np.load(order, mmap_mode="r") if order.exists() else None

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
        start = f"{self.units[number][0]:06}.{self.part}"
        row = dict(self.constants)
        for name, (dtype, shape) in self.columns.items():
            values = map_some(self.folder / f"{start}.{name}", dtype)
            if name not in self.ragged:
                row[name] = values.reshape(-1, *shape)[place]
                continue
            ends = map_some(self.folder / f"{start}.{name}.ends", "<i8")
            found = values[ends[place - 1] if place else 0 : ends[place]]
            row[name] = found.astype(np.uint8 if found.dtype == np.uint8 else np.int32)
        return row

    def sizes(self) -> np.ndarray:
        """The `length` of each row, int32 (N,), memory-mapped."""
        return np.load(self.folder / f"{self.part}-sizes.npy", mmap_mode="r")
