"""What is held out, in a few lines, with which the preparations in units have to agree."""

import hashlib


def hold_out(rows, fraction, key, stratum=lambda row: None):
    """Splits rows into training and validation by a hash of their key: the same on every machine.

    Rows with one key stay together. About `fraction` of each stratum is held out, in whole keys;
    each stratum keeps at least one key for training. Both parts are in the order of the hashes.
    """
    groups = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    ordered = sorted(groups.items(), key=lambda each: hashlib.sha256(each[0].encode()).digest())
    strata = {}
    for name, group in ordered:
        strata.setdefault(stratum(group[0]), []).append(name)
    held_out = set()
    for names in strata.values():
        wanted, taken = fraction * sum(len(groups[name]) for name in names), 0
        for name in names[:-1]:
            if taken + len(groups[name]) / 2 <= wanted:
                held_out.add(name)
                taken += len(groups[name])
    largest = max(strata.values(), key=len)
    if not held_out and len(largest) > 1:
        held_out.add(largest[0])
    train = [row for name, group in ordered if name not in held_out for row in group]
    return train, [row for name, group in ordered if name in held_out for row in group]
