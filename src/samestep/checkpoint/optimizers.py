"""Restores the state of an optimizer, and refuses one that a checkpoint would not hold whole.

A checkpoint takes what torch's contract names: `state`, by weight, and `param_groups`. An optimizer
that is made of others may keep their state, or their learning rates, where neither is read back.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from samestep.processes.ranks import UserError, as_user_error
from samestep.step.sharding import local

States = dict[torch.Tensor, dict[str, Any]]  # of each weight

ADVICE = (
    "write one class that keeps all of it in `state`, by weight, and `param_groups`, as those of "
    "torch.optim do; what differs between weights can be an entry of their group"
)
PER_STEP = ("found_inf", "grad_scale", "norm")  # attributes that monitor.py and fp16 set


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
                raise lost(optimizer, key, names[p])


def lost(optimizer: torch.optim.Optimizer, key: str, name: str) -> UserError:
    """The error for a state that the optimizer was given, and does not use."""
    return UserError(
        f"build_optimizer: {type(optimizer).__name__} does not take {key} of {name} back from a "
        f"checkpoint; {ADVICE}"
    )


def is_same(found: Any, value: Any) -> bool:
    """Whether these are the same values; it may wait for the device."""
    if found is value:
        return True
    if not torch.is_tensor(value) or not torch.is_tensor(found):
        return not torch.is_tensor(found) and found == value
    found, value = local(found), local(value)
    return torch.equal(found.to(value.device, value.dtype), value)


class ContractCheck:
    """Refuses an optimizer, after its first two steps, that holds more than torch's contract.

    After the first, it is given back its own state, with copies of some tensors: it must use these.
    After the second, nothing else that it holds may have changed. Neither waits for the device.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: dict, collect: Callable):
        self.names, self.collect, self.steps = names, collect, 0
        self.depth = 0  # a class whose step calls that of its parent has the hooks called twice
        self.held: dict[str, Any] = {}
        if any(p not in names for group in optimizer.param_groups for p in group["params"]):
            raise UserError(
                "build_optimizer gives a weight that is not in the model, so no checkpoint would "
                "hold it; make it a part of the model, in task.build_model"
            )
        # Adagrad begins with a state of the weights: FSDP has replaced these.
        for key in [key for key in optimizer.state if key not in names]:
            del optimizer.state[key]
        optimizer.register_step_pre_hook(self.before_step)
        optimizer.register_step_post_hook(self.after_step)

    def before_step(self, *_: Any) -> None:
        self.depth += 1

    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.depth -= 1
        self.steps += not self.depth
        if self.depth or self.steps > 2:
            return
        held = held_beside(optimizer)
        if not {*optimizer.state} <= {*self.names}:
            changed = {"`state` of something else than weights"}
        elif self.steps == 1:
            with as_user_error():
                self.collect()  # raises for what no checkpoint holds, such as a list
            self.reload(optimizer)
            self.held = held_beside(optimizer)
            changed = self.held.keys() - held.keys()
        else:
            changed = {place for place, value in held.items() if self.held.get(place) != value}
        if changed:
            keeps = f"{type(optimizer).__name__} keeps {min(changed).lstrip('.')}"
            raise UserError(
                f"build_optimizer: {keeps} where no checkpoint looks, so a continued run would "
                f"differ; {ADVICE}"
            )

    def reload(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives it its own state, in which the smallest weight of each group has copies."""
        states = {p: dict(values) for p, values in optimizer.state.items()}
        copied: list[tuple] = []
        for group in optimizer.param_groups:
            p = min((p for p in group["params"] if p in states), key=torch.numel, default=None)
            tensors = [key for key, v in states.get(p, {}).items() if torch.is_tensor(v)]
            for key in tensors:
                copied.append((p, key, states[p][key]))
                states[p][key] = states[p][key].clone()
        restore(optimizer, states, self.names)
        for p, key, before in copied:
            if optimizer.state[p][key] is before:
                raise lost(optimizer, key, self.names[p])


def held_beside(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimizer holds beside its state and its groups, by the place: versions of tensors,
    and numbers, also in lists, mappings and other optimizers.
    """
    groups, states = optimizer.param_groups, [*optimizer.state.values()]
    weights = [p for group in groups for p in group["params"]]
    moments = [v for each in states if isinstance(each, dict) for v in each.values()]
    known = [optimizer.state, groups, *groups, *weights, *states]
    seen = {id(each) for each in [*known, *filter(torch.is_tensor, moments)]}
    found: dict[str, Any] = {}

    def walk(place: str, value: Any) -> None:
        if type(value) in (int, float):
            found[place] = value
        elif id(value) in seen:
            return
        seen.add(id(value))
        inner: Any = ()
        if torch.is_tensor(value):
            found[place] = (id(value), value._version)
        elif isinstance(value, torch.optim.Optimizer):
            if not {*map(id, value.param_groups)} <= seen:  # the learning rate does not reach them
                found[f"{place}.param_groups"] = object()
            inner = [(name, each) for name, each in vars(value).items() if name not in PER_STEP]
        elif isinstance(value, Mapping | list | tuple):
            inner = enumerate(value.values() if isinstance(value, Mapping) else value)
        for name, each in inner:
            walk(f"{place}.{name}", each)

    walk("", optimizer)
    return found
