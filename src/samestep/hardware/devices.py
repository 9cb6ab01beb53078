"""Measures a device by itself: the formats it computes in, matrix products, memory, copies."""

import functools
import itertools
from collections.abc import Callable
from statistics import median

import torch
from torch.utils.benchmark import Timer

from samestep.hardware.report import Figure
from samestep.processes.device import allow_tf32
from samestep.report.peaks import FORMATS, fp8_type, peaks_of

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Largest error of a product, as a fraction of its Euclidean norm. The inputs are numbers of the
# format, except of tf32: so it is that of adding up, and of rounding the result.
TOLERANCE = {"fp32": 1e-5, "tf32": 2e-3, "bf16": 1e-2, "fp16": 2e-3, "fp8": 2e-2}
# Rows, and columns; a CPU would take minutes for the larger ones.
MATRICES, CPU_MATRICES = (256, 512, 1024, 2048, 4096, 8192), (256, 512, 1024)
MiB = 1 << 20
BUFFERS = (16 * MiB, 64 * MiB, 256 * MiB)  # that are copied: the last is more than caches hold
BLOCKS, MOST = 5, 500  # groups of measured calls; calls


def seconds_per_call(
    work: Callable[[], object], seconds: float = 1.0, agree: Callable = int, calls: int = 0
) -> float:
    """Median seconds of a call of `work`, which may only enqueue its work on the device.

    The calls take about `seconds`, or are `calls` in number. Where they wait for other processes,
    all must make the same number: `agree` turns this process's number into that of all.
    """
    timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
    # The first calls compile, allocate, and raise clock rates; `timeit` makes two more before it.
    once = timer.timeit(1).median
    if not calls:
        calls = agree(int(min(max(seconds / max(once, 1e-9), BLOCKS), MOST)))
    # Nothing waits for the device between the calls of a block, so that it never runs out of work.
    return median(timer.timeit(max(calls // BLOCKS, 1)).median for _ in range(BLOCKS))


# ---- Formats -------------------------------------------------------------------------------------


def draw_matrices(format: str, size: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Two square matrices on the CPU with numbers of a format, in the type for this device.

    They are random: with zeros a GPU needs less power, and so runs faster.
    """
    kind = fp8_type(device) if format == "fp8" else TYPES.get(format, torch.float32)
    draw = torch.Generator().manual_seed(0)
    return tuple(torch.randn(size, size, generator=draw).to(kind) for _ in range(2))


def multiply(format: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product of a and the transpose of b, which fp8 wants by columns."""
    if format != "fp8":
        return a @ b.t()
    one = torch.ones((), device=a.device)
    return torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def try_format(format: str, device: torch.device) -> str:
    """`runs`, `emulated`, `wrong: ...` or `no: ...` with the reason, by a product of matrices."""
    allow_tf32(format == "tf32")
    try:
        a, b = draw_matrices(format, 64, device)
        right = a.double() @ b.double().t()
        product = multiply(format, a.to(device), b.to(device)).cpu().double()
    except Exception as problem:  # each backend refuses a format with an error of its own
        text = str(problem).strip().splitlines()
        return f"no: {text[0][:80] if text else type(problem).__name__}"
    finally:
        allow_tf32(False)
    error = float((product - right).norm() / right.norm())
    if not error <= TOLERANCE[format]:  # NaN, too
        return f"wrong: the error of a product is {error:.1g}, the limit {TOLERANCE[format]:g}"
    if format == "tf32" and error < TOLERANCE["fp32"]:
        return "no: computed as fp32"
    emulated = False
    if device.type == "cuda" and format == "bf16":
        with torch.cuda.device(device):
            emulated = not torch.cuda.is_bf16_supported(including_emulation=False)
    return "emulated" if emulated else "runs"


def try_formats(device: torch.device) -> dict[str, str]:
    """What `try_format` says of each format; tf32 is one of GPUs."""
    return {f: try_format(f, device) for f in FORMATS if device.type == "cuda" or f != "tf32"}


# ---- Speeds --------------------------------------------------------------------------------------


def name_of(device: torch.device) -> str:
    """The name of a GPU of CUDA; of others their kind."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def formats_of(device: torch.device) -> tuple[str, ...]:
    """The formats to measure on a device of this type."""
    return {"cpu": ("fp32", "bf16"), "mps": ("fp32", "bf16", "fp16")}.get(device.type, FORMATS)


def measure_products(format: str, device: torch.device, seconds: float) -> list[Figure]:
    """TFLOP/s of products in one format, 2 n^3 operations for matrices of n x n.

    Raises RuntimeError if a GPU does not compute in it, or only emulates it.
    """
    figures, peak = [], peaks_of(device).get(format)
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        state = try_format(format, device)
        if device.type == "cuda" and state != "runs":
            raise RuntimeError(state)
        allow_tf32(format == "tf32")
        for size in CPU_MATRICES if device.type == "cpu" else MATRICES:
            a, b = (each.to(device) for each in draw_matrices(format, size, device))
            taken = seconds_per_call(functools.partial(multiply, format, a, b), seconds)
            name = f"matmul {format}, {size}"
            figures.append(Figure(name, 2e-12 * size**3 / taken, "TFLOP/s", size=size, peak=peak))
    finally:
        allow_tf32(before)
    return figures


def measure_memory(device: torch.device, seconds: float) -> list[Figure]:
    """GB/s, 10^9 bytes, of copies within the device's memory; what is read and written counts."""
    figures, peak = [], peaks_of(device).get("memory")
    formats = [format for format in formats_of(device) if format in ("fp32", *TYPES)]
    for format, size in itertools.product(formats, BUFFERS):
        kind = TYPES.get(format, torch.float32)
        source = torch.ones(size // kind.itemsize, device=device, dtype=kind)
        target = torch.empty_like(source)
        speed = 2 * size / seconds_per_call(functools.partial(target.copy_, source), seconds) / 1e9
        shown = peak if size == BUFFERS[-1] else None  # caches are faster
        name = f"memory {format}, {size // MiB} MiB"
        figures.append(Figure(name, speed, "GB/s", size=size, peak=shown))
    return figures


def measure_copies(device: torch.device, seconds: float) -> list[Figure]:
    """GB/s of copies between a device and pinned memory of the host, as loaders have it."""
    there = torch.ones(BUFFERS[-1] // 4, device=device)
    here, figures = torch.ones(BUFFERS[-1] // 4, pin_memory=True), []
    ways = {"host to device": (there, here), "device to host": (here, there)}
    for name, (target, source) in ways.items():
        copy = functools.partial(target.copy_, source, non_blocking=True)
        speed = BUFFERS[-1] / seconds_per_call(copy, seconds) / 1e9
        figures.append(Figure(f"{name}, pinned", speed, "GB/s"))
    return figures
