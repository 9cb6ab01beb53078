"""A step: which rows it has, who computes which micro-batch, and the sum of their gradients."""
