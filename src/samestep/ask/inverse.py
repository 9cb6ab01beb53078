"""The order of the samples, backwards: at which positions of a run a row is taken."""

from typing import Any

import numpy as np

from samestep.core.order import SampleOrder, hash64


def unpermute(places: Any, sizes: Any, keys: Any) -> np.ndarray:
    """The inverse of order.permute."""
    places = np.array(places, np.uint64)
    sizes, keys = (np.broadcast_to(np.asarray(v, np.uint64), places.shape) for v in (sizes, keys))
    widths = np.sqrt(sizes.astype(np.float64)).astype(np.uint64)
    widths -= widths * widths >= sizes
    widths += widths * widths < sizes  # now the square roots rounded up, exactly
    outside = np.ones(places.shape, bool)
    while outside.any():
        a, key = widths[outside], keys[outside]
        b = (sizes[outside] + a - np.uint64(1)) // a
        right, left = np.divmod(places[outside], a)
        for turn in reversed(range(24)):
            left, right, a, b = right, left, b, a
            left = (left + a - hash64(key + np.uint64(turn << 32) + right) % a) % a
        places[outside] = right * a + left
        outside = places >= sizes
    return places


def positions_of(order: SampleOrder, row: int, begin: int, end: int) -> list[int]:
    """The positions from `begin` up to `end` of a run that take this row, in order."""
    mixture, origin = order.mixture, int(order.first)
    source = int(np.searchsorted(order.firsts, row, side="right")) - 1
    first, size, seed = order.orders[source]
    before = int(mixture.places[source])  # what the source had given when the mixture began
    last = mixture.count(end - origin)[source]
    passes = np.arange(before // size, last // size + 1, dtype=np.uint64)
    places = unpermute(np.full(len(passes), row - int(first)), size, hash64(seed, passes))
    turns = (passes * np.uint64(size) + places).astype(np.int64) - before
    weight, slots = int(mixture.weights[source]), np.flatnonzero(mixture.table == source)
    periods, turns = np.divmod(turns[turns >= 0], weight)
    positions = origin + periods * len(mixture.table) + slots[turns]
    return sorted(positions[(positions >= begin) & (positions < end)].tolist())
