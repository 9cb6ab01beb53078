"""A signal that asks a run to stop is a flag while the run trains."""

import multiprocessing
import multiprocessing.util
import os
import signal
import threading
import time
from typing import Any

from samestep.base.signals import SIGNALS


class StopRequest:
    """Records in its body that this process was asked to stop: by a signal, or by the death of its
    launcher, the process `launcher`. A second Ctrl-C, more than a second after the first,
    interrupts it."""

    def __init__(self, launcher: int | None = None):
        self.launcher = launcher
        self.received: dict[int, float] = {}  # when each signal came first
        self.before: dict[int, Any] = {}  # the handlers of others

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN or number != signal.SIGHUP:  # nohup
                    self.before[number] = signal.signal(number, self.handle)
        # At exit, before multiprocessing waits for them.
        multiprocessing.util.Finalize(None, _kill_workers, exitpriority=1)
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.before = {}

    def handle(self, number: int, _: Any) -> None:
        """Handles a signal. One Ctrl-C may come twice, from the terminal and from torchelastic."""
        first = self.received.setdefault(number, time.monotonic())
        if number == signal.SIGINT and time.monotonic() - first > 1:
            self.interrupt()

    def interrupt(self) -> None:
        """Ends what this process does."""
        self.__exit__()
        raise KeyboardInterrupt

    def requested(self) -> int:
        """1 if this process was asked to stop, else 0: for Ranks.sum_over_ranks."""
        orphaned = self.launcher is not None and os.getppid() != self.launcher
        return int(orphaned or bool(self.received))


def _kill_workers() -> None:
    """Kills the workers of loaders: they ignore the SIGTERM that multiprocessing sends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would report a crash
    for worker in multiprocessing.active_children():
        if worker.daemon:
            worker.kill()


def launcher_by_environment() -> int | None:
    """The process id of the launcher, where it has set its variables."""
    launched = {"ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"} & os.environ.keys()
    return os.getppid() if launched else None
