"""Chats: what a row of messages must hold, and what a chat template makes of it.

A chat is {"messages": [...], "tools": [...]} in the form of OpenAI, which the templates of
transformers take too. The arguments of tool calls are objects. `tools` is missing if there are
none.
"""

import contextlib
import os
import re
from pathlib import Path
from typing import Any

from samestep.base.console import one_line
from samestep.base.fields import local_path
from samestep.data.readers import parse_json, replace_surrogates
from samestep.data.sources import IncompleteRow

# Roles by their names: those that templates know, and others of ShareGPT, Gemini and old OpenAI.
_ROLES = {name: name for name in ("user", "assistant", "system", "tool", "developer")}
_ROLES |= {"human": "user", "gpt": "assistant", "model": "assistant", "function": "tool"}
_ROLES |= {"prompter": "user", "bot": "assistant", "chatgpt": "assistant", "ai": "assistant"}
_REASONING = ("reasoning_content", "reasoning", "thinking")  # templates differ in this name
_WORDS = ("role", "content", "name", "weight", "tool_calls", *_REASONING)
# What may separate parts of a content, such as <think>, <|channel|> and [THINK].
_TAG = re.compile(r"(<[^<>\s]{1,40}>|\[/?[A-Z_]+\]|◁/?\w+▷)")
# For tokenizers without a template. It needs no special token but the end of text.
CHAT_TEMPLATE = Path(__file__).with_name("chat.jinja").read_text(encoding="utf-8").rstrip()


# ---- Rows ----------------------------------------------------------------------------------------


def read_chat(messages: Any, tools: Any, train_on: str = "all") -> dict[str, list]:
    """A chat of messages, in OpenAI's form or ShareGPT's, and of tools; cells of tables hold both
    as JSON.

    `train_on`: all answers, or the last alone; the others are context then.

    Raises IncompleteRow for a chat without an answer, and ValueError for any other mistake.
    """
    messages = _parse_json(messages, "messages")
    tools = _parse_json(tools, "tools")
    tools = [_parse_json(tool, "tools") for tool in tools] if isinstance(tools, list) else tools
    if not messages:
        raise IncompleteRow("there are no messages")
    form = "a list of objects with role and content"
    _require(isinstance(messages, list), "messages", messages, form)
    chat = {"messages": read_messages(messages)}
    answers = {i: m for i, m in enumerate(chat["messages"], 1) if m["role"] == "assistant"}
    for number, message in answers.items():
        if message.get("weight", 1) not in (0, 1):
            weight = message["weight"]
            raise ValueError(f"weight of message {number} is {weight!r:.60}; give 0 or 1")
        if number > 1 and not message["content"].strip() and not message.get("tool_calls"):
            raise IncompleteRow(f"message {number}, of the assistant, is empty")
        if train_on == "last" and number != max(answers):
            message["weight"] = 0
    if max(answers, default=1) == 1:
        roles = one_line(", ".join(dict.fromkeys(each["role"] for each in chat["messages"])), 60)
        raise IncompleteRow(f"no message after the first has the role assistant (roles: {roles})")
    if not any(map(is_trained_on, chat["messages"][1:])):
        raise IncompleteRow("no message of the assistant is trained on: all have the weight 0")
    if tools:
        fits = isinstance(tools, list) and all(map(_function_name, tools))
        _require(fits, "tools", tools, "a list of objects, each with a name")
        chat["tools"] = tools
    return chat


def is_trained_on(message: dict) -> bool:
    """Whether a message is an answer. The weight 0, or train: false, makes it context."""
    return message["role"] == "assistant" and message.get("weight", 1) == 1


def alpaca_messages(row: dict) -> list[dict[str, str]]:
    """The messages of a row with instruction, output and perhaps input."""
    texts = {}
    for role in ("instruction", "input", "output"):
        texts[role] = "" if row.get(role) is None else row[role]
        _require(isinstance(texts[role], str), f"the {role}", texts[role], "text")
        if role != "input" and not texts[role].strip():
            raise IncompleteRow(f"there is no {role}")
    question = "\n\n".join(texts[role] for role in ("instruction", "input") if texts[role].strip())
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": texts["output"]},
    ]


def read_messages(messages: list) -> list[dict]:
    """Messages with a role of _ROLES, content, and tool_calls if there are any.

    Raises ValueError: a message with another role would be context without a word.
    """
    found = []
    for number, message in enumerate(messages, 1):
        where = f"message {number}"
        _require(isinstance(message, dict), where, message, "an object with role and content")
        if "from" in message and message.get("role") is None:  # ShareGPT
            names = {"from": "role", "value": "content"}
            if message.get("value") is None and "content" in message:
                names = {"from": "role"}
            left = {key: value for key, value in message.items() if key not in names.values()}
            message = {names.get(key, key): value for key, value in left.items()}
        result = _without_nulls(message)
        if "train" in result:  # axolotl's name
            result["weight"] = result.pop("train")
        calls = _parse_json(result.pop("tool_calls", None), f"tool_calls of {where}")
        for name, there in (("role", "role" in result), ("content", "content" in message or calls)):
            if not there and name == "content" and {*result} <= {*_WORDS}:
                raise IncompleteRow(f"{where} has no content")  # in a table it was null
            if not there:
                only = one_line(", ".join(map(str, result)) or "nothing", 60)
                raise ValueError(f"{where} has no {name}, only {only}; rename the key to {name}")
            value = result.get(name, "")
            _require(isinstance(value, str), f"the {name} of {where}", value, "text")
        if result.get("function_call"):
            raise ValueError(f"{where} has function_call, the old form; write tool_calls")
        if calls:
            _require(isinstance(calls, list), f"tool_calls of {where}", calls, "a list")
            result["tool_calls"] = [_normalize_call(call, where) for call in calls]
        elif "content" not in result:
            raise IncompleteRow(f"{where} has no content")
        role = _ROLES.get(result["role"].strip().lower())
        if not role:
            name = f"{result['role'].strip()!r:.60}"
            raise ValueError(f"{where} is from {name}; rename it to one of {', '.join(_ROLES)}")
        found.append({"content": "", **result, "role": role})
    return found


def _normalize_call(call: Any, where: str) -> dict:
    """A tool call in OpenAI's form. Its arguments are an object, which templates write as JSON."""
    if not _function_name(call):
        form = '{"type": "function", "function": {"name": ..., "arguments": {...}}}'
        raise ValueError(f"{where} has the tool call {call!r:.60}; write {form}")
    function = _without_nulls(call.get("function", call))
    arguments = _parse_json(function.get("arguments"), f"arguments in {where}")
    arguments = {} if arguments is None else arguments
    _require(isinstance(arguments, dict), f"arguments in {where}", arguments, "an object")
    call = _without_nulls(call) if "function" in call else {}
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _function_name(value: Any) -> str:
    """The name of a tool or a tool call; empty if it has no name."""
    function = value.get("function", value) if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def _parse_json(value: Any, what: str) -> Any:
    """The value of JSON text, which cells of tables hold; any other value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return replace_surrogates(parse_json(value)) if value.strip() else None
    except (ValueError, RecursionError) as error:
        problem = one_line(getattr(error, "msg", error), 100)
        text = f"{what} is {value!r:.60}, which cannot be read as JSON ({problem})"
        raise ValueError(text) from None


def parse_messages(value: Any) -> Any:
    """The value of a prompt or an answer: a text, or a list of messages, which the cell of a table
    holds as JSON."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(ValueError):  # an answer may look so, too
            found = _parse_json(value, "")
            are_messages = [isinstance(m, dict) and {"role", "from"} & {*m} for m in found]
            value = found if found and all(are_messages) else value
    return value


def _without_nulls(value: dict) -> dict:
    return {key: each for key, each in value.items() if each is not None}


def words_of(messages: list[dict]) -> list[dict]:
    """What of messages counts where rows are compared: no ids, times and the like."""
    found = [{name: m[name] for name in m if name in _WORDS} for m in messages]
    for message in found:
        if calls := message.get("tool_calls"):
            calls = [{"type": "function", "function": each["function"]} for each in calls]
            message["tool_calls"] = calls
    return found


def is_chat(row: dict) -> bool:
    """Whether a stored row has messages."""
    return "chat" in row or row.get("is_chat", False)


def _require(fits: bool, what: str, value: Any, wanted: str) -> None:
    if not fits:
        raise ValueError(f"{what} is {value!r:.60} but must be {wanted}")


# ---- Templates -----------------------------------------------------------------------------------


def read_template(path: str) -> str:
    """The text of this file, or empty. Raises ValueError if there is none, or it is no text."""
    if not path:
        return ""
    if not os.path.isfile(local_path(path)):
        raise ValueError(f"task.chat_template: there is no file {path}")
    try:
        return local_path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"task.chat_template: cannot read {path}: {error}") from None


def render_chat(row: dict, place: str, tokenizer: Any) -> list[tuple[str, list[tuple]]]:
    """A chat as text, with the start and end of each answer in it.

    Some templates change a turn when others follow; they leave out its reasoning, for example. Then
    each answer gets a text of its own, which ends with it.
    """
    messages, tools = row["messages"], row.get("tools", [])
    whole, before, until = apply_template(messages, tools, place, tokenizer), {}, {}
    for i, message in enumerate(messages):
        if i and is_trained_on(message):
            before[i] = apply_template(messages[:i], tools, place, tokenizer, ask=True)
            until[i] = apply_template(messages[: i + 1], tools, place, tokenizer)
    if not all(until[i].startswith(before[i]) for i in before):
        raise ValueError(
            f"task.chat_template: {place}: the chat with its answer does not begin with what the "
            "template gives to ask for that answer (add_generation_prompt); mend it, or give "
            "another with --task.chat_template FILE"
        )
    missing = _left_out(row, whole, {i: until[i][len(before[i]) :] for i in before})
    if tools and apply_template(messages, [], place, tokenizer) == whole:
        missing = "the tools"
    if missing:
        raise ValueError(
            f"task.chat_template: {place}: the template leaves out {missing}; give one that shows "
            "it with --task.chat_template FILE, or take it out of the data"
        )
    answers = {i: (len(before[i]), len(until[i])) for i in before}
    if all(whole.startswith(until[i]) for i in answers):
        return [(whole, [*answers.values()])]
    return [(until[i], [answers[i]]) for i in answers]


def _left_out(chat: dict, whole: str, answers: dict[int, str]) -> str:
    """The first part of a chat that a template leaves out, by its words; else empty.

    `answers`: the text of each answer where it is the last message: its reasoning may be gone
    later. (What tools answer some templates write as JSON: it is not looked for.)
    """
    for i, message in enumerate(chat["messages"]):
        text, where = answers.get(i, whole), f"of message {i + 1} ({message['role']})"
        content = message["content"]  # text, or a list of texts and images
        texts = [each.get("text") or "" for each in content] if type(content) is list else [content]
        parts = [part for each in texts for part in _TAG.split(each)[::2]]
        parts = parts if message["role"] != "tool" else []
        parts += [message.get(name) or "" for name in _REASONING]
        for part in map(str.strip, parts):
            if part not in text:
                return f"{part!r:.60} {where}"
        calls = [_function_name(call) for call in message.get("tool_calls", [])]
        for name in calls:
            if text.count(name) < calls.count(name):
                return f"a call of {name!r:.60} {where}"
    return ""


def apply_template(
    messages: list[dict], tools: list[dict], place: str, tokenizer: Any, ask: bool = False
) -> str:
    """Messages as text, by the tokenizer's chat template; with `ask`, up to where an answer begins.

    A template is a program: it may fail. Raises ValueError with the place of the row.
    """
    options = {"tools": tools or None, "tokenize": False, "add_generation_prompt": ask}
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except Exception as error:
        raise ValueError(f"task.chat_template: {place}: {one_line(error)}") from None
