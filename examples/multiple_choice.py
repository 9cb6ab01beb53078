"""Multiple choice (SWAG, RACE): which of several endings is right; those of a row stay together.

make train ARGS="--max_steps 300 --learning_rate 1e-3"
make train ARGS="--task.data swag.jsonl --task.model_name_or_path google-bert/bert-base-uncased"
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import datasets
import torch
import torch.nn.functional as F
from transformers import AutoModelForMultipleChoice
from transformers.data.data_collator import DataCollatorForMultipleChoice

from samestep import DataConfig, ModelConfig, load_splits, map_rows, pretrained, tokenizing
from samestep.text.tokenizing import load_tokenizer

UNIT = "questions"
ENDINGS = ("ending0", "ending1", "ending2", "ending3")


@dataclass
class TaskConfig(DataConfig, ModelConfig):
    data: str = ""
    """Rows {sent1, sent2, ending0, ending1, ending2, ending3, label}, as in SWAG: a file (.jsonl,
    .csv, .parquet), a folder of such, or a dataset on the Hub. Empty: made-up sentences."""
    max_length: int = 64
    """Maximum number of tokens of the sentences with an ending; sent1 is truncated."""


def made_up_rows() -> Iterator[dict]:
    """Animals and what they do: in one of four endings both fit."""
    verbs = {"dog": "barks", "cat": "meows", "cow": "moos", "duck": "quacks", "lion": "roars"}
    draw = random.Random(0)
    for i in range(3000):
        animals, label = draw.sample([*verbs], 5), draw.randrange(4)
        pairs = list(zip(animals, animals[1:], strict=False))  # each with the verb of another
        pairs[label] = (animals[label], animals[label])
        endings = [f"the {animal} {verbs[other]}" for animal, other in pairs]
        row = {"sent1": f"It is day {i} on the farm.", "sent2": "Now", "label": label}
        yield row | dict(zip(ENDINGS, endings, strict=True))


def prepare_data(cfg: TaskConfig, folder: Path) -> datasets.DatasetDict:
    """Rows {input_ids, label}, the ids of each ending after the sentences, in a list."""
    splits = load_splits(cfg, ["sent1", "sent2", *ENDINGS, "label"], made_up=made_up_rows)
    texts = (f"{row['sent1']} {row[name]}" for row in splits["train"] for name in ENDINGS)
    tokenizer = tokenizing.plain_tokenizer(cfg, folder, texts)

    def encode(row: dict) -> dict:
        label = str(row["label"]).removesuffix(".0")  # tables have text, or numbers with nulls
        if label not in ("0", "1", "2", "3"):
            raise ValueError(f"the label {row['label']!r} is not a number of 0 to 3")
        seconds = [f"{row['sent2']} {row[name]}" for name in ENDINGS]
        firsts = [row["sent1"]] * len(ENDINGS)
        size = max(map(len, tokenizer(firsts, seconds, verbose=False)["input_ids"]))
        needed = max(map(len, tokenizer([""] * len(ENDINGS), seconds, verbose=False)["input_ids"]))
        if needed >= cfg.max_length:
            raise ValueError(f"an ending takes {needed} tokens of max_length {cfg.max_length}")
        options = {"truncation": "only_first", "max_length": cfg.max_length}
        tokens = tokenizer(firsts, seconds, **options)
        cut = {"tokens of sent1": (size - max(map(len, tokens["input_ids"])), size)}
        return {**tokens, "label": int(label), "cut": cut}

    return map_rows(splits, encode)


def collate(rows: list[dict], data) -> dict:
    """input_ids, attention_mask and others, int64 (B, 4, T), and labels, int64 (B,)."""
    return DataCollatorForMultipleChoice(load_tokenizer(data.folder))(rows)


def count(batch: dict) -> int:
    return len(batch["labels"])


def build_model(cfg: TaskConfig, data) -> torch.nn.Module:
    head, config = ("classifier", "pooler", "summary"), pretrained.small_bert(data.folder)
    return pretrained.build_model(AutoModelForMultipleChoice, cfg, config, head)


def scores(model: torch.nn.Module, batch: dict) -> torch.Tensor:
    """Logits of the endings, float32 (B, 4)."""
    inputs = {name: values for name, values in batch.items() if name != "labels"}
    return model(**inputs).logits.float()


def loss_sum(model: torch.nn.Module, batch: dict) -> torch.Tensor:
    """Cross entropy of the right endings, in nats."""
    return F.cross_entropy(scores(model, batch), batch["labels"], reduction="sum")


def eval_sums(model: torch.nn.Module, batch: dict) -> dict:
    logits, labels = scores(model, batch), batch["labels"]
    loss = F.cross_entropy(logits, labels, reduction="sum")
    right = (logits.argmax(1) == labels).sum()
    return {"loss": loss, "accuracy": right, "rows": torch.tensor(len(labels))}


def metrics(sums: dict) -> dict:
    return {name: float(sums[name] / sums["rows"]) for name in ("loss", "accuracy")}


export = pretrained.export  # the model, with what prepare_data has saved
