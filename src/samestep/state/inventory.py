"""What a step may change beside weights and moments: the attributes of the objects of a run.

The rule is about kinds. All that a model, an optimizer and registered objects hold in attributes is
looked at: tensors, generators, numbers, texts, flags, and collections of these. What moved since
the start of the run is in its checkpoints, under the path of the attribute, and comes back.

A tensor that a forward pass sets may be a result, such as activations or an auxiliary loss: it is
saved if the loss of the first batch is another with its old value; see training/trial.py.
"""

import functools
import types
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from samestep.base.errors import UserError, some
from samestep.processes.alike import hash_bits
from samestep.processes.sharding import local
from samestep.state import packing

_NO_STATE = (type, types.ModuleType, types.FunctionType, types.MethodType, functools.partial)
_NO_STATE += (types.BuiltinFunctionType, torch.nn.Parameter)
# Objects of these packages hold nothing that a step computes with.
_FOREIGN = ("accelerate.", "samestep.", "torch.distributed.", "threading", "logging", "concurrent.")
_OF_OPTIMIZERS = ("found_inf", "grad_scale", "_samestep_norm", "_opt_called")
_GENERATORS = packing.GENERATORS
NOTHING = "NoneType None"  # the text of what is not there


class Slot(NamedTuple):
    """A place of a value: an attribute of an object, or an entry of a dict of weights."""

    owner: Any
    name: str

    def get(self) -> Any:
        if isinstance(self.owner, dict):
            return self.owner.get(self.name)
        return getattr(self.owner, self.name, None)

    def replace(self, value: Any) -> None:
        """Set the value itself."""
        if isinstance(self.owner, dict):
            self.owner[self.name] = value
        else:
            setattr(self.owner, self.name, value)

    def remove(self) -> None:
        """Remove the value, as it was before a step added it."""
        if isinstance(self.owner, dict):
            self.owner.pop(self.name, None)
        elif self.name in vars(self.owner):
            delattr(self.owner, self.name)

    def set(self, value: Any) -> None:
        """Set what the value holds, where it has the form of the current one; else the value."""
        old = self.get()
        if isinstance(old, _GENERATORS):
            packing.set_generator(old, value)
        elif torch.is_tensor(old) and torch.is_tensor(value) and old.shape == value.shape:
            old.data.copy_(value)
        elif isinstance(old, list | deque) and isinstance(value, list | tuple | deque):
            old.clear()
            old.extend(value)
        elif isinstance(old, dict) and isinstance(value, dict):
            old.clear()
            old.update(value)
        else:
            self.replace(value)


@functools.cache
def _own_names() -> frozenset[str]:
    """Return the attributes that torch's modules and optimizers have of themselves."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1)
    return frozenset([*vars(torch.nn.Module()), *vars(optimizer), *_OF_OPTIMIZERS])


def _memory(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory, 0 if it has none."""
    return local(tensor).untyped_storage().data_ptr()


def _is_plain(value: Any, known: set[int]) -> bool:
    """Return whether a value is of the kinds that are compared. known: addresses of tensors that
    checkpoints have by other names."""
    if torch.is_tensor(value):
        return _memory(value) not in known
    if isinstance(value, dict):
        return all(_is_plain(entry, known) for entry in value.values())
    if isinstance(value, list | tuple | deque | set | frozenset):
        return all(_is_plain(entry, known) for entry in value)
    kinds = (bool, int, float, complex, str, bytes, np.ndarray, np.generic, *_GENERATORS)
    return value is None or isinstance(value, kinds)


def list_slots(
    roots: dict[str, Any], model: torch.nn.Module, others: Iterable[torch.Tensor]
) -> dict[str, Slot]:
    """List the attributes of these objects, and of those inside, by their paths.

    model: whose weights and buffers checkpoints have. Those of other modules are slots, but for
    `others`, which checkpoints have, too.
    """
    known = {_memory(t) for t in (*model.parameters(), *model.buffers(), *others)} - {0}
    inside, names = {*model.modules()}, _own_names()
    slots: dict[str, Slot] = {}
    seen: set[int] = set()

    def add(path: str, owner: Any, entries: Iterable[tuple[Any, Any]]) -> None:
        for name, value in entries:
            if _is_plain(value, known):
                slots[f"{path}.{name}"] = Slot(owner, name)
            else:
                visit(f"{path}.{name}", value)

    def visit(path: str, value: Any) -> None:
        kind = f"{type(value).__module__}."
        if id(value) in seen or isinstance(value, _NO_STATE) or kind.startswith(_FOREIGN):
            return
        seen.add(id(value))
        if isinstance(value, dict):
            add(path, value, [(name, entry) for name, entry in value.items()])
        elif isinstance(value, list | tuple | deque | set | frozenset):
            for place, entry in enumerate(value):
                visit(f"{path}.{place}", entry)
        elif isinstance(value, torch.nn.Module):
            add(path, value, [pair for pair in vars(value).items() if pair[0] not in names])
            if value not in inside:
                add(path, value._parameters, value._parameters.items())
                add(path, value._buffers, value._buffers.items())
            for name, child in value.named_children():
                visit(f"{path}.{name}", child)
        elif hasattr(value, "__dict__"):
            add(path, value, [pair for pair in vars(value).items() if pair[0] not in names])

    for path, root in roots.items():
        visit(path, root)
    return slots


def keep(value: Any) -> Callable[[], Any]:
    """Return a function that puts back what a value holds now, and returns the value."""
    if torch.is_tensor(value):
        kept = value.detach().clone()

        def put_back() -> Any:
            value.data.copy_(kept)
            return value

        return put_back
    if isinstance(value, _GENERATORS):
        state = packing.generator_state(value)
        return lambda: packing.set_generator(value, state)
    if isinstance(value, dict):
        entries = {name: keep(entry) for name, entry in value.items()}

        def put_back_entries() -> Any:
            value.clear()
            value.update({name: back() for name, back in entries.items()})
            return value

        return put_back_entries
    if isinstance(value, list | deque):
        parts = [keep(entry) for entry in value]

        def put_back_parts() -> Any:
            value.clear()
            value.extend([back() for back in parts])
            return value

        return put_back_parts
    return lambda: value


class Inventory:
    """The attributes of the objects of a run, and which of them moved since it began.

    roots: the objects by name. model: see list_slots. others(): tensors that checkpoints have.
    """

    def __init__(
        self, roots: dict[str, Any], model: torch.nn.Module,
        others: Callable[[], Iterable[torch.Tensor]],
    ):  # fmt: skip
        self.roots, self.model, self.others = roots, model, others
        self.first = self.texts()
        self.saved: set[str] = set()  # paths that checkpoints have
        self.hashed: set[str] = set()  # those of them that are state: the loss depends on them
        self.results: set[str] = set()  # tensors that a forward pass sets, and nothing reads
        self.has_remarked = False

    def list_now(self) -> dict[str, Slot]:
        """List the attributes as they are now, by path."""
        self.slots = list_slots(self.roots, self.model, self.others())
        return self.slots

    def keep(self) -> Callable[[], None]:
        """Return a function that puts all attributes back as they are now."""
        kept = {path: (slot, keep(slot.get())) for path, slot in self.list_now().items()}

        def put_back() -> None:
            for path, slot in self.list_now().items():
                if path not in kept:
                    slot.remove()
            for slot, back in kept.values():
                value = back()
                if slot.get() is not value:
                    slot.replace(value)

        return put_back

    def moved(self) -> list[str]:
        """Return the paths of what differs now from the start of the run."""
        texts = self.texts()
        return [path for path, text in texts.items() if text != self.first.get(path, NOTHING)]

    def texts(self) -> dict[str, str]:
        """Return a text for each attribute, by path, that differs where its value does."""
        slots = self.list_now()
        return {path: _fingerprint(path, slot.get()) for path, slot in slots.items()}

    def look(self) -> None:
        """Add what moved to what is saved."""
        for path in self.moved():
            if path not in self.saved | self.results:
                self.saved.add(path)
                if has_tensors(self.slots[path].get()):
                    self.hashed.add(path)

    def remarks(self) -> list[str]:
        """Return lines about tensors that are left out, each once."""
        if not self.results or self.has_remarked:
            return []
        self.has_remarked = True
        return [
            f"left out of checkpoints, since the loss of a batch does not depend on what they held "
            f"before: {some(sorted(self.results), 3)}"
        ]

    def pack(self) -> tuple[dict[str, Any], packing.Tensors]:
        """Pack what is saved as JSON, by path, and its tensors. Raises ValueError for what no
        checkpoint can hold."""
        packed, tensors = {}, {}
        for path in sorted(self.saved & self.slots.keys()):
            name = f"attribute.{path}"
            packed[name], of_path = packing.pack(self.slots[path].get(), name)
            tensors |= of_path
        return packed, tensors

    def restore(self, states: dict[str, Any], hashed: list[str]) -> None:
        """Restore what `pack` has saved, by its names, of which `hashed` are state."""
        owners = {}
        for path, slot in self.list_now().items():
            owners[path.rpartition(".")[0]] = slot.owner
            owners[path] = slot.owner  # of a dict of weights
        for name, value in states.items():
            path = name.removeprefix("attribute.")
            owner, _, attribute = path.rpartition(".")
            if path in self.slots:
                slot = self.slots[path]
            elif owner in owners or owner in self.roots:
                slot = Slot(owners.get(owner, self.roots.get(owner)), attribute)
            else:
                raise UserError(
                    f"the checkpoint has {path}, and this program has no {owner}; make the same "
                    "objects, or give another folder"
                )
            slot.set(value)
            self.saved.add(path)
        self.hashed |= {*hashed}


def has_tensors(value: Any) -> bool:
    """Return whether tensors are in a value."""
    if isinstance(value, dict):
        return any(map(has_tensors, value.values()))
    if isinstance(value, list | tuple | deque):
        return any(map(has_tensors, value))
    return torch.is_tensor(value) or isinstance(value, np.ndarray)


def _fingerprint(path: str, value: Any) -> str:
    """Return a text that differs where the value does."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return f"{type(value).__name__} {value!r}"
    packed, tensors = packing.pack(value, path)
    return f"{packed} {hash_bits([*tensors.values()])}"
