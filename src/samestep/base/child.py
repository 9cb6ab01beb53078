"""Calls that may hang or run out of memory: in a child process, or with a time limit."""

import contextlib
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from samestep.base.console import one_line

STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1}


class Killed(ValueError):
    """A process was killed. What is done is kept."""


def run_in_child(function: Callable, *arguments: Any) -> None:
    """Calls a function in a forked process, for the files that it writes.

    A library that stays in native code for half a minute keeps this process from handling a signal.
    The child has the default handlers, and it is killed when a signal interrupts the wait for it.
    Raises ValueError with the text of the function's error, or if the child was killed. An OSError
    is raised as it is.
    """
    reader, writer = os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # the child must not run our handlers
    child, exit_code = None, None
    try:
        child = os.fork()
        if child == 0:
            _call_and_exit(function, arguments, writer)
        os.close(writer)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        with open(reader, "rb") as pipe:
            problem = pickle.loads(pipe.read() or pickle.dumps(""))
        exit_code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        if child and exit_code is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if -exit_code in STOP_SIGNALS:  # sent to the process group; the child received it first
        raise SystemExit(75)
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        problem = f"{name} ended its preparation, perhaps for lack of memory"
        raise Killed(f"task.data: {problem}; give fewer or other rows")
    if isinstance(problem, OSError):  # a full disk
        raise problem
    if exit_code:
        raise ValueError(f"task.data: {problem}; give fewer or other rows")


def _call_and_exit(function: Callable, arguments: tuple, writer: int) -> None:
    """The child's part: calls the function, writes its error to the pipe, ends the process."""
    problem = "it failed"
    try:
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP: keep that
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        function(*arguments)
        problem = ""
    except BaseException as error:
        problem = error if isinstance(error, OSError) else one_line(error)
    finally:
        os.write(writer, pickle.dumps(problem))
        os._exit(bool(problem))


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in a block that takes longer.

    Without effect outside the main thread, where Python does not deliver signals.
    """

    def raise_timeout(*_: Any) -> None:
        raise TimeoutError(f"it takes longer than {seconds:g} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGALRM, raise_timeout)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, 1)  # repeats, in case a library swallows one
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
