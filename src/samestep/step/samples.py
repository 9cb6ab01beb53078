"""Reads the samples of a run by their positions, and makes batches of them."""

import hashlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils.operations import honor_type

from samestep.base.errors import as_user_error
from samestep.step import inputs, trial
from samestep.step.order import SampleOrder, hash64, hash_integers
from samestep.step.plan import StepPlan, assign_micro_batches
from samestep.step.seeds import AUGMENT, seed_host

_SECONDS = 1  # to hash rows
FINGERPRINT_ROWS = 64  # that are read at the start; of data whose rows are not all compared


class EvaluationSampler:
    """Yields the batches of an evaluation that this rank computes, as lists of positions.

    A batch has micro_batch_size rows, and none has rows of two sources; the batches of all sources
    are numbered through, as those of one step, `self.plan`. All ranks get as many as the busiest,
    since a sharded model computes on all at once; what is added is the position past the last row.

    plan: of a step of training, for its micro_batch_size and, in proportion, its shares.
    """

    def __init__(self, plan: StepPlan, rows: "SampleDataset"):
        self.size, self.rows = plan.micro_batch_size, rows
        self.counts = [-(-samples // self.size) for samples in rows.source_sizes]  # batches of each
        # All batches at once, so some ranks may have none of a source.
        shares = assign_micro_batches(sum(self.counts), plan.shares)
        self.plan = StepPlan(len(rows), self.size, shares, plan.rank)

    def __len__(self):
        return max(self.plan.shares)

    def places(self) -> Iterator[tuple[int, int]]:
        """Yield the number of each batch of this rank, and that of its source."""
        sources = np.repeat(np.arange(len(self.counts)), self.counts)  # (batches,) int64
        for number in self.plan.run():
            yield number, int(sources[number])

    def __iter__(self):
        run, first_batch, first_row = self.plan.run(), 0, 0  # the latter of the next source
        for samples, count in zip(self.rows.source_sizes, self.counts, strict=True):
            batches = range(max(run.start, first_batch), min(run.stop, first_batch + count))
            positions: Sequence[int] = range(first_row, first_row + samples)
            if batches:
                positions = self.rows.sort(positions)
            for batch in batches:
                begin = (batch - first_batch) * self.size
                yield list(positions[begin : begin + self.size])
            first_batch, first_row = first_batch + count, first_row + samples
        yield from [[first_row]] * (len(self) - len(run))


class SampleDataset(torch.utils.data.Dataset):
    """A dataset of the task, indexed by position in the run. Items are (sample id, row).

    With a seed the rows are shuffled, as `mixture` says (see order.SampleOrder), and passed through
    the task's `augment`, each with a generator of its own. Without a seed positions are sample ids,
    and a position past the end gives (-1, first row). A stream (text/lanes.py) gives ids itself.
    """

    def __init__(
        self, dataset: Any, task: Any = None, seed: int | None = None, mixture: dict | None = None
    ):
        self.dataset, self.seed = dataset, seed
        self.sources = inputs.list_sources(dataset, training=seed is not None)
        self.source_sizes = [int(source.rows) for source in self.sources] or [len(dataset)]
        self.order, self.is_stream = None, isinstance(dataset, inputs.Stream)
        if seed is not None and not self.is_stream:
            self.order = SampleOrder(len(dataset), seed, self.sources, mixture)
        sizes = getattr(dataset, "sizes", None)
        self.sizes = np.asarray(sizes()) if task and callable(sizes) else None  # for sort
        if self.sizes is not None and self.sizes.shape != (len(dataset),):
            raise ValueError(
                f"sizes() of task.views returns an array of shape {self.sizes.shape}; return the "
                f"sizes of the {len(dataset)} rows, shape ({len(dataset)},)"
            )
        self.augment = getattr(task, "augment", None) if seed is not None else None
        self.draws: list[int] | None = None  # rows that drew while they were read, if it is asked

    def __len__(self):
        return len(self.dataset)

    def __getstate__(self):
        """Leave out `sizes` for worker processes, which sort nothing: it may be large."""
        return self.__dict__ | {"sizes": None}

    def ids(self, positions: Iterable[int]) -> list[int]:
        """Return the sample ids at these positions."""
        if self.order is None:
            return [p if p < len(self) else -1 for p in positions]
        return self.order.ids(positions).tolist()

    def count_samples(self, samples: int) -> dict[str, int]:
        """Count, for metrics.jsonl, how many of the first samples come from each source."""
        if len(self.sources) < 2:
            return {}
        counts = zip(self.sources, self.order.count(samples), strict=True)
        return {f"samples/{source.name}": count for source, count in counts}

    def sort(self, positions: range) -> Sequence[int]:
        """Sort positions by the sizes of their rows: micro-batches then need less padding."""
        if self.sizes is None:
            return positions
        order = np.argsort(self.sizes[self.ids(positions)], kind="stable")
        return np.asarray(positions)[order].tolist()

    def __getitems__(self, positions: list[int]) -> list[tuple]:
        with as_user_error():
            ids, rows = self.read(positions)
        if self.augment:
            numbers = hash64(AUGMENT, self.seeds(positions, ids)).view(np.int64).tolist()
            generators = [torch.Generator().manual_seed(number) for number in numbers]
            rows = [self.augment(row, g) for row, g in zip(rows, generators, strict=True)]
        self.seed_collate(positions)
        return list(zip(ids, rows, strict=True))

    def seed_collate(self, positions: Sequence[int]) -> None:
        """Seed collate, which may draw, by the first position of the micro-batch."""
        seed_host(hash_integers(self.seed or 0, positions[0]))

    def seeds(self, positions: list[int], ids: Sequence[int]) -> np.ndarray:
        """Return the seeds of the rows' random numbers, (B,) uint64: of a row of the validation by
        its id, in training also by the seed of the run and the pass over the data."""
        if self.seed is None:
            return hash64(0, ids)
        passes = self.order.passes(positions) if self.order else 0  # the id of a stream has it
        return hash64(self.seed, passes, ids)

    def read(self, positions: list[int]) -> tuple[Sequence[int], Sequence[Any]]:
        """Read the rows at these positions, each alone, so that a transform of others may draw from
        the global generators; return their ids, too. Those that a dataset reads many at once draw
        nothing."""
        if self.is_stream:
            ids, found = zip(*self.dataset.__getitems__(positions), strict=True)
            return ids, found
        ids = self.ids(positions)
        places = [max(i, 0) for i in ids]
        if hasattr(self.dataset, "__getitems__") and not _has_transform(self.dataset):
            return ids, self.dataset.__getitems__(places)
        rows = []
        for place, seed in zip(places, self.seeds(positions, ids).tolist(), strict=True):
            seed_host(seed)
            if self.draws is None:
                rows.append(self.dataset[place])
                continue
            before = trial.random_state(torch.device("cpu"))
            rows.append(self.dataset[place])
            if trial.random_state(torch.device("cpu")) != before:
                self.draws.append(place)
        return ids, rows


def _has_transform(dataset: Any) -> bool:
    """Return whether a datasets.Dataset, or one inside Subset, has a `with_transform`."""
    while isinstance(dataset, torch.utils.data.Subset):
        dataset = dataset.dataset
    form = getattr(dataset, "format", None)
    return isinstance(form, dict) and form.get("type") == "custom"


def plain_batch(batch: Any, name: str = "") -> Any:
    """Return a batch with mappings as plain dicts: FSDP's casts and compile look into no other.

    Raises ValueError unless it has CPU tensors and texts, in mappings, lists and tuples.
    """
    if torch.is_tensor(batch) and batch.device.type == "cpu":
        return batch
    if isinstance(batch, Mapping) and batch:
        place = f"{name}." if name else ""
        return {str(key): plain_batch(value, f"{place}{key}") for key, value in batch.items()}
    if isinstance(batch, list | tuple) and batch:
        entries = (plain_batch(value, f"{name}[{i}]") for i, value in enumerate(batch))
        return honor_type(batch, entries)
    inputs.expect(name or torch.is_tensor(batch), "collate returns", batch, "a dict of tensors")
    inputs.expect(isinstance(batch, str), f"collate: {name!r} is", batch, "a tensor on the CPU")
    return batch


class MicroBatch(NamedTuple):
    batch: Any
    num_items: int  # in the loss
    ids_hash: int  # of its sample ids
    ids: np.ndarray  # of its samples, int64 (B,)
    number: int = 0  # in its step, from 0
    counts: bool = True  # whether its loss does; see training/replay.py

    def count_tokens(self) -> int:
        """Count the tokens that are computed, with padding; 0 for a batch without input_ids."""
        ids = self.batch.get("input_ids") if isinstance(self.batch, dict) else None
        return ids.numel() if torch.is_tensor(ids) else 0


def collate(task: Any, samples: list[tuple]) -> MicroBatch:
    """Make the task's batch of these (id, row) pairs."""
    batch = task.collate([row for _, row in samples])
    if hasattr(task, "loss_sum"):  # the functions of a task.py get a dict
        is_dict = isinstance(batch, Mapping)
        inputs.expect(is_dict, "task.collate returns", batch, "a dict of tensors")
    batch = plain_batch(batch)
    ids = np.array([i for i, _ in samples])
    count = task.count(batch) if hasattr(task, "count") else len(samples)
    ids_hash = int(hash64(ids).view(np.int64).sum())
    return MicroBatch(batch, inputs.check_count(count), ids_hash, ids)


def hash_batch(dataset: Any, task: Any, samples: list[tuple]) -> str:
    """Hash the number of rows, and types, shapes and bytes of the task's batch: 16 hex digits."""
    seed_host(0)  # collate may draw
    return hash_entries(collate(task, samples).batch, str(len(dataset)))


def hash_entries(batch: Any, first: str = "") -> str:
    """Hash a text, then types, shapes and bytes of a batch: 16 hex digits."""
    digest = hashlib.sha256(first.encode())
    for values in inputs.entries_of(batch):
        if isinstance(values, str):
            digest.update(values.encode())
            continue
        digest.update(f"{values.dtype} {tuple(values.shape)}".encode())
        flat = values.cpu().contiguous().flatten()
        if flat.numel():  # an empty one may have any strides
            digest.update(flat.view(torch.uint8).numpy())  # type: ignore
    return digest.hexdigest()[:16]


def read_samples(
    dataset: Any, task: Any, cuts: int = 1, training: bool = False
) -> tuple[list[tuple], set[int]]:
    """Read 64 evenly spread samples of a view; return them, and the places of those that drew.

    cuts: 1, or 2, of which the second half is read first: what has a generator of its own, or reads
        many rows at once and draws, gives others then. What keeps rows draws none the second time.
    A stream gives the first ones. In training `augment` changes them, each with its generator.
    """
    rows = SampleDataset(dataset, task)  # also calls `sizes`, which may raise ValueError
    rows.draws = []
    last = FINGERPRINT_ROWS - 1
    if not rows.is_stream:
        last = len(dataset) - 1
    ids = {i * last // (FINGERPRINT_ROWS - 1) for i in range(FINGERPRINT_ROWS)}
    places = sorted(ids)
    middle = len(places) // 2
    if cuts == 1 or rows.is_stream or not middle:
        samples = rows.__getitems__(places)
    else:
        samples = rows.__getitems__(places[middle:])
        samples = rows.__getitems__(places[:middle]) + samples
    if training and hasattr(task, "augment"):
        seed_host(cuts)  # it should draw nothing of that
        samples = [(i, task.augment(row, torch.Generator().manual_seed(i))) for i, row in samples]
    return samples, {*rows.draws}


def digest_rows(dataset: Any, task: Any) -> dict[str, str]:
    """Hash the first 64, 128, 256, ... rows in an order that is spread over all, and all of them,
    as many as a second allows: digests by the number of rows."""
    rows, count = SampleDataset(dataset, task), len(dataset)
    stride = max(int(count * 0.618), 1)  # any that has no common divisor with the count
    while math.gcd(stride, count) > 1:
        stride += 1
    digests, text, began = {}, "", time.monotonic()
    for first in range(0, count, FINGERPRINT_ROWS):
        places = range(first, min(first + FINGERPRINT_ROWS, count))
        samples = rows.__getitems__([place * stride % count for place in places])
        text = hashlib.sha256(f"{text} {hash_batch(dataset, task, samples)}".encode()).hexdigest()
        read = places[-1] + 1
        if read == count or math.log2(read / FINGERPRINT_ROWS).is_integer():
            digests[str(read)] = text[:16]
        if time.monotonic() - began > _SECONDS:
            break
    return digests


def check_repeated(hashes: list, draws: list[set[int]]) -> None:
    """Raise ValueError unless the same samples gave the same hash_batch twice, and those that drew
    the first time drew again: some may make what they need then, such as a network."""
    if hashes[0] != hashes[1] or len(draws[0] - draws[1]) > FINGERPRINT_ROWS // 4:
        raise ValueError(
            "the same samples are another batch the second time: views, a row, collate or augment "
            "draws anew, keeps what it drew, or has a generator of its own; draw from torch, "
            "np.random or random, which are seeded for views, for a row that is read alone and for "
            "collate, or in augment, from its generator; what reads many rows at once "
            "(__getitems__) draws none"
        )


def choose_probes(samples: list[tuple], task: Any) -> list[tuple]:
    """Choose samples to try the task on: the seven shortest with items in the loss, the longest."""
    sized = []
    for sample in samples:
        batch, items, *_ = collate(task, [sample])
        if items:
            sized.append((inputs.size_of(batch), sample))
    sized.sort(key=lambda pair: pair[0])
    return [sample for _, sample in [*sized[:7], *sized[7:][-1:]]] or samples[:1]
