"""Adds up the sums of an evaluation over all batches."""

import math

import torch

from samestep.base.errors import UserError
from samestep.processes.ranks import Ranks
from samestep.step.exact import TreeSum, exchange
from samestep.step.samples import EvaluationSampler


class EvaluationSums:
    """Sums a task's eval_sums over all batches, in float64.

    The batches of all sources are numbered through, and added up one tree. Each adds a row for each
    source: its own sums in that of its source, and zeros.
    """

    def __init__(self, sampler: EvaluationSampler, device: torch.device):
        self.plan, self.sources = sampler.plan, len(sampler.counts)
        self.tree, self.places = TreeSum(), sampler.places()
        # Apple's GPUs have no float64.
        self.device = torch.device("cpu") if device.type == "mps" else device
        self.layouts: list[dict[str, tuple]] = []  # names and shapes; those of all batches agree

    def add(self, sums: dict[str, torch.Tensor]) -> None:
        """Add the sums of the next batch; one past those of this rank only shows the shapes."""
        sums = dict(sorted(sums.items()))
        layout = {name: tuple(value.shape) for name, value in sums.items()}
        if layout not in self.layouts:
            self.layouts.append(layout)
        values = torch.cat([value.to(self.device).double().flatten() for value in sums.values()])
        number, source = next(self.places, (-1, 0))
        self.zeros = values.new_zeros(self.sources, len(values))  # float64
        if number >= 0 and len(self.layouts) == 1:
            rows = self.zeros.clone()
            rows[source] = values
            self.tree.add(number, [rows.flatten()])

    def total(self, ranks: Ranks) -> list[dict[str, torch.Tensor]]:
        """Return the sums of each source, in CPU memory; all processes must call it together.

        Raises UserError if batches differ in the names or shapes of their sums.
        """
        layouts = self.layouts
        if ranks.differ(repr(layouts)):
            layouts = [layout for gathered in ranks.gather(layouts) for layout in gathered]
        first, *rest = layouts
        for other in [layout for layout in rest if layout != first]:
            raise UserError(
                f"task.eval_sums returns tensors {first} for one batch, and {other} for another; "
                "return the same for all"
            )
        nodes = [sums for _, _, (sums,) in self.tree.nodes]
        total = nodes[-1] if nodes else self.zeros.flatten()
        runs = [self.plan.run(rank) for rank in range(len(self.plan.shares))]
        if len(runs) > 1 and ranks.layout.replica_size == 1:
            exchange(total, nodes, runs)
        elif nodes:
            (total,) = self.tree.total()
        total = total.cpu()
        if ranks.layout.replica_size > 1:  # each has the sums of its parts of the rows, or zeros
            total = torch.from_numpy(ranks.sum_arrays(total.numpy() * ranks.layout.counts_losses))
        totals = []
        for source_sums in total.view(self.sources, -1):
            parts = source_sums.split([math.prod(shape) for shape in first.values()])
            named = zip(first.items(), parts, strict=True)
            totals.append({name: part.view(shape) for (name, shape), part in named})
        return totals
