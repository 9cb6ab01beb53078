"""Says which YAML, micro-batch size and checkpointing suit this model and hardware; writes both."""

import argparse
import dataclasses
import datetime
import gc
import math
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml

from samestep.checkpoint import weights
from samestep.hardware import ladder, simulate, written
from samestep.hardware.ladder import Choice, Hardware, Rung, Step, Working
from samestep.hardware.project import Project
from samestep.hardware.report import Figure, Section, number
from samestep.hardware.simulate import Study
from samestep.processes.device import PROCESSES
from samestep.processes.ranks import Ranks, UserError, as_user_error, catch, is_out_of_memory
from samestep.settings.mesh import Layout
from samestep.start import startup

NEEDS_PROJECT = True
SHIPPED = Path("configs/accelerate")
YAML = Path("configs/accelerate/recommended.yaml")
RECIPE = Path("configs/train/recommended.yaml")
TOLERANCE = 0.15  # by which an estimate may be wrong
WORKSPACE = 250e6  # bytes of cuBLAS and cuDNN, which no estimate knows: a small model has fewer
MOST_SAMPLES = 256  # of a micro-batch that is simulated


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
        written.refuse_foreign(path)
    read_hardware(options, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def run(
    options: argparse.Namespace, project: Project | None, ranks: Ranks, device: torch.device
) -> Section:
    """Estimates, decides and writes, in one process. Raises UserError."""
    assert project
    with as_user_error():
        return recommend(options, project, device)


# ---- Hardware ------------------------------------------------------------------------------------


def read_hardware(options: argparse.Namespace, device: torch.device) -> Hardware:
    """The devices to plan for: those of this process's kind, or those of the flags."""
    devices, machines, memory = options.devices, options.machines, options.device_memory
    host = psutil.virtual_memory().total
    if memory:
        # The memory of their host is not known; the lines name what it must be.
        size, planned = 1e9 * memory, {"here": False}
        return Hardware("cuda", "planned GPU", devices or 1, size, math.inf, machines, **planned)
    here = torch.cuda.device_count() if device.type == "cuda" else 0
    if (devices or 0) > max(here, 1) or (machines > 1 and not here):
        raise UserError(
            f"torch sees {here or 'no'} GPU{'s' * (here > 1)} on this machine; to plan for others, "
            "give --device_memory, the GB of one, as well"
        )
    if device.type == "cuda":
        seen = [torch.cuda.get_device_properties(i) for i in range(here)]
        least = min(each.total_memory for each in seen)
        bf16 = all((each.major, each.minor) >= (8, 0) for each in seen)
        return Hardware("cuda", seen[0].name, devices or here, least, host, machines, bf16)
    if device.type == "mps":
        most = torch.mps.recommended_max_memory()
        return Hardware("mps", "Apple GPU", 1, most, host)
    return Hardware("cpu", "CPU", 1, host, host)


# ---- Estimates -----------------------------------------------------------------------------------


def measure(project: Project, hardware: Hardware, choice: Choice, device: torch.device) -> int:
    """Peak bytes of two steps on one GPU that holds the whole model."""
    torch.cuda.reset_peak_memory_stats(device)
    model = project.build_model()
    if choice.checkpointing:
        weights.enable_gradient_checkpointing(model)
    model = model.to(device).train()
    optimizer = project.build_optimizer(model, project.cfg)
    batch = simulate.longest_rows(project, choice.plan.micro_batch_size)
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
    study: Study,
    project: Project,
    hardware: Hardware,
    step: Step,
    device: torch.device,
) -> dict[bool, Working]:
    """What micro-batches need, by the estimate; by a measured step, if that differs too much."""
    name = "estimate and measurement"
    alone = dataclasses.replace(hardware, devices=1, machines=1)
    single = ladder.rungs(study.sizes, alone)[:1]
    step = dataclasses.replace(step, device_shares="equal")  # of one device
    choice = ladder.choose(single, study.working, alone, step)
    if device.type != "cuda" or not hardware.here:
        section.facts[name] = "not measured: that takes a GPU that is here"
        return study.working
    if not choice:
        section.facts[name] = "not measured: no step fits into one device"
        return study.working
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
    ratio = choice.need / measured
    section.facts[name] = (
        f"{gigabytes(choice.need)} and {gigabytes(measured)} with micro-batches of "
        f"{choice.plan.micro_batch_size}: {ratio:.2f}"
    )
    section.figures.append(Figure("memory, estimated", choice.need / 1e9, "GB"))
    section.figures.append(Figure("memory, measured", measured / 1e9, "GB"))
    if abs(ratio - 1) <= TOLERANCE or abs(measured - choice.need) <= WORKSPACE:
        return study.working
    section.lines.append(
        f"The estimate is wrong by {abs(ratio - 1):.0%}; what follows counts with the measurement."
    )
    more = measured - choice.need
    return {
        each: dataclasses.replace(work, fixed=work.fixed + more)
        for each, work in study.working.items()
    }


# ---- Words ---------------------------------------------------------------------------------------


def gigabytes(size: float) -> str:
    """Bytes in words; small models get more digits."""
    return f"{size / 1e9:,.{0 if size >= 1e11 else 1 if size >= 1e9 else 3}f} GB"


def table(
    found: list[Rung], working: dict[bool, Working], hardware: Hardware, step: Step
) -> dict[str, str]:
    """Bytes on a device for each way, with the largest micro-batches, and whether they fit."""
    rows = {}
    for rung in found:
        try:
            plan = rung.plan(step, step.largest)
        except UserError as error:
            rows[rung.words] = str(error).partition(";")[0]
            continue
        needs = {c: gigabytes(rung.need(work, plan)) for c, work in working.items()}
        size = plan.micro_batch_size
        row = f"{size} sample{'s' * (size > 1)} {needs[False]}"
        row += f", checkpointing {needs[True]}" if True in needs else ""
        row += f", host {gigabytes(rung.host)}" if rung.host else ""
        verdict = "does not fit"
        for checkpointing, work in sorted(working.items(), reverse=True):
            fitting = ladder.fitting_plan(rung, work, hardware, step)
            if fitting:
                size = fitting.micro_batch_size
                verdict = "fits" + " with checkpointing" * checkpointing
                verdict += f", {size} sample{'s' * (size > 1)} at a time" * (fitting != plan)
        rows[rung.words] = f"{row}: {verdict}"
    return rows


def explain(
    study: Study,
    working: dict[bool, Working],
    hardware: Hardware,
    step: Step,
    choice: Choice | None,
) -> list[str]:
    """Why, in three lines."""
    sizes, total = study.sizes, hardware.devices * hardware.machines
    trained = "all" if sizes.trained == sizes.parameters else f"{sizes.trained:,}"
    work = working[bool(choice and choice.checkpointing)]
    samples = choice.plan.micro_batch_size if choice else 1
    lines = [
        f"The model has {sizes.parameters:,} parameters, and trains {trained} of them. Weights, "
        f"gradients and optimizer states take {gigabytes(sizes.states)}; a micro-batch of "
        f"{samples} adds {gigabytes(work.of(samples))}.",
        f"There {'is' if total == 1 else 'are'} {total} x {hardware.name} with "
        f"{gigabytes(hardware.memory)}, of which {gigabytes(hardware.usable)} may be filled.",
    ]
    if not choice:
        return [*lines, "So nothing fits. " + what_would(study, working, hardware, step)]
    rung, plan = choice.rung, choice.plan
    host = f" and {gigabytes(rung.host)} of the host's memory" if rung.host else ""
    checkpointing = "with" if choice.checkpointing else "without"
    return [
        *lines,
        f"So: {rung.words}, {checkpointing} gradient checkpointing, which fills "
        f"{gigabytes(choice.need)} of a device{host}. A step is {plan.describe()}.",
    ]


def what_would(study: Study, working: dict[bool, Working], hardware: Hardware, step: Step) -> str:
    """Advice where nothing fits."""
    if hardware.kind != "cuda":
        return "Take a GPU (--device_memory 80 plans for one), or a smaller model."
    sharded = [each for each in ladder.rungs(study.sizes, hardware) if each.sharded]
    _, refusal = catch(sharded[0].plan, step, step.largest)
    if refusal:
        return f"FSDP2 cannot be tried: {refusal}."
    count = ladder.least_gpus(study.sizes, working, hardware)
    if count:
        return f"{count} such GPUs would do, by FSDP2; or else LoRA, a smaller model, shorter rows."
    return (
        "No number of such GPUs would do: each gathers the largest part of the model, and holds "
        "the activations of a sample. Take larger GPUs, LoRA, a smaller model, or shorter rows."
    )


def next_command(choice: Choice, hardware: Hardware) -> str:
    """What to run now."""
    where = ""
    if hardware.machines > 1:
        where = "--machine_rank R --main_process_ip 10.0.0.1 "
    command = f"python -m samestep launch --config_file {YAML} {where}train.py --config {RECIPE}"
    if where:
        command += "   (on every machine, R from 0; the address is that of machine 0)"
    return f"Next: {command}"


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


# ---- The verb ------------------------------------------------------------------------------------


def recommend(options: argparse.Namespace, project: Project, device: torch.device) -> Section:
    """Estimates, measures where it can, decides, and writes the two files."""
    cfg, section = project.cfg, Section("recommend")
    present = read_hardware(options, device)
    hardware = ladder.busy(present, cfg.global_batch_size)
    if hardware.devices < present.devices:
        section.lines.append(
            f"Only {hardware.devices} of {present.devices} devices of a machine have work: "
            f"global_batch_size is {cfg.global_batch_size}."
        )
    cuda = hardware.kind == "cuda"
    largest = cfg.micro_batch_size if cfg.exact or not cuda else cfg.global_batch_size
    _, refusal = catch(startup.check_sharing, cfg, Layout(2, kinds=("FSDP",)))
    whole = str(refusal or "")
    step = Step(cfg.global_batch_size, largest, cfg.exact, cfg.device_shares, whole)

    most = ladder.largest_micro_batch(hardware, step)
    study = simulate.study(project, hardware.precision, min(most, MOST_SAMPLES))
    found = ladder.rungs(study.sizes, hardware)
    section.facts |= {
        "parameters": f"{study.sizes.parameters:,}, of which {study.sizes.trained:,} are trained",
        "largest unit of FSDP": f"{study.sizes.unit:,} parameters",
        "hardware": f"{hardware.machines} x {hardware.devices} x {hardware.name}",
        "FLOPs of a sample": f"{study.flops:.3g}, forward and backward",
    }
    if study.remark:
        section.lines.append(f"The model was {study.remark}.")
    working = compare_with_a_step(section, study, project, hardware, step, device)
    section.facts["memory of a device"] = table(found, working, hardware, step)
    choice = ladder.choose(found, working, hardware, step)
    section.lines += explain(study, working, hardware, step, choice)
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
    total = hardware.devices * hardware.machines
    heading = (
        f"recommend on {datetime.date.today()} for {total} x {hardware.name}: {choice.rung.words}; "
        f"{gigabytes(choice.need)} of {gigabytes(hardware.memory)}."
    )
    recipe = written.recipe_of(type(cfg), project.flags) | chosen
    written.write_headed(RECIPE, heading, recipe)
    written.write_headed(YAML, heading, hardware_values(choice.rung, hardware))
    section.lines += [f"Written: {YAML} and {RECIPE}.", next_command(choice, hardware)]
    return section
