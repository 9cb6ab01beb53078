"""The contract of task.py."""
