"""Says which processes have what, in few words: `processes 0-6 on node1`."""

from collections.abc import Hashable, Sequence
from typing import TypeVar

Value = TypeVar("Value", bound=Hashable)
HOSTS = 4  # names in a line


def group(values: Sequence[Value]) -> dict[Value, list[int]]:
    """The places of each distinct value in a list."""
    found: dict[Value, list[int]] = {}
    for place, value in enumerate(values):
        found.setdefault(value, []).append(place)
    return found


def name(numbers: Sequence[int], hosts: Sequence[str] = ()) -> str:
    """These processes, ascending, and their machines: `hosts` has that of each of the run."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    word = "processes" if len(numbers) > 1 else "process"
    shown = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    machines = list(dict.fromkeys(hosts[n] for n in numbers)) if hosts else []
    more = ", ..." if len(machines) > HOSTS else ""
    where = f" on {', '.join(machines[:HOSTS])}{more}" if machines else ""
    return f"{word} {shown}{where}"


def by_value(values: Sequence[str | None], hosts: Sequence[str] = ()) -> str:
    """The value, if all that have one have the same; otherwise a line for each and its places."""
    groups = group(values)
    groups.pop(None, None)
    if len(groups) == 1:
        return next(iter(groups))
    return "\n".join(f"{name(numbers, hosts)}: {value}" for value, numbers in groups.items())
