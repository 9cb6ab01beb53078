"""YAMLs that hardware.py writes beside the owner's own, and never in place of one of those."""

import functools
import os
from pathlib import Path
from typing import Any

import yaml

from training import config
from training.console import one_line
from training.ranks import UserError
from training.run_folder import replace_text

HEADING = "# Written by hardware.py"  # the first line of each file that this program may replace


def refuse_foreign(path: Path, heading_prefix: str = HEADING) -> None:
    """Raises UserError unless `path` can be written, and is free or begins with this heading.

    Call it before measuring: the answer should not come after an hour.
    """
    if path.exists() or path.is_symlink():
        with open(path, encoding="utf-8", errors="replace") as file:
            first = file.readline()
        if not first.startswith(heading_prefix):
            raise UserError(
                f"{one_line(path, 100)} is not a file that hardware.py wrote, and stays as it is; "
                "rename it, and start again"
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"{one_line(path.parent, 100)} is read-only for you; make it writable")


def write_headed(path: Path, heading: str, text: str) -> None:
    """Writes `heading`, whose lines begin with #, and the text of a YAML; never over a foreign one.

    The first line must begin with HEADING. Readers see the old file or the new one.
    """
    assert heading.startswith(HEADING), heading
    refuse_foreign(path)
    replace_text(path, f"{heading.rstrip()}\n\n{text}")


def recipe_with(cfg: Any, recipe: Path, flags: list[str], **settings: Any) -> str:
    """A recipe's YAML with the values of flags, and with `settings`; other fields stay unset.

    `cfg` is the config that recipe and flags gave. Comments of the recipe are lost. Fields for one
    command, such as check, are left out, since recipes cannot have them.
    """
    content = config.plain_value(config.compose_yaml(config.read_small_file(recipe))) or {}
    given = [word[2:].partition("=")[0] for word in flags if word.startswith("--")]
    given += field_names(content)
    entries: dict[str, Any] = {}
    for name, (_, about) in config.fields_of(type(cfg)).items():
        known = any(name == each or each.startswith(f"{name}.") for each in given)
        if name in settings:
            value = settings[name]
        elif known and not about.get("one_command"):
            value = functools.reduce(getattr, name.split("."), cfg)
        else:
            continue
        if name in ("max_steps", "num_epochs") and not value:
            continue  # the other one decides, and 0 beside it says nothing
        switch, reads = config.READERS.get(name, ("", None))
        if switch and not reads(getattr(cfg, switch)):
            continue  # a flag has switched it off, and a recipe may not have it then
        section, _, last = name.rpartition(".")
        place = entries.setdefault(section, {}) if section else entries
        place[last] = value
    return yaml.safe_dump(entries, sort_keys=False, allow_unicode=True)


def field_names(content: dict, prefix: str = "") -> list[str]:
    """The dotted names of all entries of a recipe."""
    names = []
    for name, value in content.items():
        inner = isinstance(value, dict) and value
        names += field_names(value, f"{prefix}{name}.") if inner else [f"{prefix}{name}"]
    return names


def accelerate_with(path: Path, **settings: str | int) -> str:
    """The text of an accelerate YAML with other values of these keys at its top level.

    It keeps comments, but for the first paragraph, which describes the original.
    """
    lines = config.read_small_file(path).splitlines()
    blank = next((i for i, line in enumerate(lines) if not line.strip()), 0)
    if all(line.startswith("#") for line in lines[:blank]):
        lines = lines[blank + 1 :] if blank else lines
    for name, value in settings.items():
        new = f"{name}: {yaml.safe_dump(value).splitlines()[0]}"
        places = [i for i, line in enumerate(lines) if line.startswith(f"{name}:")]
        if places:
            lines[places[0]] = new
        else:
            lines.append(new)
    return "\n".join(lines) + "\n"
