"""Pairs of a source and a target text: read, checked, split, tokenised; targets generated."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from samestep.base.console import one_line
from samestep.data.cache import once_per_folder
from samestep.data.sources import require_texts
from samestep.data.tables import TABLES, Columns, Row
from samestep.text import row_files, tokenizing, units
from samestep.text.units import RowKind

PAD, END = "<pad>", "</s>"  # special tokens of a new vocabulary; T5 starts targets with PAD
# The columns of tokens; some tokenizers tell sources and targets apart by the name of the argument.
TOKENS = {"source": ("input_ids", "text"), "target": ("labels", "text_target")}


def build(cfg: Any, folder: Path, columns: Columns, shipped: dict) -> dict[str, Any]:
    """Fills the folder of prepared data, or goes on filling it; what `cache.prepare` wants.

    `columns`: those of "source" and "target". Validation rows keep their texts, as bytes, which the
    report compares with generated ones. Raises ValueError for rows that cannot be used.
    """
    kind = RowKind(
        TABLES,
        lambda _: columns,
        require_texts,
        key=lambda row: "\0".join(row.values()),
        texts=dict.values,
        nothing_held="all sources of {data} are equal; add others",
        shipped=shipped,
        group=lambda row: row["source"],
    )
    inputs, held = units.scan(cfg, folder, kind)
    units.learn_vocabulary(cfg, folder, inputs, held, first=[PAD, END], end=END)
    tokenizer = load_tokenizer(cfg, folder)
    dtype = row_files.token_dtype(tokenizer)
    limits = {"source": cfg.max_source_length, "target": cfg.max_target_length}

    def encode(rows: list[Row], part: str) -> tuple[row_files.Arrays, dict[str, int]]:
        arrays: row_files.Arrays = {}
        cut: dict[str, int] = {}
        for role, (name, argument) in TOKENS.items():
            prefix = cfg.source_prefix if role == "source" else ""
            texts = {argument: [prefix + row[role] for row, _ in rows]}
            found, cut[name] = row_files.encode_texts(texts, tokenizer, limits[role])
            arrays[name] = [ids.astype(dtype) for ids in found["input_ids"]]
            if part == "validation":
                arrays[role] = [np.frombuffer(row[role].encode(), np.uint8) for row, _ in rows]
        lengths = zip(arrays["input_ids"], arrays["labels"], strict=True)
        arrays["length"] = np.array([sum(map(len, both)) for both in lengths], np.int32)
        return arrays, cut

    names = {name: (f"{role}s", limits[role]) for role, (name, _) in TOKENS.items()}
    return row_files.write(folder, inputs, held, encode, names)


def check_model(cfg: Any) -> None:
    """Raises ValueError unless a pretrained model is an encoder-decoder that sees all the text."""
    tokenizing.check_lengths(cfg, "max_source_length", "max_target_length")
    config = tokenizing.config_of(cfg)
    if config and not getattr(config, "is_encoder_decoder", False):
        name = one_line(cfg.model_name_or_path, 100)
        raise ValueError(f"task.model_name_or_path: {name} is not an encoder-decoder; give another")


@once_per_folder
def load_tokenizer(cfg: Any, folder: Path) -> Any:
    """The tokenizer of the pretrained model, or the one in the folder of prepared data."""
    names = ["input_ids", "attention_mask"]
    ends = {"pad_token": PAD, "eos_token": END, "model_input_names": names}
    tokenizer = tokenizing.load_tokenizer(cfg, folder, ("eos_token",), **ends)
    tokenizer.model_max_length = cfg.max_source_length  # samestep predict cuts sources there
    return tokenizer


def test_inputs(rows: list[dict], cfg: Any, data: Path) -> list[tuple[str, dict]]:
    """For the check of the export: the sources of rows, each with its tokens."""
    tokenizer = load_tokenizer(cfg, data)
    sources = [cfg.source_prefix + row["source"].tobytes().decode() for row in rows]
    return [(each, {"input_ids": [tokenizer(each, truncation=True).input_ids]}) for each in sources]


def set_generation(model: Any, cfg: Any) -> None:
    """Writes the search of cfg and the prefix of sources into the configs of the exported model."""
    model.config.source_prefix = cfg.source_prefix  # for samestep predict
    settings = model.generation_config
    settings.update(num_beams=cfg.num_beams, max_new_tokens=cfg.max_target_length, max_length=None)
    if cfg.num_beams == 1:  # transformers does not save settings of a search that is not used
        settings.update(early_stopping=None, length_penalty=None)


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
