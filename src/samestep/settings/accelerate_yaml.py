"""Checks the hardware before a model is built: the accelerate YAML, and what the launcher has set.

`--check` reads the YAML, as accelerate's launcher does later, when it starts the processes. Each of
them checks what the launcher has told it, since options of the launcher override the YAML.
"""

import os
import re
from enum import Enum
from pathlib import Path
from typing import get_type_hints

import torch
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import (
    PrecisionType,
    is_deepspeed_available,
    is_torchao_available,
    is_transformer_engine_available,
)

from samestep.base.console import one_line, say
from samestep.base.fields import check_pairs, refuse
from samestep.settings.config import (
    compose_yaml,
    describe_type,
    plain_value,
    read_small_file,
    suggestion,
    union_members,
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
REMOVED = {
    "fsdp_activation_checkpointing": CHECKPOINTING,
    "fsdp_activation_checkpointing_offload": CHECKPOINTING,
    "gradient_accumulation_steps": "the recipe's field micro_batch_size decides",
    "gradient_clipping": "the recipe's field max_grad_norm decides",
    "deepspeed_config_file": "train.py fills in DeepSpeed's settings; the keys of "
    "deepspeed_zero3_offload.yaml are those to choose",
}
for key in """sharding_strategy backward_prefetch forward_prefetch use_orig_params
        sync_module_states""".split():
    REMOVED[f"fsdp_{key}"] = "FSDP 2 does not read it"
FP8_LIBRARIES = {"AO": is_torchao_available, "TE": is_transformer_engine_available}


def launcher_number(name: str, otherwise: int) -> int:
    """The number that samestep launch got as --name; without one `otherwise`, that of the YAML.

    Raises ValueError for a text that is not a whole number from 1 to 999,999.
    """
    text = os.environ.get(f"LAUNCH_{name.removeprefix('num_').upper()}")
    if text is None:
        return otherwise
    if not re.fullmatch("0*[1-9][0-9]{0,5}", text):
        raise ValueError(f"--{name} is {one_line(text, 60)}; give a whole number from 1")
    return int(text)


def most_machines() -> int:
    """The largest number of machines of an elastic run; 1 for other runs.

    torchelastic takes the range from PET_NNODES, such as 2:4; accelerate has no option for it.
    """
    text = os.environ.get("PET_NNODES", "1")
    numbers = re.fullmatch("([1-9][0-9]{0,5})(?::([1-9][0-9]{0,5}))?", text)
    least, most = numbers.group(1, 2) if numbers else (1, 0)
    most = int(most or least)
    if not numbers or int(least) > most:
        raise ValueError(
            f"PET_NNODES is {one_line(text, 60)}; give the least and the largest number of "
            "machines, such as 2:4"
        )
    return most


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


def read_section(name: str, section: dict) -> dict:
    """All keys of a section, by their names as options of the launcher, with its defaults.

    Raises ValueError for a key that nothing reads, or that the recipe decides.
    """
    options = vars(launch_command_parser().parse_args(["train.py"]))
    known = {key: value for key, value in options.items() if key.startswith(SECTIONS[name])}
    for key, value in section.items():
        full, prefix = str(key), SECTIONS[name][0]
        if prefix in ("fsdp_", "fp8_") and not full.startswith(prefix[:-1]):  # as accelerate does
            full = prefix + full
        if full in REMOVED:
            if value not in (None, False):
                raise ValueError(f"{name}: remove {key}; {REMOVED[full]}")
            continue
        if full not in known:
            hint = suggestion(full, known, "accelerate reads no such key")
            raise ValueError(f"{name}: there is no key {key}; {hint}")
        is_number = type(value) is int and value > 0
        refuse(
            (known[full] in ("true", "false") and type(value) is not bool, "true or false"),
            (full.endswith("_size") and not is_number, "a whole number from 1"),
            start=f"{name}: {key} is {one_line(value, 60)}; give ",
        )
        known[full] = value
    return known


def check_parallelism(layout: Layout, precision: str, fsdp_version: object, fp8: object) -> None:
    """Raises ValueError for what the installed libraries, or train.py, cannot do.

    `fp8`: the backend that is asked for. What the fields of the recipe rule out is elsewhere:
    see startup.check_sharing.
    """
    kinds, bf16 = layout.kinds, "write bf16, or use fsdp2.yaml"
    names = {"FSDP": "FSDP", "DEEPSPEED": "DeepSpeed", "": "stages"}
    sharding = names.get((*kinds, "")[0], "parallelism_config")
    asked = [*FP8_LIBRARIES] if fp8 in (None, "NO") else [str(fp8)]
    libraries = [FP8_LIBRARIES[name] for name in asked if name in FP8_LIBRARIES]
    axes, on_gpu = "PARALLELISM_CONFIG" in kinds, torch.cuda.is_available()
    alone = axes and not layout.fsdp and not layout.deepspeed  # for tensor parallelism
    together, several = layout.together > 1, layout.replicas > 1 or layout.cp > 1
    unsharded = axes and layout.fsdp and layout.dp_shard == 1 and layout.cp == 1
    fp16_on, fp8_on = precision == "fp16", precision == "fp8"
    lacks_fp8 = fp8_on and not any(available() for available in libraries)
    check_pairs(
        (axes and layout.deepspeed, "parallelism_config", "DeepSpeed", "use hsdp.yaml"),
        # The scaling of the loss for fp16 is not to be relied on there.
        (fp16_on and layout.sharded, "mixed_precision fp16", sharding, bf16),
        (fp8_on and layout.deepspeed, "mixed_precision fp8", sharding, bf16),
        (fp8_on and together, "mixed_precision fp8", sharding, bf16),
        (alone and layout.tp > 1 and several, "DDP", "tensor parallelism", "use hsdp.yaml"),
    )
    refuse(
        ("MEGATRON_LM" in kinds, "Megatron-LM trains models of its own only; use fsdp2.yaml"),
        (
            layout.deepspeed and not is_deepspeed_available(),
            "DeepSpeed is not installed; run make setup EXTRAS=deepspeed (or pip install "
            "deepspeed), or use fsdp2.yaml",
        ),
        (
            layout.fsdp and str(fsdp_version) != "2",
            f"fsdp_version is {fsdp_version}, and train.py shards by FSDP 2 only; write "
            "fsdp_version: 2 in fsdp_config",
        ),
        (fp8_on and not libraries, f"fp8_config: backend is {fp8}; give AO (torchao) or TE"),
        (lacks_fp8, "mixed_precision fp8 needs torchao (pip install torchao); or use bf16"),
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
        fields = plain_value(compose_yaml(read_small_file(path)))
        if not isinstance(fields, dict):
            raise ValueError("expected lines of the form 'key: value'")
        kinds = get_type_hints(ClusterConfig)
        for key, value in fields.items():
            if key not in kinds:
                hint = suggestion(str(key), kinds, "accelerate knows no such key")
                raise ValueError(f"there is no key {key}; {hint}")
            # Words such as 'no' are true to accelerate. It writes downcast_bf16 as a word itself.
            kind = union_members(kinds[key])
            right = value is None or type(value) in kind or key == "downcast_bf16"
            if not right and kind[0] in (bool, int, str, dict):
                quotes = ", in quotes" if kind[0] is str else ""
                shown = one_line(repr(value), 60)
                raise ValueError(f"{key} is {shown}; give {describe_type(kind[0])}{quotes}")
        refuse(
            (
                fields.get("dynamo_config"),
                "dynamo_config: remove it; the recipe's field compile decides",
            ),
            (
                fields.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE",
                "compute_environment must be LOCAL_MACHINE",
            ),
        )
        return check_hardware(ClusterConfig(**ClusterConfig.process_config(fields)))
    except OSError as error:
        line = f"{error.strerror}; --config_file takes the path of a YAML"
        raise ValueError(f"{one_line(path, 100)}: {line}") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{one_line(path, 100)}: {one_line(error)}") from None


def check_hardware(hardware: ClusterConfig) -> Layout:
    """The layout that a YAML asks for; raises ValueError if it or this machine do not allow it."""
    refuse(
        (
            not isinstance(hardware.distributed_type, Enum),
            f"distributed_type is {hardware.distributed_type}; write 'NO' in quotes",
        )
    )
    kind, precision = hardware.distributed_type.value, hardware.mixed_precision
    precision = "no" if precision is None else precision
    processes = launcher_number("num_processes", hardware.num_processes or 0)
    machines = launcher_number("num_machines", hardware.num_machines or 0)
    rank = str(os.environ.get("LAUNCH_MACHINE_RANK", hardware.machine_rank))
    address = hardware.main_process_ip or os.environ.get("LAUNCH_MAIN_PROCESS_IP")
    most = most_machines() if machines == 1 else 1
    axes, on_cpu = hardware.parallelism_config, hardware.use_cpu
    refuse(
        (
            machines < 1 or processes < 1 or processes % machines,
            f"num_processes is {processes if processes > 0 else 'missing'}; give a number that "
            f"num_machines, {machines}, divides",
        ),
        (
            precision not in PrecisionType.list(),
            f"mixed_precision is {one_line(precision, 60)}; give one of "
            f"{', '.join(PrecisionType.list())} (no in quotes)",
        ),
        (
            kind == "NO" and processes > 1 or kind == "MULTI_CPU",
            f"distributed_type {kind} starts only one process, but num_processes is {processes}; "
            "see cpu_multi.yaml and multi_gpu.yaml",
        ),
        (
            kind == "NO" and most > 1,
            "distributed_type NO starts one process alone, but PET_NNODES is "
            f"{os.environ.get('PET_NNODES')}; see cpu_multi.yaml and multi_gpu.yaml",
        ),
        (
            machines > 1 and not address,
            f"num_machines is {machines}; give main_process_ip, the address of machine 0",
        ),
        (
            machines > 1 and not (re.fullmatch("[0-9]{1,6}", rank) and int(rank) < machines),
            f"machine_rank is {one_line(rank, 60)}; give the number of this machine, 0 to "
            f"{machines - 1}",
        ),
        (
            hardware.num_machines > 1 and hardware.main_process_port == 0,
            "main_process_port is 0, for which each machine picks another one; give a number",
        ),
        (axes and kind == "NO", "parallelism_config needs distributed_type FSDP or MULTI_GPU"),
    )
    check_pairs(
        (on_cpu and kind != "NO", "use_cpu", f"distributed_type {kind}", "see cpu_multi.yaml"),
    )

    sections = {name: read_section(name, getattr(hardware, name)) for name in SECTIONS}
    kinds = [kind] * (kind in SHARDED) + ["PARALLELISM_CONFIG"] * bool(axes)
    sizes, zero = sections["parallelism_config"], sections["deepspeed_config"]
    sizes = {name: sizes.get(f"parallelism_config_{name}_size", 1) for name in AXES}
    layout = layout_of(processes * most, 0, tuple(kinds), sizes)
    stage, offload = zero["zero_stage"], zero["offload_param_device"]
    launcher = zero["deepspeed_multinode_launcher"]
    refuse(
        (stage not in (None, 2, 3) or stage is True, f"zero_stage is {stage}; give 2 or 3"),
        *(  # no option passes the path of an NVMe disk
            (zero[key] not in (None, "none", "cpu"), f"{key} is {zero[key]}; give none or cpu")
            for key in ("offload_optimizer_device", "offload_param_device")
        ),
        (offload == "cpu" and stage != 3, "offload_param_device needs zero_stage 3"),
        (
            layout.deepspeed and machines > 1 and launcher != "standard",
            "write deepspeed_multinode_launcher: standard: each machine has its own launcher",
        ),
        start="deepspeed_config: ",
    )
    version, backend = (
        sections["fsdp_config"]["fsdp_version"],
        sections["fp8_config"]["fp8_backend"],
    )
    check_parallelism(layout, precision, version, backend)

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
    else:
        check_gpus(precision, f"{'single' if kind == 'NO' else 'multi'}_gpu_fp16.yaml")
    return layout
