"""The loss of a language model: each token from those before it, fast and in bounded memory.

Batches are those of transformers: `labels` are aligned with `input_ids`, IGNORE_INDEX does not
count, and the loss shifts, so that the first token of a sequence is not in it. An `attention_mask`
hides padding on either side; `position_ids` without one separate the texts of packed sequences.
`shift_labels` are used in place of `labels`: under context parallelism core/sharding.py adds them.

Three things differ from a plain call, where a model allows them, which `prepare` finds out: its
attention (attention.py); the residual stream, bf16 under bf16 autocast; and the logits, which exist
for a limited number of tokens at a time.
"""

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from samestep.base.console import print_on_main
from samestep.core.inputs import IGNORE_INDEX
from samestep.core.sharding import is_dtensor
from samestep.models import attention
from samestep.models.attention import Batch, LossPlan


def plan_of(model: Any) -> LossPlan:
    """How to compute the loss; without `prepare` by a plain call of the model."""
    return getattr(attention.bare(model), "loss_plan", LossPlan())


# ---- Before the training -------------------------------------------------------------------------


def prepare(model: Any, length: int, chunk: int, most_texts: int) -> None:
    """Finds out, for rows of this length, what a causal language model allows: its attribute
    `loss_plan`. One without weights is left as it is."""
    if model.device.type == "meta":
        return
    if most_texts:
        check_separates_texts(model)
    row = torch.tensor([[3, 5, 4, 6, 3, 5, 7, 9]])
    texts = {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])}
    starts = torch.tensor([0, 3, 8, 8], dtype=torch.int32)

    def answers() -> list[torch.Tensor]:
        ways = [{}]
        if most_texts and model.config._attn_implementation == attention.CAUSAL:
            mask = attention.text_mask(starts, *row.shape)
            ways += [{**texts, "attention_mask": mask}, {**texts, "cu_seq_lens_q": starts}]
        elif most_texts:
            ways += [texts, texts]
        return [model(input_ids=row, use_cache=False, **way).logits for way in ways]

    if has_router_loss(model):
        check_router_loss(model, row)
    else:  # a router's loss needs a mask (B, T), if any
        attention.replace(model, attention.CAUSAL, answers, length)
    name, has_flash = model.config._attn_implementation, attention.find_flash() is not None
    plan = LossPlan(name, chunk, most_texts, has_flash, is_split(model, row))
    model.adaptation = model.loss_plan = plan


@torch.no_grad()
def check_router_loss(model: Any, row: torch.Tensor) -> None:
    """Prints that a router's loss is trained on. Raises ValueError if it is not the model's own."""
    name = type(model).__name__
    try:
        outputs = model(input_ids=row, use_cache=False)
        found = router_loss(model, outputs, {"labels": row})
        fits = attention.are_close(model.router_aux_loss_coef * outputs.aux_loss, found)
    except Exception:  # code of a model on the Hub may raise anything
        fits = False
    if not fits:
        raise ValueError(
            f"task.model_name_or_path: the router's loss of {name} is of an unknown kind; train "
            "without it: write output_router_logits: false in config.json"
        )
    print_on_main(
        f"{name}: the loss of a micro-batch includes its router's loss (router_aux_loss_coef "
        f"{model.router_aux_loss_coef:g}), weighted by its number of items: another size of "
        "micro-batches changes the result. eval_loss does not include it"
    )


@torch.no_grad()
def check_separates_texts(model: Any) -> None:
    """Raises ValueError for a model in which a packed text attends to the text before it."""
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    rows = [torch.tensor([[*first, 3, 5, 7, 9]]) for first in ([3, 4, 5, 6], [7, 8, 9, 10])]
    inputs = {"position_ids": positions, "use_cache": False}
    with attention.evaluating(model):
        try:
            logits = [model(input_ids=row, **inputs).logits[:, 4:] for row in rows]
            size = max(1.0, float(logits[0].abs().max()))  # large logits round more
            separate = torch.allclose(logits[0], logits[1], atol=1e-5 * size)
        except TypeError:  # its forward takes no position_ids
            separate = False
    if not separate:
        raise ValueError(
            f"task.model_name_or_path: models of the type {model.config.model_type} cannot keep "
            "packed texts apart; take another model, or texts with --task.packing stream"
        )


def is_split(model: Any, row: torch.Tensor) -> bool:
    """Whether a model is a decoder that takes embeddings, and a head that makes the logits."""
    calls: list[tuple] = []
    with attention.evaluating(model):
        try:
            decoder, head = model.get_decoder(), model.get_output_embeddings()
            parts = [decoder, head, model.get_input_embeddings()]
            # Another weight, such as a scale that is still 1, would show nothing and never learn.
            if {*model.parameters()} != {weight for part in parts for weight in part.parameters()}:
                return False
            embeddings = parts[2](row)
            hooks = [
                # Capping shows in large logits alone.
                head.register_forward_pre_hook(lambda _, given: (1000 * given[0],)),
                head.register_forward_hook(lambda *call: calls.append(call)),
            ]
            try:
                logits = model(input_ids=row, use_cache=False).logits
            finally:
                for hook in hooks:
                    hook.remove()
            hidden = decoder(inputs_embeds=embeddings, use_cache=False)[0]
            ((_, (states,), output),) = calls
            return torch.equal(logits, output) and attention.are_close(1000 * hidden, states)
        except Exception:  # code of a model on the Hub may raise anything
            return False


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


def has_router_loss(model: Any) -> bool:
    """Tell whether a mixture of experts has the loss of its router in its loss."""
    wanted = getattr(model.config, "output_router_logits", False)
    return wanted and getattr(model, "router_aux_loss_coef", 1) != 0


def router_loss(model: Any, outputs: Any, batch: Batch) -> torch.Tensor:
    """Compute what transformers adds to the mean loss of a batch, float32 (), from the outputs of a
    model or its decoder: for tokens in `attention_mask`, or up to the last label of a sequence."""
    tokens = batch.get("attention_mask")
    if tokens is None:
        labels = batch["labels"] != IGNORE_INDEX
        tokens = labels.flip(-1).cumsum(-1).flip(-1) > 0
        tokens |= ~tokens.any()  # without tokens it is NaN, also times 0 items
    balance = inspect.unwrap(type(model).forward).__globals__["load_balancing_loss_func"]
    loss = balance(outputs.router_logits, model.num_experts, model.num_experts_per_tok, tokens)
    return model.router_aux_loss_coef * loss


class States(NamedTuple):
    """What `head` makes logits of: (N, H), `chunk` rows at once, so that few logits exist."""

    head: Any
    hidden: torch.Tensor
    labels: torch.Tensor  # (N,)
    chunk: int
    router_loss: torch.Tensor | float = 0.0  # in training

    def chunks(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return zip(self.hidden.split(self.chunk), self.labels.split(self.chunk), strict=True)


def states_of(model: Any, batch: Batch, plan: LossPlan) -> States:
    """The decoder's output for a batch; the logits where a model has no such."""
    inputs = model_inputs(model, plan, batch)
    labels = shift_labels(batch).flatten()
    outputs, router = model.get_decoder()(**inputs) if plan.is_split else model(**inputs), 0.0
    if model.training and has_router_loss(model):
        router = router_loss(model, outputs, batch)
    if not plan.is_split:
        logits = outputs.logits.flatten(0, 1)
        return States(torch.nn.Identity(), logits, labels, len(labels), router)
    hidden, head = outputs[0].flatten(0, 1), model.get_output_embeddings()
    # A sharded head is gathered for each call: of these all processes need as many.
    simple = type(head) is torch.nn.Linear and not is_dtensor(head.weight)
    return States(head, hidden, labels, plan.chunk if simple else len(labels), router)


def loss_sum(model: Any, batch: Batch) -> torch.Tensor:
    """Sum the losses of the counted tokens, in nats; in training with the router's: float32 ()."""
    model = attention.bare(model)
    states = states_of(model, batch, plan_of(model))
    loss = cross_entropy_of(states)
    if torch.is_tensor(states.router_loss):  # a dense model counts no tokens here
        loss = loss + states.router_loss * counted(batch).sum()
    return loss


def cross_entropy_of(states: States) -> torch.Tensor:
    """Sum the cross entropy of the counted tokens, in nats, float32 (), in bounded memory."""
    head, hidden, labels, chunk, _ = states
    if len(labels) <= chunk or head.bias is not None:
        return cross_entropy(head(hidden), labels)
    if attention.autocast_dtype(hidden.device) == torch.float16:
        return token_losses(states).sum()
    return ChunkedLoss.apply(hidden, head.weight, labels, chunk, torch.is_grad_enabled())


def token_losses(states: States) -> torch.Tensor:
    """Compute the loss of what each token predicts, 0 where it is not counted: float32 (N,).

    The backward pass computes the logits of each chunk again.
    """

    def losses(hidden, labels):
        return cross_entropy(states.head(hidden), labels, reduction="none")

    if len(states.labels) <= states.chunk or not torch.is_grad_enabled():
        return torch.cat([losses(*each) for each in states.chunks()])
    return torch.cat([checkpoint(losses, *each, use_reentrant=False) for each in states.chunks()])


def model_inputs(model: Any, plan: LossPlan, batch: Batch) -> dict[str, Any]:
    """Make the arguments of the model, or of its decoder, from a batch of (B, T).

    A padded sequence gets positions that count its own tokens, as transformers' `generate` gives
    them; a model that takes no positions makes what it needs of the mask.
    """
    ids = batch["input_ids"]
    mask = batch.get("attention_mask")
    causal = model.config._attn_implementation == attention.CAUSAL
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if plan.is_split:
        embeddings = model.get_input_embeddings()(ids)
        # fp32 embeddings would make the residual stream, queries and keys fp32. fp16 may overflow.
        bf16 = attention.autocast_dtype(ids.device) == torch.bfloat16
        inputs["inputs_embeds"] = embeddings.bfloat16() if bf16 else embeddings
        del inputs["input_ids"]
    if "position_ids" in batch:
        inputs["position_ids"] = batch["position_ids"]
        # Under context parallelism the parts of sequences have positions, too.
        if (plan.most_texts or mask is None) and "shift_labels" not in batch:
            return inputs | packed_inputs(plan, batch, causal)
    elif mask is not None and "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = (mask.bool().cumsum(-1) - 1).clamp(min=0)
    if mask is None:
        # Without a cache, transformers asks the device in every batch whether rows are packed.
        inputs["use_cache"] = not causal
    else:
        inputs["attention_mask"] = attention.causal_mask(mask.bool()) if causal else mask
    return inputs


def packed_inputs(plan: LossPlan, batch: Batch, causal: bool) -> dict[str, torch.Tensor]:
    """Make what separates the texts of packed sequences. Padding is seen by no text."""
    if not causal:  # transformers finds the texts in the positions
        return {}
    positions = batch["position_ids"]
    starts = attention.text_starts(positions, plan.most_texts or positions.shape[1])
    tried = plan.most_texts > 0  # by `prepare`
    if tried and plan.has_flash and starts.is_cuda and attention.autocast_dtype(starts.device):
        return {"cu_seq_lens_q": starts}
    return {"attention_mask": attention.text_mask(starts, *positions.shape)}


def cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, reduction: str = "sum"
) -> torch.Tensor:
    """In fp32: logits (N, V), labels (N,)."""
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORE_INDEX, reduction=reduction)


class ChunkedLoss(torch.autograd.Function):
    """`cross_entropy(hidden @ weight.T, labels)`, of whose logits `chunk` rows exist at once.

    The forward pass computes the gradients too, while it has the logits: the weight's is summed
    over the chunks in fp32. In fp16 such sums would overflow.
    """

    @staticmethod
    def forward(ctx, hidden, weight, labels, chunk, training):
        dtype = attention.autocast_dtype(hidden.device) or weight.dtype
        matrix, loss = weight.to(dtype), torch.zeros((), device=hidden.device)
        hidden_grad = torch.empty_like(hidden) if training else None
        trains_weight = training and weight.requires_grad
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if trains_weight else None
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            states, targets = hidden[rows].to(dtype), labels[rows, None]
            logs = (states @ matrix.T).float().log_softmax(1)
            counted, targets = targets != IGNORE_INDEX, targets.clamp(min=0)
            chosen = logs.gather(1, targets)
            loss -= (chosen * counted).sum()
            if not training:
                continue
            # The gradient of the logits: probabilities, less 1 at the target.
            grad = logs.exp_().scatter_(1, targets, chosen.exp() - 1).mul_(counted).to(dtype)
            hidden_grad[rows] = grad @ matrix
            if trains_weight:
                weight_grad += grad.T @ states
        ctx.save_for_backward(hidden_grad, weight_grad)
        return loss

    @staticmethod
    def backward(ctx, scale):
        grads = [each if each is None else each * scale for each in ctx.saved_tensors]
        return (*grads, None, None, None)
