"""What nvidia-smi says about the GPUs of this machine, beyond what torch knows.

"[N/A]", "[Not Supported]" and errors are unknown: drivers, MIG and virtual GPUs leave different
fields out. CUDA may count the GPUs in another order, so UUIDs tell which is which.
"""

import csv
import re
import subprocess

FIELDS = (
    *("uuid", "driver_version", "temperature.gpu"),
    *("power.draw", "power.limit", "clocks.sm", "clocks.max.sm"),
)
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")  # new and old name
# Bits of REASONS that slow a GPU down. The others are idle, clocks that a user has set, and sync.
SLOWED = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "too hot (software)",
    0x40: "too hot (hardware)",
    0x80: "power brake of the supply",
}
MISSING = "nvidia-smi is not installed"
TIMEOUT = 30  # seconds; it hangs where a driver does
LINKS = "NV: NVLink; PIX, PXB: PCIe switches; PHB, NODE: the CPU's PCIe; SYS: between CPUs, slow"


def call(*arguments: str) -> tuple[str, str]:
    """(what nvidia-smi printed, ""), or ("", why there is nothing)."""
    try:
        result = subprocess.run(
            ["nvidia-smi", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # it prints errors to either stream
            text=True,
            errors="replace",
            timeout=TIMEOUT,
        )
    except FileNotFoundError:
        return "", MISSING
    except (subprocess.TimeoutExpired, OSError) as error:
        return "", f"nvidia-smi does not run: {error}"
    if result.returncode:
        lines = result.stdout.strip().splitlines()
        return "", f"nvidia-smi: {lines[0] if lines else f'exit code {result.returncode}'}"
    return result.stdout, ""


def query_gpus() -> tuple[dict[str, dict[str, str]], str]:
    """The fields of each GPU by its UUID, as torch shows it, and why there are none."""
    for reasons in REASONS:  # a driver refuses the whole query if it does not know a name
        names = (*FIELDS, reasons)
        text, problem = call(f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits")
        if not problem:
            break
    gpus = {}
    for values in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(values) == len(names):  # not "No devices were found"
            row = {n: v.strip() for n, v in zip(names, values, strict=True)}
            row = {n: v for n, v in row.items() if v and not v.startswith(("[", "N/A"))}
            gpus[row.get("uuid", "").removeprefix("GPU-")] = row
    return gpus, "" if gpus else problem or "nvidia-smi lists no GPU"


def number_of(row: dict[str, str], name: str) -> float | None:
    """A field as a number; None if it is unknown."""
    try:
        return float(row[name])
    except (KeyError, ValueError):
        return None


def slowed_by(gpu: dict[str, str]) -> list[str]:
    """Why the clock of a GPU is held down now; empty also if it is unknown."""
    found = next((gpu[name] for name in REASONS if name in gpu), "0")
    bits = int(found, 16) if re.fullmatch("0x[0-9a-fA-F]+", found) else 0
    return [reason for bit, reason in SLOWED.items() if bits & bit]


def describe_state(gpu: dict[str, str]) -> str:
    """Temperature, power and clock of a GPU in a line."""

    def words(what: str, unit: str, *names: str) -> str:
        """Such as `70 of 700 W`; what is unknown is said to be."""
        numbers = [number_of(gpu, name) for name in names]
        if {*numbers} == {None}:
            return f"{what} unknown"
        return f"{' of '.join('unknown' if n is None else f'{n:.0f}' for n in numbers)} {unit}"

    return ", ".join(
        (
            words("temperature", "C", "temperature.gpu"),
            words("power", "W", "power.draw", "power.limit"),
            words("clock", "MHz", "clocks.sm", "clocks.max.sm"),
        )
    )


def describe_links(text: str) -> str:
    """The links between GPUs, from what `nvidia-smi topo -m` prints; empty with fewer than two."""
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in text.splitlines()]
    rows = [row for row in rows if row and re.fullmatch(r"GPU\d+", row[0])]
    matrix = [row for row in rows if "X" in row]  # not the heading
    if len(matrix) < 2:
        return ""
    cells = [["", *(row[0] for row in matrix)], *(row[: len(matrix) + 1] for row in matrix)]
    lines = ["".join(f"{cell:6}" for cell in row).rstrip() for row in cells]
    return "\n".join([*lines, LINKS])
