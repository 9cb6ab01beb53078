"""The files that recommend writes: a shipped YAML and a recipe, with other values."""

import dataclasses
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from machine.ladder import Hardware, Rung
from machine.project import Project
from machine.written import HEADING, recipe_with
from training import config
from training.ranks import UserError
from training.startup import resolved_config

SHIPPED = Path("configs/accelerate")
LENGTH = ("max_steps", "num_epochs")  # a flag for one of them sets the other to 0


# ---- The accelerate YAML -------------------------------------------------------------------------


def hardware_yaml(rung: Rung, hardware: Hardware) -> str:
    """The shipped YAML of a rung, for this number of processes and machines."""
    path = SHIPPED / f"{rung.yaml}.yaml"
    values: dict[str, Any] = {"num_processes": rung.processes}
    values["mixed_precision"] = "'no'" if rung.precision == "fp32" else rung.precision
    if hardware.machines > 1:
        values |= {"num_machines": hardware.machines, "main_process_port": 29500}
    if rung.yaml == "hsdp":
        values["  parallelism_config_dp_replicate_size"] = hardware.machines
        values["  parallelism_config_dp_shard_size"] = hardware.devices
    text = config.read_small_file(path)
    for key, value in values.items():
        text, count = re.subn(rf"(?m)^{key}: .*$", f"{key}: {value}", text)
        if count != 1:
            raise UserError(f"{path} has {count} lines {key.strip()}; expected one, as shipped")
    return text


# ---- The recipe ----------------------------------------------------------------------------------


def recipe(project: Project, micro_batch_size: int, gradient_checkpointing: bool) -> str:
    """The recipe with the flags that were given, and these two fields, in it.

    Its comments stay, unless such a recipe would not give the same config: for example, since with
    the flags nothing reads one of its fields.
    """
    chosen = {
        "micro_batch_size": micro_batch_size,
        "gradient_checkpointing": gradient_checkpointing,
    }
    kind = type(project.cfg)
    fields = {"config": (str, {}), **config.fields_of(kind)}
    cfg, path, _ = config.parse_config(kind, project.flags, "")
    wanted = dataclasses.replace(cfg, **chosen)
    names = [n for n in config.read_flags(project.flags, fields) if n != "config"]
    names += LENGTH if {*LENGTH} & {*names} else ()
    names = [n for n in dict.fromkeys(names) if not fields[n][1].get("one_command")]
    values = {n: functools.reduce(getattr, n.split("."), cfg) for n in names} | chosen
    text = config.read_small_file(path)
    if text.startswith(HEADING):  # of an earlier recommendation
        text = text.partition("\n")[2].lstrip("\n")
    for name, value in values.items():
        text = set_value(text, name, value)
    if means(text, kind, fields, wanted):
        return text
    return recipe_with(wanted, path, project.flags, **chosen)


def dump(value: Any) -> str:
    """YAML of a value."""
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True)


def means(text: str, kind: type, fields: Mapping, wanted: Any) -> bool:
    """Whether a recipe gives this config, on its own."""
    try:
        found = config.read_recipe(config.compose_yaml(text), {**fields})
        cfg = config.replace_fields(kind(), config.convert_all(found, {**fields}, "[{}]"))
        config.choose_length(cfg, {}, {n: getattr(cfg, n) for n in LENGTH if n in found})
        config.check_unread_fields(cfg, {}, found, {**fields})
    except ValueError:
        return False
    return resolved_config(cfg) == resolved_config(wanted)


def set_value(text: str, name: str, value: Any) -> str:
    """The text of a recipe with this value of a field, given by its dotted name."""
    shown = dump([value])[2:].rstrip("\n") if not isinstance(value, (list, dict)) else flow(value)
    *groups, last = name.split(".")
    node: yaml.Node | None = config.compose_yaml(text)
    for key in groups:
        node = (find(node, key) or (None, None))[1]
    pair = find(node, last)
    if pair:
        key, old = pair
        return f"{text[: key.end_mark.index]}: {shown}{text[end_of(old) :]}"
    if groups and isinstance(node, yaml.MappingNode) and node.value and not node.flow_style:
        first = node.start_mark
        return text[: first.index] + f"{last}: {shown}\n" + " " * first.column + text[first.index :]
    text = f"{text.rstrip()}\n" if text.strip() else ""
    if groups:
        return text + f"\n{groups[0]}:\n  {last}: {shown}\n"
    return text + f"\n{last}: {shown}\n"


def end_of(node: yaml.Node) -> int:
    """Where the text of a value ends; PyYAML's end of a block is the next key."""
    while isinstance(node, yaml.CollectionNode) and not node.flow_style:
        node = node.value[-1][1] if isinstance(node, yaml.MappingNode) else node.value[-1]
    end = node.end_mark
    return end.index - (isinstance(node, yaml.ScalarNode) and node.style in ("|", ">"))


def flow(value: Any) -> str:
    """YAML of a list or a mapping, in one line."""
    return yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6).strip()


def find(node: yaml.Node | None, key: str) -> tuple[yaml.Node, yaml.Node] | None:
    """The key and the value of this name in a mapping; None if there are none."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return next((pair for pair in pairs if pair[0].value == key), None)
