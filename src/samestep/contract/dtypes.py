"""The dtype of weights: those that train are float32, whatever the file they come from says.

In bfloat16 an update of less than 1/512 of a weight is rounded away: at a learning rate of 1e-5
most weights would stay as they were. Under autocast products are in bfloat16 all the same.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from samestep.base.console import one_line
from samestep.base.files import read_json_object, replace_text

AS_BUILT = "as built"  # the value of WEIGHTS in a task.py that means the dtypes of its model


def _is_half(values: torch.Tensor) -> bool:
    """Whether these are floating-point numbers of fewer bits than float32."""
    return values.is_floating_point() and values.element_size() < 4


def trained_weights(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The weights that train, by name."""
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def split_by_decay(model: torch.nn.Module) -> tuple[list, list]:
    """The weights that train: those with weight decay, and those without.

    Without are those of fewer than two dimensions, such as norms; those whose name ends in bias,
    which experts have as matrices; and those with an attribute `_no_weight_decay` that is true.
    """
    decayed, others = [], []
    for name, weight in trained_weights(model).items():
        spared = name.endswith("bias") or getattr(weight, "_no_weight_decay", False)
        (others if spared or weight.ndim < 2 else decayed).append(weight)
    return decayed, others


def building(build: Callable, kept: Any) -> Callable:
    """The function build_model of a task, whose weights train in float32. `kept`: its WEIGHTS.

    Raises ValueError for another value of WEIGHTS than AS_BUILT.
    """
    if kept == AS_BUILT:
        return build
    if kept is not None:
        raise ValueError(f'task.WEIGHTS is {kept!r:.60}; write "{AS_BUILT}", or leave it out')

    @functools.wraps(build)
    def built(*arguments: Any, **named: Any) -> Any:
        model = build(*arguments, **named)
        if isinstance(model, torch.nn.Module):
            _train_in_float32(model)
        return model

    return built


def _train_in_float32(model: torch.nn.Module) -> None:
    """Converts the weights that train to float32, in place; frozen ones keep their dtype.

    Buffers are converted beside such a weight, as BatchNorm's statistics, and everywhere if no
    weight is left in half precision. The model's attribute `converted_weights` has their names.
    """
    halves = {name: each for name, each in trained_weights(model).items() if _is_half(each)}
    if not halves:
        return
    model.converted_weights = [*halves]  # type: ignore
    for weight in halves.values():
        weight.data = weight.data.float()
    everywhere = not any(_is_half(each) for each in model.parameters())
    owners = {name.rpartition(".")[0] for name in halves}
    for name, module in model.named_modules():
        for key, buffer in module.named_buffers(recurse=False):
            if _is_half(buffer) and (everywhere or name in owners):
                module._buffers[key] = buffer.float()
    if everywhere and hasattr(model, "config"):
        model.config.dtype = torch.float32


def describe(model: torch.nn.Module) -> str:
    """A line about weights in half precision that train, or did before they were converted."""
    converted = getattr(model, "converted_weights", [])
    halves = [name for name, each in trained_weights(model).items() if _is_half(each)]
    what = "are float32 now, since they train" if converted else f"train {AS_BUILT}"
    found = [*converted] or halves
    line = f"{len(found)} weights in half precision {what}: {', '.join(found)}"
    return one_line(line, 160) if found else ""


def name_dtype(folder: Path) -> None:
    """Lets the config.json of an export name float32 if weights are float32: transformers loads all
    of them in the dtype that it names, which is that of the first weight, perhaps a frozen one."""
    from safetensors import safe_open

    config, kinds = read_json_object(folder / "config.json"), set()
    if config.get("dtype") not in ("bfloat16", "float16"):
        return
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            kinds |= {file.get_slice(name).get_dtype() for name in file.keys()}
    if "F32" in kinds:
        text = json.dumps(config | {"dtype": "float32"}, indent=2, sort_keys=True)
        replace_text(folder / "config.json", text + "\n")
