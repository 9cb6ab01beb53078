"""Extractive question answering (SQuAD): a sample is a question with all windows of its context.

make train ARGS="--max_steps 350 --learning_rate 2e-3 --warmup_steps 50"
make train ARGS="--task.data squad --task.model_name_or_path google-bert/bert-base-uncased"
"""

import random
import re
import string
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import datasets
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForQuestionAnswering

from samestep import DataConfig, ModelConfig, load_splits, map_rows, pretrained, tokenizing

UNIT = "windows"
INPUTS = ("input_ids", "attention_mask", "token_type_ids")


@dataclass
class TaskConfig(DataConfig, ModelConfig):
    data: str = ""
    """Rows {question, context, answers}, as in SQuAD, answers being {text, answer_start}, two
    lists, which may be empty: a .jsonl or .parquet file, a folder of such, or a dataset on the Hub.
    Empty: made-up."""
    max_length: int = 48
    """Number of tokens in a window: shorter ones are padded, since the softmax includes padding."""
    stride: int = 16
    """Number of tokens that a window shares with the one before it."""
    max_answer_length: int = 30
    """Maximum number of tokens in an answer that is predicted."""
    unanswerable: bool = False
    """Whether the model may say that there is no answer: where a row has none, as in SQuAD 2."""


def made_up_rows() -> Iterator[dict]:
    draw = random.Random(0)
    others = ["The weather was fine.", "Nobody knew why.", "It rained for a while.", "Birds sang."]
    for year in range(1000, 4000):
        who, where = draw.choice(["Anna", "Bert", "Carla"]), draw.choice(["Rome", "Oslo", "Lima"])
        number, what = str(draw.randrange(10, 100)), draw.choice(["pears", "pens"])
        fact = f"In {year} {who} bought {number} {what} in {where}."
        asked = {f"Who bought {what}?": who, f"Where did {who} buy {what}?": where}
        asked |= {f"When did {who} buy {what}?": str(year), f"How many {what} were it?": number}
        question, answer = draw.choice([*asked.items()])
        before = " ".join([*draw.choices(others, k=draw.randrange(8)), ""])
        after = " ".join(["", *draw.choices(others, k=draw.randrange(8))])
        answers = {"text": [answer], "answer_start": [len(before) + fact.rindex(answer)]}
        yield {"question": question, "context": before + fact + after, "answers": answers}


def read(row: dict) -> dict:
    """The row, with its answers as two lists: one answer, or a list of them, may stand there."""
    answers, found = row["answers"], {"text": [], "answer_start": []}
    for each in answers if isinstance(answers, list) else [answers]:
        for name, values in found.items():
            values += each[name] if isinstance(each[name], list) else [each[name]]
    for text, start in zip(*found.values(), strict=True):
        if not text.strip() or start < 0 or row["context"][start : start + len(text)] != text:
            raise ValueError(f"the answer {text!r:.60} is not in its context at {start}")
    return {**row, "answers": found}


def prepare_data(cfg: TaskConfig, folder: Path) -> datasets.DatasetDict:
    """Rows with windows (W, T), their answers' first and last tokens (W,), and their offsets (W, T,
    2) in the context, -1 elsewhere."""
    text, number = datasets.Value("large_string"), datasets.Value("int64")
    answers = {"text": datasets.List(text), "answer_start": datasets.List(number)}
    features = {"question": text, "context": text, "answers": answers}
    splits = load_splits(cfg, [*features], read, made_up=made_up_rows, features=features)
    texts = (row["question"] + " " + row["context"] for row in splits["train"])
    tokenizer = tokenizing.plain_tokenizer(cfg, folder, texts)
    options = {"truncation": "only_second", "max_length": cfg.max_length, "stride": cfg.stride}
    options |= {"return_overflowing_tokens": True, "return_offsets_mapping": True}

    def cut(row: dict) -> dict:
        question, context, answers = row["question"], row["context"], row["answers"]
        taken = len(tokenizer(question, "", verbose=False)["input_ids"])
        if taken + cfg.stride >= cfg.max_length:
            wanted = f"leaves no room for its context and stride in max_length {cfg.max_length}"
            raise ValueError(f"the question of {taken} tokens {wanted}")
        first, answer = [*zip(answers["answer_start"], answers["text"], strict=True), (0, "")][0]
        last = first + len(answer.rstrip())  # a space at an edge is in no token
        first += len(answer) - len(answer.lstrip())
        cfg.unanswerable |= not answer
        tokens = tokenizer(question, context, padding="max_length", **options)
        columns = {name: tokens[name] for name in INPUTS if name in tokens}
        columns |= {"starts": [], "ends": [], "offsets": []}
        for i, spans in enumerate(tokens["offset_mapping"]):
            parts = zip(spans, tokens.sequence_ids(i), strict=True)
            offsets = [span if part == 1 else (-1, -1) for span, part in parts]
            starts = [t for t, (a, b) in enumerate(offsets) if a <= first < b]
            ends = [t for t, (a, b) in enumerate(offsets) if a < last <= b]
            is_inside = answer and starts and ends  # otherwise the first token, [CLS], is it
            columns["starts"].append(starts[0] if is_inside else 0)
            columns["ends"].append(ends[0] if is_inside else 0)
            columns["offsets"].append(offsets)
        lost = bool(answer) and not any(columns["ends"])
        return {**columns, "cut": {"answers": (lost, bool(answer))}}

    found = map_rows(splits, cut, keep=["context", "answers"])
    return found.map(lambda _, row: {"row": row}, with_indices=True, input_columns="starts")


def collate(rows: list[dict]) -> dict:
    """int64: windows (B, W, T); offsets (B, W, T, 2); starts and ends (B, W), -1 without a window;
    the numbers of the rows (B,)."""
    batch = {"row": torch.tensor([row["row"] for row in rows])}
    for name in [*INPUTS, "offsets", "starts", "ends"]:
        if name in rows[0]:
            batch[name] = pad_sequence([torch.tensor(row[name]) for row in rows], True, -1)
    return batch


def count(batch: dict) -> int:
    return int((batch["starts"] >= 0).sum())


def build_model(cfg: TaskConfig, data) -> torch.nn.Module:
    config = pretrained.small_bert(data.folder)
    return pretrained.build_model(AutoModelForQuestionAnswering, cfg, config, ("qa_outputs",))


def logits_of(model: torch.nn.Module, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each window, where the answer starts and ends, float32 (N, T) each."""
    is_window = batch["starts"] >= 0
    output = model(**{name: batch[name][is_window] for name in INPUTS if name in batch})
    return output.start_logits.float(), output.end_logits.float()


def loss_sum(model: torch.nn.Module, batch: dict) -> torch.Tensor:
    """The mean of both cross entropies of each window, in nats."""
    is_window, total = batch["starts"] >= 0, 0.0
    for logits, name in zip(logits_of(model, batch), ("starts", "ends"), strict=True):
        total += F.cross_entropy(logits, batch[name][is_window], reduction="sum") / 2
    return total


def eval_sums(model: torch.nn.Module, batch: dict) -> dict:
    return {"loss": loss_sum(model, batch), "windows": torch.tensor(count(batch))}


def eval_outputs(model: torch.nn.Module, batch: dict, cfg: TaskConfig) -> dict:
    """The place (B, 2) in its context of each question's answer: that of the best window."""
    is_window, every = batch["starts"] >= 0, torch.arange(len(batch["row"]))
    outside = batch["offsets"][is_window][..., 0] < 0
    logits = logits_of(model, batch)
    start, end = (each.masked_fill(outside, -1e9) for each in logits)
    pairs, length = start[:, :, None] + end[:, None], start.shape[1]
    band = torch.ones_like(pairs[0]).triu().tril(cfg.max_answer_length - 1).bool()
    scores, places = pairs.masked_fill(~band, -1e9).flatten(1).max(1)
    table = torch.full_like(is_window, -4e9, dtype=scores.dtype).masked_scatter(is_window, scores)
    best = table.argmax(1)  # window
    place = torch.zeros_like(batch["starts"]).masked_scatter(is_window, places)[every, best]
    offsets = batch["offsets"][every, best]
    ends = [offsets[every, place // length, 0], offsets[every, place % length, 1]]
    if cfg.unanswerable:  # the least that a window gives to its first token, as in run_qa
        none = logits[0][:, 0] + logits[1][:, 0]
        nothing = torch.full_like(table, 4e9).masked_scatter(is_window, none).amin(1)
        ends = [each.where(table.amax(1) > nothing, 0) for each in ends]
    return {"row": batch["row"], "place": torch.stack(ends, 1)}


def words_of(text: str) -> list[str]:
    """As SQuAD compares: without case, punctuation and articles."""
    words = re.sub(f"[{re.escape(string.punctuation)}]", "", text.lower()).split()
    return [word for word in words if word not in ("a", "an", "the")]


def metrics(sums: dict, outputs: dict, data) -> dict:
    """SQuAD's exact match and F1, of the best of a question's answers."""
    scores = []
    for number, (first, last) in zip(*(outputs[n].tolist() for n in ("row", "place")), strict=True):
        row = data["validation"][number]
        own, answers = words_of(row["context"][first:last]), row["answers"]["text"] or [""]
        answers = [*map(words_of, answers)]
        common = [(each, (Counter(own) & Counter(each)).total()) for each in answers]
        f1 = [2 * equal / max(len(own) + len(each), 1) for each, equal in common]
        scores.append([own in answers, max(*f1, own in answers)])
    exact_match, f1 = torch.tensor(scores).float().mean(0).tolist()
    return {"loss": float(sums["loss"] / sums["windows"]), "exact_match": exact_match, "f1": f1}


export = pretrained.export  # the model, with what prepare_data has saved
