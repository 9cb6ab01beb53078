"""Labelled texts and pairs of texts: read, split into training and validation rows, encoded."""

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from tasklib import labels, pretrained, sources, text
from tasklib.cache import once_per_folder
from tasklib.fields import check_fields
from tasklib.labels import NUMBER, SINGLE
from tasklib.messages import one_line
from tasklib.tables import TABLES, Columns, Row

# transformers takes 4 s to import: it waits for the functions that need it.

ENDINGS = (".txt", *TABLES)
ROLES = ("text", "text_pair")
SPECIAL = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}


# ---- Reading -------------------------------------------------------------------------------------


def texts_of(row: dict) -> list[str]:
    """The text of a row, or its two texts."""
    return [row[role] for role in ROLES if role in row]


def read_rows(
    cfg: Any, shipped: Iterable[Row] | None = None
) -> tuple[list[Row], list[Row], list[str]]:
    """Rows to train and to evaluate on, and the labels' names; of numbers, the name of the column.

    `shipped`: rows in place of those of cfg.data, each with the file it comes from as its place.
    """
    columns: Columns = {"text": cfg.text_column}
    label_columns = labels.split_names(cfg.label_columns)
    columns["label"] = label_columns or cfg.label_column
    if cfg.text_pair_column:
        columns["text_pair"] = cfg.text_pair_column

    def check_row(row: dict) -> None:
        for role, name in zip(ROLES, ("text", "second text"), strict=True):
            if role in columns:
                labels.require_value(name, row[role])
                if not isinstance(row[role], str):
                    raise ValueError(f"the {name} is {one_line(repr(row[role]), 60)}, not text")
        labels.parse_row_label(row, label_columns, cfg.problem_type)

    rows, given = sources.read_splits(cfg, columns, ENDINGS, shipped)
    field = "validation_data" if cfg.validation_data else "validation_split"
    rows = sources.keep_valid_rows(rows, cfg, "data", check_row)
    given = given and sources.keep_valid_rows(given, cfg, field, check_row)
    for name, part in (("data", rows), (field, given)):
        if part == []:
            where = one_line(getattr(cfg, name), 100)
            raise ValueError(f"task.{name}: there are no rows in {where}")
    train, validation = rows, given
    if given is None:
        train, validation = hold_out(rows, cfg, by_file=shipped is not None)
    else:
        parts = ([json.dumps(texts_of(row)) for row, _ in part] for part in (rows, given))
        sources.warn_of_overlap(*parts)

    names, warning = [cfg.label_column], ""
    if cfg.problem_type == NUMBER:
        about = describe_numbers(train)
    else:
        names = labels.collect_names(rows, label_columns, cfg.data)
        labels.check_known(validation, names, field)
        about, warning = labels.describe_labels(train, names, cfg.problem_type)
    size = f"{len(train):,} rows of {one_line(cfg.data, 100)} to train"
    print(f"Preparing data: {size} and {len(validation):,} to evaluate on; {about}", flush=True)
    if warning:
        print(f"Preparing data: {warning}", flush=True)
    return train, validation, names


def hold_out(rows: list[Row], cfg: Any, by_file: bool) -> tuple[list[Row], list[Row]]:
    """Rows to train on and rows held out, of each class; equal texts stay together.

    `by_file`: rows of a file stay together, since functions of one file are alike.
    """
    train, held = sources.hold_out(
        rows,
        cfg.validation_fraction,
        lambda row: row[1] if by_file else "\0".join(texts_of(row[0])),
        lambda row: row[0]["label"] if cfg.problem_type == SINGLE else None,
    )
    data = one_line(cfg.data, 100)
    if not held and len({row["text"] for row, _ in rows}) > 1:
        raise ValueError(
            f"task.data: each of the {len(rows):,} rows of {data} is a class of its own, so that "
            "none can be held out: is task.label_column right? If so, add rows"
        )
    if not held:
        raise ValueError(f"task.data: {data} has no second text to hold out; add rows")
    return train, held


def describe_numbers(rows: list[Row]) -> str:
    mean, std = labels.mean_and_std(rows)
    if len({row["label"] for row, _ in rows}) == 1:
        return f"all numbers are {mean:.6g}: nothing to learn"
    return f"mean {mean:.6g}, standard deviation {std:.4g}: such an error is a loss of 1"


# ---- Tokenizer -----------------------------------------------------------------------------------


def check_model(cfg: Any) -> None:
    """Raises ValueError for a model to start from that cannot be read, or that was made for shorter
    texts or for texts without a pair."""
    if not cfg.model_name_or_path:
        return
    from transformers import AutoConfig

    config = pretrained.load(AutoConfig, cfg)
    positions = getattr(config, "max_position_embeddings", None)
    positions = positions if isinstance(positions, int) else -1
    if re.search("roberta|camembert|longformer|mpnet|data2vec", config.model_type):
        positions -= 2  # their positions begin after that of padding
    tokenizer = load_tokenizer(cfg)
    limits = (positions, tokenizer.model_max_length)
    most = min((limit for limit in limits if limit > 0), default=math.inf)
    rule = ("max_length", cfg.max_length <= most, f"at most {most}, as the model's")
    check_fields(cfg, [rule])
    special = tokenizer.num_special_tokens_to_add
    if cfg.text_pair_column and special(pair=True) <= special(pair=False):
        name = one_line(cfg.model_name_or_path, 100)
        raise ValueError(
            f"task.text_pair_column: the tokenizer of {name} puts nothing between two texts; put "
            "them into one column, or give another model"
        )


@once_per_folder
def load_tokenizer(cfg: Any, folder: Path | None = None) -> Any:
    """The tokenizer of the model to start from, or the one in the folder of prepared data."""
    inputs = ["input_ids", "attention_mask"]
    return text.load_tokenizer(cfg, folder, ["pad_token"], model_input_names=inputs, **SPECIAL)


def learn_vocabulary(rows: list[Row], size: int, folder: Path) -> None:
    """Learns the tokenizer of a new model: [CLS] before a text, [SEP] after each."""
    texts = [each for row, _ in rows for each in texts_of(row)]
    ends = {"begin": SPECIAL["cls_token"], "end": SPECIAL["sep_token"]}
    text.learn_vocabulary(texts, size, folder, first=list(SPECIAL.values()), **ends)


def encode_texts(rows: list[Row], tokenizer: Any, max_length: int) -> tuple[dict[str, Any], int]:
    """Columns of the rows' tokens, and the number of rows that were cut to max_length tokens.

    input_ids, and token_type_ids if pairs have them: lists of int32 (T,). length, pad and separator
    (-1: none), each (N,): what collating and augmenting need.
    """
    is_pair = "text_pair" in rows[0][0]
    columns: dict[str, Any] = {"input_ids": []}
    if is_pair and "token_type_ids" in tokenizer("", "", verbose=False):
        columns["token_type_ids"] = []
    names, cut = list(columns), 0
    for start in range(0, len(rows), 1000):  # bounds the memory of one call
        chunk = [texts_of(row) for row, _ in rows[start : start + 1000]]
        encoded = tokenizer(*map(list, zip(*chunk, strict=True)), verbose=False)
        for i, texts in enumerate(chunk):
            tokens = {name: encoded[name][i] for name in names}
            if len(tokens["input_ids"]) > max_length:
                tokens = tokenizer(*texts, truncation=True, max_length=max_length)
                cut += 1
            for name in names:
                columns[name].append(np.array(tokens[name], np.int32))
    marks = (tokenizer.sep_token_id, tokenizer.eos_token_id, -1)
    separator = next(mark for mark in marks if mark is not None)
    columns["length"] = np.array([len(tokens) for tokens in columns["input_ids"]])
    columns["pad"] = np.full(len(rows), tokenizer.pad_token_id)
    columns["separator"] = np.full(len(rows), separator if is_pair else -1)
    return columns, cut
