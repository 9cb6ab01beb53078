"""The promises, on accelerate and torch: order, steps, sums, exact sums, checkpoints.

Its facade for a script of your own is `from samestep.core import Training`.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """Training, which is imported when it is asked for."""
    if name != "Training":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from samestep.core.training import Training

    return Training
