"""The screen of --check: a row and a batch, as the task makes them."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from samestep.base.console import one_line
from samestep.step.samples import collate

WIDTH, MOST = 120, 6  # characters of a line; entries of a row or of a batch
TOKENS = ("input_ids", "labels")  # ends of the names of token ids


def tokenizer_of(data: Any) -> Any:
    """The tokenizer of prepared data; None: it has none."""
    folder, found = getattr(data, "folder", None), None
    if folder and (Path(folder) / "tokenizer_config.json").exists():
        from transformers import AutoTokenizer  # 2 s

        with contextlib.suppress(OSError, ValueError):  # the files are of another kind
            found = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return found


def describe_samples(samples: list[tuple], task: Any, data: Any) -> list[str]:
    """Lines about the last of these training samples, decoded if the data has a tokenizer, and
    about the batch that the task makes of all."""
    number, row = samples[-1]
    tokenizer = tokenizer_of(data)
    batch, items, *_ = collate(task, samples)
    count = f"{items:,} {getattr(task, 'UNIT', 'items').replace('_', ' ')} in the loss"
    return [
        f"row {number} to train on:",
        *_describe_entries(row, tokenizer),
        f"a batch of {len(samples)} rows:",
        *_describe_entries(batch, None),
        f"  {count}; a run prints the loss per item",
    ]


def _describe_entries(value: Any, tokenizer: Any) -> list[str]:
    """A line for each entry of a row or batch, or for one that is no dict."""
    entries = [*value.items()] if isinstance(value, Mapping) else [("row", value)]
    lines = []
    for name, each in entries[:MOST]:
        shown = _describe_value(each, tokenizer if str(name).endswith(TOKENS) else None)
        lines.append(f"  {one_line(f'{name}: {shown}', WIDTH)}")
    if len(entries) > MOST:
        lines.append(f"  and {len(entries) - MOST} more")
    return lines


def _describe_value(value: Any, tokenizer: Any) -> str:
    """The type and shape of numbers, and the text of token ids; any other value as it is."""
    if isinstance(value, torch.Tensor | np.ndarray | list | tuple):
        with contextlib.suppress(ValueError, TypeError):  # lists of several lengths; bfloat16
            array = np.asarray(value)
            if array.ndim and array.dtype.kind in "biuf":
                shown = f"{array.dtype} {array.shape}"
                if tokenizer and array.ndim == 1 and array.dtype.kind in "iu":
                    shown += f" {tokenizer.decode(array[array >= 0].tolist())!r}"
                return shown
    return str(value)
