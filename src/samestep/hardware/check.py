"""Versions, devices, precisions and disk of this machine, and whether all processes agree."""

import argparse
import os
import platform
import re
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import psutil
import torch

from samestep.base.console import one_line
from samestep.hardware import devices, places
from samestep.hardware.bench import measure_disk
from samestep.hardware.project import Project
from samestep.hardware.report import Figure, Section
from samestep.processes import network
from samestep.processes.device import PROCESSES
from samestep.processes.ranks import Ranks, as_user_error
from samestep.settings.accelerate_yaml import without_gpu
from samestep.start import startup

GB, GIB = 1e9, 2**30
IS_LOCAL_MAIN = os.environ.get("LOCAL_RANK", "0") == "0"
WRITTEN = 64 << 20  # bytes that measure a disk
SHARED_MEMORY = Path("/dev/shm")  # where the workers of a data loader hand over batches
FIELDS = "index,driver_version,temperature.gpu,power.draw,power.limit,clocks.sm,clocks.max.sm"
LEAST_FREE_DISK = 10  # GB
LEAST_SHARED_MEMORY = 1  # GB
LEAST_FREE_MEMORY = 0.9  # of a GPU


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of check: none."""


def run(
    options: argparse.Namespace, project: Project | None, ranks: Ranks, device: torch.device
) -> Section:
    """What this machine is; all processes must call it."""
    with ranks.fail_together(), as_user_error():
        own = facts_of_process(device)
        if IS_LOCAL_MAIN:
            own["speeds"] = measure_disk(options.report, WRITTEN)
            own["free disk"] = shutil.disk_usage(options.report).free / GB
            if device.type == "cuda":
                own["nvidia-smi"] = nvidia_smi(f"--query-gpu={FIELDS}", "--format=csv")
                own["links"] = nvidia_smi("topo", "-m")
    everywhere = ranks.gather(own)
    return describe(everywhere)


# ---- What each process sees ----------------------------------------------------------------------


def limit_of(file: str) -> float | None:
    """The least of what the cgroups of this process allow: cores in cpu.max, bytes in memory.max.

    Those above its own count as well. None: there is no limit, or these are not version 2.
    """
    limits = []
    cgroups = Path("/proc/self/cgroup")
    found = re.search("^0::/(.*)$", cgroups.read_text() if cgroups.exists() else "", re.MULTILINE)
    own = Path(found[1] if found else "")
    for folder in (own, *own.parents):
        path = Path("/sys/fs/cgroup", folder, file)
        numbers = path.read_text().split() if path.is_file() else ["max"]
        if numbers[0].isdigit():
            limits.append(int(numbers[0]) / int(numbers[1] if len(numbers) > 1 else 1))
    return min(limits, default=None)


def facts_of_process(device: torch.device) -> dict[str, Any]:
    """What this process sees of its machine, and of its device; without launcher, of all GPUs."""
    versions = startup.versions() | {"cuda": torch.version.cuda, "rocm": torch.version.hip}
    used = [device]
    if device.type == "cuda":
        versions["cudnn"] = str(torch.backends.cudnn.version() or "")
        if PROCESSES == 1:
            used = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    memory, cpuinfo = psutil.virtual_memory(), Path("/proc/cpuinfo")
    model = re.search("model name\\s*: (.+)", cpuinfo.read_text() if cpuinfo.exists() else "")
    cores = float(psutil.cpu_count() or 1)
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        cores = float(len(os.sched_getaffinity(0)))
    allowed = min(cores, limit_of("cpu.max") or cores)
    limit = limit_of("memory.max") or memory.total
    return {
        "host": socket.gethostname(),
        "versions": {n: v for n, v in versions.items() if v and n not in ("cpu", "gpu")},
        "devices": [describe_device(each) for each in used],
        "cpu": model[1] if model else platform.processor() or platform.machine(),
        "cores": f"{psutil.cpu_count(logical=False) or 'unknown'} physical, "
        f"{psutil.cpu_count() or 'unknown'} logical, {allowed:g} allowed",
        "allowed": allowed,
        "memory": f"{memory.total / GIB:.0f} GiB"
        + (f", limited to {limit / GIB:.3g} GiB" if limit < memory.total else ""),
        "free": f"{memory.available / GIB:.3g} GiB",
        "shared memory": shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else None,
        "network": network.own_address() if PROCESSES > 1 else "",
        "backend": torch.distributed.get_backend() if PROCESSES > 1 else "",
    }


def describe_device(device: torch.device) -> dict[str, Any]:
    """What torch says about a device, and which formats it computes in."""
    formats = devices.try_formats(device)
    facts: dict[str, Any] = {"formats": formats, "uuid": ""}
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        kind = f"compute capability {about.major}.{about.minor}"
        kind = getattr(about, "gcnArchName", "ROCm") if torch.version.hip else kind
        name = f"{about.name}, {kind}, {total / GIB:.1f} GiB"
        uuid = str(getattr(about, "uuid", ""))  # older versions of torch do not know it
        return {**facts, "name": name, "uuid": uuid, "free": free / GIB, "total": total / GIB}
    if device.type == "mps":
        total = torch.mps.recommended_max_memory() / GIB
        return {**facts, "name": f"Apple GPU (MPS), uses up to {total:.1f} GiB of the memory"}
    return {**facts, "name": "CPU: " + (no_gpu() or "chosen, although there is a GPU")}


def nvidia_smi(*arguments: str) -> str:
    """What nvidia-smi prints, without a legend; or why it prints nothing."""
    try:
        result = subprocess.run(
            ["nvidia-smi", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # it prints errors to either stream
            text=True,
            errors="replace",
            timeout=30,  # seconds; it hangs where a driver does
        )
    except (subprocess.TimeoutExpired, OSError) as error:
        return f"nvidia-smi does not run: {error}"
    text = re.sub(r"\x1b\[[0-9;]*m", "", result.stdout).partition("\n\n")[0]
    text = text.expandtabs().rstrip()
    return text if not result.returncode else f"nvidia-smi: {one_line(text)}"


def no_gpu() -> str:
    """Why this process computes on the CPU; empty if torch sees a GPU."""
    if torch.accelerator.is_available():
        return ""
    if not shutil.which("nvidia-smi"):
        return "torch sees no GPU"
    listed = nvidia_smi("-L")
    if "UUID" not in listed:
        return f"torch sees no GPU; {listed}"
    return f"nvidia-smi lists {listed.count('GPU-')}, but torch sees none: {without_gpu()}"


# ---- What it comes to ----------------------------------------------------------------------------


def describe(everywhere: list[dict]) -> Section:
    """The report on all processes: `everywhere` has the facts of each."""
    hosts = [own["host"] for own in everywhere]
    several = len({*hosts}) > 1  # one machine needs no name in a table
    first, named = everywhere[0], hosts if several else []
    if len(everywhere) == 1:
        used, word, at = first["devices"], "device", []
    else:
        used, word, at = [own["devices"][0] for own in everywhere], "process", named
    versions = {
        name: [own["versions"].get(name, "missing") for own in everywhere]
        for name in dict.fromkeys(name for own in everywhere for name in own["versions"])
    }
    names = [each["name"] for each in used]

    def of_processes(name: str) -> str:
        return places.by_value([own[name] for own in everywhere], named)

    facts: dict[str, Any] = {}
    if word == "process":
        machine = f"{len({*hosts})} machines" if several else f"one machine, {hosts[0]}"
        facts["processes"] = f"{len(everywhere)} on {machine}; {first['backend']}"
    facts |= {name: places.by_value(values, named) for name, values in versions.items()}
    alike = word == "device" and len(used) > 1 and len({*names}) == 1
    facts["device"] = (f"{len(used)} x " if alike else "") + places.by_value(names, at, word)
    free = [f"{each['free']:.1f} of {each['total']:.1f} GiB" for each in used if "free" in each]
    if free:
        facts["free memory of GPUs"] = places.by_value(free, at, word)
    firsts = [own for rank, own in enumerate(everywhere) if hosts.index(own["host"]) == rank]
    for name in ("nvidia-smi", "links"):
        texts = [own[name] for own in firsts if own.get(name)]
        if texts:
            each = [f"{own['host']}:\n{own.get(name, 'nothing')}" for own in firsts]
            facts[name] = texts[0] if len({*texts}) == 1 else "\n".join(each)
    formats = [describe_formats(each["formats"]) for each in used]
    facts["precisions"] = places.by_value(formats, at, word)
    facts |= {name: of_processes(name) for name in ("cpu", "cores", "memory")}
    free = [f"{own['host']}: {own['free']}" for own in firsts]
    facts["memory free"] = "\n".join(free) if several else first["free"]
    if word == "process":
        facts["network"] = "\n".join(dict.fromkeys(own["network"] for own in everywhere))

    section = Section("check", facts, lines=warnings(everywhere, firsts))
    for own in firsts:
        where = own["host"] if several else ""
        if own["shared memory"]:
            shared = own["shared memory"] / GB
            section.figures.append(Figure("shared memory (/dev/shm)", shared, "GB", where))
        section.figures.append(Figure("free disk of --report", own["free disk"], "GB", where))
        for each in own["speeds"]:
            section.figures.append(Figure(each.name, each.value, each.unit, where))

    # What must be the same everywhere, or right.
    same = {name: [own[name] for own in everywhere] for name in ("cpu", "cores", "memory")}
    same |= {"device": names} if word == "process" else {}
    for name, values in (same | versions).items():
        if len({*values}) > 1:
            text = places.by_value(values, hosts).replace("\n", "; ")
            section.failures.append(f"{name} differs: {text}")
    cards = [(own["host"], device["uuid"]) for own in everywhere for device in own["devices"]]
    for (_, uuid), sharing in places.group(cards).items():
        if uuid and len(sharing) > 1:
            section.failures.append(
                f"{places.name(sharing, hosts)} use one GPU, {uuid}; lower num_processes to the "
                "number of GPUs, or check CUDA_VISIBLE_DEVICES"
            )
    wrong = [
        "; ".join(f"{f} {state}" for f, state in each["formats"].items() if "wrong" in state)
        for each in used
    ]
    for problem, numbers in places.group(wrong).items():
        if problem:
            place = places.name(numbers, hosts if word == "process" else [], word)
            section.failures.append(f"{place} computes wrong numbers: {problem}")
    return section


def describe_formats(found: dict[str, str]) -> str:
    """The formats that run in a line, and a line for each other kind."""
    lines = [f"runs: {', '.join(f for f, state in found.items() if state == 'runs') or 'none'}"]
    slow = [f for f, state in found.items() if state == "emulated"]
    lines += [f"emulated, slow: {', '.join(slow)}"] if slow else []
    return "\n".join(lines + [f"{f}: {state}" for f, state in found.items() if ": " in state])


def warnings(everywhere: list[dict], firsts: list[dict]) -> list[str]:
    """What is likely to go wrong, or to be slow; `firsts`: the first process of each machine."""
    hosts, found = [own["host"] for own in everywhere], []  # (condition, text)
    for own in firsts:
        host, shared, free = own["host"], own["shared memory"], own["free disk"]
        shared, local = LEAST_SHARED_MEMORY if shared is None else shared / GB, hosts.count(host)
        found += [
            (
                shared < LEAST_SHARED_MEMORY,
                f"/dev/shm of {host} has {shared:.2g} GB, where the workers of data loaders hand "
                "over batches, and end with a bus error once it is full; give the container more "
                "(docker run --shm-size 8g), or set num_workers to 0",
            ),
            (
                free < LEAST_FREE_DISK,
                f"{free:.2g} GB are free in the folder --report of {host}; a checkpoint takes "
                "three times the weights in fp32",
            ),
            (own["allowed"] < local, f"{local} processes on {host} share {own['allowed']:g} cores"),
        ]
    kinds = {device["name"] for device in everywhere[0]["devices"]}
    many = "the GPUs differ; a run on all of them needs device_shares: auto"
    found.append((len(kinds) > 1, many))
    for rank, own in enumerate(everywhere):
        for i, device in enumerate(own["devices"]):
            alone = len(everywhere) == 1
            place = f"device {i}" if alone else f"the GPU of {places.name([rank], hosts)}"
            free, total = device.get("free", 1), device.get("total", 0)
            used = f"{place} has {free:.1f} of {total:.1f} GiB free; nvidia-smi names who has them"
            found.append((free < LEAST_FREE_MEMORY * total, used))
    return [f"warning: {text}" for condition, text in found if condition]
