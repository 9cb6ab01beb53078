"""Restores the state of an optimizer.

A checkpoint takes what torch's contract names: `state`, by weight, and `param_groups`. The tests of
a project find an optimizer that keeps more, or learning rates, elsewhere.
"""

from typing import Any

import torch

from samestep.base.errors import UserError

States = dict[torch.Tensor, dict[str, Any]]  # of each weight


def restore(optimizer: torch.optim.Optimizer, states: States) -> None:
    """Gives the optimizer this state, and no other, as it was saved: its own `load_state_dict`
    would round it to the types of the weights.

    Raises UserError for an optimizer whose `state` is made anew each time it is asked for.
    """
    optimizer.state.clear()
    optimizer.state.update(states)
    if any(optimizer.state.get(p) is not each for p, each in states.items()):
        raise UserError(
            f"build_optimizer: {type(optimizer).__name__} does not keep the state of a checkpoint; "
            "write one class that keeps all of it in `state`, by weight, and `param_groups`, as "
            "those of torch.optim do"
        )


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
