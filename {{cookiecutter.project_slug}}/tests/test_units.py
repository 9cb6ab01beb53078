"""The pure parts of train.py: data order, schedule, the cut of a batch."""

import dataclasses
import sys
from pathlib import Path
from subprocess import PIPE, Popen

import numpy as np
import pytest

import train
from training import batches, order
from training.ranks import UserError

CONFIG = train.Config(max_steps=100, warmup_steps=10, learning_rate=1.0, final_lr_fraction=0.1)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 16, 17, 100, 1000])
def test_each_epoch_visits_every_sample_once(size):
    for epoch in range(3):
        positions = np.arange(epoch * size, (epoch + 1) * size)
        assert sorted(order.sample_ids(positions, size, seed=7)) == list(range(size))


def test_the_order_depends_on_seed_and_epoch_and_not_on_how_it_is_asked_for():
    first = order.sample_ids(np.arange(500), 500, seed=0)
    assert (first != order.sample_ids(np.arange(500), 500, seed=1)).mean() > 0.9
    assert (first != order.sample_ids(np.arange(500, 1000), 500, seed=0)).mean() > 0.9
    one_by_one = [order.sample_ids([position], 500, seed=0)[0] for position in range(500)]
    assert first.tolist() == one_by_one


def test_a_far_position_of_a_huge_dataset_is_found():
    ids = order.sample_ids(np.arange(10**12, 10**12 + 512), 10**9, seed=3)
    assert len(set(ids.tolist())) == 512 and 0 <= ids.min() and ids.max() < 10**9


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


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_learning_rate_rises_to_its_peak_and_ends_at_its_share(schedule):
    cfg = dataclasses.replace(CONFIG, lr_schedule=schedule)
    rates = [train.lr_at(step, cfg, 100) for step in range(1, 102)]
    assert rates[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert max(rates) == 1.0
    assert rates[100] == pytest.approx(1.0 if schedule == "constant" else 0.1)
    if schedule == "wsd":
        assert rates[79] == 1.0 and rates[90] == pytest.approx(0.55)
    if schedule == "cosine":
        assert rates[55] == pytest.approx(0.55)


def test_learning_rate_scales_with_the_global_batch():
    scaled = {"reference_batch_size": 8, "global_batch_size": 32, "warmup_steps": 0}
    for scaling, factor in (("none", 1), ("sqrt", 2), ("linear", 4)):
        cfg = dataclasses.replace(CONFIG, lr_scaling=scaling, **scaled)
        assert train.lr_at(1, cfg, 100) == pytest.approx(factor)


def test_the_cut_fits_the_device_and_uses_every_sample():
    for ranks in (1, 2, 3, 4, 6, 8, 12, 24):
        plan = batches.plan_step(24, 5, ranks)
        assert plan.micro_batch_size <= 5
        assert plan.micro_batch_size * sum(plan.shares) == 24 and len({*plan.shares}) == 1
    assert batches.plan_step(24, 5, 5).shares == (5, 5, 5, 5, 4)
    with pytest.raises(UserError, match="start at most 24$"):
        batches.plan_step(24, 5, 25)


WRONG = {
    "--learning_rat 1": "there is no field learning_rat; did you mean learning_rate?",
    "--max_steps 1e3": "max_steps",
    "--max_steps 0": "one must be above 0",
    "--lr_schedule cosin": "expected one of 'cosine', 'linear', 'constant', 'wsd'",
    "--config missing.yaml": "missing.yaml: No such file or directory",
}


@pytest.fixture(scope="module")
def answers():
    """train.py with each wrong flag: together, as each of them takes seconds to begin."""
    program, pipes = Path(train.__file__), {"stdout": PIPE, "stderr": PIPE, "text": True}
    return {
        flags: Popen([sys.executable, program.name, *flags.split()], cwd=program.parent, **pipes)
        for flags in WRONG
    }


@pytest.mark.parametrize("flags", WRONG)
def test_a_wrong_flag_is_answered_in_one_line(answers, flags):
    printed, errors = answers[flags].communicate()
    assert answers[flags].returncode == 2
    assert WRONG[flags] in errors and errors.count("\n") == 1 and not printed
