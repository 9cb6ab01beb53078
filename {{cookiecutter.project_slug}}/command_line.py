"""A dataclass from a recipe and flags, strictly: every mistake is one line that says what to write.

Parsing itself is jsonargparse's; this file only joins recipe and flags, refuses a YAML key that is
given twice, and turns long error messages into short ones. For `--check` it also reads the YAML of
the hardware, which accelerate's launcher reads otherwise.
"""

import argparse
import dataclasses
import difflib
import math
import os
import re
from enum import Enum
from pathlib import Path

import torch
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.utils import PrecisionType
from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings


class UniqueKeys(yaml.SafeLoader):
    """PyYAML's safe loader, except that of a key given twice the last one does not win silently."""

    def construct_mapping(self, node, deep=False):
        lines = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if key.value in lines:
                first = lines[key.value]
                raise ValueError(f"{key.value} is given twice, in line {first} and line {line}")
            lines[key.value] = line
        return super().construct_mapping(node, deep)


def parse(config_class: type, arguments: list[str], usage: str) -> tuple[object, Path]:
    """A config from defaults, then the recipe after --config, then flags; and the recipe's path.

    Raises ValueError with one line that names the place of a mistake.
    """
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    settings = {"prog": "train.py", "allow_abbrev": False, "exit_on_error": False}
    recipes = argparse.ArgumentParser(add_help=False, **settings)  # sees --config alone
    parser = ArgumentParser(usage=usage, print_config=None, **settings)
    for each in (recipes, parser):
        each.add_argument(
            "--config",
            default="configs/train/default.yaml",
            help="The recipe; it goes before the defaults below.",
        )
    parser.add_class_arguments(config_class)

    switches = switches_of(config_class)
    for i, word in enumerate(arguments):  # --check is short for --check true
        if word in switches and (arguments[i + 1 : i + 2] or ["--"])[0].startswith("--"):
            arguments = [*arguments[:i], f"{word}=true", *arguments[i + 1 :]]

    place = "command line"
    try:
        recipe = Path(recipes.parse_known_args(arguments)[0].config)
        place = str(recipe)
        fields = yaml.load(recipe.read_text(encoding="utf-8"), UniqueKeys) or {}
        if not isinstance(fields, dict):
            raise ValueError("expected lines of the form 'field: value'")
        given = parser.parse_object(fields)
        place = "command line"
        values = vars(parser.instantiate(parser.parse_args(arguments, namespace=given)))
    except OSError as error:
        raise ValueError(
            f"{place}: {error.strerror}; --config takes the path of a recipe"
        ) from None
    except (ArgumentError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{place}: {one_line(str(error), parser)}") from None
    del values["config"]
    return plain(config_class(**values)), recipe


def switches_of(config_class: type, prefix: str = "--") -> list[str]:
    """The flags of the fields that are true or false."""
    flags = []
    for field in dataclasses.fields(config_class):
        if field.type is bool:
            flags.append(prefix + field.name)
        elif dataclasses.is_dataclass(field.type):
            flags += switches_of(field.type, f"{prefix}{field.name}.")
    return flags


def plain(config):
    """Makes int and float of jsonargparse's numbers, which no checkpoint could hold."""
    for name, value in vars(config).items():
        if dataclasses.is_dataclass(value):
            plain(value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            if not math.isfinite(value):
                raise ValueError(f"{name} is {value}; give a finite number")
            setattr(config, name, int(value) if isinstance(value, int) else float(value))
    return config


def one_line(message: str, parser: ArgumentParser) -> str:
    """jsonargparse's message as one line, with the nearest right name for an unknown field."""
    message = re.sub(r'Parser key "([^"]+)":', r"\1:", " ".join(message.split()))
    message = re.sub(r"Expected a <class '(\w+)'>", r"expected a value of type \1", message)
    message = re.sub(r"Expected a typing\.Literal\[(.+?)\]", r"expected one of \1", message)
    unknown = re.search(
        r"unrecognized arguments: (?:--)?([^\s=]+)"
        r"|Group '(?P<group>.+?)' does not accept option '(.+?)'"
        r"|Option '(.+?)' is not accepted",
        message,
    )
    if not unknown:
        return message
    wrong = next(filter(None, (unknown[1], unknown[3], unknown[4])))
    wrong = f"{unknown['group']}.{wrong}" if unknown["group"] else wrong
    names = [option[2:] for action in parser._actions for option in action.option_strings]
    near = [name for name in names if name.endswith(f".{wrong}")]
    near = near or difflib.get_close_matches(wrong, names, n=1)
    hint = f"did you mean {near[0]}?" if near else "python train.py --help lists them"
    return f"there is no field {wrong}; {hint}"


def read_hardware(path: Path) -> int:
    """Processes, on all machines, that accelerate starts for one of its YAMLs.

    Raises ValueError where accelerate would not understand it, or this machine cannot do it.
    """
    try:
        fields = yaml.load(path.read_text(encoding="utf-8"), UniqueKeys)
        if not isinstance(fields, dict):
            raise ValueError("expected lines of the form 'key: value'")
        keys = list(ClusterConfig.__dataclass_fields__)
        for key in fields:
            if key not in keys:
                near = difflib.get_close_matches(key, keys, n=1)
                hint = f"did you mean {near[0]}?" if near else "accelerate knows no such key"
                raise ValueError(f"there is no key {key}; {hint}")
        for key in ("num_processes", "num_machines"):
            number = fields.get(key, 1)
            if type(number) is not int or number < 1:
                raise ValueError(f"{key} is {number}; give a whole number from 1")
        hardware = ClusterConfig(**ClusterConfig.process_config(fields))
        if not isinstance(hardware.distributed_type, Enum):
            raise ValueError(
                f"distributed_type is {hardware.distributed_type}; write 'NO' in quotes"
            )
    except OSError as error:
        raise ValueError(
            f"{path}: {error.strerror}; --config_file takes the path of a YAML"
        ) from None
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None

    kind, processes = hardware.distributed_type.value, hardware.num_processes
    # launch.py was told otherwise, perhaps.
    processes = int(os.environ.get("LAUNCH_PROCESSES") or processes)
    machines = int(os.environ.get("LAUNCH_MACHINES") or hardware.num_machines)
    precision, precisions = hardware.mixed_precision or "no", PrecisionType.list()
    if str(precision) not in precisions:
        known = ", ".join(precisions)
        raise ValueError(
            f"{path}: mixed_precision is {precision}; give one of {known} (no in quotes)"
        )
    if kind == "NO" and processes > 1 or kind == "MULTI_CPU":
        raise ValueError(
            f"{path}: distributed_type {kind} starts one process alone, and num_processes is "
            f"{processes}; see cpu_multi.yaml and multi_gpu.yaml"
        )
    if hardware.use_cpu or str(hardware.gpu_ids).startswith("-1"):
        if precision == "fp16":
            raise ValueError(f"{path}: mixed_precision fp16 needs a GPU; write 'no'")
        return processes
    here = -(-processes // machines)
    gpus = torch.accelerator.device_count()
    if gpus < here:
        raise ValueError(
            f"{path}: it takes {here} GPUs of this machine, which has {gpus}; "
            + (f"set num_processes to {gpus}" if gpus else "take cpu.yaml")
        )
    return processes
