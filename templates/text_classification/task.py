"""What is trained: a model that gives a text, or a pair of texts, a class, labels or a number.

train.py calls these functions; docs/task.md says what each gets and returns. One that names `data`
gets what prepare_data returned, loaded from its folder, data.folder.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import datasets
import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field

from samestep.base.fields import MODEL
from samestep.data import labels
from samestep.data.sources import DataConfig
from samestep.models import classification, pretrained
from samestep.models.pretrained import ModelConfig
from samestep.text import labelled, tokenizing

# transformers takes 4 s to import: it waits for the functions that need it.

Batch = dict[str, torch.Tensor]
HEAD = ("classifier", "score", "pooler", "head")  # weights that a model to start from may lack

Length = Annotated[int, Field(ge=3, le=2**20)]  # a token between two special ones
Vocabulary = Annotated[int, Field(ge=260, le=2**20)]  # 256 bytes, special tokens
Size = Annotated[int, Field(ge=1, le=65_536)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


# ---- Config --------------------------------------------------------------------------------------


@dataclass
class TaskConfig(DataConfig, ModelConfig):
    data: str = "stdlib"
    """Rows to train on: stdlib (functions of Python's library, by their area), a .jsonl, .json,
    .csv, .tsv or .parquet file, also compressed (.gz), a folder of such files, a folder of .txt
    files in one folder for each class, or a dataset on the Hub. Several with their weights:
    a.jsonl:2,b.jsonl:1."""
    text_column: str = "text"
    """Column of the text."""
    text_pair_column: str = ""
    """Column of a second text, for pairs such as premise and hypothesis, or question and answer;
    empty: a row has one text."""
    label_column: str = "label"
    """Column of the label, text or number. Several labels are a list, or text with ; between."""
    problem_type: Literal[
        "single_label_classification", "multi_label_classification", "regression"
    ] = "single_label_classification"
    """What a text has: one class, any number of labels, or a number. The loss of a number is the
    squared error in standard deviations; mae and rmse are in the unit of the numbers."""
    class_weights: Literal["none", "balanced"] = "none"
    """Weight of a row's loss in training. balanced: inverse to the frequency of its class, with
    mean 1, so that rare classes count as much as frequent ones."""
    max_length: Length = 256
    """Maximum number of tokens of a row; of a longer pair the longer text is truncated."""
    token_dropout: Fraction = field(default=0.0, metadata=MODEL)
    """Share of its tokens that a text loses in training, other ones in each epoch, so that the
    answer does not depend on a few names. The first, the last and separators stay."""
    vocab_size: Vocabulary = 8192
    """New model: size of its byte-level BPE vocabulary, trained on the training texts."""
    hidden_size: Size = field(default=128, metadata=MODEL)
    """New model: its width, a multiple of 2 x num_heads."""
    num_layers: Size = field(default=1, metadata=MODEL)
    """New model: transformer layers. With few texts, more layers do not help."""
    num_heads: Size = field(default=4, metadata=MODEL)
    """New model: attention heads in a layer."""
    dropout: Fraction = field(default=0.2, metadata=MODEL)
    """New model: dropout on embeddings, attention weights, layers, and before the classifier."""


check_config = labelled.check_config  # fields that do not fit each other


# ---- Data ----------------------------------------------------------------------------------------


def prepare_data(cfg: TaskConfig, folder: Path) -> datasets.DatasetDict:
    """Token ids of the rows, `labels` as numbers, and the `weight` of each row in the loss."""
    rows = labelled.read_rows(cfg, folder)
    how = {"ends": True, "needs": ["pad_token"]}
    tokenizer = tokenizing.prepare_tokenizer(cfg, folder, rows["train"], "max_length", **how)
    labelled.check_tokenizer(tokenizer, cfg)
    texts = [name for name in ("text", "text_pair") if name in rows["train"].column_names]
    tokens = rows.map(
        tokenize,
        fn_kwargs={"cfg": cfg, "tokenizer": tokenizer, "known": labels.read(folder)},
        batched=True,
        remove_columns=[*texts, "label", "place"],
        num_proc=cfg.num_proc(rows["train"].data.nbytes // 10**6),
    )
    tokenizing.say_lengths(tokens, {"input_ids": cfg.max_length})
    if cfg.class_weights == "balanced":
        tokens["train"] = labels.balance(tokens["train"])
    return tokens


def tokenize(batch: dict, cfg: TaskConfig, tokenizer: Any, known: dict) -> dict[str, list]:
    """input_ids of texts, or of pairs of texts, which may have token_type_ids too; and labels."""
    texts = [batch[name] for name in ("text", "text_pair") if name in batch]
    options = {"truncation": True, "max_length": cfg.max_length}
    found = tokenizer(*texts, return_attention_mask=False, **options)
    return {**found, **labels.encode(batch["label"], known)}


def views(cfg: TaskConfig, data: Any) -> tuple[Any, Any]:
    """Rows {input_ids, labels, weight}; of pairs also token_type_ids."""
    return labelled.view(data["train"], cfg), labelled.view(data["validation"], cfg)


def augment(row: dict, generator: torch.Generator, cfg: TaskConfig, data: Any) -> dict:
    """The row without some of its tokens; the first, the last and special ones stay."""
    if not cfg.token_dropout:
        return row
    ids = row["input_ids"]
    kept = (torch.rand(len(ids), generator=generator) >= cfg.token_dropout).numpy()
    kept[[0, -1]] = True
    kept |= np.isin(ids, tokenizing.load_tokenizer(data.folder).all_special_ids)
    return row | {name: row[name][kept] for name in ("input_ids", "token_type_ids") if name in row}


def collate(rows: list[dict], data: Any) -> Batch:
    """input_ids and attention_mask, int64 (B, T), with labels and weight, (B, ...); T is the length
    of the longest row.

    labels are classes, int64 (B,); or 0 and 1, float32 (B, C); or numbers in standard deviations
    from their mean, float32 (B,). Pairs may have token_type_ids, (B, T), too.
    """
    from transformers import DataCollatorWithPadding

    return DataCollatorWithPadding(tokenizing.load_tokenizer(data.folder))(rows)


def count(batch: Batch) -> int:
    return len(batch["labels"])


# ---- Model and loss ------------------------------------------------------------------------------


def build_model(cfg: TaskConfig, data: Any) -> torch.nn.Module:
    """A model to start from, with new weights for other classes than its own, or a ModernBERT."""
    from transformers import AutoModelForSequenceClassification, ModernBertConfig

    tokenizer = tokenizing.load_tokenizer(data.folder)
    names = labels.read(data.folder).get("names") or [cfg.label_column]
    config = ModernBertConfig(  # of a new model
        vocab_size=len(tokenizer),
        hidden_size=cfg.hidden_size,
        intermediate_size=2 * cfg.hidden_size,
        num_hidden_layers=cfg.num_layers,
        num_attention_heads=cfg.num_heads,
        layer_types=["full_attention"] * cfg.num_layers,
        max_position_embeddings=cfg.max_length,
        embedding_dropout=cfg.dropout,
        attention_dropout=cfg.dropout,
        mlp_dropout=cfg.dropout,
        classifier_dropout=cfg.dropout,
        classifier_pooling="mean",
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        cls_token_id=None,
        sep_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    settings = {"problem_type": cfg.problem_type, "pad_token_id": tokenizer.pad_token_id}
    auto: Any = AutoModelForSequenceClassification
    model = pretrained.build_classifier(auto, cfg, config, names, HEAD, **settings)
    labelled.finish_model(model, cfg, data)
    return model


def logits_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """float32 (B, C); of numbers (B, 1), in standard deviations from their mean."""
    names = ("input_ids", "attention_mask", "token_type_ids")
    return model(**{name: batch[name] for name in names if name in batch}).logits.float()


def row_losses(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The weighted loss of each row, (B,): cross entropy in nats; its mean over several labels; or
    the squared error."""
    answers = batch["labels"]
    if not answers.is_floating_point():
        losses = F.cross_entropy(logits, answers, reduction="none")
    elif answers.ndim == 2:
        losses = F.binary_cross_entropy_with_logits(logits, answers, reduction="none").mean(1)
    else:
        losses = (logits[:, 0] - answers).square()
    return losses * batch["weight"]


def loss_sum(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The weighted losses of the rows, each of which is one term."""
    return row_losses(logits_of(model, batch), batch).sum()


# ---- Evaluation and export -----------------------------------------------------------------------


@torch.no_grad()
def eval_sums(model: torch.nn.Module, batch: Batch) -> Batch:
    """The loss, the rows, and the table of count_answers; of numbers, terms of their errors."""
    logits, answers = logits_of(model, batch), batch["labels"]
    sums = {"loss": row_losses(logits, batch).sum(), "rows": torch.ones_like(batch["weight"]).sum()}
    if answers.is_floating_point() and answers.ndim == 1:
        sums["error"] = (logits[:, 0] - answers).abs().sum()
        return sums | {"numbers": answers.sum(), "squares": answers.square().sum()}
    return sums | {"table": classification.count_answers(logits, answers)}


def metrics(sums: Batch, data: Any) -> dict[str, float]:
    """The mean loss of a row, and scores; mae and rmse are in the unit of the numbers."""
    return {"loss": float(sums["loss"] / sums["rows"]), **labelled.scores(sums, data)}


def report(model: Any, sums: Batch, output: Path, cfg: TaskConfig, data: Any) -> dict:
    """The scores of each class and a picture of the confusion."""
    names = [*model.config.id2label.values()]
    return classification.report_table(sums["table"], names, output) if "table" in sums else {}


test_inputs = labelled.test_inputs  # that the check of the export gives to both models


def export(model: Any, output: Path, cfg: TaskConfig, data: Any) -> None:
    """Saves files that AutoModelForSequenceClassification and AutoTokenizer load."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(data.folder)
    tokenizer.model_max_length = cfg.max_length
    with pretrained.quiet():
        model.save_pretrained(output)
        tokenizer.save_pretrained(output)
