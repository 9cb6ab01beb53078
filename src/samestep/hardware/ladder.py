"""Which way to train fits: the ladder of docs/hardware.md, from one device to several machines."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from samestep.hardware import memory
from samestep.hardware.memory import Sizes
from samestep.processes.ranks import UserError
from samestep.step import batches
from samestep.step.batches import StepPlan

MOST_GPUS = 1024  # that the advice looks for


@dataclass(frozen=True)
class Hardware:
    """The devices to train on: those of this machine, or others to plan for."""

    kind: str  # cuda, mps or cpu
    name: str  # of a device
    devices: int  # in a machine
    memory: float  # bytes of a device
    host: float  # bytes of a machine's memory
    machines: int = 1
    bf16: bool = True  # computed by the device, not emulated
    here: bool = True  # not only planned for

    @property
    def usable(self) -> float:
        """Bytes of a device that training may fill."""
        return memory.USABLE * self.memory

    @property
    def precision(self) -> str:
        """The precision to train in."""
        if self.kind != "cuda":
            return "fp32"
        return "bf16" if self.bf16 else "fp16"


@dataclass(frozen=True)
class Working:
    """Bytes that a micro-batch needs beside the states: activations, logits, passing gradients."""

    fixed: float
    sample: float  # for each sample
    checkpointing: bool = False

    def of(self, samples: int) -> float:
        """Those of so many samples."""
        return self.fixed + self.sample * samples


@dataclass(frozen=True)
class Step:
    """What the recipe says about a step; see batches.plan_step."""

    samples: int  # global_batch_size
    largest: int  # most samples of a micro-batch
    exact: bool = False
    device_shares: str | list[float] = "equal"
    whole: str = ""  # why the recipe does not go with sharded weights


@dataclass(frozen=True)
class Rung:
    """A way to train, under one of the shipped YAMLs."""

    words: str
    yaml: str
    processes: int
    precision: str
    states: float  # bytes on a device, of all that does not depend on the micro-batch
    sharded: bool = False
    freed: float = 0  # bytes of these that gradient checkpointing frees
    again: float = 0  # bytes of the gradients that DDP accumulates beside its buckets
    host: float = 0  # bytes in the memory of the machine
    chosen: bool = True  # False: shown, for people who use DeepSpeed

    def plan(self, step: Step, largest: int) -> StepPlan:
        """The cut of a step into micro-batches; raises UserError if there is none."""
        if self.sharded and step.whole:
            raise UserError(step.whole)
        if self.host and step.exact:
            raise UserError("exact does not go with offload; AdamW rounds differently on the CPU")
        options = (step.exact, step.device_shares, 0, self.sharded)
        return batches.plan_step(step.samples, largest, self.processes, *options)

    def need(self, working: Working, plan: StepPlan) -> float:
        """Bytes on a device."""
        double = 2 if self.precision == "fp32" and self.sharded else 1  # measured in bf16
        again = self.again if max(plan.shares) > 1 else 0
        states = self.states - (self.freed if working.checkpointing else 0)
        return states + again + double * working.of(plan.micro_batch_size)


@dataclass(frozen=True)
class Choice:
    """What fits."""

    rung: Rung
    checkpointing: bool
    plan: StepPlan
    need: float  # bytes on a device


def rungs(sizes: Sizes, hardware: Hardware) -> list[Rung]:
    """The ways to train on this hardware, the simplest and fastest first."""
    gpus, machines, precision = hardware.devices, hardware.machines, hardware.precision
    total, whole = gpus * machines, memory.whole(sizes, precision)
    freed = whole - memory.whole(sizes, precision, checkpointing=True)
    replica: dict[str, Any] = {"precision": precision, "states": whole, "freed": freed}
    if hardware.kind != "cuda":
        words = {"cpu": "the CPU, fp32", "mps": "the GPU of this Mac, fp32"}[hardware.kind]
        return [Rung(words, hardware.kind, 1, precision, whole)]
    # FSDP does not go with fp16, and bf16 is slow where it is emulated.
    parts = "bf16" if hardware.bf16 else "fp32"
    shared: dict[str, Any] = {"precision": parts, "sharded": True}
    offloaded = {"states": memory.gathered(sizes, parts), "host": sizes.states, **shared}
    deepspeed: dict[str, Any] = {"precision": parts, "sharded": True, "chosen": False}
    if total == 1:
        return [
            Rung(f"one GPU, {precision}", f"single_gpu_{precision}", 1, **replica),
            Rung("FSDP2, states in the host's memory", "fsdp2_offload", 1, **offloaded),
        ]
    ddp = {**replica, "again": 4 * sizes.trained}
    if machines > 1:
        across = memory.sharded(sizes, total, parts)
        words = f"FSDP2 on {total} GPUs of {machines} machines"
        found = [Rung(f"DDP, {precision}", "multi_node", total, **ddp)]
        if gpus > 1:
            inside = memory.sharded(sizes, gpus, parts)
            copies = f"FSDP2 on {gpus} GPUs, a copy in each machine"
            found.append(Rung(copies, "hsdp", total, states=inside, **shared))
        return [*found, Rung(words, "multi_node_fsdp2", total, states=across, **shared)]
    fsdp = memory.sharded(sizes, total, parts)
    zero3 = memory.sharded(sizes, total, "fp32")  # it gathers in fp32
    gathered = memory.gathered(sizes, "fp32")
    return [
        Rung(f"DDP, {precision}", f"multi_gpu_{precision}", total, **ddp),
        Rung(f"FSDP2 on {total} GPUs", "fsdp2", total, states=fsdp, **shared),
        Rung("FSDP2, states in the host's memory", "fsdp2_offload", total, **offloaded),
        Rung("ZeRO-2", "deepspeed_zero2", total, states=memory.zero2(sizes, total), **deepspeed),
        Rung("ZeRO-3", "deepspeed_zero3", total, states=zero3, **deepspeed),
        Rung(
            "ZeRO-3, states in the host's memory",
            "deepspeed_zero3_offload",
            total,
            states=gathered,
            host=sizes.states + 8 * sizes.trained,
            **deepspeed,
        ),
    ]


def fitting_plan(rung: Rung, working: Working, hardware: Hardware, step: Step) -> StepPlan | None:
    """The plan with the largest micro-batches that fit under a rung; None if there is none."""
    largest = step.largest
    while largest and rung.host <= memory.USABLE * hardware.host:
        try:
            plan = rung.plan(step, largest)
        except UserError:  # the processes of this rung cannot divide the step
            return None
        if rung.need(working, plan) <= hardware.usable:
            return plan
        largest = 0 if step.exact else plan.micro_batch_size - 1
    return None


def choose(
    found: list[Rung], working: dict[bool, Working], hardware: Hardware, step: Step
) -> Choice | None:
    """The first rung that fits: as it is, with smaller micro-batches, then with checkpointing."""
    for rung in found:
        for checkpointing, work in sorted(working.items()):
            plan = fitting_plan(rung, work, hardware, step) if rung.chosen else None
            if plan:
                return Choice(rung, checkpointing, plan, rung.need(work, plan))
    return None


def busy(hardware: Hardware, samples: int) -> Hardware:
    """The hardware, with no more devices than a step has samples."""
    devices = max(1, min(hardware.devices, samples // hardware.machines))
    return dataclasses.replace(hardware, devices=devices)


def largest_micro_batch(hardware: Hardware, step: Step) -> int:
    """Samples of the largest micro-batch that the memory may allow; raises UserError if none is."""
    processes = hardware.devices * hardware.machines
    options = (step.exact, step.device_shares)
    return batches.plan_step(step.samples, step.largest, processes, *options).micro_batch_size


def least_gpus(sizes: Sizes, working: dict[bool, Working], hardware: Hardware) -> int:
    """How many such GPUs could train with a sample each, by FSDP2; 0: no number of them."""
    one = min(work.of(1) for work in working.values())
    count = 2
    while count <= MOST_GPUS:
        if memory.sharded(sizes, count) + one <= hardware.usable:
            return count
        count *= 2
    return 0
