"""Tries a loss before the first step: is it a sum over independent rows?"""

import contextlib
import math
import random
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from samestep.base.console import print_on_main
from samestep.base.errors import UserError, some
from samestep.processes.ranks import Ranks
from samestep.step.model import keep_modes

SMALLEST = 0.01  # sums below it are compared as if they were so large

# ---- A backward pass before the first step -------------------------------------------------------


@contextlib.contextmanager
def nothing_changes(
    model: torch.nn.Module, put_back: Callable[[], None], exchanges: bool = False
) -> Iterator[None]:
    """Put back what passes in the body, in train mode, change. Weights have no gradient before.

    put_back(): puts back what the run can save, such as buffers.
    exchanges: whether DDP communicates.
    """
    alone = contextlib.nullcontext
    if not exchanges:
        alone = getattr(model, "no_sync", alone)
    device = next(model.parameters()).device
    states = random_states(device)
    try:
        with keep_modes(model), alone():
            model.train()
            yield
    finally:
        model.zero_grad(set_to_none=True)
        put_back()
        set_random_states(device, states)


def set_random_states(device: torch.device, states: list) -> None:
    """Set the states of the generators that `random_states` gave."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    for state in states[3:]:
        torch.get_device_module(device).set_rng_state(state)


def random_states(device: torch.device) -> list:
    """Return the states of the generators that anything draws from without being given one."""
    states = [random.getstate(), np.random.get_state(), torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state())
    return states


def check_all_used(ranks: Ranks, model: torch.nn.Module) -> None:
    """Raise UserError for weights without a gradient, for which DDP would wait; a line of one."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    used = ranks.sum_over_ranks(*(int(p.grad is not None) for _, p in trained))
    pairs = zip(trained, used, strict=True)
    names = [own_name(name) for (name, _), count in pairs if count < ranks.layout.processes]
    if names and ranks.layout.processes > 1:
        raise UserError(_no_gradient(names))
    if names:
        print_on_main(_no_gradient(names))


def leaves_of(loss: torch.Tensor) -> list[torch.Tensor]:
    """List the tensors with gradients that a loss is computed from."""
    leaves, seen, nodes = [], set(), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        nodes += [following for following, _ in node.next_functions]
    return leaves


def check_reduced(model: torch.nn.Module) -> None:
    """Raise UserError if a weight of this process had no gradient that DDP waits for. torch tells
    so in the next forward pass, after the weights have changed."""
    if not isinstance(model, DistributedDataParallel):
        return
    try:
        model._check_reducer_finalized()
    except RuntimeError as error:
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        (text,) = re.findall(r"indices which did not receive .*?: ([\d ]+)", str(error))
        names = [own_name(trained[int(place)]) for place in text.split()]
        raise UserError(_no_gradient(names)) from None


def own_name(name: str) -> str:
    """Return the name that a weight or buffer has in the task's model."""
    return name.removeprefix("module.").removeprefix("model.")


def _no_gradient(names: list[str]) -> str:
    """Return the line about weights without a gradient, for which DDP waits."""
    return (
        f"{some(names, 3)} had no gradient, and on several processes DDP waits for that of every "
        "weight in each step: set find_unused_parameters to true, or freeze what no row uses"
    )


# ---- Is the loss a sum over rows? ----------------------------------------------------------------


def random_state(device: torch.device) -> tuple:
    """Return where the global generators stand, to be compared."""
    python, (_, numbers, *places), *of_torch = random_states(device)
    return python, numbers.tobytes(), places, [state.numpy().tobytes() for state in of_torch]


class Computed(NamedTuple):
    """What a function has computed of some rows."""

    batch: Any
    num_items: int  # in the loss
    sums: dict[str, torch.Tensor]  # by name; a loss is called ""
    draws: bool  # random numbers, in collate or in the model
    collate_draws: bool = False


def differ(place: str, together: Computed, alone: list[Computed], limit: float) -> str:
    """Describe how sums of rows together differ from those of each alone; empty: they do not.

    Where random numbers are drawn each batch has others. There the loss per item is compared: that
    of a mean over eight rows is an eighth of that of each. Raises ValueError for other shapes.
    """
    if together.draws:
        return _differ_by_item(place, together, alone)
    for key, value in together.sums.items():
        name = f"{place}: {key!r}" if key else place
        separate = [computed.sums[key].double() for computed in alone]
        if any(sums.shape != value.shape for sums in separate):
            raise ValueError(
                f"{name} has the shape {(*value.shape,)} for {len(alone)} rows and "
                f"{(*separate[0].shape,)} for one; give a sum over the rows"
            )
        if not value.numel():
            continue
        total = torch.stack(separate).sum(0)
        size = max(float(torch.stack(separate).abs().sum(0).max()), SMALLEST)
        if float((value.double() - total).abs().max()) > limit * size:
            return described(name, float(value.sum()), float(total.sum()), len(alone))
    return ""


def _differ_by_item(place: str, together: Computed, alone: list[Computed]) -> str:
    """Compare as `differ`, by the loss per item: whether it is less than half of that of each."""
    counted = [(float(computed.sums[""]), computed.num_items) for computed in alone]
    counted = [(loss, items) for loss, items in counted if items and math.isfinite(loss)]
    total = sum(loss for loss, _ in counted)
    per_item = total / max(sum(items for _, items in counted), 1)
    loss = float(together.sums[""])
    if abs(loss) / max(together.num_items, 1) < abs(per_item) / 2:
        return described(place, loss, total, len(alone))
    return ""


def described(name: str, together: float, alone: float, rows: int) -> str:
    return (
        f"{name} is {together:.6g} for {rows} rows together, but {alone:.6g} as the sum of each "
        "alone. A mean, padding without a mask, or a loss across rows does that: micro-batches "
        "would change the result"
    )
