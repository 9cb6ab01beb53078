"""A step: which rows it has, who computes which micro-batch, and the sum of their gradients.

1. order, samples    its rows: a function of the seed and of its number
2. plan              its micro-batches, and who computes which
3. loader            fetches them one step ahead, with the items of all processes
4. step.Step         gives them to the loop: backward, clip; one that is not finite is skipped
5. gradient, exact   the gradient of all; exact: a sum in a tree, whoever adds
6. monitor           reads the losses of several steps, and counts those that were skipped

`evaluation.Evaluation`: each row once. `trial`: a loss of rows together and alone. `reference`: the
same in plain Python, without processes.
"""
