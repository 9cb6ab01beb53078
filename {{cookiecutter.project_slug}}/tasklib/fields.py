"""Types and metadata for the fields of a TaskConfig.

A type states which values a field takes: a wrong one is refused with the type's description. The
metadata says what a change of the field does to a run that continues; without it, the change
affects the result and has to be accepted.
"""

from jsonargparse.typing import restricted_number_type

NOTHING = {"changes": "nothing"}
ROUNDING = {"changes": "rounding"}  # the same result up to rounding and the masks of dropout
SHAPE = {"changes": "shape"}  # of the weights: the checkpoint does not fit


def number_type(name: str, base: type, first: float, last: float) -> type:
    """The type of the numbers from `first` to `last`, both included."""
    text = f"a {'whole ' if base is int else ''}number from {first:,} to {last:,}"
    return restricted_number_type(name, base, [(">=", first), ("<=", last)], docstring=text)


# At least 0 and below 1.
Dropout = restricted_number_type("Dropout", float, [(">=", 0), ("<", 1)])
