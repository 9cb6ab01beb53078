"""The promises, on accelerate and torch: order, steps, sums, exact sums, checkpoints.

The facade for a script of your own is `Training` in training.py: `from samestep import Training`.
"""
