"""Attention within packed texts by torch's varlen_attn: `attn_implementation: varlen`.

FlashAttention without a package to build, and without a mask of (B, 1, T, T).
"""

from typing import Any

import torch

NAME = "varlen"


def text_starts(positions: torch.Tensor) -> torch.Tensor:
    """Find where texts of packed sequences begin: (1, 1, 1, texts + 1) int32, and the end.

    positions: (B, T) int64, which begin again at 0 with each text; so each token of padding is a
    text of its own. transformers hands a mask of four dimensions down to the attention as it is.
    """
    begins = positions == 0
    begins[:, 0] = True
    starts = torch.nn.functional.pad(begins.flatten().nonzero()[:, 0], (0, 1), value=begins.numel())
    return starts.int().view(1, 1, 1, -1)


def attend(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """Causal attention within each text of packed sequences: (B, heads, T, d) to (B, T, heads, d).

    Otherwise, and in fp32 or on a CPU, transformers' sdpa attention.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    others = ("sliding_window", "softcap", "s_aux", "position_bias")
    chunked = getattr(getattr(module, "config", None), "attention_chunk_size", None)
    if chunked or any(options.get(name) is not None for name in others):
        raise ValueError("task.attn_implementation: varlen is causal attention alone; take sdpa")
    if attention_mask is None or attention_mask.dtype != torch.int32:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    rows, heads, length, _ = query.shape
    starts, kind = attention_mask.flatten(), query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    if kind == "cpu" or dtype == torch.float32 or options.get("dropout"):
        places = torch.arange(rows * length, device=query.device)
        texts = torch.bucketize(places, starts, right=True).view(rows, 1, length)
        mask = (texts[..., None] == texts[:, :, None]).tril()
        return sdpa_attention_forward(module, query, key, value, mask, **options)
    # It imports torch._dynamo, which takes a second.
    from torch.nn.attention.varlen import varlen_attn

    queries, keys, values = (
        each.to(dtype).transpose(1, 2).flatten(0, 1) for each in (query, key, value)
    )
    answers = varlen_attn(
        queries,
        keys,
        values,
        starts,
        starts,
        length,  # no text is longer than a sequence
        length,
        scale=options.get("scaling"),
        window_size=(-1, 0),
        enable_gqa=heads != key.shape[1],
    )
    return answers.unflatten(0, (rows, length)), None


def register() -> None:
    """Makes the name known to transformers, with the masks of sdpa."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
