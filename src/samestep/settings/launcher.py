"""What a launcher has set in the environment, and what accelerate's launcher makes of a YAML.

accelerate reads the YAML. Here is checked what it takes without a word and trains as nobody meant:
in the launched process, by the environment; before a launch, also the words and the YAML.
"""

import argparse
import os
import re
import traceback
from collections.abc import Mapping
from typing import Any

import torch

from samestep.base.console import PROCESSES, one_line
from samestep.base.launching import EXPORTED, FAILED
from samestep.settings import config
from samestep.settings.mesh import Layout

STEP_TASKS = "SLURM_STEP_TASKS_PER_NODE"
# Sections of a YAML: what must be there for accelerate to read them, and the variable that says so.
SECTIONS = {
    "fsdp_config": ("distributed_type: FSDP", "ACCELERATE_USE_FSDP", "true"),
    "deepspeed_config": ("distributed_type: DEEPSPEED", "ACCELERATE_USE_DEEPSPEED", "true"),
    "parallelism_config": ("distributed_type: FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG", "true"),
    "fp8_config": ("mixed_precision: fp8", "ACCELERATE_MIXED_PRECISION", "fp8"),
}
# How accelerate begins the names of a section's keys, where they lack it.
KEY_PREFIXES = {"fsdp_config": "fsdp", "fp8_config": "fp8", "dynamo_config": "dynamo_"}


# Variables that speak of several processes, and their value for one.
OF_SEVERAL = {"WORLD_SIZE": "1", "LOCAL_RANK": "0", "PET_NPROC_PER_NODE": "1", "PET_NNODES": "1"}
STARTS = "torchrun, accelerate launch or samestep launch"


def check_started() -> None:
    """Raises ValueError if this process would train alone where several are meant.

    A launcher sets RANK. Whoever has to call it, such as Kubeflow, a pod or srun, does not.
    """
    if failed := os.environ.get(FAILED):
        raise ValueError(f"samestep env failed in this shell: {failed}; call it again")
    if "RANK" in os.environ:
        return
    for name, one in OF_SEVERAL.items():
        text = os.environ.get(name) or one
        most = text.rpartition(":")[2]  # PET_NNODES may be a range, such as 1:4
        if most not in (one, "-1"):  # scripts of old write -1 for a process by itself
            raise ValueError(
                f"{name} is {one_line(text, 60)}, and no launcher has set RANK: start train.py by "
                f"{STARTS}; or, to train in one process, unset {name}"
            )
    if (tasks := tasks_here()) > 1:
        raise ValueError(
            f"srun has started {tasks} tasks on this node, and no launcher has set RANK: give srun "
            f"--ntasks-per-node 1, and start train.py there by {STARTS}, as cluster/slurm.sbatch "
            f"does; or, for {tasks} runs of one process, unset {STEP_TASKS}"
        )


def most_processes() -> int:
    """The processes of an elastic run when all of its machines are there; 0: it is none."""
    least, _, most = os.environ.get("PET_NNODES", "").partition(":")
    if "RANK" not in os.environ or not most or least == most:
        return 0
    return int(most) * int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def tasks_here() -> int:
    """Tasks of the step of Slurm on this node; 0: this is none."""
    counts: list[int] = []  # of each node; Slurm writes 2(x3),1 for 2,2,2,1
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ.get(STEP_TASKS, "")):
        counts += [int(tasks)] * int(times or 1)
    node = int(os.environ.get("SLURM_NODEID", 0))
    return counts[node] if node < len(counts) else 0


# ---- The launched process ------------------------------------------------------------------------

# What the recipe decides, and what takes the place of a variable; these values change nothing.
DECIDED = {
    "ACCELERATE_DYNAMO_BACKEND": "the recipe's field compile decides",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "the recipe's field micro_batch_size decides",
    "ACCELERATE_GRADIENT_CLIPPING": "the recipe's field max_grad_norm decides",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "train.py fills in DeepSpeed's settings",
    "FSDP_ACTIVATION_CHECKPOINTING": "the recipe's field gradient_checkpointing decides",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "the recipe's field gradient_checkpointing decides",
    "FSDP_SHARDING_STRATEGY": "fsdp_reshard_after_forward decides under FSDP 2",
}
UNSET = ("", "no", "none", "false", "full_shard")


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
    except RuntimeError as error:  # such as an old driver
        return f"use cpu.yaml ({version}: {one_line(error, 150)})"
    return "use cpu.yaml"


def check_launched(layout: Layout) -> None:
    """Raises ValueError for what the launcher has set up, and train.py or a library cannot do.

    What it cannot be combined with is elsewhere: see start/combinations.py.
    """
    for name, decides in DECIDED.items():
        if (text := os.environ.get(name, "")).lower() not in UNSET:
            raise ValueError(
                f"{name} is {one_line(text, 60)}: leave it out of the accelerate YAML; {decides}"
            )
    if layout.fsdp and os.environ.get("FSDP_VERSION", "1") != "2":
        raise ValueError("train.py shards by FSDP 2 only; write fsdp_version: 2 in fsdp_config")
    if layout.sp > 1:
        raise ValueError("parallelism_config: Ulysses brings a loader of its own; use cp_size")
    by_tensors = layout.tp == layout.processes
    if "PARALLELISM_CONFIG" in layout.kinds and not layout.fsdp and not by_tensors:
        raise ValueError("parallelism_config shards nothing without FSDP; use hsdp.yaml")
    if layout.cp > 1 and not torch.cuda.is_available():
        raise ValueError("context parallelism needs CUDA's attention kernels")
    if layout.deepspeed:
        check_zero(os.environ)


def check_zero(env: Mapping[str, str]) -> None:
    """Raises ValueError for settings of DeepSpeed that train.py does not know."""
    stage = env.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    if stage not in ("2", "3"):
        raise ValueError(f"deepspeed_config: zero_stage is {one_line(stage, 60)}; give 2 or 3")
    offload = env.get("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "none")
    if offload == "cpu" and stage != "3":
        raise ValueError("deepspeed_config: offload_param_device needs zero_stage 3")


def check_words(words: list[str]) -> None:
    """Raises ValueError for what accelerate's launcher, with these words, has not done as meant.

    Its YAML is looked at for sections without effect, and for processes that it does not start.
    """
    if EXPORTED in os.environ:
        raise ValueError(
            "this shell has what samestep env has set: start train.py by torchrun or samestep "
            "launch, or call accelerate launch in another shell"
        )
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--num_processes", "--num-processes", type=int)
    wanted = parser.parse_known_args(words)[0].num_processes
    if path := find_yaml(words):
        with config.naming(path):
            hardware = read_yaml(path)
            check_sections(hardware, os.environ)
        wanted = wanted or hardware.num_processes
    if PROCESSES == 1 < (wanted or 1):
        raise ValueError(STARTS_ONE.format(wanted))


# ---- accelerate's launcher -----------------------------------------------------------------------

STARTS_ONE = "accelerate starts 1 process for this distributed_type, not {}; see cpu_multi.yaml"


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
    for name in ("num_processes", "num_machines", "machine_rank"):
        if type(value := getattr(hardware, name)) is not int:
            raise ValueError(f"{name} is {value!r}; give a whole number")
    for name in ("mixed_precision", "gpu_ids"):
        if not isinstance(value := getattr(hardware, name), str | None):
            raise ValueError(f"{name} is {value!r}; write it in quotes")
    if not isinstance(hardware.use_cpu, bool):
        raise ValueError(f"use_cpu is {hardware.use_cpu!r}; give true or false")
    options = vars(parse(["train.py"]))
    for name, section in vars(hardware).items():
        if name not in (*SECTIONS, "dynamo_config") or not section:
            continue
        if not isinstance(section, dict):
            raise ValueError(f"{name} is {section!r}; give lines of the form 'key: value'")
        prefix = KEY_PREFIXES.get(name, "")
        for key in map(str, section):
            option = key if key.startswith(prefix) else f"{prefix.rstrip('_')}_{key}"
            if option not in options:
                hint = config.suggestion(option, options, "accelerate reads no such key")
                raise ValueError(f"{name}: there is no key {key}; {hint}")
    return hardware


def check_sections(hardware: Any, env: Mapping[str, str]) -> None:
    """Raises ValueError for a section of the YAML that has no effect in this environment."""
    for name, (wanted, variable, value) in SECTIONS.items():
        if getattr(hardware, name) and env.get(variable, "") != value:
            raise ValueError(f"{name} has no effect here: write {wanted}, or remove {name}")


def find_yaml(words: list[str]) -> str:
    """The YAML that accelerate's launcher reads: that of its words, or of `accelerate config`."""
    from accelerate.commands.config.config_args import default_config_file

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config_file", "--config-file")
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_known_args(words)[0]
    there = os.path.isfile(default_config_file) and not arguments.cpu
    return arguments.config_file or (default_config_file if there else "")


def read(words: list[str]) -> tuple[argparse.Namespace, dict[str, str]]:
    """What accelerate's launcher reads from these words, and the environment of each process.

    Raises ValueError, with a line, for what it would refuse, and for what it would not do as meant.
    """
    from accelerate.commands.launch import _validate_launch_command

    arguments, path, hardware = parse(words), find_yaml(words), None
    with config.naming(path or "accelerate launch"):
        try:
            hardware = read_yaml(path) if path else None
            arguments, _, from_yaml = _validate_launch_command(arguments)
            check_processes(arguments)
            fields = [*hardware.deepspeed_config] if hardware else []
            fields += ["mixed_precision"] if from_yaml else []
            arguments.deepspeed_fields_from_accelerate_config = ",".join(fields)
            env = environment(arguments)
            if hardware:
                check_sections(hardware, env)
        except (ValueError, OSError):
            raise
        except Exception as error:  # of accelerate, for a value that it does not expect
            raise ValueError(traceback.format_exception_only(error)[-1]) from None
    return arguments, env


def starts_one(arguments: argparse.Namespace) -> bool:
    """Whether accelerate's launcher starts one process, without torchelastic."""
    several = arguments.multi_gpu or arguments.use_fsdp or arguments.use_deepspeed
    return arguments.cpu or not several


def check_processes(arguments: argparse.Namespace) -> None:
    """Raises ValueError for numbers of processes and machines that the launcher does not start."""
    total, machines = arguments.num_processes, arguments.num_machines
    if starts_one(arguments) and total > 1:
        raise ValueError(STARTS_ONE.format(total))
    if arguments.use_cpu and not starts_one(arguments):
        raise ValueError("use_cpu has no effect with this distributed_type; see cpu_multi.yaml")
    if not starts_one(arguments) and (total < 1 or machines < 1 or total % machines):
        raise ValueError(f"num_processes is {total}; give a multiple of num_machines, {machines}")


def check_machines(arguments: argparse.Namespace) -> None:
    """Raises ValueError for options with which the machines of a launch do not find each other."""
    machines, rank = arguments.num_machines, arguments.machine_rank
    rank = -1 if rank is None else rank
    if machines > 1 and not arguments.main_process_ip:
        raise ValueError(f"num_machines is {machines}; give main_process_ip, machine 0's")
    if machines > 1 and not 0 <= rank < machines:
        raise ValueError(f"machine_rank is {rank}; give one from 0 to {machines - 1}")
    if machines > 1 and arguments.use_deepspeed:
        if arguments.deepspeed_multinode_launcher != "standard":
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
