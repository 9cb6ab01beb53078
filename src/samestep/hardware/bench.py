"""Speed of devices, of what connects them, and of the project's own step; names slow devices.

torchrun starts `python -m samestep.hardware.bench TASK.json` on each device.
"""

import functools
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import send_to_device
from torch.utils.benchmark import Timer

from samestep.base.console import one_line, print_on_main
from samestep.hardware import devices
from samestep.hardware.check import TYPES
from samestep.hardware.devices import Devices
from samestep.hardware.project import Project, read_project
from samestep.hardware.report import Figure, Section, short
from samestep.hardware.smoke import reason
from samestep.processes.device import allow_tf32, compile_blocks
from samestep.report.peaks import peaks_of

STEP = "training step"
SECONDS = 1800  # of all measurements
MiB = 1 << 20
# Rows of a matrix; bytes that are copied, more than caches hold; bytes of an all-reduce.
SIZES = {
    "cpu": {"matrix": 128, "copy": 4 * MiB, "reduce": [4096, MiB]},
    "mps": {"matrix": 4096, "copy": 256 * MiB, "reduce": []},
    "cuda": {"matrix": 8192, "copy": 256 * MiB, "reduce": [4096, MiB, 256 * MiB]},
}
CALLS = 20  # of an all-reduce: as many on each process
MOST_TOGETHER = 8  # of more devices only neighbors are measured
# Of the fastest: so far behind it a device should get less work, or none.
UNEQUAL, LEFT_OUT = 0.2, 0.5


def run(used: Devices, project: Project, flags: list[str], seconds: float, folder: Path) -> Section:
    """Measures all devices at the same time, as in training."""
    size = min(project.cfg.micro_batch_size, project.cfg.global_batch_size)
    section = Section("bench")
    section.facts = {"recipe": str(project.recipe)}
    section.facts["micro-batch"] = f"{size} samples, mixed_precision {used.precision}"
    print_on_main(f"measuring {used.count} x {used.kind}: about {seconds:g} s for each figure")
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=folder) as name:
        task, answer = Path(name) / "task.json", Path(name) / "answer.json"
        told = {"kind": used.kind, "precision": used.precision, "flags": flags, "size": size}
        told |= {"seconds": seconds, "sizes": SIZES[used.kind], "answer": str(answer)}
        task.write_text(json.dumps(told), encoding="utf-8")
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", used.count]
        module = [*devices.PREFIX, "-m", "samestep.hardware.bench", task]
        code, printed = devices.run(*torchrun, *module, seconds=SECONDS)
        if code != 0:
            why = f"no answer within {SECONDS} s" if code is None else reason(printed)
            section.failures.append(f"the devices were not measured: {why}")
            return section
        found = json.loads(answer.read_text(encoding="utf-8"))
    names = [each["name"] for each in found]
    section.conditions = {
        "device": ", ".join(dict.fromkeys(names)), "processes": used.count,
        "recipe": one_line(" ".join([str(project.recipe), *flags])), "precision": used.precision,
    }  # fmt: skip
    for each in found:
        section.figures += [Figure(**figure) for figure in each["figures"]]
        section.lines += each["lines"]
        section.failures += each["failures"]
    order = list(dict.fromkeys(each.name for each in section.figures))  # devices side by side
    section.figures.sort(key=lambda each: order.index(each.name))
    product = f"matmul {used.precision.replace('no', 'fp32')}"
    section.lines += advise(names, speeds(section, STEP), speeds(section, product))
    return section


def speeds(section: Section, name: str) -> list[float]:
    """The value of a figure for each device; 0: not measured."""
    count = section.conditions["processes"]
    found = {each.where: each.value for each in section.figures if each.name == name}
    return [found.get(str(number), 0.0) for number in range(count)]


# ---- In a process of each device -----------------------------------------------------------------


def seconds_per_call(work: Callable[[], object], seconds: float) -> float:
    """Median seconds of a call of `work`, which may only enqueue its work on the device."""
    timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
    timer.timeit(2)  # the first calls compile, allocate, and raise clock rates
    return timer.blocked_autorange(min_run_time=seconds).median


def measure_products(device: torch.device, told: dict) -> Iterator[Figure]:
    """TFLOP/s of products of square matrices: 2 n^3 operations."""
    size, peaks = told["sizes"]["matrix"], peaks_of(device)
    formats = ["fp32", "tf32", "bf16", "fp16"] if device.type == "cuda" else ["fp32", "bf16"]
    for format in formats:
        allow_tf32(format == "tf32")
        # With zeros a GPU needs less power, and so runs faster.
        a, b = (torch.randn(size, size).to(device, TYPES.get(format)) for _ in range(2))
        taken = seconds_per_call(functools.partial(torch.matmul, a, b), told["seconds"])
        speed = 2e-12 * size**3 / taken
        yield Figure(f"matmul {format}", speed, "TFLOP/s", peak=peaks.get(format))
    allow_tf32(False)


def measure_memory(device: torch.device, told: dict) -> Iterator[Figure]:
    """GB/s of copies within the device, and between it and pinned memory of the host."""
    size = told["sizes"]["copy"]
    here, other = (torch.ones(size // 4, device=device) for _ in range(2))
    taken = seconds_per_call(functools.partial(other.copy_, here), told["seconds"])
    peak = peaks_of(device).get("memory")  # what is read and what is written counts
    yield Figure("memory", 2 * size / taken / 1e9, "GB/s", peak=peak)
    if device.type == "cuda":
        host = torch.ones(size // 4, pin_memory=True)
        ways = {"host to device": (here, host), "device to host": (host, here)}
        for name, (target, source) in ways.items():
            copy = functools.partial(target.copy_, source, non_blocking=True)
            taken = seconds_per_call(copy, told["seconds"])
            yield Figure(name, size / taken / 1e9, "GB/s")


def measure_step(device: torch.device, told: dict) -> Iterator[Figure]:
    """Samples per second of this device alone: forward and backward of a micro-batch."""
    project = read_project(told["flags"])
    model = project.build_model(project.cfg.gradient_checkpointing).to(device)
    if project.cfg.compile:
        compile_blocks(model)
    allow_tf32(project.cfg.tf32)
    batch = project.batch(range(told["size"]))
    num_items = max(project.task.count(batch), 1)
    batch = send_to_device(batch, device)
    dtype = torch.float16 if told["precision"] == "fp16" else torch.bfloat16

    def step() -> None:
        model.zero_grad()
        with torch.autocast(device.type, dtype, enabled=told["precision"] != "no"):
            loss = project.task.loss_sum(model, batch)
        (loss / num_items).backward()

    yield Figure(STEP, told["size"] / seconds_per_call(step, told["seconds"]), "samples/s")


def measure_links(device: torch.device, told: dict) -> tuple[list[Figure], list[str]]:
    """Speeds of all-reduce and of copies between devices; what arrived wrong.

    busbw is that of nccl-tests: what each of n processes must send at least, 2 (n - 1) / n of the
    bytes, so it can be compared with the speed of a link.
    """
    figures, failures = [], []
    count, rank = dist.get_world_size(), dist.get_rank()
    for size in told["sizes"]["reduce"]:
        values = torch.full((size // 4,), float(rank + 1), device=device)
        dist.all_reduce(values)
        if not bool((values == count * (count + 1) / 2).all()):
            failures.append(f"all-reduce of {size} bytes gives wrong sums on process {rank}")
        values.zero_()  # it stays finite, however often it is added up
        timer = Timer("work(values)", globals={"work": dist.all_reduce, "values": values})
        taken = timer.timeit(CALLS).median
        if size == told["sizes"]["reduce"][0]:
            figures.append(Figure("all-reduce, latency", taken * 1e6, "us"))
        busbw = 2 * (count - 1) / count * size / taken / 1e9
        figures.append(Figure(f"all-reduce busbw, {size // 1024} KiB", busbw, "GB/s"))
    if device.type == "cuda" and rank == 0:  # this process alone: the others wait
        pairs = [*itertools.combinations(range(count), 2)]
        pairs = pairs if count <= MOST_TOGETHER else [*itertools.pairwise(range(count))]
        for a, b in pairs:
            here = torch.arange(told["sizes"]["copy"] // 4, device=f"cuda:{a}")
            there = torch.zeros_like(here, device=f"cuda:{b}")
            taken = seconds_per_call(functools.partial(there.copy_, here), told["seconds"] / 10)
            speed = here.nbytes / taken / 1e9
            figures.append(Figure("device to device", speed, "GB/s", where=f"{a}-{b}"))
            if not torch.equal(there.cpu(), here.cpu()):
                failures.append(f"copies from GPU {a} to GPU {b} arrive wrong; NCCL_P2P_DISABLE=1")
    dist.barrier()
    return figures, failures


def main() -> None:
    """Measures in this process; the first one writes the answers of all."""
    told = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    device = PartialState(cpu=told["kind"] == "cpu").device
    rank = int(dist.get_rank())
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    own: dict[str, Any] = {"name": name, "figures": [], "lines": [], "failures": []}
    for measure in (measure_products, measure_memory, measure_step):
        try:
            for figure in measure(device, told):
                own["figures"].append({**vars(figure), "where": str(rank)})
        except RuntimeError as error:  # of torch: not enough memory, or no kernel for it
            what = measure.__name__.removeprefix("measure_")
            own["lines"].append(f"not measured: {what} of device {rank}: {one_line(error, 200)}")
    if dist.get_world_size() > 1:
        figures, own["failures"] = measure_links(device, told)
        own["figures"] += [vars(each) for each in figures if rank == 0]
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, own)
    if rank == 0:
        Path(told["answer"]).write_text(json.dumps(answers), encoding="utf-8")
    dist.destroy_process_group()


# ---- Slow devices --------------------------------------------------------------------------------


def advise(names: Sequence[str], steps: Sequence[float], products: Sequence[float]) -> list[str]:
    """Names slow devices, and what each way out would give; the best first.

    For each device its name, the samples per second of its training step, and the TFLOP/s of its
    matrix products; 0: not measured.
    """
    behind: dict[int, float] = {}  # the fraction by which a device is slower
    lines = []
    for what, unit, speeds in (
        ("matrix products do", "TFLOP/s", products),
        ("training step does", "samples/s", steps),
    ):
        fastest = max(speeds) if all(speeds) else 0
        for rank, speed in enumerate(speeds):
            if speed < (1 - UNEQUAL) * fastest:
                behind[rank] = 1 - speed / fastest
                lines.append(
                    f"slow device: {rank} ({names[rank]}): its {what} {short(speed)} {unit}, "
                    f"{behind[rank]:.0%} behind the fastest with {short(fastest)}"
                )
    if not behind:
        known = len(names) > 1 and (all(steps) or all(products))
        return [f"no device is more than {UNEQUAL:.0%} behind the fastest"] if known else []
    if not all(steps):
        return [*lines, "what to do about it is not known: not all training steps were measured"]
    useless = [rank for rank, share in behind.items() if share > LEFT_OUT]
    if len(useless) == len(steps):  # each in something else
        useless = []
    out = sorted(useless or behind)
    left = [speed for rank, speed in enumerate(steps) if rank not in out]
    shares = ", ".join(f"{speed / min(steps):.3g}" for speed in steps)
    named = ", ".join(map(str, out))
    ways = {  # the samples per second that each gives; of equal ones the simplest comes first
        "use all equally: --device_shares equal": len(steps) * min(steps),
        f'unequal shares: --device_shares "[{shares}]", or auto': sum(steps),
    }
    if left:
        way = f"leave out {named}: CUDA_VISIBLE_DEVICES without it, num_processes {len(left)}"
        ways[way] = len(left) * min(left)
    rule = f"{UNEQUAL:.0%} behind: unequal shares"
    if useless:
        rule = f"{LEFT_OUT:.0%} behind: leave out {named}"
    best = sorted(ways, key=lambda way: -ways[way])
    return [
        *lines,
        f"rule of thumb, for more than {rule}",
        "measure again before you act: another program on a device slows it down as well",
        "by these speeds, without the time of communication, the best first:",
        *(f"{n}. at most {short(ways[way])} samples/s: {way}" for n, way in enumerate(best, 1)),
    ]


if __name__ == "__main__":
    main()
