"""Describes an optimizer, and restores its state.

A checkpoint takes what torch's contract names: `state`, by weight, and `param_groups`. The tests of
a project find an optimizer that keeps more, or learning rates, elsewhere.
"""

import gc
import inspect
import types
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from samestep.base.errors import UserError, some
from samestep.processes.sharding import full_groups

NOT_SETTINGS = ("params", "param_names")  # of a parameter group; what else it has are settings
States = dict[torch.Tensor, dict[str, Any]]  # of each weight


def restore(optimizer: torch.optim.Optimizer, states: States) -> None:
    """Give the optimizer this state, and no other, as it was saved: its own `load_state_dict` would
    round it to the types of the weights (pytorch/pytorch#43706).

    Raises UserError for an optimizer whose `state` is made anew each time it is asked for.
    """
    optimizer.state.clear()
    optimizer.state.update(states)
    if any(optimizer.state.get(p) is not state for p, state in states.items()):
        raise UserError(
            f"build_optimizer: {type(optimizer).__name__} does not keep the state of a checkpoint; "
            "write one class that keeps all of it in `state`, by weight, and `param_groups`, as "
            "those of torch.optim do"
        )


def check_weights(optimizer: torch.optim.Optimizer, names: dict) -> None:
    """Raise UserError if the optimizer has a weight that is not in the model, as `names` has them.

    Adagrad begins with a state of the weights: that of weights that FSDP has replaced goes.
    """
    if any(p not in names for group in optimizer.param_groups for p in group["params"]):
        raise UserError(
            "build_optimizer gives a weight that is not in the model, so no checkpoint would hold "
            "it; make it a part of the model, in task.build_model"
        )
    for key in [key for key in optimizer.state if torch.is_tensor(key) and key not in names]:
        del optimizer.state[key]


def check_all_in_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]
) -> None:
    """Raise UserError for weights that are to be trained, and that the optimizer does not have."""
    known = {p for group in optimizer.param_groups for p in group["params"]}
    names = [name for name, p in parameters.items() if p.requires_grad and p not in known]
    if names:
        raise UserError(
            f"no optimizer has {some(names, 3)}, so it would never change: give the optimizer all "
            "weights that train, after the last change of the model, or call requires_grad_(False)"
        )


def optimizer_settings(optimizer: torch.optim.Optimizer) -> list[dict]:
    """Return the settings of each parameter group: the optimizer's class, weight_decay, betas, ...

    Raises UserError for what is no optimizer, or cannot be used in a loop.
    """
    hooks = "_optimizer_step_post_hooks"  # that only Optimizer.__init__ makes
    if not isinstance(optimizer, torch.optim.Optimizer) or not hasattr(optimizer, hooks):
        kind = type(optimizer).__name__
        raise UserError(
            f"build_optimizer returns a {kind}; give one torch.optim.Optimizer, whose __init__ was "
            "called"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure and closure.default is closure.empty:
        raise UserError(
            f"{type(optimizer).__name__} computes the loss itself, several times a step: give an "
            "optimizer whose step() needs no closure"
        )
    kind = {"class": type(optimizer).__name__}
    groups = [group for group, *_ in full_groups(optimizer.param_groups)]
    return [kind | {n: v for n, v in group.items() if n not in NOT_SETTINGS} for group in groups]


def settings_as_text(settings: list[dict]) -> list[dict[str, str]]:
    """Write settings for a manifest with all digits: JSON has neither tensors nor tuples, and torch
    would print four digits."""
    groups = [
        {n: value.tolist() if torch.is_tensor(value) else value for n, value in group.items()}
        for group in settings
    ]
    return [{name: repr(value) for name, value in group.items()} for group in groups]


# ---- Schedulers of the learning rate -------------------------------------------------------------


def is_scheduler(value: Any) -> bool:
    return isinstance(bare_scheduler(value), torch.optim.lr_scheduler.LRScheduler)


def bare_scheduler(value: Any) -> Any:
    return getattr(value, "scheduler", value)  # inside a prepared one


def fast_forward(scheduler: Any, state: dict) -> None:
    """Bring a scheduler with new settings to where the run is; UserError if no step tells."""
    scheduler = bare_scheduler(scheduler)
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise UserError(
            f"accept_changes cannot apply the new settings of {type(scheduler).__name__}, whose "
            "rate depends on what was measured: give the old ones, or another folder"
        )
    with warnings.catch_warnings(action="ignore"):  # of steps before those of the optimizer
        for _ in range(state["last_epoch"]):
            scheduler.step()


def check_holders(accelerator: Accelerator, optimizer: AcceleratedOptimizer) -> list[tuple]:
    """Return objects that have the optimizer, each with its numbers: perhaps a scheduler of one's
    own. Raise UserError for a scheduler of torch that no checkpoint would hold."""
    known = [*accelerator._schedulers, *accelerator._custom_objects]
    known += [bare_scheduler(scheduler) for scheduler in known]
    for each in known:  # SequentialLR and ChainedScheduler have others, which are looked at, too
        known += getattr(each, "_schedulers", ())
    others = [one for one in holders(optimizer) if one not in known]
    for scheduler in filter(is_scheduler, others):
        raise UserError(
            f"no checkpoint would hold {type(scheduler).__name__}, the learning rate scheduler "
            "of this optimizer: call accelerator.register_for_checkpointing(scheduler) before "
            "the first step"
        )
    kinds = int | float
    return [(one, {n: v for n, v in vars(one).items() if isinstance(v, kinds)}) for one in others]


def holders(optimizer: AcceleratedOptimizer) -> list[Any]:
    """Return the objects that have an optimizer as an attribute, but for the library's own. Each of
    two searches looks at all objects of the process."""
    found = gc.get_referrers(optimizer, getattr(optimizer, "optimizer", optimizer))
    dicts = {id(each): each for each in found if isinstance(each, dict)}  # perhaps attributes
    owners = gc.get_referrers(*dicts.values())
    found = [one for one in found if id(one) not in dicts and hasattr(one, "__dict__")]
    found += [one for one in owners if id(getattr(one, "__dict__", None)) in dicts]
    foreign = ("accelerate.", "samestep.")
    kinds = (type(optimizer), types.ModuleType, types.FunctionType)
    return [
        one
        for one in found
        if not isinstance(one, kinds) and not f"{type(one).__module__}.".startswith(foreign)
    ]
