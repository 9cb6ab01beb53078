"""Work in child processes: units on all cores, and what may hang or run out of memory.

A unit leaves its result in files. One that is done is not done again, so the work may be
interrupted at any moment.
"""

import contextlib
import ctypes
import gc
import io
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from tqdm import tqdm

from samestep.base.console import one_line

STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1}
SECONDS = 10  # between lines about the progress, where there is no terminal
Tell = Callable[[int], None]  # is called with the bytes that a unit has done


class Killed(ValueError):
    """A process was killed. What is done is kept: see `cache.prepare_once`."""


def count_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def do_units(work: Callable[[int, Tell], None], sizes: Sequence[int], what: str) -> None:
    """Calls `work(unit, tell)` for each unit of these sizes, in bytes, in forked processes.

    Prints the progress. Raises the error of the first unit that fails, once the units before it are
    done, so that the error is the same on any number of cores; and ValueError for a process that
    was killed. An interrupted call leaves no process behind.
    """
    context = multiprocessing.get_context("fork")
    done = context.RawArray("q", len(sizes))  # bytes; each is written by one process only
    taken, end = context.Value("q", 0), context.RawValue("q", len(sizes))
    parent, processes, problems = os.getpid(), {}, {}
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive a fork

    def serve(pipe: Connection) -> None:
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP: keep that
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all: the parent decides
        gc.freeze()  # a collection would touch, and so copy, all that is shared with the parent
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        while True:
            with taken.get_lock():
                unit = taken.value
                taken.value += 1
            if unit >= end.value:
                return

            def tell(size: int, unit: int = unit) -> None:
                if os.getppid() != parent or unit > end.value:
                    os._exit(0)
                done[unit] = min(done[unit] + size, sizes[unit])

            try:
                work(unit, tell)
                if trim:  # glibc keeps freed blocks: of long texts, a fifth of all that was read
                    trim(0)
                done[unit] = sizes[unit]
            except BaseException as error:
                pipe.send((unit, error))
                return

    options: dict[str, Any] = {"unit": "B", "unit_scale": True, "leave": False, "miniters": 1}
    if not sys.stderr.isatty():  # the bar is printed, line by line
        options |= {"file": io.StringIO(), "mininterval": SECONDS}
    progress = tqdm(total=sum(sizes), desc=what, disable=not what, **options)
    try:
        for _ in range(min(count_cores(), len(sizes))):
            pipe, theirs = context.Pipe(duplex=False)
            process = context.Process(target=serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            processes[pipe] = process
        while processes:
            for pipe in wait([*processes], timeout=0.2):  # an error, or the end of the process
                problem, process = None, processes.pop(pipe)
                with contextlib.suppress(EOFError):
                    problem = pipe.recv()
                process.join()
                if problem:
                    problems[problem[0]] = problem[1]
                    end.value = min(end.value, problem[0])
                elif process.exitcode:
                    raise killed(process.exitcode)
            if progress.update(sum(done) - progress.n) and "file" in options:
                print(one_line(progress), flush=True)
    finally:
        for process in processes.values():
            process.kill()
            process.join()
        progress.close()
    if problems:
        raise problems[min(problems)]


def run_in_child(function: Callable, *arguments: Any) -> None:
    """Calls a function in a forked process, for the files that it writes: a library that stays in
    native code for half a minute keeps this process from handling a signal.

    Raises ValueError with the text of its error, or if the child was killed; an OSError as it is.
    """

    def work(*_: Any) -> None:
        try:
            function(*arguments)
        except OSError:  # a full disk
            raise
        except Exception as error:
            problem = f"task.data: {one_line(error)}; give fewer or other rows"
            raise ValueError(problem) from None

    do_units(work, [1], "")


def killed(code: int) -> BaseException:
    """What a process that ended with this code means."""
    if -code in STOP_SIGNALS:  # sent to the process group; the process received it first
        return SystemExit(75)
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return Killed(
        f"task.data: a process that prepares ended with {name}, perhaps for lack of memory; what "
        "is done is kept: start again, on fewer cores (taskset -c 0-3) if it comes back"
    )
