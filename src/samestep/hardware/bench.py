"""Speed of devices, links, disk, loader and training step; names devices that are slow."""

import argparse
import gc
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import send_to_device
from safetensors.torch import save_file
from torch.nn.parallel import DistributedDataParallel

from samestep.base.console import IS_MAIN, one_line, say
from samestep.base.files import fsync
from samestep.checkpoint.checkpoints import report_full_disk
from samestep.checkpoint.weights import TaskModule, enable_gradient_checkpointing
from samestep.hardware import devices, links
from samestep.hardware.devices import BLOCKS, MOST, seconds_per_call
from samestep.hardware.project import Project
from samestep.hardware.report import Figure, Section, number, short
from samestep.processes.device import compile_blocks, count_workers, make_accelerator
from samestep.processes.ranks import Ranks, UserError, as_user_error, catch
from samestep.step.batches import StepBatchSampler, StepPlan, busiest, deal, make_loader, plan_step

STEP, LOADER, SCALING = "training step alone", "data loader", "training together"
CHECKPOINT = 256 << 20  # bytes that are written
BEHIND = 0.15  # of the median: from here on a device is slow


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flag of bench."""
    parser.add_argument("--seconds", type=number(float, 60), default=1.0, help="per measurement")


def run(
    options: argparse.Namespace, project: Project, ranks: Ranks, device: torch.device
) -> Section:
    """Measures all, for about `options.seconds` each; all processes must call it."""
    cfg, seconds, where = project.cfg, options.seconds, str(ranks.layout.rank)
    with ranks.fail_together(), as_user_error():
        accelerator = make_accelerator(cfg)
        disk = measure_disk(options.report) if IS_MAIN else []
    precision = accelerator.mixed_precision.replace("no", "fp32")
    if precision == "fp32" and cfg.tf32 and device.type == "cuda":
        precision = "tf32"
    workers = count_workers(cfg.num_workers, project.task, device)
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
        section.figures += links.measure_pairs(ranks, device)

    # Measure the project's own work.
    say("measuring the project's loader and training step")
    section.figures += ranks.from_main(disk)
    measure = partial(measure_loader, project, device, workers, seconds, where)
    everywhere(section, ranks, LOADER, measure)
    if project.layout.sharded:
        section.lines.append(
            "not measured: training step and scaling: the YAML shards the model, so no device "
            "computes alone"
        )
    else:
        measure_steps(section, project, ranks, accelerator, seconds)
    steps, loaders, products = (
        by_process(section, name, len(names)) for name in (STEP, LOADER, f"matmul {precision},")
    )
    waiting = [rank for rank, loader in enumerate(loaders) if 0 < loader < steps[rank]]
    if waiting:
        worst = min(waiting, key=lambda rank: loaders[rank] / steps[rank])
        section.lines.append(
            f"{len(waiting)} of {len(names)} processes wait for data: the loader of process "
            f"{worst} gives {short(loaders[worst])} samples/s, and its training step takes "
            f"{short(steps[worst])}; more num_workers may help"
        )
    largest = (cfg.global_batch_size, cfg.micro_batch_size, cfg.exact)
    section.lines += advise(names, steps, products, *largest)
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


def by_process(section: Section, name: str, processes: int) -> list[float]:
    """The largest of the figures whose names begin so, of each process; 0: there is none."""
    found = [0.0] * processes
    for each in section.figures:
        if each.name.startswith(name):
            found[int(each.where)] = max(found[int(each.where)], each.value)
    return found


# ---- The project's own work ----------------------------------------------------------------------


def measure_disk(folder: Path, size: int = CHECKPOINT) -> list[Figure]:
    """Speed of writing a checkpoint to this folder's disk, until it is safe there."""
    folder.mkdir(parents=True, exist_ok=True)
    content, taken = {"weights": torch.randn(size // 4)}, []
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=folder) as name:
        path = Path(name) / "weights.safetensors"
        for _ in range(3):
            began = time.perf_counter()
            with report_full_disk(path.parent):
                save_file(content, path)
                fsync(path)
            taken.append(time.perf_counter() - began)
    return [Figure("checkpoint write", size / median(taken) / 1e9, "GB/s")]


def measure_loader(
    project: Project, device: torch.device, workers: int, seconds: float, where: str
) -> list[Figure]:
    """Samples per second that this process's loader yields, as in training: rows are read,
    augmented and collated, with the workers that the recipe asks for."""
    sampler = StepBatchSampler(project.plan, 0, project.plan.samples << 40, project.rows.sort)
    read = iter(make_loader(project.rows, sampler, project.task, workers, device))
    for _ in range(1 + 2 * workers):  # the first is slow, and these are read ahead
        next(read)
    rows, began = 0, time.perf_counter()
    while rows == 0 or time.perf_counter() - began < seconds:
        _, (_, _, size) = next(read)
        rows += size
    return [Figure(LOADER, rows / (time.perf_counter() - began), "samples/s", where)]


def training_step(
    project: Project, accelerator: Accelerator, module: torch.nn.Module
) -> Callable[[], None]:
    """Forward and backward of one micro-batch of the recipe, in the precision of the YAML."""
    batch = project.batch(range(project.plan.micro_batch_size))
    terms = max(project.task.count(batch), 1)
    batch = send_to_device(batch, accelerator.device)

    def step() -> None:
        module.zero_grad()
        with accelerator.autocast():
            loss = module(project.task.loss_sum, batch)
        (loss / terms).backward()

    return step


def measure_steps(
    section: Section, project: Project, ranks: Ranks, accelerator: Accelerator, seconds: float
) -> None:
    """The training step of each device alone, and of the first 1, 2, 4, ... and all together.

    Each computes one micro-batch, and DDP takes the mean of the gradients, so the work grows with
    the processes (weak scaling). The others wait. The slowest process's median counts.
    """
    device, rank, processes = accelerator.device, ranks.layout.rank, ranks.layout.processes
    size, modules = project.plan.micro_batch_size, []

    def alone() -> list[Figure]:
        model = project.build_model()
        if project.cfg.gradient_checkpointing:
            enable_gradient_checkpointing(model)
        modules.append(TaskModule(model).to(device).train())
        if project.cfg.compile:
            compile_blocks(modules[0])
        step = training_step(project, accelerator, modules[0])
        speed = size / seconds_per_call(step, seconds)
        return [Figure(STEP, speed, "samples/s", str(rank))]

    if accelerator.mixed_precision == "fp8":
        section.lines.append("the training step is measured in bf16; train.py makes layers of fp8")
    everywhere(section, ranks, STEP, alone)
    speeds = by_process(section, STEP, processes)
    if len(speeds) == 1 or not all(speeds):
        return
    calls = min(max(int(seconds * min(speeds) / size), BLOCKS), MOST)

    def together(count: int, group: dist.ProcessGroup | None) -> float:
        """Seconds of a step of this process; 0: it waits."""
        if rank >= count:
            return 0.0
        wrapped = modules[0]
        if group:
            places = [device] if device.type == "cuda" else None
            wrapped = DistributedDataParallel(
                wrapped, device_ids=places, process_group=group, gradient_as_bucket_view=True
            )
        return seconds_per_call(training_step(project, accelerator, wrapped), calls=calls)

    found = []
    for count in sorted({*(1 << i for i in range(processes.bit_length())), processes}):
        group = dist.new_group(list(range(count))) if count > 1 else None
        taken, problem = catch(together, count, group)
        each = ranks.gather((taken, problem and one_line(problem)))
        modules[0].zero_grad()
        gc.collect()  # a DDP that is gone no longer exchanges the module's gradients
        if group and rank < count:
            dist.destroy_process_group(group)
        problems = [f"process {i} of {count}: {text}" for i, (_, text) in enumerate(each) if text]
        if problems:
            section.lines.append(f"not measured: scaling, {problems[0]}")
            break
        found.append(count * size / max(taken for taken, _ in each))
        name = f"{SCALING}, {count} process{'es' if count > 1 else ''}"
        section.figures.append(Figure(name, found[-1], "samples/s", size=count))
    else:
        times = found[-1] / found[0]
        section.lines.append(
            f"{processes} processes together train {times:.3g} times as fast as one, "
            f"{times / processes:.0%} of the ideal"
        )


# ---- Slow devices --------------------------------------------------------------------------------


def behind(speeds: Sequence[float]) -> dict[int, float]:
    """Fraction behind the median, of the slow ones by their numbers; none if one is unknown."""
    if len(speeds) < 2 or not all(speeds):
        return {}
    middle = median(speeds)
    return {i: 1 - v / middle for i, v in enumerate(speeds) if v < (1 - BEHIND) * middle}


def advise(
    names: Sequence[tuple[str, str]],
    steps: Sequence[float],
    products: Sequence[float],
    samples: int,
    largest: int,
    exact: bool,
) -> list[str]:
    """Names the slow devices, with the ways out and what each would give; the best first.

    For each process: (host, device), samples per second of its training step, TFLOP/s of its matrix
    products; 0: not measured. `samples` is the recipe's global_batch_size, `largest` its
    micro_batch_size.
    """
    if len(names) == 1 or not (all(steps) or all(products)):
        return []
    slow_steps, slow_products = behind(steps), behind(products)
    if not slow_steps and not slow_products:
        return [f"no device is more than {BEHIND:.0%} behind the median"]
    kinds = (
        ("its training step does", "samples/s", slow_steps, steps),
        ("its matrix products do", "TFLOP/s", slow_products, products),
    )
    lines = []
    for rank in sorted({*slow_steps, *slow_products}):
        facts = "; ".join(
            f"{what} {short(speeds[rank])} {unit}, {slow[rank]:.0%} behind the median of "
            f"{short(median(speeds))}"
            for what, unit, slow, speeds in kinds
            if rank in slow
        )
        host, device = names[rank]
        lines.append(f"slow device: process {rank} on {host} ({device}): {facts}")
    if not all(steps):
        return [*lines, "what to do about it is not known: not all training steps were measured"]
    lines += [
        "measure again before you act: another program on a device slows it down as well",
        f"ways out, for a step of {samples} samples and without the time of the exchange; the best "
        "first:",
    ]
    out = sorted(slow_steps or slow_products)  # never all of them
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
    leave = (
        f"leave {'them' if len(slow) > 1 else 'it'} out, in the YAML num_processes {len(left)}, "
        f"and gpu_ids without the device of process{'es' if len(slow) > 1 else ''} "
        f"{', '.join(map(str, slow))}"
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
