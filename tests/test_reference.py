"""The core computes what step/reference.py does in plain Python, to the bit: rows, cuts, sums."""

import itertools
import math

import pytest
import torch

from conftest import ROOT, BakedProject, preloaded
from samestep.step import exact, order, reference
from samestep.step.loader import StepBatchSampler
from samestep.step.plan import plan_step


def test_the_rows_of_a_step_are_those_of_the_reference():
    """For every small size, and some large ones, in distant passes; each is a permutation."""
    for size in [*range(1, 100), 8193, 10**6 + 3, 10**9]:
        one, count = order.SampleOrder(size, size), min(size, 100)
        for step in (1, 2, 10**9 // count):
            found = one.ids(range((step - 1) * count, step * count)).tolist()
            assert found == reference.samples_of_step(step, count, size, seed=size)
            assert len({*found}) == count
    assert order.hash64(3, -1, 2**40).tolist() == [order.hash_integers(3, -1, 2**40)]


def test_any_cut_and_any_shares_are_those_of_the_reference():
    """Near-equal parts, as many for each rank; with exact as the size says."""
    for samples, size, ranks, is_exact in itertools.product(
        range(1, 41), (1, 2, 3, 5, 8, 50), range(1, 7), (False, True)
    ):
        whole = is_exact and (samples % size or samples // size < ranks)
        if samples < ranks or whole:
            with pytest.raises(ValueError, match="start at most|give a micro_batch_size of"):
                plan_step(samples, size, ranks, is_exact)
            continue
        positions, dealt = range(7 * samples, 8 * samples), []
        for rank in range(ranks):
            plan = plan_step(samples, size, ranks, is_exact, rank=rank)
            dealt += StepBatchSampler(plan, positions.start, positions.stop)
        parts = reference.micro_batches(positions, size, 1 if is_exact else ranks)
        assert dealt == [[*part] for part in parts]
        sizes = {*map(len, parts)}
        assert max(sizes) == plan.largest <= size and max(sizes) - min(sizes) <= 1 <= min(sizes)
        assert max(plan.shares) - min(plan.shares) <= 1 <= min(plan.shares)


@pytest.mark.parametrize("count", [1, 2, 7, 8, 13, 16])
def test_any_division_into_runs_is_added_in_the_same_order(count):
    """Into one to five runs, some of them empty, each a few nodes."""
    values = torch.randn(count, 100, generator=torch.Generator().manual_seed(0))
    expected = reference.tree_sum([*values])
    for ranks in range(1, 6):
        for cuts in itertools.combinations_with_replacement(range(count + 1), ranks - 1):
            whole = exact.TreeSum()
            for first, end in itertools.pairwise((0, *cuts, count)):
                own = exact.TreeSum()
                for number in range(first, end):
                    own.add(number, [values[number].clone()])
                nodes = [(begin, size) for begin, size, _ in own.nodes]
                assert nodes == exact.nodes_of(range(first, end))
                assert len(nodes) <= max(1, 2 * math.log2(max(end - first, 1)))
                for begin, size, sums in own.nodes:
                    whole.add(begin, sums, size)
            assert torch.equal(whole.total()[0], expected)
            assert whole.nodes == []


# A step of 14 rows, the third one, and an evaluation of 11, in micro-batches of two.
STEP = """
import copy, torch
from accelerate import Accelerator
from samestep.processes import mesh, ranks
from samestep.step import exact, gradient, reference, sums
from samestep.step.plan import plan_step
from samestep.step.loader import StepBatchSampler
from samestep.step.samples import EvaluationSampler, SampleDataset

torch.set_num_threads(1)
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
parts = [torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)]
plain = torch.nn.Sequential(*parts)
model = accelerator.prepare(copy.deepcopy(plain))
rows, view = torch.randn(41, 4), torch.randn(11, 3, dtype=torch.float64)
layout = mesh.layout_of_accelerator(accelerator)
processes = ranks.Ranks(layout)


def loss_sum(model, rows):
    return model(torch.stack(rows)).square().sum()


plan = plan_step(14, 2, layout.replicas, exact=True, rank=layout.rank)
dataset = SampleDataset(rows, None, seed=3)
trained = gradient.TrainedWeights(accelerator, processes, model)
gradients = exact.ExactGradients(accelerator, trained)
gradients.start_step(plan)
for number, positions in zip(plan.run(), StepBatchSampler(plan, 28, 42), strict=True):
    batch = [row for _, row in dataset.__getitems__(positions)]
    gradients.add(loss_sum(model, batch), 14, number)
gradients.reduce()
samples = reference.samples_of_step(3, 14, 41, seed=3)
cut = [[rows[i] for i in part] for part in reference.micro_batches(samples, 2)]
expected = reference.exact_gradient(plain, loss_sum, cut, 14)
for weight, gradient in zip(model.parameters(), expected, strict=True):
    assert torch.equal(weight.grad, gradient)

sampler = EvaluationSampler(plan, SampleDataset(view))
totals = sums.EvaluationSums(sampler, accelerator.device)
for positions in sampler:
    totals.add({"values": view[[i % 11 for i in positions]].sum(0)})
found = totals.total(processes)
cut = [view[list(part)].sum(0) for part in (*(range(i, i + 2) for i in range(0, 10, 2)), [10])]
assert torch.equal(found[0]["values"], reference.tree_sum(cut))
print("the same")
"""


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_the_exact_gradient_and_the_sums_of_an_evaluation_are_those_of_the_reference(processes):
    envs = BakedProject(ROOT).envs(processes, ACCELERATE_USE_CPU="true")
    for code, printed, errors in preloaded(ROOT, envs, ["-c", STEP], 100):
        assert (code, printed) == (0, "the same\n"), errors
