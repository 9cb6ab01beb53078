"""The cut of a step and of an evaluation into micro-batches."""

import pytest

from refusals import cases, table
from samestep.base.errors import UserError
from samestep.step.plan import plan_step
from samestep.step.samples import SampleDataset


def test_rows_keep_their_ids_and_filler_has_none():
    rows = SampleDataset(["a", "b", "c"])
    assert rows.__getitems__([2, 0]) == [(2, "c"), (0, "a")]
    assert rows.__getitems__([3]) == [(-1, "a")]


@pytest.mark.parametrize("case", cases("cuts"))
def test_a_step_is_cut_by_one_formula(case):
    step, shares, text = case.values()
    plan = plan_step(*step)
    assert [*plan.shares] == shares and plan.describe().startswith(text)


@pytest.mark.parametrize("step, said", table("cuts"))
def test_a_cut_that_is_impossible_is_one_line(step, said):
    step = dict(step)
    with pytest.raises(UserError, match=said):
        plan_step(24, step.pop("micro", 5), **step)


def test_processes_that_share_weights_have_as_many_micro_batches():
    """Also where they do not divide the samples: the sizes differ by one."""
    plan = plan_step(10, 2, 4, in_step=4)
    assert plan.shares == (2, 2, 2, 2) and plan.largest == 2
