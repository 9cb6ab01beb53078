"""Adds up the gradients of a step, and the sums of an evaluation, over all micro-batches."""

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel

from samestep.base.errors import UserError, some
from samestep.core import inputs, sharding
from samestep.core.batches import Batch, StepPlan
from samestep.core.exact import TreeAllReduce, TreeSum, Turn, exchange, norm_by_rows, reduce_in_tree
from samestep.core.ranks import Ranks
from samestep.core.sharding import full_tensor, local
from samestep.core.stopwatch import Stopwatch

# ---- Gradients -----------------------------------------------------------------------------------


class StepGradients:
    """The gradient of a step's summed losses, divided by the step's items in the loss.

    Ordinarily DDP or FSDP averages it over the processes while the last micro-batch is computed. If
    exact, the gradients of the micro-batches are added in the order of a tree (exact.py), which
    takes several times the memory of the gradients; under FSDP, of a process's shards of them.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        ranks: Ranks,
        model: torch.nn.Module,
        exact: bool,
        stopwatch: Stopwatch,
    ):
        self.accelerator, self.ranks, self.model, self.exact = accelerator, ranks, model, exact
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.names = [name for name, p in model.named_parameters() if p.requires_grad]
        self.used = [0] * len(self.parameters)  # micro-batches of the step that gave a gradient
        self.expected: list[bool] = []  # under FSDP: whether the first step used each weight
        self.tree, self.turn, self.stopwatch = TreeSum(), Turn(StepPlan(1, 1)), stopwatch
        self.problem: UserError | None = None
        self.checking = True  # the first step
        self.guarded = False
        self.sharded = ranks.layout.sharded
        if isinstance(model, DistributedDataParallel) and not sharding.kept_buffers(model):
            model.broadcast_buffers = False  # nothing that training changes: a message less
        # autograd calls what is queued with a weight's gradient when the others are there, too, and
        # before DDP waits for the other processes, which is queued with the last one.
        queue = torch.autograd.Variable._execution_engine.queue_callback
        self.parameters[0].register_hook(lambda _: queue(stopwatch.stop))
        self.blocks, self.buckets = [], None
        if exact and self.sharded:
            self.blocks = reduce_in_tree(model, accelerator, ranks.layout, self.turn)
        elif exact and isinstance(model, DistributedDataParallel):
            self.buckets = TreeAllReduce(model, self.parameters, self.tree, self.turn)
        self.grads: list | None = None  # of a micro-batch whose gradients DDP must not see
        if exact and not self.sharded:
            for place, parameter in enumerate(self.parameters):
                take = functools.partial(self.take, place)
                parameter.register_post_accumulate_grad_hook(take)

    def start_step(self, plan: StepPlan) -> None:
        """Starts a step with this plan. `divisor` then is the number by which it is divided:
        accelerate divides each loss by the micro-batches of this process, and DDP or FSDP averages
        the gradients over the processes, unless exact."""
        self.turn.plan, turns, accelerator = plan, len(plan.run()), self.accelerator
        if self.checking and self.ranks.layout.fsdp:
            sharding.count_gradients(self.model, self.used)
        sharding.share_buffers(self.model, self.ranks.layout.fsdp)
        self.stopwatch.start()
        self.divisor = 1
        if not self.exact:
            accelerator.gradient_accumulation_steps, accelerator.step = turns, 0
            self.divisor = turns * self.ranks.layout.averaged

    def nan_if_not_finite(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss; one that is not finite becomes NaN, so that all processes skip the step."""
        if self.checking and not self.guarded:
            self.guarded = True
            with self.ranks.fail_together():
                inputs.check_loss(loss)
        # inf * 0 is NaN, and its gradient makes the sums of all processes NaN.
        return loss * (1 + 0 * loss.detach())

    @contextlib.contextmanager
    def micro_batch(self, number: int, batch: Batch) -> Iterator[None]:
        """Computes the gradient of micro-batch `number` of the step in its body."""
        self.turn.number = number
        shared_rows = sharding.split_rows(self.accelerator, batch)
        if not self.exact:
            with self.stopwatch.micro_batch(), shared_rows:
                yield
            return
        # A buffer's version counts its changes. In the first step its values are compared, too:
        # torch.nn.functional.batch_norm changes them without a new version.
        before = {
            name: (buffer, buffer._version, buffer.clone() if self.checking else None)
            for name, buffer in self.model.named_buffers()
        }
        alone: Any = contextlib.nullcontext()
        if not self.sharded and not (self.buckets and self.turn.last):
            self.grads = [None] * len(self.parameters)
            # accelerate's no_sync does nothing for DDP with one process, as torchrun starts it.
            alone = getattr(self.model, "no_sync", contextlib.nullcontext)()
        with alone, self.stopwatch.micro_batch():
            yield
        self.check_buffers(before)
        if not self.ranks.layout.fsdp:
            for i, grad in enumerate(self.grads or [p.grad for p in self.parameters]):
                self.used[i] += grad is not None
        if self.grads:
            # A weight without a gradient may have one in another micro-batch.
            pairs = zip(self.parameters, self.grads, strict=True)
            self.tree.add(number, [torch.zeros_like(p) if g is None else g for p, g in pairs])
            self.grads = None

    def take(self, place: int, parameter: torch.nn.Parameter) -> None:
        """Takes a gradient out of a weight. DDP expects one in the last micro-batch, too, where it
        has seen one before."""
        if self.grads:
            before, grad = self.grads[place], parameter.grad
            self.grads[place] = grad if before is None else before.add_(grad)
            parameter.grad = None

    def check_buffers(self, before: dict[str, tuple]) -> None:
        """Notes a problem if a micro-batch has changed a buffer, as BatchNorm does."""
        for name, buffer in self.model.named_buffers():
            old, version, values = before.get(name, (None, 0, None))
            same = buffer is old and buffer._version == version
            if same and self.checking:  # waits for the device
                same = torch.equal(buffer.nan_to_num(), values.nan_to_num())
            if not same and not self.problem:
                self.problem = UserError(
                    f"exact: the model changes its buffer {own_name(name)} while it trains, so the "
                    "result depends on which process computes what; use GroupNorm or LayerNorm in "
                    "place of BatchNorm, or set exact to false"
                )

    def reduce(self) -> None:
        """Brings the gradient of the whole step to the weights of each process.

        A weight that no micro-batch uses gets none. If a process has a problem, all raise it.
        """
        if self.ranks.layout.fsdp:
            self.check_used()
        if isinstance(self.model, DistributedDataParallel):
            try:  # else torch would tell so in the next step, after this one
                self.model._check_reducer_finalized()
            except RuntimeError:
                raise UserError(
                    "a weight has no gradient in this step, and DDP has exchanged not all others; "
                    "leave out find_unused_parameters and static_graph"
                ) from None
        self.checking, used = False, self.used
        if self.exact:
            used = self.ranks.sum_over_ranks(*used, problem=self.problem)
            assert not any(block.tree.nodes for block in self.blocks)  # FSDP has added all of them
            if self.buckets:
                self.buckets.finish()
            elif not self.sharded:
                for parameter, total in zip(self.parameters, self.tree.total(), strict=True):
                    parameter.grad = total
        if self.exact or self.ranks.layout.fsdp:
            for parameter, count in zip(self.parameters, used, strict=True):
                parameter.grad = parameter.grad if count else None
            self.used[:] = [0] * len(self.used)

    def check_used(self) -> None:
        """Raises UserError unless all processes use the same weights in each step, as FSDP needs:
        the zeros that stand for other gradients would change weights that no process uses."""
        used = [count > 0 for count in self.used]
        if self.checking:
            counts = self.ranks.sum_over_ranks(*map(int, used))
            agree = [count in (0, self.accelerator.num_processes) for count in counts]
            self.expected = used
        else:
            agree = [now == before for now, before in zip(used, self.expected, strict=True)]
        names = [own_name(name) for name, good in zip(self.names, agree, strict=True) if not good]
        if names:
            raise UserError(
                f"the model uses {some(names, 3)} for some rows only, and FSDP needs every weight "
                "in each step of each process; change the model, or use multi_gpu.yaml"
            )

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scales the gradient down to this norm; 0: never. Gives its norm before that.

        The norm is a float32 of shape (), and stays on the device.
        """
        limit = max_norm or math.inf
        if not self.exact:
            # accelerate knows an FSDP model by all of its parameters, and else needs no search.
            parameters = self.model.parameters() if self.sharded else self.parameters
            norm = self.accelerator.clip_grad_norm_(parameters, limit)
            # DeepSpeed has clipped and stepped in `backward`, and gives a number.
            return full_tensor(torch.as_tensor(norm, device=self.accelerator.device))
        self.accelerator.unscale_gradients()
        grads = [p.grad for p in self.parameters if p.grad is not None]
        norm = norm_by_rows(grads)
        if max_norm and grads:  # as in torch.nn.utils.clip_grads_with_norm_, which takes no shards
            torch._foreach_mul_([local(g) for g in grads], (limit / (norm + 1e-6)).clamp(max=1.0))
        return norm


def own_name(name: str) -> str:
    """The name that a weight or buffer has in the task's model."""
    return name.removeprefix("module.").removeprefix("model.")


# ---- Evaluations ---------------------------------------------------------------------------------


class EvaluationSums:
    """Sums a task's eval_sums over the batches of each source, in float64."""

    def __init__(self, plans: list[StepPlan], device: torch.device):
        self.plans, self.trees = plans, [TreeSum() for _ in plans]
        pairs = zip(self.trees, plans, strict=True)
        self.places = ((tree, number) for tree, plan in pairs for number in plan.run())
        # Apple's GPUs have no float64.
        self.device = torch.device("cpu") if device.type == "mps" else device
        self.layouts: list[dict[str, tuple]] = []  # names and shapes; those of all batches agree

    def add(self, sums: dict[str, torch.Tensor]) -> None:
        """Adds the sums of the next batch; one past those of this rank only shows the shapes."""
        sums = dict(sorted(sums.items()))
        layout = {name: tuple(value.shape) for name, value in sums.items()}
        if layout not in self.layouts:
            self.layouts.append(layout)
        values = [value.to(self.device).double().reshape(-1) for value in sums.values()]
        self.values = torch.cat(values)
        tree, number = next(self.places, (None, 0))
        if tree and len(self.layouts) == 1:
            tree.add(number, [self.values])

    def total(self, ranks: Ranks) -> list[dict[str, torch.Tensor]]:
        """The sums of each source over all processes, in CPU memory; all processes must call it.

        Raises UserError if batches differ in the names or shapes of their sums.
        """
        first, *others = (each for layouts in ranks.gather(self.layouts) for each in layouts)
        for other in [each for each in others if each != first]:
            raise UserError(
                f"task.eval_sums returns tensors {first} for one batch, and {other} for another; "
                "return the same for all"
            )
        totals = []
        for plan, tree in zip(self.plans, self.trees, strict=True):
            nodes = [sums for _, _, (sums,) in tree.nodes]
            total = nodes[-1] if nodes else torch.zeros_like(self.values)
            runs = [plan.run(rank) for rank in range(len(plan.shares))]
            if len(runs) > 1 and ranks.layout.replica_size == 1:
                for _ in exchange(total, nodes, runs):
                    pass
            elif nodes:
                (total,) = tree.total()
            if (
                ranks.layout.replica_size > 1
            ):  # each has the sums of its parts of the rows, or zeros
                adds = ranks.layout.adds
                total = torch.from_numpy(ranks.sum_arrays(total.cpu().numpy() * adds))
            parts = total.cpu().split([math.prod(shape) for shape in first.values()])
            named = zip(first.items(), parts, strict=True)
            totals.append({name: part.view(shape) for (name, shape), part in named})
        return totals
