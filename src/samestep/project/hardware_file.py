"""The variables that decide where and how a run computes, for hardware.yaml."""

import os

from samestep.base.console import without_credentials

# Variables that decide where and how a run computes; none of them holds a secret.
PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "DS_", "NCCL_", "TORCH_NCCL_", "GLOO_")
NAMES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG")


def launch_variables() -> dict[str, str]:
    """The variables that hardware.yaml lists beside these entries."""
    chosen = {}
    for name, value in sorted(os.environ.items()):
        if name.startswith(PREFIXES) or name in NAMES:
            chosen[name] = without_credentials(value)
    return chosen
