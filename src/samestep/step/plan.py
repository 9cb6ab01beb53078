"""Chooses the samples of each step, and assigns its micro-batches to the processes.

The samples of a run form one endless sequence (see order.py). Step s, counted from 1, takes the G
samples of the global batch at the positions from (s - 1) * G up to s * G, whatever the micro-batch
size and the number of processes. Epochs may end in the middle of a step: no sample is left over.

A step is cut into V near-equal micro-batches, V = ceil(G / micro_batch_size) rounded up to a
multiple of the processes, but at most G (count_micro_batches has the cases of exact and of unequal
shares). Micro-batch v has the samples from v * G // V up to (v + 1) * G // V.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from samestep.base.errors import UserError

_FEW = 8  # samples of a batch that is computed before the search of auto


def number_of(micro_batch_size: int | str, samples: int) -> int:
    """Return a micro_batch_size as a number; for auto that of a batch before the search."""
    return min(_FEW, samples) if isinstance(micro_batch_size, str) else micro_batch_size


@dataclass(frozen=True)
class StepPlan:
    """A step as a list of micro-batches, and who computes them. With o = r % stride, rank r has

        range(sum(shares[:r - o]) + o, ..., stride), of shares[r] numbers

    The stride is 1, and a run contiguous, but with exact under FSDP, which adds the micro-batches
    that `stride` neighbors compute at the same time: their shares are equal."""

    samples: int  # in a step: global_batch_size
    micro_batch_size: int  # maximum of samples that a device takes at once
    shares: tuple[int, ...] = (1,)  # micro-batches of each data-parallel rank
    rank: int = 0  # this one
    stride: int = 1  # between two micro-batches of a rank
    is_auto: bool = False  # whether micro_batch_size is yet to be found: see memory.py

    @property
    def count(self) -> int:
        """Count the micro-batches of a step, V, on all ranks."""
        return sum(self.shares)

    @property
    def largest(self) -> int:
        """Return the samples of the largest micro-batch; others may have one less."""
        return -(-self.samples // self.count)

    def run(self, rank: int | None = None) -> range:
        """Return the numbers of the micro-batches that a rank computes; without one, this rank."""
        rank = self.rank if rank is None else rank
        offset = rank % self.stride
        first = sum(self.shares[: rank - offset])
        return range(first + offset, first + self.stride * self.shares[rank], self.stride)

    def positions(self, positions: Any, number: int) -> Any:
        """Return those of micro-batch `number`, from 0, of all positions of a step, (G,)."""
        first = number * self.samples // self.count
        end = (number + 1) * self.samples // self.count
        return positions[first:end]

    def describe(self, ranks: str = "processes") -> str:
        """Write the samples of a step as a product, and what its factors count."""
        if self.is_auto:
            return f"{self.samples} samples, micro_batch_size auto"
        shares, words = f"{len(self.shares)} x {self.shares[0]}", f"{ranks} x micro-batches"
        if len({*self.shares}) > 1:
            shares = f"({' + '.join(map(str, self.shares))})"
            words = "micro-batches"
        size = str(self.largest)
        if self.samples % self.count:
            size = f"({self.largest - 1} or {self.largest})"
        return f"{self.samples} samples = {shares} x {size} ({words} x samples)"


def assign_micro_batches(count: int, speeds: Sequence[float], least: int = 0) -> tuple[int, ...]:
    """Assign `count` micro-batches to ranks of these speeds, so that the last is done early.

    Each goes to the rank that would complete it first, of several to the lowest; each rank gets
    `least`. No other way to assign whole micro-batches takes less time.
    """
    shares = [least] * len(speeds)
    # (time at which a rank would complete one more, rank)
    queue = [((shares[rank] + 1) / speed, rank) for rank, speed in enumerate(speeds)]
    heapq.heapify(queue)
    for _ in range(count - sum(shares)):
        _, rank = queue[0]
        shares[rank] += 1
        heapq.heapreplace(queue, ((shares[rank] + 1) / speeds[rank], rank))
    return tuple(shares)


def count_micro_batches(
    samples: int, size: int, ranks: int, exact: bool, unequal: bool, sharded: bool
) -> int:
    """Count the micro-batches of a step, V: as few as possible, as many on each rank; else 0.

    samples: of the step. size: their maximum in a micro-batch; with exact their number.
    unequal: whether shares may differ; V is then at least four for each rank.
    sharded: whether ranks share weights, so that all compute as many.
    """
    count = -(-samples // size)  # ceil(G / size)
    if not exact:
        count = -(-count // ranks) * ranks
        if unequal:
            count = max(count, 4 * ranks)
        count = min(count, samples)
    if count < ranks or (exact and samples % size) or (sharded and count % ranks):
        return 0
    return count


def plan_step(
    global_batch_size: int, micro_batch_size: int | str, ranks: int, exact: bool = False,
    device_shares: str | list[float] = "equal", rank: int = 0, in_step: int = 0,
) -> StepPlan:  # fmt: skip
    """Cut a step into micro-batches, and assign them to the ranks.

    micro_batch_size: maximum of samples in a micro-batch; with exact their number; auto: few, until
        it is found.
    ranks: data-parallel ones, of which `rank` is this one.
    device_shares: "equal", "auto" (equal until speeds are measured), or a speed for each rank.
    in_step: so many neighbors share weights, so all ranks compute as many micro-batches; 0: none.

    Raises UserError for a cut that is impossible.
    """
    samples, is_auto = global_batch_size, micro_batch_size == "auto"
    size = number_of(micro_batch_size, samples)
    speeds = [1.0] * ranks
    if isinstance(device_shares, list):
        speeds = device_shares
    if len(speeds) != ranks:
        raise UserError(
            f"device_shares has {len(speeds)} numbers, and there are {ranks} processes; give one "
            "number for each, or auto"
        )
    if samples < ranks:
        raise UserError(
            f"global_batch_size is {samples}, fewer samples than the {ranks} processes; give at "
            f"least {ranks}, or start at most {samples}"
        )
    unequal = ranks > 1 and (device_shares == "auto" or len({*speeds}) > 1)
    kind = (exact, unequal, in_step > 0)
    count = count_micro_batches(samples, size, ranks, *kind)
    if not count:
        sizes = range(1, -(-samples // ranks) + 1)
        fitting = [n for n in sizes if count_micro_batches(samples, n, ranks, *kind)]
        nearest = sorted(fitting, key=lambda n: abs(n - size))[:3]
        remedy = f"give a global_batch_size that {ranks} divides"
        if nearest:
            remedy = f"give a micro_batch_size of {' or '.join(map(str, nearest))}"
        if samples % size == 0 and not in_step:
            remedy += f", or start at most {samples // size}"
        raise UserError(
            f"{'exact: ' if exact else ''}{samples} samples in micro-batches of {size} cannot be "
            f"assigned to {ranks} process{'es' if ranks > 1 else ''}; {remedy}"
        )
    shares = assign_micro_batches(count, speeds, least=1)
    return StepPlan(samples, size, shares, rank, in_step if exact and in_step else 1, is_auto)
