"""Reward model: the chosen one of two answers gets a higher reward (Bradley-Terry).

make train ARGS="--max_steps 100 --learning_rate 1e-3 --warmup_steps 20"
make train ARGS="--task.data pairs.jsonl --task.model_name_or_path Qwen/Qwen3-0.6B"
"""

from dataclasses import dataclass
from pathlib import Path

import datasets
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification, LlamaConfig
from transformers.data import DataCollatorWithPadding

from samestep import DataConfig, ModelConfig, preferences, pretrained, tokenizing
from samestep.text.tokenizing import load_tokenizer

UNIT = "pairs"


@dataclass
class TaskConfig(DataConfig, ModelConfig):
    data: str = "docstrings"
    """Rows {prompt, chosen, rejected}, of texts or messages; without prompt it is what both answers
    begin with: a file (.jsonl, .csv, .parquet), a folder of such, or a dataset on the Hub.
    docstrings: functions of Python's library, whose first line is preferred to all of it."""
    prompt_column: str = "prompt"
    chosen_column: str = "chosen"
    rejected_column: str = "rejected"
    tools_column: str = "tools"
    chat_template: str = ""
    """A file with a Jinja template for messages; empty: the tokenizer's own, or a plain one."""
    max_length: int = 128
    """Maximum number of tokens of a prompt with an answer: a long prompt loses its beginning."""
    vocab_size: int = 1024
    """Size of the vocabulary of a new tokenizer."""


def prepare_data(cfg: TaskConfig, folder: Path) -> datasets.DatasetDict:
    """Rows {chosen, rejected}: token ids of the prompt with either answer."""
    pairs = preferences.load_pairs(cfg)
    tokenizer = tokenizing.prepare_tokenizer(cfg, folder, pairs["train"], "max_length", ends=True)
    tokens = preferences.tokenize_pairs(pairs, tokenizer, cfg)
    return tokens.rename_columns({f"{side}_input_ids": side for side in preferences.ANSWERS})


def collate(rows: list[dict], data) -> dict:
    """input_ids and attention_mask, int64 (B, 2, T): the chosen answer first."""
    texts = [{"input_ids": row[side]} for row in rows for side in preferences.ANSWERS]
    batch = DataCollatorWithPadding(load_tokenizer(data.folder))(texts)
    return {name: values.unflatten(0, (len(rows), 2)) for name, values in batch.items()}


def count(batch: dict) -> int:
    return len(batch["input_ids"])


def build_model(cfg: TaskConfig, data) -> torch.nn.Module:
    tokenizer, head = load_tokenizer(data.folder), ("score", "classifier", "pooler")
    options = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
    config = LlamaConfig(**options, vocab_size=len(tokenizer), num_hidden_layers=2)
    given = (AutoModelForSequenceClassification, cfg, config, ["reward"], head)
    return pretrained.build_classifier(*given, pad_token_id=tokenizer.pad_token_id)


def margins(model: torch.nn.Module, batch: dict) -> torch.Tensor:
    """How much more reward the chosen answer gets, float32 (B,)."""
    inputs = {name: values.flatten(0, 1) for name, values in batch.items()}
    rewards = model(**inputs, use_cache=False).logits.float().view(-1, 2)
    return rewards[:, 0] - rewards[:, 1]


def loss_sum(model: torch.nn.Module, batch: dict) -> torch.Tensor:
    """The negative log-likelihood of the preferences, in nats."""
    return -F.logsigmoid(margins(model, batch)).sum()


def eval_sums(model: torch.nn.Module, batch: dict) -> dict:
    margin = margins(model, batch)
    sums = {"loss": -F.logsigmoid(margin).sum(), "accuracy": (margin > 0).sum()}
    return sums | {"margin": margin.sum(), "pairs": torch.tensor(len(margin))}


def metrics(sums: dict) -> dict:
    return {name: float(sums[name] / sums["pairs"]) for name in ("loss", "accuracy", "margin")}


export = pretrained.export  # the model, with what prepare_data has saved
