"""The promises, on accelerate and torch: order, steps, sums, exact sums, checkpoints. The plan of a
step and the exact sum stand once more in reference.py, in plain Python: read it first.

An order to read the others in: order, batches, mesh, ranks, loader; gradient, exact, monitor;
checkpoints, tensor_files, weights, saver; step, script, training. What else is here is asked by
these, or, like outputs, shares, stopwatch and deepspeed, by train.py's side alone.

The facade for a script of your own is `Training` in training.py: `from samestep import Training`.
"""
