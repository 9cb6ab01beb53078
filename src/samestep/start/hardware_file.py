"""hardware.yaml of a run folder: what the accelerate YAML and the environment really meant."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from samestep.base.console import one_line, without_credentials
from samestep.base.files import read_text
from samestep.settings.mesh import AXES, Layout

# Variables that decide where and how a run computes; none of them holds a secret.
PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "DS_", "NCCL_", "TORCH_NCCL_", "GLOO_")
NAMES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG")
# What launchers set for a single process alone: that their number changed is said anyway.
FOLLOWING = ("ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION")


def describe_sharding(layout: Layout) -> str:
    """What shards the model, with the sizes of its axes; none: each process holds all of it."""
    words = []
    if layout.fsdp:
        words.append("FSDP2")
    if layout.deepspeed:
        words.append(f"ZeRO-{os.environ.get('ACCELERATE_DEEPSPEED_ZERO_STAGE', '?')}")
    for name in (*AXES, "stages"):
        if getattr(layout, name) > 1:
            words.append(f"{name} {getattr(layout, name)}")
    return ", ".join(words) or "none"


def describe_hardware(layout: Layout, precision: str, devices: list[str]) -> dict[str, Any]:
    """The entries of hardware.yaml; `devices`: the names of those of all processes."""
    chosen = {}
    for name, value in sorted(os.environ.items()):
        if name.startswith(PREFIXES) or name in NAMES:
            chosen[name] = without_credentials(value)
    return {
        "processes": layout.processes,
        "nodes": int(os.environ.get("GROUP_WORLD_SIZE", 1)),
        "precision": precision,
        "sharding": describe_sharding(layout),
        "devices": dict(Counter(devices)),
        "environment": chosen,
    }


def read_hardware_file(path: Path) -> dict[str, Any]:
    """The entries of a hardware.yaml; empty if it is missing or damaged."""
    try:
        found = yaml.safe_load(read_text(path))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    valid = isinstance(found, dict) and isinstance(found.get("environment"), dict)
    return found if valid else {}


def changed_hardware(before: dict, now: dict) -> str:
    """What changed since the last start of a run, in one line; empty: nothing is known.

    A change of precision is told with those of versions: see startup.versions.
    """
    if not before:
        return ""
    names = ("processes", "nodes", "sharding")
    old = {**{name: before.get(name) for name in names}, **before["environment"]}
    new = {**{name: now[name] for name in names}, **now["environment"]}
    # Of all processes, by kind: their numbers are that of the processes.
    old["devices"] = ", ".join(before.get("devices") or ())
    new["devices"] = ", ".join(now["devices"])
    changes = []
    for name in {**new, **old}:
        if old.get(name) != new.get(name) and name not in FOLLOWING:
            changes.append(f"{name} {old.get(name, 'not set')} -> {new.get(name, 'not set')}")
    return one_line(f"hardware: {', '.join(changes)}", 500) if changes else ""
