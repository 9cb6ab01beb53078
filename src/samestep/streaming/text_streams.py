"""Labelled texts that are read from shards, and tokenised, while the model trains: streaming.py."""

import json
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from samestep.base.console import one_line
from samestep.base.fields import check_fields
from samestep.data import cache, labels
from samestep.data.labels import NUMBER
from samestep.models import pretrained
from samestep.streaming import streaming
from samestep.text import text_data
from samestep.text.tokenizing import FILE, learn_vocabulary

SAMPLE = 50_000_000  # characters of text that a vocabulary is learnt from


def check_text_streaming(cfg: Any, shipped: Iterable[str]) -> None:
    """Raises ValueError for data that is not streamed (`shipped`), and for fields that need all
    rows before training."""
    streaming.check_streaming(cfg, shipped)
    wanted = "while task.streaming is true: it needs all rows before training"
    rules = [
        ("problem_type", cfg.problem_type != NUMBER, f"another, {wanted}"),
        ("class_weights", cfg.class_weights == "none", f"none, {wanted}"),
    ]
    check_fields(cfg, rules if cfg.streaming else [])


def prepare_index(cfg: Any) -> Path:
    """The folder of the index, with names.json, scale.json, and the vocabulary."""
    columns = labels.split_names(cfg.label_columns)

    def names_in(row: dict) -> list[str]:
        row = dict(row)
        labels.parse_row_label(row, columns, cfg.problem_type)
        return labels.labels_in(row)

    def build(folder: Path, found: set[str]) -> list[Path]:
        names = labels.collect_names(found, columns, cfg.data)
        for name, value in (("names", names), ("scale", (0.0, 1.0))):
            (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
        files = [folder / "names.json", folder / FILE]
        if cfg.model_name_or_path:
            own = text_data.load_tokenizer(cfg, folder)
            text = own.backend_tokenizer.to_str() if own.is_fast else str(own.get_vocab())
            files[1].write_text(text, encoding="utf-8")
            return files
        dataset = StreamedTexts(folder, "train", cfg)
        spans = (
            range(dataset.ends[n] - dataset.rows[n], dataset.ends[n]) for n in dataset.by_hash()
        )
        rows = map(dataset.read, chain.from_iterable(spans))
        texts = take_sample(map(text_data.texts_of, rows))
        learn_vocabulary(texts, cfg.vocab_size, folder, **text_data.VOCABULARY)
        return files

    settings = [cfg.problem_type, not cfg.model_name_or_path and cfg.vocab_size]
    settings += [cfg.model_name_or_path, pretrained.commit_of(cfg)]
    settings += [*cache.hash_files(pretrained.used_files(cfg), cfg).items()]
    wanted = text_data.columns_of(cfg)
    return streaming.prepare(cfg, wanted, columns, settings, names_in, build)


def take_sample(rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """The texts of rows, as many as a vocabulary is learnt from."""
    size = 0
    for texts in rows:
        for text in texts:
            size += len(text)
            yield text
        if size > SAMPLE:
            return


class StreamedTexts(streaming.ShardRows):
    """The texts of a part, tokenised when read; rows like those that are prepared."""

    def __init__(self, folder: Path, part: str, cfg: Any):
        super().__init__(folder, part, cfg, text_data.columns_of(cfg))
        self.names = json.loads((folder / "names.json").read_text(encoding="utf-8"))
        self.known, self.label_columns = {*self.names}, labels.split_names(cfg.label_columns)

    def complete(self, values: dict) -> dict:
        text_data.check_row(values, self.label_columns, self.cfg.problem_type)
        if unknown := {*labels.labels_in(values)} - self.known:
            raise ValueError(f"the label {one_line(min(unknown), 60)} is none to train on")
        return values

    def __getitems__(self, ids: list[int]) -> list[dict]:
        rows = [(row, "") for row in super().__getitems__(ids)]
        tokenizer = text_data.load_tokenizer(self.cfg, self.folder)
        columns, _ = text_data.encode_texts(rows, tokenizer, self.cfg.max_length)
        columns["labels"] = labels.encode_labels(rows, self.names, self.cfg.problem_type)
        columns["weight"] = np.ones(len(rows), np.float32)
        marks = text_data.marks_of(tokenizer, bool(self.cfg.text_pair_column))
        constants: dict = {name: np.int64(mark) for name, mark in marks.items()}
        constants["token_dropout"] = np.float32(self.cfg.token_dropout)
        return [
            constants | {name: values[i] for name, values in columns.items()}
            for i in range(len(rows))
        ]
