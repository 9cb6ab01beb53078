"""The micro-batches of the steps, fetched one step ahead, and the batches of an evaluation."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from samestep.base.errors import catch
from samestep.base.signals import ignore_signals, signals_blocked
from samestep.base.workers import cores_per_process
from samestep.step.plan import StepPlan
from samestep.step.samples import EvaluationSampler, MicroBatch, SampleDataset, collate


class StepFacts(NamedTuple):
    """What all processes must know before a step, as sums over them."""

    num_items: int  # in the loss of the step
    ids_hash: int  # of its sample ids
    stop: int  # processes that were asked to stop
    failed: int  # that could not fetch their micro-batches


class StepBatchSampler:
    """Yields the micro-batches of this rank, as lists of positions of the run.

    The steps go from position `first` up to `last`; `sort` may reorder those of a step.
    """

    def __init__(self, plan: StepPlan, first: int, last: int, sort: Callable = list):
        self.plan, self.first, self.last, self.sort = plan, first, last, sort

    def __iter__(self):
        for begin in range(self.first, self.last, self.plan.samples):
            positions = self.sort(range(begin, begin + self.plan.samples))
            run = self.plan.run()
            yield from (list(self.plan.positions(positions, number)) for number in run)


class StepLoader:
    """Gives the steps of a run, and fetches the next one while the device computes.

    run: the Training. first: the position in the run where the first of `steps` steps begins.
    """

    def __init__(self, run: Any, first: int, steps: int):
        self.run, self.rows, self.plan, self.ranks = run, run.rows, run.plan, run.ranks
        plan, rows = self.plan, self.rows
        sampler = StepBatchSampler(plan, first, first + steps * plan.samples, rows.sort)
        device = run.accelerator.device
        self.batches = iterate(make_loader(rows, sampler, run.task, run.num_workers, device))
        self.left = steps  # to fetch
        self.micro_batches: list[MicroBatch] = []  # this process's part of the next step
        self.facts: torch.Tensor | None = None  # its StepFacts, complete once `wait` has returned
        self.work: Any = None  # the communication about them
        self.problem: Exception | None = None  # of this process
        self.tokens = 0  # of the step that was given last, as sums over the processes count them
        self.lanes: dict[int, int] = {}  # of a stream: the last sample of each lane in that step

    def prefetch(self) -> None:
        """Fetch the next step, if there is one, and start the communication about it."""
        if not self.left:
            self.note_read()
            return
        self.left -= 1
        micro_batches, self.problem = catch(self.read)
        self.note_read()
        self.micro_batches = micro_batches or []
        counts = self.ranks.layout.counts_items  # once a replica
        counted = self.micro_batches if counts else []
        num_items = sum(micro_batch.num_items for micro_batch in counted)
        ids_hash = int(np.sum([micro_batch.ids_hash for micro_batch in counted], dtype=np.int64))
        is_asked = self.run.run.stop.requested()
        self.facts = torch.tensor([num_items, ids_hash, is_asked, self.problem is not None])
        if self.ranks.group:
            self.work = dist.all_reduce(self.facts, group=self.ranks.group, async_op=True)

    def note_read(self) -> None:
        """Note the numbers of the rows with which the next step was read."""
        if not self.ranks.layout.deepspeed:
            self.run.saver.state.inventory.note_read()

    def read(self) -> list[MicroBatch]:
        """Read this process's micro-batches of the next step; raise the error of a save."""
        if self.run.saver.problem:
            raise self.run.saver.problem
        micro_batches = []
        with self.run.meter.waiting():
            for number in self.plan.run():
                micro_batches.append(next(self.batches)._replace(number=number))
        return micro_batches

    def wait(self) -> StepFacts | None:
        """Wait for the facts about the step that was fetched, if there is one."""
        if self.work:
            self.work.wait()
            self.work = None
        return None if self.facts is None else StepFacts(*self.facts.tolist())

    def next_step(self) -> tuple[list[MicroBatch], StepFacts]:
        """Return this process's micro-batches of the step that was fetched, and the facts about it.

        If a process could not fetch its micro-batches, all of them raise its error.
        """
        facts, self.facts = self.wait(), None
        assert facts
        if facts.failed:
            self.ranks.raise_everywhere(self.problem)
        tokens = sum(micro_batch.count_tokens() for micro_batch in self.micro_batches)
        self.tokens = tokens * self.ranks.layout.counts_items
        if self.rows.is_stream:
            self.lanes = self.last_of_lanes()
        return self.micro_batches, facts

    def should_stop(self) -> bool:
        """Return whether a process was asked to stop before it fetched the next step, if any."""
        facts = self.wait()
        return bool(facts and facts.stop)

    def all_lanes(self) -> list[int] | None:
        """Return the last sample of each lane of a stream, of all processes; None without lanes."""
        if not self.rows.is_stream:
            return None
        last: dict[int, int] = {}
        for lanes in self.ranks.gather(self.lanes):
            last |= lanes
        return [last[lane] for lane in sorted(last)]

    def last_of_lanes(self) -> dict[int, int]:
        """Return the last sample of each lane of a stream in the step, of those read here."""
        last = {}
        share = self.plan.samples // self.rows.dataset.lanes
        for micro_batch in self.micro_batches:
            places = self.plan.positions(range(1, self.plan.samples + 1), micro_batch.number)
            pairs = zip(places, micro_batch.ids.tolist(), strict=True)
            last |= {end // share: sample for end, sample in pairs if end % share == 0}
        return last


def make_loader(
    rows: SampleDataset, sampler: StepBatchSampler | EvaluationSampler, task: Any,
    num_workers: int | None, device: torch.device,
) -> DataLoader:  # fmt: skip
    """Make a DataLoader of micro-batches of the task."""
    workers = count_workers(num_workers, task, device)
    if rows.is_stream and isinstance(sampler, StepBatchSampler):
        # So that a lane is always read by the same worker.
        while workers and len(sampler.plan.run()) % workers:
            workers -= 1
    return DataLoader(
        rows,
        batch_sampler=sampler,
        collate_fn=functools.partial(collate, task),
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=device.type == "cuda",
        worker_init_fn=ignore_signals,
        # Or DataLoader advances the global generator, and changes dropout: pytorch/pytorch#122697.
        generator=torch.Generator(),
    )


def count_workers(chosen: int | None, task: Any, device: torch.device) -> int:
    """Return the loading processes of a training process: `chosen`, or what suits the task.

    They pay where a GPU would wait for rows that take work, as images that are augmented do.
    """
    if chosen is not None:
        return chosen
    if device.type != "cuda" or not hasattr(task, "augment"):
        return 0
    return min(cores_per_process() - 1, 4)


def iterate(loader: DataLoader) -> Iterator[MicroBatch]:
    """Start to iterate over batches. A signal does not end the worker processes of this."""
    with signals_blocked():
        return iter(loader)
