"""Checks the hardware before a model is built: the accelerate YAML, and what the launcher has set.

`--check` reads the YAML, as accelerate's launcher does later, when it starts the processes. Each of
them checks what the launcher has told it, since options of the launcher override the YAML.
"""

import difflib
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
from samestep.settings.config import (
    compose_yaml,
    describe_type,
    plain_value,
    read_small_file,
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
# Keys that fields of the recipe decide.
OF_THE_RECIPE = {
    "fsdp_activation_checkpointing": "the recipe's field gradient_checkpointing decides",
    "fsdp_activation_checkpointing_offload": "the recipe's field gradient_checkpointing decides",
    "gradient_accumulation_steps": "the recipe's field micro_batch_size decides",
    "gradient_clipping": "the recipe's field max_grad_norm decides",
    "deepspeed_config_file": "train.py fills in DeepSpeed's settings; the keys of "
    "deepspeed_zero3_offload.yaml are those to choose",
}
# Keys of FSDP 1, which FSDP 2 does not read.
OF_FSDP1 = (
    "fsdp_sharding_strategy",
    "fsdp_backward_prefetch",
    "fsdp_forward_prefetch",
    "fsdp_use_orig_params",
    "fsdp_sync_module_states",
)
# Values of keys that accelerate looks up without a check.
WORDS = {
    "fsdp_auto_wrap_policy": ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
    "fsdp_state_dict_type": ("SHARDED_STATE_DICT", "FULL_STATE_DICT"),
}
FP8_OF_AMD = ("gfx94", "gfx95", "gfx12")
FP8_LIBRARIES = {"AO": is_torchao_available, "TE": is_transformer_engine_available}


def launcher_number(name: str, otherwise: int) -> int:
    """The number that samestep launch got as --name; without one `otherwise`, that of the YAML.

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


def read_section(name: str, section: dict) -> dict:
    """All keys of a section, by their names as options of the launcher, with its defaults.

    Raises ValueError for a key that nothing reads, or that the recipe decides: accelerate ignores
    the former, and lets the latter override the recipe.
    """
    options = vars(launch_command_parser().parse_args(["train.py"]))
    known = {key: value for key, value in options.items() if key.startswith(SECTIONS[name])}
    for key, value in section.items():
        full = str(key)
        prefix = SECTIONS[name][0]
        if prefix in ("fsdp_", "fp8_") and not full.startswith(prefix[:-1]):  # as accelerate does
            full = prefix + full
        if full in OF_THE_RECIPE:
            if value not in (None, False):
                raise ValueError(f"{name}: remove {key}; {OF_THE_RECIPE[full]}")
            continue
        if full in OF_FSDP1:
            raise ValueError(f"{name}: remove {key}; FSDP 2 does not read it")
        if full not in known:
            near = [other for other in known if other.endswith(f"_{full}")]
            near = near or difflib.get_close_matches(full, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "accelerate reads no such key"
            raise ValueError(f"{name}: there is no key {key}; {hint}")
        if known[full] in ("true", "false") and type(value) is not bool:
            raise ValueError(f"{name}: {key} is {value}; give true or false")
        if full in WORDS and value not in WORDS[full]:
            words = " or ".join(WORDS[full])
            raise ValueError(f"{name}: {key} is {one_line(value, 60)}; give {words}")
        if full == "fsdp_min_num_params" and type(value) is not int:
            raise ValueError(f"{name}: {key} is {one_line(value, 60)}; give a whole number")
        if full.endswith("_size") and (type(value) is not int or value < 1):
            raise ValueError(f"{name}: {key} is {value}; give a whole number from 1")
        known[full] = value
    return known


def check_deepspeed_keys(section: dict, machines: int) -> None:
    """Raises ValueError for values of deepspeed_config that do not reach DeepSpeed."""
    stage = section["zero_stage"]
    if stage not in (None, 2, 3) or type(stage) is bool:
        raise ValueError(f"deepspeed_config: zero_stage is {stage}; give 2 or 3")
    for key in ("offload_optimizer_device", "offload_param_device"):
        if section[key] not in (None, "none", "cpu"):  # no option passes the path of an NVMe disk
            raise ValueError(f"deepspeed_config: {key} is {section[key]}; give none or cpu")
    if section["offload_param_device"] == "cpu" and stage != 3:
        raise ValueError("deepspeed_config: offload_param_device needs zero_stage 3")
    if machines > 1 and section["deepspeed_multinode_launcher"] != "standard":
        raise ValueError(
            "deepspeed_config: write deepspeed_multinode_launcher: standard, as each machine has "
            "a launcher of its own"
        )


def check_parallelism(layout: Layout, precision: str, fsdp_version: object, fp8: object) -> None:
    """Raises ValueError for what the installed libraries, or train.py, cannot do.

    `fp8`: the backend that is asked for. What the fields of the recipe rule out is elsewhere:
    see startup.check_sharing.
    """
    kinds = layout.kinds
    sharding = {"FSDP": "FSDP", "DEEPSPEED": "DeepSpeed"}.get((*kinds, "")[0], "parallelism_config")
    if "MEGATRON_LM" in kinds:
        raise ValueError(
            "Megatron-LM trains models of its own only; use fsdp2.yaml or tensor_parallel.yaml"
        )
    if "DEEPSPEED" in kinds and not is_deepspeed_available():
        raise ValueError(
            "DeepSpeed is not installed; run make setup EXTRAS=deepspeed (or pip install "
            "deepspeed), or use fsdp2.yaml"
        )
    if "FSDP" in kinds and str(fsdp_version) != "2":
        raise ValueError(
            f"fsdp_version is {fsdp_version}, and train.py shards by FSDP 2 only; write "
            "fsdp_version: 2 in fsdp_config"
        )
    if precision == "fp16" and layout.sharded:
        raise ValueError(
            f"mixed_precision fp16 does not go with {sharding}, under which its scaling of the "
            "loss is not to be relied on; write bf16, or use multi_gpu_fp16.yaml"
        )
    if precision == "fp8":
        check_fp8(fp8)
        if layout.deepspeed or layout.together > 1:
            raise ValueError(
                f"mixed_precision fp8 does not go with {sharding} here; write bf16, or use "
                "fp8.yaml or fsdp2.yaml"
            )
    if layout.sp > 1:
        raise ValueError(
            "parallelism_config_sp_size is above 1, and Ulysses brings a loader of its own, which "
            "deals other batches than train.py; use context_parallel.yaml"
        )
    if "PARALLELISM_CONFIG" in kinds:
        check_axes(layout)


def check_axes(layout: Layout) -> None:
    """Raises ValueError for sizes in parallelism_config that do not go together."""
    if layout.deepspeed:
        raise ValueError("parallelism_config does not go with DeepSpeed; use hsdp.yaml")
    if "FSDP" not in layout.kinds:
        if layout.tp == 1:
            raise ValueError(
                "parallelism_config needs distributed_type FSDP, or tensor parallelism; use "
                "hsdp.yaml, or without parallelism_config multi_gpu_bf16.yaml"
            )
        if layout.replicas > 1 or layout.cp > 1:
            raise ValueError(
                "accelerate does not combine tensor parallelism with DDP; make "
                "parallelism_config_tp_size equal to num_processes, or use hsdp.yaml"
            )
        return
    if layout.tp > 1:
        try:  # accelerate imports it for FSDP x TP
            from transformers.integrations.tensor_parallel import ReplicateParallel  # type: ignore # noqa: F401
        except ImportError:
            raise ValueError(
                "FSDP with tensor parallelism fails in this pair of versions: accelerate imports "
                "ReplicateParallel, which transformers no longer has; set "
                "parallelism_config_tp_size to 1"
            ) from None
    if layout.dp_shard == 1 and layout.cp == 1:
        raise ValueError(
            "parallelism_config leaves nothing to shard: give parallelism_config_dp_shard_size "
            "above 1, or use multi_gpu_bf16.yaml"
        )
    if layout.cp > 1 and not torch.cuda.is_available():
        raise ValueError(
            "context parallelism needs CUDA's attention kernels, and torch sees no GPU; use "
            "cpu_multi.yaml"
        )


def check_fp8(backend: object) -> None:
    """Raises ValueError unless a library, and the GPU if there is one, can train in fp8."""
    asked = [*FP8_LIBRARIES] if backend in (None, "NO") else [backend]
    if asked[0] not in [*FP8_LIBRARIES]:
        raise ValueError(f"fp8_config: backend is {backend}; give AO (torchao) or TE")
    if not torch.cuda.is_available():
        fits = True
    elif torch.version.hip:
        has = torch.cuda.get_device_properties(0).gcnArchName.partition(":")[0]
        fits, needs = has.startswith(FP8_OF_AMD), "MI300 (gfx942), MI350 (gfx950) or gfx12"
    else:
        capability = torch.cuda.get_device_capability()
        fits, has = capability >= (8, 9), ".".join(map(str, capability))
        needs = "compute capability 8.9 (Ada, Hopper) or newer"
    if not fits:
        raise ValueError(
            f"mixed_precision fp8 needs a GPU of {needs}, and {torch.cuda.get_device_name()} has "
            f"{has}; use bf16"
        )
    if not any(FP8_LIBRARIES[name]() for name in asked):
        library = "torchao (pip install torchao)" if "AO" in asked else "Transformer Engine"
        raise ValueError(f"mixed_precision fp8 needs {library}; install it, or use bf16")


def check_launched(layout: Layout) -> None:
    """Raises ValueError for what the launcher has set up, and train.py or a library cannot do."""
    for option in ("gradient_accumulation_steps", "gradient_clipping"):
        name = f"ACCELERATE_{option.upper()}"
        if layout.deepspeed and os.environ.get(name):
            raise ValueError(f"unset {name}; {OF_THE_RECIPE[option]}")
    file = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if layout.deepspeed and file:
        raise ValueError(
            f"leave out deepspeed_config_file {one_line(file, 60)}; "
            + OF_THE_RECIPE["deepspeed_config_file"]
        )
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
    rank = str(os.environ.get("LAUNCH_MACHINE_RANK", hardware.machine_rank))
    if machines > 1 and not (re.fullmatch("[0-9]{1,6}", rank) and int(rank) < machines):
        raise ValueError(
            f"machine_rank is {one_line(rank, 60)}; give the number of this machine, 0 to "
            f"{machines - 1}"
        )
    if hardware.num_machines > 1 and hardware.main_process_port == 0:
        raise ValueError(
            f"{path}: main_process_port is 0, for which each machine picks another one; give a "
            "number, such as 29500"
        )
    try:
        layout = read_layout(hardware, processes, machines, most)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    here, gpus = -(-processes // machines), torch.accelerator.device_count()
    on_cpu = hardware.use_cpu or str(hardware.gpu_ids).startswith("-1")
    try:
        if hardware.gpu_ids is not None:
            least = 2 if kind != "NO" and machines == 1 else 1
            least, there = (least, 0) if on_cpu else (max(least, here), gpus)
            check_gpu_ids(hardware.gpu_ids, least, there)
        if on_cpu:
            if precision == "fp16":
                raise ValueError("mixed_precision fp16 needs a GPU; write 'no'")
            if layout.sharded:
                raise ValueError(
                    "accelerate shards models on GPUs only, and trains by DDP on the CPU; see "
                    "cpu_multi.yaml"
                )
            return layout
        if gpus < here:
            raise ValueError(
                f"it needs {here} GPU{'s' * (here > 1)} on this machine, which has {gpus}; "
                + (f"set num_processes to {gpus}" if gpus else without_gpu())
            )
        check_gpus(precision, f"{'single' if kind == 'NO' else 'multi'}_gpu_fp16.yaml")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return layout


def read_layout(hardware: ClusterConfig, processes: int, machines: int, most: int) -> Layout:
    """The layout that a YAML asks for; raises ValueError if its sections do not allow it."""
    kind = hardware.distributed_type.value
    sections = {name: read_section(name, getattr(hardware, name)) for name in SECTIONS}
    kinds = [kind] if kind in SHARDED else []
    if hardware.parallelism_config:
        if kind == "NO":
            raise ValueError("parallelism_config needs distributed_type FSDP or MULTI_GPU")
        kinds.append("PARALLELISM_CONFIG")
        if most > 1:
            raise ValueError(
                f"parallelism_config needs {processes} processes, and PET_NNODES is "
                f"{os.environ['PET_NNODES']}; use a YAML without parallelism_config, such as "
                "fsdp2.yaml"
            )
    sizes = sections["parallelism_config"]
    axes = {name: sizes.get(f"parallelism_config_{name}_size", 1) for name in AXES}
    layout = layout_of(processes * most, 0, tuple(kinds), axes)
    if kind == "DEEPSPEED":
        check_deepspeed_keys(sections["deepspeed_config"], machines)
    version, backend = (
        sections["fsdp_config"]["fsdp_version"],
        sections["fp8_config"]["fp8_backend"],
    )
    check_parallelism(layout, hardware.mixed_precision or "no", version, backend)
    return layout
