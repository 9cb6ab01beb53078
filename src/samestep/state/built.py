"""What a program has built, compared at a resume: groups of the optimizer, schedulers, rows.

A setting that the library can see counts, whether or not the program has named it.
"""

import contextlib
import functools
import inspect
import types
from pathlib import Path
from typing import Any

import torch

from samestep.base.errors import UserError
from samestep.state.checkpoints import as_lines, differences
from samestep.state.optimizers import bare_scheduler, is_scheduler, settings_as_text
from samestep.state.provenance import short_hash
from samestep.state.weights import TrainingState

_DEPTH = 4  # of objects in objects, such as in the closure of a function


def describe(state: TrainingState) -> dict[str, Any]:
    """Return entries of all manifests: the settings of what was built, before the first step."""
    entries: dict[str, Any] = {"optimizer": settings_as_text(state.settings)}
    if state.layout.deepspeed or state.layout.stages > 1:  # each process has weights of its own
        return entries
    groups = {f"group {i}": names for i, names in enumerate(state.groups)}
    groups["those that train"] = state.trains
    entries["weights"] = {
        name: f"{len(names)} weights, {short_hash(repr(names).encode())}"
        for name, names in groups.items()
    }
    schedulers = {name: each for name, each in state.others().items() if is_scheduler(each)}
    entries["schedulers"] = {name: _settings_of(each) for name, each in schedulers.items()}
    return entries


def _settings_of(scheduler: Any) -> dict[str, str]:
    """Return the settings of a scheduler as texts, by name."""
    scheduler = bare_scheduler(scheduler)
    kind = type(scheduler).__name__
    settings = {n: v for n, v in vars(scheduler).items() if n != "optimizer"}
    return {"kind": kind} | {f"{kind}.{name}": _as_text(v) for name, v in settings.items()}


def _as_text(value: Any, depth: int = 0) -> str:
    """Write a value so that another text means another value: functions by source and closures."""
    if torch.is_tensor(value):
        return repr(value.tolist())
    if isinstance(value, list | tuple):
        return f"[{', '.join(_as_text(entry, depth + 1) for entry in value)}]"
    if isinstance(value, set | frozenset):  # whose order differs from start to start
        return f"{sorted(_as_text(entry, depth + 1) for entry in value)}"
    if isinstance(value, dict):
        return f"{ {str(n): _as_text(entry, depth + 1) for n, entry in value.items()} }"
    if isinstance(value, functools.partial):
        return f"partial {_as_text([value.func, *value.args, value.keywords], depth + 1)}"
    if isinstance(value, types.MethodType):
        return f"{value.__func__.__qualname__} {_as_text(value.__self__, depth + 1)}"
    if isinstance(value, types.FunctionType):
        held: list[Any] = [*(value.__defaults__ or ()), value.__kwdefaults__ or {}]
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty one
                held.append(cell.cell_contents)
        try:
            source = inspect.getsource(value).strip()
        except (OSError, TypeError):  # typed at a prompt
            source = repr((value.__code__.co_code, value.__code__.co_names))
        text = f"{source} {_as_text(held, depth + 1) if depth < _DEPTH else ''}"
        return f"{value.__qualname__} {short_hash(text.encode())}"
    kinds = (torch.nn.Module, torch.optim.Optimizer, types.ModuleType, type)
    if hasattr(value, "__dict__") and depth < _DEPTH and not isinstance(value, kinds):
        kept = {n: v for n, v in vars(value).items() if n != "optimizer"}
        return f"{type(value).__qualname__} {_as_text(kept, depth + 1)}"
    text = repr(value)
    is_address = isinstance(value, kinds) or " at 0x" in text
    return type(value).__qualname__ if is_address else text


def _flat(manifest: dict) -> dict[str, str]:
    """Return what `describe` has written, by the names of lines."""
    flat = {f"weights of {name}": text for name, text in manifest.get("weights", {}).items()}
    for i, group in enumerate(manifest.get("optimizer", ())):
        flat |= {f"optimizer group {i} {name}": text for name, text in group.items()}
    for name, settings in manifest.get("schedulers", {}).items():
        flat |= {f"{name} {setting}": text for setting, text in settings.items()}
    return flat


def compare(
    state: TrainingState, path: Path | None, saved: dict, manifest: dict, accept: bool
) -> dict[str, list]:
    """Return what is built in another way than in the run of a checkpoint, which has the manifest
    `saved`; raise UserError unless that is accepted. Note the schedulers that have changed."""
    parts = [n for n in ("weights", "optimizer", "schedulers") if n in saved and n in manifest]
    before, now = (_flat({n: each[n] for n in parts}) for each in (saved, manifest))
    changed = differences(before, now)
    known = {n: pair for n, pair in changed.items() if None not in pair}
    if state.sets_lr:
        known = {n: pair for n, pair in known.items() if not n.endswith((" lr", " initial_lr"))}
    known = {n: pair for n, pair in known.items() if not n.endswith(" class")}  # see weights.load
    known |= _compare_rows(saved, manifest)
    if known and not accept:
        raise UserError(
            f"{path} was made with other settings ({'; '.join(as_lines(known))}); give the old "
            "settings, or another folder, or accept_changes to resume with the new ones"
        )
    schedulers, were = manifest.get("schedulers", {}), saved.get("schedulers", {})
    state.changed = {name for name, each in schedulers.items() if were.get(name, each) != each}
    return known


def _compare_rows(saved: dict, manifest: dict) -> dict[str, list]:
    """Compare the digests of as many rows as both have."""
    before, now = (each.get("row_digests", {}) for each in (saved, manifest))
    if not (counts := before.keys() & now.keys()):
        return {}
    count = max(counts, key=int)
    name = f"data, {int(count):,} of {manifest['data']['samples']:,} rows compared"
    return differences({name: before[count]}, {name: now[count]})
