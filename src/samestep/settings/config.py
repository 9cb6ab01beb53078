"""Builds the config dataclass from defaults, a recipe and flags. A mistake is one line: ValueError.

pydantic reads each value as the type of its field says, which may be any that it knows, and in its
words: 007 and yes are text in a field of text. The dataclasses are plain ones.
"""

import dataclasses
import difflib
import functools
import inspect
import json
import os
import re
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from samestep.base.console import one_line, without_credentials
from samestep.base.fields import (
    LARGEST,
    NOTHING,
    Fraction,
    NonNegativeInt,
    check_ignored_fields,
)

RECIPE = "configs/train/default.yaml"  # the default of --config
_HELP = {"-h", "--help"}
_USAGE = "accelerate launch --config_file FILE train.py --config FILE --FIELD VALUE"
UNSAVED = {**NOTHING, "saved": False}  # for one start: not in config.yaml
ONE_COMMAND = {**UNSAVED, "one_command": True}  # a flag, not in recipes either

# Types of train.py's fields; those of tasks are in base/fields.py.
BatchSize = Annotated[int, Field(ge=1, le=10_000_000)]
Interval = NonNegativeInt | Literal["epoch"]  # steps, or each pass over the training data
Warmup = NonNegativeInt | Fraction  # of steps; a part of all steps
DecayRate = Annotated[float, Field(ge=0, le=0.9999999)]  # above, float32 rounds to 1

# ---- Values --------------------------------------------------------------------------------------


class _StrictLoader(yaml.BaseLoader):
    """Leaves all scalars text. Refuses duplicate keys, of which the last would win silently, and
    what can grow beyond its text or is meant for programs: anchors, aliases, tags, merge keys."""

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
            if key.id != "scalar" or key.value == "<<":
                raise ValueError(f"{line}: a key must be a name, not <<, a list or a mapping")
            if key.value in names:
                raise ValueError(f"{line}: {key.value} is given twice")
            names.add(key.value)
        return node

    def construct_scalar(self, node: yaml.ScalarNode) -> str | None:
        is_null = not node.style and node.value in ("", "~", "null")
        return None if is_null else node.value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        return {key.value: self.construct_object(value, deep=True) for key, value in node.value}


def read_yaml(text: str) -> Any:
    """The dicts, lists and texts of a YAML, and None for null; raises ValueError with the line."""
    try:
        return yaml.load(text, _StrictLoader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ValueError(f"{line}{error.problem.removeprefix('but ')}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _number_in(text: Any) -> Any:
    """The number, true or false that JSON reads in a text, also in lists; any other as it is."""
    if isinstance(text, dict):
        return {name: _number_in(each) for name, each in text.items()}
    if isinstance(text, list):
        return [_number_in(each) for each in text]
    try:
        value = json.loads(text)
    except (TypeError, ValueError, RecursionError):  # TypeError: None
        return text
    return value if isinstance(value, int | float) else text


def convert(kind: Any, text: Any) -> Any:
    """The value of a field with this type; raises ValueError in pydantic's words.

    `text`: a text, or lists and dicts of texts. The number in it comes first: 8 in a field of
    `int | str`. If that is not of the type, the text is.
    """
    config = ConfigDict(allow_inf_nan=False, arbitrary_types_allowed=True)
    adapter: TypeAdapter[Any] = TypeAdapter(kind, config=config)
    with suppress(ValidationError):
        return adapter.validate_python(_number_in(text), strict=True, extra="forbid")
    try:
        return adapter.validate_python(text, extra="forbid")
    except ValidationError as error:
        problems = error.errors()
    wrong = max(problems, key=lambda each: len(each["loc"]))["input"]
    expected = ", or ".join(each["msg"] for each in problems if each["input"] is wrong)
    got = {dict: "a mapping", list: "a list", type(None): "nothing"}.get(type(wrong))
    raise ValueError(f"{expected}; got {got or one_line(repr(wrong), 60)}")


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


def _read_flags(arguments: list[str], fields: dict) -> Iterator[tuple[str, Any]]:
    """The names and texts of the flags."""
    words = list(arguments)
    while words:
        word = words.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in fields:
            raise ValueError(_unknown_field(name if word.startswith("--") else word, fields))
        kind = fields[name][0]
        if not equals and words and not words[0].startswith("--"):
            text = words.pop(0)
        elif not equals and kind is bool:  # --check is short for --check true
            text = "true"
        elif not equals:
            raise ValueError(f"--{name}: expected one argument; write --{name}=VALUE")
        if text.strip()[:1] + text.strip()[-1:] in ("[]", "{}") and kind not in (str, str | None):
            yield name, read_yaml(text)
        elif text == "null" and (kind is Any or type(None) in get_args(kind)):
            yield name, None
        else:  # YAML would cut a path at " #"
            yield name, text


def _read_recipe(section: Any, fields: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The names and texts of the fields in a recipe."""
    if not isinstance(section, dict | None):
        place = f"{prefix[:-1]}: " if prefix else ""
        raise ValueError(f"{place}expected lines of the form 'field: value'")
    for key, text in (section or {}).items():
        name = prefix + key
        if any(field.startswith(f"{name}.") for field in fields):
            yield from _read_recipe(text, fields, f"{name}.")
        elif name in fields and "one_command" in fields[name][1].metadata:
            raise ValueError(f"{name} cannot be in a recipe; give it as a flag, --{name}")
        else:
            yield name, text


def _convert_all(given: Iterable[tuple[str, Any]], fields: dict) -> dict[str, Any]:
    """The values of fields, each converted to its type; raises ValueError with a wrong name."""
    values: dict[str, Any] = {}
    for name, text in given:
        if name not in fields:
            raise ValueError(_unknown_field(name, fields))
        if name in values:
            raise ValueError(f"{name} is given twice")
        try:
            values[name] = convert(fields[name][0], text)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return values


def read_values(written: Any, fields: dict) -> dict[str, Any]:
    """The values of fields, by dotted name, in what a recipe holds."""
    return _convert_all(_read_recipe(written, fields), fields)


def _replace_fields(config: Any, values: dict[str, Any], prefix: str = "") -> Any:
    """A copy of the config with these values, by dotted name."""
    changes = {}
    for field in dataclasses.fields(config):
        name, value = prefix + field.name, getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            changes[field.name] = _replace_fields(value, values, f"{name}.")
        elif name in values:
            changes[field.name] = values[name]
    return dataclasses.replace(config, **changes)


@contextmanager
def naming(place: object) -> Iterator[None]:
    """Makes an error of the body a ValueError with one line that begins with the place."""
    try:
        yield
    except (OSError, ValueError) as error:
        line = one_line(getattr(error, "strerror", None) or error)
        raise ValueError(f"{one_line(place, 100)}: {line}") from None


def parse_config(config_class: type, arguments: list[str], about: str | None) -> tuple[Any, Path]:
    """The config from defaults, recipe and flags, and the recipe's path.

    `about` is the docstring of the program, whose second paragraph shows commands; --help prints
    these, and ends the program. Raises ValueError with one line that names the place of a mistake.
    """
    fields = fields_of(config_class)
    fields["config"] = (str, dataclasses.field(metadata=ONE_COMMAND))
    with naming("command line"):
        words = [word for word in arguments if word not in _HELP]
        flags = _convert_all(_read_flags(words, fields), fields)
    path = Path(os.path.expanduser(flags.pop("config", RECIPE)))
    with naming(path):
        recipe = read_values(read_yaml(path.read_text(encoding="utf-8-sig")), fields)  # Notepad's
    cfg = _replace_fields(config_class(), recipe | flags)
    for name in fields_of(config_class):
        value = str(functools.reduce(getattr, name.split("."), cfg))  # also of lists and dicts
        if without_credentials(value) != value:
            raise ValueError(
                f"{name} is {one_line(value, 100)} with a password or a query, which a run would "
                "store; give them through the environment, as the package of the store takes them"
            )
    if _HELP & {*arguments}:
        _show_help(cfg, path, (about or _USAGE).split("\n\n")[:2][-1].strip())
        raise SystemExit(0)
    if hasattr(cfg, "num_epochs"):
        _choose_length(cfg, flags, recipe)
    for name, switch, values in _READERS:
        value = getattr(cfg, switch, None)
        # A flag that switches off the reader of a recipe's field leaves the recipe as it is.
        read = value in values or (switch in flags and name not in flags) or not hasattr(cfg, name)
        check_ignored_fields(cfg, [(name, read, f"with {switch} {value}")], section="")
    return cfg, path


# Fields that are read only with some values of another field.
_READERS = (
    ("decay_fraction", "lr_schedule", ("wsd",)),
    ("reference_batch_size", "lr_scaling", ("linear", "sqrt")),
    ("upload_code", "tracker", ("wandb",)),
)


def _choose_length(cfg: Any, flags: dict, recipe: dict) -> None:
    """Keeps max_steps or num_epochs: a flag wins over the recipe, the recipe over a default.

    Raises ValueError if none or both are given.
    """
    names = ("max_steps", "num_epochs")
    given = [name for name in names if flags.get(name)]
    given = given or [name for name in names if recipe.get(name) and name not in flags]
    if len(given) == 2:
        raise ValueError("max_steps and num_epochs are both given; give one of them")
    if given == ["max_steps"]:
        cfg.num_epochs = 0.0
    if given == ["num_epochs"]:
        cfg.max_steps = 0
    if not (cfg.max_steps or cfg.num_epochs):
        raise ValueError("max_steps and num_epochs are both 0; one must be above 0")
    if getattr(cfg, "min_steps", 0):
        if {*names, "global_batch_size"} & {*flags} and "min_steps" not in flags:
            cfg.min_steps = 0  # what a flag gives stays as it is
        elif not cfg.num_epochs:
            raise ValueError("min_steps has no effect with max_steps; give num_epochs")


def remarks_on_rate(cfg: Any) -> list[str]:
    """A line if pretrained weights train at a rate for new ones: above 1e-3, with LoRA 5e-3."""
    name, rate = getattr(cfg.task, "model_name_or_path", ""), getattr(cfg, "learning_rate", 0.0)
    limit = 5e-3 if getattr(cfg.task, "lora_rank", 0) else 1e-3
    if not name or cfg.eval_only or rate <= limit:
        return []
    start = f"warning: learning_rate is {rate:g}, high for the pretrained weights of"
    return [f"{start} {one_line(name, 100)}; give at most {limit:g}"]


# ---- Names ---------------------------------------------------------------------------------------

# Names of Hugging Face's Trainer, of Lightning and of scripts, and what is meant here: the name of
# a field, which counts where the config has that field, or a sentence.
HARDWARE = "the accelerate YAML decides it, as"
_OTHER_NAMES = {
    "lr": "learning_rate",
    "batch_size train_batch_size per_device_train_batch_size per_device_eval_batch_size": (
        "global_batch_size decides the result, micro_batch_size the memory"
    ),
    "gradient_accumulation_steps accumulate_grad_batches": (
        "it follows from global_batch_size and micro_batch_size"
    ),
    "bf16 fp16 fp32 amp precision mixed_precision": f"{HARDWARE} mixed_precision",
    "gpus num_gpus devices num_processes world_size": f"{HARDWARE} num_processes",
    "config_file": "it goes before train.py: accelerate launch --config_file FILE train.py",
    "fsdp deepspeed": f"{HARDWARE} configs/accelerate/fsdp2.yaml",
    "max_length max_seq_length max_seq_len seq_len block_size": "task.context_length",
    "dataset dataset_name train_file data_path": "task.data",
    "model model_name pretrained": "task.model_name_or_path",
    "lora lora_r": "task.lora_rank",
    "wandb report_to": "it is tracker here: wandb, trackio, tensorboard or none",
    "run_name": "output_dir",
    "logging_steps log_every_n_steps": "log_every",
    "eval_steps val_check_interval": "eval_every",
    "save_steps": "save_every",
    "save_total_limit": "keep_checkpoints",
    "resume_from_checkpoint ckpt_path": "resume",
    "warmup_ratio": "it is warmup_steps here: below 1 a part of the steps",
    "optim optimizer": "build_optimizer in train.py is where it is changed",
    "ddp_find_unused_parameters": "find_unused_parameters",
    "ddp bucket_cap_mb ddp_bucket_cap_mb ddp_broadcast_buffers gradient_compression": (
        "accelerator_options in train.py takes DDP's arguments"
    ),
    "grad_clip clip_grad gradient_clip_val": "max_grad_norm",
    "streaming task.streaming": "causal_lm streams; this task prepares its rows",
}


def _unknown_field(wrong: str, fields: dict) -> str:
    """The error for an unknown field, with the nearest existing name."""
    hint = suggestion(wrong, fields, "python train.py --help lists them")
    for names, meant in _OTHER_NAMES.items():
        if wrong in names.split() and (" " in meant or meant in fields):
            hint = meant if " " in meant else f"it is {meant} here"
    return f"there is no field {one_line(wrong, 60) or 'without a name'}; {hint}"


def suggestion(wrong: str, names: Iterable[str], otherwise: str) -> str:
    """The nearest of these names as a question, or else the other text."""
    near = [name for end in "._" for name in names if name.endswith(end + wrong)]
    near = near or difflib.get_close_matches(wrong[:100], names, n=1, cutoff=0.65)
    return f"did you mean {near[0]}?" if near else otherwise


# ---- Help ----------------------------------------------------------------------------------------

PARTS = re.compile(r'^    (\w+):|^    """(.+?)"""', re.M | re.S)  # a field, a docstring


def field_notes(config_class: Any, prefix: str = "") -> dict[str, str]:
    """The docstring of each field, read from the source: Python does not keep it."""
    notes: dict[str, str] = {}
    for base in config_class.__mro__[:-1]:
        name = ""
        source = ""
        with suppress(OSError, TypeError):  # it was typed at a prompt
            source = inspect.getsource(base)
        for field, text in PARTS.findall(source):
            if text:
                notes.setdefault(name, " ".join(text.split()))
            else:
                name = prefix + field
    for name, kind in get_type_hints(config_class).items():
        if dataclasses.is_dataclass(kind):
            notes |= field_notes(kind, f"{prefix}{name}.")
    return notes


def _describe_type(kind: Any) -> str:
    """The JSON schema of a type, in one line."""
    try:
        schema = TypeAdapter(kind).json_schema()
    except PydanticUserError:
        return "can only be set in the code"
    words = []
    for option in schema.get("anyOf", [schema]):
        shown = {name: value for name, value in option.items() if value != LARGEST}
        words.append(json.dumps(shown).strip("{}").replace('"', ""))
    return " or ".join(words)


def _show_help(cfg: Any, recipe: Path, usage: str) -> None:
    """Prints all flags: the value that would be used, what it may be, and the description."""
    print(f"usage: {usage}\n\n--config {recipe}\n    The recipe, whose values are shown here.")
    notes = field_notes(type(cfg))
    for name, (kind, _) in fields_of(type(cfg)).items():
        value = json.dumps(functools.reduce(getattr, name.split("."), cfg), default=str)
        print(f"--{name} {value}    ({_describe_type(kind)})")
        print(textwrap.indent(textwrap.fill(notes.get(name, ""), 92), "    "))
