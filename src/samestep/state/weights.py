"""Weights and optimizer state: what a checkpoint saves, and how it is restored."""

import hashlib
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from samestep.base.console import print_on_main
from samestep.base.errors import UserError
from samestep.processes.alike import bit_sums
from samestep.processes.mesh import Layout
from samestep.processes.sharding import full_groups, is_dtensor
from samestep.state import deepspeed, packing
from samestep.state.optimizers import (
    NOT_SETTINGS,
    check_weights,
    optimizer_settings,
    restore,
    settings_as_text,
)
from samestep.state.tensor_files import TensorReader
from samestep.step.model import bare_model, bare_name

# A checkpoint holds these tensors. NAME is that of a weight in the task's model.
#   model.NAME               a weight that is trained, or a buffer
#   state.NAME.KEY           a tensor that the optimizer keeps for a weight, such as exp_avg
#   number.NAME.KEY          a number that it keeps for a weight
# What else training continues from is in the manifest, as `others`, and its tensors beside these:
#   registered.INDEX.NAME    of an object that accelerator.register_for_checkpointing was given
#   scheduler.INDEX.NAME     of a prepared scheduler of the learning rate
#   scaler.NAME              of fp16's loss scaler
#   group.INDEX.KEY          a setting of a parameter group, since some optimizers keep state there
# Random numbers are functions of the step.


def _saved_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return trained weights and buffers, tied weights once, by their first name.

    Frozen weights come with the pretrained model: a manifest holds their digest alone.
    """
    state, seen = {}, set()
    for name, values in model.state_dict(keep_vars=True).items():
        if not torch.is_tensor(values):
            raise ValueError(
                f"the model's state has {name}, which is no tensor, so it is not saved"
            )
        frozen = isinstance(values, torch.nn.Parameter) and not values.requires_grad
        if not frozen and id(values) not in seen:
            state[bare_name(name)] = values
        seen.add(id(values))
    return state


def frozen_digest(model: torch.nn.Module) -> str:
    """Return the SHA-256 of names and values of frozen weights, in hex; empty without any."""
    digest = None
    for name, values in model.named_parameters(remove_duplicate=False):  # tied: two names
        if not values.requires_grad:
            digest = digest or hashlib.sha256()
            digest.update(name.encode() + bit_sums(values).cpu().numpy().tobytes())
    return digest.hexdigest() if digest else ""


def as_tensor(value: Any, name: str) -> torch.Tensor:
    """Return a tensor, or a number as one; raise ValueError for anything else."""
    if torch.is_tensor(value):
        return value
    if not isinstance(value, float | int):
        kind = type(value).__name__
        raise ValueError(f"{name} is a {kind}, and a checkpoint holds tensors and numbers only")
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


@dataclass
class TrainingState:
    """What training continues from: the weights and the state of the optimizer."""

    accelerator: Accelerator
    module: torch.nn.Module  # prepared, as the optimizer
    optimizer: AcceleratedOptimizer
    layout: Layout
    settings: list[dict] = field(default_factory=list)  # as it was built: see optimizer_settings
    sets_lr: bool = True  # whether the loop sets the learning rate of each step

    def __post_init__(self):
        self.settings = self.settings or optimizer_settings(self.bare_optimizer())
        if not self.layout.deepspeed:
            names = {parameter: name for name, parameter in self.parameters().items()}
            check_weights(self.bare_optimizer(), names)
            self.pack_others()  # raises for what no checkpoint can hold
            self.left_out = _sums_of_buffers_left_out(self.model())

    def bare_optimizer(self) -> torch.optim.Optimizer:
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def model(self) -> torch.nn.Module:
        return bare_model(self.accelerator, self.module)

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return {bare_name(name): p for name, p in self.model().named_parameters()}

    def others(self) -> dict[str, Any]:
        """Return what has a state beside model and optimizer, by its name in a manifest."""
        objects = {f"registered.{i}": o for i, o in enumerate(self.accelerator._custom_objects)}
        objects |= {f"scheduler.{i}": s for i, s in enumerate(self.accelerator._schedulers)}
        if self.accelerator.scaler:
            objects["scaler"] = self.accelerator.scaler
        return objects

    def pack_others(self) -> tuple[dict, packing.Tensors]:
        """Pack the states of `others` and the optimizer's settings: JSON, and their tensors."""
        states = {name: owner.state_dict() for name, owner in self.others().items()}
        for i, (group, *_) in enumerate(full_groups(self.optimizer.param_groups)):
            states[f"group.{i}"] = {n: v for n, v in group.items() if n not in NOT_SETTINGS}
        packed, tensors = {}, {}
        for name, state in states.items():
            packed[name], state_tensors = packing.pack(state, name)
            tensors |= state_tensors
        return packed, tensors

    def read_others(self, reader: TensorReader, saved: dict) -> dict[str, Any]:
        """Read what `pack_others` has saved, by its names. saved: the checkpoint's manifest."""
        tensors, current = {}, self.pack_others()[1]
        for name in packing.tensor_names([*saved["others"].values()]):
            shape, dtype = reader.shapes[name], reader.dtypes[name]
            tensors[name] = torch.empty(shape, dtype=dtype)
            if name in current and current[name].shape == shape:  # on its device, and sharded
                tensors[name] = torch.empty_like(current[name], dtype=dtype)
        reader.read(tensors)
        return {n: packing.unpack(packed, tensors) for n, packed in saved["others"].items()}

    def collect(self) -> tuple[packing.Tensors, dict]:
        """Return all tensors of a checkpoint, by name, and `others` of its manifest. DTensors are
        sharded; other tensors are whole.

        Only the main process has the buffers, which may differ between processes: DDP sends those
        of the main process to the others. A buffer that changes and is in no checkpoint is named,
        once: it may be a cache, and a run is not to end for it.
        """
        for name, sums in _sums_of_buffers_left_out(self.model()).items():
            if sums != self.left_out.get(name, sums):
                del self.left_out[name]
                print_on_main(
                    f"warning: training changes the buffer {name}, which no checkpoint holds; a "
                    "resumed run begins with its first values: register it without persistent=False"
                )
        tensors = {}
        for name, values in _saved_tensors(self.model()).items():
            is_weight = isinstance(values, torch.nn.Parameter) or is_dtensor(values)
            if is_weight or self.accelerator.is_main_process:
                tensors[f"model.{name}"] = values
        others, other_tensors = self.pack_others()
        # Their numbers are those of the main process, too.
        is_main = self.accelerator.is_main_process
        tensors |= {n: t for n, t in other_tensors.items() if is_main or is_dtensor(t)}
        for name, parameter in self.parameters().items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if value is not None:
                    kind = "state" if torch.is_tensor(value) else "number"
                    value = as_tensor(value, f"the optimizer's {key} of {name}")
                    tensors[f"{kind}.{name}.{key}"] = value
        return tensors, others

    def check_finite(self, tensors: dict[str, torch.Tensor]) -> None:
        """Raise ValueError if a weight or a moment is not finite, or a buffer has a NaN.

        `tensors` are those of a checkpoint, or this process's parts of them. Buffers such as masks
        may hold infinities on purpose.
        """
        buffers = {f"model.{bare_name(name)}" for name, _ in self.model().named_buffers()}
        for name, values in tensors.items():
            kind, _, weight = name.partition(".")
            if kind in ("model", "state") and not _is_finite(values, infinite=name in buffers):
                owner, _, key = weight.rpartition(".")
                raise ValueError(
                    f"{f'{key} of {owner}' if kind == 'state' else weight} is not finite, so "
                    "nothing was saved; check the data, or resume from the newest checkpoint "
                    "with accept_changes and another learning rate"
                )

    def load(self, path: Path, saved: dict, manifest: dict) -> None:
        """Restore a checkpoint; raise ValueError if it does not fit.

        `saved` is its manifest, `manifest` that of this run. Settings of the optimizer that the
        code has changed since then are those of the code. The others are restored, since some
        optimizers keep state among them.
        """
        before, now = saved["optimizer"], settings_as_text(self.settings)
        kinds = [" and ".join(group["class"] for group in groups) for groups in (before, now)]
        if kinds[0] != kinds[1]:
            raise ValueError(
                f"{path} was trained with {kinds[0]}, and build_optimizer gives {kinds[1]} (one "
                "per group); restore that, or give another folder"
            )
        rates = [{group.get("initial_lr") for group in groups} for groups in (before, now)]
        if not self.sets_lr and {None} not in rates and rates[0] != rates[1]:
            raise ValueError(
                f"{path} has a scheduler with the learning rate {rates[0].pop()}, which it keeps, "
                f"and this program gives {rates[1].pop()}; give that one, or another folder"
            )
        self.load_weights(path, saved, manifest)
        if self.layout.deepspeed:  # it has restored all settings
            for group in self.optimizer.param_groups:
                i = group["number"]
                changed = [n for n in self.settings[i] if before[i].get(n) != now[i][n]]
                group.update({name: self.settings[i][name] for name in changed})
            return
        reader = TensorReader(path)
        self.load_moments(reader)
        others = self.read_others(reader, saved)
        for i, parts in enumerate(full_groups(self.optimizer.param_groups)):
            for key, value in others.get(f"group.{i}", {}).items():
                if before[i].get(key) != now[i].get(key) or (key == "lr" and self.sets_lr):
                    continue
                for part in parts:
                    old = part.get(key)
                    part[key] = value.to(old.device) if torch.is_tensor(old) else value

    def load_weights(self, path: Path, saved: dict, manifest: dict) -> None:
        """Restore the weights and buffers of a checkpoint, and what else evaluation depends on.

        Raises ValueError if they, or the frozen weights, do not fit. For the arguments see `load`.
        """
        _check_kind(path, saved, self.accelerator, self.layout)
        if self.layout.deepspeed:
            _check_frozen(path, saved, manifest)
            self.accelerator.load_state(path, load_module_strict=False)
            return
        reader, bare = TensorReader(path), self.model()
        objects = self.others()
        if "scaler" in objects and "scaler" not in saved["others"]:
            raise ValueError(
                f"{path} was not trained in fp16; give the YAML that it was trained with"
            )
        kinds = ("registered.", "scheduler.")
        before = [name for name in saved["others"] if name.startswith(kinds)]
        now = [name for name in objects if name.startswith(kinds)]
        if sorted(before) != sorted(now):
            raise ValueError(
                f"{path} has the state of {', '.join(before) or 'nothing'} beside the model, and "
                f"this program of {', '.join(now) or 'nothing'}; prepare and register the same "
                "objects in the same order, or give another folder"
            )
        tensors = {f"model.{name}": values for name, values in _saved_tensors(bare).items()}
        elsewhere = getattr(self.module, "elsewhere", {})  # weights of other stages of a pipeline
        _check_shapes(tensors | elsewhere, reader, path)
        _check_frozen(path, saved, manifest)
        reader.read(tensors)
        # Some modules build their state when they are asked for it, and take it back.
        names = {f"model.{bare_name(name)}": name for name in bare.state_dict()}
        state = {names[name]: values.detach() for name, values in tensors.items()}
        bare.load_state_dict(state, strict=False)
        states = self.read_others(reader, saved)
        for name, owner in objects.items():
            owner.load_state_dict(states[name])

    def load_moments(self, reader: TensorReader) -> None:
        """Give the optimizer the state that was saved for each weight, and no other."""
        tensors, states = {}, defaultdict(dict)
        groups = self.bare_optimizer().param_groups
        group_of = {p: group for group in groups for p in group["params"]}
        parameters = self.parameters()
        for saved in reader.shapes:
            kind, _, name = saved.partition(".")
            name, _, key = name.rpartition(".")
            if kind in ("state", "number") and name in parameters:
                p = parameters[name]
                tensors[saved] = _empty_moment(p, key, group_of.get(p, {}), reader, saved)
                states[p][key] = saved
        reader.read(tensors)
        for names in states.values():
            for key, saved in names.items():
                value = tensors[saved]
                names[key] = value.item() if saved.startswith("number.") else value
        restore(self.bare_optimizer(), states)


def _check_kind(path: Path, saved: dict, accelerator: Accelerator, layout: Layout) -> None:
    """Raise ValueError unless this YAML's kind can read a checkpoint, which has the manifest
    `saved`: those of DeepSpeed are for the same ZeRO stage and number of processes."""
    wanted, written = 0, deepspeed.stage_in(path)
    if layout.deepspeed:
        wanted = deepspeed.stage_of(accelerator)
    processes = saved["hardware"]["processes"]
    if wanted == written and (not wanted or processes == accelerator.num_processes):
        return
    kind, remedy = "a run without DeepSpeed", "continue with a YAML of that kind"
    if written:
        kind = f"DeepSpeed with zero_stage {written}"
        remedy += f", set num_processes to {processes}"
    raise ValueError(f"{path} is of {kind}; {remedy}, or give another folder")


def _check_frozen(path: Path, saved: dict, manifest: dict) -> None:
    """Raise ValueError if the frozen weights are others; the main process has their digest."""
    now = manifest.get("frozen_weights")
    if now is not None and saved.get("frozen_weights", "") != now:
        raise ValueError(
            f"{path} was trained with other pretrained weights; give those weights, or another "
            "folder"
        )


def _sums_of_buffers_left_out(model: torch.nn.Module) -> dict[str, list[int]]:
    """Return bit sums of the buffers that a model leaves out of its state_dict, by name."""
    sums = {}
    for prefix, module in model.named_modules():
        if "longrope" in str(getattr(module, "rope_type", "")):  # sets its own in each forward pass
            continue
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] in module._non_persistent_buffers_set:
                sums[bare_name(name)] = bit_sums(buffer).tolist()
    return sums


def _is_finite(values: torch.Tensor, infinite: bool = False) -> bool:
    """Return whether all values are finite; with `infinite` whether none is NaN.

    One pass without a temporary tensor: far faster than isfinite().all().
    """
    if values.is_complex():
        values = torch.view_as_real(values)
    if not values.is_floating_point() or not values.numel():
        return True
    if values.element_size() == 1:  # float8 has no aminmax
        values = values.float()
    ends = torch.stack(values.aminmax())  # NaN if any value is
    return not (ends.isnan() if infinite else ~ends.isfinite()).any()


def _empty_moment(
    parameter: torch.Tensor, key: str, group: dict, reader: TensorReader, name: str
) -> torch.Tensor:
    """Make a tensor to read a moment into: on the device, sharded as its weight if of its shape.

    key, name: of the moment, in the optimizer's state and in the file. group: that of its weight.
    `step`, a counter, is on the CPU unless the settings of its group say that it is on the device.
    Other moments of a sharded weight are replicated DTensors.
    """
    shape, dtype = reader.shapes[name], reader.dtypes[name]
    if key == "step" and not (group.get("capturable") or group.get("fused")):
        return torch.empty(shape, dtype=dtype)
    if shape == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    if not shape:
        return torch.empty(shape, dtype=dtype, device=parameter.device)
    return parameter.detach().new_empty(shape, dtype=dtype)


def _check_shapes(built: dict, reader: TensorReader, path: Path) -> None:
    """Raise UserError unless the checkpoint has the tensors of `built` with the same shapes."""
    dtypes = {n: v.dtype for n, v in built.items()}
    shapes = reader.shapes.items()
    saved = {n: str(tuple(shape)) for n, shape in shapes if n.startswith("model.")}
    built = {n: str(tuple(v.shape)) for n, v in built.items()}
    for name in sorted({*saved, *built}):
        before, now = (named.get(name, "missing") for named in (saved, built))
        if before == now:  # moments would keep the dtype of the checkpoint
            before, now = (str(named[name]) for named in (reader.dtypes, dtypes))
        if before != now:
            raise UserError(
                f"{path} does not fit the model: {name.removeprefix('model.')} is {before} in the "
                f"checkpoint and {now} in the model; give the settings and the task.py that it "
                "was made with, or another folder"
            )
