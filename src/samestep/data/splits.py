"""Rows that are held out for evaluation, by a hash of their content."""

import numpy as np


def hold_out(
    hashes: np.ndarray, sizes: np.ndarray, labels: np.ndarray, fraction: float, maximum: float
) -> np.ndarray:
    """The hashes of the rows that are held out, uint64 (H,): about `fraction`, of each label at
    least one, but never all.

    hashes    of rows, uint64 (N,); equal rows have one.
    sizes     of rows, (N,): those that are held out add up to at most `maximum`, but for the first.
    labels    of rows, int (N,).

    A threshold decides, and not a rank: of data that grows, no row is held out that was trained on,
    but the only row that a label had. The smallest hashes are taken, and the first of each label
    before the others.
    """
    by_label = np.lexsort((hashes, labels))
    starts = np.unique(labels[by_label], return_index=True)[1]
    first = hashes[by_label[starts]]
    last = hashes[by_label[np.append(starts[1:], len(by_label)) - 1]]
    small = hashes < fraction * 2.0**64
    chosen = (small | np.isin(hashes, first)) & ~np.isin(hashes, last)
    values, inverse = np.unique(hashes[chosen], return_inverse=True)
    weights = np.bincount(inverse, sizes[chosen], len(values))
    order = np.argsort(~np.isin(values, first), kind="stable")
    held: list[int] = []
    weight = 0.0
    for value, size in zip(values[order].tolist(), weights[order].tolist(), strict=True):
        if weight + size <= maximum:
            held.append(value)
            weight += size
        elif held:
            break
    return np.array(held or values[order][:1].tolist(), np.uint64)
