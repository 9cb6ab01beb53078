"""Versions, devices, precisions and disk of this machine, and whether all processes agree."""

import argparse
import dataclasses
import math
import os
import platform
import re
import shutil
import socket
import subprocess
from pathlib import Path

import psutil
import torch

from samestep.base.console import one_line
from samestep.hardware import devices
from samestep.hardware.project import Project
from samestep.hardware.report import Figure, Section, by_value, place_of
from samestep.processes import meeting
from samestep.processes.device import PROCESSES
from samestep.processes.ranks import Ranks, as_user_error, catch
from samestep.settings.accelerate_yaml import without_gpu
from samestep.start import startup

GB, GIB = 1e9, 2**30
SHARED_MEMORY = Path("/dev/shm")  # where the workers of a data loader hand over batches
FIELDS = "index,driver_version,temperature.gpu,power.draw,power.limit,clocks.sm,clocks.max.sm"
LOST = r".*(?:GPU is lost|fallen off|Unable to determine the device handle|Unknown Error).*"
LEAST_FREE_DISK = 10  # GB
LEAST_SHARED_MEMORY = 1  # GB
LEAST_FREE_MEMORY = 0.9  # of a GPU
MOST = 30  # seconds for nvidia-smi, which hangs where a driver does
FREE = "memory free"
MAY_DIFFER = {FREE, f"device, {FREE}", "network", "nvidia-smi", "links"}  # all else is compared


def run(
    options: argparse.Namespace, project: Project | None, ranks: Ranks, device: torch.device
) -> Section:
    """What this machine is; all processes must call it."""
    used = [device]
    if device.type == "cuda" and PROCESSES == 1:  # without launcher all of them
        used = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    with ranks.fail_together(), as_user_error():
        own = look_at_process(used)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            look_at_machine(own, options.report, device)
    return describe(ranks.gather(own), ranks.gather(socket.gethostname()))


# ---- What each process sees ----------------------------------------------------------------------


def look_at_process(used: list[torch.device]) -> Section:
    """Versions, processors and memory, as this process sees them, and its devices."""
    section = Section("check")
    versions = startup.versions() | {"cuda": torch.version.cuda, "rocm": torch.version.hip}
    if used[0].type == "cuda":
        versions["cudnn"] = str(torch.backends.cudnn.version() or "")
    facts = {name: text for name, text in versions.items() if text and name not in ("cpu", "gpu")}
    cpuinfo = Path("/proc/cpuinfo")
    model = re.search("model name\\s*: (.+)", cpuinfo.read_text() if cpuinfo.exists() else "")
    facts["cpu"] = model[1] if model else platform.processor() or platform.machine()
    facts["cores"] = (
        f"{psutil.cpu_count(logical=False) or 'unknown'} physical, "
        f"{psutil.cpu_count() or 'unknown'} logical, {allowed_cores():g} allowed"
    )
    memory = psutil.virtual_memory().total
    limit = limit_of("memory.max") or memory
    facts["memory"] = f"{memory / GIB:.0f} GiB"
    facts["memory"] += f", limited to {limit / GIB:.3g} GiB" if limit < memory else ""
    section.facts, kinds = facts, set()
    for device in used:
        name = str(device) if len(used) > 1 else "device"
        _, problem = catch(look_at_device, section, name, device)
        if problem:  # after some errors of CUDA each call fails
            section.failures.append(f"{device} does not answer: {one_line(problem, 200)}")
        kinds.add(facts.get(name, "").partition("\n")[0])
    if len(kinds - {""}) > 1:
        section.lines.append("the GPUs differ; a run on all of them needs device_shares: auto")
    return section


def look_at_device(section: Section, name: str, device: torch.device) -> None:
    """Adds what a device is, in which formats it computes, and its memory."""
    formats = devices.try_formats(device)
    section.facts[name] = f"{describe_device(device)}\n{describe_formats(formats)}"
    wrong = [f"{format} {state}" for format, state in formats.items() if "wrong" in state]
    if wrong:
        section.failures.append(f"{device} computes wrong numbers: {'; '.join(wrong)}")
    if formats["fp32"].startswith("no: "):
        section.failures.append(f"{device} does not compute: fp32: {formats['fp32']}")
    if device.type == "cuda":
        free, total = (size / GIB for size in torch.cuda.mem_get_info(device))
        section.facts[f"{name}, {FREE}"] = text = f"{free:.1f} of {total:.1f} GiB"
        if free < LEAST_FREE_MEMORY * total:
            section.lines.append(f"{device} has {text} free; nvidia-smi names who has them")


def look_at_machine(section: Section, folder: Path, device: torch.device) -> None:
    """Adds what one process on each machine finds out for all of them."""
    section.facts[FREE] = f"{psutil.virtual_memory().available / GIB:.3g} GiB"
    if PROCESSES > 1:
        backend = torch.distributed.get_backend()
        section.facts["network"] = f"{meeting.own_address()}, {backend}"
    if device.type == "cuda" or shutil.which("nvidia-smi"):  # torch may see no GPU if one is lost
        section.facts["nvidia-smi"] = nvidia_smi(f"--query-gpu={FIELDS}", "--format=csv")
        section.facts["links"] = nvidia_smi("topo", "-m")
        if lost := re.search(LOST, section.facts["nvidia-smi"], re.IGNORECASE):
            section.failures.append(
                f"a GPU is lost: {one_line(lost[0], 200)}; train on the others, with "
                "CUDA_VISIBLE_DEVICES, until the machine is restarted: docs/measuring.md"
            )
    free = shutil.disk_usage(folder).free / GB
    section.figures.append(Figure("free disk of --report", free, "GB"))
    if free < LEAST_FREE_DISK:
        section.lines.append(
            f"{free:.2g} GB are free in the folder --report; a checkpoint takes three times the "
            "weights in fp32"
        )
    shared = shutil.disk_usage(SHARED_MEMORY).total / GB if SHARED_MEMORY.is_dir() else math.inf
    if shared < LEAST_SHARED_MEMORY:
        section.lines.append(
            f"/dev/shm has {shared:.2g} GB, where the workers of data loaders hand over batches, "
            "and end with a bus error once it is full; give the container more (docker run "
            "--shm-size 8g), or set num_workers to 0"
        )
    processes, cores = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), allowed_cores()
    if cores < processes:
        section.lines.append(f"{processes} processes share {cores:g} cores")


def limit_of(file: str) -> float | None:
    """The least that the cgroups (version 2) of this process and above it allow: cores in cpu.max,
    bytes in memory.max. None: there is no limit."""
    cgroups = Path("/proc/self/cgroup")
    found = re.search("^0::/(.*)$", cgroups.read_text() if cgroups.exists() else "", re.MULTILINE)
    own, limits = Path(found[1] if found else ""), list[float]()
    for folder in (own, *own.parents):
        path = Path("/sys/fs/cgroup", folder, file)
        most, *period = path.read_text().split() if path.is_file() else ["max"]
        limits += [int(most) / int(period[0] if period else 1)] if most != "max" else []
    return min(limits, default=None)


def allowed_cores() -> float:
    """Cores that this process may use, by its affinity and its cgroups."""
    cores = float(psutil.cpu_count() or 1)
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        cores = float(len(os.sched_getaffinity(0)))
    return min(cores, limit_of("cpu.max") or cores)


def describe_device(device: torch.device) -> str:
    """What torch says about a device."""
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        kind = f"compute capability {about.major}.{about.minor}"
        kind = getattr(about, "gcnArchName", "ROCm") if torch.version.hip else kind
        return f"{about.name}, {kind}, {about.total_memory / GIB:.1f} GiB"
    if device.type == "mps":
        total = torch.mps.recommended_max_memory() / GIB
        return f"Apple GPU (MPS), uses up to {total:.1f} GiB of the memory"
    return "CPU: " + (no_gpu() or "chosen, although there is a GPU")


def describe_formats(found: dict[str, str]) -> str:
    """The formats that run in a line, and a line for each other kind."""
    lines = [f"runs: {', '.join(f for f, state in found.items() if state == 'runs') or 'none'}"]
    slow = [f for f, state in found.items() if state == "emulated"]
    lines += [f"emulated, slow: {', '.join(slow)}"] if slow else []
    return "\n".join(lines + [f"{f}: {state}" for f, state in found.items() if ": " in state])


def nvidia_smi(*arguments: str) -> str:
    """What nvidia-smi prints, its errors too, without a legend; or why it prints nothing."""
    pipe = subprocess.PIPE
    try:
        program = subprocess.Popen(["nvidia-smi", *arguments], stdout=pipe, stderr=pipe)
        try:
            printed = b"".join(program.communicate(timeout=MOST)).decode(errors="replace")
        finally:
            program.kill()  # it may end later: nobody waits
    except (subprocess.TimeoutExpired, OSError) as error:
        return f"nvidia-smi does not run: {error}"
    text = re.sub(r"\x1b\[[0-9;]*m", "", printed).partition("\n\n")[0]
    return text.expandtabs().rstrip()


def no_gpu() -> str:
    """Why this process computes on the CPU; empty if torch sees a GPU."""
    if torch.accelerator.is_available():
        return ""
    if not shutil.which("nvidia-smi"):
        return "torch sees no GPU"
    listed = one_line(nvidia_smi("-L"), 200)
    return f"torch sees no GPU; {without_gpu()}; nvidia-smi -L prints: {listed}"


# ---- What it comes to ----------------------------------------------------------------------------


def describe(everywhere: list[Section], hosts: list[str]) -> Section:
    """The report on all processes: what each has found, on which machine."""
    section, alone = Section("check"), len(everywhere) == 1
    named = hosts if len({*hosts}) > 1 else []  # one machine needs no name in a table
    if not alone:
        machines = f"{len({*hosts})} machines" if named else f"one machine, {hosts[0]}"
        section.facts["processes"] = f"{len(everywhere)} on {machines}"
    for name in dict.fromkeys(name for own in everywhere for name in own.facts):
        values = [own.facts.get(name) for own in everywhere]
        section.facts[name] = by_value(values, named)
        if name not in MAY_DIFFER and len({*values}) > 1:
            text = by_value([value or "missing" for value in values], hosts)
            section.failures.append(f"{name} differs: {text}".replace("\n", "; "))
    for rank, (own, host) in enumerate(zip(everywhere, hosts, strict=True)):
        place = "" if alone else f"{place_of([rank], hosts)}: "
        section.lines += [f"warning: {place}{line}" for line in own.lines]
        section.failures += [place + line for line in own.failures]
        where = host if named else ""
        section.figures += [dataclasses.replace(each, where=where) for each in own.figures]
    return section
