"""What is trained: a model that puts texts into classes, gives them labels, or a number.

train.py calls these functions. training/contract.py says what each gets and returns:

    prepare_data(cfg)                     what happens once, before training: download, tokenise
    datasets(cfg, prepared)               (train, validation)
    collate(rows)  count(batch)           a batch of rows; the number of its loss terms
    build_model(cfg, prepared)            the model
    loss_sum(model, batch)                the loss, summed over the terms
    eval_sums(model, batch)  metrics(sums)   what evaluation adds up; the numbers from it
    export(model, output, cfg, prepared)  saves the trained model

and, if they are there: identity, digest, augment, sizes, report. `prepared` is what prepare_data
returned. examples/task.py is a whole task around a plain nn.Module.
"""

import ast
import contextlib
import json
import math
import re
import sysconfig
import textwrap
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F

from tasklib import cache, confusion, pretrained, sources
from tasklib.child import run_in_child
from tasklib.fields import SHAPE, check_fields, check_ignored_fields
from tasklib.messages import one_line
from tasklib.pretrained import ModelConfig
from tasklib.sources import DataConfig
from tasklib.tables import TABLES, Columns, Row

# transformers takes 4 s to import, datasets and scikit-learn 1 s: they wait for what needs them.

Batch = dict[str, torch.Tensor]
ENDINGS = (".txt", *TABLES)
SINGLE, MULTI = "single_label_classification", "multi_label_classification"
TEXTS = ("text", "text_pair")
TOKENS = ("input_ids", "token_type_ids")  # of a row, one value a token
SPECIAL = ["[PAD]", "[CLS]", "[SEP]"]
MARKS = ("label_mean", "label_std", "text_pair")  # of ours in a model's config.json
LONGEST_LIST = 10_000  # characters of a list of Python's in a cell: its parser takes much memory
HEAD = ("classifier", "score", "pooler", "head")  # weights that a model to start from may lack
MOST_NUMBER = 1e18  # its square, the loss, and sums of such are finite in float32


# ---- Config --------------------------------------------------------------------------------------


@dataclass
class TaskConfig(DataConfig, ModelConfig):
    data: str = "stdlib"
    """Rows to train on: stdlib (functions of Python's library, by the area they belong to), a
    .jsonl, .json, .csv, .tsv or .parquet file, also with .gz or .zst behind, a folder of them, a
    folder of .txt files in one folder for each class, or a data set on the Hub."""
    text_column: str = "text"
    """Column of the text."""
    text_pair_column: str = ""
    """Column of a second text, for pairs such as a premise and a hypothesis, or a question and an
    answer; empty: a row has one text."""
    label_column: str = "label"
    """Column of the label, text or number. For several: a list, or text with ; between them."""
    label_columns: str = ""
    """multi_label_classification: a column for each label, 0 or 1, in place of label_column; their
    names with commas between them: toxic,insult,threat."""
    problem_type: Literal[
        "single_label_classification", "multi_label_classification", "regression"
    ] = "single_label_classification"
    """What a text has: one class, any number of labels, or a number. The loss of numbers is the
    square of their error in standard deviations; other errors are in their own unit."""
    class_weights: Literal["none", "balanced"] = "none"
    """Weight of a row's loss in training. balanced: inverse to how frequent its class is, 1 on the
    average row, so that rare classes count as much as frequent ones."""
    max_length: int = 256
    """Tokens of a text that the model sees; the end of longer ones is cut off, in a pair that of
    the longer text."""
    token_dropout: float = 0.0
    """Share of its tokens that a text loses in training, others in each epoch: so that the answer
    does not hang on a few names. The first, the last, and those between two texts stay."""
    vocab_size: int = field(default=8192, metadata=SHAPE)
    """New model: size of its byte-level BPE vocabulary, which is learnt from the training texts."""
    hidden_size: int = field(default=128, metadata=SHAPE)
    """New model: its width."""
    num_layers: int = field(default=1, metadata=SHAPE)
    """New model: transformer layers. With few texts to learn from, more of them do not help."""
    num_heads: int = 4
    """New model: attention heads in a layer."""
    dropout: float = 0.2
    """New model: dropout on embeddings, attention weights, layers, and before the classes."""


def check(cfg: TaskConfig) -> None:
    """Refuse settings that cannot work before anything is read."""
    sources.check_data_config(cfg, ["stdlib"])
    unit = 2 * max(1, cfg.num_heads)  # rotary embeddings turn the dimensions of a head in pairs
    nearest = max(1, (min(cfg.hidden_size, 2**16) + unit // 2) // unit) * unit
    single, several = cfg.problem_type == SINGLE, label_columns(cfg)
    least = 6 if cfg.text_pair_column else 3
    rules = [
        ("problem_type", single or cfg.data != "stdlib", f"{SINGLE} for task.data stdlib"),
        (
            "class_weights",
            single or cfg.class_weights == "none",
            f"none, unless task.problem_type is {SINGLE}",
        ),
        (
            "label_columns",
            not several or cfg.problem_type == MULTI,
            f"empty, unless task.problem_type is {MULTI}",
        ),
        (
            "label_columns",
            not several or len({*several} - {""}) == len(several) > 1,
            "names with commas between them, two or more",
        ),
        (
            "max_length",
            least <= cfg.max_length <= 2**20,
            f"from {least}, for a token of each text and what stands around it, to 1,048,576",
        ),
        (
            "text_pair_column",
            not cfg.text_pair_column or cfg.text_pair_column != cfg.text_column,
            "another column than task.text_column",
        ),
        ("token_dropout", 0 <= cfg.token_dropout < 1, "at least 0 and below 1"),
    ]
    if not cfg.model_name_or_path:
        rules += [
            (
                "vocab_size",
                260 <= cfg.vocab_size <= 2**20,
                "from 260, for 256 bytes and 3 marks, to 1,048,576",
            ),
            ("num_layers", 1 <= cfg.num_layers <= 1000, "from 1 to 1,000"),
            ("num_heads", 1 <= cfg.num_heads <= 1024, "from 1 to 1,024"),
            ("hidden_size", cfg.hidden_size <= 2**16, "at most 65,536"),
            ("hidden_size", cfg.hidden_size == nearest, f"a multiple of 2 x num_heads, {nearest}"),
            ("dropout", 0 <= cfg.dropout < 1, "at least 0 and below 1"),
        ]
    check_fields(cfg, rules)
    if not cfg.model_name_or_path:
        width = cfg.hidden_size
        pretrained.check_memory(width * (cfg.vocab_size + 10 * cfg.num_layers * width))
    plain = cfg.data != "stdlib"
    columns, where = "text_column text_pair_column label_column", "where task.data is stdlib"
    beside = ("label_column", not several, "beside task.label_columns")
    check_ignored_fields(cfg, [(columns, plain, where), beside])


def label_columns(cfg: TaskConfig) -> list[str]:
    """The columns of 0 and 1, one for each label; empty: labels stand in label_column."""
    return [name.strip() for name in cfg.label_columns.split(",")] if cfg.label_columns else []


# ---- Data ----------------------------------------------------------------------------------------


def prepare_data(cfg: TaskConfig) -> Path:
    """Split and tokenise the rows, once, into `prepared_folder(cfg)`."""
    check(cfg)
    pretrained.check_unread(cfg)
    check_model(cfg)
    return cache.prepare_once(cfg, lambda: prepared_folder(cfg), lambda folder: build(cfg, folder))


def identity(cfg: TaskConfig, folder: Path) -> str:
    """The classes or the scale of the numbers, and the vocabulary of a new model."""
    files = ["names.json", "scale.json"] + ([] if cfg.model_name_or_path else ["tokenizer.json"])
    return cache.short_digest(*(folder / name for name in files))


def digest(cfg: TaskConfig, folder: Path) -> str:
    return cache.content_digest(folder)


def datasets(cfg: TaskConfig, folder: Path) -> tuple[Any, Any]:
    """Memory-mapped rows: tokens of up to max_length, their number, label, weight, padding."""
    from datasets import load_from_disk

    parts = [load_from_disk(folder / part) for part in ("train", "validation")]
    return parts[0].with_format("numpy"), parts[1].with_format("numpy")


def sizes(dataset: Any) -> np.ndarray:
    """Tokens of each row."""
    return dataset["length"][:]


def augment(row: dict, generator: torch.Generator) -> dict:
    """The row without some of its tokens; the first, the last and separators stay."""
    if not row["token_dropout"]:
        return row
    kept = (torch.rand(len(row["input_ids"]), generator=generator) >= row["token_dropout"]).numpy()
    kept[[0, -1]] = True
    kept |= row["input_ids"] == row["separator"]
    rest = {name: row[name][kept] for name in TOKENS if name in row}
    return {**row, **rest, "length": kept.sum()}


def collate(rows: list[dict]) -> Batch:
    """input_ids and attention_mask, int64 (B, longest of these rows), with labels and weights (B,).

    Labels are classes, int64 (B,); labels, 0 or 1, float32 (B, C); or numbers in standard
    deviations from their mean, float32 (B,). Pairs may have token_type_ids too.
    """
    lengths = torch.tensor([int(row["length"]) for row in rows])
    batch = {}
    for name in [name for name in TOKENS if name in rows[0]]:
        filler = int(rows[0]["pad"]) if name == "input_ids" else 0
        batch[name] = torch.full((len(rows), int(lengths.max())), filler)
        for line, row in zip(batch[name], rows, strict=True):
            line[: len(row[name])] = torch.as_tensor(row[name])
    batch["attention_mask"] = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    for name in rows[0].keys() - {*TOKENS, "length", "pad", "separator", "token_dropout"}:
        batch[name] = torch.as_tensor(np.stack([row[name] for row in rows]))
    return batch


def count(batch: Batch) -> int:
    return len(batch["labels"])


# ---- Model and loss ------------------------------------------------------------------------------


def build_model(cfg: TaskConfig, folder: Path) -> torch.nn.Module:
    """A model to start from, with new weights for the classes where it needs them, or a ModernBERT.

    It has what `report` and `export` need besides it.
    """
    from transformers import AutoModelForSequenceClassification, ModernBertConfig

    tokenizer = load_tokenizer(cfg, folder)
    names = json.loads((folder / "names.json").read_text(encoding="utf-8"))
    about = {
        "num_labels": len(names),
        "id2label": dict(enumerate(names)),
        "label2id": {name: i for i, name in enumerate(names)},
        "problem_type": cfg.problem_type,
        "pad_token_id": tokenizer.pad_token_id,
    }
    auto: Any = AutoModelForSequenceClassification
    if cfg.model_name_or_path:
        model = pretrained.load_model(auto, cfg, HEAD, ignore_mismatched_sizes=True, **about)
    else:
        config = ModernBertConfig(
            vocab_size=len(tokenizer),
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
            **about,
        )
        model = pretrained.new_model(auto, config, cfg)
    for name in MARKS:  # of another training, in the config of a model to start from
        vars(model.config).pop(name, None)
    if cfg.problem_type == "regression":
        scale = json.loads((folder / "scale.json").read_text(encoding="utf-8"))
        model.config.label_mean, model.config.label_std = scale
    if cfg.text_pair_column:
        model.config.text_pair = True
    return model


def outputs(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """What the model says: float32 (B, C), of numbers (B, 1)."""
    names = ("input_ids", "attention_mask", "token_type_ids")
    return model(**{name: batch[name] for name in names if name in batch}).logits.float()


def is_class(batch: Batch) -> bool:
    return not batch["labels"].is_floating_point()


def losses(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """One loss a row, (B,): cross entropy in nats, that of the labels' mean, or squared error."""
    labels = batch["labels"]
    if is_class(batch):
        found = F.cross_entropy(logits, labels, reduction="none")
    elif labels.ndim == 2:
        found = F.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(1)
    else:
        found = (logits[:, 0] - labels).square()
    return found * batch["weight"]


def loss_sum(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The weighted losses of the rows, of which each is one term."""
    return losses(outputs(model, batch), batch).sum()


# ---- Evaluation and export -----------------------------------------------------------------------


@torch.no_grad()
def eval_sums(model: torch.nn.Module, batch: Batch) -> Batch:
    """The loss, and either errors or tables of what was right and what was said.

    `table`: (C, C), rows of class i that were taken for j; or of labels (C, 2, 2), one table each.
    """
    logits, labels = outputs(model, batch), batch["labels"]
    sums = {"loss": losses(logits, batch).sum(), "rows": torch.ones_like(batch["weight"]).sum()}
    if is_class(batch):
        right, said = (F.one_hot(i, logits.shape[1]) for i in (labels, logits.argmax(1)))
        return sums | {"table": right.float().T @ said.float()}
    if labels.ndim == 2:
        right, said = (torch.stack([1 - x, x]) for x in (labels, (logits > 0).float()))
        return sums | {"table": torch.einsum("ibc,jbc->cij", right, said)}
    sums |= {"error": (logits[:, 0] - labels).abs().sum()}
    return sums | {name: batch[name].sum() for name in ("spread", "deviation")}


def metrics(sums: Batch) -> dict[str, float]:
    """Mean loss of a row, and scores: of numbers mae and rmse in their own unit, which the loss,
    in squares of their standard deviation, is not."""
    total = {name: float(value) for name, value in sums.items() if name != "table"}
    scores = {"loss": total["loss"] / total["rows"]}
    if "table" in sums:
        scores |= confusion.scores(sums["table"])
    else:
        deviation = total["deviation"] / total["rows"]
        scores["mae"] = total["error"] / total["rows"] * deviation
        scores["rmse"] = math.sqrt(scores["loss"]) * deviation
        # Of rows that all have the same number nothing can be explained.
        scores["r2"] = 1 - total["loss"] / total["spread"] if total["spread"] else 0.0
    return scores


def report(model: Any, sums: Batch, output: Path, cfg: TaskConfig, folder: Path) -> dict[str, Any]:
    """The scores of each class, and a picture of which were taken for which; or errors."""
    if "table" in sums:
        return confusion.report(sums["table"], [*model.config.id2label.values()], output)
    scores, rows = metrics(sums), sums["rows"]
    spread = math.sqrt(sums["spread"] / rows) * float(sums["deviation"] / rows)
    text = f"{scores['rmse']:,.5g} root mean square, {scores['mae']:,.5g} mean absolute"
    return {"errors": f"{text}; of always saying the mean: {spread:,.5g} root mean square"}


def export(model: Any, output: Path, cfg: TaskConfig, folder: Path) -> None:
    """Files that AutoModelForSequenceClassification and AutoTokenizer load."""
    with pretrained.quiet():
        model.save_pretrained(output)
        load_tokenizer(cfg, folder).save_pretrained(output)


# ---- Preparation ---------------------------------------------------------------------------------

# Packages and modules of Python 3.10 and later, by what they are for.
AREAS = {
    **{name: name for name in "asyncio email encodings importlib multiprocessing xml".split()},
    "testing": "unittest doctest",
    "numbers": "_pydecimal colorsys fractions numbers random statistics",
    "debugging": "bdb cProfile dis inspect pdb profile pstats trace traceback",
    "archives": "_compression bz2 gzip lzma tarfile zipfile",
}


def prepared_folder(cfg: TaskConfig) -> Path:
    """Its name depends on all that shapes the data: settings, files and code."""
    names = """text_column text_pair_column label_column label_columns problem_type class_weights
        max_length token_dropout vocab_size model_name_or_path revision""".split()
    shipped = [file for *_, file in shipped_files()] if cfg.data == "stdlib" else None
    used = cache.hash_input_files(cfg, ENDINGS, *pretrained.used_files(cfg), shipped=shipped)
    settings = [AREAS, *(getattr(cfg, name) for name in names)]
    shaped_by = [shipped_files, shipped_rows, functions, load_tokenizer, build]
    shaped_by += [scale_of, learn_vocabulary, read, names_in, check_there, labels_of, list_in]
    shaped_by += [is_bracketed, label_of]
    return cache.cache_folder(cfg, settings, used, shaped_by)


def shipped_files() -> list[tuple[str, str, Path]]:
    """The files of Python's library in each area: the area, the path in the library, the file."""
    library, found = Path(sysconfig.get_path("stdlib")), []
    for area, names in AREAS.items():
        for name in names.split():
            files = [library / f"{name}.py", *sorted((library / name).rglob("*.py"))]
            places = [(file.relative_to(library).parts, file) for file in files if file.is_file()]
            found += [(area, "/".join(p), f) for p, f in places if not {"test", "tests"} & {*p}]
    return found


def shipped_rows() -> Iterator[Row]:
    """Functions of three lines and more, each under the first line of its class; place: the file.

    What is the same in several files, but for strings and numbers, counts once, or not at all if
    they belong to different areas: encodings hold the same functions a hundred times over.
    """
    found: dict[str, list[Row]] = {}
    for area, place, file in shipped_files():
        with tokenize.open(file) as source:  # heeds the coding line of what is not UTF-8
            text = source.read()
        for function, owner in functions(ast.parse(text), text.split("\n")):
            row = {"text": f"{owner}\n{function}".lstrip(), "label": area}
            same = re.sub(r"'[^'\n]*'|\"[^\"\n]*\"|\d+", "", function)
            found.setdefault(same, []).append((row, place))
    for rows in found.values():
        if len({row["label"] for row, _ in rows}) == 1:
            yield rows[0]


def functions(node: ast.AST, lines: list[str], owner: str = "") -> Iterator[tuple[str, str]]:
    """The source of each function below a node, and the first line of the class it stands in."""
    for child in ast.iter_child_nodes(node):
        kept = lines[child.lineno - 1].strip() if isinstance(child, ast.ClassDef) else owner
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            own = lines[child.lineno - 1 : child.end_lineno]
            if len(own) >= 3:
                yield textwrap.dedent("\n".join(own)), owner
        yield from functions(child, lines, kept)


def check_model(cfg: TaskConfig) -> None:
    """Refuse a model to start from that cannot be read, or was made for shorter texts."""
    if not cfg.model_name_or_path:
        return
    from transformers import AutoConfig

    config = pretrained.load(AutoConfig, cfg)
    most = getattr(config, "max_position_embeddings", None)
    most = most if isinstance(most, int) else -1
    if re.search("roberta|camembert|longformer|mpnet|data2vec", config.model_type):
        most -= 2  # their positions begin after that of padding
    tokenizer = load_tokenizer(cfg, None, keep_length=True)
    lengths = most, tokenizer.model_max_length
    most = min((length for length in lengths if length > 0), default=math.inf)
    check_fields(cfg, [("max_length", cfg.max_length <= most, f"at most {most}, as the model's")])
    special = tokenizer.num_special_tokens_to_add
    if cfg.text_pair_column and special(pair=True) <= special(pair=False):
        name = one_line(cfg.model_name_or_path, 100)
        raise ValueError(
            f"task.text_pair_column: the tokenizer of {name} puts nothing between two texts; put "
            "them into one column, or give another model"
        )


def load_tokenizer(cfg: TaskConfig, folder: Path | None, keep_length: bool = False) -> Any:
    """The tokenizer of the model to start from, or the one in the folder of prepared data.

    It cuts at max_length.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if cfg.model_name_or_path:
        tokenizer = pretrained.load(AutoTokenizer, cfg)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        if tokenizer.pad_token is None:
            name = one_line(cfg.model_name_or_path, 100)
            raise ValueError(f"task.model_name_or_path: the tokenizer of {name} has no pad token")
    else:
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"),
            **dict(zip(("pad_token", "cls_token", "sep_token"), SPECIAL, strict=True)),
            model_input_names=["input_ids", "attention_mask"],
        )
    if not keep_length:
        tokenizer.model_max_length = cfg.max_length
    return tokenizer


def build(cfg: TaskConfig, folder: Path) -> dict[str, str]:
    """Save the rows of training and validation, the labels' names, and a new vocabulary.

    Gives the digest of the rows.
    """
    from datasets import Dataset, disable_progress_bars

    train, validation, names = read(cfg)
    if not cfg.model_name_or_path:
        texts = [row[role] for row, _ in train for role in TEXTS if role in row]
        run_in_child(learn_vocabulary, texts, cfg, folder)
    tokenizer = load_tokenizer(cfg, folder)
    marks = (tokenizer.sep_token_id, tokenizer.eos_token_id, -1)
    separator = next(mark for mark in marks if mark is not None)
    mean, deviation = scale_of(train) if cfg.problem_type == "regression" else (0.0, 1.0)
    numbers, cut, parts = {name: i for i, name in enumerate(names)}, 0, {}
    disable_progress_bars()
    for part, rows in (("train", train), ("validation", validation)):
        labels = [row["label"] for row, _ in rows]
        texts = [tuple(row[role] for role in TEXTS if role in row) for row, _ in rows]
        columns: dict[str, Any] = {"input_ids": []}
        if cfg.text_pair_column and "token_type_ids" in tokenizer("", "", verbose=False):
            columns["token_type_ids"] = []
        for start in range(0, len(texts), 1000):  # bounds the memory of one call
            some = texts[start : start + 1000]
            encoded = tokenizer(*map(list, zip(*some, strict=True)), verbose=False)
            for i, each in enumerate(some):
                found = {name: encoded[name][i] for name in columns}
                if len(found["input_ids"]) > cfg.max_length:
                    found = tokenizer(*each, truncation=True)
                    cut += 1
                for name, values in columns.items():
                    values.append(np.array(found[name], np.int32))
        ids = columns["input_ids"]
        columns["length"] = np.array([len(tokens) for tokens in ids])
        columns["pad"] = np.full(len(ids), tokenizer.pad_token_id)
        columns["separator"] = np.full(len(ids), separator if cfg.text_pair_column else -1)
        columns["weight"] = np.ones(len(ids), np.float32)
        if cfg.problem_type == SINGLE:
            columns["labels"] = np.array([numbers[label] for label in labels])
            if cfg.class_weights == "balanced" and part == "train":
                often = np.bincount(columns["labels"], minlength=len(names))
                weights = len(ids) / (often > 0).sum() / np.maximum(often, 1)
                columns["weight"] = weights[columns["labels"]].astype(np.float32)
        elif cfg.problem_type == MULTI:
            columns["labels"] = np.zeros((len(ids), len(names)), np.float32)
            for i, label in enumerate(labels):
                columns["labels"][i, [numbers[name] for name in label]] = 1
        else:
            columns["labels"] = np.array(labels, np.float64)
        parts[part] = dict(columns)  # what follows is made of these, and of settings
        columns["token_dropout"] = np.full(len(ids), cfg.token_dropout, np.float32)
        if cfg.problem_type == "regression":
            labels = (columns["labels"] - mean) / deviation
            columns["labels"] = labels.astype(np.float32)
            columns["deviation"] = np.full(len(ids), deviation, np.float32)
            # For r2. Of equal numbers the mean may differ from them in the last digit.
            spread = (labels - labels.mean()) ** 2 * (labels.min() < labels.max())
            columns["spread"] = spread.astype(np.float32)
        Dataset.from_dict(columns).save_to_disk(folder / part)
    lengths = np.concatenate([columns["length"] for columns in parts.values()])
    size = f"{lengths.mean():.0f} tokens on average, {lengths.max():,} at most"
    some = f"; {cut:,} cut to {cfg.max_length:,}" * (cut > 0)
    print(f"Prepared: {'pairs' if cfg.text_pair_column else 'texts'} of {size}{some}", flush=True)
    for name, value in (("names", names), ("scale", [mean, deviation])):
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return {"content": cache.hash_columns(parts)}


def scale_of(rows: list[Row]) -> tuple[float, float]:
    """Mean and standard deviation of the rows' numbers, the same on any machine; of equal ones 1.

    A model learns numbers as standard deviations from the mean: a loss of others may be so large
    that nothing is learnt.
    """
    values = [row["label"] for row, _ in rows]
    mean = math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values) / len(values)
    return mean, math.sqrt(squares) if squares and min(values) < max(values) else 1.0


def learn_vocabulary(texts: list[str], cfg: TaskConfig, folder: Path) -> None:
    """Save a byte-level BPE of these texts, with [CLS] before, [SEP] after a text."""
    from tokenizers import ByteLevelBPETokenizer
    from tokenizers.processors import BertProcessing

    tokenizer = ByteLevelBPETokenizer()
    some = sources.break_long_words(texts)
    tokenizer.train_from_iterator(some, cfg.vocab_size, special_tokens=SPECIAL, show_progress=False)
    _, cls, sep = ((name, tokenizer.token_to_id(name)) for name in SPECIAL)
    tokenizer._tokenizer.post_processor = BertProcessing(sep, cls)
    tokenizer.save(str(folder / "tokenizer.json"))


# ---- Preparation: rows ---------------------------------------------------------------------------


def read(cfg: TaskConfig) -> tuple[list[Row], list[Row], list[str]]:
    """The rows to train and to evaluate on, with labels that can be learnt, and the labels' names.

    A number has one name, that of its column.
    """
    several, stdlib = label_columns(cfg), cfg.data == "stdlib"
    columns: Columns = {"text": cfg.text_column, "label": several or cfg.label_column}
    if cfg.text_pair_column:
        columns["text_pair"] = cfg.text_pair_column
    texts = [role for role in TEXTS if role in columns]
    rows, given = sources.read_splits(cfg, columns, ENDINGS, shipped_rows() if stdlib else None)
    field = "validation_data" if cfg.validation_data else "validation_split"

    def check_row(row: dict) -> None:
        for role in texts:
            name = "text" if role == "text" else "second text"
            check_there(name, row[role])
            if not isinstance(row[role], str):
                raise ValueError(f"the {name} is {one_line(repr(row[role]), 60)}, not text")
        if several:
            row["label"] = labels_of(row["label"], several)
            return
        if not (row["label"] == "" and cfg.problem_type == MULTI):
            check_there("label", row["label"])
        row["label"] = label_of(row["label"], cfg.problem_type)

    rows = sources.keep_valid_rows(rows, cfg, "data", check_row)
    given = given and sources.keep_valid_rows(given, cfg, field, check_row)
    for name, part in (("data", rows), (field, given)):
        if part == []:
            where = one_line(getattr(cfg, name), 100)
            raise ValueError(f"task.{name}: there are no rows in {where}")
    if given is None:
        # Functions of one file are alike, so that they stay together; so do equal rows.
        train, validation = sources.hold_out(
            rows,
            cfg.validation_fraction,
            lambda row: row[1] if stdlib else "\0".join(row[0][role] for role in texts),
            lambda row: row[0]["label"] if cfg.problem_type == SINGLE else None,
        )
    else:
        train, validation = rows, given
        sources.warn_of_overlap(
            *(
                [json.dumps([row[name] for name in TEXTS if name in row]) for row, _ in part]
                for part in (rows, given)
            )
        )
    data = one_line(cfg.data, 100)
    if not validation and len({row["text"] for row, _ in rows}) > 1:
        raise ValueError(
            f"task.data: each of the {len(rows):,} rows of {data} is a class of its own, so that "
            "none can be held out: is task.label_column right? If so, add rows"
        )
    if not validation:
        raise ValueError(f"task.data: {data} has no second text to hold out; add rows")
    size = f"{len(train):,} rows of {data} to train and {len(validation):,} to evaluate on"
    if cfg.problem_type == "regression":
        mean, deviation = scale_of(train)
        about = f"mean {mean:.6g}, standard deviation {deviation:.4g}: such an error is a loss of 1"
        if len({row["label"] for row, _ in train}) == 1:
            about = f"all numbers are {mean:.6g}, from which nothing can be learnt"
        print(f"Preparing data: {size}; {about}", flush=True)
        return train, validation, [cfg.label_column]
    names = several or sorted({name for row, _ in rows for name in names_in(row)})
    if not several and all(name.isdecimal() and len(name) < 100 for name in names):
        names = sorted(names, key=int)
    if len(names) < 2 or not any(names_in(row) for row, _ in rows):
        found = f"only the label {one_line(names[0], 60)}" if len(names) == 1 else "no label"
        raise ValueError(f"task.data: {data} has {found}; there is nothing to learn")
    known = {*names}
    for row, place in validation:
        for name in names_in(row):
            if name not in known:
                some = one_line(", ".join(names[:10]), 100) + ", ..." * (len(names) > 10)
                name = one_line(name, 60)
                raise ValueError(f"task.{field}: {place}: {name} is no label of training: {some}")
    often = Counter(name for row, _ in train for name in names_in(row))
    name, most = (often.most_common(1) or [(names[0], 0)])[0]
    kind = "classes" if cfg.problem_type == SINGLE else "labels"
    largest = f"the largest {one_line(name, 60)} with {most / len(train):.1%} of the rows"
    about = f"{len(names)} {kind}, {largest}"
    print(f"Preparing data: {size}; {about}", flush=True)
    once = sum(number == 1 for number in often.values())
    if 2 * once > len(train):
        print(
            f"Preparing data: {len(names):,} {kind} of {len(train):,} rows, {once:,} of them in "
            "one row alone: are task.label_column and task.problem_type right?",
            flush=True,
        )
    return train, validation, names


def names_in(row: dict) -> list[str]:
    return row["label"] if isinstance(row["label"], list) else [row["label"]]


def check_there(name: str, value: Any) -> None:
    """Raises Incomplete for null, NaN, which tables have in its place, and text of spaces."""
    if value is None or value != value or not str(value).strip():
        raise sources.IncompleteRow(f"the {name} is {'NaN' if value != value else 'empty'}")


def labels_of(values: Any, columns: list[str]) -> list[str]:
    """The columns whose value is 1 or true; raises ValueError for any but these, 0 and false."""
    known = {"0": False, "1": True, "0.0": False, "1.0": True, "false": False, "true": True}
    found = []
    if not isinstance(values, dict):  # of a .txt file
        raise ValueError(f"a .txt file has no column {one_line(columns[0], 60)}")
    for name, value in values.items():
        check_there(f"label {one_line(name, 60)}", value)
        is_there = known.get(str(value).strip().lower())
        if is_there is None:
            value = one_line(repr(value), 60)
            raise ValueError(f"the label {one_line(name, 60)} is {value} but must be 0 or 1")
        if is_there:
            found.append(name)
    return found


def list_in(value: Any) -> list | None:
    """A list, or the one that text is in JSON, in Python, or as NumPy prints it; None: neither."""
    if isinstance(value, list):
        return value
    text = value.strip() if isinstance(value, str) else ""
    if is_bracketed(text):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(text)
        # Python would put ['a' 'b'], which is NumPy's, together to one word.
        text = re.sub(r"(['\"])\s+(?=['\"])", r"\1,", text[:LONGEST_LIST])
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return ast.literal_eval(text)
    return None


def is_bracketed(value: Any) -> bool:
    return isinstance(value, str) and value.strip()[:1] + value.strip()[-1:] == "[]"


def label_of(value: Any, problem_type: str) -> Any:
    """A class's name, a list of names, or a number; raises ValueError for anything else."""
    shown = one_line(repr(value), 60)
    if problem_type == SINGLE:
        if list_in(value) is not None:
            raise ValueError(f"the label {shown} is a list: --task.problem_type {MULTI} reads it")
        whole = isinstance(value, float) and value.is_integer()  # beside null, tables have 1.0 of 1
        if whole or isinstance(value, str | int):
            return str(int(value) if whole else value).strip()
    if problem_type == MULTI:
        parts = list_in(value)
        if parts is None and isinstance(value, str) and not is_bracketed(value):
            parts = value.split(";")
        if parts is not None and all(isinstance(part, str | int) for part in parts):
            return sorted({str(part).strip() for part in parts} - {""})
    if problem_type == "regression" and isinstance(value, str | int | float):
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except OverflowError:  # a whole number such as 10^400
            number = MOST_NUMBER * 2
        except ValueError:
            number = math.nan
        if abs(number) <= MOST_NUMBER:
            return number
        if math.isfinite(number):
            raise ValueError(f"the label {one_line(value, 40)} is too large: divide all labels")
    wanted = {SINGLE: "text or a whole number", MULTI: "a list of names, or text with ; between"}
    number = "a finite number such as 0.5"
    raise ValueError(f"the label is {shown}, not {wanted.get(problem_type, number)}")
