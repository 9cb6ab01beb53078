"""Formats of rows for a language model: a text, a prompt with its completion, or a chat.

They are recognised by their columns, read, checked, divided, and tokenised.
"""

import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from samestep.base.console import one_line
from samestep.base.fields import check_fields, check_ignored_fields
from samestep.data import demo_data, sources, tables
from samestep.data.tables import TABLES, Row
from samestep.text import chats, tokenizing
from samestep.text.tokenizing import Tokens
from samestep.text.units import Input

ENDINGS = (".txt", *TABLES)
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
# Roles whose column may be missing. No field names a column of Alpaca.
OPTIONAL = ("tools", "instruction", "input", "output")


class RowFormat(NamedTuple):
    """Rows of a data set: their kind, the columns by role, and all columns where these were read.

    The kind is text, prompt or chat. Data that every machine has has no columns.
    """

    kind: str
    columns: dict[str, Any]
    names: list[str]


# ---- Columns -------------------------------------------------------------------------------------


def check_format_fields(cfg: Any) -> None:
    """Raises ValueError for `rows` that the data does not have, and for columns nothing reads."""
    chats.read_names(cfg.roles)
    shipped, pairs = cfg.data in demo_data.TEXTS, cfg.data == "docstrings"
    fits = cfg.rows == "auto" or not shipped or pairs == (cfg.rows != "text")
    where = f"where task.data is {one_line(cfg.data, 60)}"
    wanted = f"{'prompt or chat' if pairs else 'text'} {where}"
    differ = cfg.completion_column != cfg.prompt_column
    rules = [("rows", fits, wanted), ("completion_column", differ, "another than the prompt's")]
    check_fields(cfg, rules)
    other = f"where task.rows is {cfg.rows}"
    for kind, columns in COLUMN_FIELDS.items():
        names = columns + " train_on roles" * (kind == "chat")
        read = [(columns, not shipped, where), (names, cfg.rows in ("auto", kind), other)]
        check_ignored_fields(cfg, read)


def endings_of(cfg: Any) -> tuple[str, ...]:
    """The extensions of files that are read: tables, .txt, and cfg.file_extensions as texts."""
    own = [each.strip().lower() for each in cfg.file_extensions.split(",") if each.strip()]
    for each in own:
        if not re.fullmatch(r"(\.[\w+-]+)+", each) or tables.file_ending(f"x{each}") in TABLES:
            problem = f"{one_line(each, 30)!r} cannot be read as text"
            raise ValueError(f"task.file_extensions: {problem}; write for example .md,.py")
    return (*ENDINGS, *own)


def recognize_format(cfg: Any) -> RowFormat:
    """The format of cfg.data: fields decide; where they leave it open, the names of columns do.

    Raises ValueError for columns of no known format.
    """
    if cfg.data in demo_data.TEXTS:
        usual = "prompt" if cfg.data == "docstrings" else "text"
        return RowFormat(usual if cfg.rows == "auto" else cfg.rows, {}, [])
    kinds = {"messages": "chat", "prompt": "prompt", "completion": "prompt", "text": "text"}
    fields, names = {role: getattr(cfg, f"{role}_column") for role in kinds}, []
    named = [kind for role, kind in kinds.items() if fields[role] != role]
    kind = named[0] if named and cfg.rows == "auto" else cfg.rows
    if kind in ("text", "prompt", *named):
        columns = {role: fields[role] for role in kinds if kinds[role] == kind}
    else:
        names = sources.read_column_names(cfg, endings_of(cfg))
        formats = [each for each in KNOWN if kind in ("auto", each[0])]
        fitting = [each for each in formats if {*each[1].values()} <= {*names}]
        if not fitting:
            raise unknown_columns(cfg, names, [columns for _, columns in formats])
        kind, columns = fitting[0]
    if kind == "chat":
        more = {"tools": cfg.tools_column} if "messages" in columns else {"input": "input"}
        columns = {**columns, **{role: name for role, name in more.items() if name}}
    return RowFormat(kind, columns, names)


def unknown_columns(cfg: Any, names: list[str], formats: list[dict[str, str]]) -> ValueError:
    """An error that shows the columns, the known formats, and the fields that name columns."""
    data = one_line(cfg.data, 100)
    if not names:
        return ValueError(f"task.data: there is no text in {data}")
    there = one_line(", ".join(names[:20]), 100)
    forms = ", ".join(" + ".join(columns.values()) for columns in formats)
    others = "--task.text_column, --task.prompt_column and --task.completion_column, or "
    return ValueError(
        f"task.data: {data} has the columns {there}, but task.rows {cfg.rows} looks for "
        f"{forms}; name yours with {others * (cfg.rows == 'auto')}"
        "--task.messages_column"
    )


# ---- Rows ----------------------------------------------------------------------------------------


def row_check(cfg: Any) -> Callable[[dict], list[str] | None]:
    """What makes a row usable, in place, or raises ValueError; of a chat it returns what to say."""
    if cfg.rows != "chat":
        return check_text
    names = chats.read_names(cfg.roles)
    return partial(chats.normalize_chat, train_on=cfg.train_on, names=names)


def describe_input(source: Input, row_format: RowFormat) -> str:
    """Lines with the number of rows, the columns that are read, and roles under other names."""
    cfg, counts = source.cfg, source.counts.copy()
    tools = counts.pop("tools", 0)
    named = row_format.kind == "chat" and cfg.tools_column not in ("", "tools")
    if named and not tools and not source.is_validation:
        name = one_line(cfg.tools_column, 60)
        raise ValueError(f"task.tools_column: no row has tools in a column {name}")
    size = f"{source.rows:,} {PLURALS[row_format.kind]} of {source.data}"
    size += f", {tools:,} with tools" * bool(tools)
    columns, names = row_format.columns, row_format.names
    read = [n for role, n in columns.items() if role != "tools" and (n in names or not names)]
    unread = [name for name in names if name not in columns.values()]
    if read and names != ["text", "label"]:  # a .txt file has its text, and its folder as label
        size += f", from {one_line(', '.join(read), 200)}"
        size += f" (not read: {one_line(', '.join(unread), 200)})" * bool(unread)
    lines = [size, *(f"in {counts[each]:,} chats {each}" for each in sorted(counts))]
    return "\n".join(f"Preparing data: {line}" for line in lines)


def key_of(row: dict) -> str:
    """Text that equal rows share; a text is its own key."""
    # Parquet has dates, which JSON has not.
    return row["text"] if "text" in row else json.dumps(row, default=str)


def check_text(row: dict) -> None:
    """Raises ValueError for a row in which a text is missing, empty (but for a prompt), or none."""
    for role, value in row.items():
        blank = role != "prompt" and not str(value).strip()
        if value is None or value != value or blank:  # tables have NaN for null
            raise sources.IncompleteRow(f"the {role} is empty")
        if not isinstance(value, str):
            raise ValueError(f"the {role} is {one_line(repr(value), 60)} but must be text")


def texts_of(row: dict) -> Iterable[str]:
    """All text of a row, for a vocabulary to be learnt from."""
    return chats.chat_texts(row) if "messages" in row else row.values()


# ---- Tokens --------------------------------------------------------------------------------------


def tokenize_rows(rows: list[Row], kind: str, tokenizer: Any) -> list[Tokens]:
    """Prompts or chats as tokens: items in the loss are completions, or answers."""
    if kind == "prompt":
        return [tokenize_prompt(row, tokenizer) for row, _ in rows]
    shown: set = set()  # kinds of chats that the template was found to show
    texts = [text for row in rows for text in chats.render_chat(*row, tokenizer, shown)]
    return [tokenizing.tokenize_answers(*each, tokenizer) for each in texts]


def tokenize_prompt(row: dict, tokenizer: Any) -> Tokens:
    """A prompt with its completion and the end-of-text token, which are the items in the loss."""
    whole = row["prompt"] + row["completion"]
    ids, mask = tokenizing.tokenize_answers(whole, [(len(row["prompt"]), len(whole))], tokenizer)
    begin = tokenizing.begin_tokens(tokenizer)
    ids = np.array([*begin, *ids, tokenizer.eos_token_id], np.int32)
    return ids, np.array([*[0] * len(begin), *mask, 1], np.uint8)


def question_tokens(row: dict | str, kind: str, tokenizer: Any) -> list[int]:
    """The tokens that the model is to continue: of a row, or of a text or a user's message."""
    begin, question = tokenizing.begin_tokens(tokenizer), row
    if kind == "chat":
        messages, tools = [{"role": "user", "content": row}], []
        if not isinstance(row, str):
            answers = [i for i, m in enumerate(row["messages"]) if i and m["role"] == "assistant"]
            messages, tools = row["messages"][: answers[0]], row.get("tools", [])
        begin = []
        question = chats.apply_template(messages, tools, "task.sample_prompt", tokenizer, ask=True)
    elif not isinstance(row, str):
        question = row["prompt"]
    elif kind == "text":
        begin = begin or [tokenizer.eos_token_id]
    tokens = tokenizer(question, add_special_tokens=False, verbose=False).input_ids
    return [*begin, *tokens] or [tokenizer.eos_token_id]


def ask(texts: list[str], user: str, as_chats: bool, tokenizer: Any) -> list[tuple[Any, dict]]:
    """For the check of an export: texts, or chats of one and two questions, and their tokens."""
    asked: list = [(text, text) for text in texts if text.strip()]
    if as_chats:
        question, reply = ({"role": r, "content": user} for r in ("user", "assistant"))
        found, place = [[question], [question, reply, question]], "the check of the export"
        asked = [(c, chats.apply_template(c, [], place, tokenizer, ask=True)) for c in found]
    how = {"add_special_tokens": not as_chats, "verbose": False}
    return [(each, {"input_ids": [tokenizer(text, **how).input_ids]}) for each, text in asked]
