"""What is trained: an encoder-decoder that writes a target text for each source text.

train.py calls these functions. samestep/settings/contract.py says what each gets and returns:

    prepare_data(cfg)                     what happens once, before training: download, tokenise
    datasets(cfg, prepared)               (train, validation)
    collate(rows)  count(batch)           a batch of rows; the number of its loss terms
    build_model(cfg, prepared)            the model
    loss_sum(model, batch)                the loss, summed over the terms
    eval_sums(model, batch)  metrics(sums)   what evaluation adds up; the numbers from it
    export(model, output, cfg, prepared)  saves the trained model

and, if they are there: identity, digest, sources, augment, sizes, report. `prepared` is what
prepare_data returned. examples/task.py is a whole task around a plain nn.Module.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from samestep.base import fields
from samestep.base.console import one_line
from samestep.base.fields import EXPORT, SHAPE, Dropout, Heads, Layers, Width, number_type
from samestep.data import cache, demo_data
from samestep.data.sources import DataConfig, Source, by_source, check_data_config, split_data
from samestep.data.tables import TABLES
from samestep.models import pretrained
from samestep.models.attention import always_mask
from samestep.models.pretrained import ModelConfig
from samestep.text import pairs, text
from samestep.text.row_files import RowFiles

# transformers takes 4 s to import: it waits for the functions that need it.

Batch = dict[str, torch.Tensor]
IGNORE_INDEX = -100  # the label of padding, which cross entropy leaves out
UNIT = "target_tokens"
PAD, END = "<pad>", "</s>"  # special tokens of a new vocabulary; T5 starts targets with PAD

# 256 bytes and two special tokens are the least that a byte-level vocabulary has.
VocabularySize = number_type("VocabularySize", int, 258, 2**20)
Length = number_type("Length", int, 2, 2**20)
Beams = number_type("Beams", int, 1, 100)
Samples = number_type("Samples", int, 0, 1_000_000)


# ---- Config --------------------------------------------------------------------------------------


@dataclass
class TaskConfig(DataConfig, ModelConfig):
    data: str | list[dict[str, Any]] = "dates"
    """Training rows: a .jsonl, .json, .csv, .tsv or .parquet file, also compressed (.gz, .zst), a
    folder of such files, or a data set on the Hub. Or dates, which every machine has: dates as
    people write them in five languages, with their ISO form as targets. Several with their weights:
    a.jsonl:2,b.jsonl:1, or a list of {path: a.jsonl, weight: 2}."""
    source_column: str = "source"
    """Column of the source text."""
    target_column: str = "target"
    """Column of the target text."""
    source_prefix: str = ""
    """Text put before each source, such as "translate English to German: " for T5. The exported
    model names it, and samestep predict adds it too."""
    max_source_length: Length = 512
    """Tokens of a source that the model sees; the end of a longer one is cut off."""
    max_target_length: Length = 128
    """Tokens of a target; the end of a longer one is cut off. Also the most tokens to generate."""

    # New model
    vocab_size: VocabularySize = field(default=1024, metadata=SHAPE)
    """Size of its byte-level BPE vocabulary, learnt from the training rows."""
    hidden_size: Width = field(default=64, metadata=SHAPE)
    """Width of the model, a multiple of num_heads."""
    num_layers: Layers = field(default=2, metadata=SHAPE)
    """Transformer layers of the encoder, and of the decoder."""
    num_heads: Heads = field(default=4, metadata=SHAPE)
    """Attention heads in a layer."""
    dropout: Dropout = 0.0
    """Dropout on embeddings, attention weights and layers."""

    # Generation
    num_beams: Beams = field(default=1, metadata=EXPORT)
    """Beams of the beam search for a target; 1: greedy search. The exported model names it."""
    report_samples: Samples = field(default=200, metadata=EXPORT)
    """Validation rows whose targets the trained model generates at the end, for BLEU and chrF."""


def check_config(cfg: TaskConfig) -> None:
    """Raises ValueError for settings that cannot work, before any row is read."""
    check_data_config(cfg, ["dates"])
    two_columns = cfg.source_column != cfg.target_column
    rules = [("target_column", two_columns, "another column than task.source_column")]
    if not cfg.model_name_or_path:
        width, heads = cfg.hidden_size, cfg.num_heads
        nearest = max(1, round(width / heads)) * heads
        rules.append(("hidden_size", width == nearest, f"a multiple of num_heads, {nearest}"))
        pretrained.check_memory(width * (cfg.vocab_size + 24 * cfg.num_layers * width))
    fields.check_fields(cfg, rules)
    dates = {each.data for each in split_data(cfg.data)} == {"dates"}
    columns = ("source_column target_column", not dates, "where task.data is dates")
    fields.check_ignored_fields(cfg, [columns])


def check_model(cfg: TaskConfig) -> None:
    """Raises ValueError unless a pretrained model is an encoder-decoder that sees all the text."""
    if not cfg.model_name_or_path:
        return
    from transformers import AutoConfig

    config, name = pretrained.load(AutoConfig, cfg), one_line(cfg.model_name_or_path, 100)
    if not getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"task.model_name_or_path: {name} is not an encoder-decoder; give another")
    limit = getattr(config, "max_position_embeddings", None) or math.inf
    expected = f"at most {limit}, the positions of {name}"
    for length in ("max_source_length", "max_target_length"):
        fields.check_fields(cfg, [(length, getattr(cfg, length) <= limit, expected)])
    load_tokenizer(cfg, None)


# ---- Data ----------------------------------------------------------------------------------------


def prepare_data(cfg: TaskConfig) -> Path:
    """Splits and tokenises the rows, once; the folder of the result."""
    check_config(cfg)
    pretrained.check_unread(cfg)
    check_model(cfg)
    build = lambda folder: build_data(cfg, folder)  # noqa: E731
    return cache.prepare_once(cfg, lambda: prepared_folder(cfg), build, goes_on=True)


def identity(cfg: TaskConfig, folder: Path) -> str:
    """The vocabulary of a new model, which is learnt from the data."""
    return "" if cfg.model_name_or_path else cache.short_digest(folder / text.FILE)


def digest(cfg: TaskConfig, folder: Path) -> str:
    return cache.content_digest(folder)


def datasets(cfg: TaskConfig, folder: Path) -> tuple[RowFiles, RowFiles]:
    """Memory-mapped rows: input_ids and labels (token ids), and length (tokens of both). Rows to
    evaluate on have their texts too, as bytes: source and target."""
    data = split_data(cfg.data)
    return RowFiles(folder, "train", data), RowFiles(folder, "validation", data)


def sources(dataset: RowFiles) -> list[Source]:
    """The sources in cfg.data, which train.py mixes by their weights."""
    return dataset.sources


def sizes(dataset: RowFiles) -> np.ndarray:
    """Tokens of each row: those of the source and those of the target."""
    return dataset.sizes()


def collate(rows: list[dict]) -> Batch:
    """int64 tensors: input_ids and attention_mask (B, longest source), labels (B, longest target).

    The mask hides the padding of sources, and IGNORE_INDEX marks that of targets.
    """
    inputs = [torch.as_tensor(row["input_ids"]).long() for row in rows]
    labels = [torch.as_tensor(row["labels"]).long() for row in rows]
    return {
        "input_ids": pad_sequence(inputs, True),
        "attention_mask": pad_sequence([torch.ones_like(each) for each in inputs], True),
        "labels": pad_sequence(labels, True, IGNORE_INDEX),
    }


def count(batch: Batch) -> int:
    return int((batch["labels"] != IGNORE_INDEX).sum())


# ---- Model and loss ------------------------------------------------------------------------------


def build_model(cfg: TaskConfig, folder: Path) -> torch.nn.Module:
    """A pretrained encoder-decoder, or a new T5."""
    from transformers import AutoModelForSeq2SeqLM, T5Config

    tokenizer = load_tokenizer(cfg, folder)
    if cfg.model_name_or_path:
        model: Any = pretrained.load_model(AutoModelForSeq2SeqLM, cfg)
    else:
        config = T5Config(
            vocab_size=pretrained.embedding_rows(tokenizer),
            d_model=cfg.hidden_size,
            d_kv=cfg.hidden_size // cfg.num_heads,
            d_ff=2 * cfg.hidden_size,
            num_layers=cfg.num_layers,
            num_heads=cfg.num_heads,
            dropout_rate=cfg.dropout,
            feed_forward_proj="gated-gelu",
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            decoder_start_token_id=tokenizer.pad_token_id,
        )
        model = pretrained.new_model(AutoModelForSeq2SeqLM, config, cfg)
        pretrained.suppress_unused(model, tokenizer)
    start = getattr(model.config, "decoder_start_token_id", None)
    if start is None or not hasattr(model, "prepare_decoder_input_ids_from_labels"):
        name = one_line(cfg.model_name_or_path, 100)
        raise ValueError(
            f"task.model_name_or_path: {name}, a {model.config.model_type}, does not say with "
            "which token a target starts; give another model"
        )
    always_mask(model, tokenizer, lambda x: target_logits(model, {**x, "labels": x["input_ids"]}))
    model.config.source_prefix = cfg.source_prefix  # for samestep predict
    settings = model.generation_config
    settings.update(num_beams=cfg.num_beams, max_new_tokens=cfg.max_target_length, max_length=None)
    if cfg.num_beams == 1:  # transformers does not save settings of a search that is not used
        settings.update(early_stopping=None, length_penalty=None)
    return model


def target_logits(model: Any, batch: Batch) -> torch.Tensor:
    """Logits of each target token from the source and the tokens before it: float32 (B, T, V)."""
    start = model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    return model(**inputs, decoder_input_ids=start, use_cache=False).logits.float()


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the target tokens in nats, summed: shape ()."""
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )


def loss_sum(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return cross_entropy(target_logits(model, batch), batch["labels"])


# ---- Evaluation and export -----------------------------------------------------------------------


@torch.no_grad()
def eval_sums(model: torch.nn.Module, batch: Batch) -> Batch:
    """The loss; target tokens and rows, and how many of them the model predicts rightly."""
    logits, labels = target_logits(model, batch), batch["labels"]
    counted = labels != IGNORE_INDEX
    right = logits.argmax(-1) == labels
    return {
        "loss": cross_entropy(logits, labels),
        "tokens": counted.sum(),
        "right_tokens": (right & counted).sum(),
        "rows": torch.ones_like(labels[:, 0]).sum(),
        "right_rows": (right | ~counted).all(1).sum(),
    }


def metrics(sums: Batch) -> dict[str, float]:
    """Mean loss of a token, in nats; the fractions of tokens and of whole targets predicted.

    Greedy search generates exactly the targets that exact_match counts: each of their tokens is
    the likeliest after those before it.
    """
    total = {name: float(value) for name, value in sums.items()}
    return {
        "loss": total["loss"] / total["tokens"],
        "token_accuracy": total["right_tokens"] / total["tokens"],
        "exact_match": total["right_rows"] / total["rows"],
    }


def report(model: Any, sums: Batch, output: Path, cfg: TaskConfig, folder: Path) -> dict[str, str]:
    """BLEU and chrF of targets that the model generates for validation rows, and some of them."""
    from sacrebleu.metrics import BLEU, CHRF

    _, dataset = datasets(cfg, folder)
    rows = [dataset[i] for i in range(min(cfg.report_samples, len(dataset)))]
    for row in rows:
        row |= {name: row[name].tobytes().decode() for name in ("source", "target")}
    if not rows:
        return {}
    batches = (collate(rows[i : i + 32]) for i in range(0, len(rows), 32))
    generated = pairs.generate_texts(model, batches, load_tokenizer(cfg, folder))
    targets = [row["target"] for row in rows]
    # "force" silences a warning about targets that end in " .", as tokenised ones do.
    bleu, chrf = (m.corpus_score(generated, [targets]).score for m in (BLEU(force=True), CHRF()))
    search = "greedy search" if cfg.num_beams == 1 else f"{cfg.num_beams} beams"
    shown = {"generation": f"BLEU {bleu:.1f}, chrF {chrf:.1f} ({len(rows):,} rows, {search})"}
    for i, (row, answer) in enumerate(zip(rows[:5], generated, strict=False), 1):
        expected = "as the target" if answer == row["target"] else f"target: {row['target']}"
        line = f"{one_line(row['source'])} -> {one_line(answer)} ({one_line(expected)})"
        shown[f"sample {i}"] = line
    return shown


def export(model: Any, output: Path, cfg: TaskConfig, folder: Path) -> None:
    """Files that AutoModelForSeq2SeqLM and AutoTokenizer load."""
    with pretrained.quiet():
        model.save_pretrained(output)
        load_tokenizer(cfg, folder).save_pretrained(output)


# ---- Preparation ---------------------------------------------------------------------------------


def prepared_folder(cfg: TaskConfig) -> Path:
    """The folder of the prepared data, named by all that shapes it: settings, files and code."""
    names = """source_column target_column source_prefix max_source_length max_target_length
        vocab_size model_name_or_path revision""".split()
    files = pretrained.used_files(cfg)
    used = [
        cache.hash_input_files(own, TABLES, *files, shipped=[] if own.data == "dates" else None)
        for _, own in by_source(cfg, TABLES)
    ]
    settings = [getattr(cfg, name) for name in names]
    return cache.cache_folder(cfg, settings, used, [prepare_data])


@cache.once_per_folder
def load_tokenizer(cfg: TaskConfig, folder: Path | None) -> Any:
    """The tokenizer of the pretrained model, or the one in the folder of prepared data."""
    names = ["input_ids", "attention_mask"]
    ends = {"pad_token": PAD, "eos_token": END, "model_input_names": names}
    tokenizer = text.load_tokenizer(cfg, folder, ("eos_token",), **ends)
    tokenizer.model_max_length = cfg.max_source_length  # samestep predict cuts sources there
    return tokenizer


def build_data(cfg: TaskConfig, folder: Path) -> dict[str, Any]:
    """Saves the tokens of training and validation rows, and a new vocabulary."""
    ends = {"first": [PAD, END], "end": END}
    return pairs.build(
        cfg,
        folder,
        {"source": cfg.source_column, "target": cfg.target_column},
        {"dates": demo_data.date_rows},
        lambda texts: text.learn_vocabulary(texts, cfg.vocab_size, folder, **ends),
        lambda: load_tokenizer(cfg, folder),
    )
