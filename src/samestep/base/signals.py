"""Signals that ask a run to stop, and the worker processes that must not hear them."""

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Worker processes that start in its body have signals blocked, until they ignore them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:  # those that arrived meanwhile are handled now
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def ignore_signals(_: Any) -> None:
    """A DataLoader's worker_init_fn: the training process alone handles signals to the group."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
