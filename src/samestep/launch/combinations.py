"""What recipe, YAML and device have of what cannot be combined: see processes/exclusions.py."""

import os
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env

from samestep.launch.device import use_cpu
from samestep.processes import exclusions
from samestep.processes.mesh import Layout


def check_combinations(cfg: Any, layout: Layout) -> None:
    """Raises UserError for two things of recipe, YAML and device that cannot be combined."""
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    on_cpu = use_cpu() or not torch.accelerator.is_available()
    trains = not cfg.check  # a check may run on another machine
    there = {
        "exact": cfg.exact,
        "compile": cfg.compile,
        "async_save": cfg.async_save,
        "device_shares": cfg.device_shares != "equal",
        "fp16": precision == "fp16",
        "fp8": precision == "fp8",
        "offload": parse_flag_from_env("FSDP_OFFLOAD_PARAMS"),
        "sharded weights": layout.sharded,
        "DeepSpeed": layout.deepspeed,
        "tensor parallelism": layout.tp > 1,
        "context parallelism": layout.cp > 1,
        "stages": layout.stages > 1,
        "a CPU": trains and on_cpu,
        "an Apple GPU": trains and not on_cpu and torch.backends.mps.is_available(),
    }
    exclusions.check(there)
