"""The YAMLs that samestep hardware writes: those of the project with other values.

Its own files it replaces; those of the owner stay as they are.
"""

import contextlib
import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

import yaml

from samestep.base.console import one_line, without_credentials
from samestep.base.files import replace_text
from samestep.processes.ranks import UserError
from samestep.settings import config
from samestep.start.startup import resolved_config

HEADING = (
    "# Written by samestep hardware"  # the first line of each file that this program may replace
)
LENGTH = ("max_steps", "num_epochs")  # a flag for one of them sets the other to 0


# ---- Files ---------------------------------------------------------------------------------------


def refuse_foreign(path: Path) -> None:
    """Raises UserError unless `path` can be written, and is free or begins with HEADING.

    Call it before measuring: the answer should not come after an hour.
    """
    if path.exists() or path.is_symlink():
        with open(path, encoding="utf-8", errors="replace") as file:
            first = file.readline()
        if not first.startswith(HEADING):
            raise UserError(
                f"{one_line(path, 100)} is not a file that samestep hardware wrote, and stays as "
                "it is; rename it, and start again"
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"{one_line(path.parent, 100)} is read-only for you; make it writable")


def write_headed(path: Path, heading: str, text: str) -> None:
    """Writes `heading`, lines behind HEADING, and a YAML's text; never over a foreign file.

    Readers see the old file or the new one.
    """
    refuse_foreign(path)
    partial = path.with_name(f".{path.name}.partial")
    try:
        replace_text(path, f"{HEADING} {heading}\n\n{text}", partial)
    except OSError as error:  # such as a full disk
        partial.unlink(missing_ok=True)
        raise UserError(f"{one_line(path, 100)}: {error.strerror}") from error


# ---- Texts ---------------------------------------------------------------------------------------


def recipe_with(config_class: type, flags: list[str], **settings: Any) -> str:
    """The recipe that `flags` name with their values, and with `settings`.

    Its comments stay, unless such a recipe would not give the same config: for example, since with
    the flags nothing reads one of its fields. Then all fields are listed. Credentials of URLs are
    left out.
    """
    # A config that is in use may differ: tasks write into it what they found.
    cfg, path, _ = config.parse_config(config_class, flags, "")
    fields = {"config": (str, {}), **config.fields_of(config_class)}
    wanted = dataclasses.replace(cfg, **settings)
    names = {name: None for name in config.read_flags(flags, fields) if name != "config"}
    names |= dict.fromkeys(LENGTH) if names.keys() & {*LENGTH} else {}
    names |= dict.fromkeys(settings)
    text = config.read_small_file(path)
    if text.startswith(HEADING):
        text = text.partition("\n\n")[2]
    with contextlib.suppress(ValueError):
        for name in names:
            if fields[name][1].get("saved", True):
                text = set_value(text, name, functools.reduce(getattr, name.split("."), wanted))
        # Does it give this config, on its own?
        found = config.read_recipe(config.compose_yaml(text), fields)
        found = config.convert_all(found, fields, "[{}]")
        alone = config.replace_fields(config_class(), found)
        config.choose_length(alone, {}, found)
        config.check_unread_fields(alone, {}, found, fields)
        if resolved_config(alone) == resolved_config(wanted):
            return without_credentials(text)
    return without_credentials(whole_recipe(wanted))


def whole_recipe(cfg: Any) -> str:
    """A recipe with all fields."""
    return yaml.safe_dump(resolved_config(cfg), sort_keys=False, allow_unicode=True)


def accelerate_with(path: Path, **settings: Any) -> str:
    """The text of an accelerate YAML with other values of these keys.

    It keeps comments, but for the first paragraph, which describes the original.
    """
    text = config.read_small_file(path)
    first, _, rest = text.partition("\n\n")
    if all(line.startswith("#") for line in first.splitlines()):
        text = rest
    for name, value in settings.items():
        text = set_value(text, name, value)
    return text


def set_value(text: str, name: str, value: Any) -> str:
    """The text of a YAML with this value of an entry, given by its dotted name."""
    shown = yaml.safe_dump([value], default_flow_style=True, allow_unicode=True, width=10**6)
    shown = shown.strip()[1:-1]
    *groups, last = name.split(".")
    node: yaml.Node | None = config.compose_yaml(text)
    for key in groups:
        node = (find(node, key) or (None, None))[1]
    pair = find(node, last)
    if pair:
        key, old = pair
        return f"{text[: key.end_mark.index]}: {shown}{text[end_of(old) :]}"
    if isinstance(node, yaml.MappingNode) and node.value and (groups or node.flow_style):
        first = node.start_mark.index + bool(node.flow_style)
        end = ", " if node.flow_style else "\n" + " " * node.start_mark.column
        return f"{text[:first]}{last}: {shown}{end}{text[first:]}"
    text = f"{text.rstrip()}\n" if text.strip() else ""
    if groups:
        return text + f"\n{groups[0]}:\n  {last}: {shown}\n"
    return text + f"\n{last}: {shown}\n"


def find(node: yaml.Node | None, key: str) -> tuple[yaml.Node, yaml.Node] | None:
    """The key and the value of this name in a mapping; None if there are none."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return next((pair for pair in pairs if pair[0].value == key), None)


def end_of(node: yaml.Node) -> int:
    """Where the text of a value ends; PyYAML's end of a block is the next key."""
    while isinstance(node, yaml.CollectionNode) and not node.flow_style:
        node = node.value[-1][1] if isinstance(node, yaml.MappingNode) else node.value[-1]
    end = node.end_mark
    return end.index - (isinstance(node, yaml.ScalarNode) and node.style in ("|", ">"))
