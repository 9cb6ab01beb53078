"""An evaluation: each row counts exactly once, over all processes."""

import functools
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
from samestep.step.samples import EvaluationSampler, SampleDataset, collate
from samestep.step.seeds import EVALUATION, seed_micro_batch
from samestep.step.sums import EvaluationSums


class Evaluation:
    """The batches of an evaluation, and the sums and outputs of its rows.

    for batch in evaluation:
        evaluation.add(lambda: eval_sums(model, batch))
    sums = evaluation.sums()

    Under micro_batch_size auto a batch that does not fit is computed in halves, if functions are
    given.

    run: the Training. rows: a dataset. task: has collate.
    """

    def __init__(self, run: Any, rows: Any, task: Any):
        self.run, self.rows, self.task = run, SampleDataset(rows, task), task
        self.ranks, self.accelerator = run.ranks, run.accelerator
        self.sampler = EvaluationSampler(run.plan, self.rows)
        device = self.accelerator.device
        self.loader = make_loader(self.rows, self.sampler, task, run.num_workers, device)
        self.largest = len(self.rows)  # rows of a batch, less where they did not fit

    def start(self, requested: Callable[[], int]) -> "Evaluation":
        """Start to count anew, with the model of the run that is exported.

        requested(): 1 if this process was asked to stop.
        """
        self.model, self.requested = self.run.exported, requested
        self.totals = EvaluationSums(self.sampler, self.accelerator.device)
        self.outputs = EvaluationOutputs(self.ranks)
        self.ids = np.empty(0)  # (B,) the rows of the batch, by number
        self.results: list[tuple[Callable, Any]] = []  # of a batch, of auto
        self.parts: list[dict[str, torch.Tensor]] = []  # sums of its halves
        return self

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of this process on its device, as many as on every other.

        The model computes in eval mode, without its compiled code. What is drawn after the last
        batch is what would be drawn without an evaluation.
        """
        iterator, stop, give = iterate(self.loader), 0, self.give
        if self.run.memory:
            give = self.give_what_fits
        states = trial.random_states(self.accelerator.device)
        with self.run.meter.paused(), keep_modes(self.model), eager(self.model):
            self.model.eval()
            sharding.share_buffers(self.model, self.ranks.layout.fsdp)
            for positions in self.sampler:
                fetched, problem = catch(next, iterator)
                problem = problem or self.outputs.problem
                (stop,) = self.ranks.sum_over_ranks(self.requested(), problem=problem)
                if stop:
                    break
                yield from give(fetched, positions)
                if self.parts:
                    self.totals.add(functools.reduce(_add, self.parts))
                    self.parts = []
        if self.run.memory:
            self.ranks.raise_everywhere(self.outputs.problem)
        trial.set_random_states(self.accelerator.device, states)
        if self.ranks.layout.fsdp:  # the weights of the outermost module are still whole
            sharding.reshard(self.model)
        if stop:
            self.run.end_stopped()

    def give(self, fetched: tuple, positions: list[int]) -> Iterator[Batch]:
        """Give a batch, as `collate` has made it of the rows at these positions."""
        batch, (_, ids_hash), self.ids = fetched
        batch = send_to_device(batch, self.accelerator.device, non_blocking=True)
        seed_micro_batch(0, ids_hash, EVALUATION)  # whoever evaluates these rows
        with context_parallel.split_rows(self.accelerator, batch):
            yield batch

    def give_what_fits(self, fetched: tuple, positions: list[int]) -> Iterator[Batch]:
        """Give a batch, or its halves where it does not fit into the memory of this process."""
        self.results = []
        if len(positions) <= self.largest:
            memory = self.run.memory
            memory.start(f"the evaluation after step {self.run.step}")
            with memory.attempt_batch(fetched[0], fetched[2]):
                yield from self.give(fetched, positions)
            if not memory.is_out:
                for use, result in self.results:
                    use(result)
                return
            self.largest = len(positions) // 2
        if len(positions) == 1:
            self.outputs.problem = self.outputs.problem or memory.row_does_not_fit()
            return
        middle = -(-len(positions) // 2)
        for part in (positions[:middle], positions[middle:]):
            collated = collate(self.task, self.rows.__getitems__(part))
            yield from self.give_what_fits(collated, part)

    def add(self, sums: Batch | Callable[[], Batch]) -> None:
        """Add the sums of a batch over its rows, or those that a function computes."""
        self.take(self.add_now, sums)

    def add_now(self, sums: dict[str, torch.Tensor]) -> None:
        with as_user_error():
            inputs.check_sums(sums)
        if self.run.memory:
            self.parts.append(sums)
        else:
            self.totals.add(sums)

    def keep(self, outputs: Batch | Callable[[], Batch]) -> None:
        """Keep the outputs of a batch, each (B, ...), or those that a function computes."""
        self.take(lambda values: self.outputs.add(values, self.ids), outputs)

    def take(self, use: Callable[[Any], None], given: Any) -> None:
        """Use what is given, or what it computes; under auto, once the batch is known to fit."""
        memory = self.run.memory
        if not memory:
            use(given() if callable(given) else given)
        elif not memory.is_out:
            with memory.attempt():
                self.results.append((use, given() if callable(given) else given))

    def sums(self) -> list[dict[str, torch.Tensor]]:
        """Return the sums over all rows of each source, float64; all processes must call it."""
        return self.totals.total(self.ranks)

    def gathered(self) -> Batch | None:
        """Return the outputs of all rows in their order, (rows, ...), on the main process;
        elsewhere None. All processes must call it."""
        return self.outputs.gather(len(self.rows))


def _add(one: Batch, other: Batch) -> Batch:
    return {name: value + other[name] for name, value in one.items()}
