"""Rows of a prepared `datasets.Dataset` as numpy arrays: what a step trains on."""

import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from samestep.core.inputs import Source
from samestep.data import columns
from samestep.data.sources import split_data


def _count_sources(dataset: Any, data: str) -> list[Source]:
    """The sources of rows that load_rows has read, with the weights in `data`.

    Raises ValueError where rows of several are mixed: their weights could not be kept.
    """
    numbers = columns.values_of(dataset, "source")
    if (np.diff(numbers) < 0).any():
        raise ValueError("task.views: rows of several sources are mixed; sort them by source")
    weights = {each.name: each.weight for each in split_data(data)}
    names = getattr(dataset.features["source"], "names", None) or ["data"]
    found = zip(names, np.bincount(numbers).tolist(), strict=False)  # the last may have none here
    return [Source(name, rows, weights.get(name, 1)) for name, rows in found if rows]


class Rows(torch.utils.data.Dataset):
    """Rows of some columns: dicts of numpy arrays (T,) for lists, and of numbers, in the order that
    the dataset gives them, also after select, filter or shuffle.

    `sized`: columns whose lengths are the size of a row. Sources and their weights are those of
    cfg.data.
    """

    def __init__(self, dataset: Any, names: list[str], sized: list[str], cfg: Any):
        self.dataset, self.names, self.sized = dataset, names, sized
        self.table = dataset.select_columns(names).with_format("arrow")
        if "source" in dataset.column_names:
            self.sources = _count_sources(dataset, cfg.data)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.__getitems__([i])[0]

    def __getitems__(self, places: list[int]) -> list[dict[str, Any]]:
        table = self.table[places]
        cells = [cells_of(column) for column in table.columns]
        return [dict(zip(table.column_names, row, strict=True)) for row in zip(*cells, strict=True)]

    def sizes(self) -> np.ndarray:
        """The size of each row, int (N,)."""
        return np.sum([columns.lengths_of(self.dataset, name) for name in self.sized], axis=0)

    def digest(self) -> str:
        shown = {*self.names, "source"} & {*self.dataset.column_names}
        return columns.digest(self.dataset, sorted(shown))


def cells_of(column: pa.ChunkedArray) -> list[Any]:
    """The values of a column as numpy has them: of lists views of one array."""
    column = column.combine_chunks()
    if not pa.types.is_nested(column.type):
        return [*column.to_numpy(zero_copy_only=False)]
    values = column.values.to_numpy()
    return [values[start:end] for start, end in itertools.pairwise(column.offsets.tolist())]
