"""What the files of a pretrained model hold, and the model does not take.

transformers leaves out tensors that a model has no place for, and says so in a log line alone. A
branch that is not taken, such as another head, a vision tower or layers that predict more tokens,
changes nothing. A bias of a weight that is taken, or a layer of a list that is taken, does: the
model would compute another function than that of its files.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import safe_open

from samestep.base.console import one_line

_FORMATS = (
    "model.safetensors", "model-*.safetensors", "pytorch_model.bin", "pytorch_model-*.bin",
)  # fmt: skip
# A module with these words in its name follows the others, or replaces masked inputs.
_HEADS = re.compile("pool|head|classifier|score|relationship|logit|predict|qa_outputs|mask")
_PAGES, _PAGE = 64, 4096  # samples of a file, and their bytes
_EMPTY = 8  # of them in a row without content are too many


def list_files(folder: Path) -> list[Path]:
    """The files of weights that transformers loads from a folder, by the names that it looks for:
    not a variant, such as model.fp16.safetensors."""
    for name in _FORMATS:
        if found := sorted(folder.glob(name)):
            return found
    return []


def check_zeros(folder: Path) -> None:
    """Raises ValueError for a file of weights of which an eighth or more is zeros in one piece."""
    for path in list_files(folder):
        size, marks = path.stat().st_size, ""
        with open(path, "rb") as file:
            for number in range(_PAGES):
                file.seek(size * number // _PAGES)
                marks += "x" if any(file.read(min(_PAGE, size // _PAGES))) else "0"
        first = marks.find("0" * _EMPTY)
        if first >= 0:
            raise ValueError(
                f"task.model_name_or_path: {path} has zeros for weights from byte "
                f"{size * first // _PAGES:,} of {size:,}, as a download or a copy that was cut off "
                "leaves them; fetch it again"
            )


def _group(names: Iterable[str], model: Any) -> dict[str, list[str]]:
    """Groups names of tensors by their first part that the model does not know."""
    modules, prefix = dict(model.named_modules()), model.base_model_prefix
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        parts = name.split(".")
        if parts[0] == prefix and prefix not in modules:  # the model is the base model
            parts = parts[1:]
        elif parts[0] not in modules and f"{prefix}.{parts[0]}" in modules:
            parts = [prefix, *parts]  # the files have the base model alone
        depth = len(parts) - 1
        while depth and ".".join(parts[:depth]) not in modules:
            depth -= 1
        groups.setdefault(".".join(parts[: depth + 1]), []).append(".".join(parts))
    return groups


def _is_beside(group: str, tensors: list[str]) -> bool:
    """Whether a group belongs to what is loaded: a layer or a part of one, or a tensor or a small
    module beside others, which is no head."""
    owner, _, last = group.rpartition(".")
    if last.isdigit() or re.search(r"\.\d+(\.|$)", owner):
        return True
    depth = max(tensor.count(".") for tensor in tensors) - group.count(".")
    return bool(owner) and depth < 2 and not _HEADS.search(group)


def check_taken(model: Any, unexpected: Iterable[str], where: Path) -> str:
    """A line about whole branches that a model does not take from its files; empty: there are none.

    `unexpected`: what transformers calls so; `where` the files are. Raises ValueError for tensors
    beside those that are taken.
    """
    groups = _group(unexpected, model)
    beside = [
        name for group, tensors in groups.items() if _is_beside(group, tensors) for name in tensors
    ]
    if beside:
        raise ValueError(
            f"task.model_name_or_path: {where} has {_count(beside)} that its config.json has no "
            f"place for, beside those that are loaded: {one_line(', '.join(beside[:3]), 200)}; "
            "without them the model is another function: give the config.json of these weights"
        )
    return _describe(groups)


def forget_ignored(model: Any, where: Path) -> str:
    """A line about tensors that transformers leaves out without any report, such as layers that
    predict more tokens (mtp); empty: there are none. The config, and so that of the export, loses
    the numbers of such layers: the model has none.
    """
    patterns, names = model._keys_to_ignore_on_load_unexpected or (), set()
    for path in list_files(where) if patterns else ():
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                names |= {name for name in file.keys() if any(re.search(p, name) for p in patterns)}
    # A tensor beside others, such as a mask, is one that the model computes itself.
    groups = {group: held for group, held in _group(names, model).items() if held != [group]}
    roots = {re.sub(r".*\.\d+$", "nextn", each).rpartition(".")[2] for each in groups}
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        for key, value in [*vars(config).items()]:
            is_layers = "layer" in key and any(root in key for root in roots)
            if is_layers and isinstance(value, int | list):
                setattr(config, key, type(value)())
    return _describe(groups)


def _describe(groups: dict[str, list[str]]) -> str:
    if not groups:
        return ""
    tensors = sum(groups.values(), [])
    verb = "are" if len(tensors) > 1 else "is"
    return f"{_count(tensors)} of its files {verb} not in this model: {one_line(', '.join(groups))}"


def _count(tensors: list[str]) -> str:
    return "1 tensor" if len(tensors) == 1 else f"{len(tensors)} tensors"
