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
from accelerate.utils import PrecisionType, is_fp8_available

from training.config import (
    compose_yaml,
    describe_type,
    plain_value,
    read_small_file,
    union_members,
)
from training.console import one_line, say

# The launcher sets ACCELERATE_USE_ and one of these names for a YAML that shards models.
SHARDED = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG")


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


def most_machines() -> int:
    """The largest number of machines of an elastic run; 1 for other runs.

    torchelastic takes the range from PET_NNODES, such as 2:4; accelerate has no option for it.
    """
    text = os.environ.get("PET_NNODES", "1")
    least, _, most = text.rpartition(":")
    numbers = [least or most, most]
    if not all(re.fullmatch("[1-9][0-9]{0,5}", n) for n in numbers) or int(numbers[0]) > int(most):
        raise ValueError(
            f"PET_NNODES is {one_line(text, 60)}; give the least and the largest number of "
            "machines, such as 2:4"
        )
    return int(most)


def without_gpu() -> str:
    """What to do where torch sees no GPU, and why it sees none."""
    version = f"torch {torch.__version__}"
    if not torch.version.cuda and not torch.version.hip:
        return (
            f"{version} is built without CUDA and ROCm: use cpu.yaml, or, where there is a GPU, "
            "run make setup again"
        )
    try:
        torch.cuda.init()
        return "use cpu.yaml"
    except RuntimeError as error:
        return f"use cpu.yaml ({version}: {one_line(error, 150)})"


def check_gpu_ids(ids: object, least: int, gpus: int) -> None:
    """Raises ValueError unless gpu_ids is all, or names so many GPUs of this machine's.

    accelerate splits the text at its commas; it crashes on a number, and for several processes on a
    single name.
    """
    example = ids if type(ids) is int else "0,1"
    error = f'gpu_ids is {ids}; give all, or numbers in quotes, such as "{example}"'
    name = "(-?[0-9]{1,6}|(GPU|MIG)-[^, ]+)"
    if type(ids) is not str or not re.fullmatch(rf"all|{name}( *, *{name})*", ids):
        raise ValueError(error)
    if ids == "all":
        return
    names = ids.replace(" ", "").split(",")
    if len(names) < least:
        raise ValueError(f"gpu_ids is {ids}; name at least {least} GPUs")
    # CUDA_VISIBLE_DEVICES may have renumbered the GPUs that torch counts.
    numbers = [int(name) for name in names if name.lstrip("-").isdigit()]
    if gpus and "CUDA_VISIBLE_DEVICES" not in os.environ and max(numbers, default=0) >= gpus:
        raise ValueError(f"gpu_ids is {ids}; the GPUs of this machine are 0 to {gpus - 1}")


def check_gpus(precision: str, fp16_yaml: str) -> None:
    """Raises ValueError if torch cannot use the GPUs, and says so if they only emulate bf16."""
    if not torch.version.cuda and not torch.version.hip:
        return
    try:
        torch.cuda.init()
    except RuntimeError as error:  # of a driver that is too old, for example
        raise ValueError(
            f"torch {torch.__version__} cannot use the GPU: {one_line(error)}"
        ) from None
    if precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        say(f"{torch.cuda.get_device_name()} only emulates bf16, slowly; faster is {fp16_yaml}")


def check_sharding(kind: str, field: str) -> None:
    """Raises ValueError if the processes do not hold whole models, which this field needs."""
    if kind in SHARDED and field and (field != "exact" or kind in ("DEEPSPEED", "MEGATRON_LM")):
        raise ValueError(
            f"{field} needs the whole model on each process, and {kind} shards it; use one of the "
            "multi_gpu YAMLs"
        )


def count_processes(path: Path, whole_models: str = "") -> int:
    """The largest number of processes, on all machines, that accelerate starts for this YAML.

    Raises ValueError if accelerate would refuse or misread the file, or if this machine lacks GPUs,
    or if it shards models; `whole_models` names a field that does not allow that, if one is set.
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
                shown = repr(value) if isinstance(value, str) else value  # with its quotes
                raise ValueError(f"{key} is {shown}; give a whole number from {first}")
        for key, value in fields.items():
            # Words such as 'no' are true to accelerate. It writes downcast_bf16 as a word itself.
            kind = union_members(kinds[key])
            own = key in ("gpu_ids", "mixed_precision", "downcast_bf16")
            if not own and kind[0] in (bool, int, str, dict) and type(value) not in kind:
                quotes = ", in quotes" if kind[0] is str else ""
                raise ValueError(f"{key} is {value}; give {describe_type(kind[0])}{quotes}")
        if not 0 <= (fields.get("main_process_port") or 0) < 65536:
            raise ValueError(
                f"main_process_port is {fields['main_process_port']}; 0 picks a free one"
            )
        if fields.get("dynamo_config"):
            raise ValueError("dynamo_config: remove it; the recipe's field compile decides")
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
    try:
        check_sharding("PARALLELISM_CONFIG" if hardware.parallelism_config else kind, whole_models)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    processes = launcher_number("num_processes", hardware.num_processes)
    machines = launcher_number("num_machines", hardware.num_machines)
    if processes < 1 or processes % machines:
        number = processes if processes > 0 else "missing"
        raise ValueError(
            f"{path}: num_processes is {number}; give a number that num_machines, {machines}, "
            "divides"
        )
    precision, precisions = hardware.mixed_precision, PrecisionType.list()
    precision = "no" if precision is None else precision
    if str(precision) not in precisions:
        known = ", ".join(precisions)
        raise ValueError(
            f"{path}: mixed_precision is {one_line(precision, 60)}; give one of {known} "
            "(no in quotes)"
        )
    if precision == "fp8" and not is_fp8_available():
        raise ValueError(
            f"{path}: mixed_precision fp8 needs torchao or Transformer Engine; use bf16"
        )
    if kind == "NO" and processes > 1 or kind == "MULTI_CPU":
        raise ValueError(
            f"{path}: distributed_type {kind} starts only one process, but num_processes is "
            f"{processes}; see cpu_multi.yaml and multi_gpu.yaml"
        )
    most = most_machines() if machines == 1 else 1
    if kind == "NO" and most > 1:
        raise ValueError(
            f"{path}: distributed_type NO starts one process alone, but PET_NNODES is "
            f"{os.environ['PET_NNODES']}; see cpu_multi.yaml and multi_gpu.yaml"
        )
    if hardware.use_cpu and kind != "NO":
        raise ValueError(
            f"{path}: use_cpu does not go with distributed_type {kind}; for several processes on "
            "the CPU see cpu_multi.yaml"
        )
    address = hardware.main_process_ip or os.environ.get("LAUNCH_MAIN_PROCESS_IP")
    if machines > 1 and not address:
        raise ValueError(
            f"{path}: num_machines is {machines}; give main_process_ip, the address of machine 0"
        )
    here, gpus = -(-processes // machines), torch.accelerator.device_count()
    on_cpu = hardware.use_cpu or str(hardware.gpu_ids).startswith("-1")
    try:
        if hardware.gpu_ids is not None:
            least = 2 if kind != "NO" and machines == 1 else 1
            least, known = (least, 0) if on_cpu else (max(least, here), gpus)
            check_gpu_ids(hardware.gpu_ids, least, known)
        if on_cpu:
            if precision == "fp16":
                raise ValueError("mixed_precision fp16 needs a GPU; write 'no'")
            return processes * most
        if gpus < here:
            raise ValueError(
                f"it needs {here} GPU{'s' * (here > 1)} on this machine, which has {gpus}; "
                + (f"set num_processes to {gpus}" if gpus else without_gpu())
            )
        check_gpus(precision, f"{'single' if kind == 'NO' else 'multi'}_gpu_fp16.yaml")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return processes * most
