"""Gathers what a task's eval_outputs returns for each row of an evaluation, in their order.

A score that is no sum over rows, such as AUC, needs all at once; sums.py keeps totals alone.
"""

from typing import Any, NamedTuple

import numpy as np
import torch

from samestep.base.errors import as_user_error, catch, is_out_of_memory
from samestep.processes.ranks import Ranks
from samestep.processes.sharding import full_tensor
from samestep.step.inputs import Batch, check_outputs

# Where a row is shorter than the longest one, as in transformers' Trainer.
PADDING = -100


class Part(NamedTuple):
    """The outputs of some rows."""

    ids: np.ndarray  # (B,), the numbers of the rows
    arrays: dict[str, np.ndarray]  # each (B, ...)


class EvaluationOutputs:
    """The outputs of an evaluation: each process keeps those of its batches in CPU memory."""

    def __init__(self, ranks: Ranks):
        self.ranks, self.parts = ranks, list[Part]()
        self.problem: Exception | None = None  # of a batch, which all processes must raise

    def add(self, outputs: Any, ids: np.ndarray) -> None:
        """Keep the outputs of the rows with these numbers. Those past the last row, -1, and those
        that a neighbor computes, too, are left out."""
        part, problem = catch(to_part, outputs, ids)
        if problem and is_out_of_memory(problem):
            raise problem  # micro_batch_size auto begins again
        self.problem = self.problem or problem
        if part and ids[0] >= 0 and self.ranks.layout.counts_items:
            self.parts.append(part)

    def gather(self, rows: int) -> Batch | None:
        """Return all rows' outputs in their order, (rows, ...), on the main process; else None."""
        self.ranks.raise_everywhere(self.problem)
        parts = [part for parts in self.ranks.gather_on_main(self.parts) for part in parts]
        self.parts, merged = [], None
        with self.ranks.fail_together():
            if parts:
                merged = merge(parts, rows)
        return merged


def to_part(outputs: Any, ids: np.ndarray) -> Part:
    """Copy the outputs of a batch to CPU memory; raise UserError unless they are right."""
    with as_user_error():
        check_outputs(outputs, len(ids))
    arrays = {}
    for name, values in sorted(outputs.items()):
        values = full_tensor(values.detach()).to("cpu", copy=True)  # not a view: it would keep all
        if values.dtype in (torch.bfloat16, torch.float16):
            values = values.float()  # which NumPy and scikit-learn take
        arrays[name] = values.numpy()
    return Part(ids, arrays)


def merge(parts: list[Part], rows: int) -> Batch:
    """Merge the outputs of all rows in their order: shorter ones are padded with PADDING at the end
    of each dimension; with 0 and False in types that have no negative numbers.

    Raises ValueError if batches differ in the names, types or dimensions of their outputs.
    """
    kinds = [{n: f"{v.dtype}, {v.ndim}D" for n, v in part.arrays.items()} for part in parts]
    first, *rest = kinds
    for other in rest:
        if other != first:
            raise ValueError(
                f"task.eval_outputs returns tensors {first} for one batch, and {other} for "
                "another; return the same names, types and numbers of dimensions for all"
            )
    assert sum(len(part.ids) for part in parts) == rows
    merged = {}
    for name, values in [*parts[0].arrays.items()]:
        sizes = [part.arrays[name].shape[1:] for part in parts]
        shape = [max(lengths) for lengths in zip(*sizes, strict=True)]
        padding = PADDING
        if values.dtype.kind in "bu":
            padding = 0
        whole = np.full((rows, *shape), padding, values.dtype)
        for part in parts:
            array = part.arrays.pop(name)  # its memory is free then
            whole[(part.ids, *map(slice, array.shape[1:]))] = array
        merged[name] = torch.from_numpy(whole)
    return merged
