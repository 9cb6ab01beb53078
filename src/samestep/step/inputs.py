"""What a step takes from its caller: datasets with their sources, batches, counts, losses, sums.

A mistake raises ValueError early, in one line: the place, what it gives, what to give instead.
"""

import math
import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

Batch = dict[str, Any]  # of tensors
IGNORE_INDEX = -100  # the label that cross entropy leaves out
_LONGEST_PERIOD = 100_000  # largest sum of the weights of sources, for their table

# ---- Datasets ------------------------------------------------------------------------------------


class Source(NamedTuple):
    """A part of a dataset: rows that follow each other."""

    name: str
    """Its name in metrics.jsonl."""

    rows: int
    """Number of its rows. Those of all sources make up the dataset, in this order."""

    weight: int
    """Its share of the training samples is weight / the sum of all weights."""


class Stream(torch.utils.data.Dataset):
    """A view to train on whose samples are read from shards while the model trains, in the order of
    their positions in the run, without an end: see text/lanes.py, which implements it."""

    lanes: int
    """Each supplies the same contiguous part of every step."""

    def begin(self, seed: int, step: int, first: int = 0, last: list[int] | None = None) -> None:
        """Set the seed, the samples of a step, and the position from which the run resumes, where
        each lane has given the sample `last`."""
        raise NotImplementedError


def list_sources(dataset: Any, training: bool) -> list[Source]:
    """Return the sources of a view; empty if it names none.

    Without `training`, those without rows are left out. Raises ValueError for what does not fit.
    """
    sources = getattr(dataset, "sources", None)
    if not isinstance(sources, list | tuple) or not sources:
        return []
    invalid = [source for source in sources if not isinstance(source, Source)]
    if invalid and len(invalid) == len(sources) and not hasattr(invalid[0], "weight"):
        return []  # an attribute with another meaning
    if invalid:
        raise ValueError(
            f"sources of task.views: {invalid[0]!r:.60} is no Source; give a list of "
            "samestep.step.inputs.Source(name, rows, weight)"
        )
    for source in sources:
        numbers = np.array([source.rows, source.weight - 1])
        if numbers.dtype.kind not in "iu" or numbers.min() < 0:
            raise ValueError(
                f"sources of task.views: {source.name!r} needs whole numbers: rows from 0, and a "
                "weight from 1"
            )
        if training and not source.rows:
            raise ValueError(
                f"sources of task.views: {source.name} has no rows to train on; leave it out"
            )
    name, times = Counter(source.name for source in sources).most_common(1)[0]
    if times > 1:
        raise ValueError(
            f"sources of task.views: {times} are called {name!r}; give each another name"
        )
    total = sum(source.rows for source in sources)
    if total != len(dataset):
        together = f"{total:,} rows together, but the dataset has {len(dataset):,}"
        raise ValueError(f"task.sources: they have {together}")
    weights = [int(source.weight) for source in sources]
    if sum(weights) // math.gcd(*weights) > _LONGEST_PERIOD:
        too_fine = f"the weights {weights} are too fine; their sum is above {_LONGEST_PERIOD:,}"
        raise ValueError(f"sources of task.views: {too_fine}")
    return [source for source in sources if source.rows]


# ---- Batches, and what is computed from them -----------------------------------------------------


def expect(right: object, place: str, value: Any, wanted: str) -> None:
    """Raise ValueError, with the place and the value, unless the value is right."""
    if right:
        return
    shown = f"{value!r:.60}, {type(value).__name__}"
    if torch.is_tensor(value):
        shown = f"a tensor, {str(value.dtype).removeprefix('torch.')}, of shape {(*value.shape,)}"
    raise ValueError(f"{place} {shown}; give {wanted}")


def entries_of(batch: Any) -> Iterator[torch.Tensor | str]:
    """Yield all tensors and texts of a batch, in the order of their names."""
    if isinstance(batch, torch.Tensor | str):
        yield batch
        return
    entries = [batch[name] for name in sorted(batch)] if isinstance(batch, Mapping) else batch
    for entry in entries:
        yield from entries_of(entry)


def size_of(batch: Any) -> int:
    """Count the numbers in a batch."""
    return sum(entry.numel() for entry in entries_of(batch) if torch.is_tensor(entry))


def check_count(count: Any) -> int:
    """Return `count` as an int; raise ValueError unless it is a whole number from 0."""
    try:
        number = operator.index(count)
    except TypeError:
        number = -1
    expect(number >= 0, "count returns", count, "the number of items in the loss, an int")
    return number


def check_loss(loss: Any, needs_gradient: bool = True) -> None:
    """Raise ValueError unless this is a float32 scalar, with a gradient if it needs one."""
    right = torch.is_tensor(loss) and (loss.shape, loss.dtype) == ((), torch.float32)
    expect(right, "the loss is", loss, "the sum of the losses, a float32 of shape ()")
    if needs_gradient and not loss.requires_grad:
        raise ValueError("the loss has no gradient; call model(...) for it")


def check_sums(sums: Any) -> None:
    """Raise ValueError unless this is a dict of tensors that float64 can hold, and that count."""
    expect(isinstance(sums, dict) and sums, "eval_sums returns", sums, "a dict of tensors")
    for name, value in sums.items():
        expect(torch.is_tensor(value), f"eval_sums: {name!r} is", value, "a tensor")
        exact = value.dtype not in (torch.bfloat16, torch.float16) and not value.is_complex()
        better = "one that rounds no sums: call .float(), and count without products of matrices"
        expect(exact, f"eval_sums: {name!r} is", value, better)


def check_outputs(outputs: Any, rows: int) -> None:
    """Raise ValueError unless this is a dict of tensors whose first dimension is `rows`."""
    right = isinstance(outputs, dict) and outputs
    expect(right, "task.eval_outputs returns", outputs, "a dict of tensors")
    for name, value in outputs.items():
        right = torch.is_tensor(value) and value.shape[:1] == (rows,)
        wanted = f"a tensor whose first dimension is that of the rows, here {rows}"
        expect(right, f"task.eval_outputs: {name!r} is", value, wanted)
