"""Restores the state of an optimizer.

A checkpoint takes what torch's contract names: `state`, by weight, and `param_groups`. The tests of
a project find an optimizer that keeps more, or learning rates, elsewhere.
"""

from typing import Any

import torch

from samestep.base.errors import UserError
from samestep.core.sharding import local

States = dict[torch.Tensor, dict[str, Any]]  # of each weight


def restore(optimizer: torch.optim.Optimizer, states: States, names: dict) -> None:
    """Gives the optimizer this state, and no other; raises UserError unless it then has it.

    `names` has those of the weights. torch would round the state to the type of its weight. Some
    optimizers begin with a state, Adagrad's of weights that FSDP has replaced: it goes.
    """
    optimizer.state.clear()
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    packed = optimizer.state_dict()
    packed["state"] = {i: states[p] for i, p in enumerate(ordered) if p in states}
    optimizer.load_state_dict(packed)
    for p, values in states.items():
        found = optimizer.state.get(p, {})
        for key, value in values.items():
            both = torch.is_tensor(value) and torch.is_tensor(found.get(key))
            if both and key != "step" and found[key].dtype != value.dtype:
                found[key] = value
            if not is_same(found.get(key), value):
                raise UserError(
                    f"build_optimizer: {type(optimizer).__name__} does not take {key} of "
                    f"{names[p]} back from a checkpoint; write one class that keeps all of it in "
                    "`state`, by weight, and `param_groups`, as those of torch.optim do"
                )


def is_same(found: Any, value: Any) -> bool:
    """Whether these are the same values; it may wait for the device."""
    if found is value:
        return True
    if not torch.is_tensor(value) or not torch.is_tensor(found):
        return not torch.is_tensor(found) and found == value
    found, value = local(found), local(value)
    return torch.equal(found.to(value.device, value.dtype), value)


def check_weights(optimizer: torch.optim.Optimizer, names: dict) -> None:
    """Raises UserError if the optimizer has a weight that is not in the model, as `names` has them.

    Adagrad begins with a state of the weights: that of weights that FSDP has replaced goes.
    """
    if any(p not in names for group in optimizer.param_groups for p in group["params"]):
        raise UserError(
            "build_optimizer gives a weight that is not in the model, so no checkpoint would hold "
            "it; make it a part of the model, in task.build_model"
        )
    for key in [key for key in optimizer.state if key not in names]:
        del optimizer.state[key]
