"""Which samples a step is made of: a function of the step and the seed, and of nothing else.

The samples of a run stand in one endless line. Sample p of it is place p % N of epoch p // N, and
each epoch is a permutation of the N samples that is computed, not stored. Step s of a global batch
G takes the samples from s * G up to (s + 1) * G, however the batch is cut and wherever a run was
interrupted; an epoch ends in the middle of a step, so there is no ragged tail.
"""

import hashlib
import math

import numpy as np
import torch

import contract
import task


def mix(*words) -> np.ndarray:
    """64 well-mixed bits of integers, or of arrays of them: uint64, of the arrays' shape or (1,).

    Each word passes through the finaliser of SplitMix64 (Steele, Lea and Flood, 2014).
    """
    bits = np.zeros(1, np.uint64)
    for word in words:
        bits = (bits ^ np.asarray(word).astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        bits = bits ^ (bits >> np.uint64(31))
    return bits


def sample_ids(positions, size: int, seed: int) -> np.ndarray:
    """Sample ids at these positions of the run, for `size` samples: int64, shape of positions.

    Position p is place p % size of epoch p // size, and each epoch is a permutation of its own that
    is computed, not stored: a Feistel network over the pairs (p % a, p // a), where a * b just
    covers `size`, applied again to the few values that fall outside (Black and Rogaway, "Ciphers
    with arbitrary finite domains", 2002, their third method).
    """
    epochs, ids = np.divmod(np.asarray(positions, np.uint64), np.uint64(size))
    a = np.uint64(math.isqrt(size - 1) + 1)
    b = np.uint64(-(-size // int(a)))
    keys = mix(seed, epochs)
    outside = np.ones(ids.shape, bool)
    while outside.any():
        right, left = np.divmod(ids[outside], a)
        for turn in range(24):  # with 12, tiny data sets still showed a pattern
            left = (left + mix(keys[outside] + np.uint64(turn << 32) + right)) % a
            left, right, a, b = right, left, b, a
        ids[outside] = right * a + left
        outside = ids >= size
    return ids.astype(np.int64)


class Order:
    """`sample_ids` of one run, in blocks: a block of thousands costs no more than a few calls."""

    block = 8192  # positions

    def __init__(self, size: int, seed: int):
        self.size, self.seed = size, seed
        self.blocks: dict[int, np.ndarray] = {}  # those of the last call, two at most

    def ids(self, positions) -> np.ndarray:
        """Sample ids at these positions: int64, shape of positions (N,)."""
        positions = np.asarray(positions, np.uint64)
        number, place = np.divmod(positions, np.uint64(self.block))
        needed = np.unique(number).tolist() if len(positions) else []
        if len(needed) > 2:
            return sample_ids(positions, self.size, self.seed)
        self.blocks = {n: self.blocks[n] for n in needed if n in self.blocks}
        for n in needed:
            if n not in self.blocks:
                whole = np.arange(self.block, dtype=np.uint64) + np.uint64(n * self.block)
                self.blocks[n] = sample_ids(whole, self.size, self.seed)
        ids = np.empty(len(positions), np.int64)
        for n in needed:
            ids[number == n] = self.blocks[n][place[number == n]]
        return ids


class Slices:
    """A batch sampler: the positions from `first` up to `last` in slices of `size`.

    accelerate deals its batches to the ranks in turn, so their number is made a multiple of
    `processes`: a slice beyond the end holds the position `last` alone, whose row weighs nothing.
    `sort` may put the positions of a `step` in another order: what belongs to a step stays.
    """

    def __init__(self, first: int, last: int, size: int, processes: int, step: int = 0, sort=list):
        self.first, self.last, self.size, self.sort = first, last, size, sort
        self.step = step or max(last - first, 1)
        self.length = -(-(last - first) // (size * processes)) * processes

    def __len__(self):
        return self.length

    def first_batch(self) -> range:
        """The first positions, a slice of them, without the order of `sort`."""
        return range(self.first, min(self.first + self.size, self.last))

    def __iter__(self):
        filled = 0
        for begin in range(self.first, self.last, self.step):
            positions = self.sort(range(begin, min(begin + self.step, self.last)))
            for start in range(0, len(positions), self.size):
                yield positions[start : start + self.size]
                filled += 1
        yield from [[self.last]] * (self.length - filled)


class Rows(torch.utils.data.Dataset):
    """The rows of a dataset by position in the run, each with its sample id.

    With a seed they are shuffled, and changed by `task.augment`, if there is one: its random
    numbers come from a generator of the row's own, and so depend on no worker and no rank. Without
    a seed positions are sample ids, and a position past the end gives (-1, first row).
    """

    def __init__(self, dataset, seed: int | None = None):
        self.dataset, self.seed = dataset, seed
        self.order = None if seed is None else Order(len(dataset), seed)
        self.sizes = np.asarray(task.sizes(dataset)) if hasattr(task, "sizes") else None
        self.augment = getattr(task, "augment", None) if seed is not None else None

    def __len__(self):
        return len(self.dataset)

    def ids(self, positions) -> list[int]:
        """The sample ids at these positions."""
        if self.order is None:
            return [p if p < len(self) else -1 for p in positions]
        return self.order.ids(positions).tolist()

    def sort(self, positions) -> list[int]:
        """These positions in the order of their rows' `task.sizes`, for `Slices`: less padding."""
        if self.sizes is None:
            return list(positions)
        order = np.argsort(self.sizes[self.ids(positions)], kind="stable")
        return np.asarray(positions)[order].tolist()

    def __getitems__(self, positions: list[int]) -> list[tuple]:
        ids = self.ids(positions)
        places = [max(i, 0) for i in ids]
        if hasattr(self.dataset, "__getitems__"):  # datasets of the Hub read many rows at once
            rows = self.dataset.__getitems__(places)
        else:
            rows = [self.dataset[i] for i in places]
        if self.augment:
            seeds = mix(self.seed, np.asarray(positions) // len(self), ids).view(np.int64).tolist()
            draws = [torch.Generator().manual_seed(seed) for seed in seeds]
            rows = [self.augment(row, draw) for row, draw in zip(rows, draws, strict=True)]
        return list(zip(ids, rows, strict=True))


def collate(pairs: list[tuple]) -> tuple[dict, tuple[int, int, int]]:
    """The task's batch, its number of loss terms, the sum of its hashed sample ids, its rows.

    The three are Python's integers (within 64 bits), so that reading them waits for no device. The
    batch beyond the end of the data, one row with the id -1, has no terms and no rows.
    """
    ids = np.array([i for i, _ in pairs])
    batch = task.collate([row for _, row in pairs])
    contract.check_batch(batch)
    filler = ids[0] < 0
    terms = 0 if filler else contract.whole(task.count(batch))
    return batch, (terms, int(mix(ids).view(np.int64).sum()), 0 if filler else len(ids))


def fingerprint(dataset) -> str:
    """16 hex digits that stand for the data: its number of rows, and 64 of them, evenly spread.

    The tensors of their batch count, with names, types and shapes. A change of another row is not
    seen: a task that can say more has the function `digest`.
    """
    ids = sorted({i * (len(dataset) - 1) // 63 for i in range(64)})
    rows = Rows(dataset)
    pairs = rows.__getitems__(ids)
    try:
        found = digest_of(len(dataset), pairs)
    except (LookupError, TypeError):
        contract.check_rows(ids, [row for _, row in pairs])  # the reason, perhaps
        raise
    if digest_of(1, pairs[:1]) != digest_of(1, rows.__getitems__(ids[:1])):
        raise ValueError(
            "task.datasets: row 0 is another one when it is read again; draw random numbers in "
            "augment(row, draw), so that a run can be continued"
        )
    return found


def digest_of(size: int, pairs: list[tuple]) -> str:
    """16 hex digits that stand for a number and the batch of these rows."""
    batch, _ = collate(pairs)
    digest = hashlib.sha256(str(size).encode())
    for name, values in sorted(batch.items()):
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
        digest.update(values.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]
