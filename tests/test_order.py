"""Which row each position of a run takes: permutations, mixtures, windows of shards."""

import math

import numpy as np
import pytest

from conftest import load_task

order = load_task("training.order")


def test_each_epoch_is_a_permutation_for_every_small_size():
    for size in range(1, 260):
        for epoch in (0, 1, 10**12):
            places = np.arange(epoch * size, (epoch + 1) * size, dtype=np.uint64)
            ids = order.sample_ids(places, size, seed=size)
            assert sorted(ids.tolist()) == list(range(size))


def test_blocks_give_the_ids_of_single_positions():
    """In any order, over the borders of blocks, far ahead, and back again."""
    one, draw = order.SampleOrder(100_003, seed=7), np.random.default_rng(0)
    for first in [0, 8190, 3 * 8192 - 5, 10**12, 8190, *draw.integers(0, 10**6, 20).tolist()]:
        for count in (0, 1, 32, 8192, 20_000):
            positions = draw.permutation(np.arange(first, first + count))
            expected = order.sample_ids(positions, 100_003, 7)
            assert one.ids(positions).tolist() == expected.tolist()


def chi_square(counts):
    """Of counts that are expected to be equal, in standard deviations of the statistic."""
    counts = np.asarray(counts, float)
    expected = counts.sum() / len(counts)
    degrees = len(counts) - 1
    return (((counts - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees)


@pytest.mark.parametrize("size", [2, 3, 4, 6, 7, 10, 100])
def test_orders_are_uniform_over_seeds(size):
    """First places, and differences between neighbours, of 20,000 seeds: below 5 sigma."""
    seeds, places = 20_000, np.arange(size)
    all_seeds = np.repeat(np.arange(seeds), size)
    orders = order.sample_ids(np.tile(places, seeds), size, all_seeds).reshape(seeds, size)
    assert orders[7].tolist() == order.sample_ids(places, size, 7).tolist()
    assert chi_square(np.bincount(orders[:, 0], minlength=size)) < 5
    steps = (orders[:, 1] - orders[:, 0]) % size
    assert chi_square(np.bincount(steps, minlength=size)[1:]) < 5 if size > 2 else True
    if size == 4:
        ranks = orders @ [64, 16, 4, 1]
        assert (
            len(set(ranks.tolist())) == 24
            and chi_square(np.unique(ranks, return_counts=True)[1]) < 5
        )


def test_neighbours_show_no_structure():
    """In one long epoch: each tenth of the differences between neighbours is as frequent."""
    size = 100_000
    ids = order.sample_ids(np.arange(size), size, seed=1)
    steps = np.diff(ids) % size
    assert chi_square(np.bincount(steps * 100 // size, minlength=100)) < 5
    pairs = (ids[:-1] * 10 // size) * 10 + ids[1:] * 10 // size
    assert chi_square(np.bincount(pairs, minlength=100)) < 5
