"""Finds devices that are slower than the others, and what to do about them."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from samestep.hardware.report import short
from samestep.processes.ranks import UserError
from samestep.step.batches import StepPlan, busiest, deal, plan_step

BEHIND = 0.15  # of the median: from here on a device is slow


@dataclass(frozen=True)
class Speed:
    """What the device of a process does by itself; 0: not measured."""

    host: str
    device: str  # its name
    step: float  # samples per second of the project's training step
    matmul: float  # TFLOP/s in the precision of the training


def behind(speeds: Sequence[float]) -> dict[int, float]:
    """Fraction behind the median, of the slow ones by their numbers; none if one is unknown."""
    if len(speeds) < 2 or not all(speeds):
        return {}
    middle = median(speeds)
    return {i: 1 - v / middle for i, v in enumerate(speeds) if v < (1 - BEHIND) * middle}


def advise(speeds: Sequence[Speed], samples: int, largest: int, exact: bool) -> list[str]:
    """Names the slow devices, with the ways out and what each would give; the best first.

    `samples` is the recipe's global_batch_size, `largest` its micro_batch_size.
    """
    steps, matmuls = [each.step for each in speeds], [each.matmul for each in speeds]
    slow_steps, slow_matmuls = behind(steps), behind(matmuls)
    slow = sorted({*slow_steps, *slow_matmuls})
    lines = []
    for rank in slow:
        facts = []
        if rank in slow_steps:
            middle = f"{slow_steps[rank]:.0%} behind the median of {short(median(steps))}"
            facts.append(f"its training step does {short(steps[rank])} samples/s, {middle}")
        if rank in slow_matmuls:
            middle = f"{slow_matmuls[rank]:.0%} behind the median of {short(median(matmuls))}"
            facts.append(f"its matrix products do {short(matmuls[rank])} TFLOP/s, {middle}")
        each = speeds[rank]
        lines.append(
            f"slow device: process {rank} on {each.host} ({each.device}): {'; '.join(facts)}"
        )
    if not slow:
        return lines
    if not all(steps):
        return [*lines, "what to do about it is not known: not all training steps were measured"]
    lines += [
        "measure again before you act: another program on a device slows it down as well",
        f"ways out, for a step of {samples} samples and without the time of the exchange; the best "
        "first:",
    ]
    out = sorted(slow_steps or slow_matmuls)  # never all of them
    for i, (speed, way) in enumerate(ways_out(steps, out, samples, largest, exact), 1):
        value = f"{short(speed)} samples/s" if speed else "not possible"
        lines.append(f"{i}. {value}: {way}")
    return lines


def ways_out(
    steps: Sequence[float], slow: Sequence[int], samples: int, largest: int, exact: bool
) -> list[tuple[float, str]]:
    """(samples per second, what to do), the best first; of equal ones that which changes least.

    `steps` are the samples per second of each device, taken to be the same for smaller
    micro-batches. train.py would cut the steps as it is computed here.
    """
    left = [speed for rank, speed in enumerate(steps) if rank not in slow]
    numbers = ", ".join(map(str, slow))
    them, whose = ("them", "processes") if len(slow) > 1 else ("it", "process")
    leave = (
        f"leave {them} out, in the YAML num_processes {len(left)}, and gpu_ids without the device "
        f"of {whose} {numbers}"
    )
    found = []
    for kept, how, way in (
        (steps, "equal", "use all equally, --device_shares equal"),
        (steps, "auto", "unequal shares, --device_shares auto"),
        (left, "equal", leave),
    ):
        try:
            plan = plan_step(samples, largest, len(kept), exact, how)
        except UserError as error:
            found.append((0.0, f"{way}: {error}"))
            continue
        shares = plan.shares if how == "equal" else deal(sum(plan.shares), kept, least=1)
        dealt = StepPlan(samples, plan.micro_batch_size, shares).describe()
        seconds = busiest(shares, kept) * plan.micro_batch_size
        found.append((samples / seconds, f"{way}: {dealt}"))
    return sorted(found, key=lambda each: -each[0])
