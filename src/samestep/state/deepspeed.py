"""DeepSpeed's ZeRO-2 and ZeRO-3: it holds the optimizer, clips, skips and steps in `backward`."""

import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from samestep.step.plan import StepPlan


def configure(accelerator: Accelerator, plan: StepPlan, max_norm: float) -> None:
    """Give DeepSpeed the numbers of the recipe. Call it before the model is built.

    For bf16 it would cast the weights; with torch.autocast they stay in fp32 as under DDP.
    """
    from transformers.integrations import unset_hf_deepspeed_config

    # transformers would make other initial weights (huggingface/transformers#43847), and let the
    # processes generate text together.
    unset_hf_deepspeed_config()
    # torch 2.13 has renamed what DeepSpeed 0.19 calls (pytorch/pytorch#186124).
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    config, accumulation_steps = accelerator.deepspeed_plugin.deepspeed_config, len(plan.run())
    accelerator.gradient_accumulation_steps = accumulation_steps
    config.update(
        train_micro_batch_size_per_gpu=plan.largest,
        gradient_accumulation_steps=accumulation_steps,
        train_batch_size=plan.largest * accumulation_steps * accelerator.num_processes,
        gradient_clipping=max_norm,
        # build_optimizer's, also on the CPU. DeepSpeed's own Adam for the CPU needs a compiler.
        zero_force_ds_cpu_optimizer=False,
    )
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    if accelerator.mixed_precision == "bf16":
        config["bf16"] = {"enabled": False}
        options = {"dtype": "bfloat16", "lower_precision_safe_modules": []}
        config["torch_autocast"] = {"enabled": True, **options}


def stage_of(accelerator: Accelerator) -> int:
    return accelerator.deepspeed_plugin.deepspeed_config["zero_optimization"]["stage"]


def hand_over(module: torch.nn.Module, optimizer: Any, accelerator: Accelerator) -> None:
    """Number the parameter groups, since DeepSpeed drops empty ones (deepspeedai/DeepSpeed#4277).
    Under ZeRO-3, split the weights one by one: it would first move the whole model to the GPU
    (deepspeedai/DeepSpeed#2497)."""
    for number, group in enumerate(optimizer.param_groups):
        group["number"] = number
    if stage_of(accelerator) != 3:
        return
    import deepspeed

    for buffer in module.buffers():
        buffer.data = buffer.to(accelerator.device)
    config = accelerator.deepspeed_plugin.deepspeed_config
    deepspeed.zero.Init(module=module, config_dict_or_path=config)


def partitions(optimizer: Any) -> dict[str, torch.Tensor]:
    """Return the parts of weights and moments on this process, each of many parameters together."""
    parts = {}
    for number, (part, moments) in enumerate(optimizer.state.items()):
        for key, value in {"fp32 weights": part.detach(), **moments}.items():
            if torch.is_tensor(value):
                parts[f"state.partition {number}.{key}"] = value
    return parts


def stage_in(path: Path) -> int:
    """Return the ZeRO stage that has written a checkpoint; 0: none."""
    folder = path / "pytorch_model"
    if not folder.is_dir():
        return 0
    return 3 if (folder / "zero_pp_rank_0_mp_rank_00_model_states.pt").exists() else 2
