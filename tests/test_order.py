"""Which row each position of a run takes: permutations, mixtures; how a step is cut."""

import functools
import hashlib
import itertools
import json
import math
import pickle
import random
import tracemalloc
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from refusals import cases, table
from samestep.base.errors import UserError
from samestep.contract import contract
from samestep.run import run
from samestep.step import inputs, order, seeds
from samestep.step.loader import StepBatchSampler, make_loader
from samestep.step.plan import StepPlan, assign_micro_batches, plan_step
from samestep.step.samples import (
    EvaluationSampler,
    SampleDataset,
    hash_batch,
    read_samples,
)


def Source(name, rows, weight=1):  # noqa: N802
    return inputs.Source(name, rows, weight)


MIXED = [
    Source("a", 1000, 3), Source("b", 500_000, 1), Source("c", 1, 1), Source("d", 40, 2),
    Source("e", 6, 1),
]  # fmt: skip


# ---- One source ----------------------------------------------------------------------------------


def test_the_order_is_a_function_of_the_seed_and_the_sources():
    """Golden numbers: another order would be another result for every run that resumes."""
    for sources in ((), [Source("all", 37, 5)]):
        one = order.SampleOrder(37, 5, sources)
        assert one.ids(range(10**12, 10**12 + 6)).tolist() == [10, 14, 8, 9, 3, 18]
    found = hashlib.sha256()
    for size in (1, 2, 3, 37, 8193, 10**6 + 3, 10**9):
        one = order.SampleOrder(size, 5)
        for first in (0, 8000, 10**9, 10**12):
            found.update(one.ids(range(first, first + 500)).tobytes())
    assert found.hexdigest()[:16] == "ed781d96b6ae7c58"
    found, one = hashlib.sha256(), order.SampleOrder(501_047, 5, MIXED)
    for first in (0, 8000, 10**9, 10**12):
        for values in (one.ids(range(first, first + 20_000)), one.ids(range(first, first + 500))):
            found.update(values.tobytes())
        found.update(one.passes(range(first, first + 500)).tobytes())
    assert found.hexdigest()[:16] == "751d275d2789f5ee"
    assert one.count(8 * 10**15) == [n * 10**15 for n in (3, 1, 1, 2, 1)]
    rows = SampleDataset(range(37), seed=3)
    rows.augment = lambda row, generator: generator.initial_seed()
    assert dict(rows.__getitems__([36, 37])) == {26: 13865794165675905162, 14: 854647318621115769}


# ---- Several sources -----------------------------------------------------------------------------

WEIGHTS = [
    [[1, 1], [2, 1], [1, 1000], [1000, 1], [49_999, 50_000], [1, 99_999], [6, 2, 2], [1] * 40],
    [[3, 7, 11, 13, 17, 19, 23], [1, 2, 4, 8, 16, 32, 1000], [1] * 7, [1, 1, 1, 997]],
    *(itertools.product(range(1, most + 1), repeat=n) for n, most in ((2, 24), (3, 9), (4, 5))),
]


@pytest.mark.parametrize("cases", WEIGHTS)
def test_each_source_has_its_share_to_less_than_one_sample(cases):
    for weights in cases:
        table, period = np.tile(order.mix(weights), 2), sum(weights)
        bound = period * (1 - Fraction(1, 2 * len(weights) - 2))
        for source, weight in enumerate(weights):
            taken = np.append(0, np.cumsum(table == source))
            deviation = taken * period - np.arange(2 * period + 1) * weight
            assert abs(deviation).max() <= bound < period
            assert deviation.max() - deviation.min() <= 2 * bound  # of any stretch


def test_each_source_goes_on_where_it_stood_when_weights_change():
    """Also twice, away for a time and back, and in another order; a renamed one begins."""
    rows = {"a": 7, "b": 100, "c": 40, "x/a": 7}
    record, samples, given = order.first_mixture({"a": 2, "b": 1}), 0, {}
    for weights, count in [
        ({"a": 2, "b": 1}, 50), ({"a": 1, "b": 30}, 33), ({"b": 3, "c": 1}, 15),
        ({"c": 1, "a": 5, "b": 2}, 91), ({"b": 2, "c": 1, "a": 5}, 8300), ({"x/a": 1, "c": 7}, 40),
    ]:  # fmt: skip
        sources = [Source(n, rows[n], w) for n, w in weights.items()]
        record = json.loads(json.dumps(order.next_mixture(record, samples, weights)))
        assert order.next_mixture(record, samples + 3, weights) == record
        total = sum(rows[n] for n in weights)
        one = order.SampleOrder(total, 5, sources, record)
        ids = one.ids(range(samples, samples + count))
        assert [one.ids([samples + i])[0] for i in (0, count - 1)] == [ids[0], ids[-1]]
        passes = one.passes(range(samples, samples + count))
        ends = np.cumsum([rows[n] for n in weights])
        number = np.searchsorted(ends, ids, "right")
        for i, name in enumerate(weights):
            own = given.setdefault(name, ([], []))
            own[0].extend((ids[number == i] - ends[i] + rows[name]).tolist())
            own[1].extend(passes[number == i].tolist())
            share = count * weights[name] / sum(weights.values())
            assert abs((number == i).sum() - share) <= 1
        samples += count
        counted = dict(zip(weights, one.count(samples), strict=True))
        assert all(counted[n] == len(given[n][0]) for n in weights)
    for name in rows:  # as if it had been the only one
        source = [Source("all", rows[name], 1)]
        alone = order.SampleOrder(rows[name], order.seed_of(5, name), source)
        places = range(len(given[name][0]))
        assert given[name] == (alone.ids(places).tolist(), alone.passes(places).tolist())


def test_data_of_one_source_may_move_and_is_another_source_than_in_a_mixture():
    """Its name is a path, which may change; it has the seed of the run."""
    record = order.next_mixture(order.first_mixture({"x/old": 1}), 40, {"y/new": 1})
    assert record == order.first_mixture({"y/new": 1}) == order.first_mixture({})
    mixed = order.next_mixture(record, 40, {"more": 1, "new": 2})
    assert mixed == {"first": 40, "sources": {"": [0, 40], "more": [1, 0], "new": [2, 0]}}
    one = order.SampleOrder(37, 5, [Source("new", 37)], order.next_mixture(mixed, 70, {"new": 1}))
    plain = order.SampleOrder(37, 5).ids(range(40, 60))
    assert one.ids(range(70, 90)).tolist() == plain.tolist()


class View:
    """Rows 0 to N - 1 that say their sources and sizes, as those of task.views may."""

    def __init__(self, rows, sources, sizes=None):
        self.rows, self.sources = rows, sources
        self.sizes = None if sizes is None else lambda: sizes

    def __reduce__(self):
        return View, (self.rows, self.sources)

    def __len__(self):
        return self.rows

    def __getitem__(self, i):
        return i


def test_random_numbers_of_a_row_belong_to_the_pass_over_its_source():
    """A pass over a small source ends early: its rows come again, with other random numbers."""
    sources = [Source("small", 4, 1), Source("large", 1000, 1)]
    rows = SampleDataset(View(1004, sources), seed=3)
    rows.augment = lambda row, generator: generator.initial_seed()
    drawn = [pair for pair in rows.__getitems__(range(80)) if pair[0] < 4]
    assert len(drawn) == 40 and len({*drawn}) == 40


def test_a_start_and_a_step_take_little_memory_for_any_number_of_rows(tmp_path):
    """Lengths of rows are a file (here an empty one), which is mapped and not read."""
    rows, tensor = 10**9, {"x": torch.zeros(1)}
    lengths = np.memmap(tmp_path / "lengths", np.uint16, "w+", shape=(rows,))
    half = [Source("a", rows // 2, 2), Source("b", rows // 2, 1)]
    task, data = SimpleNamespace(count=lambda batch: len(batch["x"])), View(rows, half, lengths)
    task.collate = lambda rows: {"x": torch.stack([tensor["x"] for _ in rows])}
    tracemalloc.start()
    hash_batch(data, task, read_samples(data, task)[0])
    train = SampleDataset(data, task, seed=0)
    assert np.shares_memory(train.sizes, lengths)
    sampler = StepBatchSampler(StepPlan(64, 32, (2,)), 64, 10**12, train.sort)
    loader = iter(make_loader(train, sampler, task, 0, torch.device("cpu")))
    assert next(loader).num_items == 32 and next(loader).num_items == 32
    assert len(pickle.dumps(train)) < 500_000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3_000_000


# ---- What a task may give ------------------------------------------------------------------------


def test_wrong_sources_are_one_line():
    for sources, said in (
        ([Source("a", 10)], "they have 10 rows together, but the dataset has 12"),
        ([Source("a", 6), Source("a", 6)], "of task.views: 2 are called 'a'; give each another"),
        # Their weights would not count.
        ([SimpleNamespace(name="a", rows=12, weight=1)], "is no Source; give a list of samestep."),
        ([Source("a", 6), "b"], "of task.views: 'b' is no Source"),
    ):
        with pytest.raises(ValueError, match=said):
            inputs.list_sources(View(12, sources), training=True)


def test_attributes_of_another_meaning_are_left_alone():
    """As a dataset of roads, which has lanes."""
    view = View(12, ["left", "right"])
    view.lanes = 3
    assert inputs.list_sources(view, training=True) == []
    rows = SampleDataset(view, SimpleNamespace(), seed=0)
    assert not rows.is_stream and sorted(rows.ids(range(12))) == [*range(12)]


def test_scores_that_a_source_has_too_few_rows_for_are_nan():
    """Those of all rows are as ever; none has the name of another value of metrics.jsonl."""
    for name in ("step", "samples/a", "eval_loss/a"):
        with pytest.raises(ValueError, match=f"a score cannot be called '{name}'"):
            contract.check_metrics({"loss": 1.0, name: 2.0})

    def metrics(sums):
        return {"loss": sums["loss"] / sums["rows"], "half": 1 / (int(sums["rows"]) - 2)}

    task = type("Task", (), {"metrics": metrics})
    parts = [{"loss": torch.tensor(6.0), "rows": torch.tensor(n)} for n in (2.0, 4.0)]
    scores, total = contract.score(task, parts, [Source("a", 2), Source("b", 4)])
    assert total == {"loss": 12, "rows": 6}
    assert (scores["eval_loss"], scores["half"], scores["eval_loss/b"]) == (2, 0.25, 1.5)
    assert math.isnan(scores["eval_loss/a"]) and math.isnan(scores["half/a"])
    assert contract.score(task, parts[1:], [])[0] == {"eval_loss": 1.5, "half": 0.5}


@pytest.mark.parametrize("shares", [(1,), (2, 2), (5, 2, 1), (1,) * 9])
def test_no_batch_of_an_evaluation_has_rows_of_two_sources(shares):
    """Three, none, one and two batches, dealt as one list; all ranks get as many, of which the rest
    is filler."""
    sources = [Source("a", 5), Source("none", 0), Source("b", 1), Source("c", 4)]
    rows = SampleDataset(View(10, sources))
    plans = [StepPlan(16, 2, shares, rank) for rank in range(len(shares))]
    samplers = [EvaluationSampler(plan, rows) for plan in plans]
    dealt = [list(sampler) for sampler in samplers]
    busiest = max(assign_micro_batches(6, shares))
    assert {*map(len, dealt)} == {*map(len, samplers)} == {busiest}
    kept = [part for each in dealt for part in each if part != [10]]
    assert kept == [[0, 1], [2, 3], [4], [5], [6, 7], [8, 9]]
    places = [place for sampler in samplers for place in sampler.places()]
    assert places == [*enumerate([0, 0, 0, 1, 2, 2])]


def test_rows_are_sorted_within_their_source_of_an_evaluation():
    sources = [Source("a", 5), Source("b", 4)]
    task = SimpleNamespace()
    rows = SampleDataset(View(9, sources, [9, 3, 8, 4, 7, 1, 6, 2, 5]), task)
    sampler = EvaluationSampler(StepPlan(16, 3), rows)
    assert list(sampler) == [[1, 3, 4], [2, 0], [5, 7, 8], [6]]


def test_each_micro_batch_of_each_step_draws_other_numbers():
    """From torch, NumPy and Python alike; the last number is a golden one."""
    drawn = {}
    for case in [*itertools.product((0, 1), (1, 2, 3), range(4))] * 2:
        seeds.seed_micro_batch(*case)
        numbers = torch.initial_seed(), float(np.random.rand()), random.random()
        assert drawn.setdefault(case, numbers) == numbers
    assert [len({*each}) for each in zip(*drawn.values(), strict=True)] == [24] * 3
    assert drawn[1, 3, 2][0] == 16803123258551283528


def test_a_micro_batch_is_measured_without_a_trace(monkeypatch):
    """The first of four warms up; the median of the others counts."""
    clock = iter([0.0, 9.0, 10.0, 12.0, 20.0, 23.0, 30.0, 37.0])
    monkeypatch.setattr(run.time, "perf_counter", lambda: next(clock))
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    before = {name: values.clone() for name, values in model.state_dict().items()}
    rows = torch.randn(5, 3)
    put_back = functools.partial(model.load_state_dict, before)
    given = model, lambda: model(rows).square().sum(), put_back
    assert run.measure_micro_batch(*given) == 3.0
    assert all(torch.equal(values, before[name]) for name, values in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())
    assert assign_micro_batches(12, [1 / 20, 1 / 10], least=1) == (4, 8)


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
