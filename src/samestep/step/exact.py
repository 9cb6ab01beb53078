"""exact: adds up the gradients of a step's micro-batches in an order that no process decides.

Floating-point sums depend on their order. A sum that follows a binary tree over the numbers of the
micro-batches of a step does not depend on which process computes which of them:

    [0, 4) = [0, 2) + [2, 4)        [2, 4) = [2, 3) + [3, 4)

A process adds up the largest nodes inside its run of micro-batches. Then each receives a part of
all nodes, adds these up the rest of the tree, and sends the others its part of the sum: as many
bytes as DDP's all-reduce where each process has one node.
"""

import functools
import math
import os
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel

from samestep.processes import sharding
from samestep.processes.sharding import Tensors, is_dtensor, local
from samestep.step.gradient import TrainedWeights
from samestep.step.plan import StepPlan

_PIECE = 25 << 20  # bytes of gradients that are exchanged at once


class TreeSum:
    """Sums of lists of tensors over a run of micro-batches, added in ascending order.

    `nodes` holds (first, size, sums) of each node: the sums over `size` micro-batches, a power of
    two, from `first` on, a multiple of `size`. As in a binary counter, two nodes that are the
    halves of a larger one become it at once: n micro-batches need about 2 log2(n) nodes at most.
    """

    def __init__(self, nodes: Iterable[tuple[int, int, Tensors]] = ()):
        self.nodes = [*nodes]

    def add(self, first: int, tensors: Tensors, size: int = 1) -> None:
        """Add a micro-batch or a node. The tensors become the sums of the last node."""
        while self.nodes and self.nodes[-1][1] == size and self.nodes[-1][0] % (2 * size) == 0:
            first, _, left = self.nodes.pop()
            size *= 2
            if tensors:
                torch._foreach_add_(tensors, left)
        self.nodes.append((first, size, tensors))

    def total(self) -> Tensors:
        """Return the sums over all micro-batches of a step; the last nodes are added first."""
        *others, (_, _, sums) = self.nodes
        for _, _, left in reversed(others):
            torch._foreach_add_(sums, left)
        self.nodes = []
        return sums


@functools.lru_cache
def nodes_of(run: range) -> list[tuple[int, int]]:
    """Return (first, size) of each node of a TreeSum over this run of micro-batches."""
    tree = TreeSum()
    for number in run:
        tree.add(number, [])
    return [(first, size) for first, size, _ in tree.nodes]


def exchange(total: torch.Tensor, nodes: Tensors, runs: Sequence[range], group: Any = None) -> None:
    """Put the sum over all micro-batches into `total`, on each process of the group.

    A reduce-scatter that adds in the order of the tree, then an all-gather: process p gets part p,
    (N / P,), of the nodes of all P processes, adds these up, and sends its sum to all.

    total: (N,). nodes: of this process's run, each (N,), which are overwritten; the last may be
        `total` itself.
    runs: those of the processes of the group, which call it together.
    """
    rank, count = dist.get_rank(group), len(runs)
    deliver = _deliver_in_pairs if total.device.type == "cpu" else _deliver_at_once
    places = total.tensor_split(count)  # of each process's part
    split = [node.tensor_split(count) for node in nodes]
    sent = [[parts[peer] for parts in split] for peer in range(count)]
    received = [[torch.empty_like(places[rank]) for _ in nodes_of(run)] for run in runs]
    received[rank] = sent[rank]
    deliver(sent, received, group)
    tree = TreeSum()
    for (first, size), part in zip(chain(*map(nodes_of, runs)), chain(*received), strict=True):
        tree.add(first, [part], size)
    (part_sum,) = tree.total()
    if part_sum.data_ptr() != places[rank].data_ptr():
        places[rank].copy_(part_sum)
    deliver([[part_sum]] * count, [[place] for place in places], group)


def _deliver_in_pairs(sent: Sequence[Tensors], received: Sequence[Tensors], group: Any) -> None:
    """Send each other process of the group its tensors, and receive those of each. On CPUs this is
    faster than a collective, which copies them."""
    works = []
    for peer in range(len(sent)):
        if peer != dist.get_rank(group):
            works += [dist.isend(tensor, group=group, group_dst=peer) for tensor in sent[peer]]
            works += [dist.irecv(place, group=group, group_src=peer) for place in received[peer]]
    for work in works:
        work.wait()


def _deliver_at_once(sent: Sequence[Tensors], received: Sequence[Tensors], group: Any) -> None:
    """Do the same by a collective, its own tensors too: for pairs of a thousand processes Python
    would take long, and gloo sends none from a GPU."""
    sizes = [[sum(map(torch.numel, tensors)) for tensors in lists] for lists in (received, sent)]
    places = [*chain(*received)]
    vector = torch.cat(places)
    own = torch.cat([vector[:0], *chain(*sent)])  # a process may have none
    dist.all_to_all_single(vector, own, sizes[0], sizes[1], group)
    torch._foreach_copy_(places, vector.split([*map(torch.numel, places)]))


def _exchange_lists(nodes: list[Tensors], runs: Sequence[range]) -> Tensors:
    """Return the sums over all micro-batches of lists of tensors, of which `nodes` has those of
    this process; communicate in pieces of at most _PIECE bytes, or of one tensor."""
    pieces: list[list[int]] = []  # places of the tensors of each
    size = 0
    for place, tensor in enumerate(nodes[-1]):
        size += tensor.nbytes
        if not pieces or size > _PIECE or nodes[-1][place - 1].dtype != tensor.dtype:
            pieces.append([])
            size = tensor.nbytes
        pieces[-1].append(place)
    totals = []
    for places in pieces:
        vectors = [torch.cat([flat(sums[place]) for place in places]) for sums in nodes]
        exchange(vectors[-1], vectors, runs)
        tensors = [nodes[-1][place] for place in places]
        parts = vectors[-1].split([tensor.numel() for tensor in tensors])
        for part, like in zip(parts, tensors, strict=True):
            totals.append(part.as_strided(like.shape, like.stride()))
    return totals


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """View all elements in the order of memory, (numel,). A gradient has the strides of its weight,
    so this order is the same on all processes."""
    return tensor.as_strided((tensor.numel(),), (1,))


def be_deterministic() -> None:
    """Make torch compute the same bits from the same numbers."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it
    torch.use_deterministic_algorithms(True)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010
    torch.backends.cudnn.benchmark = False


# ---- Gradients -----------------------------------------------------------------------------------


class ExactGradients:
    """The same bytes on any number of processes: the gradients of the micro-batches are added in
    the order of a tree, which takes several times their memory; under FSDP, that of shards.

    DDP exchanges nothing: the sums are exchanged at the end. Its methods are StepGradients's.
    """

    def __init__(self, accelerator: Accelerator, weights: TrainedWeights):
        self.accelerator, self.weights = accelerator, weights
        self.ranks, self.model = weights.ranks, weights.model
        self.sharded, self.tree = self.ranks.layout.sharded, TreeSum()
        self.plan, self.number = StepPlan(1, 1), 0  # of the step, of the micro-batch in it
        self.blocks: list[_TreeReduceScatter] = []
        if self.sharded:
            self.blocks = self.reduce_in_tree()
        elif isinstance(self.model, DistributedDataParallel):
            self.model.broadcast_buffers = False  # a save compares those of the processes
            # As in no_sync, whose context accelerate leaves out for DDP with one process.
            self.model.require_backward_grad_sync = False

    def start_step(self, plan: StepPlan) -> None:
        """Start a step with this plan: nothing divides its losses."""
        self.plan = plan
        self.accelerator.gradient_accumulation_steps, self.accelerator.step = 1, 0

    def add(self, loss: torch.Tensor, num_items: int, number: int) -> None:
        """Compute the gradient of the loss of micro-batch `number`, of a step with so many items;
        take it out of the weights, and add it to the tree."""
        self.number = number
        self.accelerator.backward(loss * (1 / max(num_items, 1)))
        if self.sharded:  # FSDP has taken it: see _TreeReduceScatter
            return
        grads = []
        for place, parameter in enumerate(self.weights.parameters):
            grad, parameter.grad = parameter.grad, None
            self.weights.used[place] += grad is not None
            if grad is None:  # it may have one in another micro-batch
                grad = torch.zeros_like(parameter)
            grads.append(grad)
        self.tree.add(number, grads)

    def reduce(self) -> None:
        """Bring the step's sums to the weights of each process."""
        if self.sharded:
            assert not any(block.tree.nodes for block in self.blocks)  # FSDP has added all of them
            self.weights.drop_unused()
            return
        runs = [self.plan.run(rank) for rank in range(len(self.plan.shares))]
        used = torch.tensor(self.weights.used)
        if len(runs) == 1:
            totals = self.tree.total()
        else:
            nodes, self.tree.nodes = [sums for _, _, sums in self.tree.nodes], []
            work = dist.all_reduce(used, group=self.ranks.group, async_op=True)
            totals = _exchange_lists(nodes, runs)
            work.wait()
        counts = used.tolist()
        for parameter, total, count in zip(self.weights.parameters, totals, counts, strict=True):
            if count:  # zeros would decay a weight that no process uses: pytorch/pytorch#28294
                parameter.grad = total

    def reduce_in_tree(self) -> list["_TreeReduceScatter"]:
        """Make FSDP add the gradients of each block up a tree; it takes no mean."""
        across, blocks = None, []
        if self.ranks.layout.dp_replicate > 1:
            across = self.accelerator.torch_device_mesh["dp_replicate"].get_group()
        for _, module in sharding.fsdp_modules(self.model):
            blocks.append(_TreeReduceScatter(self, across))
            module.set_custom_reduce_scatter(blocks[-1])
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        return blocks

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clip as StepGradients.clip; add the squares in an order that no process decides."""
        self.accelerator.unscale_gradients()
        grads = [p.grad for p in self.weights.parameters if p.grad is not None]
        norm = _norm_by_rows(grads)
        if max_norm and grads:  # as in torch.nn.utils.clip_grads_with_norm_, which takes no shards
            scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_([local(grad) for grad in grads], scale)
        return norm


# ---- Under FSDP ----------------------------------------------------------------------------------


class _TreeReduceScatter:
    """FSDP's reduce-scatter of one block: this process adds up its shard of all gradients.

    The processes of its group compute neighboring micro-batches at the same time. It keeps their
    sums, and gives them to FSDP with its last micro-batch. FSDP adds each output to what it has:
    before, it gets -0.0, since x + -0.0 is x bit for bit, and x + 0.0 is not for x = -0.0.
    Then the copies of an HSDP model, in the group `across`, exchange theirs. It takes twice the
    memory of the gradients of a block, and computation waits for it.
    """

    def __init__(self, gradients: ExactGradients, across: dist.ProcessGroup | None):
        self.gradients, self.across, self.tree = gradients, across, TreeSum()

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate a buffer for FSDP."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> None:
        received, tree, plan = torch.empty_like(input_tensor), TreeSum(), self.gradients.plan
        dist.all_to_all_single(received, input_tensor, group=group)
        for i, part in enumerate(received.chunk(group.size())):
            tree.add(self.gradients.number - group.rank() + i, [part])
        for first, size, (part,) in tree.nodes:
            self.tree.add(first, [part.clone()], size)  # the memory of the others becomes free
        output_tensor.fill_(-0.0)
        if self.gradients.number != plan.run()[-1]:
            return
        if self.across:
            nodes, self.tree.nodes = [part for _, _, (part,) in self.tree.nodes], []
            total, accumulation_steps = nodes[-1], len(plan.run())
            starts = [plan.run(i * group.size())[0] for i in range(self.across.size())]
            runs = [range(start, start + accumulation_steps * group.size()) for start in starts]
            exchange(total, nodes, runs, self.across)
        else:
            (total,) = self.tree.total()
        if not (self.across and self.across.rank()):  # FSDP will add the copies' outputs
            output_tensor.copy_(total)


class _WaitForAllGradients(torch.autograd.Function):
    """Gives its inputs back; in the backward pass no gradient goes on before all are complete."""

    @staticmethod
    def forward(ctx, *inputs):
        return inputs

    @staticmethod
    def backward(ctx, *gradients):
        return gradients


def sum_inside_blocks(module: torch.nn.Module) -> None:
    """Add the gradients of an input of a block inside the block, before those of other blocks, as
    FSDP does. It shows where blocks share an input, as decoders do with the encoder's outputs."""

    def separate(_, positional, named):
        values = [*positional, *named.values()]
        places = [i for i, v in enumerate(values) if torch.is_tensor(v) and v.requires_grad]
        if places:
            same = _WaitForAllGradients.apply(*(values[i] for i in places))
            for i, value in zip(places, same, strict=True):
                values[i] = value
        count = len(positional)
        return tuple(values[:count]), dict(zip(named, values[count:], strict=True))

    blocks = getattr(module, "_no_split_modules", None) or ()
    for block in module.modules():
        if type(block).__name__ in blocks:
            block.register_forward_pre_hook(separate, with_kwargs=True)


# ---- The norm ------------------------------------------------------------------------------------


def _norm_by_rows(grads: Tensors) -> torch.Tensor:
    """Return the Euclidean norm of these tensors, sqrt(sum of |row|^2): a float32 of shape ().

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
        if is_dtensor(grad):  # FSDP cuts R rows into blocks of ceil(R / n)
            shard = grad.device_mesh.ndim - 1  # HSDP's first dimension holds copies
            group = grad.device_mesh.get_group(shard)
            first = math.ceil(grad.shape[0] / group.size()) * group.rank()
            local_squares, squares = squares, squares.new_zeros(grad.shape[0])
            squares[first : first + len(local_squares)] = local_squares
        rows.append(squares)
    everywhere = torch.cat(rows)
    if group:
        dist.all_reduce(everywhere, group=group)  # others hold zeros, so the order is free
    return everywhere.sum().sqrt().float()
