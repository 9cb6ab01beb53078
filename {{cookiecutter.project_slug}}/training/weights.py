"""Weights and optimizer state: what a checkpoint saves, and how it is restored."""

import contextlib
import hashlib
import math
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from training import checkpoints
from training.batches import StepPlan
from training.console import say
from training.device import PROCESSES
from training.ranks import Ranks, UserError, as_user_error


class TaskModule(torch.nn.Module):
    """The module that accelerate prepares. It calls a function of the task with the task's model.

    So DDP, FSDP, autocast and torch.compile wrap all that the function computes, including the
    loss, and the task never sees a wrapper. It computes inside `context()`.
    """

    def __init__(self, model: torch.nn.Module, context: Callable = contextlib.nullcontext):
        super().__init__()
        self.model, self.context = model, context
        self.tp_size = getattr(model, "_tp_size", None)  # accelerate asks for it
        # FSDP shards each of these blocks of a transformers model by itself.
        self._no_split_modules = getattr(model, "_no_split_modules", None)

    def forward(self, function, batch):
        with self.context():
            return function(self.model, batch)

    def tie_weights(self) -> None:
        """Ties the weights again: accelerate asks for it after it has replaced them."""
        if hasattr(self.model, "tie_weights"):
            self.model.tie_weights()


def bare_model(accelerator, module: torch.nn.Module) -> torch.nn.Module:
    """The task's model inside a prepared TaskModule."""
    return accelerator.unwrap_model(module, keep_torch_compile=False).model


def gather_model(accelerator, module: torch.nn.Module) -> torch.nn.Module:
    """The task's model with all weights on the main process. All processes must call it."""
    return bare_model(accelerator, module)


def enable_gradient_checkpointing(model: torch.nn.Module) -> None:
    """Makes a model of transformers or diffusers recompute activations in the backward pass.

    Raises ValueError if the model does not support it.
    """
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        if hasattr(model, name):
            getattr(model, name)()
            return
    raise ValueError(
        "gradient_checkpointing is true, but the model of task.py does not support it; set it to "
        "false"
    )


def sync_batch_norms(
    model: torch.nn.Module, accelerator, plan: StepPlan, device_shares: str | list[float]
) -> torch.nn.Module:
    """Warns about BatchNorm, and converts it to SyncBatchNorm on several GPUs.

    BatchNorm takes its statistics from a micro-batch, so the result depends on how a step is split.
    With GroupNorm and LayerNorm it does not. SyncBatchNorm waits for all GPUs in each micro-batch.
    Raises UserError if their shares are not equal: some would wait for ever.
    """
    kinds = torch.nn.modules.batchnorm._BatchNorm
    if not any(isinstance(module, kinds) for module in model.modules()):
        return model
    say(
        "warning: the model has BatchNorm, so its result depends on how a step is split; see README"
    )
    if PROCESSES > 1 and accelerator.device.type == "cuda":
        if device_shares == "auto" or len({*plan.shares}) > 1:
            raise UserError(
                "BatchNorm needs equal shares, since the GPUs exchange its statistics in each "
                f"micro-batch: give a global_batch_size that {PROCESSES} divides and device_shares "
                "equal, or use GroupNorm or LayerNorm"
            )
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return model


def optimizer_settings(optimizer: torch.optim.Optimizer) -> list[dict]:
    """The settings of each parameter group: the optimizer's class, weight_decay, betas, ..."""
    kind = {"class": type(optimizer).__name__}
    return [
        kind | {n: v for n, v in group.items() if n != "params"} for group in optimizer.param_groups
    ]


def settings_as_text(settings: list[dict]) -> list[dict[str, str]]:
    """The settings as text for a manifest, since JSON has neither tensors nor tuples."""
    return [{name: exact_repr(value) for name, value in group.items()} for group in settings]


def exact_repr(value) -> str:
    """A setting as text with all digits; torch would print four digits of a tensor."""
    return repr(value.tolist() if torch.is_tensor(value) else value)


def load_checkpoint(
    accelerator, optimizer, settings: list[dict], path: Path, manifest: dict
) -> None:
    """Restores weights, optimizer and random numbers; raises ValueError if they do not fit.

    Loading an optimizer also restores its old settings. Settings that the code has changed since
    then are applied again. The others stay, since some optimizers keep state among them.
    """
    before, now = manifest["optimizer"], settings_as_text(settings)
    kinds = [[group["class"] for group in each] for each in (before, now)]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"{path} was trained with {' and '.join(kinds[0])}, and build_optimizer gives "
            f"{' and '.join(kinds[1])} (one per group); restore that, or give another --output_dir"
        )
    if accelerator.scaler and not (path / "scaler.pt").exists():
        raise ValueError(f"{path} was not trained in fp16; give the YAML that it was trained with")
    accelerator.load_state(path)
    for group, built, old in zip(optimizer.param_groups, settings, before, strict=True):
        changed = {n: v for n, v in built.items() if n != "class" and exact_repr(v) != old.get(n)}
        group.update(changed)


FROZEN = "frozen_weights_sha256"  # an entry of model.safetensors: 32 bytes
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def register_state_hooks(accelerator) -> None:
    """Makes checkpoints use the parameter names of the task's model, without wrapper prefixes.

    So any number of processes can continue from them. Of frozen weights, which come with the
    pretrained model, only the digest is saved. Sharded models do not pass these hooks.
    """

    def save_bare(models: list, weights: list, _) -> None:
        if weights:
            states = [weights_to_save(bare_model(accelerator, model)) for model in models]
            weights[:] = [separate_storages(state) for state in states]

    def load_bare(models: list, folder: str) -> None:
        load_weights(bare_model(accelerator, models.pop()), Path(folder, "model.safetensors"))

    accelerator.register_save_state_pre_hook(save_bare)
    accelerator.register_load_state_pre_hook(load_bare)


def separate_storages(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state with one tensor for each storage, as safetensors requires.

    Tied weights are kept once, under their first name. Tensors that are parts of one storage are
    cloned; accelerate would save only one of them.
    """
    kept: dict[str, torch.Tensor] = {}
    first: dict[int, tuple] = {}  # the first view of each storage
    for name, values in state.items():
        storage = values.untyped_storage().data_ptr()
        view = (values.data_ptr(), values.shape, values.stride())
        if first.get(storage, view) != view:
            kept[name] = values.clone(memory_format=torch.contiguous_format)
        elif storage not in first or not values.numel():
            kept[name] = values.contiguous()
        first.setdefault(storage, view)
    return kept


def check_shapes(state: dict[str, torch.Tensor], file: Path) -> None:
    """Raises UserError unless the file has the weights of this state with the same shapes."""
    with safe_open(file, "pt") as saved:
        shapes = {name: tuple(saved.get_slice(name).get_shape()) for name in saved.keys()}
    # Tied weights have several names; the file has one of them.
    kept = {state[name].data_ptr() for name in shapes if name in state}
    wanted = {
        name: tuple(values.shape)
        for name, values in state.items()
        if name in shapes or values.data_ptr() not in kept
    }
    for name in sorted({**shapes, **wanted}):
        if shapes.get(name) != wanted.get(name):
            saved, built = (str(each.get(name, "missing")) for each in (shapes, wanted))
            raise UserError(
                f"{file.parent} does not fit the model: {name} is {saved} in the checkpoint and "
                f"{built} in the model; give the settings and the task.py that it was made "
                "with, or another --output_dir"
            )


def load_weights(model: torch.nn.Module, file: Path) -> None:
    """Loads the trained weights; raises UserError if the frozen weights have changed."""
    state = weights_to_save(model)
    check_shapes(state, file)
    weights = load_file(file)
    if FROZEN in state and not torch.equal(weights.pop(FROZEN), state[FROZEN]):
        raise UserError(
            f"{file.parent} was trained with other pretrained weights; give those weights, or "
            "another --output_dir"
        )
    model.load_state_dict(weights, strict=False)


def load_best(accelerator, ranks: Ranks, folder: Path, manifest: dict) -> int | None:
    """Loads the checkpoint with the smallest eval_loss; returns its step, or None without any.

    Only losses on the validation data of `manifest` are compared.
    """
    best, loss = None, math.inf
    with ranks.fail_together():
        if accelerator.is_main_process:
            best, loss = checkpoints.find_best(folder, manifest)
    best, loss = ranks.from_main((best, loss))
    if best is None:
        say("no checkpoint has a finite eval_loss: the last model is exported, not the best")
        return None
    with ranks.fail_together(), as_user_error():
        accelerator.load_state(best)
    say(f"the best evaluation was that of step {checkpoints.step_of(best)}: {loss:.5g}")
    return checkpoints.step_of(best)


def weights_to_save(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state of a model for a checkpoint, with a digest in place of the frozen parameters."""
    state = model.state_dict()
    named = model.named_parameters(remove_duplicate=False)  # tied weights have two names
    frozen = [(name, values.detach()) for name, values in named if not values.requires_grad]
    if frozen:
        digest = hashlib.sha256()
        for name, values in frozen:
            state.pop(name, None)
            # Integer sums of the bits of 64 slices are the same on any device, in any order.
            bits = values.flatten().view(BITS[values.element_size()])
            sums = torch.stack([part.sum(dtype=torch.int64) for part in bits.chunk(64)])
            digest.update(name.encode() + sums.cpu().numpy().tobytes())
        state[FROZEN] = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
    return state
