"""A signal that asks a run to stop is a flag while the run trains."""

import contextlib
import multiprocessing
import multiprocessing.util
import os
import re
import signal
import threading
import time
from typing import Any

from samestep.base.signals import SIGNALS


class StopRequest:
    """Records from `start` to `end` that this process was asked to stop: by a signal, or by the
    death of its launcher, the process `launcher`. A second Ctrl-C, more than a second after the
    first, interrupts it."""

    def __init__(self, launcher: int | None = None):
        self.launcher, self.training = launcher, False  # between `start` and `end`
        self.received: dict[int, float] = {}  # when each signal came first
        self.before: dict[int, Any] = {}  # the handlers of others

    def start(self) -> None:
        """Turn signals into flags from here on."""
        if not self.training:
            self.received = {}
            self.listen()
        self.training = True

    def listen(self) -> None:
        """Handle signals."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN or number != signal.SIGHUP:  # nohup
                    self.before[number] = signal.signal(number, self.handle)
        # At exit, before multiprocessing waits for them.
        multiprocessing.util.Finalize(None, _kill_workers, exitpriority=1)

    def end(self) -> None:
        """Give signals back to the script."""
        self.training = False
        for number, handler in self.before.items():
            # None: of a handler that was not installed from Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self.before = {}

    def handle(self, number: int, _: Any) -> None:
        """Handles a signal. One Ctrl-C may come twice, from the terminal and from torchelastic."""
        first = self.received.setdefault(number, time.monotonic())
        if number == signal.SIGINT and time.monotonic() - first > 1:
            self.interrupt()

    def interrupt(self) -> None:
        """Ends what this process does."""
        self.end()
        raise KeyboardInterrupt

    def left(self, grace: float) -> float:
        """Return the seconds that are left of the grace since the first signal; at least 1."""
        first = min(self.received.values(), default=time.monotonic())
        return max(1.0, first + grace - time.monotonic())

    def requested(self) -> int:
        """1 if this process was asked to stop while it trains, else 0: for Ranks.sum_over_ranks."""
        orphaned = self.launcher is not None and os.getppid() != self.launcher
        return int(self.training and (orphaned or bool(self.received)))


def _kill_workers() -> None:
    """Kills the workers of loaders: they ignore the SIGTERM that multiprocessing sends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would report a crash
    for worker in multiprocessing.active_children():
        if worker.daemon:
            worker.kill()


def launcher_process() -> int | None:
    """The process id of torchelastic or of accelerate's launcher, if it has started this one."""
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else find_launcher()[0]


def find_launcher() -> tuple[int | None, list[str]]:
    """The process id of `accelerate launch`, or of samestep's, if it is the parent, and the words
    that follow.

    With one process it forwards no signal: it dies, and leaves that process behind. The death of
    other parents means nothing: `nohup python train.py &` outlives its shell.
    """
    import psutil  # not needed to import Training

    words = []
    with contextlib.suppress(psutil.Error):  # no such process, or no permission
        words = psutil.Process(os.getppid()).cmdline()
    launcher = r"(^|/)accelerate(-launch)?$|accelerate\.commands\.launch|^samestep$"
    found = [number for number, word in enumerate(words[:3]) if re.search(launcher, word)]
    if not found:
        return None, []
    words = words[found[-1] + 1 :]
    return os.getppid(), words[words[:1] == ["launch"] :]
