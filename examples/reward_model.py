"""Reward model: the chosen one of two answers gets a higher reward (Bradley-Terry).

make train ARGS="--max_steps 150 --learning_rate 1e-3"
make train ARGS="--task.data pairs.jsonl --task.model_name_or_path Qwen/Qwen3-0.6B"
"""

import ast
import os
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import datasets
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig
from transformers import RobertaTokenizer as NewTokenizer
from transformers.data import DataCollatorWithPadding

from samestep.data.plain import load_splits

UNIT = "pairs"
SIDES = ("chosen", "rejected")
load_tokenizer = cache(AutoTokenizer.from_pretrained)


@dataclass
class TaskConfig:
    data: str = ""
    """Rows {prompt, chosen, rejected}, of texts: a file (.jsonl, .csv, .parquet), a folder of such,
    or a dataset on the Hub. Empty: functions of Python's library, of whose docstrings the first
    line is preferred to all of it."""
    model_name_or_path: str = ""
    """Pretrained model, with its tokenizer; empty: a new, small Llama."""
    max_length: int = 128
    """Maximum number of tokens of a prompt with an answer; more are truncated."""


def docstring_rows() -> Iterator[dict]:
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        with tokenize.open(path) as file:
            tree = ast.parse(file.read())
        for node in ast.walk(tree):
            text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if text and "\n" in text:
                yield {"prompt": node.name, "chosen": text.split("\n")[0], "rejected": text}


def prepare_data(cfg: TaskConfig, folder: Path) -> datasets.DatasetDict:
    """Rows {chosen, rejected}: token ids of the prompt with either answer."""
    splits = load_splits(cfg.data or docstring_rows(), ["prompt", *SIDES])
    source = folder if (folder / "tokenizer.json").exists() else cfg.model_name_or_path
    if source:  # a run that resumes finds its tokenizer in the folder
        tokenizer = AutoTokenizer.from_pretrained(source)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    else:
        tokenizer = NewTokenizer().train_new_from_iterator(splits["train"]["rejected"], 1000)
    tokenizer.save_pretrained(folder)

    def encode(row: dict) -> dict:
        if row["chosen"] == row["rejected"]:
            raise ValueError(f"task.data: equal answers to {row['prompt']!r}: remove this row")
        end = tokenizer.eos_token  # its hidden state gives the reward
        texts = [f"{row['prompt']}\n{row[side]}{end}" for side in SIDES]
        ids = tokenizer(texts, truncation=True, max_length=cfg.max_length)["input_ids"]
        return dict(zip(SIDES, ids, strict=True))

    return splits.map(encode, remove_columns=["prompt"])


def collate(rows: list[dict], data) -> dict:
    """input_ids and attention_mask, int64 (B, 2, T): the chosen answer first."""
    texts = [{"input_ids": row[side]} for row in rows for side in SIDES]
    batch = DataCollatorWithPadding(load_tokenizer(data.folder))(texts)
    return {name: values.unflatten(0, (len(rows), 2)) for name, values in batch.items()}


def count(batch: dict) -> int:
    return len(batch["input_ids"])


def build_model(cfg: TaskConfig, data) -> torch.nn.Module:
    tokenizer = load_tokenizer(data.folder)
    options = {"num_labels": 1, "pad_token_id": tokenizer.pad_token_id}
    if name := cfg.model_name_or_path:
        options["dtype"] = torch.float32
        return AutoModelForSequenceClassification.from_pretrained(name, **options)
    options |= {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
    options |= {"vocab_size": len(tokenizer), "num_hidden_layers": 2}
    return AutoModelForSequenceClassification.from_config(LlamaConfig(**options))


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


def export(model, output: Path, data) -> None:
    model.save_pretrained(output)
    load_tokenizer(data.folder).save_pretrained(output)
