"""What each way to train holds on a device, and the first of them that fits: docs/hardware.md.

The estimates leave out the allocator's gaps, and about 1 GB of CUDA and NCCL.
"""

from dataclasses import dataclass

from samestep.processes.ranks import UserError
from samestep.step.batches import StepPlan, plan_step

USABLE = 0.92  # of a memory


@dataclass(frozen=True)
class Sizes:
    """Numbers of parameters, on which the bytes of all states depend."""

    parameters: int
    trained: int  # the others are frozen, as beside the adapters of LoRA
    unit: int  # of the largest unit that FSDP gathers: a block, or all that is in no block
    unit_trained: int

    @property
    def states(self) -> float:
        """Bytes of fp32 weights, gradients, and AdamW's two moments."""
        return 4 * self.parameters + (4 + 8) * self.trained

    def whole(self, precision: str = "bf16", checkpointing: bool = False) -> float:
        """Bytes on a device that holds the model: its states, and autocast's copies of the weights.

        It caches those of trained weights. Of a frozen one only the backward pass keeps a copy, and
        with checkpointing none beyond its layer.
        """
        frozen = self.parameters - self.trained
        if checkpointing:
            frozen = self.unit - self.unit_trained
        return self.states + (0 if precision == "fp32" else 2) * (self.trained + frozen)

    def gathered(self, precision: str = "bf16") -> float:
        """Bytes that FSDP gathers: the largest unit twice, its gradient, and that again in fp32."""
        width = 4 if precision == "fp32" else 2
        return 2 * width * self.unit + (width + 4) * self.unit_trained

    def sharded(self, gpus: int, precision: str = "bf16") -> float:
        """Bytes on each of so many GPUs that share the model by FSDP2."""
        return self.states / gpus + self.gathered(precision)


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
    def total(self) -> int:
        return self.devices * self.machines

    @property
    def usable(self) -> float:
        """Bytes of a device that training may fill."""
        return USABLE * self.memory

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

    def of(self, samples: int) -> float:
        """Those of so many samples."""
        return self.fixed + self.sample * samples


Study = dict[bool, Working]  # without gradient checkpointing, and with it if the model can


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

    def plan(self, step: Step, largest: int) -> StepPlan:
        """The cut of a step into micro-batches; raises UserError if there is none."""
        if self.sharded and step.whole:
            raise UserError(step.whole)
        if self.host and step.exact:
            raise UserError("exact does not go with offload; AdamW rounds differently on the CPU")
        options = (step.exact, step.device_shares, 0, self.sharded)
        return plan_step(step.samples, largest, self.processes, *options)

    def need(self, working: Working, plan: StepPlan, checkpointing: bool) -> float:
        """Bytes on a device."""
        double = 2 if self.precision == "fp32" and self.sharded else 1  # measured in bf16
        again = self.again if max(plan.shares) > 1 else 0
        states = self.states - (self.freed if checkpointing else 0)
        return states + again + double * working.of(plan.micro_batch_size)


@dataclass(frozen=True)
class Choice:
    """A cut of the step under a rung."""

    rung: Rung
    checkpointing: bool
    plan: StepPlan
    need: float  # bytes on a device


def rungs(sizes: Sizes, hardware: Hardware) -> list[Rung]:
    """The ways to train on this hardware, the simplest and fastest first."""
    gpus, machines, total = hardware.devices, hardware.machines, hardware.total
    precision = hardware.precision
    whole = sizes.whole(precision)
    if hardware.kind != "cuda":
        words = {"cpu": "the CPU, fp32", "mps": "the GPU of this Mac, fp32"}[hardware.kind]
        return [Rung(words, hardware.kind, 1, precision, whole)]
    freed = whole - sizes.whole(precision, checkpointing=True)
    # FSDP does not go with fp16, and bf16 is slow where it is emulated.
    parts = "bf16" if hardware.bf16 else "fp32"
    offload, gathered = "FSDP2, states in the host's memory", sizes.gathered(parts)
    host = Rung(offload, "fsdp2_offload", total, parts, gathered, True, host=sizes.states)
    if total == 1:
        one = f"single_gpu_{precision}"
        return [Rung(f"one GPU, {precision}", one, 1, precision, whole, freed=freed), host]
    yaml, again = f"multi_gpu_{precision}" if machines == 1 else "multi_node", 4 * sizes.trained
    ddp = Rung(f"DDP, {precision}", yaml, total, precision, whole, freed=freed, again=again)
    across = sizes.sharded(total, parts)
    if machines == 1:
        return [ddp, Rung(f"FSDP2 on {total} GPUs", "fsdp2", total, parts, across, True), host]
    copies = f"FSDP2 on {gpus} GPUs, a copy in each machine"
    hsdp = Rung(copies, "hsdp", total, parts, sizes.sharded(gpus, parts), True)
    words = f"FSDP2 on {total} GPUs of {machines} machines"
    every = Rung(words, "multi_node_fsdp2", total, parts, across, True)
    return [ddp, hsdp, every] if gpus > 1 else [ddp, every]


def fit(rung: Rung, study: Study, hardware: Hardware, step: Step) -> Choice | None:
    """What fits under a rung: as it is, with smaller micro-batches, then with checkpointing.

    Raises UserError if its processes cannot divide the step.
    """
    if rung.host > USABLE * hardware.host:
        return None
    for checkpointing, working in study.items():
        largest = step.largest
        while largest:
            plan = rung.plan(step, largest)
            need = rung.need(working, plan, checkpointing)
            if need <= hardware.usable:
                return Choice(rung, checkpointing, plan, need)
            largest = 0 if step.exact else plan.micro_batch_size - 1
    return None
