"""The YAMLs that samestep hardware writes. Its own files it replaces; the owner's stay."""

import os
from pathlib import Path
from typing import Any

import yaml

from samestep.base.console import one_line, without_credentials
from samestep.base.files import replace_text
from samestep.processes.ranks import UserError
from samestep.settings import config
from samestep.start.startup import resolved_config

HEADING = "# Written by samestep hardware"  # the first line of what this program may replace


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


def write_headed(path: Path, heading: str, values: dict[str, Any]) -> None:
    """Writes `heading`, a line behind HEADING, and a YAML with these values.

    Never over a foreign file. Readers see the old file or the new one.
    """
    refuse_foreign(path)
    partial = path.with_name(f".{path.name}.partial")
    try:
        replace_text(path, f"{HEADING} {heading}\n\n{as_yaml(values)}", partial)
    except OSError as error:  # such as a full disk
        partial.unlink(missing_ok=True)
        raise UserError(f"{one_line(path, 100)}: {error.strerror}") from error


def as_yaml(values: dict[str, Any]) -> str:
    """The text of a YAML, in the order of its keys, without credentials of URLs."""
    return without_credentials(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


def recipe_of(config_class: type, flags: list[str]) -> dict[str, Any]:
    """All fields of the recipe that `flags` name, with their values.

    A config that is in use may differ: tasks write into it what they found.
    """
    cfg, _, _ = config.parse_config(config_class, flags, "")
    return resolved_config(cfg)
