"""Checks an accelerate YAML for `--check`: its number of processes, and the GPUs that they need.

accelerate's launcher reads the same file later, when it starts the processes.
"""

import difflib
import os
import re
from enum import Enum
from pathlib import Path
from typing import get_type_hints

import torch
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.utils import PrecisionType

from training.config import (
    compose_yaml,
    describe_type,
    plain_value,
    read_small_file,
    union_members,
)
from training.console import one_line


def launcher_number(name: str, otherwise: int) -> int:
    """The number that launch.py got as --name; without one `otherwise`, the number of the YAML.

    Raises ValueError for a text that is not a whole number from 1 to 999,999.
    """
    text = os.environ.get(f"LAUNCH_{name.removeprefix('num_').upper()}")
    if text is None:
        return otherwise
    if not re.fullmatch("[0-9]{1,6}", text) or int(text) < 1:
        raise ValueError(f"--{name} is {one_line(text, 60)}; give a whole number from 1")
    return int(text)


def count_processes(path: Path) -> int:
    """The number of processes, on all machines, that accelerate starts for this YAML.

    Raises ValueError if accelerate would refuse or misread the file, or if this machine lacks GPUs.
    """
    try:
        fields = plain_value(compose_yaml(read_small_file(path)))
        if not isinstance(fields, dict):
            raise ValueError("expected lines of the form 'key: value'")
        kinds = get_type_hints(ClusterConfig)
        for key in fields:
            if key not in kinds:
                near = difflib.get_close_matches(str(key), kinds, n=1)
                hint = f"did you mean {near[0]}?" if near else "accelerate knows no such key"
                raise ValueError(f"there is no key {key}; {hint}")
        for key, first in (("num_processes", 1), ("num_machines", 1), ("machine_rank", 0)):
            value = fields.get(key, first)
            if type(value) is not int or value < first:
                raise ValueError(f"{key} is {value}; give a whole number from {first}")
        for key, value in fields.items():
            kind = union_members(kinds[key])  # fields of true or false may be words: 'no'
            if key != "mixed_precision" and kind[0] in (int, str, dict) and type(value) not in kind:
                quotes = ", in quotes" if kind[0] is str else ""
                raise ValueError(f"{key} is {value}; give {describe_type(kind[0])}{quotes}")
        if fields.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
            raise ValueError("compute_environment must be LOCAL_MACHINE")
        hardware = ClusterConfig(**ClusterConfig.process_config(fields))
        if not isinstance(hardware.distributed_type, Enum):
            raise ValueError(
                f"distributed_type is {hardware.distributed_type}; write 'NO' in quotes"
            )
    except OSError as error:
        line = f"{error.strerror}; --config_file takes the path of a YAML"
        raise ValueError(f"{one_line(path, 100)}: {line}") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{one_line(path, 100)}: {one_line(error)}") from None

    kind, path = hardware.distributed_type.value, one_line(path, 100)
    processes = launcher_number("num_processes", hardware.num_processes)
    machines = launcher_number("num_machines", hardware.num_machines)
    if processes < 1 or processes % machines:
        number = processes if processes > 0 else "missing"
        raise ValueError(
            f"{path}: num_processes is {number}; give a number that num_machines, {machines}, "
            "divides"
        )
    precision, precisions = hardware.mixed_precision or "no", PrecisionType.list()
    if str(precision) not in precisions:
        known = ", ".join(precisions)
        raise ValueError(
            f"{path}: mixed_precision is {one_line(precision, 60)}; give one of {known} "
            "(no in quotes)"
        )
    if kind == "NO" and processes > 1 or kind == "MULTI_CPU":
        raise ValueError(
            f"{path}: distributed_type {kind} starts only one process, but num_processes is "
            f"{processes}; see cpu_multi.yaml and multi_gpu.yaml"
        )
    if hardware.use_cpu or str(hardware.gpu_ids).startswith("-1"):
        if precision == "fp16":
            raise ValueError(f"{path}: mixed_precision fp16 needs a GPU; write 'no'")
        return processes
    here = -(-processes // machines)
    gpus = torch.accelerator.device_count()
    if gpus < here:
        raise ValueError(
            f"{path}: it needs {here} GPUs on this machine, which has {gpus}; "
            + (f"set num_processes to {gpus}" if gpus else "use cpu.yaml")
        )
    return processes
