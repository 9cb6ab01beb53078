"""A task for tests in plain `datasets` and transformers, as its owner would write it."""

from dataclasses import dataclass, field
from pathlib import Path

import datasets
import torch.nn.functional as F
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

MODEL = {"shapes_data": False}


@dataclass
class TaskConfig:
    data: str = "texts.jsonl"
    """A .jsonl file with a column `text`."""
    length: int = 32
    """Tokens of a text at most."""
    lower: str = "auto"
    """Whether texts are in lower case; auto: yes."""
    side: str = "right"
    """Of the padding."""
    dropout: float = field(default=0.0, metadata=MODEL)
    """On the attention weights."""
    cache_dir: str = ".cache/data"
    """Prepared data."""


def clean(text: str) -> str:
    return text.lower()


def prepare_data(cfg, folder: Path) -> datasets.DatasetDict:
    if cfg.lower == "auto":
        cfg.lower = "yes"
    rows = datasets.load_dataset("json", data_files=cfg.data, split="train")
    rows = rows.map(lambda row: {"text": clean(row["text"])})
    splits = rows.train_test_split(0.25)
    if not (folder / "tokenizer.json").exists():
        bpe = ByteLevelBPETokenizer()
        bpe.train_from_iterator(
            splits["train"]["text"], 300, special_tokens=["</s>"], show_progress=False
        )
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=bpe._tokenizer,
            eos_token="</s>",
            pad_token="</s>",
            padding_side=cfg.side,
        )
        tokenizer.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenize = lambda batch: tokenizer(batch["text"], truncation=True, max_length=cfg.length)  # noqa: E731
    splits = splits.map(tokenize, batched=True, remove_columns=["text"], num_proc=2)
    return datasets.DatasetDict(train=splits["train"], validation=splits["test"])


def collate(rows, data):
    return DataCollatorForLanguageModeling(AutoTokenizer.from_pretrained(data.folder), mlm=False)(
        rows
    )


def count(batch):
    return int((batch["labels"][:, 1:] != -100).sum())


def build_model(cfg, data):
    tokenizer = AutoTokenizer.from_pretrained(data.folder)
    return AutoModelForCausalLM.from_config(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=cfg.length, attention_dropout=cfg.dropout,
    ))  # fmt: skip


def loss_sum(model, batch):
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    logits = model(**inputs, use_cache=False).logits.float()
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
    )


def eval_sums(model, batch):
    return {"loss": loss_sum(model, batch), "tokens": (batch["labels"][:, 1:] != -100).sum()}


def metrics(sums):
    return {"loss": float(sums["loss"] / sums["tokens"])}


def export(model, output, data):
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(data.folder).save_pretrained(output)
