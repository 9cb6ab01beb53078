"""What accelerate's launcher makes of a YAML and of its options: variables of the environment.

accelerate reads the YAML. Here is checked what it takes without a word and trains as nobody meant.
"""

import argparse
import os
import traceback
from typing import Any

from samestep.settings import config

# Sections of a YAML: what must be there for accelerate to read them, and the variable that says so.
_SECTIONS = {
    "fsdp_config": ("distributed_type: FSDP", "ACCELERATE_USE_FSDP", "true"),
    "deepspeed_config": ("distributed_type: DEEPSPEED", "ACCELERATE_USE_DEEPSPEED", "true"),
    "parallelism_config": ("distributed_type: FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG", "true"),
    "fp8_config": ("mixed_precision: fp8", "ACCELERATE_MIXED_PRECISION", "fp8"),
}
# How accelerate begins the names of a section's keys, where they lack it.
_KEY_PREFIXES = {"fsdp_config": "fsdp", "fp8_config": "fp8", "dynamo_config": "dynamo_"}
# Keys with which accelerate would fail in other words.
_KINDS: dict[str, Any] = dict.fromkeys(("num_processes", "num_machines", "machine_rank"), int)
_KINDS |= dict.fromkeys(("mixed_precision", "gpu_ids"), str | None)


def parse(words: list[str]) -> argparse.Namespace:
    """The options of `accelerate launch`; raises ValueError for a wrong one."""
    from accelerate.commands.launch import launch_command_parser

    def fail(problem: str) -> None:
        raise ValueError(f"{problem}; see accelerate launch --help")

    parser = launch_command_parser()
    parser.error = fail
    return parser.parse_args(words)


def read_yaml(path: str) -> Any:
    """The YAML as accelerate reads it; raises ValueError for values that it fails for, or ignores.

    A key in a section that is no option of the launcher has no effect, and neither has the first of
    two that are equal.
    """
    from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

    with open(path, encoding="utf-8") as file:
        if not isinstance(config.read_yaml(file.read()), dict):  # raises for a key given twice
            raise ValueError("expected lines of the form 'key: value'")
    hardware = load_config_from_file(path)
    if not isinstance(hardware, ClusterConfig):
        raise ValueError("compute_environment: write LOCAL_MACHINE; others are not supported")
    for name, kind in _KINDS.items():
        if not isinstance(value := getattr(hardware, name), kind):
            wanted = "give a whole number" if kind is int else "write it in quotes"
            raise ValueError(f"{name} is {value!r}; {wanted}")
    options = vars(parse(["train.py"]))
    for name, section in vars(hardware).items():
        if name not in (*_SECTIONS, "dynamo_config") or not section:
            continue
        if not isinstance(section, dict):
            raise ValueError(f"{name} is {section!r}; give lines of the form 'key: value'")
        prefix = _KEY_PREFIXES.get(name, "")
        for key in map(str, section):
            option = key if key.startswith(prefix) else f"{prefix.rstrip('_')}_{key}"
            if option not in options:
                hint = config.suggestion(option, options, "accelerate reads no such key")
                raise ValueError(f"{name}: there is no key {key}; {hint}")
    return hardware


def find_yaml(arguments: argparse.Namespace) -> str:
    """The YAML that accelerate's launcher reads: that of its words, or of `accelerate config`."""
    from accelerate.commands.config.config_args import default_config_file

    there = os.path.isfile(default_config_file) and not arguments.cpu
    return arguments.config_file or (default_config_file if there else "")


def read(words: list[str]) -> tuple[argparse.Namespace, dict[str, str]]:
    """What accelerate's launcher reads from these words, and the environment of each process.

    Raises ValueError, with a line, for what it would refuse, and for what it would not do as meant.
    """
    from accelerate.commands.launch import _validate_launch_command

    arguments, hardware = parse(words), None
    path = find_yaml(arguments)
    with config.naming(path or "accelerate launch"):
        try:
            hardware = read_yaml(path) if path else None
            wanted = arguments.num_processes or (hardware.num_processes if hardware else 1)
            arguments, _, from_yaml = _validate_launch_command(arguments)
            _check_processes(arguments, wanted)
            fields = [*hardware.deepspeed_config] if hardware else []
            fields += ["mixed_precision"] if from_yaml else []
            arguments.deepspeed_fields_from_accelerate_config = ",".join(fields)
            env = environment(arguments)
            for name, (wanted, variable, value) in _SECTIONS.items():
                if getattr(hardware, name, None) and env.get(variable, "") != value:
                    raise ValueError(f"{name} has no effect here: write {wanted}, or remove {name}")
        except (ValueError, OSError):
            raise
        except Exception as error:  # of accelerate, for a value that it does not expect
            raise ValueError(traceback.format_exception_only(error)[-1]) from None
    return arguments, env


def starts_one(arguments: argparse.Namespace) -> bool:
    """Whether accelerate's launcher starts one process, without torchelastic."""
    several = arguments.multi_gpu or arguments.use_fsdp or arguments.use_deepspeed
    return arguments.cpu or not several


def _check_processes(arguments: argparse.Namespace, wanted: int) -> None:
    """Raises ValueError for numbers of processes and machines that the launcher does not start.

    `wanted`: as somebody gives it; with --cpu accelerate itself takes the number of GPUs.
    """
    total, machines = arguments.num_processes, arguments.num_machines
    if starts_one(arguments) and wanted > 1:
        one = "accelerate starts 1 process for this distributed_type"
        raise ValueError(f"{one}, not {wanted}; see cpu_multi.yaml")
    if arguments.use_cpu and not starts_one(arguments):
        raise ValueError("use_cpu has no effect with this distributed_type; see cpu_multi.yaml")
    if not starts_one(arguments) and (total < 1 or machines < 1 or total % machines):
        raise ValueError(f"num_processes is {total}; give a multiple of num_machines, {machines}")


def check_machines(arguments: argparse.Namespace) -> None:
    """Raises ValueError for options with which the machines of a launch do not find each other."""
    machines, rank = arguments.num_machines, arguments.machine_rank
    if machines == 1:
        return
    if not arguments.main_process_ip or rank is None or not 0 <= rank < machines:
        raise ValueError(
            f"num_machines is {machines}: give main_process_ip, that of machine 0, and "
            f"machine_rank, from 0 to {machines - 1}"
        )
    if arguments.use_deepspeed and arguments.deepspeed_multinode_launcher != "standard":
        line = "write deepspeed_multinode_launcher: standard: each machine has its own"
        raise ValueError(f"deepspeed_config: {line}")


def environment(arguments: argparse.Namespace) -> dict[str, str]:
    """What the launcher would add to this environment, by its own functions.

    As on one machine, at any port: these change no variable but MASTER_ADDR and MASTER_PORT.
    """
    from accelerate.commands.launch import check_cuda_p2p_ib_support
    from accelerate.utils import launch

    arguments = argparse.Namespace(**vars(arguments))
    arguments.num_machines, arguments.machine_rank, arguments.main_process_port = 1, 0, 0
    if starts_one(arguments):
        return launch.prepare_simple_launcher_cmd_env(arguments)[1]
    if arguments.use_deepspeed:
        env = launch.prepare_deepspeed_cmd_env(arguments)[1]
    else:
        env = launch.prepare_multi_gpu_env(arguments)
    if not check_cuda_p2p_ib_support():
        env = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"} | env
    return env
