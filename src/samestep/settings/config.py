"""Builds the config dataclass from a recipe and flags. Each mistake is a ValueError of one line.

Only fields can be set, and the type of a field decides how its value is read: 007 and yes are text
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
NULL, TEXT, MERGE = (f"tag:yaml.org,2002:{name}" for name in ("null", "str", "merge"))


# ---- YAML ----------------------------------------------------------------------------------------


class StrictLoader(yaml.SafeLoader):
    """PyYAML's safe loader, without surprises.

    Refuses duplicate keys, of which the last would win silently, and what can grow beyond its text
    or is meant for programs: anchors and aliases, tags, merge keys.
    """

    def compose_node(self, parent, index):
        event = self.peek_event()
        if getattr(event, "anchor", None) or getattr(event, "tag", None):
            raise ValueError(
                f"line {event.start_mark.line + 1}: & and * (anchors, aliases) and ! (tags) are "
                "not supported; quote the text, or write the value itself"
            )
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor):
        node, lines = super().compose_mapping_node(anchor), {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE:
                raise ValueError(f"line {line}: a key must be a name, not <<, a list or a mapping")
            if key.value in lines:
                first = lines[key.value]
                raise ValueError(f"{key.value} is given twice, in line {first} and line {line}")
            lines[key.value] = line
        return node


def compose_yaml(text: str) -> yaml.Node:
    """The PyYAML node of a text; nodes know their lines. Raises ValueError."""
    try:
        return yaml.compose(text, StrictLoader) or yaml.ScalarNode(NULL, "")
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ValueError(f"{line}{error.problem.removeprefix('but ')}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from None


def plain_value(node: yaml.Node) -> Any:
    """The value of a node by YAML's own rules; raises ValueError, for example for a month 13."""
    try:
        return yaml.SafeLoader("").construct_document(node)
    except (ValueError, OverflowError, yaml.YAMLError) as error:
        raise ValueError(f"invalid number or date: {error}") from None


def read_small_file(path: Path) -> str:
    """The text of a small file; raises OSError, or ValueError if it is large or no file."""
    size = path.stat().st_size
    if not path.is_file() or size > MAX_FILE_SIZE:  # reading a pipe may never end
        raise ValueError(f"this is no file of at most {MAX_FILE_SIZE:,} bytes; give a YAML file")
    return path.read_text(encoding="utf-8")


# ---- Values --------------------------------------------------------------------------------------

# Numbers without the underscores, hexadecimal digits and sexagesimals of YAML.
FORMS = {int: "[+-]?[0-9]+", float: r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"}
# Tensors hold integers below 2**63, and optimizers compute with float32.
LARGEST = {int: 2**63 - 1, float: torch.finfo(torch.float32).max}

BatchSize = number_type("BatchSize", int, 1, 10_000_000)
Workers = number_type("Workers", int, 0, 256)
Seconds = number_type("Seconds", int, 1, 31_536_000)  # a year
Interval = NonNegativeInt | Literal["epoch"]  # steps, or each pass over the training data
DecayRate = number_type("DecayRate", float, 0, 0.9999999)  # above, float32 rounds to 1
# Replacements in the descriptions of jsonargparse's own number types, for error messages.
WORDS = {"int restricted to be ": "a whole number, ", "float restricted to be ": "a number, "}
WORDS |= {"≥": "at least ", "≤": "at most ", ">": "above ", "<": "below "}


def convert(kind: Any, node: yaml.Node) -> Any:
    """The value of a field with this type. Raises ValueError, which names the expected values."""
    origin, inner, members = get_origin(kind) or kind, get_args(kind), union_members(kind)
    text = node.value if isinstance(node, yaml.ScalarNode) and node.tag != NULL else None
    problem = f"expected {describe_type(kind)}"
    if len(members) > 1:
        lists = [each for each in members if get_origin(each) is list]
        if lists and isinstance(node, yaml.SequenceNode):
            return convert(lists[0], node)  # its error names the wrong element
        for each in members:
            with suppress(ValueError):  # try the next type
                return convert(each, node)
    elif kind is NoneType and node.tag == NULL:
        return None
    elif kind in (Any, list, dict):
        value = plain_value(node)
        if kind is Any or isinstance(value, kind):
            return value
    elif origin in (list, tuple) and isinstance(node, yaml.SequenceNode):
        repeated = origin is list or inner[1:] == (...,)
        kinds = inner[:1] * len(node.value) if repeated else inner
        if len(kinds) == len(node.value):
            return origin(map(convert, kinds, node.value))
    elif origin is dict and isinstance(node, yaml.MappingNode):
        return {convert(inner[0], key): convert(inner[1], each) for key, each in node.value}
    elif text is None:
        pass
    elif origin is Literal:
        options = {str(option): option for option in inner}
        if text in options:
            return options[text]
    elif kind is str and not re.search("[\0\ud800-\udfff]", text):
        return text
    elif kind is bool:
        if text.lower() in yaml.SafeLoader.bool_values:
            return yaml.SafeLoader.bool_values[text.lower()]
    elif isinstance(kind, type) and issubclass(kind, (int, float)):
        base = float if issubclass(kind, float) else int
        with suppress(ValueError):  # out of the range of this type
            if re.fullmatch(FORMS[base], text) and kind(value := base(text)) == value:
                if abs(value) <= LARGEST[base]:
                    return value  # not of `kind`: checkpoints store no other types
                end = "2**63" if base is int else "3.4e38, which float32 holds"
                problem = f"expected a number below {end}"
    others = {yaml.MappingNode: "a mapping", yaml.SequenceNode: "a list"}
    got = others.get(type(node), "nothing") if text is None else one_line(repr(text), 60)
    raise ValueError(f"{problem}; got {got}")


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


# ---- Metadata ------------------------------------------------------------------------------------

UNSAVED = {**NOTHING, "saved": False}  # for one start: not in config.yaml
ONE_COMMAND = {**UNSAVED, "one_command": True}  # a flag, not in recipes either

# Fields that only a run reads: neither an evaluation alone, nor a few steps of samestep hardware.
RUN = """max_steps num_epochs max_skipped_steps lr_schedule warmup_steps decay_fraction
    final_lr_fraction lr_scaling reference_batch_size eval_every save_every keep_checkpoints
    async_save log_every tracker project upload_code""".split()
# Fields that only training reads, if only for a few steps.
TRAINING = """learning_rate weight_decay beta1 beta2 max_grad_norm gradient_compression
    gradient_checkpointing task.merge_lora""".split()

# ---- Fields --------------------------------------------------------------------------------------


def fields_of(config_class: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Type and metadata of each field by its name; fields of nested dataclasses have a prefix."""
    kinds, found = get_type_hints(config_class), {}
    for field in dataclasses.fields(config_class):
        name, kind = prefix + field.name, kinds[field.name]
        if dataclasses.is_dataclass(kind):
            found |= fields_of(kind, f"{name}.")
        elif field.init:
            found[name] = (kind, field.metadata)
    return found


def read_flags(arguments: list[str], fields: dict) -> dict[str, yaml.Node]:
    """The values of the flags by field; raises ValueError for unknown and duplicate flags."""
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
        if any((get_origin(each) or each) in (list, tuple, dict, Any) for each in members):
            given[name] = compose_yaml(text)
        else:
            null = NoneType in members and text == "null"
            given[name] = yaml.ScalarNode(NULL if null else TEXT, text)
    return given


def read_recipe(node: yaml.Node, fields: dict, prefix: str = "") -> dict[str, yaml.Node]:
    """The values in a recipe by field; raises ValueError for unknown and duplicate fields."""
    given: dict[str, yaml.Node] = {}
    if node.tag == NULL:  # an empty recipe or section
        return given
    if not isinstance(node, yaml.MappingNode):
        place = f"{prefix[:-1]}: " if prefix else ""
        raise ValueError(f"{place}expected lines of the form 'field: value'")
    for key, value in node.value:
        name = prefix + key.value
        if any(field.startswith(f"{name}.") for field in fields):
            inner = value.value if isinstance(value, yaml.MappingNode) else []
            strange = [key.value for key, _ in inner if f"{name}.{key.value}" not in fields]
            if len(strange) > max(1, len(inner) / 2):
                raise ValueError(
                    f"the section {name} belongs to another task: {one_line(strange[0], 60)} and "
                    f"{one_line(strange[1], 60)} are not fields of task.py; empty it"
                )
            found = read_recipe(value, fields, f"{name}.")
        elif name not in fields:
            raise ValueError(unknown_field(name, fields))
        elif name == "config" or fields[name][1].get("one_command"):
            raise ValueError(f"{name} cannot be in a recipe; give it as a flag, --{name}")
        else:
            found = {name: value}
        for twice in given.keys() & found.keys():
            lines = (each[twice].start_mark.line + 1 for each in (given, found))
            raise ValueError("{} is given twice, in line {} and line {}".format(twice, *lines))
        given |= found
    return given


def unknown_field(wrong: str, fields: dict) -> str:
    """The error for an unknown field, with the nearest existing name."""
    group = [name for name in fields if name.startswith(f"{wrong}.")]
    if group:
        return f"{wrong} is a group of fields; give them one by one, as --{group[0]}"
    hint = hint_of(wrong, fields)
    hint = hint or suggestion(wrong, fields, "python train.py --help lists them")
    return f"there is no field {one_line(wrong, 60) or 'without a name'}; {hint}"


def suggestion(wrong: str, names: Iterable[str], otherwise: str) -> str:
    """The nearest of these names as a question, or else the other text."""
    near = [name for end in "._" for name in names if name.endswith(end + wrong)]
    near = near or difflib.get_close_matches(wrong[:100], names, n=1, cutoff=0.65)
    return f"did you mean {near[0]}?" if near else otherwise


def convert_all(given: dict[str, yaml.Node], fields: dict, list_of: str) -> dict[str, Any]:
    """Converts the given fields to their types; raises ValueError with the name of a wrong one.

    `list_of`: how a list with one element is written there, for the hint.
    """
    values = {}
    for name, node in given.items():
        kind = fields[name][0]
        try:
            values[name] = convert(kind, node)
        except ValueError as error:
            hint = ""
            if isinstance(node, yaml.ScalarNode) and (get_origin(kind) or kind) in (list, tuple):
                hint = f"; write {list_of.format(one_line(node.value, 60))}"
            raise ValueError(f"{name}: {error}{hint}") from None
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


# Fields that are read only with some values of another field.
READERS = {
    "decay_fraction": ("lr_schedule", lambda schedule: schedule == "wsd"),
    "final_lr_fraction": ("lr_schedule", lambda schedule: schedule != "constant"),
    "reference_batch_size": ("lr_scaling", lambda scaling: scaling != "none"),
    "upload_code": ("tracker", lambda tracker: tracker == "wandb"),
}


def check_unread_fields(cfg: Any, flags: dict, recipe: dict, fields: dict) -> None:
    """Raises ValueError for a field that is given although the other settings ignore it.

    Fields of the recipe are exempt if a flag switches off their reader, and so is a recipe with all
    fields: a run wrote it.
    """
    if flags.get("config_file") and not cfg.check:
        raise ValueError(
            "only --check reads config_file; to train, give it to the launcher: "
            "accelerate launch --config_file FILE train.py"
        )
    saved = {name for name, (_, about) in fields.items() if about.get("saved", True)}
    by_hand = not saved - {"config"} <= recipe.keys()
    for name, (switch, reads) in READERS.items():
        written = by_hand and name in recipe and switch not in flags
        if (name in flags or written) and not reads(getattr(cfg, switch)):
            raise ValueError(
                f"{name} is given, but with {switch} {getattr(cfg, switch)} nothing reads it; "
                f"leave it out, or give another {switch}"
            )


def given_flags(config_class: type, arguments: list[str]) -> list[str]:
    """The fields that are given as flags; raises ValueError for unknown ones."""
    return [*read_flags(arguments, {"config": (str, {}), **fields_of(config_class)})]


def parse_config(
    config_class: type, arguments: list[str], usage: str
) -> tuple[Any, Path, list[str]]:
    """The config from defaults, recipe and flags, the later first; the recipe's path; remarks.

    Raises ValueError with one line that names the place of the mistake. --help ends the program.
    """
    if {"-h", "--help"} & {*arguments}:
        others = [word for word in arguments if word not in ("-h", "--help")]
        cfg, path = config_class(), Path(RECIPE)
        for words in ([], others):  # the arguments beside --help may be wrong
            with suppress(ValueError):
                cfg, path, _ = parse_config(config_class, words, usage)
        show_help(cfg, path, usage)
        raise SystemExit(0)
    fields = {"config": (str, {}), **fields_of(config_class)}
    place = "command line"
    try:
        flags = convert_all(read_flags(arguments, fields), fields, '"[{}]"')
        path = Path(os.path.expanduser(flags.pop("config", RECIPE)))
        place = str(path)
        recipe = convert_all(
            read_recipe(compose_yaml(read_small_file(path)), fields), fields, "[{}]"
        )
    except OSError as error:
        line = f"{error.strerror}; --config takes the path of a recipe"
        raise ValueError(f"{one_line(place, 100)}: {line}") from None
    except ValueError as error:
        raise ValueError(f"{one_line(place, 100)}: {one_line(error)}") from None
    cfg = replace_fields(config_class(), recipe | flags)
    remarks = choose_length(cfg, flags, recipe) if hasattr(cfg, "num_epochs") else []
    check_unread_fields(cfg, flags, recipe, fields)
    return cfg, path, remarks


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
