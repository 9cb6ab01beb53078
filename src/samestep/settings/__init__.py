"""Recipe, flags and accelerate YAML, and what a task.py must provide."""
