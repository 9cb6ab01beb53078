"""What a machine can do: check, bench, smoke, recommend."""
