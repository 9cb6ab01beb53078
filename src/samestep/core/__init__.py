"""The promises, on accelerate and torch: order, steps, sums, exact sums, checkpoints. The plan of a
step and the exact sum stand once more in reference.py, in plain Python: read it first.

The facade for a script of your own is `Training` in training.py: `from samestep import Training`.
"""
