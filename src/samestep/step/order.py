"""The order of the samples: which row each position of a run takes, as a function of the seed.

Any position is found at once. The positions go round the sources of the data, in proportion to
their weights. Each source passes over its rows again and again, each time in another permutation.

Nothing is stored but the mixture: where its weights last changed, and how far each source was then.
"""

import functools
import hashlib
import heapq
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from samestep.step.inputs import Source


def hash64(*words: Any) -> np.ndarray:
    """Hash integers or integer arrays: uint64, of the arrays' shape or (1,).

    Each word passes through the finaliser of SplitMix64 (Steele, Lea and Flood, 2014).
    """
    bits = np.zeros(1, np.uint64)
    for word in words:
        bits = (bits ^ np.asarray(word).astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        bits = bits ^ (bits >> np.uint64(31))
    return bits


def hash_integers(*words: int) -> int:
    """Hash one integer for each word as `hash64`, without numpy: a tenth of the time."""
    bits, mask = 0, 2**64 - 1
    for word in words:
        bits = ((bits ^ word & mask) + 0x9E3779B97F4A7C15) & mask
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & mask
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & mask
        bits ^= bits >> 31
    return bits


def permute(places: Any, sizes: Any, keys: Any, back: bool = False) -> np.ndarray:
    """Permute places below `sizes`: each key has a permutation below its size; `back`: the inverse.

    All are uint64, and broadcast to the shape of `places`. It is a Feistel network over the pairs
    (p % a, p // a), where a * b just covers the size, applied again to the few values that fall
    outside (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002, third method).
    """
    places = np.array(places, np.uint64)
    sizes = np.broadcast_to(np.asarray(sizes, np.uint64), places.shape)
    keys = np.broadcast_to(keys, places.shape)
    widths = np.sqrt(sizes.astype(np.float64)).astype(np.uint64)
    widths -= widths * widths >= sizes
    widths += widths * widths < sizes  # now the square roots rounded up, exactly
    outside = np.ones(places.shape, bool)
    while outside.any():
        a, key = widths[outside], keys[outside]
        b = (sizes[outside] + a - np.uint64(1)) // a  # ceil(size / a)
        right, left = np.divmod(places[outside], a)
        rounds = range(24)  # with 12, tiny data sets still showed a pattern
        for number in reversed(rounds) if back else rounds:
            if back:
                left, right, a, b = right, left, b, a
            moved = hash64(key + np.uint64(number << 32) + right)
            left = (left + (a - moved % a if back else moved)) % a
            if not back:
                left, right, a, b = right, left, b, a
        places[outside] = right * a + left
        outside = places >= sizes
    return places


def sample_ids(positions: Any, size: int, seed: Any) -> np.ndarray:
    """Return the ids at these positions, of one source of `size` rows: int64, their shape."""
    passes, places = np.divmod(np.asarray(positions, np.uint64), np.uint64(size))
    return permute(places, size, hash64(seed, passes)).astype(np.int64)


def mix(weights: Sequence[int]) -> np.ndarray:
    """Return one period of a mixture, (sum(weights),) int64: the source at each position.

    After any number of positions each of k sources has had its share to 1 - 1/(2k - 2) samples at
    most, the least that is always possible (Tijdeman, "The chairman assignment problem", 1980).

    Slot j of a source may come when its share has grown to j + margin, and must before its share
    exceeds j + 1 - margin. Among those that may, the one that must first is taken.
    """
    period, parts = sum(weights), 2 * max(len(weights) - 1, 1)  # the margin is 1 / parts
    slots = []
    for source, weight in enumerate(weights):
        for j in range(weight):
            # ceil((j + margin) * period / weight), floor((j + 1 - margin) * period / weight) + 1
            earliest = -(-(parts * j + 1) * period // (parts * weight))
            latest = (parts * j + parts - 1) * period // (parts * weight) + 1
            slots.append((earliest, latest, source))
    slots.sort(reverse=True)
    table, waiting = [], []
    for position in range(1, period + 1):
        while slots and slots[-1][0] <= position:
            _, latest, source = slots.pop()
            heapq.heappush(waiting, (latest, source))
        table.append(heapq.heappop(waiting)[1])
    return np.array(table)


class Mixture:
    """Which source each position takes, and which place in the order of that source.

    Positions count from 0, where each source stands at its place in `places`.
    """

    def __init__(self, weights: Sequence[int], places: Sequence[int]):
        weights = [weight // math.gcd(*weights) for weight in weights]
        self.weights, self.places = np.array(weights, np.uint64), np.array(places, np.uint64)
        self.table = mix(weights)  # (period,) int64
        self.earlier = np.zeros(len(self.table), np.uint64)  # of the same source, in the period
        for source, weight in enumerate(weights):
            self.earlier[self.table == source] = np.arange(weight)

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each position, (N,) int64, and its place there, (N,) uint64."""
        periods, offsets = np.divmod(positions, np.uint64(len(self.table)))
        offsets = offsets.astype(np.int64)
        sources, earlier = self.table[offsets], self.earlier[offsets]
        return sources, self.places[sources] + periods * self.weights[sources] + earlier

    def count(self, samples: int) -> list[int]:
        """Return the place of each source after so many samples."""
        periods, rest = divmod(samples, len(self.table))
        counts = np.bincount(self.table[:rest], minlength=len(self.places)).tolist()
        parts = zip(self.places, self.weights, counts, strict=True)
        return [int(place) + periods * int(weight) + n for place, weight, n in parts]


def first_mixture(weights: dict[str, int]) -> dict:
    """Return what manifests record of the mixture with which a run begins.

    `first`: the position at which it begins. For each of `sources`: its weight, 0 if it is no
    longer in use, and its place. A source is its name; one that is all of the data is called "".
    """
    weights = weights if len(weights) > 1 else {"": 1}
    return {"first": 0, "sources": {name: [weight, 0] for name, weight in weights.items()}}


def next_mixture(before: dict, samples: int, weights: dict[str, int]) -> dict:
    """Return the record of the mixture with these weights, after `samples` of that `before`.

    Each source goes on from where it stood, also one that was not in use for a time.
    """
    weights = weights if len(weights) > 1 else {"": 1}
    known = before["sources"]
    used = {name: weight for name, (weight, _) in known.items() if weight}
    if [*used.items()] == [*weights.items()]:
        return before
    mixture = Mixture([*used.values()], [known[name][1] for name in used])
    places = dict(zip(used, mixture.count(samples - before["first"]), strict=True))
    known = {name: [0, places.get(name, place)] for name, (_, place) in known.items()}
    for name, weight in weights.items():
        _, place = known.pop(name, (0, 0))
        known[name] = [weight, place]  # at the end, in the order of the weights
    return {"first": samples, "sources": known}


def seed_of(seed: int, name: str) -> int:
    """Return the seed of a source, by its name; "" has the seed of the run."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()
    return int(hash64(seed, int.from_bytes(digest[:8], "big"))[0]) if name else seed


class SampleOrder:
    """The order of one run, computed in blocks: thousands cost little more than one.

    Positions are those of the run; they begin with the `mixture`, a record of `next_mixture`.
    """

    block = 8192  # positions in a block

    def __init__(
        self, rows: int, seed: int, sources: Sequence[Source] = (), mixture: dict | None = None
    ):
        mixture = mixture or first_mixture({source.name: int(source.weight) for source in sources})
        names = [source.name for source in sources] if len(sources) > 1 else [""]
        weights, places = zip(*(mixture["sources"][name] for name in names), strict=True)
        self.first, self.mixture = np.uint64(mixture["first"]), Mixture(weights, places)
        sizes = [int(source.rows) for source in sources] or [rows]
        seeds = [seed_of(seed, name) for name in names]
        self.sizes = np.array(sizes, np.uint64)  # (sources,), as the next
        self.firsts = np.cumsum(sizes) - sizes  # first row of each source
        self.orders = [*zip(self.firsts, sizes, seeds, strict=True)]

    def passes(self, positions: Any) -> np.ndarray:
        """Return how often the source of each position has given all of its rows: (N,) uint64."""
        sources, places = self.mixture.locate(np.asarray(positions, np.uint64) - self.first)
        return places // self.sizes[sources]

    def count(self, samples: int) -> list[int]:
        """Count how many of the first samples of the run come from each source."""
        return self.mixture.count(samples - int(self.first))

    def ids(self, positions: Any) -> np.ndarray:
        """Return the sample ids at these positions, (N,) int64."""
        pairs = [divmod(int(position) - int(self.first), self.block) for position in positions]
        return np.array([self.compute(number)[place] for number, place in pairs], np.int64)

    @functools.lru_cache(64)  # noqa: B019  a run has one order; 64 kB a block
    def compute(self, number: int) -> np.ndarray:
        """Compute the ids of a block, (block,) int64; blocks count from the mixture's beginning."""
        positions = np.arange(number * self.block, (number + 1) * self.block, dtype=np.uint64)
        ids = np.empty(self.block, np.int64)
        sources, places = self.mixture.locate(positions)
        for source, (first, size, seed) in enumerate(self.orders):
            mask = sources == source
            ids[mask] = first + sample_ids(places[mask], size, seed)
        return ids
