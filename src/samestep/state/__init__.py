"""The state of a run: what a checkpoint holds, how it is committed, verified and restored."""
