"""Reads the losses and norms of steps, and counts those that were skipped.

Numbers stay on the device until a line of metrics is due, so that other steps do not wait for it.
"""

import math
from itertools import islice
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from samestep.processes.ranks import Ranks
from samestep.step.plan import StepPlan


class StepMonitor:
    """Collects the steps between two lines of metrics: see step.Step."""

    def __init__(
        self, accelerator: Accelerator, ranks: Ranks, plan: StepPlan, max_skipped_steps: int
    ):
        self.accelerator, self.ranks, self.plan = accelerator, ranks, plan
        self.max_skipped_steps = max_skipped_steps
        self.steps: list[Any] = []  # since the last line, whose weights are updated
        self.skipped = 0  # steps skipped in a row
        self.scale = self.loss_scale()  # at the last line

    def read_losses(self, *more: Any) -> None:
        """Read the summed loss of these steps, and of more; all processes wait for the device."""
        steps = [step for step in (*self.steps, *more) if step.total is None]
        if not steps:
            return
        values = iter(_read([loss for step in steps for loss in step.losses]))
        table = np.zeros((len(steps), self.plan.count))  # (steps, V); 0: of another process
        for row, step in zip(table, steps, strict=True):
            row[list(self.plan.run())] = list(islice(values, len(step.losses)))
        table = self.ranks.sum_arrays(table * self.ranks.layout.counts_losses)
        # In the order of the micro-batches; `sum` compensates rounding from Python 3.12 on.
        for step, total in zip(steps, table.cumsum(axis=1)[:, -1].tolist(), strict=True):
            step.total = total

    def read(self) -> tuple[dict[str, Any], list[dict], str]:
        """Return (numbers, notes, reason to stop) since the last line.

        The numbers are the mean `loss` over the `items` in the loss of steps with a finite loss,
        NaN without any; `grad_norm` of the last step; and of several steps the `worst`: the number,
        loss and norm of that with the largest loss. A note holds a skipped step and its numbers.
        The reason is empty unless the run should stop. All processes wait, and get the same.
        """
        self.read_losses()
        steps, self.steps = self.steps, []
        norms = _read([step.norm for step in steps])
        notes: list[dict] = []
        reason, total, total_items = "", 0.0, 0
        worst: dict[str, Any] = {"loss": -math.inf}
        before, self.scale = self.scale, self.loss_scale()
        # fp16's scale is tried now and then. At 1 or below the gradients themselves are not finite.
        lowered = 1 < self.scale < before
        for step, norm in zip(steps, norms, strict=True):
            number, num_items, loss = step.number, step.items, step.total
            if math.isfinite(loss):
                total, total_items = total + loss, total_items + num_items
            if num_items and math.isfinite(loss + norm):
                self.skipped = 0
                if loss / num_items > worst["loss"]:
                    worst = {"step": number, "loss": loss / num_items, "grad_norm": norm}
            elif not (num_items and math.isfinite(loss) and lowered):
                numbers = {"skipped_loss": loss / max(num_items, 1), "skipped_norm": norm}
                numbers["items"] = num_items
                what = "loss or gradient was not finite" if num_items else "no item is in the loss"
                notes.append({"step": number, "event": "skipped", **numbers})
                self.skipped += 1
                if self.skipped == self.max_skipped_steps:
                    reason = (
                        f"{what} in {self.skipped} steps in a row, up to step {number}; these "
                        "steps did not change the weights. metrics.jsonl names their samples: "
                        "check the data, or continue with accept_changes and another learning rate"
                    )
        mean = total / total_items if total_items else math.nan
        numbers = {"loss": mean, "items": total_items, "grad_norm": norm}
        if len(steps) > 1 and "step" in worst:
            numbers["worst"] = worst
        return numbers, notes, reason

    def loss_scale(self) -> float:
        """Return the factor of fp16's losses, against gradients that round to 0; else 1."""
        return self.accelerator.scaler.get_scale() if self.accelerator.scaler else 1.0


def _read(scalars: list[torch.Tensor]) -> list[float]:
    """Read scalars on the device, for which it waits once."""
    if not scalars:
        return []
    device = scalars[-1].device  # with offload some norms are on the CPU
    return torch.stack([scalar.float().to(device) for scalar in scalars]).tolist()
