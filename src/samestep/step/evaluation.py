"""An evaluation: each row counts exactly once, over all processes."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device

from samestep.base.errors import as_user_error, catch
from samestep.processes import sharding
from samestep.step import context_parallel, inputs, trial
from samestep.step.inputs import Batch
from samestep.step.loader import iterate, make_loader
from samestep.step.model import eager, keep_modes
from samestep.step.outputs import EvaluationOutputs
from samestep.step.plan import StepPlan
from samestep.step.samples import EvaluationSampler, SampleDataset
from samestep.step.seeds import EVALUATION, seed_micro_batch
from samestep.step.sums import EvaluationSums


class Evaluation:
    """The batches of an evaluation, and the sums and outputs of its rows.

    for batch in evaluation:
        evaluation.add(lambda: eval_sums(model, batch))
    sums = evaluation.sums()

    Under micro_batch_size auto it begins again, with half the rows in a batch, where the functions
    that it gets run out of memory.

    run: the Training. rows: a dataset. task: has collate.
    """

    def __init__(self, run: Any, rows: Any, task: Any):
        self.run, self.rows, self.task = run, SampleDataset(rows, task), task
        self.ranks, self.accelerator = run.ranks, run.accelerator
        self.cut(run.plan)

    def cut(self, plan: StepPlan) -> None:
        """Cut the rows into batches of the plan's micro_batch_size."""
        self.sampler, device = EvaluationSampler(plan, self.rows), self.accelerator.device
        given = self.rows, self.sampler, self.task, self.run.num_workers, device
        self.loader = make_loader(*given)

    def start(self, requested: Callable[[], int]) -> "Evaluation":
        """Start to count anew, with the model of the run that is exported.

        requested(): 1 if this process was asked to stop.
        """
        self.model, self.requested = self.run.exported, requested
        self.totals = EvaluationSums(self.sampler, self.accelerator.device)
        self.outputs = EvaluationOutputs(self.ranks)
        self.ids = np.empty(0)  # (B,) the rows of the batch, by number
        return self

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of this process on its device, as many as on every other.

        The model computes in eval mode, without its compiled code. What is drawn after the last
        batch is what would be drawn without an evaluation.
        """
        memory = self.run.memory
        if memory:
            memory.start(f"the evaluation after step {self.run.step}")
        yield from self.give_all()
        if memory and memory.ask()[0]:
            size = self.sampler.size // 2
            if not size:
                memory.use(0)
            self.cut(dataclasses.replace(self.run.plan, micro_batch_size=size))
            yield from self.start(self.requested)
        if memory:
            memory.start("")

    def give_all(self) -> Iterator[Batch]:
        """Give all batches, or those until memory runs out on a process."""
        iterator, stop, memory = iterate(self.loader), 0, self.run.memory
        states = trial.random_states(self.accelerator.device)
        with self.run.meter.paused(), keep_modes(self.model), eager(self.model):
            self.model.eval()
            sharding.share_buffers(self.model, self.ranks.layout.fsdp)
            for _ in range(len(self.loader)):
                fetched, problem = catch(next, iterator)
                problem = problem or self.outputs.problem
                is_out = int(bool(memory and memory.is_out))
                stop, out = self.ranks.sum_over_ranks(self.requested(), is_out, problem=problem)
                if stop or out:
                    break
                batch, _, ids_hash, self.ids, *_ = fetched
                with self.run.attempt((batch, self.ids)):
                    batch = send_to_device(batch, self.accelerator.device, non_blocking=True)
                    seed_micro_batch(0, ids_hash, EVALUATION)  # whoever evaluates these rows
                    with context_parallel.split_rows(self.accelerator, batch):
                        yield batch
        trial.set_random_states(self.accelerator.device, states)
        if self.ranks.layout.fsdp:  # the weights of the outermost module are still whole
            sharding.reshard(self.model)
        if stop:
            self.run.end_stopped()

    def add(self, sums: Batch | Callable[[], Batch]) -> None:
        """Add the sums of a batch over its rows, or those that a function computes."""
        with self.run.attempt():
            computed = sums() if callable(sums) else sums
            with as_user_error():
                inputs.check_sums(computed)
            self.totals.add(computed)

    def keep(self, outputs: Batch | Callable[[], Batch]) -> None:
        """Keep the outputs of a batch, each (B, ...), or those that a function computes."""
        with self.run.attempt():
            self.outputs.add(outputs() if callable(outputs) else outputs, self.ids)

    def sums(self) -> list[dict[str, torch.Tensor]]:
        """Return the sums over all rows of each source, float64; all processes must call it."""
        return self.totals.total(self.ranks)

    def gathered(self) -> Batch | None:
        """Return the outputs of all rows in their order, (rows, ...), on the main process;
        elsewhere None. All processes must call it."""
        return self.outputs.gather(len(self.rows))
