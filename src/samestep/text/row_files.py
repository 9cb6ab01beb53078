"""Rows whose tokens are of any number: prepared in units, kept in files, read through memory maps.

Each unit of the input (units.py) writes its rows, those to train on and those held out, as
little-endian arrays: a file for each column, and for a column of varying length another with the
place where each row's values end.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from samestep.data import sources, splits
from samestep.data.sources import Source, WeightedData
from samestep.data.tables import Columns, Row
from samestep.text import units
from samestep.text.unit_files import UnitWriter, finish_folder, map_some, read_facts
from samestep.text.units import PARTS, Batch, Input, Reader

BLOCK = 1000  # texts in one call of a tokenizer, which bounds its memory
# The rows of data that a task brings along, by its name.
Shipped = dict[str, Callable[[], Iterable[Row]]]
Arrays = dict[str, Any]  # for each column an array (N, ...), or a list of N arrays (T,)
# Rows to their columns, and how many rows each column of varying length was cut in.
Encode = Callable[[list[Row], str], tuple[Arrays, dict[str, int]]]


# ---- Reading the input ---------------------------------------------------------------------------


class Scanned(NamedTuple):
    """What the first pass has found."""

    train: list[Input]
    given: list[Input]  # rows to evaluate on
    held: set[int]  # the hashes of the rows that are held out, if none are given

    @property
    def inputs(self) -> list[Input]:
        return self.train + self.given

    def count_rows(self) -> int:
        """The rows to train on."""
        notes = (rows["hash"] for each in self.train for rows in each.notes())
        inside = sum(int(splits.is_in(hashes, self.held).sum()) for hashes in notes)
        return sum(each.rows for each in self.train) - inside


def scan(
    cfg: Any,
    folder: Path,
    endings: Iterable[str],
    columns: Columns,
    shipped: Shipped,
    nothing_held: Callable[[Input], str],
    *,
    key: Callable[[dict], str],
    group_key: Callable[[dict], str],
    texts: Callable[[dict], Iterable[str]],
    by_label: bool = False,
    **how: Any,
) -> Scanned:
    """The first pass over all sources of cfg, and what is held out of each: see `units.hold_out`.

    Rows of one `group_key` are all held out, or none; where validation rows are given, `key` says
    which rows are equal. `texts` are learnt from by a new model. `how`: other fields of a Reader.
    `nothing_held`: what to say where no row can be held out.
    """
    texts_of, readers = None if cfg.model_name_or_path else texts, []
    for each, own in sources.by_source(cfg, endings):
        rows = [*shipped[each.data]()] if each.data in shipped else None
        sources.print_skipped_files(own, endings, rows is not None)
        reader = Reader(each.name, own, endings, columns, key=key, texts=texts_of, **how)
        readers.append(reader._replace(shipped=rows))
    if not any(reader.fields[1:] for reader in readers):
        readers = [each._replace(key=group_key) for each in readers]
    inputs = units.scan_all(readers, folder)
    most = max(len(readers), cfg.validation_rows)
    fraction = cfg.validation_fraction
    held = units.choose_held(inputs, fraction, most, nothing_held, by_label=by_label)
    train, given = ([each for each in inputs if each.given == value] for value in (False, True))
    return Scanned(train, given, held)


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


def write(
    folder: Path,
    scanned: Scanned,
    encode: Encode,
    lengths: dict[str, tuple[str, int]],
    constants: dict[str, int | float] | None = None,
) -> dict[str, Any]:
    """Encodes the rows, of training and then of validation if they are given: the second pass.

    `encode(rows, part)` returns the columns; one is `length`, the tokens of each row. `lengths`: of
    some columns their names for people, and the most tokens, at which they were cut. `constants`
    are in each row.
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

    written = units.write(folder, scanned.inputs, scanned.held, write_unit)
    done = [{**facts, "source": source.name} for source, facts in written]
    return finish(folder, scanned, done, lengths, constants or {})


def finish(
    folder: Path, scanned: Scanned, done: list[dict], lengths: dict, constants: dict
) -> dict[str, Any]:
    """Writes what the units have in common; the facts for the index of the prepared folder.

    Prints how many rows were read, and what became of them. Rows that are held out get, in each
    source, the order of their hashes.
    """
    parts: dict[str, Any] = {}
    named: dict[str, Counter] = {}  # the rows of each source
    for part in PARTS:
        own = {number: facts[part] for number, facts in enumerate(done) if part in facts}
        starts = [folder / f"{number:06}.{part}" for number in own]
        named[part] = Counter()
        for number, facts in own.items():
            named[part][done[number]["source"]] += facts["rows"]
        columns, ragged = (next(iter(own.values()))[name] for name in ("columns", "values"))
        parts[part] = {"columns": columns, "ragged": [name for name in columns if name in ragged]}
        parts[part]["units"] = [(number, facts["rows"]) for number, facts in own.items()]
        sizes = read_column(starts, "length", columns["length"][0])
        if Path(f"{starts[0]}.hash").exists():
            source = np.repeat(np.arange(len(named[part])), [*named[part].values()])
            order = np.lexsort((read_column(starts, "hash", "<u8"), source)).astype("<i8")
            sizes = sizes[order]
            np.save(folder / f"{part}-order.npy", order)
        np.save(folder / f"{part}-sizes.npy", sizes.astype("<i4"))
        for name, (shown, most) in lengths.items():
            values = [facts["values"][name] for facts in own.values()]
            total, cut = sum(each[0] for each in values), sum(each[2] for each in values)
            size = (
                f"{total / len(sizes):.0f} tokens on average, {max(v[1] for v in values):,} at most"
            )
            size += f" ({cut:,} cut to {most:,})" * bool(cut)
            print(f"Prepared {part}: {shown} of {size}", flush=True)
    left_out = sum((each.left_out for each in scanned.inputs), Counter())
    train, evaluated = (sum(named[part].values()) for part in PARTS)
    total = train + evaluated + left_out.total()
    sources.say_prepared("rows", total, train, f"{evaluated:,}", left_out)
    facts = {"parts": parts, "constants": constants}
    files = sorted((name, digest) for each in done for name, (_, digest) in each["files"].items())
    return finish_folder(folder, done, {**facts, "sources": named}, [files, facts])


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
