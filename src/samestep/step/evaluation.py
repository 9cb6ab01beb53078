"""An evaluation: each row counts exactly once, over all processes."""

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
from samestep.step.samples import EvaluationSampler, SampleDataset
from samestep.step.seeds import EVALUATION, seed_micro_batch
from samestep.step.sums import EvaluationSums


class Evaluation:
    """The batches of an evaluation, and the sums and outputs of its rows.

    for batch in evaluation:
        evaluation.add(eval_sums(model, batch))
    sums = evaluation.sums()

    run: the Training. rows: a dataset. task: has collate.
    """

    def __init__(self, run: Any, rows: Any, task: Any):
        self.run, self.rows, self.task = run, SampleDataset(rows, task), task
        self.ranks, self.accelerator = run.ranks, run.accelerator
        self.sampler = EvaluationSampler(run.plan, self.rows)
        device = self.accelerator.device
        self.loader = make_loader(self.rows, self.sampler, task, run.num_workers, device)

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
        iterator, stop = iterate(self.loader), 0
        states = trial.random_states(self.accelerator.device)
        with self.run.meter.paused(), keep_modes(self.model), eager(self.model):
            self.model.eval()
            sharding.share_buffers(self.model, self.ranks.layout.fsdp)
            for _ in range(len(self.loader)):
                fetched, problem = catch(next, iterator)
                problem = problem or self.outputs.problem
                (stop,) = self.ranks.sum_over_ranks(self.requested(), problem=problem)
                if stop:
                    break
                batch, (_, ids_hash), self.ids = fetched
                batch = send_to_device(batch, self.accelerator.device, non_blocking=True)
                seed_micro_batch(0, ids_hash, EVALUATION)  # whoever evaluates these rows
                with context_parallel.split_rows(self.accelerator, batch):
                    yield batch
        trial.set_random_states(self.accelerator.device, states)
        if self.ranks.layout.fsdp:  # the weights of the outermost module are still whole
            sharding.reshard(self.model)
        if stop:
            self.run.end_stopped()

    def add(self, sums: dict[str, torch.Tensor]) -> None:
        """Add the sums of a batch over its rows."""
        with as_user_error():
            inputs.check_sums(sums)
        self.totals.add(sums)

    def keep(self, outputs: dict[str, torch.Tensor]) -> None:
        """Keep the outputs of a batch, each (B, ...)."""
        self.outputs.add(outputs, self.ids)

    def sums(self) -> list[dict[str, torch.Tensor]]:
        """Return the sums over all rows of each source, float64; all processes must call it."""
        return self.totals.total(self.ranks)

    def gathered(self) -> Batch | None:
        """Return the outputs of all rows in their order, (rows, ...), on the main process;
        elsewhere None. All processes must call it."""
        return self.outputs.gather(len(self.rows))
