"""Chats: how rows are known to be some, what they must hold, and what templates make of them.

A chat is {"messages": [...], "tools": [...]}, in the form of OpenAI and of transformers' templates:
arguments of tool calls are objects, and `tools` is only there if there are some.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasklib import child, sources
from tasklib.fields import local_path
from tasklib.messages import one_line
from tasklib.sources import IncompleteRow
from tasklib.tables import replace_surrogates

MOST_CHAT = 50_000_000  # bytes of a chat: a template that gives more does not do what it should
# Columns that rows are known by, of the more structured first; each by its role.
LAYOUTS: list[tuple[str, dict[str, str]]] = [
    ("chat", {"messages": "messages"}),
    ("chat", {"messages": "conversations"}),  # ShareGPT
    ("chat", {"instruction": "instruction", "output": "output"}),  # Alpaca
    ("prompt", {"prompt": "prompt", "completion": "completion"}),
    ("text", {"text": "text"}),
]
# Roles whose column need not be there: of Alpaca, no field could name another.
OPTIONAL = ("tools", "instruction", "input", "output")
# Who speaks in ShareGPT, as the other forms call them.
SPEAKERS = {name: name for name in ("user", "assistant", "system", "tool")}
SPEAKERS |= {"human": "user", "gpt": "assistant"}
REASONING = ("reasoning_content", "reasoning", "thinking")  # names of one field, in transformers
# For tokenizers without a template of their own: it needs no tokens that they do not have.
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


def recognise(cfg: Any, endings: tuple[str, ...]) -> tuple[str, dict[str, str], list[str]]:
    """What the rows of the data are, and their columns by role.

    Fields decide; where they do not, the names of the columns, which are given then too.
    """
    kinds = {"messages": "chat", "prompt": "prompt", "completion": "prompt", "text": "text"}
    fields, names = {role: getattr(cfg, f"{role}_column") for role in kinds}, []
    named = [kind for role, kind in kinds.items() if fields[role] != role]
    rows = named[0] if named and cfg.rows == "auto" else cfg.rows
    if rows in ("text", "prompt", *named):
        columns = {role: fields[role] for role in kinds if kinds[role] == rows}
    else:
        names = sources.read_column_names(cfg, endings)
        known = [(kind, columns) for kind, columns in LAYOUTS if rows in ("auto", kind)]
        fits = [each for each in known if {*each[1].values()} <= {*names}]
        if not fits:
            raise ValueError(unknown(cfg, names, [columns for _, columns in known]))
        rows, columns = fits[0]
    if rows == "chat":
        more = {"tools": cfg.tools_column} if "messages" in columns else {"input": "input"}
        columns = {**columns, **{role: name for role, name in more.items() if name}}
    return rows, columns, names


def unknown(cfg: Any, names: list[str], known: list[dict[str, str]]) -> str:
    """What to write instead of data whose columns are not known."""
    if not names:
        return f"task.data: there is no text in {one_line(cfg.data, 100)}"
    forms = ", ".join(" + ".join(columns.values()) for columns in known)
    fields = "--task.messages_column"
    if cfg.rows == "auto":
        fields = (
            f"--task.text_column, {fields}, or --task.prompt_column and --task.completion_column"
        )
    there = one_line(", ".join(names[:20]), 100)
    return (
        f"task.data: {one_line(cfg.data, 100)} has the columns {there}, but task.rows {cfg.rows} "
        f"looks for {forms}; name yours with {fields}"
    )


def taken(columns: dict[str, str], names: list[str]) -> str:
    """Which columns are read, and which of these names are not, as the end of a sentence."""
    read = [n for role, n in columns.items() if role != "tools" and (n in names or not names)]
    unread = [name for name in names if name not in columns.values()]
    if not read or names == ["text", "label"]:  # of a .txt file: its text, its folder
        return ""
    others = f" (not read: {one_line(', '.join(unread), 200)})" * bool(unread)
    return f", from {one_line(', '.join(read), 200)}{others}"


def check_chat(row: dict) -> None:
    """Makes a row of any layout a chat; raises ValueError for one that is none, or unanswered."""
    if "instruction" in row:
        row["messages"] = turns(row)
    messages, tools = parsed(row.pop("messages"), "messages"), row.pop("tools", None)
    tools = parsed(tools, "tools") if isinstance(tools, str) else filled(tools)
    tools = [parsed(tool, "tools") for tool in tools] if isinstance(tools, list) else tools
    if not messages:
        raise IncompleteRow("there are no messages")
    if not isinstance(messages, list):
        raise ValueError(
            f"messages is {short(messages)} but must be a list of objects with role and content"
        )
    row["messages"] = [message_of(m, f"message {n}") for n, m in enumerate(messages, 1)]
    answers = [(n, m) for n, m in enumerate(row["messages"], 1) if m["role"] == "assistant"]
    for number, message in answers:
        if message.get("weight", 1) not in (0, 1):
            raise ValueError(
                f"weight of message {number} is {message['weight']!r:.60}; give 0 or 1"
            )
    if any(n > 1 for n, _ in answers) and not any(map(is_learnt, row["messages"][1:])):
        raise IncompleteRow("no message of the assistant is to be learnt: all have the weight 0")
    if not any(number > 1 for number, _ in answers):
        roles = one_line(", ".join(dict.fromkeys(m["role"] for m in row["messages"])), 60)
        raise IncompleteRow(f"no message after the first has the role assistant (roles: {roles})")
    for number, message in answers:
        if number > 1 and not message["content"].strip() and not message.get("tool_calls"):
            raise IncompleteRow(f"message {number}, of the assistant, is empty")
    if tools:
        if not isinstance(tools, list) or not all(map(name_of, tools)):
            raise ValueError(
                f"tools is {short(tools)} but must be a list of objects, each with a name"
            )
        row["tools"] = tools


def is_learnt(message: dict) -> bool:
    """Whether it is an answer, but for one with the weight 0, as OpenAI's form has it."""
    return message["role"] == "assistant" and message.get("weight", 1) == 1


def turns(row: dict) -> list[dict[str, str]]:
    """The messages of a row of Alpaca."""
    texts = {role: row.pop(role, None) or "" for role in ("instruction", "input", "output")}
    for role, text in texts.items():
        if not isinstance(text, str):
            raise ValueError(f"the {role} is {short(text)} but must be text")
        if role != "input" and not text.strip():
            raise IncompleteRow(f"there is no {role}")
    asked = "\n\n".join(texts[role] for role in ("instruction", "input") if texts[role].strip())
    return [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": texts["output"]},
    ]


def message_of(message: Any, where: str) -> dict:
    """A message with role, content and perhaps tool_calls, whatever form it had."""
    if not isinstance(message, dict):
        raise ValueError(f"{where} is {short(message)} but must be an object with role and content")
    found = filled(message)
    if "from" in found and "role" not in found:
        speaker = found.pop("from")
        if speaker not in [*SPEAKERS]:
            known = ", ".join(SPEAKERS)
            raise ValueError(f"{where} is from {short(speaker)} but must be from {known}")
        content = {"content": message["value"]} if "value" in message else {}
        found.pop("value", None)
        return message_of({**found, **content, "role": SPEAKERS[speaker]}, where)
    calls = parsed(found.pop("tool_calls", None), f"tool_calls of {where}")
    has = {"role": "role" in found, "content": "content" in message or calls}
    for name in has:
        if not has[name]:
            there = one_line(", ".join(map(str, found)) or "nothing", 60)
            raise ValueError(f"{where} has no {name}, only {there}")
        if not isinstance(found.get(name, ""), str):
            raise ValueError(f"the {name} of {where} is {short(found[name])} but must be text")
    if found.get("function_call"):
        raise ValueError(f"{where} has function_call, an old form of tool_calls; write these")
    if calls:
        if not isinstance(calls, list):
            raise ValueError(f"tool_calls of {where} is {short(calls)} but must be a list")
        found["tool_calls"] = [call_of(call, where) for call in calls]
    elif "content" not in found:
        raise IncompleteRow(f"{where} has no content")
    return {"content": "", **found}


def call_of(call: Any, where: str) -> dict:
    """A tool call in OpenAI's form, the arguments as an object: templates write it as JSON."""
    if not name_of(call):
        form = '{"type": "function", "function": {"name": ..., "arguments": {...}}}'
        raise ValueError(f"{where} has the tool call {short(call)}; write {form}")
    function = call.get("function", call)
    arguments = parsed(function.get("arguments"), f"arguments in {where}") or {}
    if not isinstance(arguments, dict):
        raise ValueError(f"arguments in {where} is {short(arguments)} but must be an object")
    call = call if "function" in call else {}
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def name_of(value: Any) -> str:
    """The name of a tool or a tool call; empty: it has none."""
    function = value.get("function", value) if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def parsed(value: Any, what: str) -> Any:
    """What JSON text stands for, as a cell of a table may hold it; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return replace_surrogates(json.loads(value)) if value.strip() else None
    except (ValueError, RecursionError) as error:
        problem = one_line(getattr(error, "msg", error), 100)
        raise ValueError(f"{what} is {short(value)}, which is no JSON ({problem})") from None


def filled(value: Any) -> Any:
    """Without keys that have no value: objects in a table have those of all rows."""
    if isinstance(value, dict):
        return {key: filled(each) for key, each in value.items() if each is not None}
    return [filled(each) for each in value] if isinstance(value, list) else value


def texts(row: dict) -> Iterator[str]:
    """All text of a chat, for a vocabulary to be learnt from."""
    for message in row["messages"]:
        yield message["content"]
        yield from (
            json.dumps(call["function"], ensure_ascii=False)
            for call in message.get("tool_calls", [])
        )
    yield from (json.dumps(tool, ensure_ascii=False) for tool in row.get("tools", []))


def short(value: Any) -> str:
    return one_line(repr(value), 60)


# ---- Templates -----------------------------------------------------------------------------------


def template_file(cfg: Any) -> Path | None:
    """The file that the field names."""
    path = local_path(cfg.chat_template, "chat_template")
    if cfg.chat_template and not path.is_file():
        raise ValueError(f"task.chat_template: there is no file {one_line(path, 100)}")
    if cfg.chat_template and path.stat().st_size > 1_000_000:
        raise ValueError(f"task.chat_template: {one_line(path, 100)} has more than 1 MB")
    return path if cfg.chat_template else None


def read_template(cfg: Any) -> str:
    """What the file holds."""
    try:
        return template_file(cfg).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = f"cannot read {one_line(cfg.chat_template, 100)}: {one_line(error)}"
        raise ValueError(f"task.chat_template: {what}") from None


def render(row: dict, place: str, tokenizer: Any, seen: set) -> list[tuple[str, list[tuple]]]:
    """A chat as the model sees it, and where in the text the assistant's answers stand.

    Some templates change a turn when others follow, as they leave its reasoning out: then each
    answer is learnt from a text of its own, which ends with it. For `seen` see `check_kept`.
    """
    messages, tools = row["messages"], row.get("tools", [])
    whole, before, until = chat_text(messages, tools, place, tokenizer), {}, {}
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            until[i] = chat_text(messages[: i + 1], tools, place, tokenizer)
        if i and is_learnt(message):
            before[i] = chat_text(messages[:i], tools, place, tokenizer, add_generation_prompt=True)
    check_kept(row, whole, until, place, tokenizer, seen)
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


def check_kept(
    row: dict, whole: str, until: dict[int, str], place: str, tokenizer: Any, seen: set
) -> None:
    """Raises ValueError for what a template leaves out of a chat without a word.

    An answer must show in the text that ends with it: later the template may leave its reasoning
    out. A part shows where the text contains it. What is not found there may be written otherwise,
    and a word may stand there by chance: then, and for the first part of each kind, which `seen`
    has, the text must change with the part.
    """
    messages, tools = row["messages"], row.get("tools", [])

    def shows(kind: tuple, words: list[str], text: str, *changed: list[dict]) -> bool:
        if kind in seen and all(word in text for word in words):
            return True
        seen.add(kind)
        try:
            return chat_text(*changed, place, tokenizer) != text
        except ValueError:  # it looks at this part, and takes no other
            return True

    for i, tool in enumerate(tools):
        function = tool.get("function", tool)
        words = [text for text in function.values() if isinstance(text, str)]
        other = {**function, "name": f"{function['name']}x"}
        others = [*tools[:i], {**tool, **({"function": other} if "function" in tool else other)}]
        kind = ("tools", i > 0, messages[0]["role"])
        if not shows(kind, words, whole, messages, others + tools[i + 1 :]):
            raise left_out("tools", place)
    for i, message in enumerate(messages):
        here, text = messages[: i + 1] if i in until else messages, until.get(i, whole)
        around = (messages[i - 1]["role"] if i else "", i + 1 == len(here), bool(tools))
        form = (message["role"], bool(message["content"].strip()), "tool_calls" in message)
        for what, number, words, other in parts_of(message):
            kind = (what, number > 0, *form, *around)
            if not shows(kind, words, text, [*here[:i], other, *here[i + 1 :]], tools):
                raise left_out(f"{what} of message {i + 1} ({message['role']})", place)


def left_out(what: str, place: str) -> ValueError:
    return ValueError(
        f"task.chat_template: {place}: the template leaves out {what}; give one that shows "
        "it with --task.chat_template FILE, or take it out of the data"
    )


def parts_of(message: dict) -> Iterator[tuple[str, int, list[str], dict]]:
    """What a template has to show of a message: name, number, words in it, the message changed."""
    reasoning = REASONING if message["role"] == "assistant" else ()
    for name in ("content", *reasoning):
        text = message.get(name)
        if isinstance(text, str) and text.strip():
            yield name, 0, [text.strip()], {**message, name: f"{text.rstrip()}x"}
    calls = message.get("tool_calls", [])
    for i, call in enumerate(calls):
        function, arguments = call["function"], call["function"]["arguments"]
        words = [text for text in arguments.values() if isinstance(text, str)]
        for what, found, other in (
            ("tool_calls", [function["name"]], {"name": f"{function['name']}x"}),
            ("arguments of tool_calls", words, {"arguments": {**arguments, "x": "x"}}),
        ):
            changed = {**call, "function": {**function, **other}}
            yield what, i, found, {**message, "tool_calls": [*calls[:i], changed, *calls[i + 1 :]]}


def chat_text(
    messages: list[dict], tools: list[dict], place: str, tokenizer: Any, **options
) -> str:
    """What the chat template makes of messages: a program, which may fail, or not end."""
    try:
        with child.time_limit(10):
            text = tokenizer.apply_chat_template(
                messages, tools=tools or None, tokenize=False, **options
            )
        if not isinstance(text, str):
            raise TypeError(f"it gives no text, but {type(text).__name__}")
        if len(text.encode()) > MOST_CHAT:
            raise ValueError(f"it gives {len(text):,} characters")
    except Exception as error:
        raise ValueError(f"task.chat_template: {place}: {one_line(error)}") from None
    return text
