"""Preferences: a prompt with a chosen and a rejected answer; read, checked, split, tokenised."""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from samestep.base.console import one_line
from samestep.base.fields import check_fields
from samestep.data.cache import once_per_folder
from samestep.data.sources import IncompleteRow, UselessRow
from samestep.data.tables import TABLES, Columns, Row
from samestep.models import pretrained
from samestep.models.attention import restored
from samestep.models.preferences import before_and_after
from samestep.text import chats, row_files, row_formats, tokenizing, units

ANSWERS = ("chosen", "rejected")
END = "<|endoftext|>"
CHATS, SHARED = "are chats", "have no prompt: it is what both answers begin with"
TEMPLATE = "chat_template.jinja"  # of prepared chats
MASK = "_is_answer"  # ending of the columns that tell answers from prompts


# ---- Rows ----------------------------------------------------------------------------------------


def normalize(row: dict, names: dict[str, str]) -> list[str]:
    """Makes a row {"prompt", "chosen", "rejected"} of three texts, or of three lists of messages
    and perhaps tools. Returns what to say of its roles.

    Answers are texts or messages, with the prompt in front or without; a row without a prompt has
    it at the beginning of both answers. `names`: see `chats.read_names`. Raises IncompleteRow,
    UselessRow for equal answers, and ValueError for any other mistake.
    """
    answers = [messages_in(row[name], name) for name in ANSWERS]
    prompt = messages_in(row.get("prompt"), "prompt", optional=True)
    shared = [SHARED] if prompt is None else []
    if not isinstance(answers[0], list) and not isinstance(answers[1], list):
        if not isinstance(prompt, list):
            split_texts(row, prompt)
            return shared
        answers = [[{"role": "assistant", "content": text}] for text in answers]
    elif not all(isinstance(each, list) for each in answers):
        raise ValueError("one of chosen and rejected is text, and the other has messages")
    return [*split_chats(row, answers, prompt or [], names), CHATS, *shared]


def messages_in(value: Any, name: str, optional: bool = False) -> Any:
    """A text, or a list of messages, which the cell of a table holds as JSON."""
    if value is None or value != value:  # tables have NaN for null
        if optional:
            return None
        raise IncompleteRow(f"the {name} is empty")
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(ValueError):  # an answer may look so, too
            found = json.loads(value)
            value = found if found and all(map(is_message, found)) else value
    if not isinstance(value, str | list):
        raise ValueError(f"the {name} is {one_line(repr(value), 60)} but must be text or messages")
    return value


def is_message(value: Any) -> bool:
    return isinstance(value, dict) and bool({"role", "from"} & {*value})


def split_texts(row: dict, prompt: str | None) -> None:
    """Makes the row three texts. Without a prompt, the beginning that both answers share is it."""
    chosen, rejected = (row[name] for name in ANSWERS)
    if prompt is None:
        shared = count_equal(chosen, rejected)
        if shared == len(chosen) == len(rejected):
            raise UselessRow("have equal answers")
        # A space before a word belongs to it.
        shared -= shared > 0 and chosen[shared - 1] == " "
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    row.update(prompt=prompt, chosen=chosen, rejected=rejected)
    row.pop("tools", None)
    for name in ANSWERS:
        if not row[name].strip():
            raise IncompleteRow(f"the {name} is empty")
    if chosen == rejected:
        raise UselessRow("have equal answers")


def split_chats(row: dict, answers: list[list], prompt: Any, names: dict[str, str]) -> list[str]:
    """Makes the row three lists of messages: what both conversations begin with, and the rest."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    tools, said, chosen_and_rejected = row.pop("tools", None), [], []
    prompt = in_one_form(prompt, names)
    for name, messages in zip(ANSWERS, answers, strict=True):
        chat = {"messages": messages} | ({} if tools is None else {"tools": tools})
        try:
            found = in_one_form(messages, names)
            asked = [*takewhile(lambda message: message["role"] != "assistant", found)]
            if prompt and prompt != found[: len(prompt)] and prompt[-1] not in asked:
                if 0 < len(asked) < len(found):
                    raise ValueError("begins with another prompt than the prompt of its row")
                found = [*prompt, *found]
            chat["messages"] = found
            said += chats.normalize_chat(chat, names=names)
        except IncompleteRow as error:
            raise IncompleteRow(f"{name}: {error}") from None
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        chosen_and_rejected.append(chat)
    chosen, rejected = (chat["messages"] for chat in chosen_and_rejected)
    if chosen == rejected:
        raise UselessRow("have equal answers")
    shared = min(count_equal(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
    if not shared:
        raise ValueError("chosen and rejected begin with different messages: there is no prompt")
    row.update(prompt=chosen[:shared], chosen=chosen[shared:], rejected=rejected[shared:])
    for name in ANSWERS:
        if row[name][-1]["role"] != "assistant":
            raise ValueError(f"{name} ends with a message of the {row[name][-1]['role']}")
    row |= {"tools": chat["tools"]} if "tools" in chat else {}
    return said


def in_one_form(messages: list, names: dict[str, str]) -> list[dict]:
    """Messages as `chats` writes them, so that they can be compared."""
    renamed = enumerate((chats.rename_keys(each, names) for each in messages), 1)
    return [chats.normalize_message(each, f"message {n}", names) for n, each in renamed]


def count_equal(first: Any, second: Any) -> int:
    """How many items two sequences have in common at their beginning."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


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


def build(
    cfg: Any, folder: Path, columns: Columns, shipped: dict[str, Callable[[], Iterator[Row]]]
) -> dict[str, Any]:
    """Fills the folder of prepared data, or goes on filling it; what `cache.prepare` wants.

    Pairs of one prompt are all held out, or none. Beside the rows it saves the vocabulary of a new
    model and the template of chats. Raises ValueError for rows that cannot be used.
    """
    readers = row_files.list_readers(
        cfg,
        TABLES,
        columns,
        shipped,
        key=lambda row: json.dumps(row, default=str),
        group_key=lambda row: json.dumps(row["prompt"], default=str),
        check=partial(normalize, names=chats.read_names(cfg.roles)),
        texts=None if cfg.model_name_or_path else texts_of,
        optional=[name for name in ("prompt", "tools") if columns.get(name) == name],
    )
    train, given = (row_files.scan(readers, folder, part) for part in row_files.PARTS)
    for source in (each for each in train + given if each.counts[SHARED]):
        number, data = source.counts[SHARED], one_line(source.reader.cfg.data, 100)
        print(f"Preparing data: {number:,} of {source.rows:,} pairs of {data} {SHARED}", flush=True)
    held: set[int] = set()
    if given:
        units.say_overlap(train, given)
    else:
        held = row_files.hold_out(
            train, cfg, lambda _, data: f"all prompts of {data} are equal; add others"
        )
    if not cfg.model_name_or_path and not (folder / tokenizing.FILE).exists():
        texts = units.read_sample(train, held)
        tokenizing.learn_vocabulary(texts, cfg.vocab_size, folder, first=[END])
    if any(source.counts[CHATS] for source in train + given):
        write_template(cfg, folder)
    tokenizer = load_tokenizer(cfg, folder)
    dtype = row_files.token_dtype(tokenizer)
    shown: set = set()  # parts of chats that the template was found to show

    def encode(rows: list[Row], part: str) -> tuple[row_files.Arrays, dict[str, int]]:
        pairs = [tokenize(*row, tokenizer, shown) for row in rows]
        lengths = [max(len(ids) for ids, _ in pair) for pair in pairs]
        pairs = [cut(pair, cfg.max_length) for pair in pairs]
        arrays: row_files.Arrays = {}
        for i, name in enumerate(ANSWERS):
            arrays[name] = [pair[i][0].astype(dtype) for pair in pairs]
            arrays[name + MASK] = [pair[i][1].astype(np.uint8) for pair in pairs]
        arrays["length"] = np.array([sum(len(ids) for ids, _ in pair) for pair in pairs], np.int32)
        return arrays, {"chosen": sum(length > cfg.max_length for length in lengths)}

    done = row_files.write(folder, train + given, held, encode)
    for part in row_files.PARTS:
        sizes = [row_files.describe_lengths(done, name, [part]) for name in ANSWERS]
        cuts = f"; {sizes[0][1]:,} pairs cut to {cfg.max_length:,}" * bool(sizes[0][1])
        print(f"Prepared {part}: chosen {sizes[0][0]}; rejected {sizes[1][0]}{cuts}", flush=True)
    return row_files.finish(folder, train + given, done, {})


def write_template(cfg: Any, folder: Path) -> None:
    """Keeps the chat template: that of a file, of the pretrained model, or a plain one."""
    template = chats.read_template(cfg) if cfg.chat_template else chats.CHAT_TEMPLATE
    if cfg.model_name_or_path and not cfg.chat_template:
        own = tokenizing.load_tokenizer(cfg, folder).chat_template
        template = own if isinstance(own, str) else template
    (folder / TEMPLATE).write_text(template, encoding="utf-8")


@once_per_folder
def load_tokenizer(cfg: Any, folder: Path) -> Any:
    """The tokenizer of the pretrained model, or the one in the folder; of chats with a template."""
    ends = {"bos_token": END, "eos_token": END}
    tokenizer = tokenizing.load_tokenizer(cfg, folder, model_max_length=cfg.max_length, **ends)
    if (folder / TEMPLATE).exists():
        tokenizer.chat_template = (folder / TEMPLATE).read_text(encoding="utf-8")
    return tokenizer


def check_model(cfg: Any) -> None:
    """Raises ValueError for texts that are longer than a model to start from can see."""
    if cfg.model_name_or_path:
        from transformers import AutoConfig

        config = pretrained.load(AutoConfig, cfg)
        limit = getattr(config, "max_position_embeddings", None) or cfg.max_length
        wanted = f"at most {limit}, which the model can see"
        check_fields(cfg, [("max_length", cfg.max_length <= limit, wanted)])


# ---- Report and export ---------------------------------------------------------------------------


def prompt_of(row: dict[str, np.ndarray]) -> np.ndarray:
    """The tokens of a prepared row before its answer; at least one."""
    return row["chosen"][: max(int(row["chosen" + MASK].argmax()), 1)]


def questions(rows: list[dict], cfg: Any, folder: Path) -> list[tuple[Any, dict]]:
    """For the check of the export: prompts, or chats of one and two questions."""
    tokenizer = load_tokenizer(cfg, folder)
    user, answer = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
    asked: list = [[user], [user, answer, user]]
    if (folder / TEMPLATE).exists():
        options = {"add_generation_prompt": True, "return_dict": True}
        tokens = [tokenizer.apply_chat_template(each, **options)["input_ids"] for each in asked]
    else:
        prompts = [tokenizer.decode(prompt_of(row), skip_special_tokens=True) for row in rows]
        asked = [prompt for prompt in prompts if prompt.strip()]
        tokens = [tokenizer(text).input_ids for text in asked]
    return [(each, {"input_ids": [ids]}) for each, ids in zip(asked, tokens, strict=True)]


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
