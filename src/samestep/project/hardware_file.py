"""The hardware of a run: a dict in manifests, and hardware.yaml, which has its variables, too."""

import os
from collections import Counter
from typing import Any

from samestep.base.console import without_credentials
from samestep.core.mesh import AXES, Layout

# Variables that decide where and how a run computes; none of them holds a secret.
PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "DS_", "NCCL_", "TORCH_NCCL_", "GLOO_")
NAMES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG")


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


def describe_hardware(layout: Layout, devices: list[str], versions: dict) -> dict[str, Any]:
    """What rounding depends on, as manifests record it; `devices`: those of all processes."""
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", 1))
    grid = {"processes": layout.processes, "nodes": nodes, "sharding": describe_sharding(layout)}
    return {**grid, "devices": dict(Counter(devices)), **versions}


def launch_variables() -> dict[str, str]:
    """The variables that hardware.yaml lists beside these entries."""
    chosen = {}
    for name, value in sorted(os.environ.items()):
        if name.startswith(PREFIXES) or name in NAMES:
            chosen[name] = without_credentials(value)
    return chosen
