"""How often Python looks for garbage while a program starts."""

import gc

USUAL, SELDOM = gc.get_threshold(), 10_000  # new objects


def collect_seldom() -> None:
    """A start makes a million objects, by its imports, and keeps nearly all: to look through them
    again and again takes half a second."""
    gc.set_threshold(SELDOM)


def collect_as_usual() -> None:
    """A cycle of objects may hold a device's memory. What task.py has set is left as it is."""
    if gc.get_threshold()[0] == SELDOM:
        gc.set_threshold(*USUAL)
