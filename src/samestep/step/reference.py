"""What a step computes, in plain Python on one process: which rows a step has, how it is cut, and
the exact sum of its gradients.

Nothing calls it. The tests compare order.py, plan.py, exact.py and sums.py with it, to the bit.
It is slow, and knows data of one source.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from samestep.step.order import hash_integers


def permute(place: int, size: int, key: int) -> int:
    """Permute a place below `size`: each key has a permutation, a Feistel network over pairs."""
    width = math.isqrt(size - 1) + 1
    height = -(-size // width)
    while True:
        right, left = divmod(place, width)
        a, b = width, height
        for number in range(24):
            left = (left + hash_integers(key + (number << 32) + right)) % a
            left, right, a, b = right, left, b, a
        place = right * width + left
        if place < size:
            return place


def samples_of_step(step: int, global_batch_size: int, rows: int, seed: int) -> list[int]:
    """Return the ids of a step's samples, counted from 1: pass after pass over all rows."""
    samples = []
    for position in range((step - 1) * global_batch_size, step * global_batch_size):
        passes, place = divmod(position, rows)
        samples.append(permute(place, rows, hash_integers(seed, passes)))
    return samples


def micro_batches(samples: Sequence, size: int, ranks: int = 1) -> list[Sequence]:
    """Cut a step into near-equal parts of at most `size` samples, as many for each rank."""
    count = min(-(-len(samples) // size // ranks) * ranks, len(samples))
    cuts = [number * len(samples) // count for number in range(count + 1)]
    return [samples[first:end] for first, end in zip(cuts, cuts[1:], strict=False)]


def tree_sum(values: Sequence) -> Any:
    """Add up the values, cut at the largest power of two below their number."""
    if len(values) == 1:
        return values[0]
    middle = 2 ** ((len(values) - 1).bit_length() - 1)
    return tree_sum(values[:middle]) + tree_sum(values[middle:])


def exact_gradient(
    model: torch.nn.Module, loss_sum: Callable, batches: Sequence, items: int
) -> list[torch.Tensor]:
    """Return the gradient of these micro-batches' summed losses, divided by their items."""
    gradients = []
    for batch in batches:
        loss = loss_sum(model, batch) * (1 / items)
        gradients.append(torch.autograd.grad(loss, [*model.parameters()]))
    return [tree_sum(of_weight) for of_weight in zip(*gradients, strict=True)]
