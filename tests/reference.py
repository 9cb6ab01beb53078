"""What is held out, in a few lines, with which the preparations in units have to agree."""

import hashlib
import math


def hold_out(rows, fraction, key, stratum=lambda row: None, most=math.inf):
    """Splits rows into training and validation by a hash of their key: the same on every machine.

    Rows with one key stay together. Held out are the keys with the smallest hashes, those in the
    first `fraction` of all, and the first of each stratum, but never the last, and at most `most`
    rows. Both parts are in the order of the hashes.
    """
    groups, firsts, lasts = {}, {}, {}
    for row in rows:
        hashed = int.from_bytes(hashlib.sha256(key(row).encode()).digest()[:8], "big")
        groups.setdefault(hashed, []).append(row)
        own = stratum(row)
        firsts[own] = min(firsts.get(own, hashed), hashed)
        lasts[own] = max(lasts.get(own, hashed), hashed)
    held, taken = set(), 0
    few = [each for each in sorted(groups) if each in firsts.values()]
    rest = [each for each in sorted(groups) if each < fraction * 2**64 and each not in few]
    candidates = [each for each in few + rest if each not in lasts.values()]
    for each in candidates:
        if taken + len(groups[each]) <= most:
            held.add(each)
            taken += len(groups[each])
        elif held:
            break
    held = held or {*candidates[:1]}
    parts = [], []
    for each in sorted(groups):
        parts[each in held].extend(groups[each])
    return parts
