"""Preferences: a prompt with a chosen and a rejected answer; read, tokenized, and shown as rows."""

import json
from functools import partial
from itertools import takewhile
from typing import Any

import datasets
import numpy as np

from samestep.base.console import one_line
from samestep.base.fields import check_fields
from samestep.data import demo_data, sources
from samestep.data.files import TABLES
from samestep.data.inputs import RowFormat, find_inputs
from samestep.data.rows import NUMBERS, load_rows
from samestep.data.sources import IncompleteRow
from samestep.data.views import Rows, rows_of
from samestep.models import pretrained
from samestep.models.lora import check_adapters
from samestep.models.preferences import before_and_after
from samestep.text import chats, formats, tokenizing
from samestep.text.chats import words_of

BUNDLED = {"docstrings": partial(demo_data.docstring_rows, "pair")}
ANSWERS = ("chosen", "rejected")
# A pair as it is read: texts, or messages and tools as JSON.
TEXT, _FLAG = datasets.Value("large_string"), datasets.Value("bool")
READ = {"prompt": TEXT, "chosen": TEXT, "rejected": TEXT, "tools": TEXT, "is_chat": _FLAG}
# A pair as it is trained on: a prompt with each answer, and which of the tokens are the answer's.
TOKENS = ("chosen_input_ids", "chosen_loss_mask", "rejected_input_ids", "rejected_loss_mask")
_NO_PROMPT = "there is no prompt; name its column with --task.prompt_column"
_EQUAL = "both answers are equal"


# ---- Rows ----------------------------------------------------------------------------------------


def check_config(cfg: Any) -> None:
    """Raise ValueError for fields of the data and the model that do not fit each other."""
    sources.check_data_config(cfg, [*BUNDLED])
    check_adapters(cfg)
    chats.read_template(cfg.chat_template)
    differ = len({cfg.prompt_column, cfg.chosen_column, cfg.rejected_column}) == 3
    wanted = "another column than the prompt's and the chosen"
    below = "below 0.5: swap the columns instead"
    rules = [
        ("rejected_column", differ, wanted),
        ("label_smoothing", cfg.label_smoothing < 0.5, below),
        pretrained.width_rule(cfg),
    ]
    check_fields(cfg, rules)
    pretrained.check_unread(cfg)


def load_pairs(cfg: Any) -> datasets.DatasetDict:
    """Load the pairs of cfg.data, with the columns of READ, source and place: train and validation.

    Pairs of one prompt are all in one split. Raises ValueError for rows that cannot be used.
    """
    columns = {cfg.chosen_column: True, cfg.rejected_column: True}
    for name in ("prompt", "tools"):  # a column that is named must be there
        if column := getattr(cfg, f"{name}_column"):
            columns[column] = column != name
    form = RowFormat(columns, partial(normalize, cfg=cfg), READ, _key_of, _group_of)
    return load_rows(find_inputs(cfg, BUNDLED, TABLES), cfg, form)


def _group_of(row: dict) -> str:
    """Text that pairs of one prompt have in common."""
    prompt = row["prompt"]
    return json.dumps(words_of(json.loads(prompt)) if row["is_chat"] else prompt)


def _key_of(row: dict) -> str:
    """Text that equal pairs have in common."""
    parts = [row[name] for name in ("prompt", *ANSWERS)]
    return json.dumps([words_of(json.loads(each)) if row["is_chat"] else each for each in parts])


def normalize(row: dict, cfg: Any) -> dict:
    """Make {"prompt", "chosen", "rejected", "tools", "is_chat"} of a row.

    Answers are texts or messages, with the prompt in front or without; a row without a prompt has
    it at the beginning of both answers. Raises IncompleteRow, and ValueError for any other mistake.
    """
    found = {}
    for name in ("prompt", *ANSWERS):
        value = row.get(getattr(cfg, f"{name}_column"))
        value = None if value != value else chats.parse_messages(value)  # tables have NaN for null
        if not isinstance(value, str | list | None):
            raise ValueError(f"the {name} is {value!r:.60} but must be text or messages")
        found[name] = value
    prompt, *answers = found.values()
    for name in ANSWERS:
        if found[name] is None:
            raise IncompleteRow(f"the {name} is empty")
    if type(answers[0]) is not type(answers[1]):
        raise ValueError("one of chosen and rejected is text, and the other has messages")
    if list in map(type, found.values()):
        if isinstance(answers[0], str):
            answers = [[{"role": "assistant", "content": text}] for text in answers]
        tools = row.get(cfg.tools_column)
        parts = _split_chats(prompt or [], answers, tools)
        stored = {name: json.dumps(value, default=str) for name, value in parts.items()}
        return {**stored, "is_chat": True}
    if prompt and all(answer[: len(prompt)] == prompt for answer in answers):
        answers = [answer[len(prompt) :] for answer in answers]
    if prompt is None:  # a space before a word belongs to it
        start = _count_equal(*answers)
        start -= answers[0][start - 1 : start] == " "
        if not start and all(str(answer).strip() for answer in answers):
            raise ValueError(f"chosen and rejected begin with different words: {_NO_PROMPT}")
        prompt, answers = answers[0][:start], [answer[start:] for answer in answers]
    if answers[0] == answers[1]:
        raise IncompleteRow(_EQUAL)
    for name, answer in zip(ANSWERS, answers, strict=True):
        if not answer.strip():
            raise IncompleteRow(f"the {name} is empty")
    chosen, rejected = answers
    texts = {"prompt": prompt, "chosen": chosen, "rejected": rejected, "tools": ""}
    return {**texts, "is_chat": False}


def _split_chats(prompt: str | list, answers: list, tools: Any) -> dict[str, list]:
    """Make three lists of messages, what both chats begin with and the rest, and one of tools.

    An answer begins with a message of the assistant, or with the whole prompt.
    """
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    prompt, whole = chats.read_messages(prompt), []
    for name, messages in zip(ANSWERS, answers, strict=True):
        try:
            found = chats.read_messages(messages)
            if prompt and words_of(found[: len(prompt)]) != words_of(prompt):
                if found[0]["role"] != "assistant":
                    raise ValueError("begins neither with an answer nor with the whole prompt")
                found = [*prompt, *found]
            chat = chats.read_chat(found, tools)
        except ValueError as error:
            raise type(error)(f"{name}: {error}") from None
        whole.append(chat["messages"])
    chosen, rejected = whole
    words = words_of(chosen), words_of(rejected)
    if words[0] == words[1]:
        raise IncompleteRow(_EQUAL)
    shared = min(_count_equal(*words), len(chosen) - 1, len(rejected) - 1)
    if not shared:
        raise ValueError(f"chosen and rejected begin with different messages: {_NO_PROMPT}")
    for name, messages in zip(ANSWERS, whole, strict=True):
        if messages[-1]["role"] != "assistant":
            raise ValueError(f"{name} ends with a message of the {messages[-1]['role']}")
    parts = {"prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]}
    return {**parts, "tools": chat.get("tools", [])}


def _count_equal(first: Any, second: Any) -> int:
    """Count the items that two sequences have in common at their beginning."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


# ---- Tokens --------------------------------------------------------------------------------------


def tokenize_pairs(pairs: datasets.DatasetDict, tokenizer: Any, cfg: Any) -> datasets.DatasetDict:
    """Tokenize the pairs of load_pairs, with the columns of TOKENS.

    Pairs that are equal, as the template shows them and as cfg.max_length truncates them, are
    counted and left out. Raises ValueError where none is left.
    """
    found = pairs.map(
        tokenize,
        fn_kwargs={"tokenizer": tokenizer, "max_length": cfg.max_length},
        batched=True,
        batch_size=100,
        remove_columns=pairs["train"].column_names,
        num_proc=cfg.num_proc(pairs["train"].data.nbytes // 10**6),
    )
    for split, part in found.items():
        if lost := len(pairs[split]) - len(part):
            text = f"{lost:,} of {len(pairs[split]):,} pairs are equal"
            why = f"as the template shows them and at most {cfg.max_length} tokens remain"
            if not len(part):
                raise ValueError(f"task.{sources.field_of(split, cfg)}: {text}, {why}")
            print(f"Prepared {split}: left out: {text}, {why}", flush=True)
    lengths = {f"{name}_input_ids": cfg.max_length for name in ANSWERS}
    tokenizing.say_lengths(found, lengths)
    return found


def tokenize(batch: dict[str, list], tokenizer: Any, max_length: int) -> dict[str, list]:
    """Tokenize prompts with each of their answers, to at most `max_length` tokens, for `map`; pairs
    that are equal then are left out.

    Raises ValueError for a chat template that fails or leaves out a part.
    """
    dtype = tokenizing.id_type(tokenizer)
    kept = [name for name in (*NUMBERS, "is_chat") if name in batch]
    found: dict[str, list] = {name: [] for name in (*TOKENS, *kept)}
    for pair in rows_of(batch):
        whole = [_tokenize_answer(pair, name, tokenizer) for name in ANSWERS]
        whole = truncate(whole, max_length)
        if np.array_equal(whole[0][0], whole[1][0]):
            continue
        for name in kept:
            found[name].append(pair[name])
        for name, (ids, mask) in zip(ANSWERS, whole, strict=True):
            found[f"{name}_input_ids"].append(ids.astype(dtype))
            found[f"{name}_loss_mask"].append(mask.astype(np.uint8))
    return found


def _tokenize_answer(pair: dict, name: str, tokenizer: Any) -> tuple[np.ndarray, ...]:
    """Tokenize the prompt with one answer: ids, and a mask of the tokens of the answer, (T,)."""
    if not pair["is_chat"]:
        row = {"prompt": pair["prompt"], "completion": pair[name]}
        return tokenizing.tokenize_prompt(row, tokenizer)
    context = [{**message, "weight": 0} for message in json.loads(pair["prompt"])]
    chat = {"messages": context + json.loads(pair[name]), "tools": json.loads(pair["tools"])}
    texts = chats.render_chat(chat, pair["place"], tokenizer)
    if len(texts) > 1:
        raise ValueError(
            f"task.chat_template: {pair['place']}: the template changes an answer of {name} when "
            "others follow; give pairs that differ in their last message alone"
        )
    return tokenizing.tokenize_answers(*texts[0], tokenizer)


def truncate(pair: list[tuple[np.ndarray, ...]], limit: int) -> list[tuple[np.ndarray, ...]]:
    """Truncate both of a pair to `limit` tokens. They lose the same of the beginning of a prompt
    that takes more than half of these, and only then an answer its end."""
    needed = max(len(ids) for ids, _ in pair) - limit
    spare = min(int(mask.argmax()) for _, mask in pair) - limit // 2
    start = max(min(needed, spare), 0)
    return [(ids[start : start + limit], mask[start : start + limit]) for ids, mask in pair]


def view(dataset: datasets.Dataset, cfg: Any) -> Rows:
    """A map-style view of tokenized pairs: dicts of TOKENS, each a numpy array (T,)."""
    return Rows(dataset, [*TOKENS], [f"{name}_input_ids" for name in ANSWERS], cfg)


# ---- Report and export ---------------------------------------------------------------------------


def prompt_of(row: dict[str, np.ndarray]) -> np.ndarray:
    """Give the tokens of a row before its answer; at least one."""
    return row["chosen_input_ids"][: max(int(row["chosen_loss_mask"].argmax()), 1)]


def test_inputs(rows: list[dict], data: Any) -> list[tuple[Any, dict]]:
    """Make what the check of the export asks: prompts, or chats."""
    tokenizer = tokenizing.load_tokenizer(data.folder)
    prompts = tokenizer.batch_decode([*map(prompt_of, rows)], skip_special_tokens=True)
    return formats.ask(prompts, "Why?", data["validation"][0]["is_chat"], tokenizer)


def write_samples(model: Any, cfg: Any, data: Any) -> dict[str, str]:
    """Generate what both models answer to two held-out prompts, by greedy search."""
    tokenizer, texts = tokenizing.load_tokenizer(data.folder), {}
    held = view(data["validation"], cfg)
    rows = [held[i] for i in range(min(2, len(held)))]
    for number, prompt in enumerate(map(prompt_of, rows), 1):
        shown = one_line(tokenizer.decode(prompt, skip_special_tokens=True), 100)
        for name, each in before_and_after(model):
            answer = formats.generate(each, prompt.tolist(), 60)[len(prompt) :]
            text = tokenizer.decode(answer, skip_special_tokens=True)
            texts[f"{name} {number}"] = f"{shown} -> {one_line(text, 200)}"
    return texts
