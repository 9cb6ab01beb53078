"""The model as it is prepared: built on all processes, wrapped with the function that computes."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch
from accelerate import Accelerator

from samestep.base.console import print_on_main
from samestep.base.errors import UserError, catch
from samestep.processes.ranks import Ranks
from samestep.processes.sharding import is_dtensor
from samestep.step.plan import StepPlan

HALF = (torch.bfloat16, torch.float16)


def build_on_ranks(make: Callable, accelerator: Accelerator, ranks: Ranks) -> torch.nn.Module:
    """Build the task's model, which `make()` gives. All processes must call it.

    With fsdp_cpu_ram_efficient_loading only the main process has its weights, and sends the others
    their shards. These make it on the meta device, and get memory that nobody touches, which takes
    none of the host's. accelerate tells weights apart by their addresses, which meta tensors lack.
    """
    plugin, model = getattr(accelerator.state, "fsdp_plugin", None), None
    one_builds = plugin and plugin.cpu_ram_efficient_loading
    with ranks.fail_together():
        if accelerator.is_main_process or not one_builds:
            model = make()
    if not one_builds:
        return model
    decisions = getattr(model, "decisions", None)  # see samestep/models/next_token.py
    decisions, form = ranks.from_main((decisions, form_of(model) if model else None))
    with ranks.fail_together():
        if model is None:
            model, _ = catch(build_empty, make)
            if model is None or form_of(model) != form:  # a task may look at its weights
                model = make()
            elif decisions:
                model.decisions = decisions
    return model


def build_empty(make: Callable) -> torch.nn.Module:
    """Build the model that `make()` gives, without values; raise if the task needs values."""
    with torch.device("meta"):
        module = TaskModule(make())
    spared = [n for n, p in module.named_parameters() if getattr(p, "_no_weight_decay", False)]
    module.to_empty(device="cpu")  # makes new weights, without the attributes of the old
    for name in spared:
        module.get_parameter(name)._no_weight_decay = True  # type: ignore[attr-defined]
    module.tie_weights()
    return module.model


def form_of(model: torch.nn.Module) -> list[tuple]:
    """List names, shapes and types of weights and buffers of a model, and which are trained."""
    weights = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in weights]


class TaskModule(torch.nn.Module):
    """The module that accelerate prepares. It calls a function of the task with the task's model.

    So DDP, FSDP, autocast and torch.compile wrap all that the function computes, including the
    loss, and the task never sees a wrapper. It computes inside `context()`.
    """

    def __init__(self, model: torch.nn.Module, context: Callable = contextlib.nullcontext):
        super().__init__()
        self.model, self.context = model, context
        self.rounded = ""  # the dtype of a loss below float32, computed in half precision
        names = defaultdict(list)
        for name, parameter in self.named_parameters(remove_duplicate=False):
            names[id(parameter)].append(name)
        self.tied = [group for group in names.values() if len(group) > 1]
        self.tp_size = getattr(model, "_tp_size", None)  # accelerate asks for it
        if hasattr(model, "config"):
            self.config = model.config  # accelerate looks for sliding windows, and DeepSpeed sizes
        # FSDP shards each of these blocks of a transformers model by itself. accelerate would also
        # shard embedding and head by themselves, if it found them: a loss in chunks uses the head's
        # weight outside of its forward, where only those of the root are gathered.
        self._no_split_modules = getattr(model, "_no_split_modules", None)

    def forward(self, function, batch):
        with self.context():
            result = function(self.model, batch)
        # accelerate makes it float32: huggingface/accelerate#134.
        if torch.is_tensor(result) and result.dtype in HALF and not torch.compiler.is_compiling():
            self.rounded = str(result.dtype).removeprefix("torch.")
        return result

    def train(self, mode: bool = True) -> "TaskModule":
        """Keep modules whose weights are all frozen in eval mode: a teacher has no dropout, and its
        BatchNorm keeps its statistics."""
        super().train(mode)
        for module in _frozen_modules(self):
            module.eval()
        return self

    def tie_weights(self) -> None:
        """Tie weights that were tied: accelerate asks for it after it has replaced them."""
        for first, *aliases in self.tied:
            for name in aliases:
                owner, _, attribute = name.rpartition(".")
                setattr(self.get_submodule(owner), attribute, self.get_parameter(first))


def _frozen_modules(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the largest modules that have weights, of which none trains."""
    weights = [*module.parameters()]
    if weights and not any(weight.requires_grad for weight in weights):
        yield module
        return
    for child in module.children():
        yield from _frozen_modules(child)


def is_compiled(model: torch.nn.Module) -> bool:
    """Return whether a part of the model is compiled: by Module.compile, or by torch.compile, which
    wraps it, as accelerate's compile_regions does."""
    return any(m._compiled_call_impl or hasattr(m, "_orig_mod") for m in model.modules())


def eager(model: torch.nn.Module) -> contextlib.AbstractContextManager:
    """Run a compiled model without its compiled code: each new shape would compile for minutes."""
    if is_compiled(model):
        return torch.compiler.set_stance("force_eager")
    return contextlib.nullcontext()


@contextlib.contextmanager
def keep_modes(model: torch.nn.Module) -> Iterator[None]:
    """Put back which parts of the model are in train mode, and which in eval mode."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def bare_model(accelerator: Accelerator, module: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside a prepared module, and inside its TaskModule if it has one."""
    model = accelerator.unwrap_model(module, keep_torch_compile=False)
    return model.model if isinstance(model, TaskModule) else model


def gather_model(
    accelerator: Accelerator, ranks: Ranks, module: torch.nn.Module, build: Callable
) -> torch.nn.Module | None:
    """Return the task's model with full weights, on the main process. All processes must call it.

    If the weights are sharded, this is the model that `build()` makes anew, on the CPU, and None on
    the other processes: only the main process needs memory for all weights, and for these once.
    """
    if not ranks.layout.sharded:
        return bare_model(accelerator, module)
    model, built, whole = None, {}, {}
    with ranks.fail_together():
        if accelerator.is_main_process:
            model = build()
            built = model.state_dict()
    if ranks.layout.deepspeed:
        state = accelerator.get_state_dict(module) or {}
    else:
        state = accelerator.unwrap_model(module, keep_torch_compile=False).state_dict()
    shapes = {bare_name(name).removeprefix("model."): v.shape for name, v in state.items()}
    with ranks.fail_together():  # before what all processes do together
        for name, shape in shapes.items() if model is not None else ():
            if name not in built or built[name].shape != shape:
                raise ValueError(f"the model that is built anew has no {name} of {[*shape]}")
    with ranks.fail_together():
        for name, values in state.items():
            if is_dtensor(values):  # under offload it is on the CPU, where NCCL is not
                values = values.to(values.device_mesh.device_type).full_tensor()  # type: ignore[attr-defined]
            if model is not None:
                name = bare_name(name).removeprefix("model.")
                whole[name] = built[name].copy_(values)
        # Some modules build their state when they are asked. A weight that is missing is an error.
        if model is not None:
            model.load_state_dict(whole)
    return model


def enable_gradient_checkpointing(model: torch.nn.Module) -> None:
    """Make a model of transformers or diffusers recompute activations in the backward pass.

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
    model: torch.nn.Module, accelerator: Accelerator, plan: StepPlan,
    device_shares: str | list[float],
) -> torch.nn.Module:  # fmt: skip
    """Warn about BatchNorm, and convert it to SyncBatchNorm on several GPUs.

    BatchNorm takes its statistics from a micro-batch, so the result depends on how a step is split.
    With GroupNorm and LayerNorm it does not. SyncBatchNorm waits for all GPUs in each micro-batch.
    Raises UserError if their shares are not equal: some would wait for ever, pytorch/pytorch#38174.
    """
    kinds = torch.nn.modules.batchnorm._BatchNorm
    if not any(isinstance(module, kinds) for module in model.modules()):
        return model
    print_on_main(
        "warning: the model has BatchNorm, so its result depends on how a step is split; "
        "see docs/task.md"
    )
    processes = accelerator.num_processes
    if processes == 1 or accelerator.device.type != "cuda":
        return model
    if device_shares == "auto" or len({*plan.shares}) > 1:
        raise UserError(
            "BatchNorm needs equal shares, since the GPUs reduce its statistics in each "
            f"micro-batch: give a global_batch_size that {processes} divides and device_shares "
            "equal, or use GroupNorm or LayerNorm"
        )
    return torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)


_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # of torch.compile, and of checkpointing


def bare_name(name: str) -> str:
    """Return the name of a weight in the task's model, without those of wrapped blocks."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
