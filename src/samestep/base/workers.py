"""Units of work, done by as many processes as there are cores; each leaves its result in files.

A unit that is done is not done again, so the work may be interrupted at any moment.
"""

import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from tqdm import tqdm

from samestep.base.child import STOP_SIGNALS, Killed
from samestep.base.console import one_line

SECONDS = 10  # between lines about the progress, where there is no terminal
Tell = Callable[[int], None]  # is called with the bytes that a unit has done


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
                try:
                    pipe.send((unit, error))
                except (TypeError, AttributeError, pickle.PicklingError):
                    pipe.send((unit, ValueError(one_line(f"{type(error).__name__}: {error}"))))
                return

    progress = Progress(sum(sizes), what)
    try:
        for _ in range(min(count_cores(), len(sizes))):
            pipe, theirs = context.Pipe(duplex=False)
            process = context.Process(target=serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            processes[pipe] = process
        while processes:
            for pipe in wait([*processes], timeout=0.2):  # an error, or the end of the process
                problem = receive(pipe)
                process = processes.pop(pipe)
                process.join()
                if problem:
                    problems[problem[0]] = problem[1]
                    end.value = min(end.value, problem[0])
                elif process.exitcode:
                    raise killed(process.exitcode)
            progress.show(sum(done))
    finally:
        for process in processes.values():
            process.kill()
            process.join()
        progress.close()
    if problems:
        raise problems[min(problems)]


def receive(pipe: Connection) -> tuple[int, BaseException] | None:
    """The unit that failed, and its error."""
    try:
        return pipe.recv()
    except EOFError:
        return None


def killed(code: int) -> BaseException:
    """What a process that ended with this code means."""
    if -code in STOP_SIGNALS:  # sent to the process group; the process received it first
        return SystemExit(75)
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return Killed(
        f"task.data: a process that prepares ended with {name}, perhaps for lack of memory; what "
        "is done is kept: start again, on fewer cores (taskset -c 0-3) if it comes back"
    )


class Progress:
    """A bar on a terminal; elsewhere a line every 10 seconds."""

    def __init__(self, total: int, what: str):
        self.total, self.what = total, what
        self.start = self.printed = time.monotonic()
        self.first: Any = None  # bytes that an earlier start had done
        options = {"unit": "B", "unit_scale": True, "leave": False, "disable": None}
        self.bar = tqdm(total=total, desc=what, **options)

    def show(self, size: int) -> None:
        now = time.monotonic()
        self.first = size if self.first is None else self.first
        self.bar.update(size - self.bar.n)
        if self.bar.disable and now - self.printed > SECONDS:
            self.printed, speed = now, (size - self.first) / (now - self.start)
            left = f", {(self.total - size) / speed:,.0f} s left" if speed else ""
            print(
                f"{one_line(self.what)}: {size / 1e6:,.1f} of {self.total / 1e6:,.1f} MB, "
                f"{speed / 1e6:.1f} MB/s{left}",
                flush=True,
            )

    def close(self) -> None:
        self.bar.close()
