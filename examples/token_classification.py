"""Token classification (NER, tagging): the first token of a word has its label; F1 of entities.

make train ARGS="--max_steps 200 --learning_rate 2e-3"
make train ARGS="--task.data conll.jsonl --task.model_name_or_path google-bert/bert-base-cased"
"""

import keyword
import os
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import datasets
import torch
import torch.nn.functional as F
from transformers import AutoModelForTokenClassification
from transformers.data import DataCollatorForTokenClassification

from samestep import DataConfig, ModelConfig, labels, load_splits, map_rows, pretrained, tokenizing
from samestep.text.tokenizing import load_tokenizer

UNIT = "words"


@dataclass
class TaskConfig(DataConfig, ModelConfig):
    data: str = ""
    """Rows {tokens, ner_tags}: a file (.jsonl, .parquet), a folder of such, or a dataset on the
    Hub. Empty: statements of Python's library, with the kinds of their tokens."""
    labels: str = ""
    """Names of the tags 0, 1 and so on, as O,B-PER,I-PER, where rows have numbers."""
    max_length: int = 64
    """Maximum number of tokens in a sample; a longer one is truncated."""


def source_rows() -> Iterator[dict]:
    for path in sorted(Path(os.__file__).parent.glob("*.py"))[:20]:
        row = {"tokens": [], "ner_tags": []}
        for token in tokenize.generate_tokens(path.open(encoding="utf-8").readline):
            kind = "KEYWORD" if keyword.iskeyword(token.string) else tokenize.tok_name[token.type]
            for i, word in enumerate(re.findall(r"\w+|[^\w\s]", token.string)):
                row["tokens"].append(word)
                row["ner_tags"].append("O" if kind == "OP" else f"{'I' if i else 'B'}-{kind}")
            if kind == "NEWLINE":
                yield row
                row = {"tokens": [], "ner_tags": []}


def prepare_data(cfg: TaskConfig, folder: Path) -> datasets.DatasetDict:
    """Rows {input_ids, labels}; labels of special tokens and of later tokens of a word are -100."""
    known = labels.parse_names(cfg.labels)

    def read(row: dict) -> dict:
        words, tags = row["tokens"], row["ner_tags"]
        if not isinstance(words, list) or len(words) != len(tags):
            raise ValueError(f"tokens and ner_tags are {words!r:.60} and {tags!r:.60}: give two")
        tags = [known[tag] if tag in range(len(known)) else tag for tag in tags]
        for tag in tags:
            if not re.fullmatch("O|[BI]-.+", str(tag)):
                wanted = "O, B-KIND or I-KIND: rename it, or name numbers with --task.labels"
                raise ValueError(f"{tag!r} in ner_tags is not {wanted}")
        return {"tokens": [*map(str, words)], "ner_tags": tags}

    splits = load_splits(cfg, ["tokens", "ner_tags"], read, made_up=source_rows)
    tags = {tag for each in splits.values() for row in each["ner_tags"] for tag in row}
    known = known or splits.classes.get("ner_tags") or sorted(tags)
    kinds = labels.parse_names(labels.keep_names(known, folder))
    texts = map(" ".join, splits["train"]["tokens"])
    tokenizer = tokenizing.plain_tokenizer(cfg, folder, texts, add_prefix_space=True)

    def align(row: dict) -> dict:
        options = {"is_split_into_words": True, "truncation": True, "max_length": cfg.max_length}
        tokens = tokenizer(row["tokens"], **options)
        labels, tags = [-100] * len(tokens["input_ids"]), row["ner_tags"]
        for word, tag in enumerate(row["ner_tags"]):
            if span := tokens.word_to_tokens(word):  # None: truncated
                labels[span.start] = kinds.index(tag)
        is_cut = len(labels) == cfg.max_length
        end = max(i for i in (-1, *tokens.word_ids()) if i is not None) + 1 if is_cut else len(tags)
        every = entities(tags)
        lost = sum(last >= end for *_, last in every)
        cut = {"words": (len(tags) - end, len(tags)), "entities": (lost, len(every))}
        return {"input_ids": tokens["input_ids"], "labels": labels, "cut": cut}

    rows = map_rows(splits, align)
    return rows.cast_column("labels", datasets.List(datasets.ClassLabel(names=kinds)))


def collate(rows: list[dict], data) -> dict:
    """input_ids, attention_mask and labels, int64 (B, T); labels of padding are -100."""
    return DataCollatorForTokenClassification(load_tokenizer(data.folder))(rows)


def count(batch: dict) -> int:
    return int((batch["labels"] != -100).sum())


def build_model(cfg: TaskConfig, data) -> torch.nn.Module:
    names = data["train"].features["labels"].feature.names
    given = (AutoModelForTokenClassification, cfg, pretrained.small_bert(data.folder), names)
    return pretrained.build_classifier(*given, head=("classifier", "score"))


def loss_sum(model: torch.nn.Module, batch: dict) -> torch.Tensor:
    """Cross entropy of the words, in nats."""
    logits = model(batch["input_ids"], batch["attention_mask"]).logits.float()
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def entities(tags: list[str]) -> set[tuple]:
    """(kind, first word, last word) of each; an I- without its B- begins one, as in seqeval."""
    spans = []
    for i, tag in enumerate(tags):
        mark, _, kind = tag.partition("-")
        if mark == "I" and spans and (spans[-1][0], spans[-1][2]) == (kind, i - 1):
            spans[-1][2] = i
        elif kind:
            spans.append([kind, i, i])
    return {tuple(span) for span in spans}


def eval_sums(model: torch.nn.Module, batch: dict) -> dict:
    """The loss, the words, and numbers of entities: found, predicted, true."""
    predictions = model(batch["input_ids"], batch["attention_mask"]).logits.argmax(-1)
    names, found = model.config.id2label, torch.zeros(3)
    for row, own in zip(batch["labels"].tolist(), predictions.tolist(), strict=True):
        words = [i for i, label in enumerate(row) if label != -100]
        true, predicted = (entities([names[each[i]] for i in words]) for each in (row, own))
        found += torch.tensor([len(true & predicted), len(predicted), len(true)])
    return {"loss": loss_sum(model, batch), "words": torch.tensor(count(batch)), "entities": found}


def metrics(sums: dict) -> dict:
    found, predicted, true = sums["entities"].tolist()
    f1 = 2 * found / max(predicted + true, 1)
    return {"loss": float(sums["loss"] / sums["words"]), "f1": f1}


export = pretrained.export  # the model, with what prepare_data has saved
