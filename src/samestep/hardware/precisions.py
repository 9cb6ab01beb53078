"""Which number formats a device computes in: a small matrix product each, checked in float64."""

import re

import torch

from samestep.hardware import host
from samestep.processes.device import allow_tf32
from samestep.report.peaks import FORMATS, fp8_type

# Largest error of a product, as a fraction of its Euclidean norm. The inputs are numbers of the
# format, except of tf32: so it is that of adding up, and of rounding the result.
TOLERANCE = {"fp32": 1e-5, "tf32": 2e-3, "bf16": 1e-2, "fp16": 2e-3, "fp8": 2e-2}
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Flags of processors that compute in the format themselves.
FLAGS = {"bf16": "avx512_bf16|amx_bf16|bf16", "fp16": "avx512_fp16|amx_fp16|asimdhp", "fp8": "$^"}
SIZE = 64


def multiply(format: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A product of two matrices in this format, and the right one, both float64 on the CPU."""
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(SIZE, SIZE, generator=draw) for _ in range(2))
    kind = fp8_type(device) if format == "fp8" else TYPES.get(format, torch.float32)
    a, b = a.to(kind), b.to(kind)
    right = a.double() @ b.double()
    a, b = a.to(device), b.to(device)
    if format == "fp8":  # it wants the second matrix by columns
        one = torch.ones((), device=device)
        by_columns = b.t().contiguous().t()
        product = torch._scaled_mm(a, by_columns, one, one, out_dtype=torch.bfloat16)
    else:
        product = a @ b
    return product.cpu().double(), right


def error_of(format: str, device: torch.device) -> float:
    """The error of a product, as a fraction of its norm; tf32 is allowed for itself only."""
    allow_tf32(format == "tf32")
    try:
        product, right = multiply(format, device)
    finally:
        allow_tf32(False)
    return float((product - right).norm() / right.norm())


def is_emulated(format: str, device: torch.device) -> bool:
    """Whether the device has no instructions for a format that it computes in."""
    if device.type == "cpu":
        features = host.read_text("/proc/cpuinfo")
        pattern = FLAGS.get(format, "")
        return bool(features) and not re.search(rf"\b({pattern})\b", features)
    if device.type == "cuda" and format == "bf16":
        with torch.cuda.device(device):
            return not torch.cuda.is_bf16_supported(including_emulation=False)
    return False


def try_format(format: str, device: torch.device) -> str:
    """`runs`, `emulated`, `wrong: ...` or `no: ...` with the reason."""
    try:
        error = error_of(format, device)
    except Exception as problem:  # each backend refuses a format with an error of its own
        text = str(problem).strip().splitlines()
        return f"no: {text[0][:80] if text else type(problem).__name__}"
    if not error <= TOLERANCE[format]:  # NaN, too
        return f"wrong: the error of a product is {error:.1g}, the limit {TOLERANCE[format]:g}"
    if format == "tf32" and error < TOLERANCE["fp32"]:
        return "no: computed as fp32"
    return "emulated" if is_emulated(format, device) else "runs"


def try_formats(device: torch.device) -> dict[str, str]:
    """What `try_format` says of each format; tf32 is one of GPUs."""
    return {f: try_format(f, device) for f in FORMATS if device.type == "cuda" or f != "tf32"}


def describe(found: dict[str, str]) -> str:
    """The formats that run in a line, and a line for each other kind."""
    lines = [f"runs: {', '.join(f for f, state in found.items() if state == 'runs') or 'none'}"]
    slow = [f for f, state in found.items() if state == "emulated"]
    lines += [f"emulated, slow: {', '.join(slow)}"] if slow else []
    lines += [f"{f}: {state}" for f, state in found.items() if ": " in state]
    return "\n".join(lines)
