"""What is found out in processes of their own, since a GPU may hang, and takes memory.

python -m samestep.hardware.child FUNCTION '{"argument": ...}'      its last line is JSON
"""

import contextlib
import io
import itertools
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.commands.env import env_command, env_command_parser
from torch.utils import collect_env
from torch.utils.benchmark import Timer

from samestep.base.console import IS_MAIN, one_line
from samestep.hardware.project import AUTOCAST, read_project
from samestep.processes.device import allow_tf32
from samestep.processes.ranks import catch
from samestep.report.peaks import peaks_of

# Largest error of a product of matrices, relative to its norm.
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 2e-3}
CALLS = 20  # of an all-reduce: as many on each process


def facts() -> dict[str, str]:
    """Versions and kinds, by torch's collect_env and `accelerate env`."""
    found = collect_env.get_env_info()._asdict()
    with contextlib.redirect_stdout(io.StringIO()):
        found |= env_command(env_command_parser().parse_args([]))
    facts = {name.replace("`", ""): str(text) for name, text in found.items() if text}
    return {name: text for name, text in facts.items() if "\n" not in text and text != "N/A"}


def look(device: str) -> dict[str, Any]:
    """A device's name, the fraction of its memory that is free, and the formats that it has."""
    where, free, name = torch.device(device), 1.0, device
    if where.type == "cuda":
        unused, total = torch.cuda.mem_get_info(where)
        free, name = unused / total, torch.cuda.get_device_name(where)
    states = {format: try_format(format, where) for format in TOLERANCE}
    return {"name": name, "free": free, "formats": states}


def try_format(format: str, device: torch.device) -> str:
    """`runs`, `wrong: ...` or `no: ...` with the reason, by a product of matrices."""
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 64, generator=draw).to(AUTOCAST.get(format)) for _ in range(2))
    allow_tf32(False)
    product, problem = catch(lambda: (a.to(device) @ b.to(device)).cpu().double())
    if problem:  # each backend refuses a format with an error of its own
        return f"no: {one_line(problem, 100) or type(problem).__name__}"
    right = a.double() @ b.double()
    error = float((product - right).norm() / right.norm())
    if not error <= TOLERANCE[format]:  # NaN, too
        return f"wrong: the error of a product is {error:.1g}, the limit {TOLERANCE[format]:g}"
    return "runs"


def seconds_per_call(seconds: float, work: Callable, *given: object) -> float:
    """Median seconds of a call of `work`, which may only enqueue its work on the device."""
    timer = Timer("work(*given)", globals={"work": work, "given": given})
    timer.timeit(2)  # the first calls compile, allocate, and raise clock rates
    return timer.blocked_autorange(min_run_time=seconds).median


def measure(
    device: str, seconds: float, flags: list[str], precision: str, matrix: int, copy: int, **_: Any
) -> dict[str, Any]:
    """TFLOP/s of products of matrices, GB/s of copies, and samples/s of the project's own step."""
    where, found = torch.device(device), {}
    on_gpu = where.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(where)
    for format in ("fp32", "tf32", "bf16", "fp16") if on_gpu else ("fp32", "bf16"):
        allow_tf32(format == "tf32")
        # With zeros a GPU needs less power, and so runs faster.
        a, b = (torch.randn(matrix, matrix).to(where, AUTOCAST.get(format)) for _ in range(2))
        found[f"matmul {format}"] = 2e-12 * matrix**3 / seconds_per_call(seconds, torch.mm, a, b)
    here, other = (torch.ones(copy // 4, device=where) for _ in range(2))
    taken = seconds_per_call(seconds, other.copy_, here)
    found["memory"] = 2 * copy / taken / 1e9  # what is read and what is written counts
    if on_gpu:
        host = torch.ones(copy // 4, pin_memory=True)
        for name, pair in {"host to device": (here, host), "device to host": (host, here)}.items():
            found[name] = copy / seconds_per_call(seconds, pair[0].copy_, pair[1], True) / 1e9
    project = read_project(flags)
    size = min(project.cfg.micro_batch_size, project.cfg.global_batch_size)
    work = (project.add_gradients, project.build_model(where), project.batch(range(size)))
    found["training step"] = size / seconds_per_call(seconds, *work, precision)
    name = torch.cuda.get_device_name(where) if on_gpu else device
    return {"name": name, "figures": found, "peaks": peaks_of(where), "wrong": []}


def links(kind: str, sizes: list[int], copy: int, **_: Any) -> dict[str, Any]:
    """Speeds of all-reduce (busbw of nccl-tests) and of copies between devices, and what arrived
    wrong."""
    device = PartialState(cpu=kind == "cpu").device
    count, rank = dist.get_world_size(), dist.get_rank()
    figures, wrong = {}, []
    for size in sizes:
        values = torch.full((size // 4,), float(rank + 1), device=device)
        dist.all_reduce(values)
        if not bool((values == count * (count + 1) / 2).all()):
            wrong.append(f"an all-reduce of {size} bytes gives wrong sums")
        values.zero_()  # it stays finite, however often it is added up
        timer = Timer("work(values)", globals={"work": dist.all_reduce, "values": values})
        taken = timer.timeit(CALLS).median
        figures[f"latency of all-reduce, {size // 1024} KiB"] = taken * 1e6
        figures[f"all-reduce, {size // 1024} KiB"] = 2 * (count - 1) / count * size / taken / 1e9
    if kind == "cuda" and rank == 0:  # this process alone: the others wait
        for a, b in itertools.combinations(range(count), 2):
            here = torch.arange(copy // 8, device=f"cuda:{a}")
            there = torch.zeros_like(here, device=f"cuda:{b}")
            figures[f"copy, {a} to {b}"] = copy / seconds_per_call(0.1, there.copy_, here) / 1e9
            if not torch.equal(there.cpu(), here.cpu()):
                wrong.append(f"copies from GPU {a} to {b} arrive wrong: set NCCL_P2P_DISABLE=1")
    told: list = [None] * count
    dist.all_gather_object(told, wrong)
    dist.destroy_process_group()
    wrong = sorted({line for each in told for line in each})
    return {"figures": figures, "peaks": {}, "wrong": wrong}


if __name__ == "__main__":
    answer = globals()[sys.argv[1]](**json.loads(sys.argv[2]))
    if IS_MAIN:
        print(json.dumps(answer), flush=True)
