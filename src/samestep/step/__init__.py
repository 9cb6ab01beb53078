"""A step: its samples, micro-batches, shares, sums and gradients."""
