"""A training step without its numbers: what it would compute and hold, in seconds and on any CPU.

torch's FakeTensorMode computes shapes and types alone, so a model of any size fits. A dispatch mode
sees each operation and counts the bytes of the tensors that are alive.
"""

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from samestep.base.console import one_line, say
from samestep.checkpoint import weights
from samestep.hardware.ladder import Working
from samestep.hardware.memory import Sizes
from samestep.hardware.project import Project
from samestep.step.batches import Batch

MOST_ROWS = 100_000  # whose lengths are compared
aten = torch.ops.aten
# What autocast computes in fp32 on a GPU, and in bf16 on a CPU: outputs take twice the memory.
FP32 = {F.layer_norm, F.group_norm, F.softmax, F.log_softmax, torch.softmax, torch.Tensor.softmax}
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu
FLOPS = {  # torch knows those of attention on a GPU
    **flop_registry,
    ATTENTION: lambda q, k, v, *_, **__: sdpa_flop_count(q.shape, k.shape, v.shape),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(
            grad.shape, q.shape, k.shape, v.shape
        )
    ),
}


@dataclass(frozen=True)
class Study:
    """What is known about a model before it is trained."""

    sizes: Sizes
    working: dict[bool, Working]  # without and, if the model can, with gradient checkpointing
    flops: float  # of the forward and the backward pass of a sample, without checkpointing
    remark: str = ""  # why it was not simulated


class Assumed(TorchFunctionMode):
    """Answers what tensors without numbers cannot.

    A task that builds a model may ask whether another way to compute gives the same: it does.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.allclose, torch.equal):
            return True
        if func in (torch.Tensor.__float__, torch.Tensor.item):
            return 1.0
        return func(*args, **(kwargs or {}))


class AutocastOfGpu(TorchFunctionMode):
    """Lets autocast on the CPU compute in fp32 what it computes in fp32 on a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in FP32 and torch.is_autocast_enabled("cpu"):
            wide = [a.float() if torch.is_tensor(a) else a for a in args]
            with torch.autocast("cpu", enabled=False):
                return func(*wide, **kwargs)
        return func(*args, **kwargs)


class Peak(TorchDispatchMode):
    """Counts the bytes of the tensors that were made inside, and still live; `peak`: the most.

    Weights, gradients and autocast's copies of weights do not count: they are states.
    """

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.live = self.peak = self.flops = 0
        self.weights = {id(each) for each in model.parameters()}
        states = [*model.parameters(), *model.buffers()]
        states += [each.grad for each in model.parameters() if each.grad is not None]
        self.known = weakref.WeakSet(each.untyped_storage() for each in states)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func._overloadpacket in FLOPS:
            self.flops += FLOPS[func._overloadpacket](*args, **(kwargs or {}), out_val=result)
        is_copy = func is aten._to_copy.default and id(args[0]) in self.weights
        for each in tree_leaves(result):
            if torch.is_tensor(each):
                self.add(each.untyped_storage(), 0 if is_copy else each.untyped_storage().nbytes())
        return result

    def add(self, storage: torch.UntypedStorage, size: int) -> None:
        if storage in self.known:
            return
        self.known.add(storage)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.forget, size).atexit = False

    def forget(self, size: int) -> None:
        self.live -= size


@contextlib.contextmanager
def no_numbers() -> Iterator[FakeTensorMode]:
    """Inside, tensors have no content, and pretrained weights are not read."""
    try:
        from transformers import PreTrainedModel
    except ImportError:  # the task has a model of its own
        pretrained = contextlib.nullcontext()
    else:
        pretrained = mock.patch.object(PreTrainedModel, "from_pretrained", classmethod(from_config))
    # It draws again while a number is too far out.
    normal = mock.patch.object(torch.nn.init, "_no_grad_trunc_normal_", lambda x, *_, **__: x)
    move = mock.patch.object(torch.nn.Module, "to", move_if_needed)
    with pretrained, normal, move, FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


def move_if_needed(module: torch.nn.Module, *args: Any, **options: Any) -> torch.nn.Module:
    """In place of Module.to, which fails for such tensors: the module, if nothing changes."""
    tensors = [*module.parameters(), *module.buffers()]
    if any(each.to(*args, **options) is not each for each in tensors):
        raise RuntimeError("build_model converts weights")
    return module


def from_config(
    cls: Any, path: Any, *_: Any, config: Any = None, output_loading_info: bool = False, **more: Any
) -> Any:
    """In place of from_pretrained: the model, without the weights."""
    names = ("dtype", "attn_implementation")
    options = {name: more[name] for name in names if name in more}
    model = cls._from_config(config or cls.config_class.from_pretrained(path), **options)
    nothing = {"missing_keys": [], "mismatched_keys": [], "unexpected_keys": [], "error_msgs": []}
    return (model, nothing) if output_loading_info else model


def study(project: Project, precision: str, most: int) -> Study:
    """Simulates micro-batches of 1 and of `most` samples in this precision.

    Where a model cannot be simulated, since its code looks at numbers, it is built, and micro-
    batches of 1 and 2 samples are computed on the CPU.
    """
    samples = {n: longest_rows(project, n) for n in {1, most}}
    try:
        with no_numbers() as mode:
            fake = {n: convert(mode, batch) for n, batch in samples.items()}
            return compute(project, fake, precision, Assumed())
    except Exception as error:  # code of the task may do anything
        remark = f"not simulated, since {type(error).__name__}: {one_line(error, 150)}"
        say("The model cannot be simulated; building it takes 4 bytes of memory per parameter")
    samples = {n: longest_rows(project, n) for n in {1, min(most, 2)}}
    remark += "; computed on the CPU with 1 and 2 samples instead"
    return dataclasses.replace(compute(project, samples, precision), remark=remark)


def longest_rows(project: Project, samples: int) -> Batch:
    """A micro-batch of the longest of many training rows: other micro-batches need less memory."""
    rows = project.rows
    positions = rows.sort(range(max(min(len(rows), MOST_ROWS), samples)))[-samples:]
    return project.batch(positions)


def convert(mode: FakeTensorMode, batch: Batch) -> Batch:
    """The batch, without its numbers."""
    return {name: mode.from_tensor(tensor) for name, tensor in batch.items()}


def compute(
    project: Project, samples: dict[int, Batch], precision: str, building: Any = None
) -> Study:
    """The study of a model that computes these batches, by their numbers of samples."""
    with building or contextlib.nullcontext():
        model = project.build_model().train()
    study = Study(count_parameters(model), {}, 0.0)
    for checkpointing in (False, True):
        if checkpointing:
            try:
                weights.enable_gradient_checkpointing(model)
            except ValueError:  # the model does not support it
                break
        found = [(n, *run_step(project, model, samples[n], precision)) for n in sorted(samples)]
        (few, least, _), (many, most, flops) = found[0], found[-1]
        slope = max(most - least, 0) / (many - few) if many > few else least / few
        study.working[checkpointing] = Working(least - slope * few, slope, checkpointing)
        if not checkpointing:
            study = dataclasses.replace(study, flops=flops / many)
    return study


def count_parameters(model: torch.nn.Module) -> Sizes:
    """Numbers of parameters; FSDP gathers a block, or all outside of the blocks, at a time."""
    names = getattr(model, "_no_split_modules", None) or ()
    blocks = [each for each in model.modules() if type(each).__name__ in names]
    inner = {id(p) for block in blocks for p in block.parameters()}
    rest = [p for p in model.parameters() if id(p) not in inner]
    units = [rest, *([*block.parameters()] for block in blocks)]
    return Sizes(*count([*model.parameters()]), *max(map(count, units)))


def count(parameters: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Numbers of all parameters, and of those that are trained."""
    trained = [p.numel() for p in parameters if p.requires_grad]
    return sum(p.numel() for p in parameters), sum(trained)


def run_step(
    project: Project, model: torch.nn.Module, batch: Batch, precision: str
) -> tuple[int, int]:
    """(bytes that a forward and a backward pass need beside the states, their FLOPs).

    The gradients are there before, as in the second micro-batch of a step.
    """
    for each in model.parameters():
        if each.requires_grad:
            each.grad = torch.zeros_like(each)
    peak = Peak(model)
    narrow = precision != "fp32"  # CPUs have no fp16; bf16 takes as many bytes
    with AutocastOfGpu(), peak:
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            loss = project.task.loss_sum(model, batch)
        loss.backward()
    return peak.peak, peak.flops
