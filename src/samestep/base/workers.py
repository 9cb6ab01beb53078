"""The cores of this process."""

import os


def count_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cores_per_process() -> int:
    """Cores of this machine for each of its training processes, at least 1."""
    return max(count_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)), 1)
