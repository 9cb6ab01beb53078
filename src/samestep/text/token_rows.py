"""Rows of tokens on disk, read through memory maps.

Texts one after the other are a stream: a file of token ids, of which row i of L tokens is those
from i L on, and its labels are the same one token later. Packed rows are files of (rows, 3, L):
input_ids, labels, position_ids. Files are little-endian uint16, or uint32 where that is too small.
"""

from bisect import bisect_right
from pathlib import Path

import numpy as np
import torch

from samestep.base.fields import IGNORE_INDEX
from samestep.data.sources import Source, WeightedData
from samestep.text.unit_files import map_some, read_facts


class Flat:
    """Files of numbers, seen as one array. They are mapped when they are first read."""

    def __init__(self, files: list[tuple[Path, int]], dtype: str):
        self.files, self.dtype = files, dtype
        self.ends = np.cumsum([0, *(count for _, count in files)]).tolist()

    def __len__(self) -> int:
        return self.ends[-1]

    def read(self, start: int, stop: int) -> np.ndarray:
        """The numbers from `start` up to `stop`."""
        number = bisect_right(self.ends, start) - 1
        if stop <= self.ends[number + 1]:
            first = self.ends[number]
            return map_some(self.files[number][0], self.dtype)[start - first : stop - first]
        cut = self.ends[number + 1]
        return np.concatenate([self.read(start, cut), self.read(cut, stop)])


class TokenRows(torch.utils.data.Dataset):
    """The rows of a part, train or validation: source by source, each a dict of arrays (L,).

    input_ids, labels, and position_ids of packed rows. Validation rows have two numbers more:
    `bytes`, of text that the labels stand for, and `unigram_loss`, in nats.
    """

    def __init__(self, folder: Path, part: str, data: list[WeightedData]):
        self.arguments = (folder, part, data)
        weights = {each.name: each.weight for each in data}
        facts = read_facts(folder)
        self.length, self.dtype, self.packed = (facts[n] for n in ("length", "dtype", "packed"))
        self.flats, self.sources, self.bounds = [], [], [0]
        for name, rows, files in facts["parts"][part]:
            self.flats.append(Flat([(folder / file, count) for file, count in files], self.dtype))
            self.sources.append(Source(name, rows, weights.get(name, 1), None, 1))
            self.bounds.append(self.bounds[-1] + rows)
        self.tables: dict[str, np.ndarray] = {}
        if part == "validation":
            self.tables = {n: np.load(folder / f"{n}.npy") for n in ("bytes", "unigram_loss")}

    def __reduce__(self):  # pickled, a memory map would become a copy
        return TokenRows, self.arguments

    def __len__(self) -> int:
        return self.bounds[-1]

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        if not 0 <= i < len(self):
            raise IndexError(i)
        number = bisect_right(self.bounds, i) - 1
        flat, place, length = self.flats[number], i - self.bounds[number], self.length
        if self.packed:
            size = 3 * length
            block = flat.read(place * size, (place + 1) * size).reshape(3, length)
            row = dict(zip(("input_ids", "labels", "position_ids"), block, strict=True))
            labels = row["labels"].astype(np.int64)
            labels[labels == np.iinfo(self.dtype).max] = IGNORE_INDEX
            row["labels"] = labels
        else:
            start = place * length
            row = row_of_stream(flat.read(start, min(start + length + 1, len(flat))), length)
        if self.tables:
            counted = row["labels"][row["labels"].astype(np.int64) != IGNORE_INDEX]
            row |= {name: table[counted].sum() for name, table in self.tables.items()}
        return row


def row_of_stream(tokens: np.ndarray, length: int) -> dict[str, np.ndarray]:
    """The row of these `length` + 1 tokens, or padded, where a stream ends, of fewer."""
    if len(tokens) > length:
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}
    room = (0, length + 1 - len(tokens))
    labels = np.pad(tokens[1:].astype(np.int64), room, constant_values=IGNORE_INDEX)
    return {"input_ids": np.pad(tokens[:-1], room), "labels": labels}


def stack(rows: list[dict[str, np.ndarray]]) -> dict[str, torch.Tensor]:
    """A batch of these rows: int64 (B, ...), and float32 for numbers that are not whole."""
    batch = {}
    for name in rows[0]:
        values = np.stack([row[name] for row in rows])
        batch[name] = torch.from_numpy(values.astype("f4" if values.dtype.kind == "f" else "i8"))
    return batch
