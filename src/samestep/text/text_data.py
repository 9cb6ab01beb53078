"""Labelled texts and pairs of texts: read, split into training and validation rows, encoded."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from samestep.base.console import one_line
from samestep.base.fields import check_fields
from samestep.data import labels, splits
from samestep.data.cache import once_per_folder
from samestep.data.labels import MULTI, NUMBER, SINGLE, Numbers
from samestep.data.tables import TABLES, Columns, Row
from samestep.models import pretrained
from samestep.text import row_files, tokenizing, units
from samestep.text.units import Input

# transformers takes 4 s to import: it waits for the functions that need it.

ENDINGS = (".txt", *TABLES)
ROLES = ("text", "text_pair")
MARKS = ("label_mean", "label_std", "text_pair")  # attributes that we add to a model's config
SPECIAL = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}


# ---- Reading -------------------------------------------------------------------------------------


def texts_of(row: dict) -> list[str]:
    """The text of a row, or its two texts."""
    return [row[role] for role in ROLES if role in row]


def columns_of(cfg: Any) -> Columns:
    columns: Columns = {"text": cfg.text_column}
    columns["label"] = labels.split_names(cfg.label_columns) or cfg.label_column
    return columns | ({"text_pair": cfg.text_pair_column} if cfg.text_pair_column else {})


def check_row(row: dict, label_columns: list[str], problem_type: str) -> None:
    """Raises ValueError for a row without a text or a label; parses the label."""
    for role, name in zip(ROLES, ("text", "second text"), strict=True):
        if role in row:
            labels.require_value(name, row[role])
            if not isinstance(row[role], str):
                raise ValueError(f"the {name} is {one_line(repr(row[role]), 60)}, not text")
    labels.parse_row_label(row, label_columns, problem_type)


# ---- Preparing -----------------------------------------------------------------------------------


def build(
    cfg: Any, folder: Path, shipped: dict[str, Callable[[], Iterator[Row]]]
) -> dict[str, Any]:
    """Fills the folder of prepared data, or goes on filling it; what `cache.prepare` wants.

    `shipped` gives the rows of data that the task brings along; a row's place is the file it is
    from.
    Beside the rows it saves names.json, scale.json, and the vocabulary of a new model.
    """
    kind = cfg.problem_type
    train, given, held, names = scan_rows(cfg, folder, shipped)
    rows = row_files.count_rows(train, held)
    scale = {"train": Numbers(0.0, 1.0, False)}
    weights, warning = np.ones(len(names), np.float32), ""
    if kind == NUMBER:
        scale["train"] = labels.describe_numbers(lambda: numbers_of(train, held, False))
        part = (given, held, False) if given else (train, held, True)
        scale["validation"] = labels.describe_numbers(lambda: numbers_of(*part))
        mean, std, differ = scale["train"]
        about = f"mean {mean:.6g}, standard deviation {std:.4g}: such an error is a loss of 1"
        about = about if differ else f"all numbers are {mean:.6g}: nothing to learn"
    else:
        counts = count_names(train, held, kind)
        about, warning = labels.describe_labels(counts, rows, names, kind)
        if cfg.class_weights == "balanced":
            weights = labels.balanced_weights(np.array([counts[name] for name in names]))
    size = f"{rows:,} rows of {one_line(cfg.data, 100)} to train on"
    print(f"Preparing data: {size}; {about}", flush=True)
    if warning:
        print(f"Preparing data: {warning}", flush=True)

    if not cfg.model_name_or_path and not (folder / tokenizing.FILE).exists():
        learn_vocabulary(units.read_sample(train, held), cfg.vocab_size, folder)
    tokenizer = load_tokenizer(cfg, folder)
    dtypes = {"input_ids": row_files.token_dtype(tokenizer), "token_type_ids": "u1"}

    def encode(rows: list[Row], part: str) -> tuple[row_files.Arrays, dict[str, int]]:
        columns, cut = encode_texts(rows, tokenizer, cfg.max_length)
        for name in dtypes.keys() & columns:
            columns[name] = [ids.astype(dtypes[name]) for ids in columns[name]]
        columns["labels"] = labels.encode_labels(rows, names, kind)
        columns["weight"] = np.ones(len(rows), np.float32)
        if kind == NUMBER:
            columns |= labels.standardize(columns["labels"], scale["train"], scale[part])
        elif kind == SINGLE and part == "train":
            columns["weight"] = weights[columns["labels"]]
        return columns, {"input_ids": cut}

    done = row_files.write(folder, train + given, held, encode)
    size, cut = row_files.describe_lengths(done, "input_ids", row_files.PARTS)
    size += f"; {cut:,} cut to {cfg.max_length:,}" * (cut > 0)
    print(f"Prepared: {'pairs' if cfg.text_pair_column else 'texts'} of {size}", flush=True)
    for name, value in (("names", names), ("scale", scale["train"][:2])):
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    constants: dict[str, int | float] = {**marks_of(tokenizer, bool(cfg.text_pair_column))}
    if kind == NUMBER:
        constants["deviation"] = scale["train"].std
    return row_files.finish(folder, train + given, done, constants)


def scan_rows(
    cfg: Any, folder: Path, shipped: dict[str, Callable[[], Iterator[Row]]]
) -> tuple[list[Input], list[Input], set[int], list[str]]:
    """The first pass over training rows and, if they are given, validation rows; the hashes of
    those held out; the labels' names, or of numbers the name of the column."""
    label_columns, kind = labels.split_names(cfg.label_columns), cfg.problem_type

    def check(row: dict) -> None:
        check_row(row, label_columns, kind)

    def mark_files(read: Callable[[], Iterator[Row]]) -> Iterator[Row]:
        return (({**row, "file": place}, place) for row, place in read())

    def key(row: dict) -> str:
        return "\0".join(texts_of(row))

    readers = row_files.list_readers(
        cfg,
        ENDINGS,
        columns_of(cfg),
        {name: partial(mark_files, read) for name, read in shipped.items()},
        key=key,
        group_key=lambda row: row.get("file") or key(row),  # functions of one file are alike
        check=check,
        texts=None if cfg.model_name_or_path else texts_of,
        label=lambda row: row["label"] if kind != MULTI else json.dumps(row["label"]),
    )
    train, held = row_files.scan(readers, folder, "train"), set()
    if not any(reader.fields[1:] for reader in readers):
        held = row_files.hold_out(train, cfg, why_none_is_held, by_label=kind == SINGLE)
    names = [cfg.label_column]
    if kind != NUMBER:
        found = count_names(train, set(), kind)
        names = labels.collect_names(found, label_columns, cfg.data)
    known = {*names}

    def check_given(row: dict) -> None:
        check(row)
        if kind != NUMBER:
            labels.check_known(row, names, known)

    readers = [each._replace(check=check_given) for each in readers]
    given = row_files.scan(readers, folder, "validation")
    if given:
        units.say_overlap(train, given)
    return train, given, held, names


def why_none_is_held(source: Input, data: str) -> str:
    rows = source.rows
    if units.count_repeated(source) == rows - 1:
        return f"{data} has no second text to hold out; add rows"
    return (
        f"each of the {rows:,} rows of {data} is a class of its own, so that none can be held out: "
        "is task.label_column right? If so, add rows"
    )


def count_names(inputs: list[Input], held: set[int], problem_type: str) -> Counter:
    """The rows with each label, without those that are held out."""
    counts: Counter = Counter()
    noted = chain.from_iterable(zip(each.notes(), each.noted, strict=True) for each in inputs)
    for rows, (_, known) in noted:
        numbers = rows["label"][~splits.is_in(rows["hash"], held)].astype(int)
        for label, number in enumerate(np.bincount(numbers, minlength=len(known)).tolist()):
            names = json.loads(known[label]) if problem_type == MULTI else [known[label]]
            for name in names:
                counts[name] += number
    return counts


def numbers_of(inputs: list[Input], held: set[int], inside: bool) -> Iterator[np.ndarray]:
    """The numbers of the rows that are held out (`inside`), or of the others: float64 (N,)."""
    for rows in chain.from_iterable(each.notes() for each in inputs):
        yield rows["label"][splits.is_in(rows["hash"], held) == inside]


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
    return tokenizing.load_tokenizer(
        cfg, folder, ["pad_token"], model_input_names=inputs, **SPECIAL
    )


def questions(rows: list[dict], cfg: Any, folder: Path) -> list[tuple[Any, dict]]:
    """For the check of the export: texts or pairs, each with its tokens as they are trained on."""
    tokenizer = load_tokenizer(cfg, folder)
    texts = [tokenizer.decode(row["input_ids"], skip_special_tokens=True) for row in rows]
    asked = [{"text": text} for text in texts if text.strip()]
    if cfg.text_pair_column:
        asked = [{**each, "text_pair": texts[0]} for each in asked]
    columns, _ = encode_texts([(each, "") for each in asked], tokenizer, cfg.max_length)
    names = [name for name in columns if name != "length"]
    inputs = [{name: columns[name][i : i + 1] for name in names} for i in range(len(asked))]
    return [*zip(asked, inputs, strict=True)]


def set_marks(model: Any, cfg: Any, folder: Path) -> None:
    """Writes what samestep predict needs into the config of the model: MARKS."""
    for name in MARKS:  # an earlier training may have left its own
        vars(model.config).pop(name, None)
    if cfg.problem_type == NUMBER:
        scale = json.loads((folder / "scale.json").read_text(encoding="utf-8"))
        model.config.label_mean, model.config.label_std = scale
    if cfg.text_pair_column:
        model.config.text_pair = True


def learn_vocabulary(texts: Iterable[str], size: int, folder: Path) -> None:
    """Learns the tokenizer of a new model: [CLS] before a text, [SEP] after each."""
    ends = {"begin": SPECIAL["cls_token"], "end": SPECIAL["sep_token"]}
    tokenizing.learn_vocabulary(texts, size, folder, first=list(SPECIAL.values()), **ends)


def marks_of(tokenizer: Any, is_pair: bool) -> dict[str, int]:
    """The tokens that collating and augmenting need: pad, and separator (-1: none)."""
    marks = (tokenizer.sep_token_id, tokenizer.eos_token_id, -1)
    separator = next(mark for mark in marks if mark is not None)
    return {"pad": tokenizer.pad_token_id, "separator": separator if is_pair else -1}


def encode_texts(rows: list[Row], tokenizer: Any, max_length: int) -> tuple[dict[str, Any], int]:
    """Columns of the rows' tokens, and the number of rows that were cut to max_length tokens.

    input_ids, and token_type_ids if pairs have them: lists of int32 (T,). length: int32 (N,).
    """
    names = ["input_ids"]
    if "text_pair" in rows[0][0] and "token_type_ids" in tokenizer("", "", verbose=False):
        names.append("token_type_ids")
    texts = {role: [row[role] for row, _ in rows] for role in ROLES if role in rows[0][0]}
    columns, cut = row_files.encode_texts(texts, tokenizer, max_length, names)
    lengths = [len(tokens) for tokens in columns["input_ids"]]
    return {**columns, "length": np.array(lengths, np.int32)}, cut
