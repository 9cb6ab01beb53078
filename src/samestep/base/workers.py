"""Work in a child process, which may hang or run out of memory, and the cores of this process."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable

from samestep.base.console import one_line

STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1}


def count_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_in_child(function: Callable[[], None]) -> None:
    """Calls a function in a forked process, for the files that it writes: a library that stays in
    native code for half a minute keeps this process from handling a signal.

    Raises ValueError with the text of its error, or if the child was killed; an OSError as it is.
    An interrupted call leaves no process behind.
    """
    context = multiprocessing.get_context("fork")
    pipe, theirs = context.Pipe(duplex=False)

    def work() -> None:
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP: keep that
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all: the parent decides
        try:
            function()
        except BaseException as error:
            theirs.send(error if isinstance(error, OSError) else one_line(error))

    child = context.Process(target=work, daemon=True)
    child.start()
    theirs.close()
    try:
        child.join()
    finally:
        child.kill()
        child.join()
    problem = None
    with contextlib.suppress(EOFError):  # it has said nothing
        problem = pipe.recv()
    if isinstance(problem, OSError):  # a full disk
        raise problem
    if problem:
        raise ValueError(f"task.data: {problem}; give fewer or other rows")
    if -child.exitcode in STOP_SIGNALS:  # sent to the group; this process received it first
        raise SystemExit(75)
    if code := child.exitcode:
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        raise ValueError(
            f"task.data: a process that prepares ended with {name}, perhaps for lack of memory; "
            "start again, on fewer cores (taskset -c 0-3) if it comes back"
        )
