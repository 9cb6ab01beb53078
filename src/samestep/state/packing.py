"""Packs what `state_dict()` gives, and values of attributes, as JSON and tensors, without pickle.

A checkpoint keeps the tensors in its files and the JSON in its manifest.
"""

import enum
import random
from collections import Counter, deque
from typing import Any

import numpy as np
import torch

from samestep.processes.alike import is_dense

Tensors = dict[str, torch.Tensor]
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def generator_state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state()


def set_generator(generator: Any, state: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state.cpu() if torch.is_tensor(state) else state)
    return generator


def _is_numeric(array: np.ndarray) -> bool:
    return array.dtype.kind in "biuf" and array.dtype.itemsize <= 8


def pack(state: Any, name: str) -> tuple[Any, Tensors]:
    """Return a state as JSON, and its tensors by names that begin with `name`.

    None, numbers, texts, bytes, tensors, arrays, and lists, tuples, sets, deques, dicts and
    Counters of them come back as they were; a number of NumPy comes back as one of Python, a member
    of an Enum as its name; of a generator its state does. Raises ValueError for anything else.
    """
    tensors: Tensors = {}

    def convert(value: Any, name: str) -> Any:
        if isinstance(value, GENERATORS):
            value = generator_state(value)
        if isinstance(value, enum.Enum):
            value = value.name
        if isinstance(value, np.ndarray) and value.ndim and _is_numeric(value):
            return {"array": convert(torch.from_numpy(value.copy()), name)["tensor"]}
        if torch.is_tensor(value) and is_dense(value):
            while name in tensors:  # of the keys 1 and "1"
                name += "'"
            tensors[name] = value.detach()
            return {"tensor": name}
        if hasattr(value, "dtype") and getattr(value, "ndim", None) == 0:
            value = value.item()
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, complex):
            return {"complex": [value.real, value.imag]}
        if isinstance(value, bytes):
            return {"bytes": value.hex()}
        if isinstance(value, set | frozenset):
            return {"set": sorted((convert(entry, name) for entry in value), key=repr)}
        if isinstance(value, list | tuple | deque):
            kind = next(kind for kind in (list, tuple, deque) if isinstance(value, kind)).__name__
            return {kind: [convert(entry, f"{name}.{i}") for i, entry in enumerate(value)]}
        if isinstance(value, dict):
            pairs = []
            for key, entry in value.items():
                pairs.append([convert(key, f"a key of {name}"), convert(entry, f"{name}.{key}")])
            return {"counter" if isinstance(value, Counter) else "dict": pairs}
        kind = type(value).__name__
        if torch.is_tensor(value):
            kind = "sparse, quantized or nested tensor"
        raise ValueError(f"{name} is a {kind}; a checkpoint holds tensors, numbers and texts only")

    return convert(state, name), tensors


def pack_all(states: dict[str, Any]) -> tuple[dict[str, Any], Tensors]:
    """Pack states by their names: JSON of each, and the tensors of all."""
    packed, tensors = {}, {}
    for name, state in states.items():
        packed[name], of_state = pack(state, name)
        tensors |= of_state
    return packed, tensors


def unpack(packed: Any, tensors: Tensors) -> Any:
    """Return the state that was packed; `tensors` has those that `tensor_names` lists."""
    if not isinstance(packed, dict):
        return packed
    ((kind, value),) = packed.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "array":
        return tensors[value].cpu().numpy()
    if kind == "complex":
        return complex(*value)
    if kind == "bytes":
        return bytes.fromhex(value)
    if kind in ("dict", "counter"):
        state = {unpack(key, tensors): unpack(entry, tensors) for key, entry in value}
        return Counter(state) if kind == "counter" else state
    entries = [unpack(entry, tensors) for entry in value]
    make = {"list": list, "tuple": tuple, "set": set, "deque": deque}[kind]
    return make(entries)


def tensor_names(packed: Any) -> list[str]:
    """List the tensors of a packed state by name."""
    if isinstance(packed, list):
        return [name for entry in packed for name in tensor_names(entry)]
    if not isinstance(packed, dict):
        return []
    ((kind, value),) = packed.items()
    return [value] if kind in ("tensor", "array") else tensor_names(value)
