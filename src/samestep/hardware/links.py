"""Measures what connects the processes: collective operations, and messages between two."""

import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist

from samestep.hardware.report import Figure
from samestep.hardware.timing import WARM_UP, seconds_per_call
from samestep.processes.ranks import Ranks

KiB, MiB = 1 << 10, 1 << 20
# Bytes of a message, ascending. Gloo on CPUs, and networks in general, are slower than NVLink.
CPU_SIZES = (4 * KiB, 64 * KiB, MiB, 16 * MiB)
GPU_SIZES = (*CPU_SIZES, 256 * MiB)
FACTORS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # times (n - 1) / n
MOST_PAIRS = 500  # 32 processes have 496


def size_name(size: int) -> str:
    """A power of two of bytes: 4 KiB, 16 MiB."""
    return f"{size // MiB} MiB" if size >= MiB else f"{size // KiB} KiB"


def bandwidths(kind: str, size: int, seconds: float, processes: int) -> tuple[float, float]:
    """(algorithm, bus) bandwidth of a collective operation, in GB/s, 10^9 bytes.

    They are algbw and busbw of nccl-tests; its doc/PERFORMANCE.md has the reasons. The algorithm
    bandwidth is size / time. The bus bandwidth is that times 2 (n - 1) / n for all_reduce, and
    times (n - 1) / n for all_gather and reduce_scatter: what each of n processes must send at
    least, so it can be compared with the speed of a link. `size` is that of the whole array: what
    all_gather gives, and reduce_scatter takes.
    """
    algorithm = size / seconds / 1e9
    return algorithm, algorithm * FACTORS[kind] * (processes - 1) / processes


def operation(
    kind: str, size: int, processes: int, device: torch.device
) -> tuple[Callable[[], object], int]:
    """A function that does this operation on float32 arrays of about `size` bytes, and the bytes.

    Each process has an equal part. The names of torch 2.13 come first: there the older ones warn.
    """
    # Zeros stay finite, however often they are added up.
    part = torch.zeros(max(size // 4 // processes, 1), device=device)
    whole = torch.zeros(part.numel() * processes, device=device)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole), whole.nbytes
    if kind == "all_gather":
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return lambda: gather(whole, part), whole.nbytes
    reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return lambda: reduce(part, whole), whole.nbytes


def measure_collectives(ranks: Ranks, device: torch.device, seconds: float) -> list[Figure]:
    """Latency and bandwidths of each operation and size. The slowest process's median counts."""
    figures, processes = [], ranks.layout.processes
    sizes = CPU_SIZES if device.type == "cpu" else GPU_SIZES
    for kind in FACTORS:
        for size in sizes:
            work, sent = operation(kind, size, processes, device)
            taken = max(ranks.gather(seconds_per_call(work, device, seconds, ranks.from_main)))
            algorithm, bus = bandwidths(kind, sent, taken, processes)
            name = size_name(size)
            if size == sizes[0]:
                figures.append(Figure(f"{kind} latency, {name}", taken * 1e6, "us", size=size))
            figures += [
                Figure(f"{kind} algbw, {name}", algorithm, "GB/s", size=size),
                Figure(f"{kind} busbw, {name}", bus, "GB/s", size=size),
            ]
    return figures


def choose_pairs(processes: int) -> tuple[list[tuple[int, int]], list[str]]:
    """The pairs to measure, and a remark if these are not all."""
    pairs = list(itertools.combinations(range(processes), 2))
    if len(pairs) <= MOST_PAIRS:
        return pairs, []
    line = f"point-to-point: only neighbours, since {processes} processes are {len(pairs):,} pairs"
    return [(rank, rank + 1) for rank in range(processes - 1)], [line]


def measure_pairs(ranks: Ranks, device: torch.device) -> tuple[list[Figure], list[str]]:
    """Latency and bandwidth between two processes, one pair at a time while the others wait.

    A message goes there and one back; half the time of a round is that of a message. Call it after
    a collective operation of all processes: NCCL makes its connections in that.
    """
    small = CPU_SIZES[0]
    large = 4 * MiB if device.type == "cpu" else 256 * MiB
    figures, (pairs, remarks) = [], choose_pairs(ranks.layout.processes)
    for pair in pairs:
        times = [0.0, 0.0]
        if ranks.layout.rank in pair:
            times = [ping_pong(ranks.layout.rank, pair, size, device) for size in (small, large)]
        latency, taken = ranks.gather(times)[pair[0]]  # the others wait here
        where = f"{pair[0]}-{pair[1]}"
        figures += [
            Figure(f"point-to-point latency, {size_name(small)}", latency * 1e6, "us", where),
            Figure(f"point-to-point, {size_name(large)}", large / taken / 1e9, "GB/s", where),
        ]
    return figures, remarks


def ping_pong(rank: int, pair: tuple[int, int], size: int, device: torch.device) -> float:
    """Seconds that a message of `size` bytes takes between this process and the other of a pair."""
    peer = pair[1] if rank == pair[0] else pair[0]
    message = torch.zeros(size // 4, device=device)
    turns = [dist.isend, dist.irecv] if rank == pair[0] else [dist.irecv, dist.isend]

    def round_trip() -> None:
        for turn in turns:
            # In a batch NCCL uses the connections of all; otherwise it makes new ones for a pair.
            for work in dist.batch_isend_irecv([dist.P2POp(turn, message, peer)]):
                work.wait()

    calls = 20 * WARM_UP if size <= MiB else 10
    return seconds_per_call(round_trip, device, calls=calls) / 2
