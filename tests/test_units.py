"""The cut of a step and of an evaluation into micro-batches."""

import pytest

from samestep.processes.ranks import UserError
from samestep.step import batches


@pytest.mark.parametrize(
    "shares, micro", [((1,), 8), ((4,), 2), ((1, 1), 4), ((2, 2, 2, 2), 1), ((3, 3, 2), 1)]
)
def test_any_cut_gives_a_step_the_same_positions(shares, micro):
    steps = [[], [], []]
    for rank, share in enumerate(shares):
        plan = batches.StepPlan(8, micro, shares, rank)
        slices = list(batches.StepBatchSampler(plan, 24, 48))
        assert len(slices) == 3 * share and {*map(len, slices)} == {micro}
        for step in range(3):
            steps[step] += sum(slices[step * share : (step + 1) * share], [])
    assert steps == [list(range(24 + 8 * step, 32 + 8 * step)) for step in range(3)]


@pytest.mark.parametrize("shares", [(1,), (2, 2), (1, 1, 1), (5, 2, 1)])
def test_an_evaluation_covers_every_sample_once_and_the_rest_is_filler(shares):
    """Six batches, the last of one row. All ranks get as many as the busiest."""
    plans = [batches.StepPlan(16, 2, shares, rank) for rank in range(len(shares))]
    rows = batches.SampleDataset(range(11))
    slices = [list(batches.EvaluationSampler(plan, rows)) for plan in plans]
    assert len({*map(len, slices)}) == 1
    dealt = [part for each in slices for part in each if part != [11]]
    assert dealt == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10]]


def test_rows_keep_their_ids_and_filler_has_none():
    rows = batches.SampleDataset(["a", "b", "c"])
    assert rows.__getitems__([2, 0]) == [(2, "c"), (0, "a")]
    assert rows.__getitems__([3]) == [(-1, "a")]


def test_the_cut_fits_the_device_and_uses_every_sample():
    for ranks in (1, 2, 3, 4, 6, 8, 12, 24):
        plan = batches.plan_step(24, 5, ranks)
        assert plan.micro_batch_size <= 5
        assert plan.micro_batch_size * sum(plan.shares) == 24 and len({*plan.shares}) == 1
    assert batches.plan_step(24, 5, 5).shares == (5, 5, 5, 5, 4)
    with pytest.raises(UserError, match="start at most 24$"):
        batches.plan_step(24, 5, 25)
