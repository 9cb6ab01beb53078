"""The processes of a run: layout, messages, signals, and how weights are sharded."""
