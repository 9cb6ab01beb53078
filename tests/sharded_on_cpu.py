"""Runs a program of a project as if the CPU were a GPU, so that accelerate shards the model there.

    accelerate launch --config_file configs/accelerate/fsdp2.yaml sharded_on_cpu.py train.py ...

accelerate ignores FSDP, DeepSpeed and parallelism_config where it computes on the CPU. Here it is
told that several GPUs are there, which are the CPU, and meet through gloo. Context parallelism has
attention for CUDA only: here another, which gathers keys and values, takes its place.
"""

import os
import runpy
import sys
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, os.getcwd())
os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ["DS_ACCELERATOR"] = "cpu"

from accelerate.state import PartialState
from accelerate.utils import DistributedType

import samestep.launch.device
import samestep.launch.launched

if "LOCAL_RANK" in os.environ:
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
torch.Tensor.pin_memory = lambda tensor, *_: tensor  # for offload
samestep.launch.device.use_cpu = lambda: False
samestep.launch.device.check_devices = lambda: None
see_gpu = mock.patch.object(torch.cuda, "is_available", lambda: True)
samestep.launch.launched.check_launched = see_gpu(samestep.launch.launched.check_launched)
attention = F.scaled_dot_product_attention


class Gather(torch.autograd.Function):
    """Brings the parts of all processes together, along dimension 2."""

    @staticmethod
    def forward(ctx, part, group):
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size(), 2)[ctx.group.rank()], None


def share_attention(seq_dim, mesh):
    """Replaces torch's attention by one over the keys and values of all processes of a group.

    Rows are dealt as torch deals them: in twice as many parts, each process a front and a back one.
    """
    group = mesh.get_group()

    def shared_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **more):
        assert is_causal and attn_mask is None and not dropout_p
        key, value = (Gather.apply(each, group) for each in (key, value))
        places = torch.arange(key.shape[2]).chunk(2 * group.size())
        dealt = [torch.cat([places[i], places[-1 - i]]) for i in range(group.size())]
        mask = dealt[group.rank()][:, None] >= torch.cat(dealt)
        return attention(query, key, value, attn_mask=mask, **more)

    F.scaled_dot_product_attention = shared_attention


def restore_attention():
    F.scaled_dot_product_attention = attention


if os.environ.get("PARALLELISM_CONFIG_CP_SIZE", "1") != "1":
    from torch.distributed.tensor.experimental._context_parallel import _attention

    _attention._enable_context_parallel_dispatcher_impl = share_attention
    _attention._disable_context_parallel_dispatcher_impl = restore_attention
if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__ = {}  # its reduction in shared memory compiles for 2 minutes

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "-m":
        from samestep.hardware import devices

        devices.PREFIX[:] = [__file__]
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
