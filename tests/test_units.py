"""The cut of a step and of an evaluation into micro-batches."""

import pytest

from refusals import table
from samestep.base.errors import UserError
from samestep.step.plan import plan_step
from samestep.step.samples import SampleDataset


def test_rows_keep_their_ids_and_filler_has_none():
    rows = SampleDataset(["a", "b", "c"])
    assert rows.__getitems__([2, 0]) == [(2, "c"), (0, "a")]
    assert rows.__getitems__([3]) == [(-1, "a")]


@pytest.mark.parametrize(
    "step, shares, text",
    [
        ((24, 5, 4), (2, 2, 2, 2), "24 samples = 4 x 2 x 3 ("),
        ((24, 5, 5), (1,) * 5, "24 samples = 5 x 1 x (4 or 5) ("),
        ((8, 1, 3), (3, 3, 2), "8 samples = (3 + 3 + 2) x 1 (micro-batches x samples)"),
        ((10, 4, 2), (2, 2), "10 samples = 2 x 2 x (2 or 3) ("),
        ((32, 32, 2, False, "auto"), (4, 4), "32 samples = 2 x 4 x 4 ("),
        ((32, 32, 2, False, [3.0, 1.0]), (6, 2), "32 samples = (6 + 2) x 4 ("),
        ((32, 8, 2, True, "auto"), (2, 2), "32 samples = 2 x 2 x 8 ("),
    ],
)
def test_a_step_is_cut_by_one_formula(step, shares, text):
    plan = plan_step(*step)
    assert plan.shares == shares and plan.describe().startswith(text)


@pytest.mark.parametrize("step, said", table("cuts"))
def test_a_cut_that_is_impossible_is_one_line(step, said):
    step = dict(step)
    with pytest.raises(UserError, match=said):
        plan_step(24, step.pop("micro", 5), **step)


def test_processes_that_share_weights_have_as_many_micro_batches():
    """Also where they do not divide the samples: the sizes differ by one."""
    plan = plan_step(10, 2, 4, in_step=4)
    assert plan.shares == (2, 2, 2, 2) and plan.largest == 2
