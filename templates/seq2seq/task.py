"""What is trained: an encoder-decoder that writes a target text for each source text.

train.py calls these functions; docs/task.md says what each gets and returns. One that names `data`
gets what prepare_data returned, loaded from its folder, data.folder.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import datasets
import torch
import torch.nn.functional as F
from pydantic import Field
from torch.nn.utils.rnn import pad_sequence

from samestep.base.fields import MODEL, NOTHING
from samestep.data.sources import DataConfig
from samestep.models import pretrained
from samestep.models.pretrained import ModelConfig
from samestep.text import pairs, tokenizing

# transformers takes 4 s to import: it waits for the functions that need it.

Batch = dict[str, torch.Tensor]
IGNORE_INDEX = -100  # the label of padding, which cross entropy leaves out
UNIT = "target_tokens"

# 256 bytes and two special tokens are the least that a byte-level vocabulary has.
Vocabulary = Annotated[int, Field(ge=258, le=2**20)]
Length = Annotated[int, Field(ge=2, le=2**20)]
Size = Annotated[int, Field(ge=1, le=65_536)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Beams = Annotated[int, Field(ge=1, le=100)]
Samples = Annotated[int, Field(ge=0, le=1_000_000)]


# ---- Config --------------------------------------------------------------------------------------


@dataclass
class TaskConfig(DataConfig, ModelConfig):
    data: str = "dates"
    """Training rows: a .jsonl, .json, .csv, .tsv or .parquet file, also compressed (.gz), a
    folder of such files, or a dataset on the Hub. Or dates, which are bundled: in eight forms,
    with their ISO form as targets. Several with their weights: a.jsonl:2,b.jsonl:1."""
    source_column: str = "source"
    """Column of the source text."""
    target_column: str = "target"
    """Column of the target text."""
    source_prefix: str = ""
    """Text put before each source, such as "translate English to German: " for T5. The exported
    model names it, and samestep predict adds it too."""
    source_lang: str = ""
    """Language of the sources, for a model whose tokenizer writes it into texts: eng_Latn for NLLB,
    en_XX for mBART, en for M2M100."""
    target_lang: str = ""
    """Language of the targets, likewise; the exported model generates it."""
    max_source_length: Length = 512
    """Tokens of a source that the model sees; the end of a longer one is cut off."""
    max_target_length: Length = 128
    """Tokens of a target; the end of a longer one is cut off. Also the most tokens to generate."""

    # New model
    vocab_size: Vocabulary = 1024
    """Size of its byte-level BPE vocabulary, trained on the training rows."""
    hidden_size: Size = field(default=64, metadata=MODEL)
    """Width of the model, a multiple of num_heads."""
    num_layers: Size = field(default=2, metadata=MODEL)
    """Transformer layers of the encoder, and of the decoder."""
    num_heads: Size = field(default=4, metadata=MODEL)
    """Attention heads in a layer."""
    dropout: Fraction = field(default=0.0, metadata=MODEL)
    """Dropout on embeddings, attention weights and layers."""

    # Generation
    num_beams: Beams = field(default=1, metadata=NOTHING | MODEL)
    """Beams of the beam search for a target; 1: greedy search. The exported model names it."""
    report_samples: Samples = field(default=200, metadata=NOTHING | MODEL)
    """Validation rows whose targets the trained model generates at the end, for BLEU and chrF."""


check_config = pairs.check_config  # fields that do not fit each other


# ---- Data ----------------------------------------------------------------------------------------


def prepare_data(cfg: TaskConfig, folder: Path) -> datasets.DatasetDict:
    """Token ids of the sources, `input_ids`, and of the targets, `labels`. Rows to evaluate on keep
    their texts."""
    rows = pairs.read_rows(cfg)
    how = {"ends": True, "needs": ["eos_token"]}
    tokenizer = tokenizing.prepare_tokenizer(cfg, folder, rows["train"], "max_source_length", **how)
    tokenizer = pairs.set_languages(tokenizer, cfg, folder)
    tokens = rows.map(
        tokenize,
        fn_kwargs={"cfg": cfg, "tokenizer": tokenizer},
        batched=True,
        num_proc=cfg.num_proc(rows["train"].data.nbytes // 10**6),
    )
    lengths = {"input_ids": cfg.max_source_length, "labels": cfg.max_target_length}
    tokenizing.say_lengths(tokens, lengths)
    tokens["train"] = tokens["train"].remove_columns(["text", "text_target"])
    return tokens.remove_columns("place")


def tokenize(batch: dict[str, list], cfg: TaskConfig, tokenizer: Any) -> dict[str, list]:
    """input_ids and labels of texts and target texts."""
    texts = [cfg.source_prefix + text for text in batch["text"]]
    inputs = tokenizer(texts, truncation=True, max_length=cfg.max_source_length)
    options = {"truncation": True, "max_length": cfg.max_target_length}
    targets = tokenizer(text_target=batch["text_target"], **options)
    return {"input_ids": inputs["input_ids"], "labels": targets["input_ids"]}


def views(cfg: TaskConfig, data: Any) -> tuple[Any, Any]:
    """Rows {input_ids, labels}: the token ids of a source and of its target."""
    return pairs.view(data["train"], cfg), pairs.view(data["validation"], cfg)


def collate(rows: list[dict]) -> Batch:
    """int64 tensors: input_ids and attention_mask (B, longest source), labels (B, longest target).

    The mask hides the padding of sources, and IGNORE_INDEX marks that of targets.
    """
    inputs = [torch.tensor(row["input_ids"], dtype=torch.long) for row in rows]
    labels = [torch.tensor(row["labels"], dtype=torch.long) for row in rows]
    return {
        "input_ids": pad_sequence(inputs, True),
        "attention_mask": pad_sequence([torch.ones_like(each) for each in inputs], True),
        "labels": pad_sequence(labels, True, IGNORE_INDEX),
    }


def count(batch: Batch) -> int:
    return int((batch["labels"] != IGNORE_INDEX).sum())


# ---- Model and loss ------------------------------------------------------------------------------


def build_model(cfg: TaskConfig, data: Any) -> torch.nn.Module:
    """The pretrained encoder-decoder, or a new T5."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, T5Config

    tokenizer = AutoTokenizer.from_pretrained(data.folder)
    config = T5Config(  # of a new model
        vocab_size=len(tokenizer),
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
    model = pretrained.build_generator(AutoModelForSeq2SeqLM, cfg, config, tokenizer)
    pairs.set_generation(model, cfg, tokenizer)
    return model


def target_logits(model: Any, batch: Batch) -> torch.Tensor:
    """Logits of each target token from the source and the tokens before it: float32 (B, T, V)."""
    labels = batch["labels"]
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        start = model.prepare_decoder_input_ids_from_labels(labels=labels)
    else:  # M2M100 and NLLB, which shift them in `forward`
        start = labels.roll(1, dims=1)
        start = start.masked_fill(start == IGNORE_INDEX, model.config.pad_token_id)
        start[:, 0] = model.config.decoder_start_token_id
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


def report(model: Any, sums: Batch, output: Path, cfg: TaskConfig, data: Any) -> dict[str, str]:
    """BLEU and chrF of targets that the model generates for validation rows, and some of them."""
    rows = pairs.view(data["validation"], cfg)
    number = min(cfg.report_samples, len(rows))
    starts = range(0, number, 32)
    batches = [collate([rows[i] for i in range(a, min(a + 32, number))]) for a in starts]
    texts = data["validation"][:number]
    return pairs.write_report(model, batches, texts, cfg, data) if number else {}


test_inputs = pairs.test_inputs  # that the check of the export gives to both models


def export(model: Any, output: Path, cfg: TaskConfig, data: Any) -> None:
    """Saves files that AutoModelForSeq2SeqLM and AutoTokenizer load."""
    from transformers import AutoTokenizer

    with pretrained.quiet():
        model.save_pretrained(output)
        AutoTokenizer.from_pretrained(data.folder).save_pretrained(output)
