"""What a step may change beside weights and moments: the attributes of the objects of a run.

The rule is about kinds. All that a model, an optimizer and registered objects hold in attributes is
looked at: tensors, generators, numbers, texts, flags, and collections of these. What moved since
the start of the run is in its checkpoints, under the path of the attribute, and comes back.

A tensor that a forward pass sets may be a result, such as activations or an auxiliary loss: it is
left out if a batch sets it to the same, whatever batch came before; see training/trial.py.
"""

import enum
import functools
import hashlib
import operator
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from samestep.base.errors import UserError, some
from samestep.processes.alike import hash_bits, is_dense
from samestep.processes.sharding import local
from samestep.state import packing

_NO_STATE = (type, types.ModuleType, types.FunctionType, types.MethodType, functools.partial)
_NO_STATE += (types.BuiltinFunctionType, torch.nn.parallel.DistributedDataParallel)
# Objects of these packages hold nothing that a step computes with.
_FOREIGN = ("accelerate.", "samestep.", "torch.distributed.", "threading", "logging", "concurrent.")
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_HOLDERS = (*_PLAIN, enum.Enum, np.ndarray, np.generic, *packing.GENERATORS)
_LISTS = (list, tuple, deque, set, frozenset)
COLLECTIONS = (dict, *_LISTS)
NOTHING = "NoneType None"  # the text of what is not there


class Slot(NamedTuple):
    """A place of a value: an attribute of an object, or an entry of a dict."""

    owner: Any
    name: Any

    def get(self) -> Any:
        if isinstance(self.owner, dict):
            return self.owner.get(self.name)
        return getattr(self.owner, self.name, None)

    def set(self, value: Any) -> None:
        """Set the value; one that is there is left, since an attribute may be read-only."""
        if self.values().get(self.name, NOTHING) is value:
            return
        if isinstance(self.owner, dict):
            self.owner[self.name] = value
        else:
            try:
                setattr(self.owner, self.name, value)
            except AttributeError:  # of a frozen dataclass, whose cached_property has changed
                object.__setattr__(self.owner, self.name, value)

    def remove(self) -> None:
        held = self.owner if isinstance(self.owner, dict) else getattr(self.owner, "__dict__", {})
        if self.name in held:
            del held[self.name]
        elif self.name in self.values():  # a slot
            object.__delattr__(self.owner, self.name)

    def values(self) -> dict[Any, Any]:
        return self.owner if isinstance(self.owner, dict) else _attributes(self.owner)


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object by name, also those in `__slots__`."""
    held, slots = getattr(value, "__dict__", {}), _slots_of(value.__class__)
    if not slots:
        return held
    return held | {name: getattr(value, name) for name in slots if hasattr(value, name)}


@functools.cache
def _slots_of(kind: type) -> tuple[str, ...]:
    """Return the names in `__slots__`, but for the standard library's, which caches there what it
    computes."""
    found: list[str] = []
    if kind.__module__.partition(".")[0] in sys.stdlib_module_names:
        return ()
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        for name in [names] if isinstance(names, str) else names:
            if name.startswith("__") and not name.endswith("__"):
                name = f"_{base.__name__.lstrip('_')}{name}"
            found.append(name)
    return tuple(name for name in dict.fromkeys(found) if name not in ("__dict__", "__weakref__"))


def _list_datasets(rows: Any) -> dict[str, Any]:
    """List a dataset and those inside, as in Subset and ConcatDataset, by their paths."""
    found, seen, to_visit = {}, set(), [("rows", rows)]
    while to_visit:
        path, dataset = to_visit.pop()
        if id(dataset) in seen or not hasattr(dataset, "__dict__"):
            continue
        seen.add(id(dataset))
        found[path] = dataset
        for name, value in vars(dataset).items():
            parts = {f"{path}.{name}": value}
            if isinstance(value, list | tuple) and value and _is_dataset(value[0]):
                parts = {f"{path}.{name}.{i}": each for i, each in enumerate(value)}
            to_visit += [part for part in parts.items() if _is_dataset(part[1])]
    return found


def _is_dataset(value: Any) -> bool:
    """Return whether an object has len() and [i], and is no collection of Python's or torch's."""
    others = (*COLLECTIONS, *_HOLDERS, torch.Tensor, torch.nn.Module)
    has_rows = hasattr(value, "__getitem__") and hasattr(value, "__len__")
    return has_rows and not isinstance(value, others)


def _numbers_of(datasets: dict[str, Any]) -> dict[str, Slot]:
    """List the numbers, texts and flags of these datasets, by path."""
    slots = {}
    for path, dataset in datasets.items():
        for name, value in vars(dataset).items():
            if isinstance(value, _PLAIN):
                slots[f"{path}.{name}"] = Slot(dataset, name)
    return slots


def moved_by(rows: Any, read: Callable[[], Any]) -> tuple[Any, set[str]]:
    """Call a function that reads rows; return what it returns, and the paths of the numbers of the
    rows that it moved: those of a cache, or a count, and not of the loop."""

    def texts() -> dict[str, str]:
        slots = _numbers_of(_list_datasets(rows))
        return {path: _as_text(path, slot.get()) for path, slot in slots.items()}

    before, result, after = texts(), read(), texts()
    return result, {path for path, text in after.items() if before.get(path, NOTHING) != text}


@functools.cache
def _own_names() -> frozenset[str]:
    """Return the attributes that torch's modules and optimizers, and ours, have of themselves."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1)
    ours = ("found_inf", "grad_scale", "_samestep_norm", "_opt_called")
    return frozenset([*vars(torch.nn.Module()), *vars(optimizer), *ours])


def _is_private_flag(slot: Slot) -> bool:
    return f"{slot.name}"[:1] == "_" and isinstance(slot.get(), bool)


def memory_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory, 0 if it has none."""
    return local(tensor).untyped_storage().data_ptr() if is_dense(tensor) else 0


def _is_plain(value: Any, known: set[int], around: tuple[int, ...] = ()) -> bool:
    """Return whether a value is compared. known: addresses of tensors that checkpoints have.
    around: the collections that it lies in, of which none is a part of itself."""
    if torch.is_tensor(value):
        return memory_of(value) not in known
    if isinstance(value, COLLECTIONS):
        around = (*around, id(value))
        entries = value.values() if isinstance(value, dict) else value
        return all(id(e) not in around and _is_plain(e, known, around) for e in entries)
    return isinstance(value, _HOLDERS)


def list_slots(
    roots: dict[str, Any], model: torch.nn.Module, others: Iterable[torch.Tensor],
    is_skipped: Callable[[Any], bool] = lambda value: False,
) -> tuple[dict[str, Slot], dict[str, Any]]:  # fmt: skip
    """List the attributes of these objects and of those inside, by their paths; return the objects
    by theirs, too.

    model: whose weights and buffers checkpoints have. Those of other modules are slots, but for
    `others`, which checkpoints have, too. is_skipped: of an object inside, whether it is left out.
    """
    known = {memory_of(t) for t in (*model.parameters(), *model.buffers(), *others)} - {0}
    of_model, names = {*model.modules()}, _own_names()
    slots: dict[str, Slot] = {}
    objects: dict[str, Any] = {}
    seen: set[int] = set()
    to_visit = [*reversed(roots.items())]
    while to_visit:
        path, value = to_visit.pop()
        foreign = f"{type(value).__module__}.".startswith(_FOREIGN)
        is_module = isinstance(value, torch.nn.Module)  # FSDP2's are of classes of its own
        if id(value) in seen or isinstance(value, _NO_STATE) or (foreign and not is_module):
            continue
        if path not in roots and is_skipped(value):
            continue
        seen.add(id(value))
        objects[path] = value
        held: list[tuple[Any, dict]] = []
        inside: list[tuple[str, Any]] = []
        if isinstance(value, dict):
            held = [(value, value)]
        elif isinstance(value, _LISTS):
            inside = [(f"{path}.{place}", entry) for place, entry in enumerate(value)]
        else:
            held = [(value, {n: v for n, v in _attributes(value).items() if n not in names})]
        if is_module:
            held += [(each, each) for each in (value._parameters, value._buffers)
                     if value not in of_model]  # fmt: skip
            held.append((value, dict(value.named_children())))
        for owner, entries in held:
            for name, entry in [*entries.items()]:
                if _is_plain(entry, known):
                    slots[f"{path}.{name}"] = Slot(owner, name)
                else:
                    inside.append((f"{path}.{name}", entry))
        to_visit += reversed(inside)
    return slots, objects


def count_hooks(model: torch.nn.Module) -> int:
    """Return how many hooks of forward passes there are."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def copy_of(value: Any) -> Any:
    """Copy a value with what it holds; of a generator its state."""
    if torch.is_tensor(value):
        return value.detach().clone()
    if isinstance(value, packing.GENERATORS):
        return packing.generator_state(value)
    if isinstance(value, dict):
        return {name: copy_of(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple | deque):
        return [copy_of(entry) for entry in value]
    is_fixed = isinstance(value, np.ndarray) and not value.flags.writeable
    return value.copy() if isinstance(value, np.ndarray | set) and not is_fixed else value


def _are_same(one: list, other: list) -> bool:
    """Return whether lists hold the same objects."""
    return len(one) == len(other) and all(map(operator.is_, one, other))


def fill(old: Any, value: Any) -> Any:
    """Put a copy of a value into what was copied; return that, or the value if it has another
    form. What holds the same is left, since it may be read-only."""
    if isinstance(old, packing.GENERATORS):
        return packing.set_generator(old, value)
    if isinstance(old, enum.Enum) and isinstance(value, str):
        return type(old)[value]
    if torch.is_tensor(old) and torch.is_tensor(value):
        if not is_dense(old) or 0 in old.stride():  # one that was expanded cannot be written
            return old if hash_bits([old]) == hash_bits([value]) else copy_of(value)
        if old.shape == value.shape:
            old.data.copy_(value)
            return old
    if isinstance(old, np.ndarray) and isinstance(value, np.ndarray) and old.shape == value.shape:
        if old.flags.writeable:
            old[...] = value
            return old
    if isinstance(old, dict) and isinstance(value, dict):
        entries = {name: fill(old.get(name), entry) for name, entry in value.items()}
        if not _are_same([*old, *old.values()], [*entries, *entries.values()]):
            old.clear()
            old.update(entries)
        return old
    if isinstance(old, set | frozenset) and isinstance(value, set | frozenset):
        if old == value:
            return old
        if isinstance(old, frozenset):
            return type(old)(value)
        old.clear()
        old.update(value)
        return old
    if isinstance(old, list | tuple | deque) and isinstance(value, list | tuple | deque):
        parts = [fill(old[i] if i < len(old) else None, each) for i, each in enumerate(value)]
        if _are_same([*old], parts):
            return old
        if isinstance(old, tuple):
            # One with names takes its entries as arguments.
            return type(old)(*parts) if hasattr(old, "_fields") else type(old)(parts)
        old.clear()
        old.extend(parts)
        return old
    return copy_of(value)


class Inventory:
    """The attributes of the objects of a run, and which of them moved since it began.

    roots: the objects by name. model: see list_slots. others(): tensors that checkpoints have.
    """

    def __init__(
        self, roots: dict[str, Any], model: torch.nn.Module,
        others: Callable[[], Iterable[torch.Tensor]],
    ):  # fmt: skip
        self.roots, self.model, self.others = roots, model, others
        self.num_workers = 0  # see watch_rows
        self.datasets: dict[str, Any] = {}  # the rows and the datasets inside, by path
        self.by_reading: set[str] = set()
        self.read: dict[str, Any] = {}  # see note_read
        self.later: dict[str, Any] = {}
        # Whether the first batch, or an evaluation before it, installed hooks: private flags say
        # so, such as those of transformers' output_hidden_states, and are no state of the run.
        self.installs, self.hooks = False, count_hooks(model)
        self.first = self.texts()
        self.saved: set[str] = set()  # paths that checkpoints have
        self.hashed: set[str] = set()  # those of them that are state: the loss depends on them
        self.results: set[str] = set()  # tensors that each batch sets anew

    def watch_rows(self, rows: Any, num_workers: int, by_reading: set[str]) -> None:
        """Look at the numbers, texts and flags of the rows, too, such as the level of a curriculum.

        The rows themselves are compared at a resume. Workers have rows of their own. by_reading:
        what reading moves, which is left out.
        """
        self.num_workers, self.by_reading = num_workers, by_reading
        self.datasets = _list_datasets(rows)
        self.first |= {n: text for n, text in self.texts().items() if n.startswith("rows.")}

    def list_now(self) -> dict[str, Slot]:
        """List the attributes as they are now, by path."""
        self.slots, self.objects = list_slots(self.roots, self.model, self.others())
        self.slots |= self.slots_of_rows()
        if self.installs:
            self.slots = {p: slot for p, slot in self.slots.items() if not _is_private_flag(slot)}
        return self.slots

    def slots_of_rows(self) -> dict[str, Slot]:
        """List the numbers, texts and flags of the rows that reading does not move, by path."""
        slots = _numbers_of(self.datasets)
        return {path: slot for path, slot in slots.items() if path not in self.by_reading}

    def note_read(self) -> None:
        """Note the rows' numbers with which the next step was read; those that the loop had set
        after that, before the checkpoint of which the run resumes, count from now on."""
        slots = self.slots_of_rows()
        self.read = {path: slot.get() for path, slot in slots.items()}
        for path in self.later.keys() & slots.keys():
            slots[path].set(self.later[path])
        self.later = {}

    def keep(self) -> Callable[[], None]:
        """Return a function that puts all attributes back as they are now."""
        values = [(slot, slot.get()) for slot in self.list_now().values()]
        kept, paths = [(slot, value, copy_of(value)) for slot, value in values], {*self.slots}

        def put_back() -> None:
            for path, slot in self.list_now().items():
                if path not in paths:
                    slot.remove()
            for slot, value, copy in kept:
                if not (self.installs and _is_private_flag(slot)):
                    slot.set(fill(value, copy))

        return put_back

    def texts(self) -> dict[str, str]:
        """Return a text for each attribute, by path, that differs where its value does."""
        slots = self.list_now()
        return {path: _as_text(path, slot.get()) for path, slot in slots.items()}

    def look(self) -> None:
        """Add what moved since the start of the run to what is saved. Raises UserError for an
        optimizer inside of another one, whose state would be lost, and for rows that moved and of
        which workers have copies."""
        read = {path: _as_text(path, value) for path, value in self.read.items()}
        for path, text in self.texts().items():
            texts = {text, read.get(path, text)}
            if texts == {self.first.get(path, NOTHING)} or path in self.saved | self.results:
                continue
            self.saved.add(path)
            if has_tensors(self.slots[path].get()):
                self.hashed.add(path)
        moved = [path for path in self.saved if path.startswith("rows.")]
        if moved and self.num_workers:
            raise UserError(
                f"the loop changes {some(sorted(moved), 3)}, and each of the {self.num_workers} "
                "workers has rows of its own: give num_workers=0"
            )
        outer = self.roots["optimizer"]
        for path, inner in self.objects.items():
            is_other = isinstance(inner, torch.optim.Optimizer) and inner is not outer
            if is_other and inner.state and inner.state is not outer.state:
                raise UserError(
                    f"no checkpoint would hold the state of {path}, an optimizer inside of another "
                    "object: write one class that keeps all in its own `state`, by weight"
                )

    def pack(self) -> tuple[dict[str, Any], packing.Tensors]:
        """Pack what is saved: JSON, by path, and tensors. ValueError for what cannot be saved.

        Of rows that is what the next step was read with, and in `rows` what the loop has set since.
        """
        now = {path: self.slots[path].get() for path in sorted(self.saved & self.slots.keys())}
        read = {path: value for path, value in self.read.items() if path in now}
        later = {path: now[path] for path, value in read.items() if now[path] != value}
        states = {f"attribute.{path}": value for path, value in (now | read).items()}
        return packing.pack_all(states | ({"rows": later} if later else {}))

    def restore(self, states: dict[str, Any], hashed: list[str]) -> None:
        """Restore what `pack` has saved, by path, of which `hashed` are state."""
        self.list_now()
        objects = self.objects | self.datasets
        for path, value in states.items():
            owner, _, name = path.rpartition(".")
            if path not in self.slots and owner not in objects:
                raise UserError(
                    f"the checkpoint has {path}, and this program has no {owner}; make the same "
                    "objects, or give another folder"
                )
            slot = self.slots.get(path) or Slot(objects[owner], name)
            slot.set(fill(slot.get(), value))
            self.saved.add(path)
        self.hashed |= {*hashed}


def has_tensors(value: Any) -> bool:
    if isinstance(value, COLLECTIONS):
        return any(map(has_tensors, value.values() if isinstance(value, dict) else value))
    return torch.is_tensor(value) or isinstance(value, np.ndarray)


def _as_text(path: str, value: Any) -> str:
    """Return a text that differs where the value does."""
    if isinstance(value, _PLAIN):
        return f"{type(value).__name__} {value!r}"
    try:
        packed, tensors = packing.pack(value, path)
    except ValueError:  # no checkpoint can hold it, which matters once it moves
        if isinstance(value, COLLECTIONS):
            entries = value.items() if isinstance(value, dict) else value
            return repr([_as_text(path, entry) for entry in entries])
        if isinstance(value, np.ndarray):
            return f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
        return hash_bits([value]) if torch.is_tensor(value) else repr(value)
    return f"{packed} {hash_bits([*tensors.values()])}"
