"""Handles signals and errors, and ends each process with the right exit code.

Before the loop a signal ends the process there and then. In the loop it sets a flag: the ranks
agree on it between two steps, save a checkpoint, and exit.
"""

import atexit
import contextlib
import multiprocessing
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import psutil

from samestep.base.console import one_line, protect_output
from samestep.base.errors import as_user_error, catch
from samestep.base.launching import STOPPED, write_exit_code
from samestep.base.signals import ignore_signals
from samestep.launch import rendezvous
from samestep.processes import failures
from samestep.processes.ranks import SAVE_THREAD
from samestep.processes.stop import StopRequest as SignalFlags
from samestep.processes.stop import find_launcher

# Now, since the launcher may die before training begins.
_LAUNCHER_PID, LAUNCHER_WORDS = find_launcher()


class StopRequest(SignalFlags):
    """Records that this process was asked to stop, by a signal or by the death of its launcher.

    Until `training` is set there is nothing to save, and a signal ends the process: see `leave`. A
    second Ctrl-C, more than a second after the first, ends it at once, whatever it does.
    """

    def __init__(self, program: str = "train.py"):
        super().__init__(_LAUNCHER_PID)
        self.program, self.leaving = program, False
        self.others: rendezvous.Rendezvous | None = None
        self.listen()
        if sys.platform == "linux":  # signals_blocked; Python 3.14 defaults to a fork server
            multiprocessing.set_start_method("fork", force=True)
        os.register_at_fork(after_in_child=self.obey)

    def start(self) -> None:
        self.training = True

    def end(self) -> None:
        """Leaves signals flags until the process ends."""

    def handle(self, number: int, _: Any) -> None:
        """Handles a signal: before training it ends the process."""
        super().handle(number, _)
        if not self.training and not self.leaving:
            self.leaving = True
            error: BaseException = SystemExit(STOPPED)
            if self.others:  # they learn of it, unless one of them has failed
                if catch(self.others.look)[0]:
                    error = self.others.error_of_others()
                self.others.leave(error, lambda: 1)
            code, line = failures.exit_code_of(error)
            speaks = failures.speaks_for(error)
            leave(code, f"{self.program}: {one_line(line, 1000)}" if speaks else "")

    def interrupt(self) -> None:
        os._exit(128 + signal.SIGINT)

    def obey(self) -> None:
        """In a process that is forked, as by a Pool: SIGTERM ends it. A handler in Python would not
        run where the signal comes just before the process waits for a lock, and the Pool would wait
        for its end forever. A worker of a loader goes on, see `signals_blocked`."""
        if self.leaving:  # a Pool starts another worker for one that has been killed
            os._exit(STOPPED)
        if signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
            ignore_signals(None)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def leave(code: int, line: str = "") -> NoReturn:
    """Ends this process without its `finally` blocks: kills all that it has started, and prints a
    line. What is left on the disk is what a kill -9 leaves."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would report a crash
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()
    if line:
        with contextlib.suppress(OSError):  # nobody listens
            os.write(2, f"{line}\n".encode(errors="backslashreplace"))
    write_exit_code(code)
    os._exit(code)


def run(main: Callable, prepare: Callable, program: str = "train.py") -> None:
    """Exits with the code of main(prepare(), ranks, stop). A UserError is one line, exit code 2.

    `prepare` returns a `startup.RunStart`. It may take hours on one machine: see rendezvous.py. A
    failure is written to status.json of the run, unless that file belongs to another run.
    """
    protect_output()
    write_exit_code("")  # torchelastic may have restarted this process: that of the last is over
    stop, start, ranks, others = StopRequest(program), None, None, None
    error = None
    try:
        _raise_open_files_limit()

        def end(error: BaseException) -> NoReturn:
            stop.leaving = True
            leave(failures.report(error, program, start and start.output))

        stop.others = others = rendezvous.join(end)
        start = prepare()
        ranks = rendezvous.form_group(start.cfg.timeout, others)
        code = main(start, ranks, stop)
    except BaseException as caught:
        error = caught if stop.training else _of_the_user(caught)
        stop.training = True  # the launcher sends a signal when a process has failed
        if others:
            others.over.set()
            error = others.explain(error, ranks.timeout) if ranks else error
        code = failures.report(error, program, start and start.output)
        if isinstance(error, failures.Ended):
            error = None  # for the others
    stop.training = True  # from here on a signal is only recorded
    if others:
        others.leave(error, stop.requested)
    for thread in threading.enumerate():
        if thread.name == SAVE_THREAD:  # a run that fails keeps the checkpoint that it began
            thread.join()
    if start and code not in (0, STOPPED):  # a stop has used its grace
        start.mirror.end_failed()
    exit_process(code)


def run_alone(main: Callable) -> None:
    """Exits with what main() returns, or with the code of its error: for a program without a run.

    Where several processes run it, all raise an error of one; the main process prints the line.
    """
    protect_output()
    stop = StopRequest(Path(sys.argv[0]).name)
    try:
        _raise_open_files_limit()
        code = main() or 0
        stop.training = True
    except BaseException as error:
        stop.training = True
        code = failures.report(_of_the_user(error), stop.program)
    exit_process(code)


def _of_the_user(error: BaseException) -> BaseException:
    """What an error means before training: a mistake of the user, where it may be one."""
    try:
        with as_user_error():
            raise error
    except BaseException as meant:
        return meant


def _raise_open_files_limit() -> None:
    """Raises the limit of open files to 4,096 if allowed; loaders with many workers need them."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096 if most == resource.RLIM_INFINITY else min(most, 4096)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def exit_process(code: int) -> NoReturn:
    """Exits with this code, without the interpreter's finalisation.

    A thread of gloo that frees a tensor during it would abort the process (pytorch #190489), so
    that a finished run would exit with 1. What comes before finalisation is done here.
    """
    write_exit_code(code)
    with contextlib.suppress(SystemExit):
        sys.exit(code)  # W&B reads the code here: it replaces sys.exit
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
