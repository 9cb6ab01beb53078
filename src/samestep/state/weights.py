"""Weights and optimizer state: what a checkpoint saves, and how it is restored."""

import hashlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from samestep.base.console import print_on_main
from samestep.base.errors import UserError, some
from samestep.processes import alike
from samestep.processes.alike import bit_sums, hash_bits
from samestep.processes.mesh import Layout
from samestep.processes.ranks import Ranks
from samestep.processes.sharding import full_groups, is_dtensor
from samestep.state import deepspeed, inventory, optimizers, packing
from samestep.state.inventory import Inventory, Slot
from samestep.state.tensor_files import TensorReader, check_kind
from samestep.step.model import bare_model, bare_name

# A checkpoint holds these tensors. NAME is that of a weight in the task's model.
#   model.NAME               a weight that training has changed, or a buffer
#   state.NAME.KEY           a tensor that the optimizer keeps for a weight, such as exp_avg
#   number.NAME.KEY          a number that it keeps for a weight
# What else training continues from is in the manifest, as `others`, and its tensors beside these:
#   registered.INDEX.NAME    of an object that accelerator.register_for_checkpointing was given
#   scheduler.INDEX.NAME     of a prepared scheduler of the learning rate
#   scaler.NAME              of fp16's loss scaler
#   group.INDEX.KEY          a setting of a parameter group, since some optimizers keep state there
#   optimizer.KEY            what the optimizer's `state` has beside that of weights
#   attribute.PATH           of an object, that a step has changed: see inventory.py
#   rows                     numbers of rows that the loop had set since the next step was read
# Random numbers are functions of the step.


def _list_tensors(model: torch.nn.Module) -> dict[str, tuple[torch.Tensor, bool]]:
    """Return weights and buffers, tied weights once, by their first name; with each whether it
    comes with the model, frozen or in no state_dict: a checkpoint has it once it has changed."""
    tensors, seen = {}, set()
    for name, values in model.state_dict(keep_vars=True).items():
        if not torch.is_tensor(values):
            raise ValueError(
                f"the model's state has {name}, which is no tensor, so it is not saved"
            )
        if id(values) not in seen:
            is_frozen = isinstance(values, torch.nn.Parameter) and not values.requires_grad
            tensors[bare_name(name)] = values, is_frozen
        seen.add(id(values))
    for name, (module, own) in _owners_left_out(model).items():
        tensors[name] = module._buffers[own], True
    return tensors


def frozen_digest(model: torch.nn.Module) -> str:
    """Return the SHA-256 of names and values of frozen weights, in hex; empty without any."""
    digest = None
    for name, values in model.named_parameters(remove_duplicate=False):  # tied: two names
        if not values.requires_grad:
            digest = digest or hashlib.sha256()
            digest.update(name.encode() + bit_sums(values).cpu().numpy().tobytes())
    return digest.hexdigest() if digest else ""


@dataclass
class TrainingState:
    """What training continues from: the weights and the state of the optimizer."""

    accelerator: Accelerator
    module: torch.nn.Module  # prepared, as the optimizer
    optimizer: AcceleratedOptimizer
    ranks: Ranks
    settings: list[dict] = field(default_factory=list)  # as it was built: see optimizer_settings
    sets_lr: bool = True  # whether the loop sets the learning rate of each step
    exact: bool = False  # whether processes have the same buffers, too
    alone: set[str] = field(default_factory=set)  # of what was collected: what others do not have
    # Names of schedulers whose settings were changed since the checkpoint, which is accepted.
    changed: set[str] = field(default_factory=set)

    def __post_init__(self):
        inner, self.layout = self.bare_optimizer(), self.ranks.layout
        self.settings = self.settings or optimizers.optimizer_settings(inner)
        if self.layout.deepspeed:
            return
        model, parameters = self.model(), self.parameters()
        optimizers.check_weights(inner, {parameter: name for name, parameter in parameters.items()})
        optimizers.check_all_in_optimizer(inner, parameters)
        self.groups = [self.names_of(group) for group in full_groups(inner.param_groups)]
        self.trains = [name for name, p in parameters.items() if p.requires_grad]
        self.form = _form_of(model)
        listed = _list_tensors(model).items()
        self.given = {name: hash_bits([values]) for name, (values, comes) in listed if comes}
        roots = {"model": model, "optimizer": inner}
        for name, each in self.others().items():
            if name.startswith("registered.") and not hasattr(each, "get_last_lr"):
                roots[name] = each
        self.looks, self.held, self.rates = 0, [], []  # see `check`, `remarks`
        self.inventory = Inventory(roots, model, lambda: self.pack_registered()[1].values())

    def names_of(self, parts: list[dict]) -> list[str]:
        """Return the names of the weights of a parameter group, which may be in parts."""
        names = {parameter: name for name, parameter in self.parameters().items()}
        return [names[p] for part in parts for p in part["params"]]

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

    def pack_registered(self) -> tuple[dict, packing.Tensors]:
        """Pack the states of `others`: JSON, and their tensors."""
        return packing.pack_all({name: owner.state_dict() for name, owner in self.others().items()})

    def pack_others(self) -> tuple[dict, packing.Tensors]:
        """Pack what has a state beside weights and moments: JSON, and its tensors."""
        states: dict[str, Any] = {}
        for i, (group, *_) in enumerate(full_groups(self.optimizer.param_groups)):
            left_out = optimizers.NOT_SETTINGS
            states[f"group.{i}"] = {n: v for n, v in group.items() if n not in left_out}
        state = self.bare_optimizer().state
        states["optimizer"] = {key: v for key, v in state.items() if not torch.is_tensor(key)}
        packed, tensors = packing.pack_all(states)
        for more, more_tensors in (self.pack_registered(), self.inventory.pack()):
            packed |= more
            tensors |= more_tensors
        return packed, tensors

    def read_others(self, reader: TensorReader, saved: dict) -> dict[str, Any]:
        """Read what `pack_others` has saved, by its names. saved: the checkpoint's manifest."""
        tensors, current = {}, self.pack_others()[1]
        for name in packing.tensor_names([*saved["others"].values()]):
            shape, dtype = reader.shapes[name], reader.dtypes[name]
            is_attribute = name.startswith("attribute.")  # others move their tensors themselves
            device = self.accelerator.device if is_attribute else None
            tensors[name] = torch.empty(shape, dtype=dtype, device=device)
            if name in current and current[name].shape == shape:  # on its device, and sharded
                tensors[name] = torch.empty_like(current[name], dtype=dtype)
        reader.read(tensors)
        return {n: packing.unpack(packed, tensors) for n, packed in saved["others"].items()}

    def check(self) -> None:
        """Raise UserError for what no checkpoint could hold, or no resumed run load."""
        model, inner = self.model(), self.bare_optimizer()
        if _form_of(model) != self.form:
            names = [name for name, *_ in {*_form_of(model)} ^ {*self.form}]
            raise UserError(
                f"the model has other weights or modules than at the start: "
                f"{some(sorted({*names}), 3)}; no run could load them: change the model before "
                "accelerator.prepare, and no more"
            )
        optimizers.check_all_in_optimizer(inner, self.parameters())
        if self.looks < 2:  # it searches all objects of the process
            held = optimizers.check_holders(self.accelerator, self.optimizer)
            if not self.looks:
                self.held = held

    def remarks(self) -> list[str]:
        """Return lines about what is left out: at the first look tensors that are results, at the
        second objects of which a number has moved with the learning rate, as schedulers do."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.looks += 1
        if self.looks == 1:
            self.rates = rates
            results = sorted(self.inventory.results)
            return results and [
                f"left out of checkpoints, since each batch sets them anew: {some(results, 3)}"
            ]
        changed, held, self.held = [], self.held, []
        for one, numbers in held if rates != self.rates else ():
            moved = [name for name, value in numbers.items() if vars(one).get(name) != value]
            changed += [f"{type(one).__name__}.{name}" for name in moved]
        return changed and [
            f"warning: {some(changed, 3)} has changed with the learning rate, and is in no "
            "checkpoint: compute the rate from step.number, or give the object state_dict() and "
            "load_state_dict() and call accelerator.register_for_checkpointing"
        ]

    def keep(self) -> Callable[[], None]:
        """Return a function that puts frozen weights, buffers and attributes back as they are now.

        Frozen weights are copied for it, if they need at most 1 GB or twice what trains.
        """
        if self.layout.deepspeed:
            return lambda: None
        model, put_back = self.model(), self.inventory.keep()
        frozen = [p for p in model.parameters() if not p.requires_grad]
        trained_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        if sum(p.nbytes for p in frozen) > max(1e9, 2 * trained_bytes):
            frozen = []
        kept = [(each, inventory.copy_of(each)) for each in (*model.buffers(), *frozen)]
        # A forward pass may put another tensor in the place of a buffer. TorchScript's have none.
        held = [module._buffers for module in model.modules() if isinstance(module._buffers, dict)]
        places = [
            (Slot(buffers, name), value) for buffers in held for name, value in buffers.items()
        ]

        def put_all_back() -> None:
            put_back()
            for slot, buffer in places:
                slot.set(buffer)
            for values, before in kept:
                inventory.fill(values, before)

        return put_all_back

    def tensors_of_model(self) -> packing.Tensors:
        """Return what training has changed, or may change, by its name in the model. What comes
        with it is left out while it is as at the start."""
        tensors = {}
        for name, (values, comes_with_model) in _list_tensors(self.model()).items():
            if not (comes_with_model and self.given.get(name) == hash_bits([values])):
                tensors[name] = values
        return tensors

    def moments(self) -> packing.Tensors:
        """Return what the optimizer keeps for each weight, by its name in a checkpoint. Raises
        ValueError for what is no tensor and no number."""
        moments = {}
        for name, parameter in self.parameters().items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if torch.is_tensor(value):
                    moments[f"state.{name}.{key}"] = value
                elif isinstance(value, float | int):
                    dtype = torch.float64 if isinstance(value, float) else None
                    moments[f"number.{name}.{key}"] = torch.tensor(value, dtype=dtype)
                elif value is not None:
                    raise ValueError(
                        f"the optimizer's {key} of {name} is a {type(value).__name__}, and a "
                        "checkpoint holds tensors and numbers only"
                    )
        return moments

    def collect(self, step: int) -> tuple[packing.Tensors, dict]:
        """Look at all that steps have changed. Return this process's tensors of a checkpoint of
        this step, by name, and entries of its manifest. All processes must call it.

        DTensors are sharded; other tensors are whole. Only the main process has the buffers and the
        tensors of other objects, which may differ between processes; with exact all have the same.

        Raises UserError for what no checkpoint could hold, and for what must be the same on all
        processes and is not.
        """
        when = f"after step {step}"
        alike.check_alike(self.ranks, self.module, when)
        if self.layout.deepspeed:  # which writes what it holds
            return {}, {}
        with self.ranks.fail_together():
            self.check()
            if self.layout.stages == 1:  # a stage of a pipeline has attributes of its own
                self.inventory.look()
            tensors = {f"model.{name}": v for name, v in self.tensors_of_model().items()}
            weights = {n for n, v in tensors.items() if isinstance(v, torch.nn.Parameter)}
            others, of_others = self.pack_others()
            moments = self.moments()
            weights |= moments.keys()
            tensors |= {**of_others, **moments}
            for name, values in tensors.items():
                check_kind(name, values)
            digests = self.digests(others, tensors) if self.layout.stages == 1 else {}
            self.alone = {n for n in tensors.keys() - weights if not is_dtensor(tensors[n])}
            for name in tensors.keys() - self.alone:
                form = f"{tensors[name].dtype} {[*tensors[name].shape]}"
                digests[f"what a checkpoint holds of {name}"] = form
            groups = full_groups(self.bare_optimizer().param_groups)
            trains = [name for name, p in self.parameters().items() if p.requires_grad]
            entries = {
                "others": others,
                "added_groups": [self.names_of(group) for group in groups[len(self.groups) :]],
                "hashed_attributes": sorted(self.inventory.hashed & self.inventory.saved),
            }
            if trains != self.trains:
                entries["trains"] = trains
        alike.check_equal(self.ranks, digests, when)
        for line in self.remarks():
            print_on_main(line)
        if not self.accelerator.is_main_process:
            tensors = {n: v for n, v in tensors.items() if n not in self.alone}
        return tensors, entries

    def digests(self, packed: dict, tensors: packing.Tensors) -> dict[str, str]:
        """Hash what must be the same on all processes, by name: what `pack_others` gives, moments
        that are whole where weights are sharded, and with exact buffers.

        Local parts may differ, numbers of registered objects and of rows, and attributes on which
        the loss of the first batch does not depend.
        """
        hashed, digests = {f"attribute.{path}" for path in self.inventory.hashed}, {}
        for name, value in packed.items():
            if name == "rows" or (name.startswith("attribute.") and name not in hashed):
                continue
            text = "" if name.startswith("registered.") else repr(value)
            replicated = [tensors[n] for n in packing.tensor_names(value)]
            replicated = [values for values in replicated if not is_dtensor(values)]
            digests[name] = f"{text} {hash_bits(replicated)}"
        for name, values in tensors.items():
            kind, _, owner = name.partition(".")
            is_weight = isinstance(values, torch.nn.Parameter) or is_dtensor(values)
            if self.exact and kind == "model" and not is_weight:
                digests[f"the buffer {owner}"] = hash_bits([values])
            if self.layout.sharded and kind in ("state", "number") and not is_weight:
                owner, _, key = owner.rpartition(".")
                digests[f"the optimizer's {key} of {owner}"] = hash_bits([values])
        return digests

    def check_finite(self, tensors: dict[str, torch.Tensor]) -> None:
        """Raise ValueError if a weight or a moment is not finite, or a buffer has a NaN.

        `tensors`: this process's parts of a checkpoint. Buffers, such as masks, may be infinite.
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

        `saved` is its manifest, `manifest` that of this run. Settings of the optimizer come back,
        since some keep state among them, but for those that the code has changed since then.
        """
        before, now = saved["optimizer"], optimizers.settings_as_text(self.settings)
        kinds = [" and ".join(group["class"] for group in groups) for groups in (before, now)]
        if {group["class"] for group in before} != {group["class"] for group in now}:
            raise ValueError(
                f"{path} was trained with {kinds[0]}, and build_optimizer gives {kinds[1]} (one "
                "per group); restore that, or give another folder"
            )
        reader = None if self.layout.deepspeed else TensorReader(path, saved)
        others = self.load_weights(path, saved, manifest, reader)
        if reader is None:  # DeepSpeed has restored all settings
            for group in self.optimizer.param_groups:
                i = group["number"]
                changed = [n for n in self.settings[i] if before[i].get(n) != now[i][n]]
                group.update({name: self.settings[i][name] for name in changed})
            return
        for name in self.changed:  # new settings count
            optimizers.fast_forward(self.others()[name], others[name])
        for names in saved.get("added_groups", ()):  # by the loop, at a step before
            weights = [self.parameters()[name] for name in names]
            self.bare_optimizer().add_param_group({"params": weights})
        self.load_moments(reader)
        self.bare_optimizer().state.update(others.get("optimizer", {}))
        groups = full_groups(self.optimizer.param_groups)
        for i, parts in enumerate(groups if len(before) == len(now) else ()):
            for key, value in others.get(f"group.{i}", {}).items():
                if i < len(before) and self.keeps(i, key, before[i].get(key) != now[i].get(key)):
                    continue
                for part in parts:
                    old = part.get(key)
                    part[key] = value.to(old.device) if torch.is_tensor(old) else value

    def keeps(self, group: int, key: str, changed: bool) -> bool:
        """Return whether a setting of a group is that of now: it was changed, the loop sets it, or
        a scheduler with new settings has set it."""
        if changed or (key == "lr" and (self.sets_lr or self.changed)):
            return True
        part, *_ = full_groups(self.optimizer.param_groups)[group]
        values = part.get(key), self.settings[group].get(key)
        settings = optimizers.settings_as_text([{key: value} for value in values])
        return bool(self.changed) and settings[0] != settings[1]

    def load_weights(
        self, path: Path, saved: dict, manifest: dict, reader: TensorReader | None = None
    ) -> dict[str, Any]:
        """Restore the weights and buffers of a checkpoint, and what else evaluation depends on.
        Return all that `pack_others` has saved, by its names.

        Raises ValueError if they, or the frozen weights, do not fit. For the arguments see `load`.
        """
        _check_kind(path, saved, self.accelerator, self.layout)
        if self.layout.deepspeed:
            _check_frozen(path, saved, manifest)
            self.accelerator.load_state(path, load_module_strict=False)
            return {}
        bare, objects = self.model(), self.others()
        reader = reader or TensorReader(path, saved)
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
        for name, parameter in self.parameters().items():
            if "trains" in saved:  # other weights than at the start
                parameter.requires_grad_(name in saved["trains"])
        for name, (module, own) in _owners_left_out(bare).items():
            shape, buffer = reader.shapes.get(f"model.{name}"), module._buffers[own]
            if shape is not None and buffer is not None and shape != buffer.shape:  # a cache grows
                module._buffers[own] = buffer.new_empty(shape)
        tensors = {}
        for name, (values, comes_with_model) in _list_tensors(bare).items():
            if f"model.{name}" in reader.shapes or not comes_with_model:
                tensors[f"model.{name}"] = values
        elsewhere = getattr(self.module, "elsewhere", {})  # weights of other stages of a pipeline
        _check_shapes(tensors | elsewhere, reader, path)
        _check_frozen(path, saved, manifest)
        reader.read(tensors)
        # Some modules build their state when they are asked for it, and take it back.
        names = {f"model.{bare_name(name)}": name for name in bare.state_dict()}
        state = {names[n]: values.detach() for n, values in tensors.items() if n in names}
        bare.load_state_dict(state, strict=False)
        states = self.read_others(reader, saved)
        for name, owner in objects.items():
            if name not in self.changed:
                owner.load_state_dict(states[name])
        prefix = "attribute."
        attributes = {n[len(prefix) :]: v for n, v in states.items() if n.startswith(prefix)}
        self.inventory.restore(attributes, saved.get("hashed_attributes", []))
        self.inventory.later = states.get("rows", {})
        return states

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
        optimizers.restore(self.bare_optimizer(), states)


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
            f"{path} was trained with other frozen weights, pretrained or drawn; give those (drawn "
            "ones by the same seed), or another folder"
        )


def _owners_left_out(model: torch.nn.Module) -> dict[str, tuple[torch.nn.Module, str]]:
    """Return the modules that leave a buffer out of the state_dict, by the buffer's name."""
    owners = {}
    for prefix, module in model.named_modules():
        for name, _ in module.named_buffers(prefix, recurse=False):
            own = name.rpartition(".")[2]
            if own in module._non_persistent_buffers_set:
                owners[bare_name(name)] = module, own
    return owners


def _form_of(model: torch.nn.Module) -> list[tuple]:
    """Return names, shapes and types of the weights, names of the buffers, kinds of the modules."""
    weights = [(bare_name(n), (*p.shape,), str(p.dtype)) for n, p in model.named_parameters()]
    modules = [(bare_name(n), type(module).__qualname__) for n, module in model.named_modules()]
    return weights + [(bare_name(name),) for name, _ in model.named_buffers()] + modules


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
    saved = {n: str(tuple(shape)) for n, shape in reader.shapes.items() if n.startswith("model.")}
    shapes = {name: str(tuple(values.shape)) for name, values in built.items()}
    for name in sorted({*saved, *shapes}):
        before, now = (named.get(name, "missing") for named in (saved, shapes))
        if before == now:  # moments would keep the dtype of the checkpoint
            before, now = str(reader.dtypes[name]), str(built[name].dtype)
        if before != now:
            raise UserError(
                f"{path} does not fit the model: {name.removeprefix('model.')} is {before} in the "
                f"checkpoint and {now} in the model; give the settings and the task.py that it "
                "was made with, or another folder"
            )
