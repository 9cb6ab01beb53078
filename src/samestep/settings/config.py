"""Builds the config dataclass from a recipe and flags. Each mistake is a ValueError of one line.

Only fields can be set, and the type of a field decides how its text is read: 007 and yes are text
in a field of text. jsonargparse has the types of numbers, but it does not parse values: it would
import classes that a value names, and expand YAML aliases, which multiply.
"""

import argparse
import dataclasses
import difflib
import functools
import inspect
import json
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
import yaml
from jsonargparse.typing import NonNegativeInt

from samestep.base.console import one_line
from samestep.base.fields import EXPORT, NOTHING, ROUNDING, number_type  # noqa: F401  for train.py
from samestep.settings.other_names import hint_of

RECIPE = "configs/train/default.yaml"  # the default of --config
MAX_FILE_SIZE = 100_000  # bytes; PyYAML takes a second for these
HELP = {"-h", "--help"}

# ---- YAML ----------------------------------------------------------------------------------------


class Text(str):
    """A scalar as it is written in a YAML file or on the command line."""

    tag = "tag:yaml.org,2002:str"  # what YAML takes it for


def read_yaml(text: str) -> Any:
    """The dicts, lists and `Text`s of a YAML text; None for a null. Raises ValueError.

    Refuses duplicate keys, of which the last would win silently, and what can grow beyond its text
    or is meant for programs: anchors and aliases, tags, merge keys.
    """
    try:
        for event in yaml.parse(text, yaml.SafeLoader):
            if getattr(event, "anchor", None) or getattr(event, "tag", None):
                raise ValueError(
                    f"line {event.start_mark.line + 1}: & and * (anchors, aliases) and ! (tags) "
                    "are not supported; quote the text, or write the value itself"
                )
        return as_written(yaml.compose(text, yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ValueError(f"{line}{error.problem.removeprefix('but ')}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from None


def as_written(node: yaml.Node | None) -> Any:
    """A node of PyYAML as dicts, lists, `Text`s and None."""
    if node is None or node.tag.endswith(":null"):
        return None
    if isinstance(node, yaml.SequenceNode):
        return [as_written(each) for each in node.value]
    if isinstance(node, yaml.ScalarNode):
        text = Text(node.value)
        text.tag = node.tag
        return text
    values: dict[Text, Any] = {}
    for key, value in node.value:
        name, line = as_written(key), f"line {key.start_mark.line + 1}"
        if not isinstance(name, Text) or name == "<<":
            raise ValueError(f"{line}: a key must be a name, not <<, a list or a mapping")
        if name in values:
            raise ValueError(f"{line}: {name} is given twice")
        values[name] = as_written(value)
    return values


def plain_value(value: Any) -> Any:
    """What YAML's own rules make of it; raises ValueError, for example for a month 13."""
    if isinstance(value, list):
        return [plain_value(each) for each in value]
    if isinstance(value, dict):
        return {plain_value(name): plain_value(each) for name, each in value.items()}
    if value is None:
        return None
    return yaml.SafeLoader("").construct_object(yaml.ScalarNode(value.tag, str(value)))


def read_small_yaml(path: Path) -> Any:
    """What `read_yaml` gives for a file; raises OSError, or ValueError if it is large."""
    if path.stat().st_size > MAX_FILE_SIZE:
        raise ValueError(f"it has more than {MAX_FILE_SIZE:,} bytes; give a YAML file")
    return read_yaml(path.read_text(encoding="utf-8"))


# ---- Values --------------------------------------------------------------------------------------

# Tensors hold integers below 2**63, and optimizers compute with float32.
LARGEST = {int: 2**63 - 1, float: torch.finfo(torch.float32).max}

BatchSize = number_type("BatchSize", int, 1, 10_000_000)
Megabytes = number_type("Megabytes", int, 1, 100_000)
Workers = number_type("Workers", int, 0, 256)
Seconds = number_type("Seconds", int, 1, 31_536_000)  # a year
Interval = NonNegativeInt | Literal["epoch"]  # steps, or each pass over the training data
DecayRate = number_type("DecayRate", float, 0, 0.9999999)  # above, float32 rounds to 1
# Replacements in the descriptions of jsonargparse's own number types, for error messages.
WORDS = {"int restricted to be ": "a whole number, ", "float restricted to be ": "a number, "}
WORDS |= {"≥": "at least ", "≤": "at most ", ">": "above ", "<": "below "}


def convert(kind: Any, value: Any) -> Any:
    """The value of a field with this type. Raises ValueError, which names the expected values."""
    origin, inner, members = get_origin(kind) or kind, get_args(kind), union_members(kind)
    if len(members) > 1:
        lists = [each for each in members if get_origin(each) is list]
        if lists and isinstance(value, list):
            return convert(lists[0], value)  # its error names the wrong element
        for each in members:
            with suppress(ValueError):  # try the next type
                return convert(each, value)
    elif kind is Any or (kind in (list, dict) and isinstance(value, kind)):
        return plain_value(value)
    elif kind is NoneType and value is None:
        return None
    elif origin in (list, tuple) and isinstance(value, list):
        repeated = origin is list or inner[1:] == (...,)
        kinds = inner[:1] * len(value) if repeated else inner
        if len(kinds) == len(value):
            return origin(map(convert, kinds, value))
    elif origin is dict and isinstance(value, dict):
        return {convert(inner[0], key): convert(inner[1], each) for key, each in value.items()}
    elif isinstance(value, Text):
        with suppress(ValueError, KeyError):
            return convert_text(kind, value)
    others = {dict: "a mapping", list: "a list", NoneType: "nothing"}
    got = others.get(type(value)) or one_line(repr(str(value)), 60)
    hint = f"; write [{one_line(value, 60)}]" if origin in (list, tuple) and value else ""
    raise ValueError(f"expected {describe_type(kind)}; got {got}{hint}")


def convert_text(kind: Any, text: Text) -> Any:
    """The value of a scalar; raises ValueError or KeyError without a text for people."""
    if get_origin(kind) is Literal:
        return {str(option): option for option in get_args(kind)}[text]
    if kind is bool:
        return yaml.SafeLoader.bool_values[text.lower()]
    if kind is str and not re.search("[\0\ud800-\udfff]", text):
        return str(text)
    if isinstance(kind, type) and issubclass(kind, (int, float)):
        base = float if issubclass(kind, float) else int
        value = base(text)
        if kind(value) == value and abs(value) <= LARGEST[base]:
            return value  # not of `kind`: checkpoints store no other types
    raise ValueError


def union_members(kind: Any) -> tuple:
    """The types in a union; any other type alone."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def describe_type(kind: Any) -> str:
    """The values of a type, in words."""
    origin, inner = get_origin(kind) or kind, get_args(kind)
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    words |= {NoneType: "null", list: "a list", tuple: "a list", dict: "a mapping"}
    if origin is Literal:
        return "one of " + ", ".join(map(repr, inner))
    if len(union_members(kind)) > 1:
        return " or ".join(map(describe_type, union_members(kind)))
    if origin is tuple and inner[1:] != (...,):
        return f"a list of {len(inner)}"
    if isinstance(kind, type) and issubclass(kind, (int, float)) and kind not in words:
        text = kind.__doc__ or kind.__name__
        return functools.reduce(lambda text, pair: text.replace(*pair), WORDS.items(), text)
    return words.get(origin) or "no value, because a field of this type can only be set in the code"


# ---- Fields --------------------------------------------------------------------------------------

UNSAVED = {**NOTHING, "saved": False}  # for one start: not in config.yaml
ONE_COMMAND = {**UNSAVED, "one_command": True}  # a flag, not in recipes either
CONFIG = dataclasses.field(metadata=ONE_COMMAND)  # --config, the path of the recipe


def fields_of(config_class: Any, prefix: str = "") -> dict[str, tuple[Any, dataclasses.Field]]:
    """Type and field of each name that can be set; those of nested dataclasses have a prefix."""
    kinds, found = get_type_hints(config_class), {}
    for field in dataclasses.fields(config_class):
        name, kind = prefix + field.name, kinds[field.name]
        if dataclasses.is_dataclass(kind):
            found |= fields_of(kind, f"{name}.")
        elif field.init:
            found[name] = (kind, field)
    return found


def read_flags(arguments: list[str], fields: dict) -> dict[str, Any]:
    """The flags as they are written; raises ValueError for unknown and duplicate ones."""
    words, given = list(arguments), {}
    while words:
        word = words.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in fields:
            raise ValueError(unknown_field(name if word.startswith("--") else word, fields))
        if name in given:
            raise ValueError(f"--{name} is given twice")
        members = union_members(fields[name][0])
        if not equals:
            if words and not words[0].startswith("--"):
                text = words.pop(0)
            elif bool in members:  # --check is short for --check true
                text = "true"
            else:
                raise ValueError(f"--{name}: expected one argument")
        if {get_origin(each) or each for each in members} & {list, tuple, dict, Any}:
            given[name] = read_yaml(text)
        else:
            given[name] = None if NoneType in members and text == "null" else Text(text)
    return given


def read_recipe(section: Any, fields: dict, prefix: str = "") -> dict[str, Any]:
    """The fields in a recipe as they are written; raises ValueError for unknown ones and others."""
    given: dict[str, Any] = {}
    if not isinstance(section, dict | None):
        place = f"{prefix[:-1]}: " if prefix else ""
        raise ValueError(f"{place}expected lines of the form 'field: value'")
    for key, value in (section or {}).items():
        name, found = prefix + key, {prefix + key: value}
        if any(field.startswith(f"{name}.") for field in fields):
            found = read_recipe(value, fields, f"{name}.")
        elif name not in fields:
            raise ValueError(unknown_field(name, fields))
        elif "one_command" in fields[name][1].metadata:
            raise ValueError(f"{name} cannot be in a recipe; give it as a flag, --{name}")
        for twice in given.keys() & found.keys():
            raise ValueError(f"{twice} is given twice")
        given |= found
    return given


def unknown_field(wrong: str, fields: dict) -> str:
    """The error for an unknown field, with the nearest existing name."""
    hint = hint_of(wrong, fields)
    hint = hint or suggestion(wrong, fields, "python train.py --help lists them")
    return f"there is no field {one_line(wrong, 60) or 'without a name'}; {hint}"


def suggestion(wrong: str, names: Iterable[str], otherwise: str) -> str:
    """The nearest of these names as a question, or else the other text."""
    near = [name for end in "._" for name in names if name.endswith(end + wrong)]
    near = near or difflib.get_close_matches(wrong[:100], names, n=1, cutoff=0.65)
    return f"did you mean {near[0]}?" if near else otherwise


def convert_all(given: dict[str, Any], fields: dict) -> dict[str, Any]:
    """Converts the given fields to their types; raises ValueError with the name of a wrong one."""
    values = {}
    for name, value in given.items():
        try:
            values[name] = convert(fields[name][0], value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return values


def replace_fields(config: Any, values: dict[str, Any], prefix: str = "") -> Any:
    """A copy of the config with these values, by dotted name."""
    changes = {}
    for field in dataclasses.fields(config):
        name, value = prefix + field.name, getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            changes[field.name] = replace_fields(value, values, f"{name}.")
        elif name in values:
            changes[field.name] = values[name]
    return dataclasses.replace(config, **changes)


def given_flags(config_class: type, arguments: list[str]) -> list[str]:
    """The fields that are given as flags; raises ValueError for unknown ones."""
    return [*read_flags(arguments, {"config": (str, CONFIG), **fields_of(config_class)})]


def parse_config(
    config_class: type, arguments: list[str], usage: str
) -> tuple[Any, Path, list[str]]:
    """The config from defaults, recipe and flags, the later first; the recipe's path; remarks.

    Raises ValueError with one line that names the place of the mistake. --help ends the program.
    """
    fields = {"config": (str, CONFIG), **fields_of(config_class)}
    place = "command line"
    try:
        words = [word for word in arguments if word not in HELP]
        flags = convert_all(read_flags(words, fields), fields)
        path = Path(os.path.expanduser(flags.pop("config", RECIPE)))
        place = str(path)
        recipe = convert_all(read_recipe(read_small_yaml(path), fields), fields)
    except OSError as error:
        line = f"{error.strerror}; --config takes the path of a recipe"
        raise ValueError(f"{one_line(place, 100)}: {line}") from None
    except ValueError as error:
        raise ValueError(f"{one_line(place, 100)}: {one_line(error)}") from None
    cfg = replace_fields(config_class(), recipe | flags)
    if HELP & {*arguments}:
        show_help(cfg, path, usage)
        raise SystemExit(0)
    remarks = choose_length(cfg, flags, recipe) if hasattr(cfg, "num_epochs") else []
    check_unread_fields(cfg, flags, fields)
    return cfg, path, remarks


# Fields that are read only with some values of another field.
READERS = {
    "decay_fraction": ("lr_schedule", "wsd"),
    "reference_batch_size": ("lr_scaling", "linear sqrt"),
    "upload_code": ("tracker", "wandb"),
}


def check_unread_fields(cfg: Any, flags: dict, fields: dict) -> None:
    """Raises ValueError for a field that is set although the other settings ignore it.

    A flag that switches off the reader of a recipe's field leaves the recipe as it is.
    """
    if flags.get("config_file") and not cfg.check:
        raise ValueError(
            "only --check reads config_file; to train, give it to the launcher: "
            "accelerate launch --config_file FILE train.py"
        )
    for name in READERS.keys() & fields.keys():
        switch, readers = READERS[name]
        value, default = getattr(cfg, switch), fields[name][1].default
        by_recipe = name not in flags and switch in flags
        if getattr(cfg, name) != default and value not in readers.split() and not by_recipe:
            raise ValueError(
                f"{name} is set, but with {switch} {value} nothing reads it; leave it out, or give "
                f"its default, {default}"
            )


def choose_length(cfg: Any, flags: dict, recipe: dict) -> list[str]:
    """Keeps max_steps or num_epochs: a flag wins over the recipe, the recipe over a default.

    Returns a remark if one of them was replaced. Raises ValueError if none or both are given.
    """
    kept = {name: value for name, value in recipe.items() if name not in flags}
    for given, place in ((flags, "the command line"), (kept, "the recipe")):
        asked = [name for name in ("max_steps", "num_epochs") if given.get(name)]
        if len(asked) == 2:
            raise ValueError(f"{place} gives both max_steps and num_epochs; give one of them")
        if asked:
            wins = asked[0]
            other = "num_epochs" if wins == "max_steps" else "max_steps"
            setattr(cfg, other, 0 if other == "max_steps" else 0.0)
            line = f"--{wins} {given[wins]} replaces {other} {kept.get(other)} of the recipe"
            return [line] if kept.get(other) else []
    if not (cfg.max_steps or cfg.num_epochs):
        raise ValueError("max_steps and num_epochs are both 0; one must be above 0")
    return []


# ---- Help ----------------------------------------------------------------------------------------

# In the source of a dataclass: a comment that opens a group, a field, a docstring.
PARTS = re.compile(r'\n\n    # ([^\n]+)|^    (\w+):|^    """(.+?)"""', re.M | re.S)


def field_notes(config_class: Any, prefix: str = "", title: str = "") -> dict[str, list[str]]:
    """The heading and the docstring of each field; those of a class come before its bases'."""
    notes: dict[str, list[str]] = {}
    for base in config_class.__mro__[:-1]:
        heading, new = title or "Fields", [""]
        for comment, field, text in PARTS.findall(inspect.getsource(base)):
            if comment:
                heading = f"{title}: {comment}" if title else comment
            elif field:
                new = notes.setdefault(prefix + field, [heading])
            elif len(new) == 1:
                new.append(" ".join(text.split()))
    for name, kind in get_type_hints(config_class).items():
        if dataclasses.is_dataclass(kind):
            notes |= field_notes(kind, f"{prefix}{name}.", name.capitalize())
    return notes


def show_help(cfg: Any, recipe: Path, usage: str) -> None:
    """Prints all flags under headings: description, values, and the one that would be used."""
    parser = argparse.ArgumentParser("train.py", usage=usage)
    about = "The recipe; the defaults below are its values."
    parser.add_argument("--config", help=f"{about} (default: {recipe})".replace("%", "%%"))
    notes, groups = field_notes(type(cfg)), {}
    kinds = fields_of(type(cfg))
    for name in sorted(kinds, key=[*notes, *kinds].index):
        heading, about = (*notes.get(name, ["Fields"]), "")[:2]
        if heading not in groups:
            groups[heading] = parser.add_argument_group(heading)
        value = functools.reduce(getattr, name.split("."), cfg)
        shown = value if value and isinstance(value, str) else json.dumps(value, default=str)
        about = f"{about} ({describe_type(kinds[name][0])}; default: {shown})".replace("%", "%%")
        metavar = name.rpartition(".")[2].upper()
        groups[heading].add_argument(f"--{name}", metavar=metavar, help=about)
    parser.print_help()
