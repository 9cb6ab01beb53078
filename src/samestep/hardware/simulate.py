"""A training step of any size without its numbers: what it would hold, in seconds on any CPU."""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from samestep.step.batches import Batch

# What autocast computes in fp32 on a GPU and in bf16 on a CPU: twice the memory.
FP32 = {F.layer_norm, F.group_norm, F.softmax, F.log_softmax, torch.softmax, torch.Tensor.softmax}


class Assumed(TorchFunctionMode):
    """Answers a task that builds a model what tensors without numbers cannot: all is the same."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.allclose, torch.equal):
            return True
        if func in (torch.Tensor.__float__, torch.Tensor.item):
            return 1.0
        return func(*args, **(kwargs or {}))


class AutocastOfGpu(TorchFunctionMode):
    """Lets autocast on the CPU compute in fp32 what it computes in fp32 on a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func not in FP32 or not torch.is_autocast_enabled("cpu"):
            return func(*args, **(kwargs or {}))
        wide = [each.float() if torch.is_tensor(each) else each for each in args]
        with torch.autocast("cpu", enabled=False):
            return func(*wide, **(kwargs or {}))


class Peak(TorchDispatchMode):
    """Counts the bytes of tensors that were made inside and live, without weights, gradients and
    autocast's copies of weights, which are states; `peak`: the most."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.live = self.peak = 0
        self.weights = {id(each) for each in model.parameters()}
        states = [*model.parameters(), *model.buffers()]
        states += [each.grad for each in model.parameters() if each.grad is not None]
        self.known = weakref.WeakSet(each.untyped_storage() for each in states)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        is_copy = func is torch.ops.aten._to_copy.default and id(args[0]) in self.weights
        for each in filter(torch.is_tensor, tree_leaves(result)):
            storage = each.untyped_storage()
            if storage not in self.known:
                self.known.add(storage)
                size = 0 if is_copy else storage.nbytes()
                self.add(size)
                weakref.finalize(storage, self.add, -size).atexit = False
        return result

    def add(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)


@contextlib.contextmanager
def no_numbers() -> Iterator[FakeTensorMode]:
    """Inside, tensors have no content, and pretrained weights are not read."""
    # Told that this device is the default, pretrained.load_model reads nothing but the config.
    meta = mock.patch.object(torch, "get_default_device", lambda: torch.device("meta"))
    # It draws again while a number is too far out.
    normal = mock.patch.object(torch.nn.init, "_no_grad_trunc_normal_", lambda x, *_, **__: x)
    move = mock.patch.object(torch.nn.Module, "to", move_if_needed)
    with meta, normal, move, FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


def move_if_needed(module: torch.nn.Module, *args: Any, **options: Any) -> torch.nn.Module:
    """In place of Module.to, which fails for such tensors: the module, if nothing changes."""
    tensors = [*module.parameters(), *module.buffers()]
    if any(each.to(*args, **options) is not each for each in tensors):
        raise RuntimeError("build_model converts weights")
    return module


def bytes_of_step(task: Any, model: torch.nn.Module, batch: Batch, precision: str) -> int:
    """Bytes that a forward and a backward pass need beside the states.

    The gradients are there before, as in the second micro-batch of a step.
    """
    for each in model.parameters():
        if each.requires_grad:
            each.grad = torch.zeros_like(each)
    peak = Peak(model)
    # CPUs have no fp16; bf16 takes as many bytes.
    with AutocastOfGpu(), peak:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision != "fp32"):
            loss = task.loss_sum(model, batch)
        loss.backward()
    return peak.peak
