"""A training step without its numbers: what it would compute and hold, in seconds and on any CPU.

torch's FakeTensorMode computes shapes and types alone, so a model of any size fits. A dispatch mode
sees each operation and counts the bytes of the tensors that are alive.
"""

import contextlib
import weakref
from collections.abc import Iterator
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

from machine.project import Project
from training import weights
from training.batches import Batch

aten = torch.ops.aten
# What autocast computes in fp32 on a GPU, and in bf16 on a CPU: outputs take twice the memory.
FP32 = {F.layer_norm, F.group_norm, F.softmax, F.log_softmax, torch.softmax, torch.Tensor.softmax}
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu
FLOPS = {  # torch knows those of attention on a GPU
    **flop_registry,
    ATTENTION: lambda q, k, v, *_, **__: sdpa_flop_count(q.shape, k.shape, v.shape),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *_, **__: (
            sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape)
        )
    ),
}


@dataclass(frozen=True)
class Work:
    """What a micro-batch needs beside the states of the weights."""

    samples: int
    memory: int  # bytes: activations, logits, and gradients that do not stay
    flops: int  # of the forward and the backward pass


class Assumed(TorchFunctionMode):
    """Answers what tensors without numbers cannot; computes as autocast on a GPU does.

    A task may ask whether two ways to compute give the same: they do.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.allclose, torch.equal):
            return True
        if func in (torch.Tensor.__float__, torch.Tensor.item):
            return 1.0
        if func in FP32 and torch.is_autocast_enabled("cpu"):
            wide = [a.float() if torch.is_tensor(a) else a for a in args]
            with torch.autocast("cpu", enabled=False):
                return func(*wide, **kwargs)
        return func(*args, **kwargs)


class Peak(TorchDispatchMode):
    """Counts the bytes of the tensors that were made inside, and still live; `peak`: the most.

    Autocast's copies of `weights` do not count: they belong to the bytes of a weight.
    """

    def __init__(self, weights: list[torch.Tensor]):
        super().__init__()
        self.live = self.peak = self.flops = 0
        self.known = weakref.WeakSet()
        self.weights = {id(each) for each in weights}
        for each in weights:
            self.known.add(each.untyped_storage())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        count = FLOPS.get(func._overloadpacket)
        self.flops += count(*args, **(kwargs or {}), out_val=result) if count else 0
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
    with pretrained, normal, move, FakeTensorMode(allow_non_fake_inputs=True) as mode, Assumed():
        yield mode


def move_if_needed(module: torch.nn.Module, *args, **options) -> torch.nn.Module:
    """In place of Module.to, which fails for these tensors: the module, if there is nothing to do."""
    tensors = [*module.parameters(), *module.buffers()]
    if any(each.to(*args, **options) is not each for each in tensors):
        raise NotImplementedError("build_model converts weights")
    return module


def from_config(cls, path: Any, *_, config: Any = None, output_loading_info=False, **options):
    """In place of from_pretrained: the model, without the weights."""
    names = ("dtype", "attn_implementation")
    options = {name: options[name] for name in names if name in options}
    model = cls._from_config(config or cls.config_class.from_pretrained(path), **options)
    nothing = {"missing_keys": [], "mismatched_keys": [], "unexpected_keys": [], "error_msgs": []}
    return (model, nothing) if output_loading_info else model


def run_step(project: Project, model: torch.nn.Module, batch: Batch, precision: str) -> Work:
    """The work of a forward and a backward pass; call it inside no_numbers()."""
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.bfloat16}  # a CPU has no fp16; as large
    named = [*model.parameters(), *model.buffers()]
    for each in model.parameters():
        if each.requires_grad:
            each.grad = torch.zeros_like(each)
    peak = Peak(named)
    for each in model.parameters():
        if each.grad is not None:
            peak.known.add(each.grad.untyped_storage())
    with peak:
        with torch.autocast("cpu", dtypes.get(precision), enabled=precision in dtypes):
            loss = project.task.loss_sum(model, batch)
        loss.float().backward()
    samples = len(next(iter(batch.values())))
    return Work(samples, peak.peak, peak.flops)
