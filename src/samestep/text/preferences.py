"""Preferences: a prompt with a chosen and a rejected answer; read, checked, split, tokenised."""

import contextlib
import json
from collections.abc import Iterable
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from samestep.base.console import one_line
from samestep.data.cache import once_per_folder
from samestep.data.sources import IncompleteRow, UselessRow
from samestep.data.tables import TABLES, Columns, Row
from samestep.models.attention import restored
from samestep.models.preferences import before_and_after
from samestep.text import chats, row_files, row_formats, tokenizing, units
from samestep.text.units import RowKind

ANSWERS = ("chosen", "rejected")
END = "<|endoftext|>"
CHATS, SHARED = "are chats", "have no prompt: it is what both answers begin with"
REPEATED = "have their prompt in front of both answers: it is read once"
NO_PROMPT = "there is no prompt; name its column with --task.prompt_column"
EQUAL = "have equal answers"
TEMPLATE = "chat_template.jinja"  # of prepared chats
MASK = "_is_answer"  # ending of the columns that tell answers from prompts


# ---- Rows ----------------------------------------------------------------------------------------


def normalize(row: dict, names: dict[str, str]) -> list[str]:
    """Makes a row {"prompt", "chosen", "rejected"} of three texts, or of three lists of messages
    and perhaps tools. Returns what to say of it.

    Answers are texts or messages, with the prompt in front or without; a row without a prompt has
    it at the beginning of both answers. `names`: see `chats.read_names`. Raises IncompleteRow,
    UselessRow for equal answers, and ValueError for any other mistake.
    """
    prompt, *answers = (text_or_messages(row.get(name), name) for name in ("prompt", *ANSWERS))
    tools, said = row.pop("tools", None), [SHARED] if prompt is None else []
    for name, answer in zip(ANSWERS, answers, strict=True):
        if answer is None:
            raise IncompleteRow(f"the {name} is empty")
    kinds = {type(answer) for answer in answers}
    if len(kinds) > 1:
        raise ValueError("one of chosen and rejected is text, and the other has messages")
    if list in (*kinds, type(prompt)):
        if list not in kinds:
            answers = [[{"role": "assistant", "content": text}] for text in answers]
        row.update(split_chats(prompt or [], answers, tools, names))
        return [CHATS, *said]
    if prompt and all(answer[: len(prompt)] == prompt for answer in answers):
        answers = [answer[len(prompt) :] for answer in answers]
        said = [REPEATED]
    if prompt is None:  # a space before a word belongs to it
        start = count_equal(*answers)
        start -= answers[0][start - 1 : start] == " "
        if not start and all(str(answer).strip() for answer in answers):
            raise ValueError(f"chosen and rejected begin with different words: {NO_PROMPT}")
        prompt, answers = answers[0][:start], [answer[start:] for answer in answers]
    if answers[0] == answers[1]:
        raise UselessRow(EQUAL)
    row.update(prompt=prompt, chosen=answers[0], rejected=answers[1])
    for name in ANSWERS:
        if not row[name].strip():
            raise IncompleteRow(f"the {name} is empty")
    return said


def text_or_messages(value: Any, name: str) -> str | list | None:
    """A text, or a list of messages, which the cell of a table holds as JSON; None: there is none.

    Raises ValueError for other values.
    """
    if value is None or value != value:  # tables have NaN for null
        return None
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(ValueError):  # an answer may look so, too
            found = json.loads(value)
            are_messages = [isinstance(m, dict) and {"role", "from"} & {*m} for m in found]
            value = found if found and all(are_messages) else value
    if not isinstance(value, str | list):
        raise ValueError(f"the {name} is {one_line(repr(value), 60)} but must be text or messages")
    return value


def split_chats(
    prompt: str | list, answers: list, tools: Any, names: dict[str, str]
) -> dict[str, list]:
    """Three lists of messages, and perhaps tools: what both chats begin with, and the rest."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    prompt, whole = chats.read_messages(prompt, names), []
    for name, messages in zip(ANSWERS, answers, strict=True):
        try:
            found = chats.read_messages(messages, names)
            asked = [*takewhile(lambda message: message["role"] != "assistant", found)]
            if prompt and prompt != found[: len(prompt)] and prompt[-1] not in asked:
                if 0 < len(asked) < len(found):
                    raise ValueError("begins with another prompt than the prompt of its row")
                found = [*prompt, *found]
            chat = {"messages": found, "tools": tools}
            chats.normalize_chat(chat, names=names)
        except ValueError as error:
            raise type(error)(f"{name}: {error}") from None
        whole.append(chat.pop("messages"))
    chosen, rejected = whole
    if chosen == rejected:
        raise UselessRow(EQUAL)
    shared = min(count_equal(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
    if not shared:
        raise ValueError(f"chosen and rejected begin with different messages: {NO_PROMPT}")
    for name, messages in zip(ANSWERS, whole, strict=True):
        if messages[-1]["role"] != "assistant":
            raise ValueError(f"{name} ends with a message of the {messages[-1]['role']}")
    return {
        "prompt": chosen[:shared],
        "chosen": chosen[shared:],
        "rejected": rejected[shared:],
    } | chat


def count_equal(first: Any, second: Any) -> int:
    """How many items two sequences have in common at their beginning."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def texts_of(row: dict) -> Iterable[str]:
    """All text of a row, for a vocabulary to be learnt from."""
    parts = [row[name] for name in ("prompt", *ANSWERS)]
    if isinstance(parts[0], str):
        return parts
    return chats.chat_texts({**row, "messages": [message for part in parts for message in part]})


# ---- Tokens --------------------------------------------------------------------------------------


def tokenize(row: dict, place: str, tokenizer: Any, shown: set) -> list[tuple[np.ndarray, ...]]:
    """The tokens of the prompt with each answer, and which of them are the answer's."""
    found = []
    for name in ANSWERS:
        if isinstance(row[name], str):
            pair = {"prompt": row["prompt"], "completion": row[name]}
            tokens = row_formats.tokenize_prompt(pair, tokenizer)
        else:
            context = [{**message, "weight": 0} for message in row["prompt"]]
            chat = {**row, "messages": [*context, *row[name]]}
            texts = chats.render_chat(chat, place, tokenizer, shown)
            if len(texts) > 1:
                raise ValueError(
                    f"task.chat_template: {place}: the template changes an answer of {name} when "
                    "others follow; give pairs that differ in their last message alone"
                )
            tokens = tokenizing.tokenize_answers(*texts[0], tokenizer)
        found.append(tuple(map(np.asarray, tokens)))
    return found


def cut(pair: list[tuple[np.ndarray, ...]], limit: int) -> list[tuple[np.ndarray, ...]]:
    """A pair of which each has at most `limit` tokens. Both lose the same of the beginning of a
    prompt that takes more than half of these, and only then an answer its end."""
    needed = max(len(ids) for ids, _ in pair) - limit
    spare = min(int(mask.argmax()) for _, mask in pair) - limit // 2
    start = max(min(needed, spare), 0)
    return [(ids[start : start + limit], mask[start : start + limit]) for ids, mask in pair]


# ---- Preparing -----------------------------------------------------------------------------------


def build(cfg: Any, folder: Path, columns: Columns, shipped: dict) -> dict[str, Any]:
    """Fills the folder of prepared data, or goes on filling it; what `cache.prepare` wants.

    Pairs of one prompt are all held out, or none, if the prompts of texts have a column: what both
    answers begin with may go on beyond the prompt. Beside the rows it saves the vocabulary of a new
    model and the template of chats. Raises ValueError for rows that cannot be used.
    """
    kind = RowKind(
        TABLES,
        lambda _: columns,
        partial(normalize, names=chats.read_names(cfg.roles)),
        key=lambda row: json.dumps(row, default=str),
        texts=texts_of,
        nothing_held="all prompts of {data} are equal; add others",
        shipped=shipped,
        group=lambda row: json.dumps(row["prompt"], default=str),
        optional=[name for name in ("prompt", "tools") if columns.get(name) == name],
    )
    inputs, held = units.scan(cfg, folder, kind)
    for source in inputs:
        for remark in (SHARED, REPEATED):
            if number := source.counts[remark]:
                rows = f"{number:,} of {source.rows:,} pairs of {source.data}"
                print(f"Preparing data: {rows} {remark}", flush=True)
    units.learn_vocabulary(cfg, folder, inputs, held, first=[END])
    if any(source.counts[CHATS] for source in inputs):
        template = chats.read_template(cfg) if cfg.chat_template else chats.CHAT_TEMPLATE
        if cfg.model_name_or_path and not cfg.chat_template:
            own = tokenizing.load_tokenizer(cfg, folder).chat_template
            template = own if isinstance(own, str) else template
        (folder / TEMPLATE).write_text(template, encoding="utf-8")
    tokenizer = load_tokenizer(cfg, folder)
    dtype = row_files.token_dtype(tokenizer)
    shown: set = set()  # parts of chats that the template was found to show

    def encode(rows: list[Row], part: str) -> tuple[row_files.Arrays, dict[str, int]]:
        pairs = [tokenize(*row, tokenizer, shown) for row in rows]
        is_cut = [any(len(ids) > cfg.max_length for ids, _ in pair) for pair in pairs]
        pairs = [cut(pair, cfg.max_length) for pair in pairs]
        arrays: row_files.Arrays = {}
        for i, name in enumerate(ANSWERS):
            arrays[name] = [pair[i][0].astype(dtype) for pair in pairs]
            arrays[name + MASK] = [pair[i][1].astype(np.uint8) for pair in pairs]
        arrays["length"] = np.array([sum(len(ids) for ids, _ in pair) for pair in pairs], np.int32)
        return arrays, {"chosen": sum(is_cut)}

    names = {name: (name, cfg.max_length) for name in ANSWERS}
    return row_files.write(folder, inputs, held, encode, names)


@once_per_folder
def load_tokenizer(cfg: Any, folder: Path) -> Any:
    """The tokenizer of the pretrained model, or the one in the folder; of chats with a template."""
    ends = {"bos_token": END, "eos_token": END}
    tokenizer = tokenizing.load_tokenizer(cfg, folder, model_max_length=cfg.max_length, **ends)
    if (folder / TEMPLATE).exists():
        tokenizer.chat_template = (folder / TEMPLATE).read_text(encoding="utf-8")
    return tokenizer


# ---- Report and export ---------------------------------------------------------------------------


def prompt_of(row: dict[str, np.ndarray]) -> np.ndarray:
    """The tokens of a prepared row before its answer; at least one."""
    return row["chosen"][: max(int(row["chosen" + MASK].argmax()), 1)]


def test_inputs(rows: list[dict], cfg: Any, data: Path) -> list[tuple[Any, dict]]:
    """For the check of the export: prompts, or chats."""
    tokenizer = load_tokenizer(cfg, data)
    prompts = [tokenizer.decode(prompt_of(row), skip_special_tokens=True) for row in rows]
    return row_formats.ask(prompts, "Why?", (data / TEMPLATE).exists(), tokenizer)


@torch.no_grad()
def answers(model: Any, prompts: list[np.ndarray], tokenizer: Any) -> dict[str, str]:
    """What the reference and the model answer to prompts, by greedy search."""
    texts = {}
    for number, prompt in enumerate(prompts, 1):
        tokens = torch.tensor(prompt, device=model.device, dtype=torch.long)[None]
        shown = one_line(tokenizer.decode(prompt, skip_special_tokens=True), 100)
        limit = getattr(model.config, "max_position_embeddings", None) or 1024
        # Sampling would draw random numbers.
        settings = {"max_new_tokens": min(60, max(limit - len(prompt), 1)), "do_sample": False}
        for name, each in before_and_after(model):
            with restored(each):
                mask = torch.ones_like(tokens)
                found = each.generate(input_ids=tokens, attention_mask=mask, **settings)
            text = tokenizer.decode(found[0, len(prompt) :], skip_special_tokens=True)
            texts[f"{name} {number}"] = f"{shown} -> {one_line(text, 200)}"
    return texts
