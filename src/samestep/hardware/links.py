"""Measures what connects the processes: collective operations, and messages between two."""

import functools
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
MOST_PAIRS = 120  # those of 16 processes, and seconds each


def size_name(size: int) -> str:
    """A power of two of bytes: 4 KiB, 16 MiB."""
    return f"{size // MiB} MiB" if size >= MiB else f"{size // KiB} KiB"


def measure_collectives(ranks: Ranks, device: torch.device, seconds: float) -> list[Figure]:
    """Latency and bandwidth of each operation and size. The slowest process's median counts.

    busbw, in 10^9 bytes per second, is that of nccl-tests (doc/PERFORMANCE.md has the reasons):
    what each of n processes must send at least, 2 (n - 1) / n of the whole array for all_reduce,
    and (n - 1) / n for the others; so it can be compared with the speed of a link.
    """
    figures, processes = [], ranks.layout.processes
    sizes = CPU_SIZES if device.type == "cpu" else GPU_SIZES
    # The names of torch 2.13 come first: there the older ones warn.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    kinds: dict[str, tuple[int, Callable]] = {  # times (n - 1) / n, and what is done
        "all_reduce": (2, lambda whole, part: dist.all_reduce(whole)),
        "all_gather": (1, gather),
        "reduce_scatter": (1, lambda whole, part: reduce(part, whole)),
    }
    for (kind, (factor, work)), size in itertools.product(kinds.items(), sizes):
        # Zeros stay finite, however often they are added up.
        part = torch.zeros(max(size // 4 // processes, 1), device=device)
        whole = torch.zeros(part.numel() * processes, device=device)
        call = functools.partial(work, whole, part)
        taken = max(ranks.gather(seconds_per_call(call, seconds, ranks.from_main)))
        name = size_name(size)
        if size == sizes[0]:
            figures.append(Figure(f"{kind} latency, {name}", taken * 1e6, "us", size=size))
        bus = factor * (processes - 1) / processes * whole.nbytes / taken / 1e9
        figures.append(Figure(f"{kind} busbw, {name}", bus, "GB/s", size=size))
    return figures


def measure_pairs(ranks: Ranks, device: torch.device) -> list[Figure]:
    """Latency and bandwidth of all pairs, one at a time while the others wait; of more than
    MOST_PAIRS those of neighbours.

    A message goes there and one back; half the time of a round is that of a message. Call it after
    a collective operation of all processes: NCCL makes its connections in that.
    """
    small, large = CPU_SIZES[0], 4 * MiB if device.type == "cpu" else 256 * MiB
    figures, rank = [], ranks.layout.rank
    pairs = [*itertools.combinations(range(ranks.layout.processes), 2)]
    if len(pairs) > MOST_PAIRS:
        pairs = [*itertools.pairwise(range(ranks.layout.processes))]
    for pair in pairs:
        times = [0.0, 0.0]
        if rank in pair:
            times = [ping_pong(rank, pair, size, device) for size in (small, large)]
        latency, taken = ranks.gather(times)[pair[0]]  # the others wait here
        where, speed = f"{pair[0]}-{pair[1]}", large / taken / 1e9
        figures += [
            Figure(f"point-to-point latency, {size_name(small)}", latency * 1e6, "us", where),
            Figure(f"point-to-point, {size_name(large)}", speed, "GB/s", where),
        ]
    return figures


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

    return seconds_per_call(round_trip, calls=60 if size <= MiB else 10) / 2
