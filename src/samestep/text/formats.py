"""Formats of rows for a language model: a text, a prompt with its completion, or a chat.

They are recognized by their columns, and checked; `tokenizing` makes tokens of them. Messages and
tools are stored as JSON text: a column of `datasets` for JSON rounds numbers.
"""

import json
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import datasets
import torch

from samestep.base.fields import check_fields, local_path
from samestep.data import demo_data, sources
from samestep.data.files import TABLES, TEXTS
from samestep.data.inputs import Input, RowFormat, find_inputs
from samestep.data.rows import load_rows
from samestep.data.sources import check_data_config, split_data
from samestep.models import pretrained
from samestep.models.lora import check_adapters
from samestep.text import chats, tokenizing

# The columns of each kind of rows, the more structured formats first.
_KNOWN: list[tuple[str, list[str]]] = [
    ("chat", ["messages"]),
    ("chat", ["conversations"]),  # ShareGPT
    ("chat", ["instruction", "output"]),  # Alpaca
    ("prompt", ["prompt", "completion"]),
    ("text", ["text"]),
]
# The columns that are stored of each kind.
STORED = {"text": ["text"], "prompt": ["prompt", "completion"], "chat": ["chat"]}
BUNDLED = ("manual", "docstrings")
_KIND_OF = {"messages": "chat", "prompt": "prompt", "completion": "prompt", "text": "text"}


# ---- Config --------------------------------------------------------------------------------------


def check_config(cfg: Any) -> None:
    """Raises ValueError for fields that do not fit each other; `rows` may still be auto."""
    check_data_config(cfg, BUNDLED)
    pretrained.check_unread(cfg)
    chats.read_template(cfg.chat_template)
    if cfg.vocabulary and cfg.model_name_or_path:
        raise ValueError("task.vocabulary: task.model_name_or_path has its own; leave it out")
    folder = local_path(cfg.vocabulary)
    for name in (tokenizing.FILE, "tokenizer_config.json") if cfg.vocabulary else ():
        if not os.path.isfile(folder / name):
            raise ValueError(f"task.vocabulary: {folder} has no {name}; give runs/NAME/model")
    for data in {each.data for each in split_data(cfg.data)} & {*BUNDLED}:
        fits = cfg.rows == "auto" or (data == "docstrings") == (cfg.rows != "text")
        wanted = "prompt or chat" if data == "docstrings" else "text"
        check_fields(cfg, [("rows", fits, f"{wanted} where task.data is {data}")])
    differ = cfg.completion_column != cfg.prompt_column
    check_fields(cfg, [("completion_column", differ, "another than the prompt's")])
    named = _named_kinds(cfg)
    sources.check_read(cfg, BUNDLED, named[0] if named else "auto")
    _check_packing(cfg, named[0] if named and cfg.rows == "auto" else cfg.rows)
    check_adapters(cfg)
    check_fields(cfg, [pretrained.width_rule(cfg)])


def is_packed(cfg: Any) -> bool:
    """Whether sequences hold whole documents, which do not see each other."""
    return cfg.rows in ("prompt", "chat") or cfg.packing in ("best_fit", "none")


def _named_kinds(cfg: Any) -> list[str]:
    """The formats whose columns have names of their own in the config."""
    return [kind for role, kind in _KIND_OF.items() if getattr(cfg, f"{role}_column") != role]


def _check_packing(cfg: Any, kind: str) -> None:
    stream = kind in ("auto", "text") or cfg.packing != "stream"
    check_fields(cfg, [("packing", stream, "best_fit for prompts and chats")])


def check_context_parallel(cfg: Any) -> None:
    """Raises ValueError for sequences of which GPUs cannot have a part each: see
    context_parallel.yaml. Dropout would draw the same masks for each part."""
    where = "under context parallelism"
    rules = [
        ("rows", cfg.rows == "text", f"text {where}: packed sequences hold several documents"),
        ("packing", cfg.packing not in ("best_fit", "none"), f"stream {where}"),
        ("attn_implementation", cfg.attn_implementation == "sdpa", f"sdpa {where}"),
        ("dropout", bool(cfg.model_name_or_path) or not cfg.dropout, f"0 {where}"),
        ("lora_dropout", not cfg.lora_dropout, f"0 {where}"),
    ]
    check_fields(cfg, rules)


# ---- Rows ----------------------------------------------------------------------------------------


def read_rows(cfg: Any) -> datasets.DatasetDict:
    """The rows of cfg.data as splits train and validation, with the columns of their format.

    text: `text`; prompt: `prompt` and `completion`; chat: `chat`, JSON text of its messages and
    tools. Sets cfg.rows, if it is auto. Raises ValueError for rows of more than one format.
    """
    functions = partial(demo_data.docstring_rows, "chat" if cfg.rows == "chat" else "prompt")
    bundled: dict[str, Any] = {"manual": demo_data.manual_rows, "docstrings": functions}
    inputs = find_inputs(cfg, bundled, (*TABLES, *TEXTS))
    named, kinds = cfg.rows, {}  # of each kind of rows, where it is

    def choose(source: Input, first: dict) -> RowFormat:
        cfg.rows, form = choose_format(source, first, cfg, named)
        kinds.setdefault(cfg.rows, source.data)
        if len(kinds) > 1:
            text = " and ".join(f"{kind} in {data}" for kind, data in kinds.items())
            raise ValueError(f"task.data: rows are {text}; give sources with rows of one kind")
        sources.check_read(cfg, BUNDLED)
        _check_packing(cfg, cfg.rows)
        return form

    return load_rows(inputs, cfg, choose)


def choose_format(source: Input, first: dict, cfg: Any, rows: str) -> tuple[str, RowFormat]:
    """Choose the kind of a source's rows, and how they are read: fields decide; where they leave it
    open, the columns of the first row do. `rows`: the kind, or auto.

    Raises ValueError for columns of no known format.
    """
    named = _named_kinds(cfg)
    kind = named[0] if named and rows == "auto" else rows
    if kind in ("text", "prompt", *named):
        names = [getattr(cfg, f"{role}_column") for role, own in _KIND_OF.items() if own == kind]
    else:
        known = [*_KNOWN, ("chat", [cfg.prompt_column, cfg.completion_column])]  # as TRL has them
        formats = [each for each in known if kind in ("auto", each[0])]
        fitting = [each for each in formats if {*each[1]} <= {*first}]
        if not fitting:
            there = ", ".join(first)[:100]
            forms = ", ".join(dict.fromkeys(" + ".join(names) for _, names in formats))
            fields = "--task.messages_column"
            if rows == "auto":
                texts = "--task.text_column, --task.prompt_column and --task.completion_column"
                fields = f"{texts}, or {fields}"
            text = f"but task.rows {rows} looks for {forms}; name yours with {fields}"
            raise ValueError(f"task.data: {source.data} has the columns {there}, {text}")
        kind, names = fitting[0]
    columns = dict.fromkeys(names, True)
    if kind == "chat" and "instruction" in names:
        columns["input"] = False
    prompt = [first.get(name) for name in (cfg.prompt_column, cfg.completion_column)]
    if kind == "prompt" and any(isinstance(chats.parse_messages(v), list) for v in prompt):
        kind = "chat"
    if kind == "chat" and cfg.tools_column:
        columns[cfg.tools_column] = cfg.tools_column != "tools"  # one that is named must be there
    normalize = {"text": _normalize_text, "prompt": _normalize_prompt, "chat": _normalize_chat}
    features = {name: datasets.Value("string") for name in STORED[kind]}
    form = RowFormat(columns, partial(normalize[kind], cfg=cfg), features)
    if kind == "chat":
        form.key = _key_of
    return kind, form


def _normalize_text(row: dict, cfg: Any) -> dict[str, Any]:
    """The text of a row; raises ValueError for what is none."""
    return {"text": sources.require_text("text", row.get(cfg.text_column))}


def _normalize_prompt(row: dict, cfg: Any) -> dict[str, Any]:
    """A prompt, which may be blank, and its completion."""
    prompt = row.get(cfg.prompt_column)
    if not isinstance(prompt, str):
        sources.require_text("prompt", prompt)
    completion = sources.require_text("completion", row.get(cfg.completion_column))
    return {"prompt": prompt, "completion": completion}


def _normalize_chat(row: dict, cfg: Any) -> dict[str, str]:
    """Messages and tools as JSON text: see chats.read_chat."""
    context = 0  # messages
    if cfg.prompt_column in row and cfg.completion_column in row:  # as TRL has them
        prompt, completion = (row[name] for name in (cfg.prompt_column, cfg.completion_column))
        prompt, completion = map(_messages_of, (prompt, completion), ("prompt", "completion"))
        messages, context = [*prompt, *completion], len(prompt)
    elif "instruction" in row:
        messages = chats.alpaca_messages(row)
    else:
        named = cfg.messages_column
        messages = row[named] if named in row else row.get("conversations")
    chat = chats.read_chat(messages, row.get(cfg.tools_column), cfg.train_on)
    for message in chat["messages"][:context]:
        message["weight"] = 0
    if context and chat["messages"][-1]["role"] != "assistant":
        role = chat["messages"][-1]["role"]
        raise ValueError(f"the completion ends with a message of the {role}")
    if context and not any(map(chats.is_trained_on, chat["messages"][context:])):
        raise sources.IncompleteRow("no message of the completion is trained on")
    # Parquet has dates, which JSON has not.
    return {"chat": json.dumps(chat, ensure_ascii=False, default=str)}


def _messages_of(value: Any, name: str) -> list[dict]:
    """The messages of a prompt or a completion; raises ValueError for a text beside messages."""
    sources.require_value(name, value)
    found = chats.parse_messages(value)
    if not isinstance(found, list):
        raise ValueError(f"the {name} is text; give messages as both prompt and completion")
    return found


def _key_of(row: dict) -> str:
    """Text that equal chats have in common: their words."""
    chat = json.loads(row["chat"])
    return json.dumps({**chat, "messages": chats.words_of(chat["messages"])})


# ---- What the trained model is asked -------------------------------------------------------------


def _prompt_tokens(text: str, kind: str, tokenizer: Any) -> list[int]:
    """The tokens of a text, or of a user's message, that the model is to continue or answer."""
    begin = tokenizing.begin_tokens(tokenizer)
    if kind == "chat":
        messages = [{"role": "user", "content": text}]
        text = chats.apply_template(messages, [], "task.sample_prompt", tokenizer, ask=True)
        begin = []
    elif kind == "text":
        begin = begin or [tokenizer.eos_token_id]
    tokens = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return [*begin, *tokens] or [tokenizer.eos_token_id]


def write_samples(model: Any, cfg: Any, data: Any) -> dict[str, str]:
    """Texts that a model writes after the sample prompt, and after prompts that are held out; of
    texts without a sample prompt after their beginnings."""
    tokenizer, rows, prompts = tokenizing.load_tokenizer(data.folder), data["validation"], {}
    if cfg.sample_prompt:
        prompts["sample"] = _prompt_tokens(cfg.sample_prompt, cfg.rows, tokenizer)
    if cfg.rows != "text" or not prompts:
        for number in range(min(2, len(rows))):
            row = rows[number]
            end = min(16, len(row["input_ids"]) // 2)
            if cfg.rows != "text":
                end = row["loss_mask"].index(1)
            prompts[f"held out {number + 1}"] = row["input_ids"][:end]
    texts = {}
    for name, prompt in prompts.items():
        prompt = prompt[-longest_input(model) // 2 :]
        # The penalty prevents loops.
        answer = generate(model, prompt, 100, repetition_penalty=1.2)
        texts[name] = tokenizer.decode(answer, skip_special_tokens=True).rstrip()
    return texts


def longest_input(model: Any) -> int:
    """Tokens that a model sees at once; 1,024 where there is no limit."""
    return getattr(model.config, "max_position_embeddings", None) or 1024


def generate(model: Any, prompt: Sequence[int], most: int, **settings: Any) -> torch.Tensor:
    """A prompt with what the model writes after it, at most so many tokens: int64 (T,). The search
    is greedy, as sampling would draw random numbers."""
    tokens = torch.tensor([[*prompt]], device=model.device)
    most = min(max(longest_input(model) - len(prompt), 1), most)
    settings |= {"attention_mask": torch.ones_like(tokens), "max_new_tokens": most}
    return model.generate(input_ids=tokens, do_sample=False, **settings)[0]


def test_inputs(rows: list[dict], cfg: Any, data: Any) -> list[tuple[Any, dict]]:
    """Test inputs of the export: the beginnings of texts, or chats of one and two questions."""
    tokenizer = tokenizing.load_tokenizer(data.folder)
    starts = [row["input_ids"][: min(cfg.context_length // 2, 32)] for row in rows]
    texts = tokenizer.batch_decode(starts, skip_special_tokens=True)
    user = cfg.sample_prompt or "Hello"
    asked = ask([cfg.sample_prompt, *texts], user, cfg.rows == "chat", tokenizer)
    longest = min(tokenizing.most_tokens(cfg), cfg.context_length)
    return [each for each in asked if 0 < len(each[1]["input_ids"][0]) < longest]


def ask(texts: list[str], user: str, as_chats: bool, tokenizer: Any) -> list[tuple[Any, dict]]:
    """For the check of an export: texts, or chats of one and two questions, and their tokens."""
    asked: list = [(text, text) for text in texts if text.strip()]
    if as_chats:
        question, reply = ({"role": r, "content": user} for r in ("user", "assistant"))
        found, place = [[question], [question, reply, question]], "the check of the export"
        asked = [(c, chats.apply_template(c, [], place, tokenizer, ask=True)) for c in found]
    how = {"add_special_tokens": not as_chats, "verbose": False}
    return [(each, {"input_ids": [tokenizer(text, **how).input_ids]}) for each, text in asked]
