"""Rows of numbers of a prepared `datasets.Dataset` as numpy views: what a step trains on."""

from typing import Any

import datasets
import numpy as np
import torch

from samestep.core.inputs import Source
from samestep.data import columns
from samestep.data.sources import split_data


def source_numbers(dataset: Any) -> np.ndarray:
    """The number of each row's source, int (N,).

    Raises ValueError where rows of several are mixed: their weights could not be kept.
    """
    numbers = columns.values_of(dataset, "source")
    if (np.diff(numbers) < 0).any():
        raise ValueError("task.views: rows of several sources are mixed; sort them by source")
    return numbers


def count_sources(dataset: Any, data: str) -> list[Source]:
    """The sources of rows that load_rows has read, with the weights in `data`."""
    numbers = source_numbers(dataset)
    weights = {each.name: each.weight for each in split_data(data)}
    counts = np.bincount(numbers)
    names = getattr(dataset.features["source"], "names", None) or ["data"]
    found = zip(names, counts.tolist(), strict=False)  # the last may have no rows here
    return [Source(name, rows, weights.get(name, 1)) for name, rows in found]


class Rows(torch.utils.data.Dataset):
    """Rows of some columns: dicts of numpy arrays (T,) for lists, and of numbers.

    `sized`: columns whose lengths are the size of a row. Sources and their weights are those of
    cfg.data.
    """

    def __init__(self, dataset: Any, names: list[str], sized: list[str], cfg: Any):
        self.arguments = (dataset, names, sized, cfg)
        self.dataset, self.names, self.sized = dataset, names, sized
        self.lists, self.numbers = {}, {}
        for name in names:
            if isinstance(dataset.features[name], datasets.Value):
                self.numbers[name] = columns.values_of(dataset, name)
            else:
                self.lists[name] = columns.ListColumn(dataset, name)
        if "source" in dataset.column_names:
            self.sources = count_sources(dataset, cfg.data)

    def __reduce__(self):  # pickled, a memory map would become a copy
        return Rows, self.arguments

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> dict[str, Any]:
        row = {name: column.row(i) for name, column in self.lists.items()}
        return row | {name: values[i] for name, values in self.numbers.items()}

    def sizes(self) -> np.ndarray:
        """The size of each row, int (N,)."""
        return np.sum([self.lists[name].lengths for name in self.sized], axis=0)

    def digest(self) -> str:
        shown = {*self.names, "source"} & {*self.dataset.column_names}
        return columns.digest(self.dataset, sorted(shown))
