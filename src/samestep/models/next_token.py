"""The loss of a language model: each token from those before it, in bounded memory.

Batches are those of transformers: `labels` are aligned with `input_ids`, IGNORE_INDEX does not
count, and the loss shifts, so that the first token of a sequence is not in it. An `attention_mask`
hides padding on either side; `position_ids` without one separate the texts of packed sequences.
`shift_labels` are used in place of `labels`: under context parallelism sharding.py adds them.

Attention is what `attn_implementation` names, as transformers computes it. The logits exist for a
limited number of tokens at a time, where `prepare` finds that a plain call has the same.
"""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from samestep.base.console import print_on_main
from samestep.processes.sharding import is_dtensor
from samestep.step.inputs import IGNORE_INDEX

Batch = dict[str, torch.Tensor]
CHUNK = 4096  # tokens whose logits exist at once where loss_chunk is auto


def bare(model: Any) -> Any:
    """The model of transformers, which has its adapters inside."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


# ---- Before the training -------------------------------------------------------------------------


def prepare(model: Any, loss_chunk: int | str, packed: bool = False) -> None:
    """Finds out how the loss of a causal language model is computed: its attribute `decisions`.

    loss_chunk: tokens whose logits exist at once; 0: those of a plain call; auto: CHUNK where both
    agree. packed: sequences hold several texts. Raises ValueError for a model that does not allow
    it. A model without weights, on the meta device, is left as it is.
    """
    if model.device.type == "meta":
        return
    model.decisions = {"loss_chunk": 0, "packed": packed}
    if packed:
        check_separates_texts(model)
    name = type(model).__name__
    if _has_router_loss(model):
        print_on_main(
            f"{name}: the loss of a micro-batch includes its router's loss (router_aux_loss_coef "
            f"{model.router_aux_loss_coef:g}), weighted by its number of items: another size of "
            "micro-batches changes the result. eval_loss does not include it"
        )
    if loss_chunk == 0:
        return
    if not _has_router_loss(model) and is_split(model):
        model.decisions["loss_chunk"] = CHUNK if loss_chunk == "auto" else loss_chunk
        return
    problem = f"the logits of {name} are more than its head makes of the decoder's output"
    if loss_chunk != "auto":
        raise ValueError(f"task.loss_chunk: {problem}; write 0, or auto")
    print_on_main(f"{name}: loss_chunk is 0, since {problem}: all of a micro-batch exist at once")


def check_separates_texts(model: Any) -> None:
    """Raises ValueError for a model in which a packed text attends to the text before it."""
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 0, 1, 0, 1, 2, 3]])
    logits = []
    with evaluating(model):
        try:
            for first in ([3, 4, 5, 6], [7, 8, 9, 10]):
                batch = {"input_ids": torch.tensor([[*first, 3, 5, 7, 9]] * 2)}
                inputs = model_inputs(model, {**batch, "position_ids": positions})
                logits.append(model(**inputs).logits.view(2, 8, -1)[:, 4:])
            before, after = logits
            size = max(1.0, float(before.abs().max()))  # large logits round more
            separate = torch.allclose(before, after, atol=1e-5 * size)
        except TypeError:  # its forward takes no position_ids
            separate = False
    if not separate:
        raise ValueError(
            f"task.model_name_or_path: models of the type {model.config.model_type} cannot keep "
            "packed texts apart; take another model, or texts with --task.packing stream"
        )


def is_split(model: Any) -> bool:
    """Whether the logits are what the head makes of the decoder's output, and no more."""
    row = torch.tensor([[3, 5, 4, 6, 3, 5, 7, 9]])
    with evaluating(model):
        try:
            decoder, head = model.get_decoder(), model.get_output_embeddings()
            # Another weight, such as a scale that is still 1, would show nothing and never learn.
            if {*model.parameters()} != {*decoder.parameters(), *head.parameters()}:
                return False
            # Capping shows in large logits alone.
            hook = head.register_forward_pre_hook(lambda _, given: (1000 * given[0],))
            try:
                logits = model(input_ids=row, use_cache=False).logits
                return are_close(logits, head(decoder(input_ids=row, use_cache=False)[0]))
            finally:
                hook.remove()
        except Exception:  # code of a model on the Hub may raise anything
            return False


def are_close(expected: torch.Tensor, found: torch.Tensor) -> bool:
    """Whether two tensors are equal up to the rounding of fp32."""
    return torch.allclose(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Without dropout and gradients."""
    training = model.training
    model.eval()
    with torch.no_grad():
        yield
    model.train(training)


# ---- Labels --------------------------------------------------------------------------------------


def shift(labels: torch.Tensor) -> torch.Tensor:
    """Move labels (..., T) to the token before: the last place gets IGNORE_INDEX."""
    return F.pad(labels[..., 1:], (0, 1), value=IGNORE_INDEX)


def shift_labels(batch: Batch) -> torch.Tensor:
    """Give the label that each token of a batch predicts, (..., T) int64: padding predicts none.

    Otherwise the first token of a sequence would count where padding stands before it.
    """
    if "shift_labels" in batch:
        return batch["shift_labels"]
    labels = shift(batch["labels"])
    if "attention_mask" in batch:
        labels = labels.masked_fill(batch["attention_mask"] == 0, IGNORE_INDEX)
    return labels


def counted(batch: Batch) -> torch.Tensor:
    """Tell which tokens of a batch predict a label that is in the loss, (..., T): bool."""
    return shift_labels(batch) != IGNORE_INDEX


# ---- The loss ------------------------------------------------------------------------------------


def _has_router_loss(model: Any) -> bool:
    """Tell whether a mixture of experts has the loss of its router in its loss."""
    wanted = getattr(model.config, "output_router_logits", False)
    return wanted and getattr(model, "router_aux_loss_coef", 1) != 0


class States(NamedTuple):
    """What `head` makes logits of: (N, H), `chunk` rows at once, so that few logits exist."""

    head: Any
    hidden: torch.Tensor
    labels: torch.Tensor  # (N,)
    chunk: int
    router_loss: torch.Tensor | float = 0.0  # in training


def states_of(model: Any, batch: Batch, decisions: dict[str, Any]) -> States:
    """The decoder's output for a batch; the logits where they are those of a plain call, as without
    `decisions`, which `prepare` makes."""
    inputs = model_inputs(model, batch, decisions)
    labels = shift_labels(batch).flatten()
    chunk = decisions.get("loss_chunk", 0)
    if not chunk:
        outputs, router_loss = model(**inputs), 0.0
        if model.training and _has_router_loss(model):
            router_loss = model.router_aux_loss_coef * outputs.aux_loss
        logits = outputs.logits.flatten(0, 1)
        return States(torch.nn.Identity(), logits, labels, len(labels), router_loss)
    hidden, head = model.get_decoder()(**inputs)[0].flatten(0, 1), model.get_output_embeddings()
    # A sharded head is gathered for each call: of these all processes need as many.
    simple = type(head) is torch.nn.Linear and not is_dtensor(head.weight)
    return States(head, hidden, labels, chunk if simple else len(labels))


def loss_sum(model: Any, batch: Batch) -> torch.Tensor:
    """Sum the losses of the counted tokens, in nats; in training with the router's: float32 ()."""
    states = states_of(bare(model), batch, getattr(model, "decisions", {}))
    loss = torch.stack(losses_of(states, "sum")).sum()
    if torch.is_tensor(states.router_loss):  # a dense model counts no tokens here
        loss = loss + states.router_loss * counted(batch).sum()
    return loss


def losses_of(states: States, reduction: str) -> list[torch.Tensor]:
    """Compute the losses of each chunk, whose logits the backward pass computes again: the sum of
    each, or with "none" that of what each token predicts, 0 where it is not counted."""

    def losses(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(states.head(hidden), labels, reduction)

    if len(states.labels) <= states.chunk:
        return [losses(states.hidden, states.labels)]
    chunks = zip(states.hidden.split(states.chunk), states.labels.split(states.chunk), strict=True)
    return [checkpoint(losses, *each, use_reentrant=False) for each in chunks]


def model_inputs(
    model: Any, batch: Batch, decisions: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Make the arguments of the model, or of its decoder, from a batch of (B, T).

    A padded sequence gets positions that count its own tokens, as transformers' `generate` gives
    them; a model that takes no positions makes what it needs of the mask. Where sequences are
    packed, transformers finds the texts in the positions if there is no mask.
    """
    ids, positions = batch["input_ids"], batch.get("position_ids")
    decisions = getattr(model, "decisions", {}) if decisions is None else decisions
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    mask = batch.get("attention_mask")
    if positions is not None and decisions.get("packed"):
        mask = None
    if mask is not None:
        inputs["attention_mask"] = mask
        if positions is None and "position_ids" in inspect.signature(model.forward).parameters:
            positions = (mask.bool().cumsum(-1) - 1).clamp(min=0)
    if positions is not None:
        inputs["position_ids"] = positions
    flash = model.config._attn_implementation.startswith("flash")
    # Under context parallelism the parts of sequences have positions, too.
    if flash and positions is not None and mask is None and "shift_labels" not in batch:
        # It finds packed texts in a batch of one sequence alone.
        inputs |= {"input_ids": ids.reshape(1, -1), "position_ids": positions.reshape(1, -1)}
    return inputs


def cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, reduction: str = "sum"
) -> torch.Tensor:
    """In fp32: logits (N, V), labels (N,)."""
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORE_INDEX, reduction=reduction)
