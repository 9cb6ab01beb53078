"""Chats: what a row of messages must hold, and what a chat template makes of it.

A chat is {"messages": [...], "tools": [...]} in the form of OpenAI, which the templates of
transformers take too. The arguments of tool calls are objects. `tools` is missing if there are
none.
"""

import contextlib
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from samestep.base.console import one_line
from samestep.base.fields import local_path
from samestep.data.sources import IncompleteRow
from samestep.data.tables import replace_surrogates

# Roles by their names: those that templates know, and others of ShareGPT, Gemini and old OpenAI.
ROLES = {name: name for name in ("user", "assistant", "system", "tool", "developer")}
ROLES |= {"human": "user", "gpt": "assistant", "model": "assistant", "function": "tool"}
ROLES |= {"prompter": "user", "bot": "assistant", "chatgpt": "assistant", "ai": "assistant"}
KEYS = ("role", "content")
REASONING = ("reasoning_content", "reasoning", "thinking")  # templates differ in this name
# What may separate parts of a content, such as <think>, <|channel|> and [THINK].
TAG = re.compile(r"(<[^<>\s]{1,40}>|\[/?[A-Z_]+\]|◁/?\w+▷)")
PART = re.compile(r"(\W*\w*)(.*\S|)(\s*)\Z", re.DOTALL)  # the first word, the rest, space
TRIED = 100  # chats in which a key of messages is left out, to see whether the template reads it
# For tokenizers without a template. It needs no special token but the end of text.
CHAT_TEMPLATE = """\
{%- if tools %}{{ 'Tools: <tools>\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}{{ '</tools>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- set content = message['content'] or '' %}
{{- message['role'] | capitalize + ': ' + content }}
{%- for call in message['tool_calls'] or [] %}
{%- set function = call['function'] or call %}
{%- set arguments = function['arguments'] %}
{{- '\\n' if content or not loop.first }}{{ '<tool_call>\\n{"name": ' }}
{{- function['name'] | tojson }}{{ ', "arguments": ' }}
{{- arguments if arguments is string else arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor %}
{%- if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""


# ---- Rows ----------------------------------------------------------------------------------------


def read_names(roles: str) -> dict[str, str]:
    """The names in messages that task.roles gives, as bot=assistant, and what they mean.

    Raises ValueError for other text.
    """
    names: dict[str, str] = {}
    for part in filter(str.strip, roles.split(",")):
        name, _, meaning = map(str.strip, part.partition("="))
        if not name or name in names or meaning not in (*KEYS, *ROLES.values()):
            known = ", ".join((*KEYS, *dict.fromkeys(ROLES.values())))
            hint = f"write each once, as bot=assistant, with one of {known}"
            raise ValueError(f"task.roles: {part!r:.60} gives no name a meaning; {hint}")
        names[name] = meaning
    return names


def normalize_chat(row: dict, train_on: str = "all", names: dict[str, str] | None = None) -> list:
    """Makes a row of OpenAI, ShareGPT or Alpaca a chat, in place. Returns what to say of its roles
    and tools.

    `train_on`: all answers, or the last alone; the others are context then. `names`: see
    `read_names`.

    Raises IncompleteRow for a chat without an answer, and ValueError for any other mistake.
    """
    if "instruction" in row:
        row["messages"] = alpaca_messages(row)
    messages, tools = parse_json(row.pop("messages"), "messages"), row.pop("tools", None)
    tools = parse_json(tools, "tools") if isinstance(tools, str) else drop_nulls(tools)
    tools = [parse_json(tool, "tools") for tool in tools] if isinstance(tools, list) else tools
    if not messages:
        raise IncompleteRow("there are no messages")
    form = "a list of objects with role and content"
    require(isinstance(messages, list), "messages", messages, form)
    said: set[str] = set()
    row["messages"] = messages = read_messages(messages, names or {}, said)
    answers = {i: each for i, each in enumerate(messages, 1) if each["role"] == "assistant"}
    for number, message in answers.items():
        if message.get("weight", 1) not in (0, 1):
            weight = message["weight"]
            raise ValueError(f"weight of message {number} is {weight!r:.60}; give 0 or 1")
        if number > 1 and not message["content"].strip() and not message.get("tool_calls"):
            raise IncompleteRow(f"message {number}, of the assistant, is empty")
        if train_on == "last" and number != max(answers):
            message["weight"] = 0
    if max(answers, default=1) == 1:
        roles = one_line(", ".join(dict.fromkeys(each["role"] for each in messages)), 60)
        raise IncompleteRow(f"no message after the first has the role assistant (roles: {roles})")
    if not any(map(is_trained_on, messages[1:])):
        raise IncompleteRow("no message of the assistant is trained on: all have the weight 0")
    if tools:
        fits = isinstance(tools, list) and all(map(function_name, tools))
        require(fits, "tools", tools, "a list of objects, each with a name")
        row["tools"] = tools
        said.add("there are tools")
    return [*said]


def is_trained_on(message: dict) -> bool:
    """Whether a message is an answer. The weight 0, or train: false, makes it context."""
    return message["role"] == "assistant" and message.get("weight", 1) == 1


def alpaca_messages(row: dict) -> list[dict[str, str]]:
    """The messages of a row of Alpaca, whose columns are taken out of the row."""
    texts = {role: row.pop(role, None) or "" for role in ("instruction", "input", "output")}
    for role, text in texts.items():
        require(isinstance(text, str), f"the {role}", text, "text")
        if role != "input" and not text.strip():
            raise IncompleteRow(f"there is no {role}")
    question = "\n\n".join(texts[role] for role in ("instruction", "input") if texts[role].strip())
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": texts["output"]},
    ]


def read_messages(
    messages: list, names: dict[str, str], said: set[str] | None = None
) -> list[dict]:
    """Messages with a role of ROLES, content, and tool_calls if there are any.

    `names`: see `read_names`. `said` gets what to say of roles under other names. Raises
    ValueError: a message with another role would be context without a word.
    """
    found = []
    for number, message in enumerate(messages, 1):
        where = f"message {number}"
        require(isinstance(message, dict), where, message, "an object with role and content")
        meanings = {key: meaning for key, meaning in names.items() if meaning in KEYS}
        if "from" in message and message.get("role") is None:  # ShareGPT
            meanings = {"from": "role", "value": "content", **meanings}
        left = {key: value for key, value in message.items() if key not in meanings}
        message = left | {meanings[key]: message[key] for key in meanings if key in message}
        result = drop_nulls(message)
        if "train" in result:  # axolotl's name
            result["weight"] = result.pop("train")
        calls = parse_json(result.pop("tool_calls", None), f"tool_calls of {where}")
        for name, there in (("role", "role" in result), ("content", "content" in message or calls)):
            if not there:
                only = one_line(", ".join(map(str, result)) or "nothing", 60)
                hint = f"name its key with --task.roles KEY={name}"
                raise ValueError(f"{where} has no {name}, only {only}; {hint}")
            value = result.get(name, "")
            require(isinstance(value, str), f"the {name} of {where}", value, "text")
        if result.get("function_call"):
            raise ValueError(f"{where} has function_call, the old form; write tool_calls")
        if calls:
            require(isinstance(calls, list), f"tool_calls of {where}", calls, "a list")
            result["tool_calls"] = [normalize_call(call, where) for call in calls]
        elif "content" not in result:
            raise IncompleteRow(f"{where} has no content")
        role = known_role(result["role"], names, where)
        if said is not None and role != result["role"]:
            said.add(f"{one_line(result['role'])} is read as {role}")
        found.append({"content": "", **result, "role": role})
    return found


def known_role(name: str, names: dict[str, str], where: str) -> str:
    """The role of ROLES that a name means. Raises ValueError if it means none."""
    role = names.get(name.strip()) or ROLES.get(name.strip().lower())
    if role in ROLES:
        return role
    known = ", ".join(dict.fromkeys(ROLES.values()))
    hint = f"say which it is: --task.roles {shlex.quote(one_line(name, 60))}=user"
    raise ValueError(f"{where} is from {name.strip()!r:.60}, none of {known}; {hint}")


def normalize_call(call: Any, where: str) -> dict:
    """A tool call in OpenAI's form. Its arguments are an object, which templates write as JSON."""
    if not function_name(call):
        form = '{"type": "function", "function": {"name": ..., "arguments": {...}}}'
        raise ValueError(f"{where} has the tool call {call!r:.60}; write {form}")
    function = call.get("function", call)
    arguments = parse_json(function.get("arguments"), f"arguments in {where}") or {}
    require(isinstance(arguments, dict), f"arguments in {where}", arguments, "an object")
    call = call if "function" in call else {}
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def function_name(value: Any) -> str:
    """The name of a tool or a tool call; empty if it has no name."""
    function = value.get("function", value) if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def parse_json(value: Any, what: str) -> Any:
    """The value of JSON text, which cells of tables hold; any other value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return replace_surrogates(json.loads(value)) if value.strip() else None
    except (ValueError, RecursionError) as error:
        problem = one_line(getattr(error, "msg", error), 100)
        raise ValueError(f"{what} is {value!r:.60}, which is not JSON ({problem})") from None


def parse_messages(value: Any, name: str) -> Any:
    """The value of a prompt or an answer: a text, or a list of messages, which the cell of a table
    holds as JSON."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(ValueError):  # an answer may look so, too
            found = parse_json(value, name)
            are_messages = [isinstance(m, dict) and {"role", "from"} & {*m} for m in found]
            value = found if found and all(are_messages) else value
    return value


def drop_nulls(value: Any) -> Any:
    """The value without null keys: in a table, each object has the keys of all rows."""
    if isinstance(value, dict):
        return {key: drop_nulls(each) for key, each in value.items() if each is not None}
    return [drop_nulls(each) for each in value] if isinstance(value, list) else value


def chat_texts(row: dict) -> Iterator[str]:
    """All text of a chat: contents, and tool calls and tools as JSON."""
    for message in row["messages"]:
        yield message["content"]
        for call in message.get("tool_calls", []):
            yield json.dumps(call["function"], ensure_ascii=False)
    for tool in row.get("tools", []):
        yield json.dumps(tool, ensure_ascii=False)


def require(fits: bool, what: str, value: Any, wanted: str) -> None:
    if not fits:
        raise ValueError(f"{what} is {value!r:.60} but must be {wanted}")


def is_chat(row: dict) -> bool:
    """Whether a stored row has messages, as JSON text."""
    if "messages" in row:
        return True
    completion = row.get("completion", "")
    return isinstance(parse_messages(completion, "completion"), list)


def as_chat(row: dict) -> dict:
    """The messages and tools of a stored row."""
    if "messages" in row:
        chat = {"messages": json.loads(row["messages"]), "tools": json.loads(row["tools"])}
        return chat if chat["tools"] else {"messages": chat["messages"]}
    return {"messages": [*json.loads(row["prompt"]), *json.loads(row["completion"])]}


# ---- Templates -----------------------------------------------------------------------------------


def check_template(path: str) -> None:
    """Raises ValueError where task.chat_template names no file."""
    if path and not os.path.isfile(local_path(path)):
        raise ValueError(f"task.chat_template: there is no file {path}")


def read_template(path: str) -> str:
    """The text of this file, or empty. Raises ValueError if it is no text."""
    if not path:
        return ""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"task.chat_template: cannot read {path}: {error}") from None


def render_chat(row: dict, place: str, tokenizer: Any, shown: set) -> list[tuple[str, list[tuple]]]:
    """A chat as text, with the start and end of each answer in it.

    Some templates change a turn when others follow; they leave out its reasoning, for example. Then
    each answer gets a text of its own, which ends with it. `shown` is for check_nothing_left_out.
    """
    messages, tools = row["messages"], row.get("tools", [])
    whole, before, until = apply_template(messages, tools, place, tokenizer), {}, {}
    for i, message in enumerate(messages):
        if i and is_trained_on(message):
            before[i] = apply_template(messages[:i], tools, place, tokenizer, ask=True)
            until[i] = apply_template(messages[: i + 1], tools, place, tokenizer)
    text = "\n".join([whole, *until.values()])
    check_nothing_left_out(row, text, place, tokenizer, shown)
    if not all(until[i].startswith(before[i]) for i in before):
        raise ValueError(
            f"task.chat_template: {place}: the chat with its answer does not begin with what the "
            "template gives to ask for that answer (add_generation_prompt); mend it, or give "
            "another with --task.chat_template FILE"
        )
    answers = {i: (len(before[i]), len(until[i])) for i in before}
    if all(whole.startswith(until[i]) for i in answers):
        return [(whole, [*answers.values()])]
    return [(until[i], [answers[i]]) for i in answers]


def say_unread_keys(rows: Iterable[dict], tokenizer: Any) -> None:
    """Prints the keys of messages that the template does not read, and in how many chats they are:
    the text of the first TRIED chats with one is the same without it."""
    known = {*KEYS, *REASONING, "tool_calls", "weight"}
    counts: Counter[str] = Counter()
    render = partial(render_chat, place="", tokenizer=tokenizer, shown=set())
    for row in rows:
        for key in {key for message in row["messages"] for key in message} - known:
            counts[key] += 1
            if counts[key] > TRIED:
                continue
            less = [{k: v for k, v in each.items() if k != key} for each in row["messages"]]
            try:
                is_read = render({**row, "messages": less}) != render(row)
            except ValueError:  # it does not do without, or is wrong, which is said later
                is_read = True
            if is_read:
                known.add(key)
    unread = [f"{key} (in {n:,} chats)" for key, n in counts.most_common() if key not in known]
    if unread:
        what = f"the chat template reads none of these keys of messages: {', '.join(unread)}"
        print(f"Preparing data: {one_line(what, 300)}", flush=True)


def check_nothing_left_out(row: dict, text: str, place: str, tokenizer: Any, shown: set) -> None:
    """Raises ValueError for a part of a chat that the template leaves out silently.

    The template gets the chat with numbers in each part, and must show all numbers. For chats of
    the same parts, whose hashes `shown` collects, that is done once, unless words of a part are
    missing in the `text` of the chat: the template may have written them otherwise.
    """
    parts = number_parts(row)[2]
    keys = ((message["role"], *message) for message in row["messages"])
    tags = (frozenset(TAG.findall(message["content"])) for message in row["messages"])
    kind = hash((*(part[0] for part in parts.values()), *keys, *tags))
    if kind in shown and all(words in text for *_, words in parts.values()):
        return
    shown.add(kind)
    missing = ""
    try:
        missing = find_left_out(row, place, tokenizer)
    except ValueError:  # the template refuses another value of a part, which it reads
        for number in parts:
            with contextlib.suppress(ValueError):
                missing = missing or find_left_out(row, place, tokenizer, number)
    if missing:
        raise ValueError(
            f"task.chat_template: {place}: the template leaves out {missing}; give one that shows "
            "it with --task.chat_template FILE, or take it out of the data"
        )


def find_left_out(row: dict, place: str, tokenizer: Any, only: str = "") -> str:
    """The first part that the template leaves out, or `only` that with this number; else empty.

    An answer is looked for in the text that ends with it: its reasoning may be gone later.
    """
    messages, tools, parts = number_parts(row, only)
    whole = apply_template(messages, tools, place, tokenizer)
    until = {
        i: apply_template(messages[: i + 1], tools, place, tokenizer)
        for i, message in enumerate(messages)
        if message["role"] == "assistant"
    }
    for number, (i, what, _) in parts.items():
        if number not in until.get(i, whole) and number in (only or number):
            return what
    return ""


def number_parts(row: dict, only: str = "") -> tuple[list[dict], list[dict], dict[str, tuple]]:
    """The messages and tools of a chat with a number at the end of each part that a template has to
    show, or of one; and for each number the message (-1: the tools), a name, and words.

    Parts of a text are what stands between TAG, and their first words.
    """
    parts: dict[str, tuple[int, str, str]] = {}

    def number(i: int, what: str, value: Any) -> Any:
        found = f"90{len(parts):05}09"
        text = value if isinstance(value, str) else ""
        parts[found] = i, what, text.strip()
        return text + found if only in ("", found) else value

    def number_text(i: int, what: str, text: str) -> str:
        pieces = TAG.split(text.strip())  # every second one is a tag
        if not any(map(str.strip, pieces[::2])):
            pieces = [text]
        for place in range(0, len(pieces), 2):
            if words := pieces[place].strip():
                first, rest, space = PART.findall(pieces[place])[0]
                name = f"{words!r:.60} of {what}" if len(pieces) > 1 else what
                rest = number(i, name, rest) + space
                pieces[place] = number(i, f"the beginning of {name}", first) + rest
        return "".join(pieces)

    def change(tool: dict, **values: Any) -> dict:
        if "function" in tool:
            return {**tool, "function": {**tool["function"], **values}}
        return {**tool, **values}

    tools = row.get("tools", [])
    tools = [change(each, name=number(-1, "tools", function_name(each))) for each in tools]
    messages = []
    for i, message in enumerate(row["messages"]):
        message, where = dict(message), f"of message {i + 1} ({message['role']})"
        for name in ("content", *(REASONING if message["role"] == "assistant" else ())):
            if isinstance(message.get(name), str) and message[name].strip():
                message[name] = number_text(i, f"{name} {where}", message[name])
        calls = []
        for call in message.pop("tool_calls", []):
            name = number(i, f"tool_calls {where}", call["function"]["name"])
            what, values = f"arguments of tool_calls {where}", call["function"]["arguments"]
            arguments = {key: number(i, what, value) for key, value in values.items()}
            calls.append(change(call, name=name, arguments=arguments))
        messages.append({**message, "tool_calls": calls} if calls else message)
    return messages, tools, parts


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
