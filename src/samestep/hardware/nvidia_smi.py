"""What nvidia-smi says about the GPUs of this machine, beyond what torch knows.

The functions that read its output take text, and take "[N/A]", "[Not Supported]" and errors as
unknown: drivers, MIG and virtual GPUs leave different fields out. Numbers of GPUs are those of
nvidia-smi, in the order of the PCI bus, and CUDA may count in another order: UUIDs tell which is
which.
"""

import contextlib
import csv
import re
import subprocess

FIELDS = (
    *("index", "uuid", "driver_version", "mig.mode.current", "temperature.gpu"),
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
LINKS = {
    "NV": "NVLink",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "through the CPU's PCIe",
    "NODE": "through PCIe within a NUMA node",
    "SYS": "between NUMA nodes, slow",
}


def call(*arguments: str) -> tuple[str, str]:
    """(what nvidia-smi printed, ""), or ("", why there is nothing)."""
    try:
        command = ["nvidia-smi", *arguments]
        result = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT
        )
    except FileNotFoundError:
        return "", MISSING
    except subprocess.TimeoutExpired:
        return "", f"nvidia-smi has not answered for {TIMEOUT} s"
    except OSError as error:
        return "", f"nvidia-smi does not run: {error}"
    if result.returncode:  # it prints errors to either stream
        lines = (result.stdout + result.stderr).strip().splitlines()
        return "", f"nvidia-smi: {lines[0] if lines else f'exit code {result.returncode}'}"
    return result.stdout, ""


def query() -> tuple[dict[str, dict[str, str]], str]:
    """The fields of each GPU by its UUID, and why there are none."""
    layout = "--format=csv,noheader,nounits"
    text, problem = call(f"--query-gpu={','.join(FIELDS)}", layout)
    gpus = {gpu["uuid"]: gpu for gpu in read_table(text, FIELDS) if gpu.get("uuid")}
    if not gpus:
        return {}, problem or "nvidia-smi lists no GPU"
    for name in REASONS:  # a driver refuses the whole query if it does not know a name
        text, unknown = call(f"--query-gpu=uuid,{name}", layout)
        if not unknown:
            for row in read_table(text, ("uuid", "reasons")):
                gpus.get(row.get("uuid", ""), {}).update(row)
            break
    text, _ = call("-L")
    for instance, number in read_instances(text).items():  # a MIG device has the card of its GPU
        card = next((gpu for gpu in gpus.values() if gpu.get("index") == number), None)
        if card:
            gpus[instance] = {**card, "card": card["uuid"]}
    return gpus, ""


def read_table(text: str, names: tuple[str, ...]) -> list[dict[str, str]]:
    """The rows of a CSV table by these names, without what is unknown. UUIDs lose their prefix."""
    rows = []
    for values in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(values) != len(names):  # such as "No devices were found"
            continue
        row = {n: v.strip() for n, v in zip(names, values, strict=True)}
        row = {n: v for n, v in row.items() if v and not v.startswith(("[", "N/A"))}
        rows.append({n: bare_uuid(v) if n.endswith("uuid") else v for n, v in row.items()})
    return rows


def bare_uuid(text: object) -> str:
    """A UUID without GPU- or MIG-, as torch shows it."""
    return re.sub("^(GPU|MIG)-", "", str(text).strip())


def read_instances(text: str) -> dict[str, str]:
    """UUIDs of MIG devices in the list of `nvidia-smi -L`, with the number of their GPU."""
    found, number = {}, ""
    for line in text.splitlines():
        gpu = re.match(r"GPU (\d+):", line)
        number = gpu[1] if gpu else number
        instance = re.search(r"UUID: MIG-([^)]+)\)", line)
        if instance:
            found[instance[1]] = number
    return found


def number_of(gpu: dict[str, str], name: str) -> float | None:
    """A field as a number; None if it is unknown."""
    try:
        return float(gpu[name])
    except (KeyError, ValueError):
        return None


def slowed_by(gpu: dict[str, str]) -> list[str]:
    """Why the clock of a GPU is held down now; empty also if it is unknown."""
    bits = 0
    with contextlib.suppress(KeyError, ValueError):
        bits = int(gpu["reasons"], 16)
    return [reason for bit, reason in SLOWED.items() if bits & bit]


def describe_state(gpu: dict[str, str]) -> str:
    """Temperature, power and clock of a GPU in a line."""

    def pair(what: str, now: str, most: str, unit: str) -> str:
        """Such as `70 of 700 W`; what is unknown is said to be."""
        numbers = [number_of(gpu, name) for name in (now, most)]
        now, most = ("unknown" if n is None else f"{n:.0f}" for n in numbers)
        return f"{now} of {most} {unit}" if {now, most} != {"unknown"} else f"{what} unknown"

    celsius = number_of(gpu, "temperature.gpu")
    warmth = "temperature unknown" if celsius is None else f"{celsius:.0f} C"
    power = pair("power", "power.draw", "power.limit", "W")
    clock = pair("clock", "clocks.sm", "clocks.max.sm", "MHz")
    return f"{warmth}, {power}, {clock}"


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
    return [describe_program(app) for app in others]


def describe_program(app: dict[str, str]) -> str:
    """Name, process id and memory of a program on a GPU."""
    memory = number_of(app, "used_memory")
    size = "" if memory is None else f", {memory / 1024:.1f} GiB"
    return f"{app.get('process_name', 'a program').rpartition('/')[2]} (process {app['pid']}{size})"


def links(text: str) -> dict[str, list[str]]:
    """The kinds of links in the matrix of `nvidia-smi topo -m`, with the pairs of GPUs of each."""
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in text.splitlines()]
    rows = [row for row in rows if row and re.fullmatch(r"GPU\d+", row[0])]
    matrix = [row for row in rows if "X" in row]  # not the heading
    found: dict[str, list[str]] = {}
    for i, row in enumerate(matrix):
        for j in range(i + 1, len(matrix)):
            if j + 1 < len(row):
                found.setdefault(row[j + 1], []).append(f"{row[0][3:]}-{matrix[j][0][3:]}")
    return found


def describe_links(text: str) -> str:
    """The links between GPUs in words: a line for each kind; empty with fewer than two GPUs."""
    kinds, lines = links(text), []
    for kind, pairs in kinds.items():
        count = re.fullmatch(r"NV(\d+)", kind)
        words = LINKS["NV"] if count else LINKS.get(kind, kind)
        words = f"{count[1]} x {words}" if count else f"{kind} ({words})"
        many = f"{', '.join(pairs[:8])}, ... ({len(pairs)} pairs)"
        shown = ", ".join(pairs) if len(pairs) <= 8 else many
        lines.append(f"{words}: {'all pairs' if len(kinds) == 1 else shown}")
    return "\n".join(lines)
