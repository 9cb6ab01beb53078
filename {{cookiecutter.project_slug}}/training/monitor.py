"""Steps whose loss or gradient is not finite are skipped and reported; so are jumps of the loss.

Numbers stay on the device until a line of metrics is due, so that no other step waits for them.
"""

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterator
from statistics import median

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from training.weights import bare_model

SPIKE = 10  # deviations from the median, in medians of such deviations: about 7 sigma
MEMORY = 100  # losses that the median is taken of


def one_or_nan(loss: torch.Tensor) -> torch.Tensor:
    """1 for a finite loss, else NaN: a factor that makes the gradients of a bad loss NaN.

    Each process knows its own loss alone. All of them see the gradients, and skip the step.
    """
    return 1 + 0 * loss.detach()


def skip_unless_finite(optimizer: AcceleratedOptimizer, norm: torch.Tensor) -> None:
    """Makes the next optimizer.step() change nothing if the gradient's norm is not finite.

    Fused optimizers of PyTorch decide that on the device. For others the CPU waits for the norm and
    removes the gradients: without them an optimizer changes neither weights nor moments.
    """
    inner = optimizer.optimizer
    if getattr(inner, "_step_supports_amp_scaling", False):
        inner.found_inf = (~norm.isfinite()).float()
    elif not norm.isfinite():
        inner.zero_grad(set_to_none=True)


def check_finite(accelerator: Accelerator, model, optimizer: AcceleratedOptimizer) -> None:
    """Raises ValueError that names a weight or a moment that is not finite, or a buffer with NaN.

    Buffers may hold infinities on purpose, as masks do.
    """
    bare = bare_model(accelerator, model)
    good = {name: ~min_and_max(buffer).isnan().any() for name, buffer in bare.named_buffers()}
    for name, parameter in bare.named_parameters():
        good[name] = min_and_max(parameter.detach()).isfinite().all()
        for key, value in optimizer.state.get(parameter, {}).items():
            if torch.is_tensor(value):
                good[f"{key} of {name}"] = min_and_max(value).isfinite().all()
    if not torch.stack([each.to(accelerator.device) for each in good.values()]).all():
        name = next(name for name, each in good.items() if not each)
        raise ValueError(
            f"{name} is not finite, so nothing was saved; go on from the newest checkpoint with "
            "--accept_changes and another learning_rate, or look at the data"
        )


def min_and_max(values: torch.Tensor) -> torch.Tensor:
    """Smallest and largest value, (2,): NaN where one is. Far faster than isfinite().all()."""
    if values.is_complex():
        values = torch.view_as_real(values)
    if not values.is_floating_point() or not values.numel():
        return torch.zeros(2, device=values.device)  # finite
    if values.element_size() == 1:  # float8 has no aminmax
        values = values.float()
    return torch.stack(values.aminmax())


class StepMonitor:
    """Losses and gradient norms of the steps since the last line."""

    def __init__(self, accelerator: Accelerator, max_skipped_steps: int):
        self.accelerator, self.max_skipped_steps = accelerator, max_skipped_steps
        self.steps = []  # since the last line: number, loss terms, this process's loss sum, norm
        self.recent, self.in_a_row = deque(maxlen=MEMORY), 0

    def add(self, step: int, terms: int, loss_sum: torch.Tensor, norm: torch.Tensor) -> None:
        """Remembers a step; `loss_sum` and `norm` are scalars on the device."""
        self.steps.append((step, terms, loss_sum, norm.float()))

    def read(self) -> tuple[float, float, list[dict], str]:
        """The mean loss since the last line, and what else there is to say of these steps.

        That is the gradient norm of the last one, notes about unusual ones, and a reason to stop,
        as a rule empty. The mean is that of the loss terms of all steps whose loss is finite; NaN
        if none is. All processes call it, and get the same; it waits for the device. A note
        has the step, the event ("skipped" or "spike") and its numbers.
        """
        steps, counts, losses, norms = zip(*self.steps, strict=True)
        losses = self.accelerator.reduce(torch.stack(losses), "sum")
        losses, norms = torch.stack([losses, torch.stack(norms)]).tolist()
        self.steps = []
        notes, reason, total, seen = [], "", 0.0, 0
        for step, terms, loss, norm in zip(steps, counts, losses, norms, strict=True):
            if math.isfinite(loss):
                total, seen = total + loss, seen + terms
            if math.isfinite(loss + norm):
                notes += self.spike(step, loss / max(terms, 1))
                self.in_a_row = 0
            elif not (math.isfinite(loss) and self.overflows()):
                numbers = {"skipped_loss": loss / max(terms, 1), "skipped_norm": norm}
                notes.append({"step": step, "event": "skipped", **numbers})
                self.in_a_row += 1
                if self.in_a_row == self.max_skipped_steps:
                    reason = (
                        f"loss or gradient was not finite in {self.in_a_row} steps in a row, the "
                        f"last of them {step}; none changed the weights. metrics.jsonl has their "
                        "samples; look at the data, or go on with --accept_changes and another "
                        "learning_rate"
                    )
        return total / seen if seen else math.nan, norm, notes, reason

    def overflows(self) -> bool:
        """Whether fp16's scaler may be the reason: now and then it tries too large a scale.

        One that has come down to 1 and below has met gradients that no scale makes finite.
        """
        return self.accelerator.scaler is not None and self.accelerator.scaler.get_scale() > 1

    def spike(self, step: int, loss: float) -> list[dict]:
        """A note if the loss lies far above those before it, whose median is robust to spikes."""
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


class ThroughputMeter:
    """Loss terms, sample ids and time since the last line of metrics.jsonl."""

    def __init__(self, unit: str):
        self.unit = unit  # name of the loss terms

    def start(self) -> None:
        """Begins a new line."""
        self.terms, self.ids_hash, self.waited, self.began = 0, 0, 0.0, time.perf_counter()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time of its body as time spent waiting for data."""
        began = time.perf_counter()
        yield
        self.waited += time.perf_counter() - began

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out the time of its body: throughput is that of training alone."""
        began = time.perf_counter()
        yield
        self.began += time.perf_counter() - began

    def add(self, terms: int, ids_hash: int) -> None:
        """Counts a step: its loss terms, and the sum of its hashed sample ids."""
        self.terms += terms
        self.ids_hash = (self.ids_hash + ids_hash) % 2**64

    def read(self) -> dict:
        """The fields of a line: throughput, share of time spent waiting for data, batch_hash."""
        seconds = time.perf_counter() - self.began
        line = {
            f"{self.unit}_per_second": self.terms / seconds,
            "data_wait": self.waited / seconds,
            "batch_hash": f"{self.ids_hash:016x}",
        }
        self.start()
        return line
