"""Models whose weights are sharded over processes: FSDP2, HSDP, tensor parallelism.

A sharded weight is a DTensor, of which each process has its part; for DeepSpeed's see deepspeed.py.
For parts of rows see step/context_parallel.py.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from accelerate import Accelerator

from samestep.base.errors import UserError, some
from samestep.processes.mesh import Layout

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Tensors = list[torch.Tensor]


def is_dtensor(value: Any) -> TypeGuard["DTensor"]:
    """Whether it is a DTensor. Their module takes 0.4 s to import, and whoever has one has it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, on every process; those that share it must call it together."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def compute_context(accelerator: Accelerator, exact: bool) -> Callable:
    """Sets FSDP's precision. Returns a function whose context the model computes in.

    FSDP gathers weights in bf16, if exact in fp32, and adds up gradients in fp32; accelerate would
    let it add them in bf16, and round the numbers of a batch, such as targets. It also leaves out
    autocast under FSDP.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if not plugin or accelerator.mixed_precision == "no":
        return contextlib.nullcontext
    from torch.distributed.fsdp import MixedPrecisionPolicy

    plugin.mixed_precision_policy = MixedPrecisionPolicy(
        param_dtype=None if exact else torch.bfloat16,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    return accelerator.autocast


def split_matrices(model: torch.nn.Module, accelerator: Accelerator, layout: Layout) -> None:
    """Splits the matrices of a model over the processes of its tensor-parallel group, if any, as
    `from_pretrained(tp_plan="auto")` of transformers does while it loads weights."""
    if layout.tp == 1:
        return
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plan = getattr(model, "tp_plan", None)
    plan = plan and model._expand_parallel_plan(dict(plan))
    if not plan or hasattr(model, "peft_config"):  # the plan has the names of weights without it
        raise UserError(
            f"tensor parallelism needs a model of transformers with a tp_plan, and "
            f"{type(model).__name__} has none; use fsdp2.yaml"
        )
    model.to(accelerator.device)  # accelerate moves no model that has DTensors
    apply_tensor_parallelism(model, accelerator.torch_device_mesh["tp"], plan)
    model._tp_size = layout.tp  # accelerate asks for it


def send_weights(accelerator: Accelerator, model: torch.nn.Module) -> None:
    """Give all processes the weights and buffers that the main process has built.

    For a script of one's own under FSDP2, before accelerator.prepare: FSDP2 takes each part of a
    weight from the process that keeps it. All processes must call it.
    """
    if accelerator.num_processes > 1:
        for values in (*model.parameters(), *model.buffers()):
            on_device = values.detach().to(accelerator.device)
            dist.broadcast(on_device, 0)
            values.data.copy_(on_device)
    accelerator.has_sent_weights = True  # type: ignore[attr-defined]


def split_by_kind(optimizer: torch.optim.Optimizer) -> None:
    """Keeps DTensors and other tensors in parameter groups apart, as fused optimizers need it:
    tensor parallelism splits some weights of a group, and not others. See full_groups."""
    split = []
    for group in optimizer.param_groups:
        sharded = [p for p in group["params"] if is_dtensor(p)]
        others = [p for p in group["params"] if not is_dtensor(p)]
        split.append({**group, "params": others or sharded})
        if others and sharded:
            split.append({**group, "params": sharded, "continues": True})
    optimizer.param_groups[:] = split


def full_groups(groups: list[dict]) -> list[list[dict]]:
    """The parameter groups as they were before split_by_kind: the parts of each."""
    whole: list[list[dict]] = []
    for group in groups:
        if not group.get("continues"):
            whole.append([])
        whole[-1].append(group)
    return whole


def check_weights(model: torch.nn.Module, layout: Layout) -> None:
    """Raises UserError for complex weights under FSDP, which would lose a part in bf16 silently.

    It refuses other weights by itself: of several data types, without a dimension, not contiguous.
    """
    complex_ones = [name for name, p in model.named_parameters() if p.is_complex()]
    if complex_ones and layout.fsdp:
        raise UserError(
            f"FSDP needs real weights, and {complex_ones[0]} is not; change it in build_model, or "
            "use another YAML"
        )


def check_none_ignored(trained: dict[str, torch.Tensor]) -> None:
    """Raises UserError for weights that FSDP ignores: each process would train its own."""
    names = [name for name, parameter in trained.items() if not is_dtensor(parameter)]
    if names:
        raise UserError(
            f"FSDP ignores {some(names, 3)}, and would not reduce their gradients: leave them out "
            "of fsdp_ignored_modules, or freeze them"
        )


def fsdp_modules(model: torch.nn.Module) -> list[tuple[str, Any]]:
    """The modules that FSDP shards by themselves, by name."""
    from torch.distributed.fsdp import FSDPModule

    return [each for each in model.named_modules() if isinstance(each[1], FSDPModule)]


def reshard(model: torch.nn.Module) -> None:
    """Frees the weights that FSDP has gathered: a forward pass without a backward pass keeps some,
    and the parameters of the model are whole tensors then."""
    for _, module in fsdp_modules(model):
        module.reshard()


def count_gradients(model: torch.nn.Module, used: list[int]) -> None:
    """Lets FSDP count in `used`, for each weight that is trained, the gradients on this process,
    and take zeros where a weight has none. All processes must call it together."""
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    places = {name: i for i, name in enumerate(trained)}
    for prefix, module in fsdp_modules(model):
        module.reshard()
        sharded = {*module.parameters()}
        module.unshard()  # its own weights are others now, which autograd sees
        for name, weight in module.named_parameters(prefix):  # type: ignore[attr-defined]
            if name in places and weight not in sharded:
                place = places.pop(name)

                def count(_, place=place):
                    used[place] += 1

                weight.register_post_accumulate_grad_hook(count)
        module.reshard()
    model.set_reduce_scatter_unused_params(True)


def kept_buffers(module: torch.nn.Module) -> list[torch.Tensor]:
    """Buffers that checkpoints hold, since training may change them, such as codebooks."""
    return [
        buffer
        for owner in module.modules()
        for name, buffer in owner.named_buffers(recurse=False)
        if name not in owner._non_persistent_buffers_set
    ]


def share_buffers(module: torch.nn.Module, fsdp: bool) -> None:
    """Gives all processes the main one's buffers, before a step and before an evaluation: under
    FSDP always; under DDP, which does so itself in training, before an evaluation where its
    broadcast_buffers is off. Checkpoints hold those of the main process."""
    kept = not module.training and not getattr(module, "broadcast_buffers", True)
    for buffer in kept_buffers(module) if kept or fsdp else ():
        dist.broadcast(buffer, 0)


@contextlib.contextmanager
def hide_buffers(module: torch.nn.Module, accelerator: Accelerator) -> Iterator[None]:
    """Lets accelerate prepare a model with buffers for FSDP in its body.

    With fsdp_cpu_ram_efficient_loading it takes all that a model saves for sharded weights, and
    fails at buffers: here it sees none. The main process, which alone has read them, shares them.
    """
    plugin, hidden = getattr(accelerator.state, "fsdp_plugin", None), []
    if plugin and plugin.cpu_ram_efficient_loading:
        for owner in module.modules():
            if isinstance(owner, torch.nn.modules.batchnorm._BatchNorm):
                raise UserError(
                    "the model has BatchNorm, which accelerate's FSDP cannot load: write "
                    "fsdp_cpu_ram_efficient_loading: false in the accelerate YAML"
                )
            for name, buffer in owner.named_buffers(recurse=False):
                values = buffer.to(accelerator.device)
                dist.broadcast(values, 0)
                buffer.copy_(values)
                if name not in owner._non_persistent_buffers_set:
                    hidden.append((owner._non_persistent_buffers_set, name))
    for names, name in hidden:
        names.add(name)
    try:
        yield
    finally:
        for names, name in hidden:
            names.discard(name)
