"""Rows that are held out: by a threshold of their hashes, of each label, within the limits."""

import hashlib

import numpy as np
import pytest

import reference
from samestep.data import splits


def hash_of(key):
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")


def hold_out(rows, fraction, most):
    """The keys that are held out of rows (key, label)."""
    hashes = np.array([hash_of(key) for key, _ in rows], np.uint64)
    labels = np.array([label for _, label in rows])
    held = splits.hold_out(hashes, np.ones(len(rows)), labels, fraction, most)
    return {key for key, _ in rows if hash_of(key) in held}


def draw_rows(random, count):
    return [(f"{random.integers(count)}", int(random.integers(9))) for _ in range(count)]


@pytest.mark.parametrize("seed", range(12))
def test_the_rows_are_those_of_a_plain_loop(seed):
    random = np.random.default_rng(seed)
    rows = draw_rows(random, random.integers(1, 300))
    fraction, most = random.choice([0.01, 0.1, 0.5, 0.9]), random.choice([1, 5, 20, 1000])
    _, held = reference.hold_out(rows, fraction, lambda row: row[0], lambda row: row[1], most)
    assert hold_out(rows, fraction, most) == {key for key, _ in held}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("most", [5, 1000])
def test_no_row_of_data_that_grows_is_held_out_after_it_was_trained_on(seed, most):
    random = np.random.default_rng(seed)
    rows = [(f"{seed}-{i}", int(random.integers(4))) for i in range(800)]
    some, all_rows = hold_out(rows[:500], 0.1, most), hold_out(rows, 0.1, most)
    assert {key for key, _ in rows[:500]} & all_rows <= some
    if most == 1000:
        assert 30 <= len(some) <= 80
        labels = [[key for key, own in rows[:500] if own == label] for label in range(4)]
        assert some <= all_rows | {min(keys, key=hash_of) for keys in labels}
