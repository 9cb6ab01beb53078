"""The verbs of `python -m samestep`."""
