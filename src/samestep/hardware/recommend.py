"""Says which YAML, micro-batch size and checkpointing suit this model and hardware; writes both."""

import argparse
import contextlib
import dataclasses
import gc
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml

from samestep.base.console import one_line, say, without_credentials
from samestep.base.files import replace_text
from samestep.checkpoint import weights
from samestep.hardware import memory, simulate
from samestep.hardware.memory import Choice, Hardware, Rung, Sizes, Step, Study, Working
from samestep.hardware.project import Project
from samestep.hardware.report import Figure, Section, number
from samestep.processes.device import PROCESSES
from samestep.processes.ranks import Ranks, UserError, as_user_error, catch, is_out_of_memory
from samestep.settings import config
from samestep.settings.mesh import Layout
from samestep.start import startup
from samestep.step.batches import Batch, plan_step

SHIPPED = Path("configs/accelerate")
YAML = SHIPPED / "recommended.yaml"
RECIPE = Path("configs/train/recommended.yaml")
HEADING = "# Written by samestep hardware"  # the first line of what this program may replace
TOLERANCE = 0.15  # by which an estimate may be wrong
WORKSPACE = 250e6  # bytes of cuBLAS and cuDNN, which no estimate knows: a small model has fewer
MOST_SAMPLES = 256  # of a micro-batch that is simulated
MOST_ROWS = 100_000  # whose lengths are compared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of recommend: other hardware than that of this machine."""
    count, size = number(int, 100_000), number(float, 100_000)
    add = parser.add_argument
    add("--devices", type=count, metavar="N", help="GPUs in a machine, in place of all")
    add("--device_memory", type=size, metavar="GB", help="plan for GPUs that are not here")
    add("--machines", type=count, metavar="M", default=1, help="machines with as many GPUs each")


def check(options: argparse.Namespace) -> None:
    """Raises ValueError for what recommend cannot do; call it before data is prepared."""
    if PROCESSES > 1:
        raise UserError(
            "recommend plans for all devices from one process; start it with "
            "`python -m samestep hardware recommend`"
        )
    for path in (YAML, RECIPE):
        if path.exists() and not path.read_bytes().startswith(HEADING.encode()):
            raise UserError(
                f"{path} is not a file that samestep hardware wrote, and stays as it is; rename "
                "it, and start again"
            )
    read_hardware(options, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


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
        say("The model cannot be simulated; building it takes 4 bytes of memory per parameter")
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


def measure(project: Project, hardware: Hardware, choice: Choice, device: torch.device) -> int:
    """Peak bytes of two steps on one GPU that holds the whole model."""
    torch.cuda.reset_peak_memory_stats(device)
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


def compare_with_a_step(
    section: Section,
    sizes: Sizes,
    study: Study,
    project: Project,
    hardware: Hardware,
    step: Step,
    device: torch.device,
) -> Study:
    """What micro-batches need, by the estimate; by a measured step, if that differs too much."""
    name = "estimate and measurement"
    alone = memory.rungs(sizes, dataclasses.replace(hardware, devices=1, machines=1))[0]
    choice = memory.fit(alone, study, hardware, dataclasses.replace(step, device_shares="equal"))
    if device.type != "cuda" or not hardware.here or not choice:
        section.facts[name] = "not measured: that takes a GPU that is here, and holds a step"
        return study
    try:
        measured = measure(project, hardware, choice, device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        measured = hardware.memory
        section.lines.append("The measured step ran out of memory.")
    finally:
        gc.collect()
        torch.cuda.empty_cache()
    ratio, more = choice.need / measured, measured - choice.need
    section.facts[name] = (
        f"{gigabytes(choice.need)} and {gigabytes(measured)} with micro-batches of "
        f"{choice.plan.micro_batch_size}: {ratio:.2f}"
    )
    section.figures.append(Figure("memory, estimated", choice.need / 1e9, "GB"))
    section.figures.append(Figure("memory, measured", measured / 1e9, "GB"))
    if abs(ratio - 1) <= TOLERANCE or abs(more) <= WORKSPACE:
        return study
    section.lines.append(
        f"The estimate is wrong by {abs(ratio - 1):.0%}; what follows counts with the measurement."
    )
    return {c: Working(working.fixed + more, working.sample) for c, working in study.items()}


# ---- Words ---------------------------------------------------------------------------------------


def gigabytes(size: float) -> str:
    """Bytes in words; small models get more digits."""
    return f"{size / 1e9:,.{0 if size >= 1e11 else 1 if size >= 1e9 else 3}f} GB"


def describe_fit(rung: Rung, choice: Choice | None, study: Study, step: Step) -> str:
    """What fits under a rung, or what the least of it would take."""
    host = f", host {gigabytes(rung.host)}" if rung.host else ""
    if choice:
        words, plan, need = "fits", choice.plan, choice.need
        checkpointing = choice.checkpointing
    else:
        checkpointing, working = [*study.items()][-1]
        plan = rung.plan(step, step.largest if step.exact else 1)
        words, need = "does not fit", rung.need(working, plan, checkpointing)
    words += " with checkpointing" if checkpointing else ""
    samples = f"{plan.micro_batch_size} sample{'s' if plan.micro_batch_size > 1 else ''}"
    return f"{words}: {gigabytes(need)}{host}, {samples} at a time"


def explain(choice: Choice | None, hardware: Hardware) -> str:
    """What is recommended, and what it fills."""
    if not choice and hardware.kind == "cuda":
        return (
            "So nothing fits. Plan for more GPUs with --devices, or for larger ones; take LoRA, a "
            "smaller model, or shorter rows."
        )
    if not choice:
        return "So nothing fits. Take a GPU (--device_memory 80 plans for one), or a smaller model."
    host = f" and {gigabytes(choice.rung.host)} of the host's memory" if choice.rung.host else ""
    return (
        f"So: {choice.rung.words}, {'with' if choice.checkpointing else 'without'} gradient "
        f"checkpointing, which fills {gigabytes(choice.need)} of a device{host}. A step is "
        f"{choice.plan.describe()}."
    )


# ---- The verb ------------------------------------------------------------------------------------


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
        hardware = dataclasses.replace(hardware, devices=busy)
    all_at_once = hardware.kind == "cuda" and not cfg.exact
    largest = cfg.global_batch_size if all_at_once else cfg.micro_batch_size
    _, refusal = catch(startup.check_sharing, cfg, Layout(2, kinds=("FSDP",)))
    step = Step(cfg.global_batch_size, largest, cfg.exact, cfg.device_shares, str(refusal or ""))
    plan = plan_step(step.samples, largest, hardware.total, cfg.exact, cfg.device_shares)

    most = min(plan.micro_batch_size, MOST_SAMPLES)
    sizes, study, remark = study_model(project, hardware.precision, most)
    if remark:
        section.lines.append(f"The model was {remark}.")
    section.facts |= {
        "parameters": f"{sizes.parameters:,}, of which {sizes.trained:,} are trained",
        "largest unit of FSDP": f"{sizes.unit:,} parameters",
        "weights, gradients, moments": gigabytes(sizes.states),
        "a micro-batch of 1 adds": gigabytes(study[False].of(1)),
        "hardware": f"{hardware.machines} x {hardware.devices} x {hardware.name} with "
        f"{gigabytes(hardware.memory)}, of which {gigabytes(hardware.usable)} may be filled",
    }
    study = compare_with_a_step(section, sizes, study, project, hardware, step, device)
    choices, verdicts = [], {}
    for rung in memory.rungs(sizes, hardware):
        try:
            choices.append(memory.fit(rung, study, hardware, step))
            verdicts[rung.words] = describe_fit(rung, choices[-1], study, step)
        except UserError as error:
            verdicts[rung.words] = str(error).partition(";")[0]
    section.facts["memory of a device"] = verdicts
    choice = next(filter(None, choices), None)
    section.lines.append(explain(choice, hardware))
    if not choice:
        section.failures.append("nothing fits; no file was written")
        return section

    chosen = {
        "micro_batch_size": choice.plan.micro_batch_size,
        "gradient_checkpointing": choice.checkpointing,
    }
    section.facts["recommended"] = {"YAML": choice.rung.yaml, **chosen}
    section.figures.append(
        Figure("memory, recommended", choice.need / 1e9, "GB", peak=hardware.memory / 1e9)
    )
    heading = f"recommend for {hardware.total} x {hardware.name}: {choice.rung.words}."
    # A config that is in use may differ from the recipe: tasks write into it what they found.
    recipe, *_ = config.parse_config(type(cfg), project.flags, "")
    write(RECIPE, heading, startup.resolved_config(recipe) | chosen)
    write(YAML, heading, hardware_values(choice.rung, hardware))
    several = hardware.machines > 1
    where = "--machine_rank R --main_process_ip 10.0.0.1 " if several else ""
    section.lines += [
        f"Written: {YAML} and {RECIPE}.",
        f"Next: python -m samestep launch --config_file {YAML} {where}train.py --config {RECIPE}",
    ]
    if several:
        section.lines[-1] += "   (on every machine, R from 0; the address is that of machine 0)"
    return section
