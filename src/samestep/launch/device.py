"""The device of a process: which one it is, and how it computes.

The launcher's YAML chooses devices and precision; fields of the recipe make them fast or exact.
"""

import os
import warnings
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, TorchDynamoPlugin, parse_flag_from_env

from samestep.base.console import print_on_main, read_place
from samestep.base.workers import cores_per_process
from samestep.launch.launched import this_layout, without_gpu
from samestep.processes import exclusions
from samestep.processes.mesh import Layout
from samestep.step import exact


def accelerator_options(cfg: Any, **ddp: Any) -> dict[str, Any]:
    """Arguments of Accelerator: on the CPU or not, and how gradients are exchanged. How they
    accumulate, StepGradients sets.

    `ddp`: arguments of DistributedDataParallelKwargs, such as bucket_cap_mb.
    """
    torch.backends.cudnn.benchmark = True
    if cfg.deterministic or cfg.exact:
        exact.be_deterministic()
    # torchao's weights for gathering in fp8 have no memory of their own: they could not be saved.
    os.environ["ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER"] = "false"
    # accelerate 1.15 slices its mesh in a way that torch 2.13 warns of, on every process.
    warnings.filterwarnings("ignore", "Slicing a flattened dim", UserWarning)
    # accelerate knows no newer name for it.
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
    # static_graph needs no such search: torch would warn of both.
    unused = cfg.find_unused_parameters and not ddp.get("static_graph")
    given = {"gradient_as_bucket_view": True, "find_unused_parameters": unused, **ddp}
    return {
        "cpu": use_cpu(),
        "dynamo_plugin": TorchDynamoPlugin(backend="no"),  # see compile_blocks
        "kwargs_handlers": [DistributedDataParallelKwargs(**given)],
    }


def check_accelerator(accelerator: Accelerator, cfg: Any) -> None:
    """Sets torch's precision and threads, and warns of settings that have no effect."""
    # fp32 is fp32: accelerate allows TF32 together with compile, and torch in convolutions.
    allow_tf32(cfg.tf32)
    # cuDNN, the first choice on Hopper and newer, takes half a second for each new length of rows.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if cfg.exact and accelerator.device.type == "cpu" and torch.get_num_threads() > 1:
        torch.set_num_threads(1)  # sums depend on the number of threads
        print_on_main(
            "exact computes with one thread for each process; more processes use more cores"
        )
    zero = os.environ.get("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none")
    # The CPU updates the weights. Launchers give each of several processes one thread.
    if parse_flag_from_env("FSDP_OFFLOAD_PARAMS") or zero != "none":
        torch.set_num_threads(max(torch.get_num_threads(), cores_per_process()))
    if cfg.tf32 and (accelerator.device.type != "cuda" or accelerator.mixed_precision != "no"):
        print_on_main("warning: tf32 is true, but only a GPU in fp32 reads it")


def allow_tf32(allowed: bool) -> None:
    """Whether a GPU computes matrix products and convolutions of fp32 in TF32.

    torch has settings of three generations. It raises as soon as it reads one of them where a task
    has used another, so all of them are set.
    """
    for backend in (torch.backends, torch.backends.cudnn):
        setattr(backend, "fp32_precision", "none")  # noqa: B010
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed


def use_cpu() -> bool:
    """Whether to train on the CPU. If accelerate is not told, each process trains alone."""
    gpu = torch.accelerator.is_available() and not torch.backends.mps.is_available()
    return parse_flag_from_env("ACCELERATE_USE_CPU") or (read_place()[1] > 1 and not gpu)


def check_devices() -> None:
    """Raises ValueError unless this machine has the devices that the launcher was told to use.

    Warns of a precision that they only emulate.
    """
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    gpus, here = torch.accelerator.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    on_cpu = use_cpu() or not gpus
    if on_cpu and _wants_gpu():
        raise ValueError(f"the launcher was told to use a GPU, but there is none: {without_gpu()}")
    if on_cpu and this_layout().kinds:
        raise ValueError("accelerate shards models on GPUs only, here is none; use cpu_multi.yaml")
    if not on_cpu and here > gpus:
        raise ValueError(f"{here} processes on this machine, which has {gpus} GPUs; start {gpus}")
    if not on_cpu and precision == "bf16" and (torch.version.cuda or torch.version.hip):
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            faster = "single_gpu_fp16.yaml" if read_place()[1] == 1 else "multi_gpu_fp16.yaml"
            name = torch.cuda.get_device_name()
            print_on_main(f"{name} only emulates bf16, slowly; faster is {faster}")


def check_combinations(cfg: Any, layout: Layout) -> None:
    """Raises UserError for two things of recipe, YAML and device that cannot be combined: see
    processes/exclusions.py."""
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    on_cpu = use_cpu() or not torch.accelerator.is_available()
    trains = not cfg.check  # a check may run on another machine
    there = {
        "exact": cfg.exact,
        "micro_batch_size auto": cfg.micro_batch_size == "auto",
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


def _wants_gpu() -> bool:
    """Whether a YAML asks for GPUs: of one process it says so, of several it hides none."""
    cpu = os.environ.get("ACCELERATE_USE_CPU", "")
    by_yaml = "ACCELERATE_MIXED_PRECISION" in os.environ  # not by torchrun alone
    hides_none = not cpu and not os.environ.get("CUDA_VISIBLE_DEVICES")
    return cpu == "False" or (by_yaml and read_place()[1] > 1 and hides_none)


def compile_blocks(model: torch.nn.Module) -> None:
    """Makes torch compile a model: the repeated blocks, whose code is compiled once, or all of it.

    Blocks repeat in a ModuleList of one class, as the layers of a transformer do. They are compiled
    in place, so that names stay, and DDP and FSDP see each block.
    """
    lists = [each for each in model.modules() if isinstance(each, torch.nn.ModuleList)]
    blocks = [block for each in lists if len({*map(type, each)}) == 1 for block in each]
    inner = {id(child) for block in blocks for child in block.modules() if child is not block}
    # A graph of the whole model is cut where DDP's buckets end. Blocks would be, too.
    torch._dynamo.config.optimize_ddp = not blocks
    for block in blocks or [model]:
        if id(block) not in inner:
            block.compile()
