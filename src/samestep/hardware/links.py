"""Measures what connects the processes: collective operations."""

import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist

from samestep.hardware.devices import seconds_per_call
from samestep.hardware.report import Figure
from samestep.processes.ranks import Ranks

KiB, MiB = 1 << 10, 1 << 20
# Bytes of a message, ascending. Gloo on CPUs, and networks in general, are slower than NVLink.
CPU_SIZES = (4 * KiB, 64 * KiB, MiB, 16 * MiB)
GPU_SIZES = (*CPU_SIZES, 256 * MiB)
FACTORS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # times (n - 1) / n


def size_name(size: int) -> str:
    """A power of two of bytes: 4 KiB, 16 MiB."""
    return f"{size // MiB} MiB" if size >= MiB else f"{size // KiB} KiB"


def operation(kind: str, whole: torch.Tensor, part: torch.Tensor) -> Callable[[], object]:
    """A function that does this operation; each process has an equal part of the whole array."""
    # The names of torch 2.13 come first: there the older ones warn.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: gather(whole, part),
        "reduce_scatter": lambda: reduce(part, whole),
    }[kind]


def measure_collectives(ranks: Ranks, device: torch.device, seconds: float) -> list[Figure]:
    """Latency and bandwidths of each operation and size. The slowest process's median counts.

    The bandwidths, in 10^9 bytes per second, are algbw and busbw of nccl-tests, whose
    doc/PERFORMANCE.md has the reasons. algbw is size / time, with the size of the whole array.
    busbw is what each of n processes must send at least: 2 (n - 1) / n of that for all_reduce, and
    (n - 1) / n for the others; so it can be compared with the speed of a link.
    """
    figures, processes = [], ranks.layout.processes
    sizes = CPU_SIZES if device.type == "cpu" else GPU_SIZES
    for kind, size in itertools.product(FACTORS, sizes):
        # Zeros stay finite, however often they are added up.
        part = torch.zeros(max(size // 4 // processes, 1), device=device)
        whole = torch.zeros(part.numel() * processes, device=device)
        work = operation(kind, whole, part)
        taken = max(ranks.gather(seconds_per_call(work, seconds, ranks.from_main)))
        name, algorithm = size_name(size), whole.nbytes / taken / 1e9
        if size == sizes[0]:
            figures.append(Figure(f"{kind} latency, {name}", taken * 1e6, "us", size=size))
        bus = algorithm * FACTORS[kind] * (processes - 1) / processes
        figures.append(Figure(f"{kind} algbw, {name}", algorithm, "GB/s", size=size))
        figures.append(Figure(f"{kind} busbw, {name}", bus, "GB/s", size=size))
    return figures
