"""The library under train.py and task.py: the same result on any hardware, after any kill."""

__version__ = "2.0.0.dev0"
