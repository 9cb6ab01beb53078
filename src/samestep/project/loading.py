"""The data of the loop: micro-batches of the training steps, and batches of evaluations."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import send_to_device

from samestep.base.errors import as_user_error, catch
from samestep.core import batches, sharding
from samestep.core.batches import Batch, EvaluationSampler, SampleDataset, StepBatchSampler
from samestep.core.outputs import EvaluationOutputs
from samestep.core.ranks import PendingSum
from samestep.core.sums import EvaluationSums
from samestep.project import contract, device
from samestep.project.run import Run


class Agreed(NamedTuple):
    """What all processes must know before a step, as sums over them."""

    num_items: int  # in the loss of the step
    ids_hash: int  # of its sample ids
    stop: int  # processes that were asked to stop


class TrainLoader:
    """Gives the steps of a run, and fetches the next one while the device computes.

    The processes communicate what all must know before a step, and errors.
    """

    def __init__(self, run: Run):
        self.run, self.rows = run, run.train_rows()
        end = run.samples(run.last_step)
        sampler = StepBatchSampler(run.plan, run.first_sample, end, self.rows.sort)
        options = run.cfg.num_workers, run.accelerator.device
        loader = batches.make_loader(self.rows, sampler, run.task, *options)
        self.batches = batches.iterate(loader)
        self.left = run.last_step - run.first_step  # steps to fetch
        self.window: list[tuple] = []  # this process's part of the next step
        self.pending: PendingSum | None = None  # its `Agreed`

    def prefetch(self) -> None:
        """Fetches the next step, if there is one, and starts the communication about it."""
        if not self.left:
            return
        self.left -= 1
        with self.run.meter.waiting():
            window, problem = catch(self.read_window)
            self.window = window or []
            counts = np.sum([numbers for _, numbers, _ in self.window] or [(0, 0)], axis=0)
            counts *= self.run.ranks.layout.leads  # its replica counts once
            num_items, ids_hash = counts
            own = Agreed(num_items, ids_hash, self.run.stop.requested())
            self.pending = PendingSum(self.run.ranks, own, problem or self.run.problem)

    def read_window(self) -> list[tuple]:
        """This process's micro-batches of the next step."""
        return [next(self.batches) for _ in self.run.plan.run()]

    def next_step(self) -> tuple[list[tuple[int, Batch]], int]:
        """This process's micro-batches of the step that was fetched, each with its number in the
        step, and the step's number of items in the loss over all processes.

        If a process could not fetch its micro-batches, all of them raise its error.
        """
        pending, self.pending = self.pending, None
        agreed = Agreed(*pending.result())
        window = [batch for batch, *_ in self.window]
        if self.rows.is_stream:
            self.run.lanes = self.last_of_lanes()
        inputs = [each.get("input_ids") for each in window if isinstance(each, dict)]
        tokens = sum(each.numel() for each in inputs if each is not None)
        tokens *= self.run.ranks.layout.leads
        self.run.meter.add(agreed.num_items, agreed.ids_hash, tokens)
        return list(zip(self.run.plan.run(), window, strict=True)), agreed.num_items

    def last_of_lanes(self) -> dict[int, tuple[int, int]]:
        """Of each lane of a stream that this process has read: the last sample of the step, as its
        place in the step and its id."""
        found = {}
        plan = self.run.plan
        share = plan.samples // self.rows.dataset.lanes
        for number, (*_, ids) in zip(plan.run(), self.window, strict=True):
            places = plan.positions(range(plan.samples), number)
            for place, sample in zip(places, ids.tolist(), strict=True):
                found[place // share] = (place, sample)
        return found

    def should_stop(self) -> bool:
        """Whether a process was asked to stop before it fetched the next step, if there is one."""
        return bool(self.pending and Agreed(*self.pending.peek()).stop)


class EvalLoader:
    """Gives the batches of an evaluation."""

    def __init__(self, run: Run, data: Any):
        self.run, self.rows = run, SampleDataset(data, run.task)
        self.sampler = EvaluationSampler(run.plan, self.rows)
        self.loader = batches.make_loader(
            self.rows, self.sampler, run.task, run.cfg.num_workers, run.accelerator.device
        )
        self.stopped = False
        self.outputs: EvaluationOutputs | None = None  # of the evaluation, if the task has them
        self.ids = np.empty(0)  # the rows of the batch, by number

    def batches(self, model: torch.nn.Module, requested: Callable[[], int]) -> Iterator[Batch]:
        """The batches of this process on its device, as many as of every other.

        It ends, with `stopped` set, as soon as `requested()` is 1 on any process. The model
        computes without its compiled code.
        """
        run, iterator = self.run, batches.iterate(self.loader)
        if hasattr(run.task, "eval_outputs"):
            self.outputs = EvaluationOutputs(run.ranks)
        model.eval()
        sharding.share_buffers(model, run.ranks.layout.fsdp)
        for _ in range(len(self.loader)):
            fetched, problem = catch(next, iterator)
            if self.outputs:
                problem = problem or self.outputs.problem
            (stop,) = run.ranks.sum_over_ranks(requested(), problem=problem)
            self.stopped = bool(stop)
            if stop:
                break
            self.ids = fetched[2]
            batch = send_to_device(fetched[0], run.accelerator.device, non_blocking=True)
            # A model that draws noise: by the rows of the batch, whoever evaluates them.
            batches.seed_micro_batch(0, 1, fetched[1][1])
            with device.eager(model), sharding.split_rows(run.accelerator, batch):
                yield batch
        model.train()

    def keep_outputs(self, model: torch.nn.Module, batch: Batch) -> None:
        """Keeps what the task's eval_outputs returns for a batch, if the task has it."""
        if self.outputs:
            self.outputs.add(model(self.run.task.eval_outputs, batch), self.ids)

    def score(self, totals: EvaluationSums) -> tuple[dict[str, float], Batch]:
        """The scores of an evaluation, and the task's sums over all rows.

        Outputs are on the main process alone, which then computes the scores.
        """
        task, ranks, sums = self.run.task, self.run.ranks, totals.total(self.run.ranks)
        if not self.outputs:
            with as_user_error():
                return contract.score(task, sums, self.rows.sources)
        outputs, self.outputs, found = self.outputs.gather(len(self.rows)), None, None
        with ranks.fail_together():
            if outputs is not None:
                found = contract.score(task, sums, self.rows.sources, outputs)
        return ranks.from_main(found)
