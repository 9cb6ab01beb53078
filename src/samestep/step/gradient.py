"""The gradient of a step: that of all its micro-batches, over all processes."""

import math
from operator import attrgetter

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel

from samestep.base.errors import UserError, some
from samestep.processes import alike, sharding
from samestep.processes.ranks import Ranks
from samestep.processes.sharding import full_tensor
from samestep.step import trial
from samestep.step.plan import StepPlan

_trains, _is_training = attrgetter("requires_grad"), attrgetter("training")


class TrainedWeights:
    """The weights of a prepared model that train, and which of them a step has used."""

    def __init__(
        self, accelerator: Accelerator, ranks: Ranks, model: torch.nn.Module,
        prepared: list[bool] | None = None,
    ):  # fmt: skip
        """prepared: whether each weight of the model trained when it was prepared, if known."""
        self.ranks, self.model = ranks, model
        self.all = {trial.own_name(name): p for name, p in model.named_parameters()}
        self.prepared = prepared or [*map(_trains, self.all.values())]
        self.pattern = self.prepared
        self.choose_trained()
        self.modes: list[torch.nn.Module] = []  # the modules in train mode in the first step
        self.expected: list[bool] = []  # under FSDP: whether the first step used each weight
        self.steps = 0  # that were started
        if ranks.layout.fsdp:
            sharding.check_none_ignored(dict(zip(self.names, self.parameters, strict=True)))
        alike.say_kinds(ranks, model)
        # Under no_sync FSDP keeps full gradients, the memory that it saves; the end of a loader of
        # the script would end an accumulation: huggingface/accelerate#2531, #3017.
        more = {"sync_with_dataloader": False, "sync_each_batch": ranks.layout.fsdp}
        accelerator.gradient_state.plugin_kwargs.update(more)

    def choose_trained(self) -> None:
        trained = {name: p for name, p in self.all.items() if p.requires_grad}
        self.parameters, self.names = [*trained.values()], [*trained]
        self.used = [0] * len(self.parameters)  # micro-batches of the step that gave a gradient

    def start_step(self) -> None:
        """Start a step without gradients of before, also of weights that no optimizer has. Follow a
        loop that has changed which weights train; raise UserError where that cannot be, and for
        parts that trained and are now in eval mode."""
        self.steps += 1
        self.used[:] = [0] * len(self.used)
        for parameter in self.parameters:
            parameter.grad = None
        if self.steps == 1:
            self.modes = [module for module in self.model.modules() if module.training]
        if not all(map(_is_training, self.modes)):
            raise UserError(
                "the model, or a part of it, is in eval mode, which trained before: call "
                "model.train() after an evaluation of your own"
            )
        now = [*map(_trains, self.all.values())]
        if now != self.pattern:
            self.pattern = now
            self.choose_trained()
            if self.ranks.layout.sharded:
                raise UserError(
                    "requires_grad of a weight was changed, which sharded weights do not support: "
                    "use multi_gpu.yaml, or give the optimizer's groups of such weights a learning "
                    "rate of 0"
                )
            for parameter in self.parameters:
                parameter.grad = None
        if self.steps == 1 and self.ranks.layout.fsdp:
            sharding.count_gradients(self.model, self.used)
        sharding.share_buffers(self.model, self.ranks.layout.fsdp)

    def drop_unused(self) -> None:
        """Remove the zeros that FSDP gives to unused weights, which would decay:
        pytorch/pytorch#28294. Raise UserError unless all processes use the same in each step."""
        used = [count > 0 for count in self.used]
        if self.steps == 1:
            counts = self.ranks.sum_over_ranks(*map(int, used))
            agree = [count in (0, self.ranks.layout.processes) for count in counts]
            self.expected = used
        else:
            agree = [now == before for now, before in zip(used, self.expected, strict=True)]
        names = [name for name, good in zip(self.names, agree, strict=True) if not good]
        if names:
            raise UserError(
                f"the model uses {some(names, 3)} for some rows only, and FSDP needs every weight "
                "in each step of each process; change the model, or use multi_gpu.yaml"
            )
        for parameter, is_used in zip(self.parameters, used, strict=True):
            if not is_used:
                parameter.grad = None


class StepGradients:
    """The gradient of a step's summed losses, divided by the step's items in the loss.

    DDP averages it over the processes while the last micro-batch is computed, FSDP while each is.
    """

    waits = False  # whether DDP does so after all of them, since a step may be computed again

    def __init__(self, accelerator: Accelerator, weights: TrainedWeights):
        self.accelerator, self.weights = accelerator, weights
        self.ranks, self.model = weights.ranks, weights.model
        self.by_hand = False  # whether DDP does not reduce, since others train than it was made for
        self.divisor = 1
        is_ddp = isinstance(self.model, DistributedDataParallel)
        if is_ddp and not sharding.kept_buffers(self.model):
            self.model.broadcast_buffers = False  # nothing that training changes: a message less

    def start_step(self, plan: StepPlan) -> None:
        weights = self.weights
        by_hand = self.waits or weights.pattern != weights.prepared  # DDP would wait
        if isinstance(self.model, DistributedDataParallel) and by_hand != self.by_hand:
            self.by_hand = by_hand
            self.model.require_backward_grad_sync = not by_hand
        accumulation_steps = len(plan.run())
        self.accelerator.gradient_accumulation_steps, self.accelerator.step = accumulation_steps, 0
        # Others divide each loss: accelerate by the micro-batches of this process, and DDP or FSDP
        # by the processes, over which they average.
        self.divisor = accumulation_steps * self.ranks.layout.averaged

    def add(self, loss: torch.Tensor, num_items: int, number: int) -> None:
        """Add the gradient of the loss of micro-batch `number`, of a step with so many items."""
        self.accelerator.backward(loss * (self.divisor / max(num_items, 1)))

    def reduce(self) -> None:
        """Bring the gradient of the whole step to the weights of each process."""
        trial.check_reduced(self.model)
        if self.ranks.layout.fsdp:
            self.weights.drop_unused()
        if self.by_hand:
            self.average()

    def average(self) -> None:
        """Average the gradients over all processes, as DDP would."""
        parameters = self.weights.parameters
        used = self.ranks.sum_over_ranks(*(int(p.grad is not None) for p in parameters))
        for parameter, count in zip(parameters, used, strict=True):
            if count and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if count:
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.accelerator.num_processes

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale the gradient down to this norm, 0: never; return its norm before that.

        The norm is a float32 of shape (), and stays on the device.
        """
        # accelerate knows an FSDP model by all of its parameters, and else needs no search.
        sharded = self.ranks.layout.sharded
        parameters = self.model.parameters() if sharded else self.weights.parameters
        norm = self.accelerator.clip_grad_norm_(parameters, max_norm or math.inf)
        # DeepSpeed has clipped and stepped in `backward`, and gives a number.
        return full_tensor(torch.as_tensor(norm, device=self.accelerator.device))
