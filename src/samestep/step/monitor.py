"""Skips steps whose loss or gradient is not finite, and reports spikes.

Numbers stay on the device until a line of metrics is due, so that other steps do not wait for it.
"""

import math
from collections import deque
from collections.abc import Sequence
from itertools import chain, islice
from statistics import median
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from samestep.processes.device import NO_SKIP, torch_has
from samestep.processes.ranks import Ranks
from samestep.settings.mesh import this_layout

SPIKE = 10  # median absolute deviations above the median, about 7 sigma
MEMORY = 100  # number of recent losses in the median


def one_or_nan(loss: torch.Tensor) -> torch.Tensor:
    """1 if the loss is finite, else NaN: a factor that makes the gradients NaN, too.

    A process knows only its own loss. Through the gradients all processes see the NaN, and skip the
    step.
    """
    return 1 + 0 * loss.detach()


def skip_unless_finite(optimizer: AcceleratedOptimizer, norm: torch.Tensor) -> None:
    """Makes the next optimizer.step() change nothing if the gradient's norm is not finite.

    PyTorch's fused optimizers check `found_inf` on the device. For others the CPU waits for the
    norm and removes the gradients, without which an optimizer changes neither weights nor moments;
    also for fused ones that ignore `found_inf`.
    DeepSpeed has skipped the step by itself, in `backward`.
    """
    inner = optimizer.optimizer
    if this_layout().deepspeed:
        return
    ignored = norm.device.type == "mps" and torch_has(NO_SKIP)
    if ignored or not getattr(inner, "_step_supports_amp_scaling", False):
        if not norm.isfinite():
            inner.zero_grad(set_to_none=True)
    elif optimizer.scaler is None:
        inner.found_inf = (~norm.isfinite()).float()
    else:
        if not hasattr(inner, "norm"):
            inner.register_step_pre_hook(add_overflow)
        inner.norm = norm


def add_overflow(inner: Any, *_: Any) -> None:
    """Adds the norm to the `found_inf` of fp16's scaler, which looks at single gradients only.

    The norm of finite gradients may overflow, and clipping would then make them zeros or NaN. The
    scaler sets `found_inf` just before the step, so this runs as a hook of the step.
    """
    inner.found_inf = torch.maximum(inner.found_inf, (~inner.norm.isfinite()).float())


class StepMonitor:
    """Collects losses and gradient norms between two lines of metrics."""

    def __init__(
        self, accelerator: Accelerator, ranks: Ranks, micro_batches: int, max_skipped_steps: int
    ):
        self.accelerator, self.ranks = accelerator, ranks
        self.micro_batches, self.max_skipped_steps = micro_batches, max_skipped_steps
        # Since the last line: step, loss terms, micro-batches computed here, their losses, norm.
        self.steps: list[tuple[int, int, range, list[torch.Tensor], torch.Tensor]] = []
        self.recent = deque(maxlen=MEMORY)  # mean losses of recent steps
        self.skipped = 0  # steps skipped in a row
        self.scale = self.loss_scale()  # at the last line

    def add(
        self, step: int, terms: int, run: range, losses: list[torch.Tensor], norm: torch.Tensor
    ) -> None:
        """Adds a step: its loss terms, the summed losses of this process's micro-batches, its norm.

        `run` has the numbers of these micro-batches. Losses and norm are scalars on the device.
        """
        self.steps.append((step, terms, run, losses, norm))

    def read(self) -> tuple[float, float, list[dict], str]:
        """(mean loss, gradient norm of the last step, notes, reason to stop) since the last line.

        The mean is over the loss terms of the steps with a finite loss; NaN without any. A note
        holds an unusual step, the event ("skipped" or "spike") and its numbers. The reason is empty
        unless the run should stop. All processes call it and get the same; it waits for the device.
        """
        steps, counts, losses, norms = self.read_device()
        notes, reason, total, total_terms = [], "", 0.0, 0
        lowered = self.scale_was_lowered()
        for step, terms, loss, norm in zip(steps, counts, losses, norms, strict=True):
            if math.isfinite(loss):
                total, total_terms = total + loss, total_terms + terms
            if math.isfinite(loss + norm):
                notes += self.find_spike(step, loss / max(terms, 1))
                self.skipped = 0
            elif not (math.isfinite(loss) and lowered):
                numbers = {"skipped_loss": loss / max(terms, 1), "skipped_norm": norm}
                notes.append({"step": step, "event": "skipped", **numbers})
                self.skipped += 1
                if self.skipped == self.max_skipped_steps:
                    reason = (
                        f"loss or gradient was not finite in {self.skipped} steps in a row, up to "
                        f"step {step}; these steps did not change the weights. metrics.jsonl names "
                        "their samples: check the data, or continue with --accept_changes and "
                        "another learning_rate"
                    )
        return total / total_terms if total_terms else math.nan, norm, notes, reason

    def read_device(self) -> tuple[Sequence[int], Sequence[int], list[float], Sequence[float]]:
        """Numbers, loss terms, summed losses and norms of the steps; waits for the device.

        The losses of a step are added in the order of its micro-batches, whoever computed them.
        """
        steps, counts, runs, losses, norms = zip(*self.steps, strict=True)
        self.steps = []
        numbers = [*norms, *chain(*losses)]
        device = numbers[-1].device  # with offload norms are on the CPU
        values = iter(torch.stack([each.float().to(device) for each in numbers]).tolist())
        norms = list(islice(values, len(steps)))
        table = np.zeros((len(steps), self.micro_batches))  # zero: computed by another process
        for row, run, own in zip(table, runs, losses, strict=True):
            row[list(run)] = list(islice(values, len(own)))
        table *= self.ranks.layout.adds
        return steps, counts, [sum(row) for row in self.ranks.sum_arrays(table).tolist()], norms

    def loss_scale(self) -> float:
        """The factor of fp16's losses, which keeps small gradients from becoming 0; else 1."""
        return self.accelerator.scaler.get_scale() if self.accelerator.scaler else 1.0

    def scale_was_lowered(self) -> bool:
        """Whether fp16's loss scale was too large since the last line: now and then it is tried.

        With a scale of 1 or below, the gradients themselves are not finite.
        """
        before, self.scale = self.scale, self.loss_scale()
        return 1 < self.scale < before

    def find_spike(self, step: int, loss: float) -> list[dict]:
        """A note if the loss lies far above the median of recent losses, else none."""
        notes = []
        if len(self.recent) >= MEMORY // 4:
            middle = median(self.recent)
            spread = median(abs(value - middle) for value in self.recent)
            if loss - middle > max(SPIKE * spread, 0.05 * abs(middle)):
                notes = [
                    {"step": step, "event": "spike", "spike_loss": loss, "median_loss": middle}
                ]
        self.recent.append(loss)
        return notes
