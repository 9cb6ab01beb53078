"""Packs what `state_dict()` gives as JSON and tensors, without pickle.

A checkpoint keeps the tensors in its files and the JSON in its manifest.
"""

from collections import Counter
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


def pack(state: Any, name: str) -> tuple[Any, Tensors]:
    """Return a state as JSON, and its tensors by names that begin with `name`.

    None, numbers, texts, tensors, and lists, tuples, dicts and Counters of them come back as they
    were; a number of NumPy comes back as one of Python. Raises ValueError for anything else.
    """
    tensors: Tensors = {}

    def convert(value: Any, name: str) -> Any:
        if torch.is_tensor(value):
            while name in tensors:  # of the keys 1 and "1"
                name += "'"
            tensors[name] = value
            return {"tensor": name}
        if hasattr(value, "dtype") and getattr(value, "ndim", None) == 0:
            value = value.item()
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, list | tuple):
            kind = "tuple" if isinstance(value, tuple) else "list"
            return {kind: [convert(entry, f"{name}.{i}") for i, entry in enumerate(value)]}
        if isinstance(value, dict):
            pairs = []
            for key, entry in value.items():
                pairs.append([convert(key, f"a key of {name}"), convert(entry, f"{name}.{key}")])
            return {"counter" if isinstance(value, Counter) else "dict": pairs}
        kind = type(value).__name__
        raise ValueError(f"{name} is a {kind}; a checkpoint holds tensors, numbers and texts only")

    return convert(state, name), tensors


def unpack(packed: Any, tensors: Tensors) -> Any:
    """Return the state that was packed; `tensors` has those that `tensor_names` lists."""
    if not isinstance(packed, dict):
        return packed
    ((kind, value),) = packed.items()
    if kind == "tensor":
        return tensors[value]
    if kind in ("dict", "counter"):
        state = {unpack(key, tensors): unpack(entry, tensors) for key, entry in value}
        return Counter(state) if kind == "counter" else state
    entries = [unpack(entry, tensors) for entry in value]
    return tuple(entries) if kind == "tuple" else entries


def tensor_names(packed: Any) -> list[str]:
    """List the tensors of a packed state by name."""
    if isinstance(packed, list):
        return [name for entry in packed for name in tensor_names(entry)]
    if not isinstance(packed, dict):
        return []
    ((kind, value),) = packed.items()
    return [value] if kind == "tensor" else tensor_names(value)
