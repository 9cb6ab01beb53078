"""Times of the device: events in its work, read once the device has come so far. Nothing waits."""

import time
from typing import Any

import torch


class Stopwatch:
    """Measures how long this process computes its micro-batches; never waits for the device.

    DDP waits for other processes after the last micro-batch, which must not count. So the backward
    pass itself ends the time of a step, before DDP waits.
    """

    def __init__(self, device: torch.device):
        # Reading the events of an Apple GPU waits for all its work: there, the host's time counts.
        self.device = torch.device("cpu") if device.type == "mps" else device
        # [begin, end] of steps that the device may not have computed yet
        self.running: list[list] = []
        self.seconds: list[float] = []  # of the steps before these, since `take`

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
        self.collect()
        self.running.append([self.mark(), None])

    def stop(self) -> None:
        """When the gradients of a micro-batch are there; those of the last one end the step."""
        if self.running:  # an evaluation may compute gradients, too
            self.running[-1][1] = self.mark()

    def end(self) -> None:
        """Ends a step that has not used the watched weight."""
        if self.running and self.running[-1][1] is None:
            self.stop()

    def collect(self) -> None:
        """Reads the steps that the device has computed."""
        while self.running:
            begin, end = self.running[0]
            if end is None or not (isinstance(end, int) or end.query()):
                break
            taken = end - begin if isinstance(end, int) else 1e6 * begin.elapsed_time(end)
            self.seconds.append(taken / 1e9)
            del self.running[0]

    def take(self) -> list[float]:
        """Seconds of each step since the last call; waits until the device has computed them."""
        self.end()
        if self.running and self.device.type != "cpu":
            self.running[-1][1].synchronize()
        self.collect()
        seconds, self.seconds = self.seconds, []
        return seconds
