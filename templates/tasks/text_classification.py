"""What is trained: a model that gives a text, or a pair of texts, a class, labels or a number.

train.py calls these functions. samestep/settings/contract.py says what each gets and returns:

    prepare_data(cfg)                     what happens once, before training: download, tokenise
    views(cfg, data)                      (train, validation)
    collate(rows)  count(batch)           a batch of rows; the number of its items in the loss
    build_model(cfg, data)                the model
    loss_sum(model, batch)                the loss, summed over the terms
    eval_sums(model, batch)  metrics(sums)   what evaluation adds up; the numbers from it
    export(model, output, cfg, data)      saves the trained model

and, if they are there: identity, augment, report, test_inputs.
`data` is what prepare_data returned: here, the folder of the prepared data. A whole task around
a plain nn.Module: python -m samestep example plain_module
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field

from samestep.base import fields
from samestep.base.fields import SHAPE, Dropout, Heads, Layers, Width
from samestep.data import cache, demo_data, labels
from samestep.data.labels import MULTI, SINGLE
from samestep.data.sources import DataConfig, check_data_config, split_data
from samestep.models import classification, pretrained
from samestep.models.attention import always_mask
from samestep.models.pretrained import ModelConfig
from samestep.streaming.streaming import StreamFields
from samestep.streaming.text_streams import StreamedTexts, check_text_streaming, prepare_index
from samestep.text import text_data
from samestep.text.row_files import RowFiles

# transformers takes 4 s to import: it waits for the functions that need it.

Batch = dict[str, torch.Tensor]
test_inputs = text_data.test_inputs  # that the check of the export asks
TOKENS = ("input_ids", "token_type_ids")  # columns with a value for each token
HEAD = ("classifier", "score", "pooler", "head")  # weights that a model to start from may lack

TextLength = Annotated[int, Field(ge=3, le=2**20)]  # a token between two special ones
EncoderVocabulary = Annotated[int, Field(ge=260, le=2**20)]  # 256 bytes, special tokens


# ---- Config --------------------------------------------------------------------------------------


@dataclass
class TaskConfig(DataConfig, StreamFields, ModelConfig):
    data: str | list[dict[str, int | str]] = "stdlib"
    """Rows to train on: stdlib (functions of Python's library, by their area), a .jsonl, .json,
    .csv, .tsv or .parquet file, also compressed (.gz, .zst), a folder of such files, a folder of
    .txt files in one folder for each class, or a data set on the Hub. Several with their weights:
    a.jsonl:2,b.jsonl:1, or a list of {path: a.jsonl, weight: 2}."""
    text_column: str = "text"
    """Column of the text."""
    text_pair_column: str = ""
    """Column of a second text, for pairs such as premise and hypothesis, or question and answer;
    empty: a row has one text."""
    label_column: str = "label"
    """Column of the label, text or number. Several labels are a list, or text with ; between."""
    label_columns: str = ""
    """multi_label_classification: columns of 0 and 1, one for each label, in place of label_column;
    their names with commas between: toxic,insult,threat."""
    problem_type: Literal[
        "single_label_classification", "multi_label_classification", "regression"
    ] = "single_label_classification"
    """What a text has: one class, any number of labels, or a number. The loss of a number is the
    squared error in standard deviations; mae and rmse are in the unit of the numbers."""
    class_weights: Literal["none", "balanced"] = "none"
    """Weight of a row's loss in training. balanced: inverse to the frequency of its class, with
    mean 1, so that rare classes count as much as frequent ones."""
    max_length: TextLength = 256
    """Most tokens of a row. Longer texts lose their end; of a pair, the longer text does."""
    token_dropout: Dropout = 0.0
    """Share of its tokens that a text loses in training, other ones in each epoch, so that the
    answer does not depend on a few names. The first, the last and separators stay."""
    vocab_size: EncoderVocabulary = field(default=8192, metadata=SHAPE)
    """New model: size of its byte-level BPE vocabulary, learnt from the training texts."""
    hidden_size: Width = field(default=128, metadata=SHAPE)
    """New model: its width, a multiple of 2 x num_heads."""
    num_layers: Layers = field(default=1, metadata=SHAPE)
    """New model: transformer layers. With few texts, more layers do not help."""
    num_heads: Heads = 4
    """New model: attention heads in a layer."""
    dropout: Dropout = 0.2
    """New model: dropout on embeddings, attention weights, layers, and before the classifier."""


def check_config(cfg: TaskConfig) -> None:
    """Raises ValueError for fields that exclude each other, before anything is read."""
    check_data_config(cfg, ["stdlib"])
    check_text_streaming(cfg, ["stdlib"])
    data = {each.data for each in split_data(cfg.data)}
    single, stdlib = cfg.problem_type == SINGLE, "stdlib" in data
    columns = labels.split_names(cfg.label_columns)
    distinct = len({*columns} - {""}) == len(columns) > 1
    shortest = 6 if cfg.text_pair_column else 3
    other_column = not cfg.text_pair_column or cfg.text_pair_column != cfg.text_column
    unless = "unless task.problem_type is"
    rules = [
        ("problem_type", single or not stdlib, f"{SINGLE} for task.data stdlib"),
        ("class_weights", single or cfg.class_weights == "none", f"none, {unless} {SINGLE}"),
        ("label_columns", cfg.problem_type == MULTI or not columns, f"empty, {unless} {MULTI}"),
        ("label_columns", distinct or not columns, "names with commas between them, two or more"),
        ("max_length", cfg.max_length >= shortest, f"at least {shortest}, with special tokens"),
        ("text_pair_column", other_column, "another column than task.text_column"),
    ]
    fields.check_fields(cfg, rules)
    if not cfg.model_name_or_path:
        # Rotary embeddings rotate pairs of dimensions.
        fields.check_width(cfg, 2 * cfg.num_heads, "2 x num_heads")
    names = "text_column text_pair_column label_column"
    fixed = (names, data != {"stdlib"}, "where task.data is stdlib")
    beside = ("label_column", not columns, "beside task.label_columns")
    fields.check_ignored_fields(cfg, [fixed, beside])
    pretrained.check_unread(cfg)


# ---- Data ----------------------------------------------------------------------------------------


def prepare_data(cfg: TaskConfig) -> Path:
    """Splits and tokenises the rows, once; their folder. A field that shapes them is named here."""
    check_config(cfg)
    text_data.check_model(cfg)
    if cfg.streaming:
        return prepare_index(cfg)
    rows, files = demo_data.area_rows, [file for *_, file in demo_data.area_files()]
    return cache.prepare(
        cfg,
        """text_column text_pair_column label_column label_columns problem_type class_weights
        max_length vocab_size model_name_or_path revision""",
        lambda folder: text_data.build(cfg, folder, {"stdlib": rows}),
        text_data.ENDINGS,
        shipped={"stdlib": files}.get,
    )


def identity(cfg: TaskConfig, data: Path) -> str:
    """The classes or the scale of the numbers, and the vocabulary of a new model."""
    files = ["names.json", "scale.json"] + ([] if cfg.model_name_or_path else ["tokenizer.json"])
    return cache.short_digest(*(data / name for name in files))


def views(cfg: TaskConfig, data: Path) -> tuple[Any, Any]:
    """Memory-mapped rows: tokens of up to max_length, their number, label, weight, padding. Or
    such rows read from shards."""
    if cfg.streaming:
        return StreamedTexts(data, "train", cfg), StreamedTexts(data, "validation", cfg)
    own = split_data(cfg.data), {"token_dropout": cfg.token_dropout}
    return RowFiles(data, "train", *own), RowFiles(data, "validation", *own)


def augment(row: dict, generator: torch.Generator) -> dict:
    """The row without some of its tokens; the first, the last and separators stay."""
    if not row["token_dropout"]:
        return row
    kept = (torch.rand(len(row["input_ids"]), generator=generator) >= row["token_dropout"]).numpy()
    kept[[0, -1]] = True
    kept |= row["input_ids"] == row["separator"]
    tokens = {name: row[name][kept] for name in TOKENS if name in row}
    return {**row, **tokens, "length": kept.sum()}


def collate(rows: list[dict]) -> Batch:
    """input_ids and attention_mask, int64 (B, T), with labels and weight, (B, ...); T is the length
    of the longest row.

    labels are classes, int64 (B,); or 0 and 1, float32 (B, C); or numbers in standard deviations
    from their mean, float32 (B,). Pairs may have token_type_ids, (B, T), too.
    """
    lengths = torch.tensor([int(row["length"]) for row in rows])
    longest = int(lengths.max())
    batch = {"attention_mask": (torch.arange(longest) < lengths[:, None]).long()}
    for name in [name for name in TOKENS if name in rows[0]]:
        padding = int(rows[0]["pad"]) if name == "input_ids" else 0
        batch[name] = torch.full((len(rows), longest), padding)
        for line, row in zip(batch[name], rows, strict=True):
            line[: len(row[name])] = torch.as_tensor(row[name])
    for name in ("labels", "weight", "spread", "deviation"):
        if name in rows[0]:
            batch[name] = torch.as_tensor(np.stack([row[name] for row in rows]))
    return batch


def count(batch: Batch) -> int:
    return len(batch["labels"])


# ---- Model and loss ------------------------------------------------------------------------------


def build_model(cfg: TaskConfig, data: Path) -> torch.nn.Module:
    """A model to start from, with new weights for other classes than its own, or a ModernBERT."""
    from transformers import AutoModelForSequenceClassification, ModernBertConfig

    tokenizer = text_data.load_tokenizer(cfg, data)
    names = json.loads((data / "names.json").read_text(encoding="utf-8"))
    settings = classification.class_settings(names)
    settings |= {"problem_type": cfg.problem_type, "pad_token_id": tokenizer.pad_token_id}
    auto: Any = AutoModelForSequenceClassification
    if cfg.model_name_or_path:
        model = pretrained.load_model(auto, cfg, HEAD, ignore_mismatched_sizes=True, **settings)
    else:
        config = ModernBertConfig(
            vocab_size=pretrained.embedding_rows(tokenizer),
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
            bos_token_id=tokenizer.cls_token_id,
            eos_token_id=tokenizer.sep_token_id,
            cls_token_id=tokenizer.cls_token_id,
            sep_token_id=tokenizer.sep_token_id,
            **settings,
        )
        model = pretrained.new_model(auto, config, cfg)
    always_mask(model, tokenizer, lambda texts: model(**texts).logits)
    text_data.set_marks(model, cfg, data)
    return model


def logits_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """float32 (B, C); of numbers (B, 1), in standard deviations from their mean."""
    names = ("input_ids", "attention_mask", "token_type_ids")
    return model(**{name: batch[name] for name in names if name in batch}).logits.float()


def row_losses(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The weighted loss of each row, (B,): cross entropy in nats; its mean over several labels; or
    the squared error."""
    labels = batch["labels"]
    if not labels.is_floating_point():
        losses = F.cross_entropy(logits, labels, reduction="none")
    elif labels.ndim == 2:
        losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(1)
    else:
        losses = (logits[:, 0] - labels).square()
    return losses * batch["weight"]


def loss_sum(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The weighted losses of the rows, each of which is one term."""
    return row_losses(logits_of(model, batch), batch).sum()


# ---- Evaluation and export -----------------------------------------------------------------------


@torch.no_grad()
def eval_sums(model: torch.nn.Module, batch: Batch) -> Batch:
    """The loss, the rows, and the table of classification.py; of numbers, terms of their errors."""
    logits, labels = logits_of(model, batch), batch["labels"]
    sums = {"loss": row_losses(logits, batch).sum(), "rows": torch.ones_like(batch["weight"]).sum()}
    if labels.is_floating_point() and labels.ndim == 1:
        sums["error"] = (logits[:, 0] - labels).abs().sum()
        return sums | {name: batch[name].sum() for name in ("spread", "deviation")}
    return sums | {"table": classification.count_answers(logits, labels)}


def metrics(sums: Batch) -> dict[str, float]:
    """The mean loss of a row, and scores; mae and rmse are in the unit of the numbers."""
    loss = float(sums["loss"] / sums["rows"])
    if "table" in sums:
        return {"loss": loss, **classification.score_table(sums["table"])}
    return {"loss": loss, **classification.score_errors(sums)}


def report(model: Any, sums: Batch, output: Path, cfg: TaskConfig, data: Path) -> dict:
    """The scores of each class and a picture of the confusion; or the errors of numbers."""
    if "table" not in sums:
        return {"errors": classification.describe_errors(sums)}
    names = [*model.config.id2label.values()]
    return classification.report_table(sums["table"], names, output)


def export(model: Any, output: Path, cfg: TaskConfig, data: Path) -> None:
    """Saves files that AutoModelForSequenceClassification and AutoTokenizer load."""
    tokenizer = text_data.load_tokenizer(cfg, data)
    tokenizer.model_max_length = cfg.max_length
    with pretrained.quiet():
        model.save_pretrained(output)
        tokenizer.save_pretrained(output)
