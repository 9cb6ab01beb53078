"""Labelled texts and pairs of texts: read, split into training and validation rows, encoded."""

import json
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
from samestep.text import row_files, tokenizing, units
from samestep.text.units import Input, RowKind

# transformers takes 4 s to import: it waits for the functions that need it.

ENDINGS = (".txt", *TABLES)
ROLES = ("text", "text_pair")
MARKS = ("label_mean", "label_std", "text_pair")  # attributes that we add to a model's config
SPECIAL = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
# A new tokenizer puts [CLS] before a text, and [SEP] after each.
VOCABULARY: dict[str, Any] = {"first": [*SPECIAL.values()], "begin": "[CLS]", "end": "[SEP]"}


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


def build(cfg: Any, folder: Path, shipped: dict) -> dict[str, Any]:
    """Fills the folder of prepared data, or goes on filling it; what `cache.prepare` wants.

    The place of a `shipped` row is the file it is from: functions of one file are alike, and so all
    held out, or none. Beside the rows it saves names.json, scale.json, and the vocabulary of a new
    model.
    """
    kind, label_columns = cfg.problem_type, labels.split_names(cfg.label_columns)

    def with_places(read: Callable[[], Iterable[Row]]) -> Iterable[Row]:
        return (({**row, "file": place}, place) for row, place in read())

    def key(row: dict) -> str:
        return "\0".join(texts_of(row))

    row_kind = RowKind(
        ENDINGS,
        columns_of,
        lambda row: check_row(row, label_columns, kind),
        key,
        texts_of,
        nothing_held="no row of {data} can be held out: there is no second text, or each is a "
        "class of its own (is task.label_column right?); add rows",
        shipped={name: partial(with_places, read) for name, read in shipped.items()},
        group=lambda row: row.get("file") or key(row),
        label=lambda row: row["label"] if kind != MULTI else json.dumps(row["label"]),
        by_label=kind == SINGLE,
    )
    inputs, held = units.scan(cfg, folder, row_kind)
    train, validation = units.parts_of(inputs)
    names = names_of(cfg, train, validation)
    weights, scale = np.ones(len(names), np.float32), {"train": Numbers(0.0, 1.0, False)}
    rows = sum(map(len, labels_of(train, held)))
    if kind == NUMBER:
        scale["train"] = labels.describe_numbers(lambda: labels_of(train, held))
        part = (validation, set(), False) if validation else (train, held, True)
        scale["validation"] = labels.describe_numbers(lambda: labels_of(*part))
        mean, std, differ = scale["train"]
        about = [f"mean {mean:.6g}, standard deviation {std:.4g}: such an error is a loss of 1"]
        about = about if differ else [f"all numbers are {mean:.6g}: nothing to learn"]
    else:
        counts = count_names(train, held, kind)
        about = [*labels.describe_labels(counts, rows, names, kind)]
        if cfg.class_weights == "balanced":
            weights = labels.balanced_weights(np.array([counts[name] for name in names]))
    about[0] = f"{rows:,} rows of {one_line(cfg.data, 100)} to train on; {about[0]}"
    for line in filter(None, about):
        print(f"Preparing data: {line}", flush=True)

    units.learn_vocabulary(cfg, folder, inputs, held, **VOCABULARY)
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

    for name, value in (("names", names), ("scale", scale["train"][:2])):
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    constants: dict[str, int | float] = {**marks_of(tokenizer, bool(cfg.text_pair_column))}
    if kind == NUMBER:
        constants["deviation"] = scale["train"].std
    shown = "pairs" if cfg.text_pair_column else "texts"
    cut_at = {"input_ids": (shown, cfg.max_length)}
    return row_files.write(folder, inputs, held, encode, cut_at, constants)


def names_of(cfg: Any, train: list[Input], validation: list[Input]) -> list[str]:
    """The names of the labels, or of numbers that of the column. Raises ValueError for a label that
    validation rows alone have."""
    if cfg.problem_type == NUMBER:
        return [cfg.label_column]
    columns = labels.split_names(cfg.label_columns)
    found = count_names(train, set(), cfg.problem_type)
    names = labels.collect_names(found, columns, cfg.data)
    for source in validation:
        try:
            found = count_names([source], set(), cfg.problem_type)
            labels.check_known({"label": sorted(found)}, names, {*names})
        except ValueError as error:
            raise ValueError(f"task.{source.field}: {source.data}: {error}") from None
    return names


def labels_of(inputs: list[Input], held: set[int], inside: bool = False) -> Iterator[np.ndarray]:
    """What is noted of the labels of the rows that are held out (`inside`), or of the others: for
    each unit float64 (N,)."""
    for rows in chain.from_iterable(each.notes() for each in inputs):
        yield rows["label"][splits.is_in(rows["hash"], held) == inside]


def count_names(inputs: list[Input], held: set[int], problem_type: str) -> Counter:
    """The rows with each label, without those that are held out."""
    counts: Counter = Counter()
    known = [names for each in inputs for _, names in each.noted]
    for names, numbers in zip(known, labels_of(inputs, held), strict=True):
        found = np.bincount(numbers.astype(int), minlength=len(names)).tolist()
        for name, number in zip(names, found, strict=True):
            for each in json.loads(name) if problem_type == MULTI else [name]:
                counts[each] += number
    return counts


# ---- Tokenizer -----------------------------------------------------------------------------------


def check_model(cfg: Any) -> None:
    """Raises ValueError for a model to start from that cannot be read, or that was made for shorter
    texts or for texts without a pair."""
    if not cfg.model_name_or_path:
        return
    tokenizing.check_lengths(cfg, "max_length")
    tokenizer = load_tokenizer(cfg)
    most, special = tokenizer.model_max_length, tokenizer.num_special_tokens_to_add
    wanted = f"at most {most}, as the model's"
    check_fields(cfg, [("max_length", cfg.max_length <= most, wanted)])
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


def test_inputs(rows: list[dict], cfg: Any, data: Path) -> list[tuple[Any, dict]]:
    """For the check of the export: texts or pairs, each with its tokens as they are trained on."""
    tokenizer = load_tokenizer(cfg, data)
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
