"""Speed of devices, of what connects them, and of the project's own step; names slow devices.

What may hang, or takes memory of a GPU, is found out in processes of their own:

    python -m samestep.hardware.bench FUNCTION '{"argument": ...}'      it prints a line of JSON
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from samestep.base.console import is_main, one_line
from samestep.base.errors import catch
from samestep.hardware.devices import Devices, Section, ask
from samestep.hardware.project import AUTOCAST, Project, read_project
from samestep.launch.device import allow_tf32

_MiB = 1 << 20
# Rows of a matrix; bytes of a copy, more than caches hold; bytes of an all-reduce.
SIZES = {
    "cpu": {"matrix": 128, "copy": 4 * _MiB, "sizes": [4096, _MiB]},
    "mps": {"matrix": 4096, "copy": 256 * _MiB, "sizes": []},
    "cuda": {"matrix": 8192, "copy": 256 * _MiB, "sizes": [4096, _MiB, 256 * _MiB]},
}
_UNEQUAL = 0.2  # of the fastest: so far behind it a device is named
# Largest error of a product of matrices, relative to its norm.
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 2e-3}
CALLS = 20  # of an all-reduce: as many on each process


def run(section: Section, used: Devices, project: Project, flags: list[str], time: float) -> None:
    """Measures all devices at the same time, as in training; raises Wrong."""
    section.facts["recipe"] = one_line(" ".join([str(project.recipe), *flags]))
    section.facts["precision"] = used.precision
    given = {"precision": used.precision, **SIZES[used.kind]}
    answers = ask("measure", used, seconds=time, flags=flags, **given)
    names = [name for name, _, _ in answers]
    section.facts["devices"] = f"{len(names)} x {', '.join(dict.fromkeys(names))}"
    for rank, (_, _, problem) in enumerate(answers):
        if problem:
            section.failures.append(f"not measured: {rank}: {problem}")
    if not section.failures:
        figures = [found for _, found, _ in answers]
        section.figures = {name: [each[name] for each in figures] for name in figures[0]}
    if used.kind == "cuda":
        for name in ("matmul bf16, TFLOP/s", "training step, samples/s"):
            section.lines += advise(names, name, section.figures.get(name, []))


def advise(names: Sequence[str], what: str, speeds: Sequence[float]) -> list[str]:
    """Names slow devices, and what people do about them."""
    advice = "give it less work, by --device_shares auto, or leave it out, by CUDA_VISIBLE_DEVICES"
    lines = []
    for rank, speed in enumerate(speeds):
        behind = 1 - speed / max(speeds)
        if behind > _UNEQUAL:
            slow = f"slow device: {rank} ({names[rank]}) is {behind:.0%} behind the fastest in"
            lines.append(f"{slow} {what}; measure again, then {advice}")
    return lines


# ---- In processes of their own -------------------------------------------------------------------


def _ask_all(what: str, kind: str, sizes: Sequence[int] = (), **given: Any) -> list[tuple]:
    """Of each process, whose devices work at the same time as in training: the device's name, what
    a function of this module finds out about it, and what went wrong."""
    device, name, backend = torch.device(kind), kind, "gloo"
    if kind == "cuda":
        device = torch.device(kind, int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        name = torch.cuda.get_device_name(device)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend)
    found, problem = catch(lambda: globals()[what](device, **given))
    answers: list = [None] * dist.get_world_size()
    dist.all_gather_object(answers, (name, found, one_line(problem or "", 200)))
    if len(answers) > 1 and not any(problem for _, _, problem in answers):
        for size in sizes:
            speed = all_reduce(device, size)
            for _, found, _ in answers:
                found[f"all-reduce, {size // 1024} KiB, GB/s"] = speed
    return answers


def look(device: torch.device) -> float:
    """The free fraction of a device's memory; ValueError for what it computes wrong."""
    if wrong := wrong_products(device):
        raise ValueError(wrong)
    if device.type != "cuda":
        return 1.0
    free, total = torch.cuda.mem_get_info(device)
    return free / total


def wrong_products(device: torch.device) -> str:
    """The formats in which products of matrices are wrong on the device; empty: none."""
    allow_tf32(False)
    wrong = []
    for format, limit in TOLERANCE.items():
        torch.manual_seed(0)
        a, b = (torch.randn(64, 64).to(AUTOCAST.get(format)) for _ in range(2))
        product = (a.to(device) @ b.to(device)).cpu().double()
        right = a.double() @ b.double()
        error = float((product - right).norm() / right.norm())
        if not error <= limit:  # NaN, too
            wrong.append(f"the error of a product in {format} is {error:.1g}, not {limit:g}")
    return "; ".join(wrong)


def _timer(work: Callable, *given: object) -> Any:
    """PyTorch's timer of a call."""
    from torch.utils.benchmark import Timer  # it warns of a CUDA toolkit where there is no GPU

    return Timer("work(*given)", globals={"work": work, "given": given})


def _seconds_per_call(seconds: float, work: Callable, *given: object) -> float:
    """Median seconds of a call of `work`, which may only enqueue its work on the device."""
    timer = _timer(work, *given)
    timer.timeit(2)  # the first calls compile, allocate, and raise clock rates
    return timer.blocked_autorange(min_run_time=seconds).median


def measure(
    device: torch.device, seconds: float, flags: list[str], precision: str, matrix: int, copy: int
) -> dict[str, float]:
    """Speeds of products of matrices, of copies, and of the project's own step."""
    found = {}
    on_gpu = device.type == "cuda"
    for format in ("fp32", "tf32", "bf16", "fp16") if on_gpu else ("fp32", "bf16"):
        allow_tf32(format == "tf32")
        # With zeros a GPU needs less power, and so runs faster.
        a, b = (torch.randn(matrix, matrix).to(device, AUTOCAST.get(format)) for _ in range(2))
        taken = _seconds_per_call(seconds, torch.mm, a, b)
        found[f"matmul {format}, TFLOP/s"] = 2e-12 * matrix**3 / taken
    here = torch.arange(copy // 8, device=device)
    other = torch.zeros_like(here)
    taken = _seconds_per_call(seconds, other.copy_, here)
    found["memory, GB/s"] = 2 * here.nbytes / taken / 1e9  # what is read and what is written
    if on_gpu:
        host = torch.zeros_like(here, device="cpu", pin_memory=True)
        next_gpu = torch.device("cuda", (dist.get_rank() + 1) % dist.get_world_size())
        ways = {"device to host": (host, here), "host to device": (other, host)}
        if next_gpu != device:
            ways["device to the next one"] = (torch.zeros_like(here, device=next_gpu), here)
        for name, (there, source) in ways.items():
            taken = _seconds_per_call(seconds, there.copy_, source, True)
            found[f"{name}, GB/s"] = here.nbytes / taken / 1e9
            if not torch.equal(there.cpu(), here.cpu()):
                raise ValueError(f"{name}: copies arrive wrong; try NCCL_P2P_DISABLE=1")
    project = read_project(flags)
    size = min(project.cfg.micro_batch_size, project.cfg.global_batch_size)
    work = (project.add_gradients, project.build_model(device), project.batch(range(size)))
    found["training step, samples/s"] = size / _seconds_per_call(seconds, *work, precision)
    return found


def all_reduce(device: torch.device, size: int) -> float:
    """GB/s of sums over all processes, as busbw of nccl-tests; ValueError for a wrong sum."""
    count, rank = dist.get_world_size(), dist.get_rank()
    values = torch.full((size // 4,), float(rank + 1), device=device)
    dist.all_reduce(values)
    if not bool((values == count * (count + 1) / 2).all()):
        raise ValueError(f"an all-reduce of {size} bytes gives wrong sums")
    values.zero_()  # it stays finite, however often it is added up
    seconds = _timer(dist.all_reduce, values).timeit(CALLS).median
    return 2 * (count - 1) / count * size / seconds / 1e9


if __name__ == "__main__":
    answer = _ask_all(sys.argv[1], **json.loads(sys.argv[2]))
    dist.destroy_process_group()
    if is_main():
        print(json.dumps({"answer": answer}), flush=True)
