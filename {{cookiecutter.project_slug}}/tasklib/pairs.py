"""Pairs of a source and a target text: read, checked, split, tokenised; targets generated."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from tasklib import sources
from tasklib.messages import one_line
from tasklib.sources import DataConfig
from tasklib.tables import TABLES, Columns, Row

BLOCK = 1000  # texts in one call of a tokenizer, which bounds its memory


def read_pairs(
    cfg: DataConfig, columns: Columns, shipped: Iterable[Row] | None
) -> tuple[list[Row], list[Row]]:
    """Training and validation rows, each with a source and a target text.

    `columns`: those of "source" and "target". `shipped`: the rows, if cfg.data names data that the
    task brings along. Raises ValueError for rows that cannot be used.
    """
    train, validation = sources.read_splits(cfg, columns, TABLES, shipped)
    field = "validation_data" if cfg.validation_data else "validation_split"
    train = sources.keep_valid_rows(train, cfg, "data", check_pair)
    validation = validation and sources.keep_valid_rows(validation, cfg, field, check_pair)
    if not train or validation == []:
        empty = field if train else "data"
        raise ValueError(f"task.{empty}: there are no rows in {one_line(getattr(cfg, empty), 100)}")
    if validation is None:  # rows with equal sources stay together
        train, validation = sources.hold_out(
            train, cfg.validation_fraction, lambda row: row[0]["source"]
        )
    else:
        keys = ([(row["source"], row["target"]) for row, _ in part] for part in (train, validation))
        sources.warn_of_overlap(*keys)
    data = one_line(cfg.data, 100)
    if not validation:
        raise ValueError(f"task.data: all sources of {data} are equal; add others")
    size = f"{len(train):,} rows of {data} to train and {len(validation):,} to evaluate on"
    print(f"Preparing data: {size}", flush=True)
    return train, validation


def check_pair(row: dict) -> None:
    """Raises ValueError for a row whose source or target is missing, empty, or not text."""
    for role, value in row.items():
        if value is None or value != value or not str(value).strip():  # tables have NaN for null
            raise sources.IncompleteRow(f"the {role} is empty")
        if not isinstance(value, str):
            raise ValueError(f"the {role} is {one_line(repr(value), 60)} but must be text")


def tokenize_texts(
    texts: list[str], role: str, limit: int, tokenizer: Any
) -> tuple[list[np.ndarray], str]:
    """Token ids of sources or targets, int32, and a description of their lengths.

    A text of more than `limit` tokens loses its end, but not the special tokens after it.
    """
    name = {"source": "text", "target": "text_target"}[role]  # some tokenizers tell them apart
    rows, cut = [], 0
    for start in range(0, len(texts), BLOCK):
        block = texts[start : start + BLOCK]
        encoded = tokenizer(**{name: block}, verbose=False).input_ids
        for each, ids in zip(block, encoded, strict=True):
            if len(ids) > limit:
                ids = tokenizer(**{name: each}, truncation=True, max_length=limit).input_ids
                cut += 1
            rows.append(np.array(ids, np.int32))
    lengths = [len(ids) for ids in rows]
    size = f"{role}s of {np.mean(lengths):.0f} tokens on average, {max(lengths):,} at most"
    return rows, size + f" ({cut:,} cut to {limit:,})" * bool(cut)


@torch.no_grad()
def generate_texts(model: Any, batches: Iterable[dict], tokenizer: Any) -> list[str]:
    """The text that the model generates for each row, by the search of its generation_config.

    A batch has input_ids and attention_mask, int64 (B, T).
    """
    texts: list[str] = []
    for batch in batches:
        inputs = {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")}
        # Sampling would use up the random numbers of the run.
        tokens = model.generate(**inputs, do_sample=False)
        texts += tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return texts
