"""Measures a device by itself: matrix products, memory, and copies from and to the host."""

import functools
from collections.abc import Callable

import torch

from samestep.hardware.report import Figure
from samestep.hardware.timing import seconds_per_call
from samestep.processes.device import allow_tf32
from samestep.report.peaks import fp8_type, peaks_of

# The formats of matrix products, and on NVIDIA's GPUs the compute capability that each needs.
FORMATS = {"fp32": (0, 0), "tf32": (8, 0), "bf16": (8, 0), "fp16": (5, 3), "fp8": (8, 9)}
OTHER_FORMATS = {"cpu": ("fp32", "bf16"), "mps": ("fp32", "bf16", "fp16")}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
MATRICES, CPU_MATRICES = (1024, 2048, 4096, 8192), (256, 512, 1024)  # rows, and columns
BUFFER = 256 << 20  # bytes that are copied: far more than caches hold


def name_of(device: torch.device) -> str:
    """The name of a GPU of CUDA; of others their kind."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def formats_of(device: torch.device) -> tuple[str, ...]:
    """The formats to try on a device of this type."""
    return OTHER_FORMATS.get(device.type, tuple(FORMATS))


def check_format(format: str, device: torch.device) -> None:
    """Raises RuntimeError if the device has no units for this format: some would emulate it."""
    if device.type != "cuda" or torch.version.hip:
        return
    has, needs = torch.cuda.get_device_capability(device), FORMATS[format]
    if has < needs:
        has, needs = (".".join(map(str, version)) for version in (has, needs))
        raise RuntimeError(f"it needs compute capability {needs}, and the device has {has}")


def product(format: str, size: int, device: torch.device) -> Callable[[], object]:
    """A function that multiplies two square matrices.

    Their numbers are random: with zeros a GPU needs less power, and so runs faster.
    """
    dtype = fp8_type(device) if format == "fp8" else DTYPES.get(format, torch.float32)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    if format == "fp8":
        one, out_dtype = torch.ones((), device=device), torch.bfloat16
        return lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=out_dtype)
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def measure_products(format: str, device: torch.device, seconds: float, where: str) -> list[Figure]:
    """TFLOP/s of products in one format, 2 n^3 operations for matrices of n x n."""
    check_format(format, device)
    figures, peak = [], peaks_of(device).get(format)
    before = torch.backends.cuda.matmul.allow_tf32
    allow_tf32(format == "tf32")
    try:
        for size in CPU_MATRICES if device.type == "cpu" else MATRICES:
            taken = seconds_per_call(product(format, size, device), device, seconds)
            name = f"matmul {format}, {size}"
            figures.append(Figure(name, 2e-12 * size**3 / taken, "TFLOP/s", where, size, peak))
    finally:
        allow_tf32(before)
    return figures


def measure_memory(device: torch.device, seconds: float, where: str) -> list[Figure]:
    """GB/s, 10^9 bytes, of a copy within the device's memory; what it reads and writes counts."""
    source = torch.ones(BUFFER // 4, device=device)
    target = torch.empty_like(source)
    taken = seconds_per_call(lambda: target.copy_(source), device, seconds)
    peak = peaks_of(device).get("memory")
    return [Figure("memory, read + written", 2 * BUFFER / taken / 1e9, "GB/s", where, peak=peak)]


def measure_copies(device: torch.device, seconds: float, where: str) -> list[Figure]:
    """GB/s of copies between host and device.

    A device reads and writes pinned memory of the host by itself; other memory the CPU first copies
    into such memory.
    """
    figures = []
    there = torch.ones(BUFFER // 4, device=device)
    for pinned in (True, False):
        here = torch.ones(BUFFER // 4, pin_memory=pinned)
        kind = "pinned" if pinned else "not pinned"
        for name, target, source in [
            (f"host to device, {kind}", there, here),
            (f"device to host, {kind}", here, there),
        ]:
            copy = functools.partial(target.copy_, source, non_blocking=pinned)
            taken = seconds_per_call(copy, device, seconds)
            figures.append(Figure(name, BUFFER / taken / 1e9, "GB/s", where))
    return figures
