"""The micro-batches of the steps, fetched one step ahead, and the batches of an evaluation."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader

from samestep.base.errors import catch
from samestep.base.signals import ignore_signals, signals_blocked
from samestep.base.workers import cores_per_process
from samestep.processes import sharding
from samestep.processes.ranks import PendingSum, Ranks
from samestep.step import seeds
from samestep.step.inputs import Batch
from samestep.step.model import eager, keep_modes
from samestep.step.plan import StepPlan
from samestep.step.samples import EvaluationSampler, SampleDataset, StepBatchSampler, collate


class MicroBatch(NamedTuple):
    number: int  # in its step, from 0
    batch: Any
    num_items: int  # in the loss
    ids_hash: int  # of its sample ids
    ids: np.ndarray  # of its samples


class _StepFacts(NamedTuple):
    """What all processes must know before a step, as sums over them."""

    num_items: int  # in the loss of the step
    ids_hash: int  # of its sample ids
    stop: int  # processes that were asked to stop


class StepLoader:
    """Gives the steps of a run, and fetches the next one while the device computes.

    `first`: the position in the run where the first of `steps` steps begins. `requested()` is 1 if
    this process was asked to stop.
    """

    def __init__(
        self, rows: SampleDataset, task: Any, plan: StepPlan, ranks: Ranks,
        requested: Callable[[], int], first: int, steps: int, workers: int | None,
        device: torch.device,
    ):  # fmt: skip
        self.rows, self.plan, self.ranks, self.requested = rows, plan, ranks, requested
        sampler = StepBatchSampler(plan, first, first + steps * plan.samples, rows.sort)
        self.batches = iterate(make_loader(rows, sampler, task, workers, device))
        self.left = steps  # to fetch
        self.window: list[MicroBatch] = []  # this process's part of the next step
        self.pending: PendingSum | None = None  # its _StepFacts

    def prefetch(self) -> None:
        """Fetches the next step, if there is one, and starts the communication about it."""
        if not self.left:
            return
        self.left -= 1
        window, problem = catch(self.read)
        self.window = window or []
        counted = self.window if self.ranks.layout.leads else []  # a replica counts once
        num_items = sum(each.num_items for each in counted)
        ids_hash = int(np.sum([each.ids_hash for each in counted], dtype=np.int64))
        facts = _StepFacts(num_items, ids_hash, self.requested())
        self.pending = PendingSum(self.ranks, facts, problem)

    def read(self) -> list[MicroBatch]:
        """This process's micro-batches of the next step."""
        window = []
        for number in self.plan.run():
            batch, (num_items, ids_hash), ids = next(self.batches)
            window.append(MicroBatch(number, batch, num_items, ids_hash, ids))
        return window

    def next_step(self) -> tuple[list[MicroBatch], _StepFacts]:
        """This process's micro-batches of the step that was fetched, and the facts about it.

        If a process could not fetch its micro-batches, all of them raise its error.
        """
        assert self.pending
        pending, self.pending = self.pending, None
        return self.window, _StepFacts(*pending.result())

    def should_stop(self) -> bool:
        """Whether a process was asked to stop before it fetched the next step, if there is one."""
        return bool(self.pending and _StepFacts(*self.pending.wait()).stop)


class EvalLoader:
    """Gives the batches of an evaluation: each row once, over all processes."""

    def __init__(
        self, data: Any, task: Any, plan: StepPlan, ranks: Ranks, workers: int | None,
        accelerator: Accelerator,
    ):  # fmt: skip
        self.rows, self.ranks, self.accelerator = SampleDataset(data, task), ranks, accelerator
        self.sampler = EvaluationSampler(plan, self.rows)
        self.loader = make_loader(self.rows, self.sampler, task, workers, accelerator.device)
        self.stopped = False
        self.ids = np.empty(0)  # the rows of the batch, by number
        self.problem: Exception | None = None  # of a batch, which all processes must raise

    def batches(
        self, model: torch.nn.Module, requested: Callable[[], int] = lambda: 0
    ) -> Iterator[Batch]:
        """The batches of this process on its device, as many as of every other.

        It ends, with `stopped` set, as soon as `requested()` is 1 on any process. The model
        computes in eval mode, without its compiled code.
        """
        iterator = iterate(self.loader)
        with keep_modes(model), eager(model):
            model.eval()
            sharding.share_buffers(model, self.ranks.layout.fsdp)
            for _ in range(len(self.loader)):
                fetched, problem = catch(next, iterator)
                problem = problem or self.problem
                (stop,) = self.ranks.sum_over_ranks(requested(), problem=problem)
                self.stopped = bool(stop)
                if stop:
                    break
                batch, (_, ids_hash), self.ids = fetched
                batch = send_to_device(batch, self.accelerator.device, non_blocking=True)
                # A model that draws noise: by the rows of the batch, whoever evaluates them.
                seeds.seed_micro_batch(0, 1, ids_hash)
                with sharding.split_rows(self.accelerator, batch):
                    yield batch


def make_loader(
    rows: SampleDataset,
    sampler: StepBatchSampler | EvaluationSampler,
    task: Any,
    num_workers: int | None,
    device: torch.device,
) -> DataLoader:
    """A DataLoader of the task's batches; for what comes with each see `collate`."""
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
        # Otherwise DataLoader advances the global generator, and changes dropout.
        generator=torch.Generator(),
    )


def count_workers(chosen: int | None, task: Any, device: torch.device) -> int:
    """Loading processes for each training process: `chosen`, or what suits the task.

    They pay where a GPU would wait for rows that take work, as images that are augmented do.
    """
    if chosen is not None:
        return chosen
    if device.type != "cuda" or not hasattr(task, "augment"):
        return 0
    return min(cores_per_process() - 1, 4)


def iterate(loader: DataLoader) -> Iterator[tuple[Batch, tuple[int, int], np.ndarray]]:
    """Its batches. A signal does not end the worker processes that it starts."""
    with signals_blocked():
        return iter(loader)
