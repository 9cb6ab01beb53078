"""Attention for training that never makes the CPU wait for the device.

transformers' own sdpa attention asks the device in every batch whether it may leave out the mask.
Two others stand here. CAUSAL is for models that read from left to right: it gets a mask for packed
texts and for padding, and none for full rows. MASKED makes the mask that transformers makes, in
every batch.

A model gets one of them only after it has answered a small input as it did before. Neither is saved
with a model.
"""

import contextlib
import copy
import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from samestep.models import pretrained

SDPA = "sdpa"  # the attention that the others replace
CAUSAL = "causal_rows"  # transformers makes no mask for an attention that it does not know
MASKED = "always_masked"
PROBE = "probe"

Batch = dict[str, torch.Tensor]
Answers = Callable[[], list[torch.Tensor]]


# ---- Texts in packed rows ------------------------------------------------------------------------


def text_starts(positions: torch.Tensor, most: int) -> torch.Tensor:
    """Find where the texts of packed sequences begin, counted through all of them.

    positions: (B, T) int64, from 0 in each text; 0 in padding. A sequence has `most` texts at most.
    Returns int32 (B x most + 1,): the places that are left hold B x T, so the shape depends on no
    content. What has no position 1 after its 0, padding or a text of one token, predicts nothing:
    it belongs to the text before it, which does not see it.
    """
    begins = (positions == 0) & F.pad(positions[:, 1:] == 1, (0, 1))
    begins[:, 0] = True  # a text is never longer than a sequence
    total = begins.numel()
    places = torch.where(begins.flatten(), torch.arange(total, device=begins.device), total)
    return F.pad(places, (0, 1), value=total).sort().values[: len(begins) * most + 1].int()


def text_mask(starts: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """Which tokens see which: those of their text up to themselves; bool (rows, 1, T, T)."""
    places = torch.arange(rows * length, device=starts.device)
    return causal_mask(torch.bucketize(places, starts, right=True).view(rows, length))


def causal_mask(groups: torch.Tensor) -> torch.Tensor:
    """Make the mask with which tokens (B, T) see those of equal value up to themselves: bool
    (B, 1, T, T). So padding of an attention_mask sees padding: attention to nothing may be NaN."""
    length = groups.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=groups.device).tril()
    return (groups[:, None, :, None] == groups[:, None, None, :]) & causal


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of autocast; None in fp32."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


@functools.cache
def find_flash() -> Callable | None:
    """FlashAttention for packed rows, if this GPU has it."""
    fits = torch.cuda.is_available() and not torch.version.hip
    if not fits or torch.cuda.get_device_capability() < (8, 0):
        return None
    # It imports torch._dynamo, which takes a second.
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


def packed_attention(
    flash: Any, query: Any, key: Any, value: Any, starts: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Causal FlashAttention within each text: (B, heads, T, d) to (B, T, heads, d)."""
    rows, heads, length, _ = query.shape
    dtype = autocast_dtype(query.device)
    flat = [each.to(dtype).transpose(1, 2).flatten(0, 1) for each in (query, key, value)]
    gqa = heads != key.shape[1]
    ends = (starts, starts, length, length)  # no text is longer than a row
    answers = flash(*flat, *ends, scale=scaling, window_size=(-1, 0), enable_gqa=gqa)
    return answers.unflatten(0, (rows, length))


def causal_attention(
    sdpa, flash, module, query, key, value, attention_mask, cu_seq_lens_q=None, **options
):
    """transformers' sdpa attention, and FlashAttention within the texts of packed rows, which come
    with `text_starts` as `cu_seq_lens_q`, the name under which transformers hands it down."""
    if cu_seq_lens_q is not None:
        size = query.shape[-1]
        fits = size % 8 == 0 and size <= 128 and size == value.shape[-1]
        if flash and query.is_cuda and fits and not options.get("dropout"):
            scaling = options.get("scaling")
            return packed_attention(flash, query, key, value, cu_seq_lens_q, scaling), None
        attention_mask = text_mask(cu_seq_lens_q, len(query), query.shape[2])
    return sdpa(module, query, key, value, attention_mask, **options)


# ---- Giving a model another attention ------------------------------------------------------------


def register() -> None:
    """Makes CAUSAL and MASKED known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def make_mask(*args, attention_mask=None, allow_is_causal_skip=True, **options):
        options["allow_is_bidirectional_skip"] = False
        options["allow_is_causal_skip"] = allow_is_causal_skip and attention_mask is None
        return sdpa_mask(*args, attention_mask=attention_mask, **options)

    causal = functools.partial(causal_attention, sdpa_attention_forward, find_flash())
    AttentionInterface.register(CAUSAL, causal)
    AttentionInterface.register(MASKED, sdpa_attention_forward)
    AttentionMaskInterface.register(MASKED, make_mask)


def bare(model: Any) -> Any:
    """The model of transformers, which has its adapters inside."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@dataclass(frozen=True)
class LossPlan:
    """What a process with the weights of a model has found out about it, for others without them:
    its attention, and how next_token.py computes its loss. The model's attribute `adaptation`, and
    `loss_plan` if it has such a loss."""

    attention: str = SDPA
    chunk: int = 0  # tokens whose logits exist at once
    most_texts: int = 1  # in a packed row; 0: rows are not packed
    has_flash: bool = False  # FlashAttention for packed rows
    is_split: bool = False  # the logits are what the head makes of the decoder's output, no more

    def apply(self, model: Any) -> None:
        """Adapts a model of the same kind, perhaps with adapters."""
        model = bare(model)
        register()
        model.set_attn_implementation(self.attention)
        model.adaptation = model.loss_plan = self


def needs_no_mask(model: Any, length: int) -> bool:
    """Whether all that a row of this length needs is causal attention, no window and no chunks:
    transformers then makes no mask, as tensors without content show."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    masks = []

    def record(module, query, key, value, attention_mask, **options):
        masks.append(attention_mask)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)

    AttentionInterface.register(PROBE, record)
    AttentionMaskInterface.register(PROBE, sdpa_mask)
    model.set_attn_implementation(PROBE)
    named = [*model.named_parameters(), *model.named_buffers()]
    width = model.get_input_embeddings().weight.shape[1]
    with FakeTensorMode() as mode:
        empty: dict[str, torch.Tensor] = {name: mode.from_tensor(values) for name, values in named}
        # Only with a cache does transformers leave out a mask without looking at the positions.
        inputs = {"inputs_embeds": torch.zeros(1, length, width), "use_cache": True}
        torch.func.functional_call(model, empty, kwargs=inputs)
    return bool(masks) and all(mask is None for mask in masks)


def replace(model: Any, name: str, answers: Answers, length: int = 0) -> bool:
    """Gives a model with SDPA the attention of this name, if its `answers()` stay the same; CAUSAL
    also needs rows, of this `length`, without a mask. Otherwise all stays as it was."""
    if model.config._attn_implementation != SDPA or model.device.type == "meta":
        return False
    register()
    logs = logging.root.manager.disable
    logging.disable()  # torch logs what fails below as an error
    with pretrained.quiet(), evaluating(model):
        try:
            expected = answers()
            fits = name != CAUSAL or needs_no_mask(model, length)
            model.set_attn_implementation(name)
            fits = fits and all(map(are_close, expected, answers()))
        except Exception:  # code of a model on the Hub may raise anything
            fits = False
        if not fits:
            model.set_attn_implementation(SDPA)
    logging.disable(logs)
    model.adaptation = LossPlan(model.config._attn_implementation)
    return fits


def always_mask(model: Any, tokenizer: Any, logits: Callable[[Any], torch.Tensor]) -> bool:
    """Gives a model MASKED attention, if its logits of two tokenised texts stay the same."""
    # cuDNN, the first choice on Hopper and newer, takes half a second for each new length of rows.
    torch.backends.cuda.enable_cudnn_sdp(False)

    def answers() -> list[torch.Tensor]:
        padding = copy.deepcopy(tokenizer)  # a tokenizer that has padded is saved so that it pads
        return [logits(padding(["a b c", "a"], padding=True, return_tensors="pt"))]

    return replace(model, MASKED, answers)


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


@contextlib.contextmanager
def restored(model: Any) -> Iterator[None]:
    """A model has its own attention inside the block: for generation and export."""
    name = model.config._attn_implementation
    if name not in (CAUSAL, MASKED):
        yield
        return
    model.set_attn_implementation(SDPA)
    try:
        yield
    finally:
        model.set_attn_implementation(name)
