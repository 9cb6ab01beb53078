"""The library under train.py and task.py: the same result on any hardware, after any kill."""

__version__ = "1.0.0"
