"""Formats of rows for a language model: a text, a prompt with its completion, or a chat.

They are recognized by their columns, read, checked, and tokenized. Messages and tools are stored as
JSON text: a column of `datasets` for JSON rounds numbers.
"""

import json
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc
import torch

from samestep.base.console import one_line
from samestep.base.fields import check_fields, check_ignored_fields, local_path
from samestep.data import demo_data, sources
from samestep.data.folders import TABLES, file_ending
from samestep.data.rows import Input, RowFormat, find_inputs, load_rows
from samestep.data.sources import check_data_config, split_data
from samestep.data.tables import Columns
from samestep.models import pretrained
from samestep.models.lora import check_adapters
from samestep.streaming.row_streams import RowStream
from samestep.text import chats, sequences, tokenizing
from samestep.text.sequences import Sequences
from samestep.text.tokenizing import Tokens

EXTENSIONS = (".txt", *TABLES)
PLURALS = {"text": "documents", "prompt": "prompts", "chat": "chats"}
COLUMN_FIELDS = {
    "text": "text_column",
    "prompt": "prompt_column completion_column",
    "chat": "messages_column tools_column",
}
# The columns of each kind of rows by their roles, the more structured formats first.
KNOWN: list[tuple[str, dict[str, str]]] = [
    ("chat", {"messages": "messages"}),
    ("chat", {"messages": "conversations"}),  # ShareGPT
    ("chat", {"instruction": "instruction", "output": "output"}),  # Alpaca
    ("prompt", {"prompt": "prompt", "completion": "completion"}),
    ("text", {"text": "text"}),
]
BYTES_A_TOKEN = 4  # about, where the tokens are not known yet
SEQUENCES = 64  # of a block of a stream, at least
# Roles whose column may be missing. No field names a column of Alpaca.
OPTIONAL = ("tools", "instruction", "input", "output")
KINDS = {"messages": "chat", "prompt": "prompt", "completion": "prompt", "text": "text"}


# ---- Columns -------------------------------------------------------------------------------------


def check_config(cfg: Any) -> None:
    """Raises ValueError for fields that do not fit each other; `rows` may still be auto."""
    check_data_config(cfg, demo_data.TEXTS, reads_groups=True)
    pretrained.check_unread(cfg)
    chats.check_template(cfg.chat_template)
    if cfg.vocabulary and cfg.model_name_or_path:
        raise ValueError("task.vocabulary: task.model_name_or_path has its own; leave it out")
    folder = local_path(cfg.vocabulary)
    for name in (tokenizing.FILE, "tokenizer_config.json") if cfg.vocabulary else ():
        if not os.path.isfile(folder / name):
            raise ValueError(f"task.vocabulary: {folder} has no {name}; give runs/NAME/model")
    check_rows(cfg)
    check_adapters(cfg)
    check_fields(cfg, [pretrained.width_rule(cfg)])


def is_packed(cfg: Any) -> bool:
    """Whether sequences hold whole documents, which do not see each other."""
    return cfg.rows in ("prompt", "chat") or cfg.packing == "best_fit"


def named_kinds(cfg: Any) -> list[str]:
    """The formats whose columns have names of their own in the config."""
    return [kind for role, kind in KINDS.items() if getattr(cfg, f"{role}_column") != role]


def check_rows(cfg: Any) -> None:
    """Raises ValueError for `rows` that the data does not have, and for columns nothing reads."""
    chats.read_names(cfg.roles)
    data = [each.data for each in split_data(cfg.data)]
    shipped = [each for each in data if each in demo_data.TEXTS]
    for each in shipped:
        fits = cfg.rows == "auto" or (each == "docstrings") == (cfg.rows != "text")
        wanted = "prompt or chat" if each == "docstrings" else "text"
        check_fields(cfg, [("rows", fits, f"{wanted} where task.data is {each}")])
    differ = cfg.completion_column != cfg.prompt_column
    check_fields(cfg, [("completion_column", differ, "another than the prompt's")])
    where = f"where task.data is {one_line(cfg.data, 60)}"
    names = " ".join(COLUMN_FIELDS.values())
    unread = [
        (names, len(shipped) < len(data), where),
        ("file_extensions", not cfg.streaming, "while task.streaming is true"),
    ]
    check_ignored_fields(cfg, unread)
    kind = cfg.rows
    if kind == "auto" and named_kinds(cfg):
        kind = named_kinds(cfg)[0]
    check_kind(cfg, kind)


def check_kind(cfg: Any, kind: str) -> None:
    """Raises ValueError for fields that nothing reads where the rows are of this kind."""
    where = f"where task.rows is {kind}"
    ignored = []
    for each, names in COLUMN_FIELDS.items():
        more = " train_on roles" if each == "chat" else ""
        ignored.append((names + more, kind in ("auto", each), where))
    is_packed = kind in ("prompt", "chat") or cfg.packing == "best_fit"
    ignored.append(("overlong", kind == "auto" or is_packed, "unless task.packing is best_fit"))
    check_ignored_fields(cfg, ignored)
    stream = kind in ("auto", "text") or cfg.packing != "stream"
    check_fields(cfg, [("packing", stream, "best_fit for prompts and chats")])


def check_context_parallel(cfg: Any) -> None:
    """Raises ValueError for sequences of which GPUs cannot have a part each: see
    context_parallel.yaml. Dropout would draw the same masks for each part."""
    where = "under context parallelism"
    rules = [
        ("rows", cfg.rows == "text", f"text {where}: packed sequences hold several documents"),
        ("packing", cfg.packing != "best_fit", f"stream {where}"),
        ("attn_implementation", cfg.attn_implementation == "sdpa", f"sdpa {where}"),
        ("dropout", bool(cfg.model_name_or_path) or not cfg.dropout, f"0 {where}"),
        ("lora_dropout", not cfg.lora_dropout, f"0 {where}"),
    ]
    check_fields(cfg, rules)


def extensions_of(more: str) -> tuple[str, ...]:
    """The extensions of files that are read: tables, .txt, and more as texts."""
    own = [each.strip().lower() for each in more.split(",") if each.strip()]
    for each in own:
        if not re.fullmatch(r"(\.[\w+-]+)+", each) or file_ending(f"x{each}") in TABLES:
            problem = f"{each!r:.30} cannot be read as text"
            raise ValueError(f"task.file_extensions: {problem}; write for example .md,.py")
    return (*EXTENSIONS, *own)


def recognize_format(source: Input, cfg: Any) -> tuple[str, Columns]:
    """The kind of a source's rows, and their columns by role: fields decide; where they leave it
    open, the names of columns do. Bundled data has no columns.

    Raises ValueError for columns of no known format.
    """
    if source.bundled:
        return bundled_kind(source.data, cfg.rows), {}
    named = named_kinds(cfg)
    kind = named[0] if named and cfg.rows == "auto" else cfg.rows
    if kind in ("text", "prompt", *named):
        roles = [role for role, own in KINDS.items() if own == kind]
        columns: Columns = {role: getattr(cfg, f"{role}_column") for role in roles}
    else:
        formats = [each for each in KNOWN if kind in ("auto", each[0])]
        fitting = [each for each in formats if {*each[1].values()} <= {*source.names}]
        if not fitting:
            raise unknown_columns(source, cfg.rows, [columns for _, columns in formats])
        kind = fitting[0][0]
        columns = {**fitting[0][1]}
    more = {"input": "input"}
    if "messages" in columns:
        more = {"tools": cfg.tools_column} if cfg.tools_column else {}
    return kind, columns | more if kind == "chat" else columns


def bundled_kind(name: str, rows: str) -> str:
    """The kind of bundled rows, where `rows` may be auto."""
    if rows != "auto":
        return rows
    return "prompt" if name == "docstrings" else "text"


def unknown_columns(source: Input, rows: str, formats: list[dict[str, str]]) -> ValueError:
    """An error that shows the columns, the known formats, and the fields that name columns."""
    if not source.names:
        return ValueError(f"task.data: there is no text in {source.data}")
    there = ", ".join(source.names)[:100]
    forms = ", ".join(" + ".join(columns.values()) for columns in formats)
    fields = "--task.messages_column"
    if rows == "auto":
        texts = "--task.text_column, --task.prompt_column and --task.completion_column"
        fields = f"{texts}, or {fields}"
    text = f"but task.rows {rows} looks for {forms}; name yours with {fields}"
    return ValueError(f"task.data: {source.data} has the columns {there}, {text}")


# ---- Rows ----------------------------------------------------------------------------------------


def read_rows(cfg: Any) -> datasets.DatasetDict:
    """The rows of cfg.data as splits train and validation, with the columns of their format.

    text: `text`; prompt: `prompt` and `completion`; chat: `messages` and `tools`, JSON text. Sets
    cfg.rows, if it is auto. Raises ValueError for rows of more than one format.
    """
    bundled: dict[str, Any] = {}
    for name in demo_data.TEXTS:
        bundled[name] = partial(demo_data.text_rows, name, bundled_kind(name, cfg.rows))
    inputs = find_inputs(cfg, bundled, extensions_of(cfg.file_extensions))
    formats = {each.data: recognize_format(each, cfg) for each in inputs if not each.is_validation}
    kinds = {kind: data for data, (kind, _) in formats.items()}
    if len(kinds) > 1:
        found = " and ".join(f"{kind} in {name}" for kind, name in kinds.items())
        raise ValueError(f"task.data: rows are {found}; give sources with rows of one kind")
    (cfg.rows,) = kinds
    check_kind(cfg, cfg.rows)
    found = load_rows(
        inputs,
        cfg,
        row_format(cfg, {name: columns for name, (_, columns) in formats.items()}),
        group=key_of,
        maximum_bytes=BYTES_A_TOKEN * cfg.context_length * cfg.validation_rows,
        plural=PLURALS[cfg.rows],
    )
    if cfg.tools_column not in ("", "tools") and cfg.rows == "chat" and not cfg.streaming:
        tools = [rows.data.column("tools") for rows in found.values()]
        if not any(pc.any(pc.not_equal(each, "[]")).as_py() for each in tools):
            name = cfg.tools_column
            raise ValueError(f"task.tools_column: no row has tools in a column {name:.60}")
    return found


def row_format(cfg: Any, columns: dict[str, Columns] | None = None) -> RowFormat:
    """How rows of the kind cfg.rows are read. `columns`: of sources by their names; None: each is
    looked at."""
    names = {"text": ["text"], "prompt": ["prompt", "completion"], "chat": ["messages", "tools"]}
    normalize: Any = {"text": normalize_text, "prompt": normalize_prompt}.get(cfg.rows)
    if cfg.rows == "chat":
        known = chats.read_names(cfg.roles)
        normalize = partial(normalize_chat, train_on=cfg.train_on, names=known)
    features = {name: datasets.Value("string") for name in names[cfg.rows]}
    chosen = partial(choose_columns, cfg, columns)
    return RowFormat(normalize, features, chosen, OPTIONAL, EXTENSIONS)


def choose_columns(cfg: Any, columns: dict[str, Columns] | None, source: Input) -> Columns:
    """Those of a source. Rows to evaluate on have those of the first, unless they are a source."""
    if columns is None:
        return recognize_format(source, cfg)[1]
    return columns.get(source.data, next(iter(columns.values())))


def normalize_text(row: dict) -> tuple[dict[str, str], list[str]]:
    """The row, whose values are texts; raises ValueError for another. A prompt may be blank."""
    for name, value in row.items():
        if name != "prompt" or not isinstance(value, str):
            sources.require_text(name, value)
    return row, []


def normalize_prompt(row: dict) -> tuple[dict[str, str], list[str]]:
    """A prompt and its completion: texts, or messages of TRL's form as JSON text."""
    found = [chats.parse_messages(row[name], name) for name in ("prompt", "completion")]
    if not any(isinstance(each, list) for each in found):
        return normalize_text(row)
    for name, each in zip(("prompt", "completion"), found, strict=True):
        if not isinstance(each, list):
            raise ValueError(f"the {name} is text, but the other has messages; give both as one")
    prompt, completion = found
    chat = {"messages": [*prompt, *completion]}
    remarks = chats.normalize_chat(chat)
    for number, message in enumerate(chat["messages"]):
        if number < len(prompt):
            message["weight"] = 0
    messages = chat["messages"]
    if messages[-1]["role"] != "assistant":
        raise ValueError(f"the completion ends with a message of the {messages[-1]['role']}")
    parts = messages[: len(prompt)], messages[len(prompt) :]
    stored = [json.dumps(each, ensure_ascii=False) for each in parts]
    return dict(zip(("prompt", "completion"), stored, strict=True)), ["are messages", *remarks]


def normalize_chat(row: dict, train_on: str, names: dict) -> tuple[dict[str, str], list[str]]:
    """Messages and tools as JSON text: see chats.normalize_chat."""
    remarks = chats.normalize_chat(row, train_on, names)
    # Parquet has dates, which JSON has not.
    text = json.dumps(row["messages"], ensure_ascii=False, default=str)
    tools = json.dumps(row.get("tools", []), ensure_ascii=False, default=str)
    return {"messages": text, "tools": tools}, remarks


def texts_of(rows: datasets.Dataset) -> Iterator[str]:
    """Texts of rows, evenly spread, to train a tokenizer on."""
    names = [name for name in rows.column_names if name not in ("source", "place")]
    for row in tokenizing.spread_rows(rows, names):
        yield from chats.chat_texts(chats.as_chat(row)) if chats.is_chat(row) else row.values()


def key_of(row: dict) -> str:
    """Text that decides whether a row is held out."""
    if "text" in row:
        return row["text"]
    return json.dumps(chats.as_chat(row) if chats.is_chat(row) else row)


# ---- Tokens --------------------------------------------------------------------------------------


def prepare_tokenizer(cfg: Any, folder: Path, rows: datasets.Dataset) -> Any:
    """The tokenizer in `folder`, or one that is saved there: see tokenizing.prepare_tokenizer."""
    template = chats.read_template(cfg.chat_template)
    is_chat_task = cfg.rows == "chat" or (cfg.rows == "prompt" and chats.is_chat(rows[0]))
    default = chats.CHAT_TEMPLATE if is_chat_task else ""
    options: dict[str, Any] = {**tokenizing.ENDS, "model_max_length": cfg.context_length}
    if not is_packed(cfg):
        options["lengths"] = ["context_length"]
    texts = texts_of(rows)
    tokenizer = tokenizing.prepare_tokenizer(cfg, folder, texts, template, default, **options)
    if is_chat_task:
        found = filter(chats.is_chat, tokenizing.spread_rows(rows, rows.column_names))
        chats.say_unread_keys(map(chats.as_chat, found), tokenizer)
    return tokenizer


def tokenize(batch: dict[str, list], tokenizer: Any, with_masks: bool) -> dict[str, list]:
    """Rows as token ids, for `map`: input_ids, source and, `with_masks`, loss_mask.

    Texts begin and end with the tokens that the tokenizer puts there, or at least with its end of
    text; special tokens in them are text. Of prompts and chats the completions, or the messages of
    the assistant, are in the loss. A chat gives several documents where the template changes a turn
    when others follow. Raises ValueError for a template that fails or leaves out a part.
    """
    names = [name for name in batch if name not in ("source", "place")]
    columns = [batch[name] for name in names]
    rows = [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
    sources_of_rows = batch.get("source") or [0] * len(rows)
    found: list[tuple[Tokens, int]] = []
    if names == ["text"]:
        begin, end = tokenizing.begin_tokens(tokenizer), [tokenizer.eos_token_id]
        begin = begin or (end if with_masks else [])
        for ids, source in zip(
            tokenizing.tokenize_texts(batch["text"], tokenizer), sources_of_rows, strict=True
        ):
            tokens = np.concatenate([begin, ids, end]).astype(np.int32)
            found.append(((tokens, np.ones(len(tokens), np.uint8)), source))
    else:
        shown: set = set()  # kinds of chats that the template was found to show
        places = batch.get("place") or ["a row"] * len(rows)
        for row, source, place in zip(rows, sources_of_rows, places, strict=True):
            if chats.is_chat(row):
                texts = chats.render_chat(chats.as_chat(row), place, tokenizer, shown)
                found += [(tokenizing.tokenize_answers(*each, tokenizer), source) for each in texts]
            else:
                found.append((tokenize_prompt(row, tokenizer), source))
    dtype = tokenizing.id_type(tokenizer)
    result: dict[str, list] = {"input_ids": [ids.astype(dtype) for (ids, _), _ in found]}
    result["source"] = [source for _, source in found]
    if with_masks:
        result["loss_mask"] = [mask for (_, mask), _ in found]
    return result


def views(cfg: Any, data: Any) -> tuple[Any, Sequences]:
    """Sequences of context_length tokens. Those to evaluate on also have the sums `bytes` and
    `unigram_loss` of their tokens."""
    validation = Sequences(data["validation"], cfg, data["vocabulary"])
    if not cfg.streaming:
        return Sequences(data["train"], cfg), validation
    longest = min(tokenizing.most_tokens(cfg), cfg.context_length)
    make = partial(make_sequences, cfg=cfg, folder=data.folder, longest=longest)
    size = SEQUENCES * cfg.context_length * BYTES_A_TOKEN
    return RowStream(cfg, row_format(cfg), make, size), validation


def make_sequences(block: dict[str, list], cfg: Any, folder: Path, longest: int) -> Any:
    """The sequences of a block of a stream: rows as those of Sequences. A last one that is not full
    is dropped, where documents are not packed whole."""
    tokens = tokenize(block, tokenizing.load_tokenizer(folder), with_masks=is_packed(cfg))
    if is_packed(cfg):
        return sequences.pack_alone(tokens, cfg, longest)
    ids, length = np.concatenate(tokens["input_ids"]).astype(np.int64), cfg.context_length
    whole = ids[: len(ids) // length * length].reshape(-1, length)
    return [{"input_ids": each, "labels": each.copy()} for each in whole]


def tokenize_prompt(row: dict, tokenizer: Any) -> Tokens:
    """A prompt with its completion and the end-of-text token, which are the items in the loss."""
    whole = row["prompt"] + row["completion"]
    ids, mask = tokenizing.tokenize_answers(whole, [(len(row["prompt"]), len(whole))], tokenizer)
    begin = tokenizing.begin_tokens(tokenizer)
    ids = np.array([*begin, *ids, tokenizer.eos_token_id], np.int32)
    return ids, np.array([*[0] * len(begin), *mask, 1], np.uint8)


def prompt_tokens(text: str, kind: str, tokenizer: Any) -> list[int]:
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


# ---- What the trained model is asked -------------------------------------------------------------


def write_samples(model: Any, cfg: Any, data: Any) -> dict[str, str]:
    """Texts that a model writes after the sample prompt, and after prompts that are held out."""
    tokenizer = tokenizing.load_tokenizer(data.folder)
    prompts = {"sample": prompt_tokens(cfg.sample_prompt, cfg.rows, tokenizer)}
    for number in range(min(2, len(data["validation"])) if cfg.rows != "text" else 0):
        row = data["validation"][number]
        prompts[f"held out {number + 1}"] = row["input_ids"][: row["loss_mask"].index(1)]
    longest, texts = getattr(model.config, "max_position_embeddings", None) or 1024, {}
    for name, prompt in prompts.items():
        tokens = torch.tensor([prompt[-longest // 2 :]], device=model.device)
        settings = {"max_new_tokens": min(longest - tokens.shape[1], 100), "do_sample": False}
        # Greedy, as sampling would draw random numbers; the penalty prevents loops.
        settings |= {"attention_mask": torch.ones_like(tokens), "repetition_penalty": 1.2}
        answer = model.generate(input_ids=tokens, **settings)
        texts[name] = tokenizer.decode(answer[0], skip_special_tokens=True).rstrip()
    return texts


def test_inputs(rows: list[dict], cfg: Any, data: Any) -> list[tuple[Any, dict]]:
    """Test inputs of the export: the beginnings of texts, or chats of one and two questions."""
    tokenizer = tokenizing.load_tokenizer(data.folder)
    starts = [row["input_ids"][: min(cfg.context_length // 2, 32)] for row in rows]
    texts: list[Any] = [tokenizer.decode(each, skip_special_tokens=True) for each in starts]
    asked = ask([cfg.sample_prompt, *texts], cfg.sample_prompt, cfg.rows == "chat", tokenizer)
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
