"""Skips steps whose loss or gradient is not finite, and those without items in the loss.

Numbers stay on the device until a line of metrics is due, so that other steps do not wait for it.
"""

import math
from collections.abc import Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper

from samestep.processes.ranks import Ranks


def skip_unless_finite(
    optimizer: AcceleratedOptimizer, norm: torch.Tensor, num_items: int = 1
) -> None:
    """Makes the next optimizer.step() change nothing if the gradient's norm is not finite, or if no
    item was in the loss: weights would decay.

    PyTorch's fused optimizers check `found_inf` on the device. For others the CPU waits for the
    norm and removes the gradients, without which an optimizer changes neither weights nor moments.
    """
    if isinstance(optimizer, DeepSpeedOptimizerWrapper):  # it has skipped the step in `backward`
        return
    inner = optimizer.optimizer
    if not num_items:
        norm = norm * math.nan
    if not getattr(inner, "_step_supports_amp_scaling", False):
        if not norm.isfinite():
            inner.zero_grad(set_to_none=True)
    elif optimizer.scaler is None:
        inner.found_inf = (~norm.isfinite()).float()
    else:
        if not hasattr(inner, "_samestep_norm"):
            inner.register_step_pre_hook(_add_overflow)
        inner._samestep_norm = norm


def _add_overflow(inner: Any, *_: Any) -> None:
    """Adds the norm to the `found_inf` of fp16's scaler, which looks at single gradients only.

    The norm of finite gradients may overflow, and clipping would then make them zeros or NaN.
    """
    inner.found_inf = torch.maximum(inner.found_inf, (~inner._samestep_norm.isfinite()).float())


def read_steps(
    ranks: Ranks,
    micro_batches: int,  # in a step
    runs: Sequence[range],  # of each step: the numbers of those on this process
    losses: Sequence[list[torch.Tensor]],  # their summed losses
    norms: Sequence[torch.Tensor] = (),
) -> tuple[list[float], list[float]]:
    """The summed loss of each step over all processes, and the norms. Waits for the device; all
    processes call it."""
    scalars = [*norms, *chain(*losses)]
    device = scalars[-1].device  # with offload norms are on the CPU
    values = iter(torch.stack([each.float().to(device) for each in scalars]).tolist())
    read = list(islice(values, len(norms)))
    table = np.zeros((len(runs), micro_batches))  # zero: computed by another process
    for row, run, own in zip(table, runs, losses, strict=True):
        row[list(run)] = list(islice(values, len(own)))
    table = ranks.sum_arrays(table * ranks.layout.adds)
    # In the order of the micro-batches; `sum` compensates rounding from Python 3.12 on.
    return table.cumsum(axis=1)[:, -1].tolist(), read


class StepMonitor:
    """Collects losses and gradient norms between two lines of metrics."""

    def __init__(
        self, accelerator: Accelerator, ranks: Ranks, micro_batches: int, max_skipped_steps: int
    ):
        self.accelerator, self.ranks = accelerator, ranks
        self.micro_batches, self.max_skipped_steps = micro_batches, max_skipped_steps
        # Since the last line: step, items, micro-batches computed here, their losses, norm.
        self.steps: list[tuple[int, int, range, list[torch.Tensor], torch.Tensor]] = []
        self.skipped = 0  # steps skipped in a row
        self.scale = self.loss_scale()  # at the last line

    def add(
        self, step: int, num_items: int, run: range, losses: list[torch.Tensor], norm: torch.Tensor
    ) -> None:
        """Adds a step. `run` has the numbers of the micro-batches on this process, `losses` their
        summed losses; these and the norm are scalars on the device."""
        self.steps.append((step, num_items, run, losses, norm))

    def read(self) -> tuple[dict[str, Any], list[dict], str]:
        """(numbers, notes, reason to stop) since the last line.

        The numbers are the mean `loss` over the `items` in the loss of steps with a finite loss,
        NaN without any; `grad_norm` of the last step; and of several steps the `worst`: the number,
        loss and norm of that with the largest loss. A note holds a skipped step and its numbers.
        The reason is empty unless the run should stop. All processes call it and get the same; it
        waits for the device.
        """
        steps, counts, runs, losses, norms = zip(*self.steps, strict=True)
        self.steps = []
        sums, norms = read_steps(self.ranks, self.micro_batches, runs, losses, norms)
        notes: list[dict] = []
        reason, total, total_items = "", 0.0, 0
        worst: dict[str, Any] = {"loss": -math.inf}
        before, self.scale = self.scale, self.loss_scale()
        # fp16's scale is tried now and then. At 1 or below the gradients themselves are not finite.
        lowered = 1 < self.scale < before
        for step, num_items, loss, norm in zip(steps, counts, sums, norms, strict=True):
            if math.isfinite(loss):
                total, total_items = total + loss, total_items + num_items
            if num_items and math.isfinite(loss + norm):
                self.skipped = 0
                if loss / num_items > worst["loss"]:
                    worst = {"step": step, "loss": loss / num_items, "grad_norm": norm}
            elif not (num_items and math.isfinite(loss) and lowered):
                numbers = {"skipped_loss": loss / max(num_items, 1), "skipped_norm": norm}
                numbers["items"] = num_items
                what = "loss or gradient was not finite" if num_items else "no item is in the loss"
                notes.append({"step": step, "event": "skipped", **numbers})
                self.skipped += 1
                if self.skipped == self.max_skipped_steps:
                    reason = (
                        f"{what} in {self.skipped} steps in a row, up to step {step}; these steps "
                        "did not change the weights. metrics.jsonl names their samples: check the "
                        "data, or continue with accept_changes and another learning rate"
                    )
        mean = total / total_items if total_items else math.nan
        numbers = {"loss": mean, "items": total_items, "grad_norm": norm}
        if len(steps) > 1 and "step" in worst:
            numbers["worst"] = worst
        return numbers, notes, reason

    def loss_scale(self) -> float:
        """The factor of fp16's losses, which keeps small gradients from becoming 0; else 1."""
        return self.accelerator.scaler.get_scale() if self.accelerator.scaler else 1.0
