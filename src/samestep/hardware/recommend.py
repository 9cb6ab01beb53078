"""Says which YAML, micro-batch size and checkpointing suit this model and hardware; writes both.

A ladder has the ways to train, the simplest first: docs/hardware.md. The estimates leave out the
allocator's gaps, and about 1 GB of CUDA and NCCL, but for what a measured step adds.
"""

import argparse
import contextlib
import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import yaml

from samestep.base.console import one_line, print_on_main, without_credentials
from samestep.base.files import replace_text
from samestep.checkpoint import weights
from samestep.hardware import simulate
from samestep.hardware.project import Project
from samestep.hardware.report import Figure, Section
from samestep.processes.ranks import Ranks, UserError, as_user_error, catch, is_out_of_memory
from samestep.settings import config
from samestep.settings.mesh import Layout
from samestep.start import startup
from samestep.step.batches import Batch, StepPlan, plan_step

SHIPPED = Path("configs/accelerate")
YAML = SHIPPED / "recommended.yaml"
RECIPE = Path("configs/train/recommended.yaml")
HEADING = "# Written by samestep hardware"  # the first line of what this program may replace
USABLE = 0.92  # of a memory
COMPARED = "estimate and measurement"
MOST_SAMPLES = 256  # of a micro-batch that is simulated
MOST_ROWS = 100_000  # whose lengths are compared


def check(options: argparse.Namespace) -> None:
    """Raises ValueError for what recommend cannot do; call it before data is prepared."""
    for path in (YAML, RECIPE):
        if path.exists() and not path.read_bytes().startswith(HEADING.encode()):
            raise UserError(
                f"{path} is not a file that samestep hardware wrote, and stays as it is; rename "
                "it, and start again"
            )
    read_hardware(options, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


# ---- The ways to train ---------------------------------------------------------------------------


class Sizes(NamedTuple):
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


class Hardware(NamedTuple):
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
        return "fp32" if self.kind != "cuda" else "bf16" if self.bf16 else "fp16"


def read_hardware(options: argparse.Namespace, device: torch.device) -> Hardware:
    """The devices to plan for: those of this process's kind, or those of the flags."""
    devices, machines = options.devices, options.machines
    if options.device_memory:
        # The memory of their host is not known; the lines name what it must be.
        size, many = 1e9 * options.device_memory, devices or 1
        return Hardware("cuda", "planned GPU", many, size, math.inf, machines, here=False)
    here = torch.cuda.device_count() if device.type == "cuda" else 0
    if (devices or 0) > max(here, 1) or (machines > 1 and not here):
        raise UserError(
            f"torch sees {here or 'no'} GPU{'s' * (here > 1)} on this machine; to plan for others, "
            "give --device_memory, the GB of one, as well"
        )
    host = psutil.virtual_memory().total
    if device.type == "cuda":
        seen = [torch.cuda.get_device_properties(i) for i in range(here)]
        least = min(each.total_memory for each in seen)
        bf16 = all((each.major, each.minor) >= (8, 0) for each in seen)
        return Hardware("cuda", seen[0].name, devices or here, least, host, machines, bf16)
    if device.type == "mps":
        return Hardware("mps", "Apple GPU", 1, torch.mps.recommended_max_memory(), host)
    return Hardware("cpu", "CPU", 1, host, host)


class Working(NamedTuple):
    """Bytes that a micro-batch needs beside the states: activations, logits, passing gradients."""

    fixed: float
    sample: float  # for each sample

    def of(self, samples: int) -> float:
        """Those of so many samples."""
        return self.fixed + self.sample * samples


Study = dict[bool, Working]  # without gradient checkpointing, and with it if the model can


class Step(NamedTuple):
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

    def cut(self, step: Step, largest: int, checkpointing: bool, working: Working) -> "Choice":
        """The cut of a step into micro-batches; raises UserError if there is none."""
        if self.sharded and step.whole:
            raise UserError(step.whole)
        if self.host and step.exact:
            raise UserError("exact does not go with offload; AdamW rounds differently on the CPU")
        options = (step.exact, step.device_shares, 0, self.sharded)
        plan = plan_step(step.samples, largest, self.processes, *options)
        double = 2 if self.precision == "fp32" and self.sharded else 1  # measured in bf16
        need = self.states + double * working.of(plan.micro_batch_size)
        need += self.again if max(plan.shares) > 1 else 0
        return Choice(self, checkpointing, plan, need - self.freed * checkpointing)


class Choice(NamedTuple):
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


def fit(rung: Rung, study: Study, hardware: Hardware, step: Step) -> tuple[Choice, bool]:
    """What fits under a rung: as it is, with smaller micro-batches, then with checkpointing. Or
    what needs least, and False.

    Raises UserError if its processes cannot divide the step.
    """
    for checkpointing, working in study.items():
        largest = step.largest
        while largest:
            choice = rung.cut(step, largest, checkpointing, working)
            if choice.need <= hardware.usable and rung.host <= USABLE * hardware.host:
                return choice, True
            largest = 0 if step.exact else choice.plan.micro_batch_size - 1
    return choice, False


# ---- Estimates -----------------------------------------------------------------------------------


def study_model(project: Project, precision: str, most: int) -> tuple[Sizes, Study, str]:
    """Numbers of parameters, what micro-batches need in this precision, and a remark.

    Micro-batches of 1 and of `most` samples are simulated. Where a model cannot be, since its code
    looks at numbers, it is built, and micro-batches of 1 and 2 samples are computed on the CPU.
    """
    samples = {n: longest_rows(project, n) for n in {1, most}}
    try:
        with simulate.no_numbers() as mode:
            for batch in samples.values():
                batch |= {name: mode.from_tensor(tensor) for name, tensor in batch.items()}
            with simulate.Assumed():
                model = project.build_model()
            return (*measure_model(project, model, samples, precision), "")
    except Exception as error:  # code of the task may do anything
        remark = f"not simulated, since {type(error).__name__}: {one_line(error, 150)}"
        print_on_main(
            "The model cannot be simulated; building it takes 4 bytes of memory per parameter"
        )
    samples = {n: longest_rows(project, n) for n in {1, min(most, 2)}}
    found = measure_model(project, project.build_model(), samples, precision)
    return *found, f"{remark}; computed on the CPU with 1 and 2 samples instead"


def longest_rows(project: Project, samples: int) -> Batch:
    """A micro-batch of the longest of many training rows: other micro-batches need less memory."""
    positions = range(max(min(len(project.rows), MOST_ROWS), samples))
    return project.batch(project.rows.sort(positions)[-samples:])


def measure_model(
    project: Project, model: torch.nn.Module, samples: dict[int, Batch], precision: str
) -> tuple[Sizes, Study]:
    """Sizes of a model, and what it needs for these batches, by their numbers of samples."""
    study: Study = {}
    with contextlib.suppress(ValueError):  # of a model that has no gradient checkpointing
        for checkpointing in (False, True):
            if checkpointing:
                weights.enable_gradient_checkpointing(model)
            found = [
                (n, simulate.bytes_of_step(project.task, model, samples[n], precision))
                for n in sorted(samples)
            ]
            (few, least), (many, most) = found[0], found[-1]
            slope = max(most - least, 0) / (many - few) if many > few else least / few
            study[checkpointing] = Working(least - slope * few, slope)
    return count_parameters(model), study


def count_parameters(model: torch.nn.Module) -> Sizes:
    """Numbers of parameters; FSDP gathers a block, or all outside of the blocks, at a time."""

    def count(parameters: Sequence[torch.Tensor]) -> tuple[int, int]:
        trained = [p.numel() for p in parameters if p.requires_grad]
        return sum(p.numel() for p in parameters), sum(trained)

    names = getattr(model, "_no_split_modules", None) or ()
    blocks = [each for each in model.modules() if type(each).__name__ in names]
    inner = {id(p) for block in blocks for p in block.parameters()}
    rest = [p for p in model.parameters() if id(p) not in inner]
    units = [rest, *([*block.parameters()] for block in blocks)]
    return Sizes(*count([*model.parameters()]), *max(map(count, units)))


def measure(project: Project, hardware: Hardware, choice: Choice, device: torch.device) -> float:
    """Peak bytes of two steps on one GPU that holds the whole model; all of it if it is full."""
    torch.cuda.reset_peak_memory_stats(device)
    try:
        model = project.build_model(choice.checkpointing).to(device)
        optimizer = project.build_optimizer(model, project.cfg)
        batch = longest_rows(project, choice.plan.micro_batch_size)
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[hardware.precision]
        for _ in range(2):  # the moments come with the first
            for _ in range(min(2, max(choice.plan.shares))):
                with torch.autocast("cuda", dtype):
                    loss = project.task.loss_sum(model, batch)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cuda.max_memory_allocated(device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return hardware.memory
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def correct(section: Section, study: Study, need: float, measured: float, samples: int) -> Study:
    """What micro-batches need, by the estimate and a measured step, both in bytes."""
    section.facts[COMPARED] = (
        f"{gigabytes(need)} and {gigabytes(measured)} with micro-batches of {samples}: "
        f"{need / measured:.2f}; the latter counts"
    )
    section.figures.append(Figure("memory, estimated", need / 1e9, "GB"))
    section.figures.append(Figure("memory, measured", measured / 1e9, "GB"))
    return {c: Working(each.fixed + measured - need, each.sample) for c, each in study.items()}


# ---- The verb ------------------------------------------------------------------------------------


def gigabytes(size: float) -> str:
    """Bytes in words; small models get more digits."""
    return f"{size / 1e9:,.{0 if size >= 1e11 else 1 if size >= 1e9 else 3}f} GB"


def hardware_values(rung: Rung, hardware: Hardware) -> dict[str, Any]:
    """The shipped YAML of a rung, for this number of processes and machines."""
    values = yaml.safe_load((SHIPPED / f"{rung.yaml}.yaml").read_text(encoding="utf-8"))
    values["num_processes"] = rung.processes
    values["mixed_precision"] = rung.precision.replace("fp32", "no")
    if hardware.machines > 1:
        values |= {"num_machines": hardware.machines, "main_process_port": 29500}
    if rung.yaml == "hsdp":
        part = "parallelism_config_dp_"
        sizes = {"replicate_size": hardware.machines, "shard_size": hardware.devices}
        values["parallelism_config"] |= {f"{part}{name}": size for name, size in sizes.items()}
    return values


def write(path: Path, heading: str, values: dict[str, Any]) -> None:
    """Writes a YAML below a line behind HEADING, without credentials of URLs."""
    text = without_credentials(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, f"{HEADING} {heading}\n\n{text}")


@as_user_error()
def run(
    options: argparse.Namespace, project: Project, ranks: Ranks, device: torch.device
) -> Section:
    """Estimates, measures where it can, decides, and writes the two files. Raises UserError."""
    cfg, section = project.cfg, Section("recommend")
    hardware = read_hardware(options, device)
    busy = max(1, min(hardware.devices, cfg.global_batch_size // hardware.machines))
    if busy < hardware.devices:
        section.lines.append(
            f"Only {busy} of {hardware.devices} devices of a machine have work: "
            f"global_batch_size is {cfg.global_batch_size}."
        )
        hardware = hardware._replace(devices=busy)
    all_at_once = hardware.kind == "cuda" and not cfg.exact
    largest = cfg.global_batch_size if all_at_once else cfg.micro_batch_size
    _, refusal = catch(startup.check_sharing, cfg, Layout(2, kinds=("FSDP",)))
    step = Step(cfg.global_batch_size, largest, cfg.exact, cfg.device_shares, str(refusal or ""))
    plan = plan_step(step.samples, largest, hardware.total, cfg.exact, cfg.device_shares)

    most = min(plan.micro_batch_size, MOST_SAMPLES)
    sizes, study, remark = study_model(project, hardware.precision, most)
    section.lines += [f"The model was {remark}."] if remark else []
    section.facts |= {
        "parameters": f"{sizes.parameters:,}, of which {sizes.trained:,} are trained",
        "largest unit of FSDP": f"{sizes.unit:,} parameters",
        "weights, gradients, moments": gigabytes(sizes.states),
        "a micro-batch of 1 adds": gigabytes(study[False].of(1)),
        "hardware": f"{hardware.machines} x {hardware.devices} x {hardware.name} with "
        f"{gigabytes(hardware.memory)}, of which {gigabytes(hardware.usable)} may be filled",
    }
    alone = rungs(sizes, hardware._replace(devices=1, machines=1))[0]
    choice, fits = fit(alone, study, hardware, step._replace(device_shares="equal"))
    section.facts[COMPARED] = "not measured: that takes a GPU that is here, and holds a step"
    if fits and hardware.here and device.type == "cuda":
        measured = measure(project, hardware, choice, device)
        study = correct(section, study, choice.need, measured, choice.plan.micro_batch_size)
    fitting, verdicts = [], {}
    for rung in rungs(sizes, hardware):
        try:
            choice, fits = fit(rung, study, hardware, step)
        except UserError as error:
            verdicts[rung.words] = str(error).partition(";")[0]
            continue
        fitting += [choice] if fits else []
        size = choice.plan.micro_batch_size
        verdicts[rung.words] = (
            f"{'fits' if fits else 'does not fit'}{' with checkpointing' * choice.checkpointing}: "
            f"{gigabytes(choice.need)}{f', host {gigabytes(rung.host)}' if rung.host else ''}, "
            f"{size} sample{'s' * (size > 1)} at a time"
        )
    section.facts["memory of a device"] = verdicts
    if not fitting:
        section.lines.append(
            "So nothing fits. Plan for more GPUs with --devices, or for larger ones with "
            "--device_memory; take LoRA, a smaller model, or shorter rows."
        )
        section.failures.append("nothing fits; no file was written")
        return section

    choice = fitting[0]
    rung, checkpointing = choice.rung, choice.checkpointing
    host = f" and {gigabytes(rung.host)} of the host's memory" if rung.host else ""
    chosen = {
        "micro_batch_size": choice.plan.micro_batch_size,
        "gradient_checkpointing": checkpointing,
    }
    section.facts["recommended"] = {"YAML": rung.yaml, **chosen}
    section.figures.append(
        Figure("memory, recommended", choice.need / 1e9, "GB", peak=hardware.memory / 1e9)
    )
    heading = f"recommend for {hardware.total} x {hardware.name}: {rung.words}."
    # A config that is in use may differ from the recipe: tasks write into it what they found.
    recipe, *_ = config.parse_config(type(cfg), project.flags, "")
    write(RECIPE, heading, startup.resolved_config(recipe) | chosen)
    write(YAML, heading, hardware_values(rung, hardware))
    where = "--machine_rank R --main_process_ip 10.0.0.1 " if hardware.machines > 1 else ""
    section.lines += [
        f"So: {rung.words}, {'with' if checkpointing else 'without'} gradient checkpointing, which "
        f"fills {gigabytes(choice.need)} of a device{host}. A step is {choice.plan.describe()}.",
        f"Written: {YAML} and {RECIPE}.",
        f"Next: python -m samestep launch --config_file {YAML} {where}train.py --config {RECIPE}",
    ]
    return section
