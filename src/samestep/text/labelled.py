"""Texts, or pairs of texts, with labels: read, held out, tokenized, and shown as rows."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import datasets

from samestep.base.fields import check_fields
from samestep.data import demo_data, labels, sources
from samestep.data.files import TABLES
from samestep.data.inputs import RowFormat, find_inputs
from samestep.data.labels import MULTI, NUMBER, SINGLE
from samestep.data.rows import NOTES, load_rows
from samestep.data.views import Rows
from samestep.models import classification, next_token, pretrained
from samestep.text import tokenizing

TEXTS = ("text", "text_pair")
TOKENS = ("input_ids", "token_type_ids")  # columns with a number for each token
_MARKS = ("label_mean", "label_std", "text_pair")  # attributes that we add to a model's config


# ---- Config --------------------------------------------------------------------------------------


def check_config(cfg: Any) -> None:
    """Raises ValueError for fields of the data and the model that do not fit each other."""
    sources.check_data_config(cfg, ["stdlib"])
    data = {each.data for each in sources.split_data(cfg.data)}
    single = cfg.problem_type == SINGLE
    shortest = 6 if cfg.text_pair_column else 3
    other_column = not cfg.text_pair_column or cfg.text_pair_column != cfg.text_column
    unless = "unless task.problem_type is"
    rules = [
        ("problem_type", single or "stdlib" not in data, f"{SINGLE} for task.data stdlib"),
        ("class_weights", single or cfg.class_weights == "none", f"none, {unless} {SINGLE}"),
        ("max_length", cfg.max_length >= shortest, f"at least {shortest}, with special tokens"),
        ("text_pair_column", other_column, "another column than task.text_column"),
        pretrained.width_rule(cfg),
    ]
    check_fields(cfg, rules)
    pretrained.check_unread(cfg)


# ---- Rows ----------------------------------------------------------------------------------------


def normalize(row: dict, cfg: Any) -> dict[str, Any]:
    """The texts of a row and its label, parsed; raises ValueError for one without them."""
    found = {"text": sources.require_text("text", row[cfg.text_column])}
    if cfg.text_pair_column:
        found["text_pair"] = sources.require_text("second text", row[cfg.text_pair_column])
    return found | {"label": labels.read_label(row, cfg)}


def read_rows(cfg: Any, folder: Path) -> datasets.DatasetDict:
    """The rows of cfg.data as splits train and validation: `text`, `text_pair` of pairs, and
    `label`, of which `folder` gets what labels.encode needs."""
    tokenizing.check_lengths(cfg, "max_length")
    kinds = {SINGLE: datasets.Value("string"), NUMBER: datasets.Value("float64")}
    kinds[MULTI] = datasets.List(datasets.Value("string"))
    names = TEXTS if cfg.text_pair_column else TEXTS[:1]
    columns = filter(None, [cfg.text_column, cfg.text_pair_column, cfg.label_column])
    form = RowFormat(
        dict.fromkeys(columns, True),
        partial(normalize, cfg=cfg),
        {name: datasets.Value("string") for name in names} | {"label": kinds[cfg.problem_type]},
        group=lambda row: "\0".join(row[name] for name in names),
    )
    bundled = {"stdlib": demo_data.area_rows}
    inputs = find_inputs(cfg, bundled, (*TABLES, ".txt"), in_classes=True)
    is_given = any(each.is_validation for each in inputs)
    rows = load_rows(inputs, cfg, form)
    labels.learn(rows, cfg, folder, is_given)
    return rows


# ---- Tokens --------------------------------------------------------------------------------------


def check_tokenizer(tokenizer: Any, cfg: Any) -> None:
    """Raise ValueError for a pretrained model that was made for shorter texts, or for texts without
    a pair."""
    most, special = tokenizer.model_max_length, tokenizer.num_special_tokens_to_add
    check_fields(cfg, [("max_length", cfg.max_length <= most, f"at most {most}, as the model's")])
    if cfg.text_pair_column and special(pair=True) <= special(pair=False):
        text = f"the tokenizer of {cfg.model_name_or_path} puts nothing between two texts"
        hint = "put them into one column, or give another model"
        raise ValueError(f"task.text_pair_column: {text}; {hint}")


def view(dataset: datasets.Dataset, cfg: Any) -> Rows:
    """A map-style view of tokenized rows: their tokens, labels and weights."""
    names = [name for name in dataset.column_names if name not in NOTES]
    return Rows(dataset, names, ["input_ids"], cfg)


# ---- Scores, model and export --------------------------------------------------------------------


def scores(sums: dict, data: Any) -> dict[str, float]:
    """Scores of the table of classes or labels, or of the errors of numbers."""
    if "table" in sums:
        return classification.score_table(sums["table"])
    return classification.score_errors(sums, labels.read(data.folder)["std"])


def finish_model(model: Any, cfg: Any, data: Any) -> None:
    """Write what samestep predict needs into the config of the model: _MARKS.

    Raises ValueError where padding on the left changes the answer to a text: a model with learned
    positions, such as GPT-2, counts the padding.
    """
    padding = copy.deepcopy(tokenizing.load_tokenizer(data.folder))  # one that has padded is saved
    if padding.padding_side == "left" and model.device.type != "meta":
        answers = []
        with next_token.evaluating(model):
            for texts in (["a"], ["a b c d e f", "a"]):
                inputs = padding(texts, padding=True, return_tensors="pt")
                answers.append(model(**inputs).logits[-1])
        if not next_token.are_close(*answers):
            raise ValueError(
                "task.model_name_or_path: its tokenizer pads on the left, and the positions of a "
                f"{model.config.model_type} count the padding, so that a text gets another answer "
                'beside a longer one; write "padding_side": "right" in tokenizer_config.json'
            )
    for name in _MARKS:  # an earlier training may have left its own
        vars(model.config).pop(name, None)
    if cfg.problem_type == NUMBER:
        scale = labels.read(data.folder)
        model.config.label_mean, model.config.label_std = scale["mean"], scale["std"]
    if cfg.text_pair_column:
        model.config.text_pair = True


def test_inputs(rows: list[dict], cfg: Any, data: Any) -> list[tuple[Any, dict]]:
    """For the check of the export: texts or pairs, each with its tokens as they are trained on."""
    tokenizer = tokenizing.load_tokenizer(data.folder)
    texts = tokenizer.batch_decode([row["input_ids"] for row in rows], skip_special_tokens=True)
    options = {"truncation": True, "max_length": cfg.max_length, "return_tensors": "np"}
    inputs = []
    for text in filter(str.strip, texts):
        asked = {"text": text}
        if cfg.text_pair_column:
            asked["text_pair"] = texts[0]
        tokens = tokenizer(**asked, **options)
        inputs.append((asked, {name: tokens[name] for name in TOKENS if name in tokens}))
    return inputs
