"""Checks what accelerate takes without a word, and trains as nobody meant.

accelerate itself raises for other mistakes: unknown keys at the top of a YAML, most wrong values.
`--check` reads the YAML; each process checks what the launcher has told it.
"""

import os
from pathlib import Path

import torch
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import PrecisionType

from samestep.base.console import one_line, print_on_main
from samestep.settings import config
from samestep.settings.mesh import AXES, SHARDED, Layout, layout_of

# The sections of a YAML: the kind of sharding or the precision that reads them, how the launcher's
# options for their keys begin, and what has to be there for a section to have an effect.
SECTIONS = {
    "fsdp_config": ("FSDP", ("fsdp_",), "distributed_type: FSDP"),
    "deepspeed_config": (
        "DEEPSPEED",
        ("deepspeed_", "zero", "offload_", "gradient_"),
        "distributed_type: DEEPSPEED",
    ),
    "parallelism_config": (
        "PARALLELISM_CONFIG",
        ("parallelism_config_",),
        "distributed_type: FSDP",
    ),
    "fp8_config": ("fp8", ("fp8_",), "mixed_precision: fp8"),
}
# Keys to remove, which would override the recipe or have no effect, and what decides instead.
REMOVED = {
    "fsdp_activation_checkpointing": "the recipe's field gradient_checkpointing decides",
    "fsdp_activation_checkpointing_offload": "the recipe's field gradient_checkpointing decides",
    "gradient_accumulation_steps": "the recipe's field micro_batch_size decides",
    "gradient_clipping": "the recipe's field max_grad_norm decides",
    "deepspeed_config_file": "train.py fills in DeepSpeed's settings",
    "fsdp_sharding_strategy": "fsdp_reshard_after_forward decides under FSDP 2",
}


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


def read_yaml(path: Path) -> ClusterConfig:
    """The YAML as accelerate reads it; raises OSError, or ValueError for what it cannot read."""
    written = config.read_yaml(path.read_text(encoding="utf-8-sig"))  # knows keys given twice
    if not isinstance(written, dict):
        raise ValueError("expected lines of the form 'key: value'")
    try:
        return ClusterConfig.from_yaml_file(str(path))
    except (TypeError, AttributeError, yaml.YAMLError) as error:
        raise ValueError(one_line(error)) from None


def whole(name: str, value: object, option: str = "") -> int:
    """The number of a key, or of an option in its place; accelerate fails for one in quotes."""
    if option in os.environ:
        value = config.number_in(os.environ[option])
    if type(value) is not int:
        raise ValueError(f"{name} is {value!r}; give a whole number")
    return value


def read_sections(hardware: ClusterConfig, kinds: tuple[str, ...], precision: str) -> dict:
    """The keys of all sections, by their names as options of the launcher, with its defaults.

    `kinds`: those of mesh.SHARDED. Raises ValueError for a section or a key that has no effect, and
    for one that the recipe decides.
    """
    if hardware.dynamo_config:
        raise ValueError("dynamo_config: remove it; the recipe's field compile decides")
    options = vars(launch_command_parser().parse_args(["train.py"]))
    for name, (reader, prefixes, wanted) in SECTIONS.items():
        section = getattr(hardware, name)
        if not isinstance(section, dict):
            raise ValueError(f"{name} is {section!r}; give lines of the form 'key: value'")
        if section and reader not in (*kinds, precision):
            raise ValueError(f"{name} has no effect here: write {wanted}, or remove {name}")
        known = [option for option in options if option.startswith(prefixes)]
        for key, value in section.items():
            option = str(key)
            if name in ("fsdp_config", "fp8_config") and not option.startswith(prefixes[0][:-1]):
                option = prefixes[0] + option  # as accelerate does
            if option in REMOVED and value not in (None, False):
                raise ValueError(f"{name}: remove {key}; {REMOVED[option]}")
            if option not in known:
                hint = config.suggestion(option, known, "accelerate reads no such key")
                raise ValueError(f"{name}: there is no key {key}; {hint}")
            options[option] = value
    return options


def read_hardware(path: Path) -> Layout:
    """The layout of all processes, on all machines, that accelerate starts for this YAML.

    For an elastic run, that of the largest number of machines. Raises ValueError for a mistake in
    the file, or if this machine lacks GPUs or libraries for it.
    """
    with config.naming(path):
        return check_hardware(read_yaml(path))


def check_hardware(hardware: ClusterConfig) -> Layout:
    """The layout that a YAML asks for; raises ValueError if it or this machine do not allow it."""
    kind = getattr(hardware.distributed_type, "value", "NO")  # NO without quotes is False
    on_cpu = hardware.use_cpu
    if not isinstance(on_cpu, bool):
        raise ValueError(f"use_cpu is {on_cpu!r}; give true or false")
    precision = "no" if hardware.mixed_precision is None else hardware.mixed_precision
    if precision not in PrecisionType.list():
        choices = f"one of {', '.join(PrecisionType.list())}, in quotes"
        raise ValueError(f"mixed_precision is {one_line(precision, 60)}; give {choices}")
    if not isinstance(hardware.gpu_ids, str | None):
        raise ValueError(f"gpu_ids is {hardware.gpu_ids}; write it in quotes")
    total, here, machines = count_processes(hardware)
    if machines > 1 and not os.environ.get("LAUNCH_MAIN_PROCESS_IP", hardware.main_process_ip):
        raise ValueError(f"num_machines is {machines}; give main_process_ip, machine 0's")
    if kind == "MULTI_CPU":
        raise ValueError("distributed_type MULTI_CPU is not supported; see cpu_multi.yaml")
    if kind == "NO" and total > 1:
        raise ValueError(f"distributed_type NO starts 1 process, not {total}; see cpu_multi.yaml")
    if on_cpu and kind != "NO":
        raise ValueError(f"use_cpu does not go with {kind}; see cpu_multi.yaml")
    kinds = (kind,) if kind in SHARDED else ()
    if hardware.parallelism_config and kind != "NO":
        kinds = (*kinds, "PARALLELISM_CONFIG")
    options = read_sections(hardware, kinds, precision)
    keys = {name: f"parallelism_config_{name}_size" for name in AXES}
    sizes = {name: whole(key, options[key]) for name, key in keys.items()}
    layout = layout_of(total, 0, kinds, sizes)
    check_parallelism(layout, precision, options["fsdp_version"])
    stage = str(options["zero_stage"])
    if stage not in ("None", "2", "3"):
        raise ValueError(f"deepspeed_config: zero_stage is {one_line(stage, 60)}; give 2 or 3")
    if options["offload_param_device"] == "cpu" and stage != "3":
        raise ValueError("deepspeed_config: offload_param_device needs zero_stage 3")
    by_hostfile = options["deepspeed_multinode_launcher"] != "standard"
    if layout.deepspeed and hardware.num_machines > 1 and by_hostfile:
        line = "write deepspeed_multinode_launcher: standard: each machine has its own"
        raise ValueError(f"deepspeed_config: {line}")
    if on_cpu or str(hardware.gpu_ids).startswith("-1"):
        if precision == "fp16":
            raise ValueError("mixed_precision fp16 needs a GPU; write 'no'")
        if layout.kinds:
            raise ValueError("accelerate shards models on GPUs only; see cpu_multi.yaml")
    else:
        check_gpus(here, precision)
    return layout


def count_processes(hardware: ClusterConfig) -> tuple[int, int, int]:
    """All processes, those of a machine, and the machines; options of samestep launch win."""
    processes = whole("num_processes", hardware.num_processes, "LAUNCH_PROCESSES")
    machines = whole("num_machines", hardware.num_machines, "LAUNCH_MACHINES")
    rank = whole("machine_rank", hardware.machine_rank, "LAUNCH_MACHINE_RANK")
    if processes < 1 or machines < 1 or processes % machines:
        shown = "missing" if processes == -1 else processes
        raise ValueError(f"num_processes is {shown}; give a multiple of num_machines, {machines}")
    if machines > 1 and not 0 <= rank < machines:
        raise ValueError(f"machine_rank is {rank}; give one from 0 to {machines - 1}")
    # torchelastic takes the range from PET_NNODES, such as 2:4; accelerate has no option for it.
    elastic = os.environ.get("PET_NNODES", "1") if machines == 1 else "1"
    return processes * int(elastic.rpartition(":")[2]), processes // machines, machines


def check_gpus(here: int, precision: str) -> None:
    """Raises ValueError unless torch sees so many GPUs on this machine."""
    gpus = torch.accelerator.device_count()
    if gpus < here:
        needed = "1 GPU" if here == 1 else f"{here} GPUs"
        remedy = f"set num_processes to {gpus}" if gpus else without_gpu()
        raise ValueError(f"it needs {needed} on this machine, which has {gpus}; {remedy}")
    if precision == "bf16" and (torch.version.cuda or torch.version.hip):
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            faster = "single_gpu_fp16.yaml" if here == 1 else "multi_gpu_fp16.yaml"
            name = torch.cuda.get_device_name()
            print_on_main(f"{name} only emulates bf16, slowly; faster is {faster}")


def check_parallelism(layout: Layout, precision: str, fsdp_version: object) -> None:
    """Raises ValueError for what the installed libraries, or train.py, cannot do.

    What the fields of the recipe rule out is elsewhere: see startup.check_sharing.
    """
    tensor_parallel = layout.tp == layout.processes
    if layout.fsdp and str(fsdp_version) != "2":
        raise ValueError("train.py shards by FSDP 2 only; write fsdp_version: 2 in fsdp_config")
    # The scaling of the loss for fp16 is not to be relied on where weights are sharded.
    if precision == "fp16" and layout.sharded:
        raise ValueError("mixed_precision fp16 does not go with sharded weights; write bf16")
    if precision == "fp8" and (layout.deepspeed or layout.replica_size > 1):
        raise ValueError("mixed_precision fp8 goes with DDP and FSDP alone; write bf16")
    if layout.sp > 1:
        raise ValueError("parallelism_config: Ulysses brings a loader of its own; use cp_size")
    if "PARALLELISM_CONFIG" in layout.kinds and not layout.fsdp and not tensor_parallel:
        raise ValueError("parallelism_config shards nothing without FSDP; use hsdp.yaml")
    if layout.cp > 1 and not torch.cuda.is_available():
        raise ValueError("context parallelism needs CUDA's attention kernels")


def check_launched(layout: Layout, path: Path | None) -> None:
    """Raises ValueError for what the launcher has set up, and train.py or a library cannot do.

    `path`: its YAML, of which options of the launcher may override a part.
    """
    for option in ("gradient_accumulation_steps", "gradient_clipping", "deepspeed_config_file"):
        name = f"ACCELERATE_{option.upper()}"
        if layout.deepspeed and os.environ.get(name):
            raise ValueError(f"unset {name}; {REMOVED[option]}")
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    check_parallelism(layout, precision, os.environ.get("FSDP_VERSION", "1"))
    if path:
        with config.naming(path):
            read_sections(read_yaml(path), layout.kinds, precision)
