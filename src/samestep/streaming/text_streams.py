"""Texts in shards: what is prepared of them, and sequences of tokens while the model trains."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import datasets
import numpy as np
from pydantic import Field

from samestep.base.console import one_line
from samestep.base.fields import check_fields, check_ignored_fields
from samestep.data import demo_data, readers, rows, shards, sources
from samestep.data.folders import TABLES, file_ending
from samestep.data.readers import DOCUMENT, Span
from samestep.data.shards import Shard
from samestep.streaming.lanes import Stream
from samestep.text import formats, sequences, tokenizing

HEAD = 20_000_000  # bytes of text, of the beginnings of shards, that a tokenizer is trained on
SHARDS = 16  # of whose beginnings
SEQUENCES = 64  # of a block, at least
Lanes = Annotated[int, Field(ge=1, le=65_536)]


@dataclass
class StreamConfig(sources.DataConfig):
    """Fields of a task whose texts can be read from shards."""

    streaming: bool = False
    """Read texts while the model trains, and prepare only those to evaluate on: task.data is a
    folder, or a URL such as s3://bucket/folder, of .jsonl, .json, .csv, .tsv, .parquet, .txt or
    .tar files (WebDataset)."""
    lanes: Lanes = 4
    """streaming: parts of a step, each of which reads shards of its own. At most as many as shards;
    they divide global_batch_size. Best at least as many as there are micro-batches in a step."""


def check_config(cfg: Any) -> None:
    """Raises ValueError for fields that do not fit each other."""
    formats.check_config(cfg)
    if not cfg.streaming:
        check_ignored_fields(cfg, [("lanes", False, "unless task.streaming is true")])
        return
    shards.check_streaming(cfg, demo_data.TEXTS)
    where = "while task.streaming is true"
    rules = [
        ("rows", cfg.rows in ("auto", "text"), f"text {where}"),
        ("packing", cfg.packing != "best_fit", f"stream {where}"),
        ("group_column", not cfg.group_column, f"empty {where}: whole shards are held out"),
    ]
    check_fields(cfg, rules)


def read_rows(cfg: Any) -> datasets.DatasetDict:
    """The rows of cfg.data as formats.read_rows gives them; of a stream those that are held out,
    and for a tokenizer, as `train`, texts from the beginnings of shards."""
    if not cfg.streaming:
        return formats.read_rows(cfg)
    cfg.rows = "text"
    train, held = shards.split_shards(cfg)
    heads = train[:: -(-len(train) // SHARDS)]
    field = "validation_data" if cfg.validation_data else "data"
    most = formats.BYTES_A_TOKEN * cfg.context_length * cfg.validation_rows
    texts = {
        "train": read_texts(heads, HEAD, cfg, "data"),
        "validation": read_texts(held, most, cfg, field),
    }
    for split, own, chosen in (("train", "data", heads), ("validation", field, held)):
        if not texts[split]:
            named = ", ".join(each.name for each in chosen)
            hint = "remove empty ones, or give --task.validation_data PATH"
            raise ValueError(f"task.{own}: there is no text in {one_line(named, 200)}; {hint}")
    first: dict = {}
    if file_ending(train[0].path) in TABLES:
        first, _ = next(readers.read_span(Span(train[0].path), None), ({}, ""))
    read = rows.describe_columns([*first], {"text": cfg.text_column})
    print(
        f"Preparing data: {len(train):,} shards to train on, {len(held):,} to evaluate on, of "
        f"which {len(texts['validation']):,} documents are used{read}",
        flush=True,
    )
    source = datasets.ClassLabel(names=["stream"])
    features = datasets.Features({"text": datasets.Value("large_string"), "source": source})
    found = datasets.DatasetDict()
    for split, given in texts.items():
        columns = {"text": given, "source": [0] * len(given)}
        found[split] = datasets.Dataset.from_dict(columns, features)
    return found


def read_texts(chosen: list[Shard], most: int, cfg: Any, field: str) -> list[str]:
    """Texts from the beginnings of shards, of about `most` bytes together."""
    found = []
    for shard in chosen:
        left = most / len(chosen)
        for text in texts_of(shard.path, cfg, field):
            if left <= 0:
                break
            found.append(text)
            left -= len(text.encode())
    return found


def texts_of(path: str, cfg: Any, field: str = "data") -> Iterator[str]:
    """The texts of a shard; those of more than DOCUMENT characters are several.

    Raises ValueError for a row without one, unless it may be skipped.
    """
    span = Span(path, document=DOCUMENT)
    for row, place in readers.read_span(span, {"text": cfg.text_column}, field=field):
        try:
            sources.require_text("text", row["text"])
        except ValueError as error:
            rows.reason_to_skip(error, place, field, cfg.incomplete_rows == "skip")
        else:
            text = row["text"]
            yield from (text[i : i + DOCUMENT] for i in range(0, len(text), DOCUMENT))


# ---- While the model trains ----------------------------------------------------------------------


def views(cfg: Any, data: Any) -> tuple[Any, sequences.Sequences]:
    """Sequences of context_length tokens. Those to evaluate on also have the sums `bytes` and
    `unigram_loss` of their tokens."""
    train: Any = None
    if cfg.streaming:
        train = TextStream(shards.split_shards(cfg)[0], cfg, data.folder)
    else:
        train = sequences.Sequences(data["train"], cfg)
    return train, sequences.Sequences(data["validation"], cfg, data["vocabulary"])


class TextStream(Stream):
    """Sequences of context_length tokens: rows {input_ids, labels}, each int64 (context_length,).

    They are packed within blocks of about SEQUENCES of them, and what does not fill a sequence at
    the end of a block is dropped.
    """

    def __init__(self, own: list[Shard], cfg: Any, folder: Path):
        self.cfg, self.folder, self.described = cfg, folder, shards.describe(own)
        super().__init__([each.path for each in own], cfg.lanes)

    def blocks(self, shard: str) -> Iterator[list[str]]:
        texts: list[str] = []
        size, least = 0, SEQUENCES * self.cfg.context_length * formats.BYTES_A_TOKEN
        for text in texts_of(shard, self.cfg):
            texts.append(text)
            size += len(text.encode())
            if size >= least:
                yield texts
                texts, size = [], 0
        if texts:
            yield texts

    def samples(self, block: list[str]) -> list[dict[str, np.ndarray]]:
        tokenizer = tokenizing.load_tokenizer(self.folder)
        found = formats.tokenize({"text": block}, tokenizer, with_masks=False)["input_ids"]
        ids, length = np.concatenate(found).astype(np.int64), self.cfg.context_length
        whole = ids[: len(ids) // length * length].reshape(-1, length)
        return [{"input_ids": each, "labels": each.copy()} for each in whole]

    def digest(self) -> str:
        return f"{self.described} {self.cfg.context_length}"
