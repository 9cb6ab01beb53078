"""Times of the device: events in its work, read where somebody waits for it anyway."""

import time
from typing import Any

import torch


class Stopwatch:
    """Measures how long this process computes its micro-batches. Only `take` waits for the device.

    DDP waits for other processes after the last micro-batch, which must not count. So the backward
    pass itself ends the time of a step, before DDP waits.
    """

    def __init__(self, device: torch.device):
        # Reading the events of an Apple GPU waits for all its work: there, the host's time counts.
        self.device = torch.device("cpu") if device.type == "mps" else device
        self.steps: list[list] = []  # begin and end of each since `take`

    def watch(self, model: torch.nn.Module) -> None:
        """Lets the backward passes of a prepared model end the time of a step."""
        # autograd calls what is queued with a weight's gradient when the others are there, too, and
        # before DDP waits for the other processes, which is queued with the last one.
        queue = torch.autograd.Variable._execution_engine.queue_callback
        weight = next(p for p in model.parameters() if p.requires_grad)
        weight.register_hook(lambda _: queue(self.stop))

    def mark(self) -> Any:
        """This moment: ns on a CPU, otherwise an event in the device's work."""
        if self.device.type == "cpu":
            return time.perf_counter_ns()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        """Before the first micro-batch of a step."""
        self.end()
        self.steps.append([self.mark(), None])

    def stop(self) -> None:
        """When the gradients of a micro-batch are there; those of the last one end the step."""
        if self.steps:  # an evaluation may compute gradients, too
            self.steps[-1][1] = self.mark()

    def end(self) -> None:
        """Ends a step that has not used the watched weight."""
        if self.steps and self.steps[-1][1] is None:
            self.stop()

    def take(self) -> list[float]:
        """Seconds of each step since the last call; waits until the device has computed them."""
        self.end()
        steps, self.steps = self.steps, []
        if self.device.type == "cpu":
            return [(end - begin) / 1e9 for begin, end in steps]
        if steps:
            steps[-1][1].synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in steps]
