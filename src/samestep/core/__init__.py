"""The promises, on accelerate and torch: order, steps, sums, exact sums, checkpoints."""
