"""What the files of a pretrained model hold, and the model does not take.

transformers leaves out tensors that a model has no place for, and says so in a log line alone. A
branch that is not taken, such as another head, a vision tower or layers that predict more tokens,
changes nothing. A bias of a weight that is taken, or a layer of a list that is taken, does: the
model would compute another function than that of its files.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from samestep.base.console import one_line

FORMATS = ("model.safetensors", "pytorch_model.bin")  # as transformers looks for them
# A module with these words in its name follows the others, or replaces masked inputs.
_HEADS = re.compile("pool|head|classifier|score|relationship|logit|predict|qa_outputs|mask")
_MORE_TOKENS = re.compile("mtp|nextn")  # of configs and modules that predict several tokens
_PAGES, PAGE, _EMPTY = (
    64,
    4096,
    8,
)  # samples of a file, their bytes, and zeros in a row that are many


def list_files(folder: Path) -> list[Path]:
    """The files of weights that transformers loads from a folder."""
    for name in FORMATS:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return [folder / name]
        if index.is_file():
            shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            return [folder / shard for shard in sorted({*shards})]
    return []


def names_in(files: Iterable[Path]) -> list[str]:
    """The names of the tensors in safetensors files; other files are not read."""
    from safetensors import safe_open

    found: list[str] = []
    for path in files:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                found += file.keys()
    return found


def check_zeros(files: Iterable[Path]) -> None:
    """Raises ValueError for a file of which an eighth or more is zeros in one piece."""
    for path in files:
        size, zeros = path.stat().st_size, 0
        with open(path, "rb") as file:
            for number in range(_PAGES):
                file.seek(size * number // _PAGES)
                page = file.read(min(PAGE, size // _PAGES))
                zeros = 0 if page.strip(b"\0") else zeros + 1
                if zeros == _EMPTY:
                    first = size * (number + 1 - _EMPTY) // _PAGES
                    raise ValueError(
                        f"task.model_name_or_path: {path} has zeros for weights from byte "
                        f"{first:,} of {size:,}, as a download or a copy that was cut off leaves "
                        "them; fetch it again"
                    )


class Part(NamedTuple):
    """Tensors of files that a model has no place for, by the first name that it does not know."""

    name: str
    kind: str  # "branch"; "layer" of a list that the model has; "tensor" beside others that it has
    tensors: list[str]


def _sort_out(names: Iterable[str], model: Any, held: list[str]) -> list[Part]:
    """Sorts tensors that a model does not take into parts. `held`: all names in its files."""
    modules, prefix = dict(model.named_modules()), model.base_model_prefix
    bare = bool(held) and not any(name.startswith(f"{prefix}.") for name in held)
    inside = bool(prefix) and prefix in modules
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        parts = name.split(".")
        if parts[0] == prefix and not inside:  # the model is the base model
            parts = parts[1:]
        elif inside and parts[0] not in modules and (bare or f"{prefix}.{parts[0]}" in modules):
            parts = [prefix, *parts]  # the files have the base model alone
        depth = len(parts) - 1
        while depth and ".".join(parts[:depth]) not in modules:
            depth -= 1
        groups.setdefault(".".join(parts[: depth + 1]), []).append(".".join(parts))
    found = []
    for group, tensors in groups.items():
        owner, _, last = group.rpartition(".")
        within = [tensor.count(".") - group.count(".") for tensor in tensors]
        kind = "branch"
        if last.isdigit():
            kind = "layer"
        elif re.search(r"\.\d+(\.|$)", owner):
            kind = "tensor"
        elif owner and max(within) < 2 and not _HEADS.search(group):
            kind = "tensor"
        found.append(Part(group, kind, tensors))
    return found


def check_taken(model: Any, unexpected: Iterable[str], files: list[Path]) -> str:
    """A line about whole branches that a model does not take from its files; empty: there are none.

    `unexpected`: what transformers calls so, without the tensors that the class of the model
    expects to be left out (_keys_to_ignore_on_load_unexpected), which end no run. Raises ValueError
    for tensors beside those that are taken. The config announces no layers that were left out.
    """
    held = names_in(files)
    parts = _sort_out(unexpected, model, held)
    beside = [name for part in parts if part.kind != "branch" for name in part.tensors]
    if beside:
        where = files[0].parent if files else "its file"
        raise ValueError(
            f"task.model_name_or_path: {where} has {count(beside)} that its config.json has no "
            f"place for, beside those that are loaded: {one_line(', '.join(beside[:3]), 200)}; "
            "without them the model is another function: give the config.json of these weights"
        )
    known, patterns = {*model.state_dict()}, model._keys_to_ignore_on_load_unexpected or ()
    known |= {name.partition(".")[2] for name in known}
    expected = [n for n in held if n not in known and any(re.search(p, n) for p in patterns)]
    parts += [part for part in _sort_out(expected, model, held) if part.kind != "tensor"]
    if not parts:
        return ""
    tensors = [name for part in parts for name in part.tensors]
    verb = "are" if len(tensors) > 1 else "is"
    names = one_line(", ".join(part.name for part in parts))
    line = f"{count(tensors)} of its files {verb} not in this model: {names}"
    if cleared := _clear_announced(model):
        line += f"; in its config, {' and '.join(cleared)} is 0 now"
    return line


def count(tensors: list[str]) -> str:
    return "1 tensor" if len(tensors) == 1 else f"{len(tensors)} tensors"


def _clear_announced(model: Any) -> list[str]:
    """Sets the numbers of layers that predict more tokens to 0 in the config of a model without
    such layers, since its export has none; their names."""
    if any(_MORE_TOKENS.search(name) for name, _ in model.named_modules()):
        return []
    config, cleared = model.config, []
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        for name, value in [*vars(part).items()] if part else ():
            if _MORE_TOKENS.search(name) and "num" in name and isinstance(value, int) and value:
                setattr(part, name, 0)
                cleared.append(name)
    return cleared
