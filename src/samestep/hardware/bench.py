"""Speed of devices, links, disk, loader and training step; names devices that are slow."""

import argparse
import dataclasses
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from safetensors.torch import save_file
from torch.nn.parallel import DistributedDataParallel

from samestep.base.console import IS_MAIN, one_line, print_on_main
from samestep.base.files import fsync
from samestep.checkpoint.checkpoints import report_full_disk
from samestep.checkpoint.weights import TaskModule
from samestep.hardware import devices, links
from samestep.hardware.devices import BLOCKS, MOST, seconds_per_call
from samestep.hardware.project import Project
from samestep.hardware.report import Figure, Section, group, place_of, short
from samestep.processes.device import compile_blocks, count_workers, make_accelerator
from samestep.processes.ranks import Ranks, as_user_error
from samestep.step.batches import StepBatchSampler, make_loader

STEP, LOADER = "training step alone", "data loader"
CHECKPOINT = 256 << 20  # bytes that are written
# Of the fastest: so far behind it a device should get less work, or none.
UNEQUAL, LEFT_OUT = 0.2, 0.5


def run(
    options: argparse.Namespace, project: Project, ranks: Ranks, device: torch.device
) -> Section:
    """Measures all; all processes must call it."""
    section, brief = Section("bench"), options.verb == "all" and device.type == "cpu"
    seconds = options.seconds or (0.05 if brief else 1.0)

    def measure(what: str, function: Callable[..., list[Figure]], *given: Any) -> list[float]:
        return everywhere(section, ranks, what, function, *given)

    with ranks.fail_together(), as_user_error():
        accelerator = make_accelerator(project.cfg)
        disk = measure_disk(options.report) if IS_MAIN else []
    precision = accelerator.mixed_precision.replace("no", "fp32")
    if precision == "fp32" and project.cfg.tf32 and device.type == "cuda":
        precision = "tf32"
    workers = count_workers(project.cfg.num_workers, project.task, device)
    names = ranks.gather((socket.gethostname(), devices.name_of(device)))
    section.facts = {
        "devices": [f"{rank}: {name} on {host}" for rank, (host, name) in enumerate(names)],
        "recipe": str(project.recipe),
        "micro-batch": f"{project.plan.micro_batch_size} samples, {precision}",
        "loader": f"{workers} worker processes for each training process; 0: it loads by itself",
    }

    # Measure the devices, all at the same time, as in training.
    print_on_main(f"measuring the devices: about {seconds:g} s for each figure")
    products = {
        format: measure(f"matmul {format}", devices.measure_products, format, device, seconds)
        for format in devices.formats_of(device)
    }
    measure("memory", devices.measure_memory, device, seconds)
    if device.type != "cpu":
        measure("copies", devices.measure_copies, device, seconds)

    # Measure what connects them.
    if ranks.layout.processes > 1:
        print_on_main("measuring the links")
        section.figures += links.measure_collectives(ranks, device, seconds)
        section.figures += links.measure_pairs(ranks, device)

    # Measure the project's own work.
    print_on_main("measuring the project's loader and training step")
    section.figures += ranks.from_main(disk)
    loaders = measure(LOADER, measure_loader, project, device, workers, seconds)
    steps = [0.0] * len(names)
    if project.layout.sharded:
        section.lines.append(
            "not measured: training step and scaling: the YAML shards the model, so no device "
            "computes alone"
        )
    else:
        steps = measure_steps(section, project, ranks, accelerator, seconds)

    # Say what the figures mean.
    waiting = [rank for rank, loader in enumerate(loaders) if 0 < loader < steps[rank]]
    if waiting:
        worst = min(waiting, key=lambda rank: loaders[rank] / steps[rank])
        section.lines.append(
            f"{len(waiting)} of {len(names)} processes wait for data: the loader of process "
            f"{worst} gives {short(loaders[worst])} samples/s, and its training step takes "
            f"{short(steps[worst])}; more num_workers may help"
        )
    section.lines += advise(names, steps, products.get(precision, [0.0]))
    return section


def everywhere(
    section: Section, ranks: Ranks, what: str, measure: Callable[..., list[Figure]], *arguments: Any
) -> list[float]:
    """Measures on all processes at the same time. A line names those that could not, and why.

    Returns the largest figure of each process; 0: it has none.
    """
    own, problem = [], ""
    with ranks.fail_together(), as_user_error():
        try:
            own = measure(*arguments)
        except RuntimeError as error:  # of torch: not enough memory, or no kernel for it
            problem = one_line(error, 200)
    found = ranks.gather((own, problem))
    figures = [
        dataclasses.replace(each, where=str(rank))
        for rank, (own, _) in enumerate(found)
        for each in own
    ]
    order = list(dict.fromkeys(each.name for each in figures))  # devices side by side
    section.figures += sorted(figures, key=lambda each: order.index(each.name))
    for problem, failed in group([problem for _, problem in found]).items():
        if problem:
            place = "" if len(failed) == len(found) else f" on {place_of(failed)}"
            section.lines.append(f"not measured: {what}{place}: {problem}")
    return [max((each.value for each in own), default=0.0) for own, _ in found]


# ---- The project's own work ----------------------------------------------------------------------


def measure_disk(folder: Path) -> list[Figure]:
    """Speed of writing a checkpoint to this folder's disk, until it is safe there."""
    content, taken = {"weights": torch.randn(CHECKPOINT // 4)}, []
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=folder) as name:
        path = Path(name) / "weights.safetensors"
        for _ in range(3):
            began = time.perf_counter()
            with report_full_disk(path.parent):
                save_file(content, path)
                fsync(path)
            taken.append(time.perf_counter() - began)
    return [Figure("checkpoint write", CHECKPOINT / median(taken) / 1e9, "GB/s")]


def measure_loader(
    project: Project, device: torch.device, workers: int, seconds: float
) -> list[Figure]:
    """Samples per second that this process's loader yields, as in training: rows are read,
    augmented and collated, with the workers that the recipe asks for."""
    sampler = StepBatchSampler(project.plan, 0, project.plan.samples << 40, project.rows.sort)
    read = iter(make_loader(project.rows, sampler, project.task, workers, device))
    for _ in range(1 + 2 * workers):  # the first is slow, and these are read ahead
        next(read)
    rows, began = 0, time.perf_counter()
    while rows == 0 or time.perf_counter() - began < seconds:
        next(read)
        rows += project.plan.micro_batch_size
    return [Figure(LOADER, rows / (time.perf_counter() - began), "samples/s")]


def measure_steps(
    section: Section, project: Project, ranks: Ranks, accelerator: Accelerator, seconds: float
) -> list[float]:
    """The training step of each device alone, whose speeds it returns, and of all together: there
    DDP takes the mean of the gradients, so the work grows with the processes (weak scaling).

    A step is forward and backward of a micro-batch of the recipe, in the precision of the YAML.
    """
    device, processes = accelerator.device, ranks.layout.processes
    size, modules = project.plan.micro_batch_size, []

    def training_step(module: torch.nn.Module) -> Callable[[], None]:
        batch = project.batch(range(size))
        num_items = max(project.task.count(batch), 1)
        batch = send_to_device(batch, device)

        def step() -> None:
            module.zero_grad()
            with accelerator.autocast():
                loss = module(project.task.loss_sum, batch)
            (loss / num_items).backward()

        return step

    def alone() -> list[Figure]:
        model = project.build_model(project.cfg.gradient_checkpointing)
        modules.append(TaskModule(model).to(device))
        if project.cfg.compile:
            compile_blocks(modules[0])
        taken = seconds_per_call(training_step(modules[0]), seconds)
        return [Figure(STEP, size / taken, "samples/s")]

    if accelerator.mixed_precision == "fp8":
        section.lines.append("the training step is measured in bf16; train.py makes layers of fp8")
    speeds = everywhere(section, ranks, STEP, alone)
    if processes == 1 or not all(speeds):
        return speeds

    def together() -> list[Figure]:
        cards = [device] if device.type == "cuda" else None
        wrapped = DistributedDataParallel(
            modules[0], device_ids=cards, gradient_as_bucket_view=True
        )
        calls = min(max(int(seconds * min(speeds) / size), BLOCKS), MOST)
        taken = seconds_per_call(training_step(wrapped), calls=calls)
        return [Figure("", processes * size / taken, "samples/s")]

    found = Section("")
    speed = min(everywhere(found, ranks, "scaling", together))
    section.lines += found.lines
    if speed:
        name = f"training together, {processes} processes"
        section.figures.append(Figure(name, speed, "samples/s", size=processes))
        share = speed / sum(speeds)
        section.lines.append(
            f"{processes} processes together train {processes * share:.3g} times as fast as one, "
            f"{share:.0%} of the ideal"
        )
    return speeds


# ---- Slow devices --------------------------------------------------------------------------------


def advise(
    names: Sequence[tuple[str, str]], steps: Sequence[float], products: Sequence[float]
) -> list[str]:
    """Names the slow devices, what to do about them by the rules that people know, and what each
    way out would give; the best first.

    For each process: (host, device), samples per second of its training step, TFLOP/s of its matrix
    products; 0: not measured.
    """
    behind: dict[int, float] = {}  # of each slow process the share by which it is slower
    lines = []
    for what, unit, speeds in (
        ("its matrix products do", "TFLOP/s", products),
        ("its training step does", "samples/s", steps),
    ):
        fastest = max(speeds) if all(speeds) else 0
        for rank, speed in enumerate(speeds):
            if speed < (1 - UNEQUAL) * fastest:
                behind[rank] = 1 - speed / fastest
                host, device = names[rank]
                lines.append(
                    f"slow device: process {rank} on {host} ({device}): {what} {short(speed)} "
                    f"{unit}, {behind[rank]:.0%} behind the fastest with {short(fastest)}"
                )
    if not behind:
        known = len(names) > 1 and (all(steps) or all(products))
        return [f"no device is more than {UNEQUAL:.0%} behind the fastest"] * known
    if not all(steps):
        return [*lines, "what to do about it is not known: not all training steps were measured"]
    useless = [rank for rank, share in behind.items() if share > LEFT_OUT]
    if len(useless) == len(steps):  # each in something else
        useless = []
    out = sorted(useless or behind)
    left = [speed for rank, speed in enumerate(steps) if rank not in out]
    shares = ", ".join(f"{speed / min(steps):.3g}" for speed in steps)
    ways = {  # the samples per second that each gives; of equal ones the simplest comes first
        "use all equally: --device_shares equal": len(steps) * min(steps),
        f'unequal shares: --device_shares "[{shares}]", or auto': sum(steps),
    }
    if left:
        way = f"leave out {place_of(out)}: in the YAML num_processes {len(left)}, and gpu_ids "
        ways[f"{way}without these devices"] = len(left) * min(left)
    rule = f"{UNEQUAL:.0%} behind: unequal shares"
    rule = f"{LEFT_OUT:.0%} behind: leave out {place_of(out)}" if useless else rule
    return [
        *lines,
        f"rule of thumb, for more than {rule}",
        "measure again before you act: another program on a device slows it down as well",
        "by these speeds, without the time of the exchange, the best first:",
        *(
            f"{place}. at most {short(ways[way])} samples/s: {way}"
            for place, way in enumerate(sorted(ways, key=lambda way: -ways[way]), 1)
        ),
    ]
