"""Versions, devices, precisions and disk of this machine, and whether all processes agree."""

import argparse
import os
import socket
from typing import Any

import psutil
import torch

from samestep.hardware import host, nvidia_smi, places, precisions
from samestep.hardware.host import GB, GIB
from samestep.hardware.project import Project
from samestep.hardware.report import Figure, Section
from samestep.processes import network
from samestep.processes.device import PROCESSES
from samestep.processes.ranks import Ranks, as_user_error
from samestep.settings.accelerate_yaml import without_gpu
from samestep.start import startup

NEEDS_PROJECT = False
IS_LOCAL_MAIN = os.environ.get("LOCAL_RANK", "0") == "0"
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
        disk = host.measure_disk(options.report) if IS_LOCAL_MAIN else None
        own = own_facts(device)
    everywhere = ranks.gather(own)  # from here on all GPUs are in use by this run
    with ranks.fail_together():
        seen = see_gpus() if IS_LOCAL_MAIN and device.type == "cuda" else {}
    machines = [  # by the number of their first process
        {"disk": disk, **seen} for disk, seen in ranks.gather((disk, seen))
    ]
    for own in everywhere:
        first = next(r for r, each in enumerate(everywhere) if each["host"] == own["host"])
        complete(own, machines[first], everywhere)
    return describe(everywhere, machines)


# ---- What each process sees ----------------------------------------------------------------------


def own_facts(device: torch.device) -> dict[str, Any]:
    """What this process sees of its machine, and of its device; without launcher, of all GPUs."""
    versions = startup.versions()
    versions["cuda"] = torch.version.cuda or ""
    versions["rocm"] = torch.version.hip or ""
    if device.type == "cuda":
        versions["cudnn"] = str(torch.backends.cudnn.version() or "")
    devices = [device]
    if PROCESSES == 1 and device.type == "cuda":
        devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    memory, shared = psutil.virtual_memory(), host.shared_memory()
    limit = host.memory_limit()
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "versions": {name: value for name, value in versions.items() if value},
        "devices": [describe_device(each) for each in devices],
        "cpu": host.cpu_model(host.read_text("/proc/cpuinfo")),
        "cores": f"{psutil.cpu_count(logical=False) or 'unknown'} physical, "
        f"{psutil.cpu_count() or 'unknown'} logical, {host.allowed_cores():g} allowed",
        "allowed": host.allowed_cores(),
        "memory": f"{memory.total / GIB:.0f} GiB"
        + (f", limited to {limit / GIB:.3g} GiB" if limit < memory.total else ""),
        "free": f"{memory.available / GIB:.3g} GiB",
        "shared memory": shared,
        "network": network.own_address() if PROCESSES > 1 else "",
        "backend": torch.distributed.get_backend() if PROCESSES > 1 else "",
    }


def describe_device(device: torch.device) -> dict[str, Any]:
    """What torch says about a device, and which formats it computes in."""
    facts = {"precisions": precisions.try_formats(device), "uuid": ""}
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        kind = "" if torch.version.hip else f", compute capability {about.major}.{about.minor}"
        kind = f", {getattr(about, 'gcnArchName', 'ROCm')}" if torch.version.hip else kind
        name = f"{about.name}{kind}, {total / GIB:.1f} GiB"
        # Older versions of torch do not know the UUID.
        uuid = nvidia_smi.bare_uuid(getattr(about, "uuid", ""))
        return {**facts, "name": name, "uuid": uuid, "free": free / GIB, "total": total / GIB}
    if device.type == "mps":
        total = torch.mps.recommended_max_memory() / GIB
        return {**facts, "name": f"Apple GPU (MPS), uses up to {total:.1f} GiB of the memory"}
    return {**facts, "name": "CPU: " + (no_gpu() or "chosen, although there is a GPU")}


def no_gpu() -> str:
    """Why this process computes on the CPU; empty if torch sees a GPU."""
    if torch.accelerator.is_available():
        return ""
    listed, problem = nvidia_smi.query()
    if listed:
        return f"nvidia-smi lists {len(listed)}, but torch sees none: {without_gpu()}"
    return "torch sees no GPU" + (f"; {problem}" if problem != nvidia_smi.MISSING else "")


def see_gpus() -> dict[str, Any]:
    """What nvidia-smi says about all GPUs of this machine."""
    if torch.version.hip:
        return {"problem": "nvidia-smi knows no AMD GPUs; see amd-smi"}
    gpus, problem = nvidia_smi.query()
    if problem:
        return {"problem": problem}
    fields = ",".join(nvidia_smi.APPS)
    text, _ = nvidia_smi.call(f"--query-compute-apps={fields}", "--format=csv,noheader,nounits")
    apps = nvidia_smi.read_table(text, nvidia_smi.APPS)
    matrix, _ = nvidia_smi.call("topo", "-m")
    links = nvidia_smi.describe_links(matrix)
    return {"gpus": gpus, "apps": apps, "links": links}


def complete(own: dict[str, Any], machine: dict[str, Any], everywhere: list[dict]) -> None:
    """Adds what nvidia-smi says to the facts of a process and its devices."""
    own["links"] = machine.get("links", "")
    own["problem"] = machine.get("problem", "")
    for device in own["devices"]:
        gpu = machine.get("gpus", {}).get(device["uuid"], {})
        if "total" not in device:
            continue
        if "driver_version" in gpu:
            own["versions"]["driver"] = gpu["driver_version"]
        device["state"] = f"{device['free']:.1f} of {device['total']:.1f} GiB free, "
        device["state"] += nvidia_smi.describe_state(gpu)
        device["slowed"] = nvidia_smi.slowed_by(gpu)
        pids = {
            each["pid"]
            for each in everywhere
            if each["host"] == own["host"]
            and device["uuid"] in [other["uuid"] for other in each["devices"]]
        }
        card = gpu.get("card", device["uuid"])  # nvidia-smi may name the GPU or its MIG device
        device["others"] = [
            program
            for uuid in dict.fromkeys((device["uuid"], card))
            for program in nvidia_smi.other_programs(machine.get("apps", []), uuid, pids)
        ]


# ---- What it comes to ----------------------------------------------------------------------------


def describe(everywhere: list[dict], machines: list[dict]) -> Section:
    """The report on all processes: `everywhere` and `machines` have an entry for each."""
    hosts = [own["host"] for own in everywhere]
    named = hosts if len({*hosts}) > 1 else []  # one machine needs no name in a table
    devices, word = [own["devices"][0] for own in everywhere], "process"
    if len(everywhere) == 1:
        devices, word = everywhere[0]["devices"], "device"
    device_hosts = named if word == "process" else []

    def of_processes(name: str) -> str:
        return places.by_value([own[name] for own in everywhere], named)

    def of_devices(values: list[str]) -> str:
        return places.by_value(values, device_hosts, word)

    facts: dict[str, Any] = {}
    if word == "process":
        machine = f"{len({*hosts})} machines" if named else f"one machine, {hosts[0]}"
        facts["processes"] = f"{len(everywhere)} on {machine}; {everywhere[0]['backend']}"
    facts |= versions_of(everywhere, named)
    count = f"{len(devices)} x " if word == "device" and len(devices) > 1 else ""
    same = len({each["name"] for each in devices}) == 1
    facts["device"] = (count if same else "") + of_devices([each["name"] for each in devices])
    if "state" in devices[0]:
        states = [f"{word} {i}: {each['state']}" for i, each in enumerate(devices)]
        facts["now"] = "\n".join(states) if len(states) > 1 else devices[0]["state"]
        others = [", ".join(each["others"]) or "none" for each in devices]
        facts["other programs"] = of_devices(others) if "unknown" not in others else "unknown"
        if any(own["problem"] for own in everywhere):
            facts["other programs"] = "unknown"
            facts["why unknown"] = of_processes("problem")
    if any(own["links"] for own in everywhere):
        facts["links"] = of_processes("links")
    facts["precisions"] = of_devices([precisions.describe(each["precisions"]) for each in devices])
    facts["cpu"] = of_processes("cpu")
    facts["cores"], facts["memory"] = of_processes("cores"), of_processes("memory")
    firsts = [r for r, host in enumerate(hosts) if hosts.index(host) == r]
    facts["memory free"] = "\n".join(
        f"{f'{hosts[r]}: ' if named else ''}{everywhere[r]['free']}" for r in firsts
    )
    if word == "process":
        facts["network"] = "\n".join(dict.fromkeys(own["network"] for own in everywhere))
    section = Section("check", facts)
    for r in firsts:
        where = hosts[r] if named else ""
        shared, (write, read, free) = everywhere[r]["shared memory"], machines[r]["disk"]
        add = section.figures.append
        if shared:
            add(Figure("shared memory (/dev/shm)", shared / GB, "GB", where))
        add(Figure("free disk of --report", free, "GB", where))
        add(Figure("disk write, flushed", write, "GB/s", where))
        add(Figure("disk read", read, "GB/s", where))
    section.lines = warnings(everywhere, machines, firsts)
    section.failures = failures(everywhere, devices, word)
    return section


def versions_of(everywhere: list[dict], named: list[str]) -> dict[str, str]:
    """The versions by library, with the processes that have others."""
    names = dict.fromkeys(name for own in everywhere for name in own["versions"])
    return {
        name: places.by_value([o["versions"].get(name, "missing") for o in everywhere], named)
        for name in names
        if name not in ("cpu", "gpu")  # in lines of their own
    }


def warnings(everywhere: list[dict], machines: list[dict], firsts: list[int]) -> list[str]:
    """What is likely to go wrong on these machines, or to be slow."""
    lines = []
    for r in firsts:
        own, host_name = everywhere[r], everywhere[r]["host"]
        shared, free = own["shared memory"], machines[r]["disk"][2]
        local = sum(each["host"] == host_name for each in everywhere)
        if shared is not None and shared / GB < LEAST_SHARED_MEMORY:
            lines.append(
                f"warning: /dev/shm of {host_name} has {shared / GB:.2g} GB, where the workers of "
                "data loaders hand over batches, and end with a bus error once it is full; give "
                "the container more (docker run --shm-size 8g), or set num_workers to 0"
            )
        if free < LEAST_FREE_DISK:
            lines.append(
                f"warning: {free:.2g} GB are free in the folder --report of {host_name}; a "
                "checkpoint takes three times the weights in fp32"
            )
        if own["allowed"] < local:
            lines.append(
                f"warning: {local} processes on {host_name} share {own['allowed']:g} cores"
            )
    kinds = dict.fromkeys(device["name"] for device in everywhere[0]["devices"])
    if len(kinds) > 1:
        lines.append("warning: the GPUs differ; a run on all of them needs device_shares: auto")
    for rank, own in enumerate(everywhere):
        for i, device in enumerate(own["devices"]):
            place = places.name([rank], [each["host"] for each in everywhere])
            place = f"device {i}" if len(everywhere) == 1 else f"the GPU of {place}"
            if device.get("free", 1) < LEAST_FREE_MEMORY * device.get("total", 0):
                lines.append(
                    f"warning: {place} has {device['free']:.1f} of {device['total']:.1f} GiB free"
                )
            if device.get("others"):
                programs = ", ".join(device["others"])
                lines.append(f"warning: {place} is used by other programs: {programs}")
            if device.get("slowed"):
                lines.append(f"warning: {place} is slowed down: {', '.join(device['slowed'])}")
    return lines


def failures(everywhere: list[dict], devices: list[dict], word: str) -> list[str]:
    """What the processes disagree about, GPUs that they share, and formats that compute wrongly."""
    hosts, found = [own["host"] for own in everywhere], []
    facts = {name: [own[name] for own in everywhere] for name in ("cpu", "cores", "memory")}
    if word == "process":
        facts["device"] = [device["name"] for device in devices]
    for name in dict.fromkeys(name for own in everywhere for name in own["versions"]):
        if name not in ("cpu", "gpu"):
            facts[name] = [own["versions"].get(name, "missing") for own in everywhere]
    for name, values in facts.items():
        if len({*values}) > 1:
            text = places.by_value(values, hosts).replace("\n", "; ")
            found.append(f"{name} differs: {text}")
    cards: dict[tuple, list[int]] = {}
    for rank, own in enumerate(everywhere):
        for device in own["devices"]:
            if device["uuid"]:
                cards.setdefault((own["host"], device["uuid"]), []).append(rank)
    for (_, uuid), sharing in cards.items():
        if len(sharing) > 1:
            found.append(
                f"{places.name(sharing, hosts)} use one GPU, {uuid}; lower num_processes to the "
                "number of GPUs, or check CUDA_VISIBLE_DEVICES"
            )
    problems = [
        "; ".join(f"{f} {state}" for f, state in each["precisions"].items() if "wrong" in state)
        for each in devices
    ]
    for problem, numbers in places.group(problems).items():
        if problem:
            at = hosts if word == "process" else []
            found.append(f"{places.name(numbers, at, word)} computes wrong numbers: {problem}")
    return found
