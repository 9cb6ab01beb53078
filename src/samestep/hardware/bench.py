"""Speed of devices, links, disk, loader and training step; names devices that are slow."""

import argparse
import socket
from collections.abc import Callable
from functools import partial

import torch
from accelerate import Accelerator

from samestep.base.console import IS_MAIN, one_line, say
from samestep.hardware import devices, links, slow, workload
from samestep.hardware.project import Project
from samestep.hardware.report import Figure, Section, number, short
from samestep.hardware.timing import seconds_per_call
from samestep.processes.device import count_workers, make_accelerator
from samestep.processes.ranks import Ranks, as_user_error

NEEDS_PROJECT = True
SECONDS = 1.0  # of each measurement
STEP, LOADER = "training step alone", "data loader"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flag of bench."""
    seconds = number(float, 60)
    parser.add_argument("--seconds", type=seconds, default=SECONDS, help="of each measurement")


def run(
    options: argparse.Namespace, project: Project, ranks: Ranks, device: torch.device
) -> Section:
    """Measures all, for about `options.seconds` each; all processes must call it."""
    seconds, where = options.seconds, str(ranks.layout.rank)
    with ranks.fail_together(), as_user_error():
        accelerator = make_accelerator(project.cfg)
        disk = workload.measure_disk(options.report) if IS_MAIN else []
    precision = accelerator.mixed_precision.replace("no", "fp32")
    if precision == "fp32" and project.cfg.tf32 and device.type == "cuda":
        precision = "tf32"
    workers = count_workers(project.cfg.num_workers, project.task, device)
    names = ranks.gather((socket.gethostname(), devices.name_of(device)))
    section = Section("bench")
    section.facts = {
        "devices": [f"{rank}: {name} on {host}" for rank, (host, name) in enumerate(names)],
        "recipe": str(project.recipe),
        "micro-batch": f"{project.plan.micro_batch_size} samples, {precision}",
        "loader": f"{workers} worker processes for each training process; 0: it loads by itself",
    }

    # Measure the devices, all at the same time, as in training.
    say(f"measuring the devices: about {seconds:g} s for each figure")
    for format in devices.formats_of(device):
        measure = partial(devices.measure_products, format, device, seconds, where)
        everywhere(section, ranks, f"matmul {format}", measure)
    everywhere(section, ranks, "memory", partial(devices.measure_memory, device, seconds, where))
    if device.type == "cpu":
        section.lines.append("host to device: a CPU has nothing to copy")
    else:
        measure = partial(devices.measure_copies, device, seconds, where)
        everywhere(section, ranks, "copies", measure)

    # Measure what connects them.
    if ranks.layout.processes == 1:
        section.lines.append("links: one process exchanges nothing")
    else:
        say("measuring the links")
        section.figures += links.measure_collectives(ranks, device, seconds)
        figures, remarks = links.measure_pairs(ranks, device)
        section.figures += figures
        section.lines += remarks

    # Measure the project's own work.
    say("measuring the project's loader and training step")
    section.figures += ranks.from_main(disk)
    everywhere(section, ranks, LOADER, partial(measure_loader, project, device, seconds, where))
    if project.layout.sharded:
        section.lines.append(
            "not measured: training step and scaling: the YAML shards the model, so no device "
            "computes alone"
        )
    else:
        measure_steps(section, project, ranks, accelerator, seconds)
    section.lines += advice(section, project, names, precision)
    return section


def everywhere(
    section: Section, ranks: Ranks, what: str, measure: Callable[[], list[Figure]]
) -> None:
    """Measures on all processes at the same time. A line names those that could not, and why."""
    own, problem = [], ""
    with ranks.fail_together(), as_user_error():
        try:
            own = measure()
        except RuntimeError as error:  # of torch: not enough memory, or no kernel for it
            problem = one_line(error, 200)
    found = ranks.gather((own, problem))
    figures = [each for own, _ in found for each in own]
    order = list(dict.fromkeys(each.name for each in figures))  # devices side by side
    section.figures += sorted(figures, key=lambda each: order.index(each.name))
    for problem in dict.fromkeys(problem for _, problem in found if problem):
        places = [str(rank) for rank, each in enumerate(found) if each[1] == problem]
        place = "" if len(places) == len(found) else f" on process {', '.join(places)}"
        section.lines.append(f"not measured: {what}{place}: {problem}")


def measure_loader(
    project: Project, device: torch.device, seconds: float, where: str
) -> list[Figure]:
    """Samples per second that the loader of this process yields."""
    return [Figure(LOADER, workload.loader_speed(project, device, seconds), "samples/s", where)]


def measure_steps(
    section: Section, project: Project, ranks: Ranks, accelerator: Accelerator, seconds: float
) -> None:
    """The training step of each device alone, and of several together."""
    device, size, modules = accelerator.device, project.plan.micro_batch_size, []

    def measure() -> list[Figure]:
        modules.append(workload.build_module(project, accelerator))
        step = workload.training_step(project, accelerator, modules[0])
        speed = size / seconds_per_call(step, device, seconds)
        return [Figure(STEP, speed, "samples/s", str(ranks.layout.rank))]

    if accelerator.mixed_precision == "fp8":
        section.lines.append("the training step is measured in bf16; train.py makes layers of fp8")
    everywhere(section, ranks, STEP, measure)
    speeds = by_process(section, STEP, ranks.layout.processes)
    if len(speeds) > 1 and all(speeds):
        figures, remarks = workload.measure_scaling(
            project, ranks, accelerator, modules[0], seconds, size / min(speeds)
        )
        section.figures += figures
        section.lines += remarks


def by_process(section: Section, name: str, processes: int) -> list[float]:
    """The largest of the figures whose names begin so, of each process; 0: there is none."""
    found = [0.0] * processes
    for each in section.figures:
        if each.name.startswith(name):
            found[int(each.where)] = max(found[int(each.where)], each.value)
    return found


def advice(
    section: Section, project: Project, names: list[tuple[str, str]], precision: str
) -> list[str]:
    """What the figures mean, in lines."""
    steps, loaders, products = (
        by_process(section, name, len(names)) for name in (STEP, LOADER, f"matmul {precision},")
    )
    lines = []
    waiting = [rank for rank, loader in enumerate(loaders) if 0 < loader < steps[rank]]
    if waiting:
        worst = min(waiting, key=lambda rank: loaders[rank] / steps[rank])
        lines.append(
            f"{len(waiting)} of {len(names)} processes wait for data: the loader of process "
            f"{worst} gives {short(loaders[worst])} samples/s, and its training step takes "
            f"{short(steps[worst])}; more num_workers may help"
        )
    scaling = [each for each in section.figures if each.name.startswith(workload.SCALING)]
    if len(scaling) > 1:
        first, last = scaling[0], scaling[-1]
        times = last.value / first.value
        lines.append(
            f"{last.size} processes together train {times:.3g} times as fast as one, "
            f"{times / last.size:.0%} of the ideal"
        )
    if len(names) == 1:
        return lines
    speeds = [
        slow.Speed(*name, step, product)
        for name, step, product in zip(names, steps, products, strict=True)
    ]
    cfg = project.cfg
    found = slow.advise(speeds, cfg.global_batch_size, cfg.micro_batch_size, cfg.exact)
    if not found and (all(steps) or all(products)):
        found = [f"no device is more than {slow.BEHIND:.0%} behind the median"]
    return lines + found
