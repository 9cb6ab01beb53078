"""What is trained: an encoder-decoder that writes a target text for each source text.

train.py calls these functions. samestep/settings/contract.py says what each gets and returns:

    prepare_data(cfg)                     what happens once, before training: download, tokenise
    views(cfg, data)                      (train, validation)
    collate(rows)  count(batch)           a batch of rows; the number of its items in the loss
    build_model(cfg, data)                the model
    loss_sum(model, batch)                the loss, summed over the terms
    eval_sums(model, batch)  metrics(sums)   what evaluation adds up; the numbers from it
    export(model, output, cfg, data)      saves the trained model

and, if they are there: identity, report, test_inputs.
`data` is what prepare_data returned: here, the folder of the prepared data. A whole task around
a plain nn.Module: python -m samestep example plain_module
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch.nn.utils.rnn import pad_sequence

from samestep.base import fields
from samestep.base.console import one_line
from samestep.base.fields import EXPORT, SHAPE, Dropout, Heads, Layers, Width
from samestep.data import cache, demo_data
from samestep.data.sources import DataConfig, check_data_config, split_data
from samestep.data.tables import TABLES
from samestep.models import pretrained
from samestep.models.attention import always_mask
from samestep.models.pretrained import ModelConfig
from samestep.text import pairs, tokenizing
from samestep.text.row_files import RowFiles

# transformers takes 4 s to import: it waits for the functions that need it.

Batch = dict[str, torch.Tensor]
test_inputs = pairs.test_inputs  # that the check of the export asks
IGNORE_INDEX = -100  # the label of padding, which cross entropy leaves out
UNIT = "target_tokens"

# 256 bytes and two special tokens are the least that a byte-level vocabulary has.
VocabularySize = Annotated[int, Field(ge=258, le=2**20)]
Length = Annotated[int, Field(ge=2, le=2**20)]
Beams = Annotated[int, Field(ge=1, le=100)]
Samples = Annotated[int, Field(ge=0, le=1_000_000)]


# ---- Config --------------------------------------------------------------------------------------


@dataclass
class TaskConfig(DataConfig, ModelConfig):
    data: str | list[dict[str, int | str]] = "dates"
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
        fields.check_width(cfg, cfg.num_heads, "num_heads")
    fields.check_fields(cfg, rules)
    dates = {each.data for each in split_data(cfg.data)} == {"dates"}
    columns = ("source_column target_column", not dates, "where task.data is dates")
    fields.check_ignored_fields(cfg, [columns])


# ---- Data ----------------------------------------------------------------------------------------


def prepare_data(cfg: TaskConfig) -> Path:
    """Splits and tokenises the rows, once; the folder of the result.

    A field that shapes it is named here; else what was prepared with another value is taken.
    """
    check_config(cfg)
    pretrained.check_unread(cfg)
    pairs.check_model(cfg)
    columns = {"source": cfg.source_column, "target": cfg.target_column}
    rows = {"dates": demo_data.date_rows}
    return cache.prepare(
        cfg,
        """source_column target_column source_prefix max_source_length max_target_length
        vocab_size model_name_or_path revision""",
        lambda folder: pairs.build(cfg, folder, columns, rows),
        TABLES,
        shipped={"dates": []}.get,
    )


def identity(cfg: TaskConfig, data: Path) -> str:
    """The vocabulary of a new model, which is learnt from the data."""
    return "" if cfg.model_name_or_path else cache.short_digest(data / tokenizing.FILE)


def views(cfg: TaskConfig, data: Path) -> tuple[RowFiles, RowFiles]:
    """Memory-mapped rows: input_ids and labels (token ids), and length (tokens of both). Rows to
    evaluate on have their texts too, as bytes: source and target."""
    own = split_data(cfg.data)
    return RowFiles(data, "train", own), RowFiles(data, "validation", own)


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


def build_model(cfg: TaskConfig, data: Path) -> torch.nn.Module:
    """A pretrained encoder-decoder, or a new T5."""
    from transformers import AutoModelForSeq2SeqLM, T5Config

    tokenizer = pairs.load_tokenizer(cfg, data)
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
    always_mask(model, tokenizer, lambda x: target_logits(model, {**x, "labels": x["input_ids"]}))
    pairs.set_generation(model, cfg)
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


def report(model: Any, sums: Batch, output: Path, cfg: TaskConfig, data: Path) -> dict[str, str]:
    """BLEU and chrF of targets that the model generates for validation rows, and some of them."""
    from sacrebleu.metrics import BLEU, CHRF

    _, dataset = views(cfg, data)
    rows = [dataset[i] for i in range(min(cfg.report_samples, len(dataset)))]
    for row in rows:
        row |= {name: row[name].tobytes().decode() for name in ("source", "target")}
    if not rows:
        return {}
    batches = (collate(rows[i : i + 32]) for i in range(0, len(rows), 32))
    generated = pairs.generate_texts(model, batches, pairs.load_tokenizer(cfg, data))
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


def export(model: Any, output: Path, cfg: TaskConfig, data: Path) -> None:
    """Files that AutoModelForSeq2SeqLM and AutoTokenizer load."""
    with pretrained.quiet():
        model.save_pretrained(output)
        pairs.load_tokenizer(cfg, data).save_pretrained(output)
