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
APPS = ("gpu_uuid", "pid", "process_name", "used_memory")
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


def query(kind: str, names: tuple[str, ...]) -> tuple[list[dict[str, str]], str]:
    """The rows of a table by these names, without what is unknown; and why there is no table.

    UUIDs lose their GPU- or MIG-, as torch shows them.
    """
    text, problem = call(f"--query-{kind}={','.join(names)}", "--format=csv,noheader,nounits")
    rows = []
    for values in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(values) == len(names):  # not "No devices were found"
            row = {n: v.strip() for n, v in zip(names, values, strict=True)}
            row = {n: v for n, v in row.items() if v and not v.startswith(("[", "N/A"))}
            unmarked = {n: re.sub("^(GPU|MIG)-", "", row[n]) for n in row if n.endswith("uuid")}
            rows.append(row | unmarked)
    return rows, problem


def query_gpus() -> tuple[dict[str, dict[str, str]], str]:
    """The fields of each GPU by its UUID, and why there are none."""
    for reason in REASONS:  # a driver refuses the whole query if it does not know a name
        rows, problem = query("gpu", (*FIELDS, reason))
        if not problem:
            break
    gpus = {row["uuid"]: row for row in rows if "uuid" in row}
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


def other_programs(apps: list[dict[str, str]], uuid: str, own: set[int]) -> list[str]:
    """The programs on a GPU besides the processes `own` of this run, which use it.

    In a container nvidia-smi may show process ids of the host, and so none of `own`. Then as many
    as there are in `own` are taken for them.
    """
    apps = [app for app in apps if app.get("gpu_uuid") == uuid and app.get("pid", "").isdigit()]
    others = [app for app in apps if int(app["pid"]) not in own]
    if len(others) == len(apps):  # none is ours
        hidden = len(others) - len(own)
        return [f"{hidden} (ids of the host)"] if 0 < hidden < len(others) else []
    found = []
    for app in others:
        memory, path = number_of(app, "used_memory"), app.get("process_name", "a program")
        size = "" if memory is None else f", {memory / 1024:.1f} GiB"
        found.append(f"{path.rpartition('/')[2]} (process {app['pid']}{size})")
    return found


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
