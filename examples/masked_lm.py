"""Masked language model (BERT, RoBERTa, ModernBERT): masks belong to the sample and the epoch.

make train ARGS="--max_steps 480 --learning_rate 4e-3"
make train ARGS="--task.data texts.jsonl --task.model_name_or_path FacebookAI/roberta-base"
"""

from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import datasets
import torch
import torch.nn.functional as F
from transformers import AutoModelForMaskedLM, ModernBertConfig
from transformers.data import DataCollatorForTokenClassification

from samestep import DataConfig, ModelConfig, load_splits, map_rows, pretrained, tokenizing

UNIT = "masked_tokens"


@dataclass
class TaskConfig(DataConfig, ModelConfig):
    data: str = ""
    """Rows {text}: a file (.jsonl, .csv, .parquet, .txt), a folder of such, or a dataset on the
    Hub. Empty: the manual inside Python."""
    max_length: int = 64
    """Maximum number of tokens in a sample; a longer text becomes several."""
    mask_fraction: float = 0.15
    """Fraction of the tokens to predict: 80 % become the mask token, 10 % another token."""


def prepare_data(cfg: TaskConfig, folder: Path) -> datasets.DatasetDict:
    """Rows {input_ids}; those for validation are masked already, by the number of the row."""
    texts = dict.fromkeys(part for text in topics.values() for part in text.split("\n\n\n"))
    splits = load_splits(cfg, ["text"], made_up=lambda: [{"text": text} for text in texts if text])
    tokenizer = tokenizing.plain_tokenizer(cfg, folder, splits["train"]["text"])
    options = {"truncation": True, "max_length": cfg.max_length, "return_overflowing_tokens": True}

    def encode(row: dict) -> list[dict]:
        return [{"input_ids": ids} for ids in tokenizer(row["text"], **options)["input_ids"]]

    tokens = map_rows(splits, encode)
    hide = lambda row, i: mask(row, torch.Generator().manual_seed(i), cfg, tokenizer)  # noqa: E731
    tokens["validation"] = tokens["validation"].map(hide, with_indices=True)
    return tokens


def mask(row: dict, generator: torch.Generator, cfg: TaskConfig, tokenizer) -> dict:
    """The row with `labels`, -100 where a token is not to be predicted."""
    ids = torch.tensor(row["input_ids"])
    special = torch.isin(ids, torch.tensor(tokenizer.all_special_ids))
    chosen = (torch.rand(len(ids), generator=generator) < cfg.mask_fraction) & ~special
    kind = torch.rand(len(ids), generator=generator)
    others = torch.randint(len(tokenizer), ids.shape, generator=generator)
    masked = ids.masked_fill(chosen & (kind < 0.8), tokenizer.mask_token_id)
    masked = others.where(chosen & (kind >= 0.9), masked)
    return {"input_ids": masked.tolist(), "labels": ids.masked_fill(~chosen, -100).tolist()}


def augment(row: dict, generator: torch.Generator, cfg: TaskConfig, data) -> dict:
    return mask(row, generator, cfg, tokenizing.load_tokenizer(data.folder))


def collate(rows: list[dict], data) -> dict:
    """input_ids, attention_mask and labels, int64 (B, T); labels of padding are -100."""
    return DataCollatorForTokenClassification(tokenizing.load_tokenizer(data.folder))(rows)


def count(batch: dict) -> int:
    return int((batch["labels"] != -100).sum())


def build_model(cfg: TaskConfig, data) -> torch.nn.Module:
    tokenizer = tokenizing.load_tokenizer(data.folder)
    options = {f"{n}_id": getattr(tokenizer, f"{n}_id") for n in tokenizer.special_tokens_map}
    options |= {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4}
    options |= {"num_hidden_layers": 2, "vocab_size": len(tokenizer)}
    return pretrained.build_model(AutoModelForMaskedLM, cfg, ModernBertConfig(**options))


def loss_sum(model: torch.nn.Module, batch: dict) -> torch.Tensor:
    """Cross entropy of the chosen tokens, in nats."""
    logits = model(batch["input_ids"], batch["attention_mask"]).logits.float()
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def eval_sums(model: torch.nn.Module, batch: dict) -> dict:
    return {"loss": loss_sum(model, batch), "tokens": (batch["labels"] != -100).sum()}


def metrics(sums: dict) -> dict:
    return {"loss": float(sums["loss"] / sums["tokens"])}


export = pretrained.export  # the model, with what prepare_data has saved
