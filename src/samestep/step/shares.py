"""Assigns micro-batches to unequal devices in proportion to their speed: `device_shares: auto`.

All processes compute whole micro-batches of one step, whose losses are divided by its number of
items in the loss. So the gradient is that of the global batch, however they are assigned. DDP's
mean over unequal numbers of accumulated micro-batches gives the samples of a slow device more
weight; a sampler with a weight for each process also repeats some samples and leaves out others.
"""

import time
from collections.abc import Callable
from statistics import median

import torch

from samestep.step.trial import nothing_changes

_MEASURED = 3  # micro-batches, after one to warm up


def measure_micro_batch(
    model: torch.nn.Module, loss_of: Callable[[], torch.Tensor], put_back: Callable[[], None]
) -> float:
    """Measure the seconds that this device takes for loss and gradient of a micro-batch.

    No process waits for another. For put_back see trial.nothing_changes.
    """
    seconds = []
    with nothing_changes(model, put_back):
        for _ in range(1 + _MEASURED):
            began = time.perf_counter()
            loss_of().backward()
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            seconds.append(time.perf_counter() - began)
            model.zero_grad(set_to_none=True)
    return median(seconds[1:])
