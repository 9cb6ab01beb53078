"""Measures the project's own work: its loader, checkpoints, training step, and scaling."""

import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch.nn.parallel import DistributedDataParallel

from samestep.base.console import one_line
from samestep.base.files import fsync
from samestep.checkpoint import checkpoints, tensor_files
from samestep.checkpoint.weights import TaskModule, enable_gradient_checkpointing
from samestep.hardware.project import Project
from samestep.hardware.report import Figure
from samestep.hardware.timing import FEWEST, MOST, seconds_per_call
from samestep.processes.device import compile_blocks, count_workers
from samestep.processes.ranks import Ranks, catch
from samestep.step import batches
from samestep.step.batches import StepBatchSampler

SCALING = "training together"
CHECKPOINT = 256 << 20  # bytes that are written and hashed


def loader_speed(project: Project, device: torch.device, seconds: float) -> float:
    """Samples per second that this process's loader yields, as in training: rows are read,
    augmented and collated, with the workers that the recipe asks for."""
    workers = count_workers(project.cfg.num_workers, project.task, device)
    sampler = StepBatchSampler(project.plan, 0, project.plan.samples << 40, project.rows.sort)
    pinned = device.type == "cuda"
    loader = batches.make_loader(project.rows, sampler, project.task, workers, pinned)
    read = iter(loader)
    for _ in range(1 + 2 * workers):  # the first is slow, and these are read ahead
        next(read)
    rows, began = 0, time.perf_counter()
    while rows == 0 or time.perf_counter() - began < seconds:
        _, (_, _, size) = next(read)
        rows += size
    return rows / (time.perf_counter() - began)


def measure_disk(folder: Path, size: int = CHECKPOINT) -> list[Figure]:
    """Speed of writing a checkpoint to this folder's disk, until it is safe there, and of hashing.

    The functions are those of training: safetensors, then fsync, then SHA-256 in threads. What is
    hashed still lies in memory, as it does when a checkpoint has just been written. The files are
    removed again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    share = tensor_files.Share({"weights": torch.randn(size // 4)}, {})
    written, hashed = [], []
    for _ in range(3):
        with tempfile.TemporaryDirectory(prefix=".bench-", dir=folder) as name:
            partial = Path(name)
            began = time.perf_counter()
            with checkpoints.report_full_disk(partial):
                tensor_files.write_share(share, partial)
                sizes = checkpoints.file_sizes(partial)
                for file in sizes:
                    fsync(partial / file)
            written.append(time.perf_counter() - began)
            began = time.perf_counter()
            checkpoints.hash_blocks(partial, checkpoints.list_blocks(sizes))
            hashed.append(time.perf_counter() - began)
    return [
        Figure("checkpoint write", size / median(written) / 1e9, "GB/s"),
        Figure("checkpoint hash", size / median(hashed) / 1e9, "GB/s"),
    ]


def build_module(project: Project, accelerator: Accelerator) -> TaskModule:
    """The project's model on the device, as train.py would wrap it for one process."""
    model = project.build_model()
    if project.cfg.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    module = TaskModule(model).to(accelerator.device).train()
    if project.cfg.compile:
        compile_blocks(module)
    return module


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


def process_counts(processes: int) -> list[int]:
    """1, 2, 4 and so on, and all processes."""
    return sorted({*(1 << i for i in range(processes.bit_length())), processes})


def measure_scaling(
    project: Project,
    ranks: Ranks,
    accelerator: Accelerator,
    module: TaskModule,
    seconds: float,
    alone: float,
) -> tuple[list[Figure], list[str]]:
    """Samples per second of the first 1, 2, 4, ... and of all processes, and remarks.

    Each computes one micro-batch, and DDP takes the mean of the gradients, so the work grows with
    the processes (weak scaling). The others wait. The slowest process's median counts. `alone` are
    seconds of the slowest process's own step. All processes must call it.
    """
    device, rank, figures = accelerator.device, ranks.layout.rank, []
    calls = min(max(int(seconds / alone), FEWEST), MOST)
    for count in process_counts(ranks.layout.processes):
        group = dist.new_group(list(range(count))) if count > 1 else None

        def together(group: dist.ProcessGroup | None = group, count: int = count) -> float:
            if rank >= count:
                return 0.0
            wrapped = module
            if count > 1:
                places = [device] if device.type == "cuda" else None
                wrapped = DistributedDataParallel(
                    module, device_ids=places, process_group=group, gradient_as_bucket_view=True
                )
            step = training_step(project, accelerator, wrapped)
            return seconds_per_call(step, device, calls=calls)

        taken, problem = catch(together)
        found = ranks.gather((taken, problem and one_line(problem)))
        module.zero_grad()
        gc.collect()  # a DDP that is gone no longer exchanges the module's gradients
        if group and rank < count:
            dist.destroy_process_group(group)
        for number, (_, problem) in enumerate(found):
            if problem:
                place = f"process {number} of {count}"
                return figures, [f"not measured: scaling, {place}: {problem}"]
        speed = count * project.plan.micro_batch_size / max(taken for taken, _ in found)
        name = f"{SCALING}, {count} process{'es' * (count > 1)}"
        figures.append(Figure(name, speed, "samples/s", size=count))
    return figures, []
