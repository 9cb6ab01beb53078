"""Checks the hardware before a model is built: the accelerate YAML, and what the launcher has set.

`--check` reads the YAML, as accelerate's launcher does later, when it starts the processes. Each of
them checks what the launcher has told it, since options of the launcher override the YAML.
"""

import os
from pathlib import Path
from typing import Any, get_type_hints

import torch
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import (
    PrecisionType,
    is_deepspeed_available,
    is_torchao_available,
    is_transformer_engine_available,
)

from samestep.base.console import one_line, print_on_main
from samestep.base.fields import check_pairs, refuse
from samestep.settings.config import (
    describe_type,
    members_of,
    plain_value,
    read_yaml,
    suggestion,
)
from samestep.settings.mesh import AXES, SHARDED, Layout, layout_of

# The sections of a YAML, with the names that their keys have as options of the launcher.
SECTIONS = {
    "fsdp_config": ("fsdp_",),
    "deepspeed_config": ("deepspeed_", "zero", "offload_", "gradient_"),
    "parallelism_config": ("parallelism_config_",),
    "fp8_config": ("fp8_",),
}
# Keys to remove, and why: accelerate would let them override the recipe, or ignores them.
CHECKPOINTING = "the recipe's field gradient_checkpointing decides"
OF_FSDP_1 = ("sharding_strategy", "backward_prefetch", "forward_prefetch", "use_orig_params")
REMOVED = {
    **{f"fsdp_{key}": "FSDP 2 does not read it" for key in (*OF_FSDP_1, "sync_module_states")},
    "fsdp_activation_checkpointing": CHECKPOINTING,
    "fsdp_activation_checkpointing_offload": CHECKPOINTING,
    "gradient_accumulation_steps": "the recipe's field micro_batch_size decides",
    "gradient_clipping": "the recipe's field max_grad_norm decides",
    "deepspeed_config_file": "train.py fills in DeepSpeed's settings; the keys of "
    "deepspeed_zero3_offload.yaml are those to choose",
}
SIMPLE = (bool, int, str, dict)  # types that are checked
FP8_LIBRARIES = {"AO": is_torchao_available, "TE": is_transformer_engine_available}


def cuda_error() -> str:
    """Why torch cannot use this machine's GPUs, such as an old driver; empty: nothing is known."""
    if torch.version.cuda or torch.version.hip:
        try:
            torch.cuda.init()
        except RuntimeError as error:
            return one_line(error, 150)
    return ""


def without_gpu() -> str:
    """What to do where torch sees no GPU, and why it sees none."""
    version, error = f"torch {torch.__version__}", cuda_error()
    if not torch.version.cuda and not torch.version.hip:
        return (
            f"{version} is built without CUDA and ROCm: use cpu.yaml, or, where there is a GPU, "
            "run make setup again"
        )
    return f"use cpu.yaml ({version}: {error})" if error else "use cpu.yaml"


def check_keys(given: dict, kinds: dict[str, Any], start: str = "") -> None:
    """Raises ValueError for an unknown key, or a value that accelerate would take for another.

    Words such as 'no' are true to it.
    """
    for key, value in given.items():
        if key not in kinds:
            hint = suggestion(str(key), kinds, "accelerate reads no such key")
            raise ValueError(f"{start}there is no key {key}; {hint}")
        kind, *others = members_of(kinds[key])
        if value is not None and type(value) not in (kind, *others) and kind in SIMPLE:
            quotes = ", in quotes" if kind is str else ""
            shown = one_line(repr(value), 60)
            raise ValueError(f"{start}{key} is {shown}; give {describe_type(kind)}{quotes}")


def read_section(name: str, section: dict) -> dict:
    """All keys of a section, by their names as options of the launcher, with its defaults.

    Raises ValueError for a key that nothing reads, or that the recipe decides.
    """
    options, prefix = vars(launch_command_parser().parse_args(["train.py"])), SECTIONS[name][0]
    known = {key: value for key, value in options.items() if key.startswith(SECTIONS[name])}
    full = {key: key for key in section}
    if prefix in ("fsdp_", "fp8_"):  # as accelerate does
        full = {k: k if str(k).startswith(prefix[:-1]) else f"{prefix}{k}" for k in section}
    for key, value in section.items():
        if full[key] in REMOVED and value not in (None, False):
            raise ValueError(f"{name}: remove {key}; {REMOVED[full[key]]}")
    section = {key: value for key, value in section.items() if full[key] not in REMOVED}
    kinds = {key: bool if value in ("true", "false") else object for key, value in known.items()}
    kinds |= {key: kinds[full[key]] for key in section if full[key] in kinds}
    check_keys(section, kinds, f"{name}: ")
    for key, value in section.items():
        is_number = type(value) is int and value > 0
        refuse(
            (kinds[key] is bool and value is None, "true or false"),
            (key.endswith("_size") and not is_number, "a whole number from 1"),
            start=f"{name}: {key} is {one_line(repr(value), 60)}; give ",
        )
    return known | {full[key]: value for key, value in section.items()}


def check_parallelism(layout: Layout, precision: str, fsdp_version: object, fp8: object) -> None:
    """Raises ValueError for what the installed libraries, or train.py, cannot do.

    `fp8`: the backend that is asked for. What the fields of the recipe rule out is elsewhere:
    see startup.check_sharing.
    """
    kinds, bf16 = layout.kinds, "write bf16, or use fsdp2.yaml"
    names = {"FSDP": "FSDP", "DEEPSPEED": "DeepSpeed", "": "stages"}
    sharding = names.get((*kinds, "")[0], "parallelism_config")
    fp16_on, fp8_on = precision == "fp16", precision == "fp8"
    backends = [*FP8_LIBRARIES] if fp8 in (None, "NO") else [fp8]
    has_fp8 = any(name in backends and there() for name, there in FP8_LIBRARIES.items())
    axes, on_gpu = "PARALLELISM_CONFIG" in kinds, torch.cuda.is_available()
    alone = axes and not layout.fsdp and not layout.deepspeed  # for tensor parallelism
    several, together = layout.replicas > 1 or layout.cp > 1, layout.together > 1
    unsharded = axes and layout.fsdp and layout.dp_shard == 1 and layout.cp == 1
    lacks_deepspeed = layout.deepspeed and not is_deepspeed_available()
    old_fsdp = layout.fsdp and str(fsdp_version) != "2"
    check_pairs(
        (axes and layout.deepspeed, "parallelism_config", "DeepSpeed", "use hsdp.yaml"),
        # The scaling of the loss for fp16 is not to be relied on there.
        (fp16_on and layout.sharded, "mixed_precision fp16", sharding, bf16),
        (fp8_on and (layout.deepspeed or together), "mixed_precision fp8", sharding, bf16),
        (alone and layout.tp > 1 and several, "DDP", "tensor parallelism", "use hsdp.yaml"),
    )
    install = "run make setup EXTRAS=deepspeed (or pip install deepspeed), or use fsdp2.yaml"
    refuse(
        ("MEGATRON_LM" in kinds, "Megatron-LM trains models of its own only; use fsdp2.yaml"),
        (lacks_deepspeed, f"DeepSpeed is not installed; {install}"),
        (old_fsdp, "train.py shards by FSDP 2 only; write fsdp_version: 2 in fsdp_config"),
        (fp8_on and not has_fp8, "mixed_precision fp8 needs torchao (pip install torchao), or TE"),
        (layout.sp > 1, "parallelism_config: Ulysses brings a loader of its own; use cp_size"),
        (alone and layout.tp == 1, "parallelism_config needs distributed_type FSDP; use hsdp.yaml"),
        (unsharded, "parallelism_config leaves nothing to shard: give a dp_shard_size above 1"),
        (layout.cp > 1 and not on_gpu, "context parallelism needs CUDA's attention kernels"),
    )


def check_launched(layout: Layout) -> None:
    """Raises ValueError for what the launcher has set up, and train.py or a library cannot do."""
    for option in ("gradient_accumulation_steps", "gradient_clipping", "deepspeed_config_file"):
        name = f"ACCELERATE_{option.upper()}"
        if layout.deepspeed and os.environ.get(name):
            raise ValueError(f"unset {name}; {REMOVED[option]}")
    names = ("ACCELERATE_MIXED_PRECISION", "FSDP_VERSION", "ACCELERATE_FP8_BACKEND")
    precision, version, backend = map(os.environ.get, names)
    check_parallelism(layout, precision or "no", version or "1", backend)


def read_hardware(path: Path) -> Layout:
    """The layout of all processes, on all machines, that accelerate starts for this YAML.

    For an elastic run, that of the largest number of machines. Raises ValueError if accelerate or
    train.py would refuse or misread the file, or if this machine lacks GPUs or libraries for it.
    """
    try:
        fields = plain_value(read_yaml(path))
        if not isinstance(fields, dict):
            raise ValueError("expected lines of the form 'key: value'")
        # accelerate itself writes downcast_bf16 as a word.
        kinds = {"distributed_type": str, "downcast_bf16": object}
        check_keys(fields, get_type_hints(ClusterConfig) | kinds)
        if fields.get("dynamo_config"):
            raise ValueError("dynamo_config: remove it; the recipe's field compile decides")
        return check_hardware(ClusterConfig(**ClusterConfig.process_config(fields)))
    except OSError as error:
        line = f"{error.strerror}; --config_file takes the path of a YAML"
        raise ValueError(f"{one_line(path, 100)}: {line}") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{one_line(path, 100)}: {one_line(error)}") from None


def check_hardware(hardware: ClusterConfig) -> Layout:
    """The layout that a YAML asks for; raises ValueError if it or this machine do not allow it."""
    kind, precision = hardware.distributed_type.value, hardware.mixed_precision or "no"
    # Options of samestep launch override the YAML.
    processes = int(os.environ.get("LAUNCH_PROCESSES", hardware.num_processes or 0))
    machines = int(os.environ.get("LAUNCH_MACHINES", hardware.num_machines or 0))
    rank = str(os.environ.get("LAUNCH_MACHINE_RANK", hardware.machine_rank))
    address = hardware.main_process_ip or os.environ.get("LAUNCH_MAIN_PROCESS_IP")
    # torchelastic takes the range from PET_NNODES, such as 2:4; accelerate has no option for it.
    elastic = os.environ.get("PET_NNODES", "1") if machines == 1 else "1"
    total = processes * int(elastic.rpartition(":")[2])
    axes, on_cpu = hardware.parallelism_config, hardware.use_cpu
    given = processes if processes > 0 else "missing"
    several, divides = machines > 1, min(processes, machines) > 0 and processes % machines == 0
    known_rank = rank.isdecimal() and int(rank) < machines
    one_process = (kind == "NO" and total > 1) or kind == "MULTI_CPU"
    precisions = PrecisionType.list()
    choices = f"one of {', '.join(precisions)}, in quotes"
    precision, rank = one_line(precision, 60), one_line(rank, 60)
    refuse(
        (not divides, f"num_processes is {given}; give a multiple of num_machines, {machines}"),
        (precision not in precisions, f"mixed_precision is {precision}; give {choices}"),
        (one_process, f"distributed_type {kind} starts 1 process, not {total}; see cpu_multi.yaml"),
        (several and not address, f"num_machines is {machines}; give main_process_ip, machine 0's"),
        (several and not known_rank, f"machine_rank is {rank}; give one from 0 to {machines - 1}"),
        (axes and kind == "NO", "parallelism_config needs distributed_type FSDP or MULTI_GPU"),
        (on_cpu and kind != "NO", f"use_cpu does not go with {kind}; see cpu_multi.yaml"),
    )

    sections = {name: read_section(name, getattr(hardware, name)) for name in SECTIONS}
    kinds = [kind] * (kind in SHARDED) + ["PARALLELISM_CONFIG"] * bool(axes)
    sizes = sections["parallelism_config"]
    sizes = {name: sizes.get(f"parallelism_config_{name}_size", 1) for name in AXES}
    layout = layout_of(total, 0, tuple(kinds), sizes)
    zero = sections["deepspeed_config"]
    stage, offload = zero["zero_stage"], zero["offload_param_device"]
    per_machine = zero["deepspeed_multinode_launcher"] == "standard"
    refuse(
        (stage not in (None, 2, 3), f"zero_stage is {stage}; give 2 or 3"),
        (offload == "cpu" and stage != 3, "offload_param_device needs zero_stage 3"),
        (
            several and layout.deepspeed and not per_machine,
            "write deepspeed_multinode_launcher: standard: each machine has its own",
        ),
        start="deepspeed_config: ",
    )
    version = sections["fsdp_config"]["fsdp_version"]
    check_parallelism(layout, precision, version, sections["fp8_config"]["fp8_backend"])

    here, gpus = -(-processes // machines), torch.accelerator.device_count()
    if on_cpu or str(hardware.gpu_ids).startswith("-1"):
        refuse(
            (precision == "fp16", "mixed_precision fp16 needs a GPU; write 'no'"),
            (layout.kinds, "accelerate shards models on GPUs only; see cpu_multi.yaml"),
        )
    elif gpus < here:
        raise ValueError(
            f"it needs {here} GPU{'s' * (here > 1)} on this machine, which has {gpus}; "
            + (f"set num_processes to {gpus}" if gpus else without_gpu())
        )
    elif error := cuda_error():
        raise ValueError(f"torch {torch.__version__} cannot use the GPU: {error}")
    elif precision == "bf16" and (torch.version.cuda or torch.version.hip):
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            faster = f"{'single' if kind == 'NO' else 'multi'}_gpu_fp16.yaml"
            print_on_main(
                f"{torch.cuda.get_device_name()} only emulates bf16, slowly; faster is {faster}"
            )
    return layout
