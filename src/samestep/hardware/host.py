"""The machine without its GPUs: processor, memory, the limits of its container, and disk."""

import contextlib
import os
import platform
import re
import shutil
import socket
import time
from pathlib import Path

import psutil

from samestep.processes.ranks import UserError

GB, GIB = 1e9, 2**30
WRITTEN = 64 << 20  # bytes that measure a disk
SHARED_MEMORY = Path("/dev/shm")  # where the workers of a data loader hand over batches


# ---- Processor and memory ------------------------------------------------------------------------


def read_text(path: str | Path) -> str:
    """The content of a file of the system; empty if there is none."""
    with contextlib.suppress(OSError):
        return Path(path).read_text(errors="replace")
    return ""


def cpu_model(cpuinfo: str) -> str:
    """The name of the processor; ARM processors have none in /proc/cpuinfo."""
    found = re.search(r"model name\s*: (.+)", cpuinfo)
    return (found[1] if found else platform.processor()) or platform.machine()


def cgroup_files(cgroups: str, controller: str, file: str, old_file: str) -> list[Path]:
    """The files that may limit this process: those of its cgroup, and of all above it.

    `cgroups` is /proc/self/cgroup. `file` is the name in version 2 of cgroups, `old_file` in
    version 1. Inside a container the upper ones are those of the container.
    """
    files = []
    for line in cgroups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = Path("/sys/fs/cgroup", *([controllers] if controllers else []))
        own = Path(path.lstrip("/"))
        name = old_file if controllers else file
        files += [root / folder / name for folder in (own, *own.parents)]
    return list(dict.fromkeys(files))


def read_quota(text: str) -> float | None:
    """Cores that `cpu.max` allows, such as `150000 100000`; None: any number."""
    quota, _, period = text.strip().partition(" ")
    if not quota.isdigit() or not period.strip().isdigit():
        return None
    return int(quota) / int(period)


def allowed_cores() -> float:
    """Cores that this process may use: by its affinity and by its cgroup."""
    cores = float(psutil.cpu_count() or 1)
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        cores = float(len(os.sched_getaffinity(0)))
    cgroups = read_text("/proc/self/cgroup")
    for path in cgroup_files(cgroups, "cpu", "cpu.max", "cpu.cfs_quota_us"):
        text = read_text(path)
        if path.name != "cpu.max":
            text = f"{text.strip()} {read_text(path.with_name('cpu.cfs_period_us'))}"
        cores = min(cores, read_quota(text) or cores)
    return cores


def memory_limit() -> int:
    """Bytes of memory that this process may use: those of the machine, or of its cgroup."""
    limit = psutil.virtual_memory().total
    cgroups = read_text("/proc/self/cgroup")
    for path in cgroup_files(cgroups, "memory", "memory.max", "memory.limit_in_bytes"):
        text = read_text(path).strip()
        limit = min(limit, int(text)) if text.isdigit() else limit
    return limit


def shared_memory() -> float | None:
    """Bytes of /dev/shm; None where there is none, as on macOS."""
    return shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else None


# ---- Disk ----------------------------------------------------------------------------------------


def measure_disk(folder: Path) -> tuple[float, float, float]:
    """(GB/s written, GB/s read, GB free) in this folder; raises UserError if it is not writable.

    The file is flushed to the disk, and then dropped from the cache of the system where that can be
    asked for: elsewhere, and on disks of other machines, what is read may come from memory.
    """
    path = folder / f".speed-{socket.gethostname()}-{os.getpid()}"
    content = os.urandom(1 << 20)  # a disk that compresses would take zeros too easily
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            began = time.perf_counter()
            for _ in range(WRITTEN // len(content)):
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
            write = time.perf_counter() - began
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with open(path, "rb", buffering=0) as file:
            began = time.perf_counter()
            while file.read(len(content)):
                pass
            read = time.perf_counter() - began
        return WRITTEN / write / GB, WRITTEN / read / GB, shutil.disk_usage(folder).free / GB
    except OSError as error:
        raise UserError(
            f"--report {folder}: {error.strerror or error}; give a folder that can be written to"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
