"""Deals micro-batches to unequal devices in proportion to their speed: `device_shares: auto`.

All processes compute whole micro-batches of one step, whose losses are divided by its number of
items in the loss. So the gradient is that of the global batch, however they are assigned. DDP's
mean over unequal numbers of accumulated micro-batches gives the samples of a slow device more
weight; a sampler with a weight for each process also repeats some samples and leaves out others.
"""

import dataclasses
from statistics import median

from samestep.step.batches import StepPlan, assign_micro_batches, busiest
from samestep.step.stopwatch import Stopwatch

WARM_UP = 2  # first steps, which take longer
FIRST = 5  # measured steps before the first decision
WINDOW = 20  # and before each further one
WORTH = 1.05  # speed-up of a step for which it is dealt anew


class ShareBalancer:
    """Deals the steps by the measured speeds, and anew when these drift.

    All processes see the same times, which they exchange before a step: they decide alike.
    """

    def __init__(self, plan: StepPlan, stopwatch: Stopwatch):
        self.stopwatch, self.plan = stopwatch, plan
        self.times: list[list[int]] = [[] for _ in plan.shares]  # since the last decision
        self.left_out, self.needed = WARM_UP, FIRST

    def own_time(self) -> list[int]:
        """This process's newest time per micro-batch at its rank, and 0 for the others."""
        times = [0] * len(self.times)
        times[self.plan.rank] = self.stopwatch.read()
        return times

    def update(self, times: list[int]) -> dict:
        """Adds the times of all processes, 0: none. If the steps are dealt anew, what to log."""
        if self.left_out and any(times):
            self.left_out -= 1
            return {}
        for each, newest in zip(self.times, times, strict=True):
            if newest > 0:
                each.append(newest)
        if min(map(len, self.times)) < self.needed:
            return {}
        speeds = [1 / median(each) for each in self.times]
        self.times, self.needed = [[] for _ in speeds], WINDOW
        shares = assign_micro_batches(sum(self.plan.shares), speeds, least=1)
        gain = busiest(self.plan.shares, speeds) / busiest(shares, speeds)
        if gain < WORTH:
            return {}
        self.plan = dataclasses.replace(self.plan, shares=shares)
        return {"event": "shares", "shares": " + ".join(map(str, shares)), "expected_gain": gain}
