"""Builds the config dataclass from defaults, a recipe and flags. A mistake is one line: ValueError.

Values stay text until their field is known: 007 and yes are text in a field of text. pydantic reads
them as the type of the field says, which may be any that it knows; the dataclasses are plain ones.
"""

import argparse
import dataclasses
import difflib
import functools
import inspect
import json
import operator
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from samestep.base.console import one_line
from samestep.base.fields import (
    EXPORT,  # noqa: F401  for train.py
    NOTHING,
    ROUNDING,  # noqa: F401  for train.py
    NonNegativeInt,
    check_ignored_fields,
)

RECIPE = "configs/train/default.yaml"  # the default of --config
MAX_FILE_SIZE = 100_000  # bytes; PyYAML takes a second for these
HELP = {"-h", "--help"}
USAGE = "accelerate launch --config_file FILE train.py --config FILE --FIELD VALUE"
UNSAVED = {**NOTHING, "saved": False}  # for one start: not in config.yaml
ONE_COMMAND = {**UNSAVED, "one_command": True}  # a flag, not in recipes either

# Types of train.py's fields; those of tasks are in base/fields.py.
BatchSize = Annotated[int, Field(ge=1, le=10_000_000)]
Interval = NonNegativeInt | Literal["epoch"]  # steps, or each pass over the training data
DecayRate = Annotated[float, Field(ge=0, le=0.9999999)]  # above, float32 rounds to 1

Given = tuple[str, yaml.Node, int | None]  # name and value of a field, and the line in the recipe

# ---- YAML ----------------------------------------------------------------------------------------

TEXT = "tag:yaml.org,2002:str"
NULL = "tag:yaml.org,2002:null"


class StrictLoader(yaml.SafeLoader):
    """Refuses duplicate keys, of which the last would win silently, and what can grow beyond its
    text or is meant for programs: anchors and aliases, tags, merge keys."""

    def compose_node(self, parent: Any, index: Any) -> yaml.Node:
        event = self.peek_event()
        if getattr(event, "anchor", None) or getattr(event, "tag", None):
            raise ValueError(
                f"line {event.start_mark.line + 1}: & and * (anchors, aliases) and ! (tags) are "
                "not supported; quote the text, or write the value itself"
            )
        node = super().compose_node(parent, index)
        names: set[str] = set()
        for key, _ in node.value if node.id == "mapping" else ():
            line = f"line {key.start_mark.line + 1}"
            if key.id != "scalar" or key.tag == NULL or key.value == "<<":
                raise ValueError(f"{line}: a key must be a name, not <<, a list or a mapping")
            if key.value in names:
                raise ValueError(f"{line}: {key.value} is given twice")
            names.add(key.value)
        return node

    def scan_line_break(self) -> str:
        first = self.peek()
        found = super().scan_line_break()
        return first if first == "\x85" else found  # not a space: config.yaml has it as it is


# In YAML 1.1, 010 is 8 and 1:30 is 90; in a field that takes anything, 10 and an error.
StrictLoader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))


def read_yaml(source: str | Path) -> yaml.Node:
    """A YAML text or file as it is written; raises OSError, or ValueError with the line."""
    if isinstance(source, Path):
        if source.stat().st_size > MAX_FILE_SIZE:
            raise ValueError(f"it has more than {MAX_FILE_SIZE:,} bytes; give a YAML file")
        source = source.read_text(encoding="utf-8-sig")  # Notepad begins with a mark
    try:
        return yaml.compose(source, StrictLoader) or yaml.ScalarNode(NULL, "")
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ValueError(f"{line}{error.problem.removeprefix('but ')}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from None


def plain_value(node: yaml.Node, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> Any:
    """What YAML's own rules make of it; raises ValueError, for example for a month 13."""
    try:
        return loader("").construct_object(node, deep=True)
    except RecursionError as error:
        raise ValueError(str(error)) from None


def text_of(node: yaml.Node) -> Any:
    """What is written there: text, lists and mappings of texts, None for null."""
    if node.id == "mapping":
        return {key.value: text_of(value) for key, value in node.value}
    if node.id == "sequence":
        return [text_of(each) for each in node.value]
    return None if node.tag == NULL else node.value


# ---- Types ---------------------------------------------------------------------------------------

SCALARS = {str, int, float, bool, NoneType}
FINITE = ConfigDict(allow_inf_nan=False)
LARGEST = 3.4028234663852886e38  # that float32 holds, with which optimizers compute
FROM_TEXT = {
    int: Annotated[int, Field(gt=-(2**63), lt=2**63)],  # as tensors hold them
    float: Annotated[float, Field(ge=-LARGEST, le=LARGEST)],
    str: Annotated[str, Field(pattern="^[^\0]*$")],
}
WORDS = {"boolean": "true or false", "integer": "a whole number", "number": "a number"}
WORDS |= {"string": "text", "array": "a list", "object": "a mapping"}
LIMITS = {"exclusiveMinimum": "above", "minimum": "at least", "maximum": "at most"}
LIMITS |= {"exclusiveMaximum": "below"}


def members_of(kind: Any) -> tuple:
    """The types in a union; any other type alone. Without their ranges."""
    if get_origin(kind) is Annotated:
        return members_of(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return sum(map(members_of, get_args(kind)), ())
    return (kind,)


def for_text(kind: Any) -> Any:
    """The type as pydantic has to read it from text.

    The first member of a union that fits wins, where pydantic would take text for text: 8 in a
    field of `int | str`. The options of a Literal are compared as they are written.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if kind in (int, float, str):
        return FROM_TEXT[kind]
    if origin is Literal:
        options = {str(option): option for option in inner}
        return Annotated[kind, BeforeValidator(lambda text: options.get(str(text), text))]
    if origin is Annotated:
        parts = (for_text(inner[0]), *inner[1:])
        return Annotated[parts]
    if origin in (Union, UnionType):
        others = [for_text(each) for each in inner if each is not NoneType]
        union = functools.reduce(operator.or_, others)
        if len(others) > 1:
            union = Annotated[union, Field(union_mode="left_to_right")]
        return union | None if NoneType in inner else union
    if origin in (list, tuple, dict):
        return origin[tuple(map(for_text, inner))]
    return kind


def describe_type(kind: Any) -> str:
    """The values of a type, in words."""
    try:
        return describe(TypeAdapter(kind).json_schema())
    except PydanticUserError:
        return "no value, because a field of this type can only be set in the code"


def describe(schema: dict[str, Any]) -> str:
    """The values that a JSON schema allows, in words."""
    if "anyOf" in schema:
        words = [describe(each) for each in schema["anyOf"]]
        return (", or " if "," in words[0] else " or ").join(words)
    if "enum" in schema:
        return "one of " + ", ".join(map(repr, schema["enum"]))
    if "const" in schema:
        return repr(schema["const"])
    words = WORDS.get(schema.get("type"), schema.get("type", "anything"))
    if {"minimum", "maximum"} <= schema.keys():
        return f"{words} from {schema['minimum']:,} to {schema['maximum']:,}"
    limits = {name: value for name, value in schema.items() if type(value) in (int, float)}
    found = sorted(f"{LIMITS.get(name, name)} {value:,}" for name, value in limits.items())
    return f"{words}, {' and '.join(found)}" if found else words


def convert(kind: Any, node: yaml.Node) -> Any:
    """The value of a field with this type.

    Raises ValueError, which says what is expected; in pydantic's words if it lies inside a list.
    """
    untyped = kind is Any or (node.id != "scalar" and "typing.Any" in str(kind))
    value = plain_value(node, StrictLoader) if untyped else text_of(node)
    try:
        adapter = TypeAdapter(for_text(kind), config=FINITE)
        return adapter.validate_python(value, extra="forbid")
    except PydanticUserError:
        wrong = value
        problem = f"expected {describe_type(kind)}"
    except ValidationError as error:
        deepest = max(error.errors(), key=lambda each: len(each["loc"]))
        wrong = deepest["input"]
        problem = deepest["msg"]
        if wrong is value and deepest["type"] != "value_error":  # that of an owner's validator
            problem = f"expected {describe_type(kind)}"
    got = {dict: "a mapping", list: "a list", NoneType: "nothing"}.get(type(wrong))
    raise ValueError(f"{problem}; got {got or one_line(repr(wrong), 60)}")


# ---- Fields --------------------------------------------------------------------------------------


def fields_of(config_class: Any, prefix: str = "") -> dict[str, tuple[Any, dataclasses.Field]]:
    """Type and field of each name that can be set; those of nested dataclasses have a prefix."""
    kinds = get_type_hints(config_class, include_extras=True)
    found: dict[str, tuple[Any, dataclasses.Field]] = {}
    for field in dataclasses.fields(config_class):
        name, kind = prefix + field.name, kinds[field.name]
        if dataclasses.is_dataclass(kind):
            found |= fields_of(kind, f"{name}.")
        elif field.init:
            found[name] = (kind, field)
    return found


def read_flags(arguments: list[str], fields: dict) -> Iterator[Given]:
    """The flags as they are written."""
    words = list(arguments)
    while words:
        word = words.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in fields:
            raise ValueError(unknown_field(name if word.startswith("--") else word, fields))
        members = members_of(fields[name][0])
        if not equals and words and not words[0].startswith("--"):
            text = words.pop(0)
        elif not equals and bool in members:  # --check is short for --check true
            text = "true"
        elif not equals:
            raise ValueError(f"--{name}: expected one argument; write --{name}=VALUE")
        is_list = re.fullmatch(r"\s*(\[.*\]|\{.*\})\s*", text, re.S)
        if (is_list and not SCALARS.issuperset(members)) or Any in members:
            yield name, read_yaml(text), None
        else:  # YAML would cut a path at " #"
            is_null = NoneType in members and text == "null"
            yield name, yaml.ScalarNode(NULL if is_null else TEXT, text), None


def read_recipe(section: yaml.Node, fields: dict, prefix: str = "") -> Iterator[Given]:
    """The fields in a recipe as they are written, as `read_flags` gives those of the flags."""
    if section.id != "mapping" and section.tag != NULL:
        place = f"{prefix[:-1]}: " if prefix else ""
        raise ValueError(f"{place}expected lines of the form 'field: value'")
    for key, value in section.value if section.id == "mapping" else ():
        name = prefix + key.value
        if any(field.startswith(f"{name}.") for field in fields):
            yield from read_recipe(value, fields, f"{name}.")
        elif name in fields and "one_command" in fields[name][1].metadata:
            raise ValueError(f"{name} cannot be in a recipe; give it as a flag, --{name}")
        else:
            yield name, value, key.start_mark.line + 1


def convert_all(given: Iterable[Given], fields: dict) -> dict[str, Any]:
    """The values of fields, each converted to its type; raises ValueError with a wrong name."""
    values: dict[str, Any] = {}
    for name, node, line in given:
        place = f"line {line}: " if line else ""
        if name not in fields:
            raise ValueError(place + unknown_field(name, fields))
        if name in values:
            raise ValueError(f"{place}{name} is given twice")
        try:
            values[name] = convert(fields[name][0], node)
        except ValueError as error:
            raise ValueError(f"{place}{name}: {error}") from None
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


def parse_config(
    config_class: type, arguments: list[str], about: str | None
) -> tuple[Any, Path, dict[str, Any], list[str]]:
    """The config from defaults, recipe and flags, the later first; the recipe's path; the values of
    the flags; remarks.

    `about` is the docstring of the program, whose second paragraph shows commands; --help prints
    these, and ends the program. Raises ValueError with one line that names the place of a mistake.
    """
    config_flag = dataclasses.field(metadata=ONE_COMMAND)
    fields = {"config": (str, config_flag), **fields_of(config_class)}
    place = "command line"
    try:
        words = [word for word in arguments if word not in HELP]
        flags = convert_all(read_flags(words, fields), fields)
        path = Path(os.path.expanduser(flags.pop("config", RECIPE)))
        place = str(path)
        recipe = convert_all(read_recipe(read_yaml(path), fields), fields)
    except OSError as error:
        line = f"{error.strerror}; --config takes the path of a recipe"
        raise ValueError(f"{one_line(place, 100)}: {line}") from None
    except ValueError as error:
        raise ValueError(f"{one_line(place, 100)}: {one_line(error)}") from None
    cfg = replace_fields(config_class(), recipe | flags)
    if HELP & {*arguments}:
        paragraphs = (about or "").split("\n\n")
        show_help(cfg, path, paragraphs[1].strip() if len(paragraphs) > 1 else about or USAGE)
        raise SystemExit(0)
    remarks = choose_length(cfg, flags, recipe) if hasattr(cfg, "num_epochs") else []
    for name, switch, values in READERS:
        value = getattr(cfg, switch, None)
        # A flag that switches off the reader of a recipe's field leaves the recipe as it is.
        read = value in values or (switch in flags and name not in flags) or not hasattr(cfg, name)
        check_ignored_fields(cfg, [(name, read, f"with {switch} {value}")], section="")
    return cfg, path, flags, remarks


# Fields that are read only with some values of another field.
READERS = (
    ("decay_fraction", "lr_schedule", ("wsd",)),
    ("reference_batch_size", "lr_scaling", ("linear", "sqrt")),
    ("upload_code", "tracker", ("wandb",)),
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
            other, nothing = ("num_epochs", 0.0) if wins == "max_steps" else ("max_steps", 0)
            setattr(cfg, other, nothing)
            line = f"--{wins} {given[wins]} replaces {other} {kept.get(other)} of the recipe"
            return [line] if kept.get(other) else []
    if not (cfg.max_steps or cfg.num_epochs):
        raise ValueError("max_steps and num_epochs are both 0; one must be above 0")
    return []


# ---- Names ---------------------------------------------------------------------------------------

HARDWARE = "the accelerate YAML decides it, as"
# Names of Hugging Face's Trainer, of Lightning and of scripts, and what is meant here: the name of
# a field, which counts where the config has that field, or a sentence.
OTHER_NAMES = {
    "lr": "learning_rate",
    "batch_size train_batch_size per_device_train_batch_size per_device_eval_batch_size": (
        "global_batch_size decides the result, micro_batch_size the memory"
    ),
    "gradient_accumulation_steps accumulate_grad_batches": (
        "it follows from global_batch_size and micro_batch_size"
    ),
    "bf16 fp16 fp32 amp precision mixed_precision": f"{HARDWARE} mixed_precision",
    "gpus num_gpus devices num_processes world_size": f"{HARDWARE} num_processes",
    "fsdp deepspeed": f"{HARDWARE} configs/accelerate/fsdp2.yaml",
    "max_epochs": "num_epochs",
    "steps max_iters": "max_steps",
    "max_length max_seq_length max_seq_len seq_len block_size": "task.context_length",
    "dataset dataset_name train_file data_path": "task.data",
    "dataset_config_name": "task.data_config",
    "validation_file eval_file": "task.validation_data",
    "model model_name pretrained": "task.model_name_or_path",
    "lora lora_r": "task.lora_rank",
    "wandb report_to": "it is tracker here: wandb, trackio, tensorboard or none",
    "run_name": "output_dir",
    "logging_steps log_every_n_steps": "log_every",
    "eval_steps val_check_interval": "eval_every",
    "save_steps": "save_every",
    "save_total_limit": "keep_checkpoints",
    "resume_from_checkpoint ckpt_path": "resume",
    "do_eval": "eval_only",
    "warmup_ratio": "it is warmup_steps here, a number of steps",
    "scheduler": "lr_schedule",
    "optim optimizer": "build_optimizer in train.py is where it is changed",
    "grad_clip clip_grad gradient_clip_val": "max_grad_norm",
    # Names of version 1.
    "endings task.endings": "task.file_extensions",
    "too_long task.too_long": "task.overlong",
    "stored_size task.stored_size": "task.cache_image_size",
    "corrupt task.corrupt": "task.unreadable_images",
}


def unknown_field(wrong: str, fields: dict) -> str:
    """The error for an unknown field, with the nearest existing name."""
    hint = suggestion(wrong, fields, "python train.py --help lists them")
    for names, meant in OTHER_NAMES.items():
        if wrong in names.split() and (" " in meant or meant in fields):
            hint = meant if " " in meant else f"it is {meant} here"
    return f"there is no field {one_line(wrong, 60) or 'without a name'}; {hint}"


def suggestion(wrong: str, names: Iterable[str], otherwise: str) -> str:
    """The nearest of these names as a question, or else the other text."""
    near = [name for end in "._" for name in names if name.endswith(end + wrong)]
    near = near or difflib.get_close_matches(wrong[:100], names, n=1, cutoff=0.65)
    return f"did you mean {near[0]}?" if near else otherwise


# ---- Help ----------------------------------------------------------------------------------------

# In the source of a dataclass: a comment that opens a group, a field, a docstring.
PARTS = re.compile(r'\n\n    # ([^\n]+)|^    (\w+):|^    """(.+?)"""', re.M | re.S)


def field_notes(config_class: Any, prefix: str = "", title: str = "") -> dict[str, list[str]]:
    """The heading and the docstring of each field; those of a class come before its bases'.

    They are read from the source: Python keeps neither.
    """
    notes: dict[str, list[str]] = {}
    for base in config_class.__mro__[:-1]:
        heading = title or "Fields"
        new = [""]
        source = ""
        with suppress(OSError, TypeError):  # it was typed at a prompt
            source = inspect.getsource(base)
        for comment, field, text in PARTS.findall(source):
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
    notes = field_notes(type(cfg))
    groups: dict[str, Any] = {}
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
