"""Adds up the sums of an evaluation over all batches."""

import math

import torch

from samestep.base.errors import UserError
from samestep.core.batches import StepPlan
from samestep.core.exact import TreeSum, exchange
from samestep.core.ranks import Ranks


class EvaluationSums:
    """Sums a task's eval_sums over the batches of each source, in float64."""

    def __init__(self, plans: list[StepPlan], device: torch.device):
        self.plans, self.trees = plans, [TreeSum() for _ in plans]
        pairs = zip(self.trees, plans, strict=True)
        self.places = ((tree, number) for tree, plan in pairs for number in plan.run())
        # Apple's GPUs have no float64.
        self.device = torch.device("cpu") if device.type == "mps" else device
        self.layouts: list[dict[str, tuple]] = []  # names and shapes; those of all batches agree

    def add(self, sums: dict[str, torch.Tensor]) -> None:
        """Adds the sums of the next batch; one past those of this rank only shows the shapes."""
        sums = dict(sorted(sums.items()))
        layout = {name: tuple(value.shape) for name, value in sums.items()}
        if layout not in self.layouts:
            self.layouts.append(layout)
        values = [value.to(self.device).double().reshape(-1) for value in sums.values()]
        self.values = torch.cat(values)
        tree, number = next(self.places, (None, 0))
        if tree and len(self.layouts) == 1:
            tree.add(number, [self.values])

    def total(self, ranks: Ranks) -> list[dict[str, torch.Tensor]]:
        """The sums of each source over all processes, in CPU memory; all processes must call it.

        Raises UserError if batches differ in the names or shapes of their sums.
        """
        first, *others = (each for layouts in ranks.gather(self.layouts) for each in layouts)
        for other in [each for each in others if each != first]:
            raise UserError(
                f"task.eval_sums returns tensors {first} for one batch, and {other} for another; "
                "return the same for all"
            )
        totals = []
        for plan, tree in zip(self.plans, self.trees, strict=True):
            nodes = [sums for _, _, (sums,) in tree.nodes]
            total = nodes[-1] if nodes else torch.zeros_like(self.values)
            runs = [plan.run(rank) for rank in range(len(plan.shares))]
            if len(runs) > 1 and ranks.layout.replica_size == 1:
                for _ in exchange(total, nodes, runs):
                    pass
            elif nodes:
                (total,) = tree.total()
            if (
                ranks.layout.replica_size > 1
            ):  # each has the sums of its parts of the rows, or zeros
                adds = ranks.layout.adds
                total = torch.from_numpy(ranks.sum_arrays(total.cpu().numpy() * adds))
            parts = total.cpu().split([math.prod(shape) for shape in first.values()])
            named = zip(first.items(), parts, strict=True)
            totals.append({name: part.view(shape) for (name, shape), part in named})
        return totals
