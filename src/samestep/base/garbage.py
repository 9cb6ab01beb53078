"""How often Python looks for garbage while a program starts."""

import gc

_USUAL = gc.get_threshold()


def collect_seldom() -> None:
    """Look for garbage after 10,000 new objects, in place of 700: a start makes a million, by its
    imports, and keeps nearly all; looking through them takes half a second."""
    gc.set_threshold(10_000)


def collect_as_usual() -> None:
    """Look for garbage as Python does by itself: a cycle of objects may hold a device's memory."""
    gc.set_threshold(*_USUAL)
