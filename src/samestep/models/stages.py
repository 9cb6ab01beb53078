"""A language model cut into the stages of a pipeline: see train_pipeline.py among the examples.

A stage is the model without the weights of other stages, so that the names of weights, the numbers
of layers, the rotary embedding and the masks stay as they are.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch

from samestep.base.fields import refuse
from samestep.models import attention, next_token

Batch = dict[str, torch.Tensor]


class Elsewhere(torch.nn.Module):
    """Stands for what another stage has. It gives back what it gets; in place of the embedding,
    `states`, which the stage before has computed."""

    states: torch.Tensor | None = None

    def forward(self, given, *_, **__):
        return given if self.states is None else self.states


def cut(model: Any, stage: int, stages: int) -> Any:
    """One stage, which shares its weights with `model`: some layers, in the first stage the
    embedding, in the last the norm and the head."""
    part, decoder, count = copy.copy(model), copy.copy(model.model), len(model.model.layers)
    part._modules, decoder._modules = {**model._modules}, {**decoder._modules}
    own = range(count * stage // stages, count * (stage + 1) // stages)
    layers = [layer if i in own else Elsewhere() for i, layer in enumerate(decoder.layers)]
    part.model, decoder.layers = decoder, torch.nn.ModuleList(layers)
    if stage:
        decoder.embed_tokens = Elsewhere()
    if stage < stages - 1:
        decoder.norm, part.lm_head = Elsewhere(), None
    return part


def missing(model: Any, part: Any) -> Batch:
    """The weights of the model that a stage lacks, by name: their shapes, on the meta device."""
    own, empty = {*part.state_dict()}, functools.partial(torch.empty, device="meta")
    weights = model.state_dict().items()
    return {name: empty(v.shape, dtype=v.dtype) for name, v in weights if name not in own}


def decode(part: Any, batch: Batch) -> torch.Tensor:
    """What the decoder makes of a batch: (B, T, H)."""
    return part.model(**next_token.model_inputs(part, part.loss_plan, batch))[0]


def compute(part: Any, function: Callable, batch: Batch, states: torch.Tensor | None) -> Any:
    """function(model, batch) in the last stage; in others the hidden states for the next one."""
    part.model.embed_tokens.states = states
    return decode(part, batch) if part.lm_head is None else function(part, batch)


@torch.no_grad()
def check_cut(model: Any, stages: int, eval_sums: Callable, batch: Batch) -> Batch:
    """Raises ValueError for a model that so many stages do not make up. Returns the task's sums."""
    name, plan = type(model).__name__, getattr(model, "config", None)
    plan = {*(getattr(plan, "base_model_pp_plan", None) or {})}
    known = hasattr(model, "loss_plan") and plan == {"embed_tokens", "layers", "norm"}
    known = known and not hasattr(model, "peft_config") and batch["input_ids"].ndim == 2
    refuse((not known, f"{name} cannot be cut into stages; give a decoder of causal_lm, no LoRA"))
    rates = [getattr(m, "attention_dropout", 0) or getattr(m, "p", 0) for m in model.modules()]
    shared, count = {*model.state_dict()}, model.config.num_hidden_layers
    shared -= {name for name, _ in model.named_parameters()}
    refuse(
        (count < stages, f"{stages} stages need as many layers, and {name} has {count}"),
        (any(rates), f"{name} has dropout, whose masks would depend on the stages; set it to 0"),
        (shared, f"stages of {name} would share {' and '.join(shared)}; use fsdp2.yaml"),
    )
    row = {name: (v[:, :8] if v.ndim > 1 else v).to(model.device) for name, v in batch.items()}
    whole, states = decode(model.eval(), row), None
    for stage in range(stages):
        states = compute(cut(model, stage, stages), decode, row, states)
    same = attention.are_close(whole, states)
    refuse((not same, f"the stages of {name} give other states than the whole; use fsdp2.yaml"))
    return eval_sums(model, row)
