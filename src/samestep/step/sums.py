"""Adds up the gradients, losses and evaluations of micro-batches, in an order that is fixed.

Floating-point sums depend on their order. A sum that follows a binary tree over the numbers of the
micro-batches of a step does not depend on which process computes which of them:

    [0, 4) = [0, 2) + [2, 4)        [2, 4) = [2, 3) + [3, 4)

A process adds up the largest nodes inside its run of micro-batches. Then the processes exchange
these, and add them up the rest of the tree.
"""

import contextlib
import functools
import math
from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.tensor import DTensor

from samestep.processes.ranks import Ranks, UserError, as_user_error
from samestep.settings import contract
from samestep.step import sharding
from samestep.step.batches import Batch, StepPlan
from samestep.step.sharding import local, whole
from samestep.step.stopwatch import Stopwatch

Tensors = list[torch.Tensor]
BUCKET = 2 << 20  # elements that are exchanged at once
# torch 2.13 has renamed it, and warns of the old name.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TreeSum:
    """Sums of lists of tensors over a run of micro-batches, added in ascending order.

    `nodes` holds (first, size, sums) of each node: the sums over `size` micro-batches, a power of
    two, from `first` on, a multiple of `size`. As in a binary counter, two nodes that are the
    halves of a larger one become it at once: n micro-batches need about 2 log2(n) nodes at most.
    """

    def __init__(self):
        self.nodes: list[tuple[int, int, Tensors]] = []

    def add(self, first: int, tensors: Tensors, size: int = 1) -> None:
        """Adds a micro-batch or a node. The tensors become part of the sum, and change."""
        while self.nodes and self.nodes[-1][1] == size and self.nodes[-1][0] % (2 * size) == 0:
            first, _, sums = self.nodes.pop()
            if tensors:
                torch._foreach_add_(sums, tensors)
            tensors, size = sums, 2 * size
        self.nodes.append((first, size, tensors))

    def total(self) -> Tensors:
        """The sums over all micro-batches of a step; the last nodes are added first."""
        *others, (_, _, sums) = self.nodes
        for _, _, left in reversed(others):
            torch._foreach_add_(left, sums)
            sums = left
        self.nodes = []
        return sums


@functools.lru_cache
def nodes_of(run: range) -> list[tuple[int, int]]:
    """(first, size) of each node of a TreeSum over this run of micro-batches."""
    tree = TreeSum()
    for number in run:
        tree.add(number, [])
    return [(first, size) for first, size, _ in tree.nodes]


def total_over_ranks(tree: TreeSum, plan: StepPlan, like: Tensors) -> Tensors:
    """The sums over all micro-batches of a step, on every rank; `like` has their shapes.

    Each rank receives a part of every node of every rank, adds the nodes up the tree, and sends
    its part of the total to the others. All ranks must call it.
    """
    if len(plan.shares) == 1:
        return tree.total()
    totals = tree.nodes[0][2] if tree.nodes else [torch.empty_like(each) for each in like]
    targets, nodes = flat_parts(totals), [flat_parts(sums) for _, _, sums in tree.nodes]
    # While one bucket is added, the next is on its way to the ranks, and the last on its way back.
    waiting: deque[Iterator] = deque()
    for bucket in (*buckets(targets), None, None):
        if bucket:
            parts = [[sums[i] for i in bucket] for sums in nodes]
            waiting.append(exchange([targets[i] for i in bucket], parts, plan))
        for each in reversed(waiting):  # the same order on all ranks
            next(each, None)
        if len(waiting) == 3:
            waiting.popleft()
    tree.nodes = []
    return totals


def exchange(places: Tensors, nodes: list[Tensors], plan: StepPlan) -> Iterator[None]:
    """Adds the nodes of all ranks into `places`: sends at first, then adds, and at last copies."""
    ranks, size = len(plan.shares), sum(map(len, places))
    part = -(-size // ranks)  # of a vector, for each rank
    vectors = [places[0].new_empty(part * ranks) for _ in nodes or [places]]
    for vector, parts in zip(vectors, nodes, strict=False):
        torch.cat(parts, out=vector[:size])
        vector[size:] = 0
    total = vectors[0]
    sent = total if nodes else total[:0]
    if len(nodes) > 1:
        sent = torch.stack([each.view(ranks, part) for each in vectors], 1).flatten()
    everywhere = [nodes_of(plan.run(rank)) for rank in range(ranks)]
    sizes = [part * len(each) for each in everywhere]
    received = total.new_empty(sum(sizes))
    given = [part * len(nodes)] * ranks
    work = dist.all_to_all_single(received, sent, sizes, given, async_op=True)
    yield
    work.wait()
    tree = TreeSum()
    for (first, count), values in zip(chain(*everywhere), received.split(part), strict=True):
        tree.add(first, [values], count)
    work = all_gather(total, tree.total()[0], async_op=True)
    yield
    work.wait()
    torch._foreach_copy_(places, total[:size].split([len(place) for place in places]))


def flat_parts(tensors: Tensors) -> Tensors:
    """Views of all elements as vectors of at most BUCKET elements, in the order of memory.

    A gradient has the strides of its weight, so this order is the same on all ranks.
    """
    flat = [each.as_strided((each.numel(),), (1,)) for each in tensors]
    return [part for each in flat for part in each.split(BUCKET)]


def buckets(vectors: Tensors) -> list[list[int]]:
    """The indices of neighbours of one data type with at most BUCKET elements together."""
    found: list[list[int]] = []
    size = 0
    for i, vector in enumerate(vectors):
        size += len(vector)
        if not found or size > BUCKET or vector.dtype != vectors[i - 1].dtype:
            found.append([])
            size = len(vector)
        found[-1].append(i)
    return found


# ---- Gradients -----------------------------------------------------------------------------------


class StepGradients:
    """The gradient of a step's summed losses, divided by the step's loss terms.

    Ordinarily DDP or FSDP averages it over the processes while the last micro-batch is computed. If
    exact, the gradients of the micro-batches are added in the order of a tree, which takes several
    times the memory of the gradients. FSDP then adds those that the processes compute at the same
    time, and a process keeps its shards of the sums.
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
        self.tree, self.stopwatch = TreeSum(), stopwatch
        self.problem: UserError | None = None
        self.checking = True  # the first step
        self.guarded = False
        self.sharded = ranks.layout.sharded
        # autograd calls what is queued with a weight's gradient when the others are there, too, and
        # before DDP waits for the other processes, which is queued with the last one.
        queue = torch.autograd.Variable._execution_engine.queue_callback
        self.parameters[0].register_hook(lambda _: queue(stopwatch.stop))
        if exact and self.sharded:
            sharding.reduce_in_tree(model, accelerator, ranks.layout)

    def begin(self, plan: StepPlan) -> None:
        """Begins a step that is dealt so. `averaged` then is the number by which it is divided:
        accelerate divides each loss by the micro-batches of this process, and DDP or FSDP averages
        the gradients over the processes, unless exact."""
        self.plan, turns, accelerator = plan, len(plan.run()), self.accelerator
        if self.checking and self.ranks.layout.fsdp:
            sharding.count_gradients(self.model, self.used)
        sharding.share_buffers(self.model)
        self.stopwatch.start(turns)
        self.averaged = 1
        if not self.exact:
            accelerator.gradient_accumulation_steps, accelerator.step = turns, 0
            self.averaged = turns * self.ranks.layout.averaged

    def guard(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss; one that is not finite becomes NaN, so that all processes skip the step."""
        if self.checking and not self.guarded:
            self.guarded = True
            with self.ranks.fail_together(), as_user_error():
                contract.check_loss(loss)
        # A process knows only its own loss; through the gradients all see the NaN.
        return loss * (1 + 0 * loss.detach())

    @contextlib.contextmanager
    def micro_batch(self, number: int, batch: Batch) -> Iterator[None]:
        """Computes the gradient of micro-batch `number` of the step in its body."""
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
        alone = contextlib.nullcontext() if self.sharded else self.accelerator.no_sync(self.model)
        with alone, self.stopwatch.micro_batch(), shared_rows:
            yield
        self.check_buffers(before)
        # A weight without a gradient may have one in another micro-batch.
        grads = [
            torch.zeros_like(local(p)) if p.grad is None else local(p.grad) for p in self.parameters
        ]
        together = len(self.plan.shares) if self.sharded else 1
        self.tree.add(number - number % together, grads, together)
        for i, parameter in enumerate(self.parameters):
            if not self.ranks.layout.fsdp:
                self.used[i] += parameter.grad is not None
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

    def complete(self) -> None:
        """Brings the gradient of the whole step to the weights of each process.

        A weight that no micro-batch uses gets none. If a process has a problem, all raise it.
        """
        if self.ranks.layout.fsdp:
            self.check_used()
        self.checking, used = False, self.used
        if self.exact:
            used = self.ranks.sum_over_ranks(*used, problem=self.problem)
            if self.sharded:
                totals = self.tree.total()
            else:
                totals = total_over_ranks(self.tree, self.plan, [*self.parameters])
            for p, total in zip(self.parameters, totals, strict=True):
                if isinstance(p, DTensor):
                    form: Any = {"shape": p.shape, "stride": p.stride()}
                    total = DTensor.from_local(total, p.device_mesh, p.placements, **form)
                p.grad = total
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
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UserError(
                f"the model uses {', '.join(names[:3])}{more} for some rows only, and FSDP needs "
                "every weight in each step of each process; change the model, or use multi_gpu.yaml"
            )

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scales the gradient down to this norm; 0: never. Gives its norm before that.

        The norm is a float32 of shape (), and stays on the device.
        """
        limit = max_norm or math.inf
        if not self.exact:
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), limit)
            # DeepSpeed has clipped and stepped in `backward`, and gives a number.
            return whole(torch.as_tensor(norm, device=self.accelerator.device))
        self.accelerator.unscale_gradients()
        grads = [p.grad for p in self.parameters if p.grad is not None]
        norm = norm_by_rows(grads)
        if max_norm and grads:  # as in torch.nn.utils.clip_grads_with_norm_, which takes no shards
            torch._foreach_mul_([local(g) for g in grads], (limit / (norm + 1e-6)).clamp(max=1.0))
        return norm


def own_name(name: str) -> str:
    """The name that a weight or buffer has in the task's model."""
    return name.removeprefix("module.").removeprefix("model.")


def norm_by_rows(grads: Tensors) -> torch.Tensor:
    """The Euclidean norm of these tensors: a float32 of shape ().

    The squares of each row are added in float64, then the rows in their order. Sharding cuts along
    the first dimension, so the norm does not depend on who holds which rows.
    """
    if not grads:
        return torch.zeros(())
    rows, group = [], None
    for grad in grads:
        values = local(grad)
        values = torch.view_as_real(values) if values.is_complex() else values
        values = values.flatten(1) if values.ndim > 1 else values.reshape(-1, 1)
        squares = torch.linalg.vector_norm(values, dim=1, dtype=torch.float64).square()
        if isinstance(grad, DTensor):  # FSDP cuts R rows into blocks of ceil(R / n)
            shard = grad.device_mesh.ndim - 1  # HSDP's first dimension holds copies
            group = grad.device_mesh.get_group(shard)
            first = math.ceil(grad.shape[0] / group.size()) * group.rank()
            own, squares = squares, squares.new_zeros(grad.shape[0])
            squares[first : first + len(own)] = own
        rows.append(squares)
    everywhere = torch.cat(rows)
    if group:
        dist.all_reduce(everywhere, group=group)  # others hold zeros, so the order is free
    return everywhere.sum().sqrt().float()


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
            if ranks.layout.together > 1:  # each has the sums of its parts of the rows, or zeros
                (total,) = tree.total() if tree.nodes else [torch.zeros_like(self.values)]
                total = ranks.sum_arrays(total.cpu().numpy() * ranks.layout.adds)
                total = torch.from_numpy(total)
            else:
                (total,) = total_over_ranks(tree, plan, [self.values])
            parts = total.cpu().split([math.prod(shape) for shape in first.values()])
            named = zip(first.items(), parts, strict=True)
            totals.append({name: part.view(shape) for (name, shape), part in named})
        return totals
