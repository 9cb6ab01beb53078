"""Times work on a device: warm-up, marks in the device's own work, and the median."""

import time
from collections.abc import Callable
from statistics import median

import torch

from samestep.step.stopwatch import mark

WARM_UP = 3  # first calls: they compile, allocate, and raise clock rates
FEWEST, MOST = 5, 500  # measured calls


def wait_for(device: torch.device) -> None:
    """Waits until the device has done all its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def seconds_per_call(
    work: Callable[[], object],
    device: torch.device,
    seconds: float = 1.0,
    agree: Callable[[int], int] = int,
    calls: int = 0,
) -> float:
    """Median seconds of a call of `work`, which may only enqueue its work on the device.

    The calls take about `seconds`, or are `calls` in number. Where they wait for other processes,
    all must make the same number: `agree` turns this process's number into that of all.
    """
    for _ in range(WARM_UP):
        work()
    wait_for(device)
    if not calls:
        began = time.perf_counter()
        work()
        wait_for(device)
        taken = max(time.perf_counter() - began, 1e-9)
        calls = agree(min(max(int(seconds / taken), FEWEST), MOST))
    # Nothing waits for the device between the calls, so that it never runs out of work.
    marks = [mark(device)]
    for _ in range(calls):
        work()
        marks.append(mark(device))
    wait_for(device)
    pairs = zip(marks, marks[1:], strict=False)
    if device.type == "cpu":
        return max(median(end - begin for begin, end in pairs), 1) / 1e9
    return max(median(begin.elapsed_time(end) for begin, end in pairs), 1e-6) / 1e3
