"""What a launcher has set in the environment of this process, and what is wrong with it."""

import contextlib
import io
import os
import re

import torch
from accelerate.utils import parse_flag_from_env

from samestep.base.console import one_line, read_place
from samestep.base.launching import EXPORTED, FAILED
from samestep.launch import launcher
from samestep.processes.mesh import AXES, SHARDED, Layout, layout_of

# Variables that speak of several processes, and their value for one.
OF_SEVERAL = {"WORLD_SIZE": "1", "LOCAL_RANK": "0", "PET_NPROC_PER_NODE": "1", "PET_NNODES": "1"}
OF_SEVERAL |= {"SLURM_STEP_NUM_TASKS": "1"}  # tasks that srun has started
# train_pipeline.py sets them on each process, under a YAML that shards nothing.
STAGES, TP = "PARALLELISM_CONFIG_STAGES", "PARALLELISM_CONFIG_TP_SIZE"
_STARTS = "torchrun, accelerate launch or samestep launch"


def _read_size(name: str) -> int:
    """The whole number in a variable; 1 where it is not set. Raises ValueError for another text."""
    text = os.environ.get(name) or "1"
    if not re.fullmatch(r"-?\d+", text):
        raise ValueError(f"{name} is {text!r}; give a whole number")
    return int(text)


def this_layout() -> Layout:
    """The layout that the launcher has set up for this process."""
    kinds = tuple(kind for kind in SHARDED if parse_flag_from_env(f"ACCELERATE_USE_{kind}"))
    axes: dict[str, int] = {}
    if "PARALLELISM_CONFIG" in kinds:
        axes = {name: _read_size(f"PARALLELISM_CONFIG_{name.upper()}_SIZE") for name in AXES}
    if (stages := _read_size(STAGES)) > 1:
        axes |= {"stages": stages, "tp": _read_size(TP)}
    rank, processes = read_place()
    return layout_of(processes, rank, kinds, axes)


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
                f"{_STARTS}; or, to train in one process, unset {name}"
            )
    if kinds := this_layout().kinds:
        raise ValueError(
            f"ACCELERATE_USE_{kinds[0]} is set, and accelerate shards nothing in a process that no "
            f"launcher has started: start train.py by {_STARTS}, or unset it"
        )


def most_processes() -> int:
    """The processes of an elastic run when all of its machines are there; 0: it is none."""
    least, _, most = os.environ.get("PET_NNODES", "").partition(":")
    if "LOCAL_WORLD_SIZE" not in os.environ or not most or least == most:
        return 0
    return int(most) * int(os.environ["LOCAL_WORLD_SIZE"])


# What the recipe decides, and what takes the place of a variable; these values change nothing.
_DECIDED = {
    "ACCELERATE_DYNAMO_BACKEND": "the recipe's field compile decides",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "the recipe's field micro_batch_size decides",
    "ACCELERATE_GRADIENT_CLIPPING": "the recipe's field max_grad_norm decides",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "train.py fills in DeepSpeed's settings",
    "FSDP_ACTIVATION_CHECKPOINTING": "the recipe's field gradient_checkpointing decides",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "the recipe's field gradient_checkpointing decides",
    "FSDP_SHARDING_STRATEGY": "fsdp_reshard_after_forward decides under FSDP 2",
}
_UNSET = ("", "no", "none", "false", "full_shard")


def without_gpu() -> str:
    """What to do where torch sees no GPU."""
    return (
        f"use cpu.yaml; or, where there is one, update its driver, or give torch "
        f"{torch.__version__} another build: make setup TORCH_BACKEND=cu130 (rocm7.2 for AMD)"
    )


def check_launched(layout: Layout) -> None:
    """Raises ValueError for what the launcher has set up, and train.py or a library cannot do.

    What it cannot be combined with is elsewhere: see device.check_combinations.
    """
    for name, decides in _DECIDED.items():
        if (text := os.environ.get(name, "")).lower() not in _UNSET:
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
    stage = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    if layout.deepspeed and stage not in ("2", "3"):
        raise ValueError(f"deepspeed_config: zero_stage is {one_line(stage, 60)}; give 2 or 3")
    offload = os.environ.get("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "none")
    if layout.deepspeed and offload == "cpu" and stage != "3":
        raise ValueError("deepspeed_config: offload_param_device needs zero_stage 3")


def check_words(words: list[str]) -> None:
    """Raises ValueError for words of accelerate's launcher that samestep launch would refuse."""
    if EXPORTED in os.environ:
        raise ValueError(
            "this shell has what samestep env has set: start train.py by torchrun or samestep "
            "launch, or call accelerate launch in another shell"
        )
    with contextlib.redirect_stderr(io.StringIO()):  # what the launcher has warned of
        launcher.read(words)
