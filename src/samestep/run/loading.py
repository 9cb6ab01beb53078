"""The data of train.py's loop: what streams, the speed meter and scores add to core's loaders."""

from collections.abc import Iterator
from typing import Any

import torch

from samestep.base.errors import as_user_error
from samestep.contract import contract
from samestep.run.run import Run
from samestep.step import loader
from samestep.step.inputs import Batch
from samestep.step.loader import MicroBatch
from samestep.step.outputs import EvaluationOutputs
from samestep.step.sums import EvaluationSums


class TrainLoader(loader.StepLoader):
    """Gives the steps of a run, and fetches the next one while the device computes."""

    def __init__(self, run: Run):
        self.run = run
        steps = run.last_step - run.first_step
        super().__init__(
            run.train_rows(), run.task, run.plan, run.ranks, run.stop.requested, run.first_sample,
            steps, run.cfg.num_workers, run.accelerator.device,
        )  # fmt: skip

    def read(self) -> list[MicroBatch]:
        """This process's micro-batches of the next step; raises an error of the background."""
        if self.run.problem:
            raise self.run.problem
        with self.run.meter.waiting():
            return super().read()

    def next_step(self) -> tuple[list[tuple[int, Batch]], int]:  # type: ignore[override]
        """This process's micro-batches of the step that was fetched, each with its number in the
        step, and the step's number of items in the loss over all processes."""
        window, facts = super().next_step()
        if self.rows.is_stream:
            self.run.lanes = self.last_of_lanes(window)
        inputs = [each.batch.get("input_ids") for each in window]
        tokens = sum(each.numel() for each in inputs if torch.is_tensor(each))
        tokens *= self.ranks.layout.leads
        self.run.meter.add(facts.num_items, facts.ids_hash, tokens)
        return [(each.number, each.batch) for each in window], facts.num_items

    def last_of_lanes(self, window: list[MicroBatch]) -> dict[int, int]:
        """Of a stream: the sample with which each lane ends in the step, by lane, on the process
        that has read it."""
        found = {}
        share = self.plan.samples // self.rows.dataset.lanes
        for each in window:
            places = self.plan.positions(range(1, self.plan.samples + 1), each.number)
            pairs = zip(places, each.ids.tolist(), strict=True)
            found |= {end // share: sample for end, sample in pairs if end % share == 0}
        return found


class EvalLoader(loader.EvalLoader):
    """Gives the batches of an evaluation, and its scores."""

    def __init__(self, run: Run, data: Any):
        self.run, workers = run, run.cfg.num_workers
        super().__init__(data, run.task, run.plan, run.ranks, workers, run.accelerator)
        self.outputs = EvaluationOutputs(run.ranks)  # if the task has them

    def batches(self, model: torch.nn.Module) -> Iterator[Batch]:  # type: ignore[override]
        """The batches of this process on its device, until the run is asked to stop."""
        self.totals = EvaluationSums(self.sampler, self.accelerator.device)
        with self.run.meter.paused():
            yield from super().batches(model, self.run.stop.requested)

    def add_sums(self, sums: Batch) -> None:
        """Adds what the task's eval_sums returns for a batch."""
        self.totals.add(sums)

    def keep_outputs(self, model: torch.nn.Module, batch: Batch) -> None:
        """Keeps what the task's eval_outputs returns for a batch, if the task has it."""
        if hasattr(self.run.task, "eval_outputs"):
            self.outputs.add(model(self.run.task.eval_outputs, batch), self.ids)
            self.problem = self.outputs.problem

    def score(self) -> tuple[dict[str, float], Batch] | tuple[None, None]:
        """The scores of an evaluation, and the task's sums over all rows; None and None if it was
        stopped. Outputs are on the main process alone, which then computes the scores."""
        if self.stopped:
            return None, None
        task, ranks, sums = self.run.task, self.ranks, self.totals.total(self.ranks)
        if not hasattr(task, "eval_outputs"):
            with as_user_error():
                return contract.score(task, sums, self.rows.sources)
        outputs, found = self.outputs.gather(len(self.rows)), None
        with ranks.fail_together():
            if outputs is not None:
                found = contract.score(task, sums, self.rows.sources, outputs)
        return ranks.from_main(found)
