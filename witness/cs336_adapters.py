"""Answers the tests of Stanford's CS336, assignment 2, by the exact gradients of this library.

The tests call backward themselves. Under DDP what they have left in the weights of each process is
added up by the tree of `exact`; under FSDP2 the tree is in the reduce-scatter of each block.
"""

from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from samestep.processes import sharding
from samestep.processes.mesh import Layout
from samestep.processes.ranks import Ranks
from samestep.step.exact import ExactGradients
from samestep.step.gradient import TrainedWeights
from samestep.step.plan import StepPlan


class Exact(torch.nn.Module):
    """A module whose gradients are means over all processes. kinds: FSDP, if it is sharded."""

    def __init__(self, module: torch.nn.Module, *kinds: str):
        super().__init__()
        self.module, self.rank, self.size = module, dist.get_rank(), dist.get_world_size()
        state = SimpleNamespace(plugin_kwargs={})
        accelerator = SimpleNamespace(gradient_state=state, scaler=None)
        ranks = Ranks(Layout(self.size, self.rank, kinds))
        weights = TrainedWeights(accelerator, ranks, module)
        self.gradients = ExactGradients(accelerator, weights)
        self.plan = StepPlan(self.size, 1, (1,) * self.size, self.rank, self.size if kinds else 1)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        self.gradients.weights.start_step()
        self.gradients.start_step(self.plan)
        self.gradients.number = self.rank
        return self.module(*inputs)


def get_ddp(module: torch.nn.Module) -> torch.nn.Module:
    accelerator = SimpleNamespace(num_processes=dist.get_world_size(), device=torch.device("cpu"))
    sharding.send_weights(accelerator, module)
    return Exact(module)


def ddp_on_after_backward(model: Exact, optimizer: torch.optim.Optimizer) -> None:
    leave = SimpleNamespace(backward=lambda loss: None)  # the tests have called it
    with mock.patch.object(model.gradients, "accelerator", leave):
        for parameter in model.gradients.weights.parameters:
            parameter.grad /= model.size
        model.gradients.add(torch.zeros(()), 1, model.rank)
    model.gradients.reduce()


def get_fsdp(module: torch.nn.Module, compute_dtype: torch.dtype | None = None) -> torch.nn.Module:
    from cs336_basics.model import Embedding, Linear

    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for block in module.modules():
        if isinstance(block, Linear | Embedding):
            fully_shard(block, mp_policy=policy)
    fully_shard(module)  # norms too, in full precision
    return Exact(module, "FSDP")


def fsdp_on_after_backward(model: Exact, optimizer: torch.optim.Optimizer) -> None:
    model.gradients.reduce()
    for parameter in model.gradients.weights.parameters:
        parameter.grad /= model.size


def fsdp_gather_full_params(model: Exact) -> dict[str, torch.Tensor]:
    named = model.module.named_parameters()
    return {name: sharding.full_tensor(parameter.detach()) for name, parameter in named}


def get_sharded_optimizer(parameters, kind, **settings):
    raise NotImplementedError("an optimizer of its own is nothing that this library has")
