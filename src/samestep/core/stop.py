"""A signal that asks a run to stop is a flag while the run trains."""

import os
import signal
import threading
import time
from typing import Any

from samestep.base.signals import SIGNALS


class StopRequest:
    """Records in its body that this process was asked to stop: by a signal, or by the death of its
    launcher. A second Ctrl-C, more than a second after the first signal, interrupts it."""

    def __init__(self):
        self.since: float | None = None  # when the first signal came
        self.before: dict[int, Any] = {}  # the handlers of others
        launched = {"ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"} & os.environ.keys()
        self.launcher = os.getppid() if launched else None

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN or number != signal.SIGHUP:  # nohup
                    self.before[number] = signal.signal(number, self.handle)
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.before = {}

    def handle(self, number: int, _: Any) -> None:
        """Handles a signal. One Ctrl-C may come twice, from the terminal and from torchelastic."""
        if number == signal.SIGINT and self.since and time.monotonic() - self.since > 1:
            self.__exit__()
            raise KeyboardInterrupt
        self.since = self.since or time.monotonic()

    def requested(self) -> int:
        """1 if this process was asked to stop, else 0: for Ranks.sum_over_ranks."""
        orphaned = self.launcher is not None and os.getppid() != self.launcher
        return int(orphaned or self.since is not None)
