"""Measures where the time of a run goes, and writes traces of single steps.

Times of the device are events in its work, read when a line of metrics has waited for it anyway. So
no other step waits.
"""

import atexit
import contextlib
import math
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import ProfileKwargs
from torch.utils.flop_counter import FlopCounterMode

from samestep.base.errors import attempt, catch
from samestep.processes.ranks import Ranks
from samestep.report.peaks import peaks_of
from samestep.step.inputs import Batch


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
        begin = self.mark()
        self.steps.append([begin, begin])

    def stop(self) -> None:
        """When the gradients of a micro-batch are there; those of the last one end the step."""
        if self.steps:  # an evaluation may compute gradients, too
            self.steps[-1][1] = self.mark()

    def take(self) -> list[float]:
        """Seconds of each step since the last call, 0 where the watched weight was not used; waits
        until the device has computed them."""
        steps, self.steps = self.steps, []
        if self.device.type == "cpu":
            return [(end - begin) / 1e9 for begin, end in steps]
        if steps:
            steps[-1][1].synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in steps]


class SpeedMeter:
    """Throughput, and where the time goes, since the last line of metrics.jsonl."""

    def __init__(self, accelerator: Accelerator, ranks: Ranks, unit: str):
        self.accelerator, self.ranks = accelerator, ranks
        self.stopwatch = Stopwatch(accelerator.device)
        self.unit = unit  # plural name of the items in the loss
        self.flops, self.peak = 0.0, 0.0  # for each loss term; FLOP/s of all devices; 0: unknown
        self.start()

    def count_flops(
        self, model: torch.nn.Module, task: Any, batch: Batch, share_trained: float
    ) -> None:
        """Counts the FLOPs of a loss term on this batch, for MFU, if the peak of all GPUs is known.

        The backward pass takes as many as the forward pass for the gradients of activations, and as
        many for those of weights, if all are trained (PaLM, arXiv:2204.02311, appendix B).
        """
        precision = self.accelerator.mixed_precision.replace("no", "fp32")
        if precision == "fp32" and torch.backends.cuda.matmul.allow_tf32:
            precision = "tf32"
        peaks = self.ranks.gather(peaks_of(self.accelerator.device).get(precision))
        # Processes of a tensor- or context-parallel group compute parts of one batch.
        if not all(peaks) or self.ranks.layout.replica_size > 1:
            return
        with self.ranks.fail_together(), torch.no_grad(), FlopCounterMode(display=False) as counter:
            model.eval()  # in training mode, BatchNorm would change
            model(task.loss_sum, batch)
            model.train()
            counts = np.array([counter.get_total_flops(), task.count(batch)])
        flops, num_items = self.ranks.sum_arrays(counts).tolist()
        if num_items:
            self.flops, self.peak = (2 + share_trained) * flops / num_items, 1e12 * math.fsum(peaks)

    def start(self) -> None:
        """Starts to count anew."""
        self.num_items, self.ids_hash, self.began = 0, 0, time.perf_counter()
        self.computed = 0  # tokens of this process's batches, those without a loss included
        self.fetching = [0.0]  # seconds: before the first step since the last line, in each of them

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time of the body as waiting for data."""
        began = time.perf_counter()
        yield
        self.fetching[-1] += time.perf_counter() - began

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves the time of the body out of the throughput."""
        began = time.perf_counter()
        yield
        self.began += time.perf_counter() - began

    def add(self, num_items: int, ids_hash: int, computed: int = 0) -> None:
        """Begins a step: its items in the loss, sum of hashed sample ids, and tokens computed."""
        self.num_items, self.computed = self.num_items + num_items, self.computed + computed
        self.ids_hash = (self.ids_hash + ids_hash) % 2**64
        self.fetching.append(0.0)
        self.stopwatch.start()

    def read(self) -> dict:
        """Fields for a line; all processes must call it, when the device has computed the steps.

        `data_wait`, `compute` and `peer_wait` are shares of the time: to fetch data, to compute
        gradients, and to wait for the process that is the slowest in a step. They are means over
        the processes. A GPU computes while data is fetched. Where processes share weights, they
        wait for each other inside of `compute`.
        """
        seconds = time.perf_counter() - self.began
        before, *fetching = self.fetching
        fetching[0] += before
        processes, device = self.accelerator.num_processes, self.accelerator.device
        own = [*self.stopwatch.take(), *fetching, _peak_memory(device), self.computed]
        everywhere = np.zeros((processes, len(own)))
        everywhere[self.accelerator.process_index] = own
        everywhere = self.ranks.sum_arrays(everywhere)
        compute, fetch, more = np.split(everywhere, [len(fetching), 2 * len(fetching)], axis=1)
        busy = compute + fetch
        if device.type != "cpu":
            busy = np.maximum(compute, fetch)
        line = {
            f"{self.unit}_per_second": self.num_items / seconds,
            "data_wait": fetch.sum() / processes / seconds,
            "compute": compute.sum() / processes / seconds,
        }
        if self.unit == "tokens" and more[:, 1].sum() > self.num_items:  # as of chats
            line["computed_tokens_per_second"] = more[:, 1].sum() / seconds
        if processes > 1:
            line["peer_wait"] = (busy.max(0) - busy.mean(0)).sum() / seconds
            line["slowest"] = int(busy.sum(1).argmax())
        if self.peak:
            line["mfu"] = self.flops * self.num_items / seconds / self.peak
        line |= {"peak_memory_gb": more[:, 0].max(), "batch_hash": f"{self.ids_hash:016x}"}
        self.start()
        return line


def _peak_memory(device: torch.device) -> float:
    """The most memory that tensors of this process took so far, in GB = 10^9 bytes.

    On a GPU it is that of the GPU, elsewhere that of the whole process.
    """
    if device.type in ("cuda", "xpu"):
        return getattr(torch, device.type).max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024  # bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


class Profiler:
    """Traces of the steps that `steps` names: [first, last], or [first, last, every].

    Each process writes a trace. In other steps nothing is recorded, and nothing costs time.
    """

    def __init__(self, meter: SpeedMeter, steps: list[int] | None, output: Path):
        self.meter, self.accelerator, self.output = meter, meter.accelerator, output / "profile"
        self.first, self.last, self.every = [*(steps or (0, 0)), 0][:3]
        self.profile: Any = None  # while it records
        # torch crashes in Python's finalization while it records. Several processes skip that.
        if self.accelerator.num_processes == 1:
            atexit.register(catch, lambda: self.profile and self.profile.stop())

    def start_step(self, step: int) -> None:
        while self.every and not self.profile and step > self.first:
            self.first, self.last = self.first + self.every, self.last + self.every
        if step == self.first:
            with self.meter.paused():
                self.profile = ProfileKwargs(record_shapes=True, profile_memory=True).build()
                self.profile.start()

    def end_step(self, step: int) -> None:
        """After the step has changed the weights. A profile that cannot be written ends no run."""
        if not self.profile or step < self.last:
            return
        with self.meter.paused():
            attempt("no profile", self.write)
        self.profile = None

    def write(self) -> None:
        self.profile.stop()
        folder = self.output / f"steps-{self.first}-{self.last}"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"process-{self.accelerator.process_index}.pt.trace.json.gz"
        self.profile.export_chrome_trace(str(folder / name))
