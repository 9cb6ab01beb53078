"""Preferences: a prompt with a chosen and a rejected answer; read, tokenized, and shown as rows."""

import json
from collections.abc import Iterator
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch

from samestep.base.console import one_line
from samestep.base.fields import check_fields, check_ignored_fields
from samestep.data import columns, demo_data, sources
from samestep.data.folders import TABLES
from samestep.data.rows import RowFormat, find_inputs, keep, load_rows
from samestep.data.sources import IncompleteRow, UselessRow
from samestep.data.views import Rows
from samestep.models import pretrained
from samestep.models.lora import check_adapters
from samestep.models.preferences import before_and_after
from samestep.streaming.row_streams import RowStream
from samestep.text import chats, formats, tokenizing

BUNDLED: dict[str, Any] = {"docstrings": partial(demo_data.text_rows, "docstrings", "pair")}
ANSWERS = ("chosen", "rejected")
# A pair as it is read: texts, or messages and tools as JSON.
TEXT, FLAG = datasets.Value("large_string"), datasets.Value("bool")
READ = {"prompt": TEXT, "chosen": TEXT, "rejected": TEXT, "tools": TEXT, "is_chat": FLAG}
# A pair as it is trained on: a prompt with each answer, and which of the tokens are the answer's.
TOKENS = ("chosen_input_ids", "chosen_loss_mask", "rejected_input_ids", "rejected_loss_mask")
NOTES = ("is_truncated", "is_equal")
SHARED = "there is no prompt: it is what both answers begin with"
REPEATED = "both answers begin with the prompt: it is read once"
NO_PROMPT = "there is no prompt; name its column with --task.prompt_column"
EQUAL = "have equal answers"


# ---- Rows ----------------------------------------------------------------------------------------


def check_config(cfg: Any) -> None:
    """Raise ValueError for fields of the data and the model that do not fit each other."""
    sources.check_data_config(cfg, [*BUNDLED], reads_groups=True)
    check_adapters(cfg)
    chats.read_names(cfg.roles)
    chats.check_template(cfg.chat_template)
    differ = len({cfg.prompt_column, cfg.chosen_column, cfg.rejected_column}) == 3
    wanted = "another column than the prompt's and the chosen"
    below = "below 0.5: swap the columns instead"
    rules = [
        ("rejected_column", differ, wanted),
        ("label_smoothing", cfg.label_smoothing < 0.5, below),
        pretrained.width_rule(cfg),
    ]
    check_fields(cfg, rules)
    own = {each.data for each in sources.split_data(cfg.data)} != {*BUNDLED}
    names = "prompt_column chosen_column rejected_column tools_column roles chat_template"
    where = f"where task.loss_type is {cfg.loss_type}"
    ignored = [
        (names, own, "where task.data is docstrings"),
        ("label_smoothing", cfg.loss_type == "sigmoid", where),
        ("simpo_gamma", cfg.loss_type == "simpo", where),
    ]
    check_ignored_fields(cfg, ignored)
    pretrained.check_unread(cfg)


def row_format(cfg: Any) -> RowFormat:
    """How pairs are read: see READ."""
    roles = {name: getattr(cfg, f"{name}_column") for name in ("prompt", *ANSWERS, "tools")}
    roles = {name: column for name, column in roles.items() if column}
    return RowFormat(
        partial(normalize, names=chats.read_names(cfg.roles)),
        READ,
        roles,
        optional=[name for name in ("prompt", "tools") if roles.get(name) == name],
    )


def load_pairs(cfg: Any) -> datasets.DatasetDict:
    """Load the pairs of cfg.data, with the columns of READ, source and place: train and validation.

    Pairs of one prompt are all in one split. Raises ValueError for rows that cannot be used.
    """
    return load_rows(
        find_inputs(cfg, BUNDLED, TABLES),
        cfg,
        row_format(cfg),
        group=lambda row: row["prompt"] if row["is_chat"] else json.dumps(row["prompt"]),
        plural="pairs",
        nothing_held="all prompts of {data} are equal; add others",
    )


def normalize(row: dict, names: dict[str, str]) -> tuple[dict, list[str]]:
    """Make {"prompt", "chosen", "rejected", "tools", "is_chat"} of a row, and remarks about it.

    Answers are texts or messages, with the prompt in front or without; a row without a prompt has
    it at the beginning of both answers. `names`: see `chats.read_names`. Raises IncompleteRow,
    UselessRow for equal answers, and ValueError for any other mistake.
    """
    prompt, *answers = (text_or_messages(row.get(name), name) for name in ("prompt", *ANSWERS))
    said = [SHARED] if prompt is None else []
    for name, answer in zip(ANSWERS, answers, strict=True):
        if answer is None:
            raise IncompleteRow(f"the {name} is empty")
    kinds = {type(answer) for answer in answers}
    if len(kinds) > 1:
        raise ValueError("one of chosen and rejected is text, and the other has messages")
    if list in (*kinds, type(prompt)):
        if list not in kinds:
            answers = [[{"role": "assistant", "content": text}] for text in answers]
        found = split_chats(prompt or [], answers, row.get("tools"), names)
        stored = {name: json.dumps(value, default=str) for name, value in found.items()}
        return {**stored, "is_chat": True}, said
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
    for name, answer in zip(ANSWERS, answers, strict=True):
        if not answer.strip():
            raise IncompleteRow(f"the {name} is empty")
    chosen, rejected = answers
    texts: dict[str, Any] = {"prompt": prompt, "chosen": chosen, "rejected": rejected, "tools": ""}
    return {**texts, "is_chat": False}, said


def text_or_messages(value: Any, name: str) -> str | list | None:
    """Read a text, or a list of messages, which cells of tables hold as JSON; None: it is missing.

    Raises ValueError for other values.
    """
    if value is None or value != value:  # tables have NaN for null
        return None
    value = chats.parse_messages(value, name)
    if not isinstance(value, str | list):
        raise ValueError(f"the {name} is {value!r:.60} but must be text or messages")
    return value


def split_chats(
    prompt: str | list, answers: list, tools: Any, names: dict[str, str]
) -> dict[str, list]:
    """Make three lists of messages, what both chats begin with and the rest, and one of tools."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    prompt, whole = chats.read_messages(prompt, names), []
    for name, messages in zip(ANSWERS, answers, strict=True):
        try:
            found = chats.read_messages(messages, names)
            asked = [*takewhile(lambda message: message["role"] != "assistant", found)]
            if prompt and prompt != found[: len(prompt)]:
                if found[:1] == prompt[-1:]:  # its last message alone is repeated
                    found = [*prompt[:-1], *found]
                elif not asked or len(asked) == len(found):
                    found = [*prompt, *found]
                elif len(prompt) > 1 or prompt[0] not in asked:
                    raise ValueError("begins with another prompt than the prompt of its row")
            chat = {"messages": found, "tools": tools}
            chats.normalize_chat(chat, names=names)
        except ValueError as error:
            raise type(error)(f"{name}: {error}") from None
        whole.append(chat["messages"])
    chosen, rejected = whole
    if chosen == rejected:
        raise UselessRow(EQUAL)
    shared = min(count_equal(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
    if not shared:
        raise ValueError(f"chosen and rejected begin with different messages: {NO_PROMPT}")
    for name, messages in zip(ANSWERS, whole, strict=True):
        if messages[-1]["role"] != "assistant":
            raise ValueError(f"{name} ends with a message of the {messages[-1]['role']}")
    parts = {"prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]}
    return {**parts, "tools": chat.get("tools", [])}


def count_equal(first: Any, second: Any) -> int:
    """Count the items that two sequences have in common at their beginning."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def texts_of(pairs: datasets.Dataset) -> Iterator[str]:
    """Give all text of the pairs, for a tokenizer to be trained on."""
    for pair in tokenizing.spread_rows(pairs, [*READ]):
        parts = [pair[name] for name in ("prompt", *ANSWERS)]
        if pair["is_chat"]:
            messages = [message for part in parts for message in json.loads(part)]
            yield from chats.chat_texts({"messages": messages, "tools": json.loads(pair["tools"])})
        else:
            yield from parts


# ---- Tokens --------------------------------------------------------------------------------------


def prepare_tokenizer(cfg: Any, folder: Path, pairs: datasets.Dataset) -> Any:
    """The tokenizer in `folder`, or one that is saved there: see tokenizing.prepare_tokenizer."""
    default = chats.CHAT_TEMPLATE if pairs[0]["is_chat"] else ""
    template, texts = chats.read_template(cfg.chat_template), texts_of(pairs)
    options: dict[str, Any] = {**tokenizing.ENDS, "model_max_length": cfg.max_length}
    options["lengths"] = ["max_length"]
    tokenizer = tokenizing.prepare_tokenizer(cfg, folder, texts, template, default, **options)
    if pairs[0]["is_chat"]:
        found = (p for p in tokenizing.spread_rows(pairs, [*READ]) if p["is_chat"])
        both = (chat_of(pair, name) for pair in found for name in ANSWERS)
        chats.say_unread_keys(both, tokenizer)
    return tokenizer


def tokenize(batch: dict[str, list], tokenizer: Any, max_length: int) -> dict[str, list]:
    """Tokenize prompts with each of their answers, to at most `max_length` tokens, for `map`.

    Also notes whether a pair is truncated, and whether both are equal as they are trained on.
    Raises ValueError for a chat template that fails or leaves out a part.
    """
    shown: set = set()  # kinds of chats that the template was found to show
    dtype = tokenizing.id_type(tokenizer)
    found: dict[str, list] = {name: [] for name in (*TOKENS, *NOTES)}
    names = [*batch]
    for values in zip(*batch.values(), strict=True):
        pair = dict(zip(names, values, strict=True))
        whole = [tokenize_answer(pair, name, tokenizer, shown) for name in ANSWERS]
        cut = truncate(whole, max_length)
        trained = []
        for name, (ids, mask) in zip(ANSWERS, cut, strict=True):
            found[f"{name}_input_ids"].append(ids.astype(dtype))
            found[f"{name}_loss_mask"].append(mask.astype(np.uint8))
            end = int(np.flatnonzero(mask)[-1]) + 1 if mask.any() else 0
            trained.append((ids[:end].tolist(), mask[:end].tolist()))
        found["is_truncated"].append(any(len(ids) > max_length for ids, _ in whole))
        found["is_equal"].append(trained[0] == trained[1] or not any(map(any, trained[0])))
    kept = {name: batch[name] for name in ("source", "place", "is_chat")}
    return found | kept


def tokenize_answer(pair: dict, name: str, tokenizer: Any, shown: set) -> tuple[np.ndarray, ...]:
    """Tokenize the prompt with one answer: ids, and a mask of the tokens of the answer, (T,)."""
    if not pair["is_chat"]:
        row = {"prompt": pair["prompt"], "completion": pair[name]}
        return formats.tokenize_prompt(row, tokenizer)
    texts = chats.render_chat(chat_of(pair, name), pair["place"], tokenizer, shown)
    if len(texts) > 1:
        raise ValueError(
            f"task.chat_template: {pair['place']}: the template changes an answer of {name} when "
            "others follow; give pairs that differ in their last message alone"
        )
    return tokenizing.tokenize_answers(*texts[0], tokenizer)


def chat_of(pair: dict, name: str) -> dict[str, list]:
    """Make a chat of the prompt, as context, and one answer."""
    context = [{**message, "weight": 0} for message in json.loads(pair["prompt"])]
    return {"messages": [*context, *json.loads(pair[name])], "tools": json.loads(pair["tools"])}


def truncate(pair: list[tuple[np.ndarray, ...]], limit: int) -> list[tuple[np.ndarray, ...]]:
    """Truncate both of a pair to `limit` tokens. They lose the same of the beginning of a prompt
    that takes more than half of these, and only then an answer its end."""
    needed = max(len(ids) for ids, _ in pair) - limit
    spare = min(int(mask.argmax()) for _, mask in pair) - limit // 2
    start = max(min(needed, spare), 0)
    return [(ids[start : start + limit], mask[start : start + limit]) for ids, mask in pair]


def make_samples(block: dict[str, list], tokenizer: Any, max_length: int) -> dict[str, list]:
    """The columns TOKENS of a block of a stream, without pairs of equal answers."""
    tokens = tokenize({**block, "source": [0] * len(block["place"])}, tokenizer, max_length)
    kept = [i for i, is_equal in enumerate(tokens["is_equal"]) if not is_equal]
    return {name: [tokens[name][i] for i in kept] for name in TOKENS}


def keep_different(pairs: datasets.DatasetDict, max_length: int) -> datasets.DatasetDict:
    """Leave out pairs whose answers are equal as they are trained on: their gradient is noise.

    Prints how many these are, and how many were truncated. Raises ValueError where no pair of a
    split is left.
    """
    kept = datasets.DatasetDict()
    for split, part in pairs.items():
        is_equal = np.array(part["is_equal"], bool)
        different = np.flatnonzero(~is_equal)
        if left_out := len(part) - len(different):
            place = part[int(is_equal.argmax())]["place"]
            what = f"{left_out:,} of {len(part):,} pairs of {split} have answers of equal tokens"
            why = f"up to task.max_length, {max_length}, or because the chat template drops"
            what = f"{what} (the first: {place}), {why} what tells them apart"
            if not len(different):
                raise ValueError(f"task.data: {what}: none is left; raise task.max_length")
            print(f"Preparing data: {what}: they are left out", flush=True)
        kept[split] = keep(part, different)
        sizes = [columns.ListColumn(kept[split], f"{name}_input_ids").lengths for name in ANSWERS]
        size = f"{np.mean(sizes):.0f} tokens on average, {np.max(sizes):,} at most"
        if truncated := sum(kept[split]["is_truncated"]):
            size += f" ({truncated:,} pairs truncated to {max_length:,})"
        print(f"Prepared {split}: prompts with answers of {size}", flush=True)
    return kept.remove_columns([*NOTES, "place"])


def view(dataset: datasets.Dataset, cfg: Any) -> Rows:
    """A map-style view of tokenized pairs: dicts of TOKENS, each a numpy array (T,)."""
    return Rows(dataset, [*TOKENS], [f"{name}_input_ids" for name in ANSWERS], cfg)


def views(cfg: Any, data: Any) -> tuple[Any, Rows]:
    """Pairs to train on, of a stream as they are read, and to evaluate on."""
    if not cfg.streaming:
        return view(data["train"], cfg), view(data["validation"], cfg)
    tokenizer = tokenizing.load_tokenizer(data.folder)
    make = partial(make_samples, tokenizer=tokenizer, max_length=cfg.max_length)
    return RowStream(cfg, row_format(cfg), make), view(data["validation"], cfg)


# ---- Report and export ---------------------------------------------------------------------------


def prompt_of(row: dict[str, np.ndarray]) -> np.ndarray:
    """Give the tokens of a row before its answer; at least one."""
    return row["chosen_input_ids"][: max(int(row["chosen_loss_mask"].argmax()), 1)]


def test_inputs(rows: list[dict], data: Any) -> list[tuple[Any, dict]]:
    """Make what the check of the export asks: prompts, or chats."""
    tokenizer = tokenizing.load_tokenizer(data.folder)
    prompts: list[Any] = [
        tokenizer.decode(prompt_of(row), skip_special_tokens=True) for row in rows
    ]
    return formats.ask(prompts, "Why?", data["validation"][0]["is_chat"], tokenizer)


def write_samples(model: Any, cfg: Any, data: Any) -> dict[str, str]:
    """Generate what both models answer to two held-out prompts, by greedy search."""
    tokenizer, texts = tokenizing.load_tokenizer(data.folder), {}
    held = view(data["validation"], cfg)
    rows = [held[i] for i in range(min(2, len(held)))]
    for number, prompt in enumerate(map(prompt_of, rows), 1):
        tokens = torch.tensor(prompt, device=model.device, dtype=torch.long)[None]
        shown = one_line(tokenizer.decode(prompt, skip_special_tokens=True), 100)
        limit = getattr(model.config, "max_position_embeddings", None) or 1024
        # Sampling would draw random numbers.
        settings = {"max_new_tokens": min(60, max(limit - len(prompt), 1)), "do_sample": False}
        for name, each in before_and_after(model):
            mask = torch.ones_like(tokens)
            found = each.generate(input_ids=tokens, attention_mask=mask, **settings)
            text = tokenizer.decode(found[0, len(prompt) :], skip_special_tokens=True)
            texts[f"{name} {number}"] = f"{shown} -> {one_line(text, 200)}"
    return texts
