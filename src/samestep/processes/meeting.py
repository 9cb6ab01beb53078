"""Waits for processes that still prepare data, for as long as they live.

Preparing may take hours on one machine and seconds on the next: longer than the timeout of a
process group. So each process says in a store, from its start on, that it lives; then that it is
ready, or why it failed. The checks of `samestep launch` on several machines meet in the same way.
"""

import contextlib
import datetime
import json
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from samestep.processes.ranks import PROCESSES, Failed, UserError, restart_store

STOPPED = 75  # exit code: stopped on request; the same command continues
BEAT = 2  # seconds between two signs of life
GRACE = 10  # seconds in which others find the same error by themselves, or learn that all stop
LINGER = 60  # seconds for which a process that failed tries to tell the others
FIRST_LINE, NEXT_LINE = 10, 600  # seconds of waiting until it is said, and until it is said again
OPERATION = datetime.timedelta(seconds=60)  # the longest of the store


def join() -> "Meeting | None":
    """Joins the other processes of the run; None if there are none."""
    if PROCESSES > 1:
        rank, store = int(os.environ["RANK"]), restart_store().get("store")
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        return Meeting("process", rank, PROCESSES, address, serves, store)
    if "LAUNCH_MEETING" in os.environ:  # a check of samestep launch, on one of several machines
        rank, size, host, port = os.environ["LAUNCH_MEETING"].split()
        return Meeting("machine", int(rank), int(size), (host, int(port)), rank == "0")
    return None


class Meeting:
    """A process among `size` that wait for each other, and their store at `address`.

    `unit`: what has the number `rank`: a process or a machine. `serves`: whether the store lies in
    this process. A thread does all that goes through the store, where each call may block.
    """

    def __init__(
        self,
        unit: str,
        rank: int,
        size: int,
        address: tuple[str, int],
        serves: bool,
        store: dist.Store | None = None,
    ):
        self.unit, self.rank, self.size, self.address = unit, rank, size, address
        self.serves, self.store = serves, store
        self.line: Any = None
        self.began = self.answered = time.monotonic()  # when the store has answered last
        self.watched = [0] if rank else range(1, size)  # those that must give signs of life
        self.alive: dict[int, tuple[int, float]] = {}  # signs of life so far, and when one came
        self.hosts: dict[int, str] = {}
        self.ready = self.left = 0  # number of processes
        self.problems: list[dict] = []  # of all processes
        self.lost = ""  # why there is no connection any more
        self.preparing, self.interrupted, self.over = True, False, False
        self.speaks = False  # whether this process reports for the first one, which is gone
        self.calls: queue.SimpleQueue[Callable] = queue.SimpleQueue()  # for the thread
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    # The thread

    def run(self) -> None:
        """Connects, and exchanges signs of life until the meeting is over."""
        pause = 0.01
        try:
            self.connect()
            while not self.over:
                self.exchange()
                if self.problems:
                    self.interrupt()
                pause = BEAT if self.preparing and not self.problems else min(2 * pause, 1)
                with contextlib.suppress(queue.Empty):
                    self.calls.get(timeout=pause)()
                    pause = 0.01
        except Exception as error:  # of the network, or of the store
            self.lost = str(error).partition("\n")[0]
            self.interrupt()

    def connect(self) -> None:
        """Opens the store. `line` ends when the process ends in which the store lies.

        Only machines keep it: thousands of processes would use up the files of that process.
        """
        while not self.serves and not self.line:
            try:
                self.line = socket.create_connection(self.address, timeout=5)
                self.line.setblocking(False)
            except OSError:  # that process, or its name, is not there yet
                time.sleep(0.5)
        if self.line and self.unit == "process":
            self.line.close()
            self.line = None
        self.store = self.store or dist.TCPStore(
            *self.address, is_master=self.serves, timeout=OPERATION, wait_for_workers=False
        )
        self.store.set(f"host/{self.rank}", socket.gethostname())

    def exchange(self) -> None:
        """Gives a sign of life, and reads what the others say."""
        if self.line:
            with contextlib.suppress(BlockingIOError):
                self.line.recv(1)  # nothing is ever sent
                raise ConnectionError("it has ended")
        self.store.add(f"beats/{self.rank}", 1)
        self.ready, self.left = self.store.add("ready", 0), self.store.add("left", 0)
        if self.store.check(["problems"]):
            lines = self.store.get("problems").decode().splitlines()
            self.problems = [json.loads(line) for line in lines]
        now = self.answered = time.monotonic()
        for rank in self.watched:
            beats, since = self.alive.get(rank, (0, 0))
            if now - since > BEAT and (count := self.store.add(f"beats/{rank}", 0)) > beats:
                self.alive[rank] = count, now
                if not beats:
                    self.hosts[rank] = self.store.get(f"host/{rank}").decode()

    def interrupt(self) -> None:
        """Ends the preparation of this process, in vain since another one has failed."""
        if self.lost or any(each["kind"] != "stop" for each in self.problems):
            deadline = time.monotonic() + GRACE
            while self.preparing and time.monotonic() < deadline:
                time.sleep(0.1)
        if self.preparing:
            self.interrupted, self.preparing = True, False
            signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)

    def count(self, name: str) -> None:
        """Counts this process as ready, or as having left: once, even if it was restarted."""
        if self.store.add(f"{name}/{self.rank}", 1) == 1:
            self.store.add(name, 1)

    def say_who_is_late(self) -> None:
        """Prints for which hosts this process waits, once for each machine."""
        late = [rank for rank in range(self.size) if not self.store.check([f"ready/{rank}"])]
        begun = [rank for rank in late if self.store.check([f"host/{rank}"])]
        hosts = dict.fromkeys(self.store.get(f"host/{rank}").decode() for rank in begun)
        absent = [str(rank) for rank in late if rank not in begun]
        verb = "prepares" if len(hosts) == 1 else "prepare"
        waits = [f"{enumerate_some([*hosts])}, which {verb} data"] if hosts else []
        waits += [f"{self.unit} {enumerate_some(absent)} to begin"] if absent else []
        if waits and os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"waiting for {', and for '.join(waits)}", flush=True)

    # The main thread

    def wait(self, timeout: int) -> dist.Store:
        """Waits until all processes are ready; returns the store where they have met.

        Raises what another process has told, or Failed if one gives no sign of life for `timeout`
        seconds.
        """
        self.preparing = False
        self.calls.put(lambda: self.count("ready"))
        began, pause = time.monotonic(), 0.01
        line_due = began + FIRST_LINE
        while self.ready < self.size:
            now = time.monotonic()
            if self.problems or self.lost:
                raise self.told()
            if now - max(began, self.answered) > timeout:
                raise Failed(self.describe_silence(timeout, 0))
            for rank in self.watched:
                if now - max(began, self.alive.get(rank, (0, 0))[1]) > timeout + 2 * BEAT:
                    raise Failed(self.describe_silence(timeout, rank))
            if now > line_due:
                self.calls.put(self.say_who_is_late)
                line_due = now + NEXT_LINE
            time.sleep(pause)
            pause = min(2 * pause, 0.5)
        if self.unit == "machine":
            self.free_port()
        self.end()
        return self.store

    def free_port(self) -> None:
        """Waits until the first process has ended, so that the launchers can meet at its port."""
        self.calls.put(lambda: self.count("left"))
        deadline = time.monotonic() + LINGER
        while time.monotonic() < deadline and not self.lost:
            if self.serves and self.left == self.size:
                break
            time.sleep(0.02)

    def end(self) -> None:
        """Ends the thread, unless it is connecting."""
        self.over = True
        self.calls.put(lambda: None)
        self.thread.join(1)

    def describe_silence(self, timeout: int, rank: int) -> str:
        """One line about a process that gives no sign of life."""
        self.speaks = rank == 0 and self.rank == 1
        if rank in self.hosts:
            name = f"{self.unit} {rank} on {self.hosts[rank]}"
            return f"waited {timeout} s for a sign of life from {name}"
        where = "{}:{}".format(*self.address)
        plural = "processes" if self.unit == "process" else "machines"
        return (
            f"waited {timeout} s for all {plural} to begin, which meet at {where}: no word from "
            f"{self.unit} {rank}"
        )

    def told(self) -> BaseException:
        """The error for what other processes have told, or for a lost connection."""
        failed = [each for each in self.problems if each["kind"] != "stop"]
        if not failed and self.problems:
            return SystemExit(STOPPED)
        if not failed:
            self.speaks = self.rank == 1
            where = "{}:{}".format(*self.address)
            return Failed(f"no connection to {self.unit} 0 at {where}: {self.lost}")
        lines: dict[str, str] = {}
        for each in failed:
            lines.setdefault(each["text"], each["who"])
        error = UserError if all(each["kind"] == "user" for each in failed) else Failed
        return error("; ".join(f"{who}: {text}" for text, who in lines.items()))

    def reason(self, error: BaseException) -> BaseException:
        """This error, or if it is that of the interruption, what other processes have told."""
        return self.told() if self.interrupted and isinstance(error, SystemExit) else error

    def leave(self, error: BaseException, stop: Callable[[], int]) -> None:
        """Tells the others why this process ends, and waits until they know, or until `stop()`."""
        if self.over:
            return
        stopped = bool(stop())
        patience = LINGER if self.preparing and not stopped else GRACE
        self.preparing = False
        if not self.problems and not self.lost:
            self.calls.put(lambda: self.store.append("problems", self.describe(error)))
        self.calls.put(lambda: self.count("left"))
        began, said = time.monotonic(), self.unit == "process" or patience == GRACE
        while self.left < self.size and not self.lost and (stopped or not stop()):
            waited = time.monotonic() - began
            if waited > patience:
                break
            if waited > 3 and not said:
                print(f"telling the other machines, for at most {patience} s", flush=True)
                said = True
            time.sleep(0.02)
        self.end()

    def describe(self, error: BaseException) -> str:
        """The line about an error that the others read."""
        host = socket.gethostname()
        who = host if self.unit == "machine" else f"process {self.rank} on {host}"
        if isinstance(error, UserError):
            kind, text = "user", str(error)
        elif isinstance(error, SystemExit) and error.code == STOPPED:
            kind, text = "stop", ""
        else:
            kind, text = "crash", f"{type(error).__name__}: {error}"
            text = str(error) if isinstance(error, Failed) else text
        return json.dumps({"kind": kind, "who": who, "text": text}) + "\n"


def enumerate_some(names: list[str]) -> str:
    """The first names of a list, for a line."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
