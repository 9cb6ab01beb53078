"""Log-probabilities of answers under a language model and under its reference, which stays as the
model was at the start: a frozen copy inside the model, or, beside adapters, the model without them.

Rafailov et al., "Direct Preference Optimization", 2023.
"""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch

from samestep.models import next_token
from samestep.models.next_token import Batch, bare

_COPY = "reference"  # the name of the copy inside the model, and so of its weights


# ---- The reference -------------------------------------------------------------------------------


def add_reference(model: Any) -> None:
    """Puts a frozen copy of a model into it. Checkpoints hold no more than its digest, and each
    kind of sharding cuts it as it cuts the model."""
    known: dict[int, Any] = {}
    for weights in model.parameters():
        copied = torch.nn.Parameter(weights.detach().clone(), requires_grad=False)
        known[id(weights)] = copied  # by deepcopy itself, tensors without content cannot be copied
    known |= {id(values): values.clone() for values in model.buffers()}
    model.add_module(_COPY, copy.deepcopy(model, known))


@contextlib.contextmanager
def without_reference(model: Any) -> Iterator[Any]:
    """The model as transformers knows it: for export and generation."""
    frozen = model._modules.pop(_COPY, None)
    try:
        yield model
    finally:
        if frozen is not None:
            model.add_module(_COPY, frozen)


@contextlib.contextmanager
def _reference_of(model: Any) -> Iterator[Any]:
    """The model as it was at the start."""
    if bare(model) is model:
        yield model.get_submodule(_COPY)
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [each for each in model.modules() if isinstance(each, BaseTunerLayer)]
    # peft's disable_adapter also stops their gradients, and under FSDP2 these would never return.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield bare(model)
    finally:
        for layer in layers:
            layer._disable_adapters = False


def before_and_after(model: Any) -> Iterator[tuple[str, Any]]:
    """The reference, where there is one, and the model: each to be used in its turn."""
    names = (name for name, _ in model.named_modules())
    # Adapters that are merged into the weights are none.
    if _COPY in model._modules or any(name.endswith("lora_A") for name in names):
        with _reference_of(model) as reference:
            yield "before", reference
    yield "after", model


# ---- Log-probabilities ---------------------------------------------------------------------------


def answer_log_probabilities(model: Any, batch: Batch, has_reference: bool) -> tuple:
    """Compute those of both answers, in nats: under the model and, if it has one, its reference.

    A batch has input_ids and labels (B, 2, T), aligned with each other, and may have an
    attention_mask. Both are float32 (B, 2), or None. Third, () or 0: the router's loss in training.
    """
    rows, theirs = flatten_pairs(batch), None
    decisions = getattr(model, "decisions", {})

    def sums(states: next_token.States) -> torch.Tensor:
        losses = torch.cat(next_token.losses_of(states, "none"))
        return -losses.view(rows["labels"].shape).sum(1).view(-1, 2)

    if has_reference:  # first, while the model's activations need no memory
        with torch.no_grad(), _reference_of(model) as reference:
            theirs = sums(next_token.states_of(reference, rows, decisions))
    states = next_token.states_of(bare(model), rows, decisions)
    return sums(states), theirs, states.router_loss


def flatten_pairs(batch: Batch) -> Batch:
    """Make two sequences of each pair: (2B, T)."""
    names = {"input_ids", "labels", "attention_mask", "position_ids"} & batch.keys()
    return {name: batch[name].flatten(0, 1) for name in names}
