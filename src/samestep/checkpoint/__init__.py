"""Weights, and the state of a run: written, verified and read."""
