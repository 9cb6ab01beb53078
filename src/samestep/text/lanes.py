"""Samples of shards in lanes: the same on any number of processes, from wherever a run resumes.

The shards are assigned to lanes, in an order that depends on the seed and the epoch, and rotates by
epoch. Each lane supplies the same contiguous part of every step; a process reads the lanes of its
micro-batches. A shard is read in blocks, whose samples are permuted.

A sample's id says all that a lane has to know to go on after it: epoch, shard, block, and the place
in the permuted block.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from samestep.step.inputs import Stream
from samestep.step.order import hash64, sample_ids

# Bits of an id, an int64: what it says, the highest first.
PARTS = {"epoch": 9, "shard": 18, "block": 20, "place": 16}


def pack_id(*parts: int) -> int:
    """The id of a sample; raises ValueError where a part has too many bits."""
    total = 0
    for value, (name, bits) in zip(parts, PARTS.items(), strict=True):
        if value >= 1 << bits:
            hint = "; raise task.context_length" if name == "place" else ""
            raise ValueError(f"task.data: a stream has at most {1 << bits:,} for each {name}{hint}")
        total = total << bits | value
    return total


def unpack_id(sample: int) -> list[int]:
    """Epoch, shard, block and place of a sample."""
    parts = []
    for bits in reversed(PARTS.values()):
        parts.append(sample & ((1 << bits) - 1))
        sample >>= bits
    return parts[::-1]


class ShardStream(Stream):
    """Samples of shards, by their positions in the run.

    `lanes`: at most as many as shards; they divide the global batch size. Positions are to be read
    in ascending order: those between are skipped, and earlier ones are read from the beginning of
    the run, or from where it resumed. `begin` is called before.

    A subclass has blocks(shard), an iterator over the blocks of a shard, the same each time, of
    which those that are skipped are only read; and samples(block), a sequence.
    """

    blocks: Callable[[str], Iterator[Any]]
    samples: Callable[[Any], Sequence]

    def __init__(self, shards: list[str], lanes: int):
        self.shards, self.lanes = shards, lanes
        if not 1 <= lanes <= len(shards):
            raise ValueError(
                f"task.lanes is {lanes}, and {len(shards)} shards are to be trained on; give at "
                f"most {len(shards)}, or cut the data into more files"
            )
        self.begin(0, lanes)

    def begin(self, seed: int, step: int, first: int = 0, last: list[int] | None = None) -> None:
        """Sets the seed, the samples of a step, and the position from which the run goes on, where
        each lane has given the sample `last`.

        Raises ValueError for a step that the lanes do not divide.
        """
        if step % self.lanes:
            most = min(self.lanes, step)
            near = next(n for n in range(most, 0, -1) if step % n == 0)
            raise ValueError(
                f"task.lanes is {self.lanes}, which does not divide global_batch_size, {step}; "
                f"give {near}"
            )
        if last and len(last) != self.lanes:
            raise ValueError(f"task.lanes is {self.lanes}; the run has {len(last)}: keep them")
        self.seed, self.step, self.first, self.last = seed, step, first, last
        self.open: dict[int, tuple[int, Iterator]] = {}  # of each lane its next sample

    def __getstate__(self):  # for worker processes, which open shards themselves
        return self.__dict__ | {"open": {}}

    def __len__(self) -> int:
        return 1 << 50  # without an end

    def locate(self, position: int) -> tuple[int, int]:
        """The lane of a position, and the number of the sample in the lane, from `first` on."""
        share = self.step // self.lanes
        steps, place = divmod(position - self.first, self.step)
        return place // share, steps * share + place % share

    def __getitems__(self, positions: list[int]) -> list[tuple[int, Any]]:
        """The samples at these positions: (id, row)."""
        found = []
        for position in positions:
            lane, number = self.locate(position)
            ready, samples = self.open.get(lane, (0, None))
            if samples is None or ready > number:
                ready, samples = 0, self.read_lane(lane)
            while ready < number:
                next(samples)
                ready += 1
            found.append(next(samples))
            self.open[lane] = (number + 1, samples)
        return found

    def read_lane(self, lane: int) -> Iterator[tuple[int, Any]]:
        """The samples of a lane, from where the run goes on, without an end."""
        epoch, resumed = 0, None
        if self.last:
            epoch, *resumed = unpack_id(self.last[lane])
        while True:
            count, is_whole = 0, resumed is None
            for shard in self.assigned(lane, epoch):
                if resumed and shard != resumed[0]:
                    continue
                first_block, taken = resumed[1:] if resumed else (0, -1)
                resumed = None
                for sample in self.read_shard(epoch, shard, first_block, taken):
                    count += 1
                    yield sample
            if is_whole and not count:
                raise ValueError(f"task.data: the shards of lane {lane} hold no sample to train on")
            epoch, resumed = epoch + 1, None

    def assigned(self, lane: int, epoch: int) -> list[int]:
        """The numbers of the shards of a lane in an epoch."""
        number = len(self.shards)
        order = sample_ids(np.arange(number) + epoch * number, number, self.seed)
        return order[(lane + epoch) % self.lanes :: self.lanes].tolist()

    def read_shard(
        self, epoch: int, shard: int, first_block: int, taken: int
    ) -> Iterator[tuple[int, Any]]:
        """The samples of a shard after place `taken` of a block."""
        for number, block in enumerate(self.blocks(self.shards[shard])):
            if number < first_block:
                continue
            samples = self.samples(block)
            order = []
            if samples:
                key = hash64(self.seed, epoch, shard, number)[0]
                order = sample_ids(np.arange(len(samples)), len(samples), key).tolist()
            for place in range(taken + 1, len(order)):
                yield pack_id(epoch, shard, number, place), samples[order[place]]
            taken = -1
