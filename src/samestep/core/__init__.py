"""The promises, on accelerate and torch: order, steps, sums, exact sums, checkpoints. The plan of a
step and the exact sum stand once more in reference.py, in plain Python: read it first.

Read in this order: order, batches, mesh, ranks, loader; gradient, exact, monitor; checkpoints,
tensor_files, weights, saver; step, script, training. The others are asked by these or by train.py.

The facade for a script of your own is `Training` in training.py: `from samestep import Training`.
"""
