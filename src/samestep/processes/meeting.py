"""Waits for processes that still prepare data, for as long as they live, and tries their network.

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

import torch
import torch.distributed as dist

from samestep.processes import network
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
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        rank, store = int(os.environ["RANK"]), restart_store()
        serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        return Meeting("process", rank, PROCESSES, address, serves, store)
    if "LAUNCH_MEETING" in os.environ:  # a check of samestep launch, on one of several machines
        rank, size, host, port = os.environ["LAUNCH_MEETING"].split()
        return Meeting("machine", int(rank), int(size), (host, int(port)), rank == "0", None)
    return None


class Meeting:
    """A process among `size` that wait for each other, and their store at `address`.

    `unit`: "process" or "machine"; `rank` counts these. `serves`: whether the store lies in this
    process. A thread does all that goes through the store, where each call may block.
    """

    def __init__(
        self,
        unit: str,
        rank: int,
        size: int,
        address: tuple[str, int],
        serves: bool,
        store: dist.Store | None,
    ):
        self.unit, self.rank, self.size, self.address = unit, rank, size, address
        self.serves, self.store = serves, store
        self.began = self.answered = time.monotonic()  # when the store has answered last
        self.watched = [0] if rank else range(1, size)  # those that must give signs of life
        self.alive: dict[int, tuple[int, float]] = {}  # signs of life so far, and when one came
        self.hosts: dict[int, str] = {}
        self.addresses: list[str] = []  # of all processes, when they are ready
        self.ready = self.left = 0  # number of processes
        self.problems: list[dict] = []  # of all processes
        self.lost = ""  # why there is no connection any more
        self.preparing, self.interrupted, self.over = True, False, False
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
        """Opens the store, when the process is there in which it lies."""
        while not self.serves:
            try:
                socket.create_connection(self.address, timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)
        self.store = self.store or dist.TCPStore(
            *self.address, is_master=self.serves, timeout=OPERATION, wait_for_workers=False
        )
        self.store.set(f"host/{self.rank}", socket.gethostname())

    def exchange(self) -> None:
        """Gives a sign of life, and reads what the others say."""
        self.store.add(f"beats/{self.rank}", 1)
        ready, self.left = self.store.add("ready", 0), self.store.add("left", 0)
        if ready == self.size and not self.addresses:
            keys = [f"address/{rank}" for rank in range(self.size)]
            self.addresses = [each.decode() for each in self.store.multi_get(keys)]
        self.ready = ready
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
        waits = [f"{network.some([*hosts])}, which {verb} data"] if hosts else []
        waits += [f"{self.unit} {network.some(absent)} to begin"] if absent else []
        if waits and os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"waiting for {', and for '.join(waits)}", flush=True)

    # The main thread

    def wait(self, timeout: int) -> dist.Store:
        """Waits until all processes are ready; returns the store where they have met.

        Raises what another process has told, or Failed if one gives no sign of life for `timeout`
        seconds.
        """
        here = network.own_address()
        self.preparing = False
        self.calls.put(lambda: self.store.set(f"address/{self.rank}", here))
        self.calls.put(lambda: self.count("ready"))
        began, pause = time.monotonic(), 0.01
        line_due = began + FIRST_LINE
        while self.ready < self.size:
            now = time.monotonic()
            if self.problems or self.lost:
                raise self.told()
            if now - max(began, self.answered) > timeout:
                raise self.silent(timeout, 0)
            for rank in self.watched:
                if now - max(began, self.alive.get(rank, (0, 0))[1]) > timeout + 2 * BEAT:
                    raise self.silent(timeout, rank)
            if now > line_due:
                self.calls.put(self.say_who_is_late)
                line_due = now + NEXT_LINE
            time.sleep(pause)
            pause = min(2 * pause, 0.5)
        if self.unit == "machine":  # the launchers can meet at this port when the first has ended
            self.calls.put(lambda: self.count("left"))
            deadline = time.monotonic() + LINGER
            while not (self.lost or self.serves and self.left == self.size):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.02)
        self.end()
        return self.store

    def try_network(self, timeout: int) -> None:
        """Lets all processes, which are ready, add a number through gloo. Raises Failed."""
        patience = datetime.timedelta(seconds=timeout)
        self.store.set_timeout(patience)

        def exchange():
            store = dist.PrefixStore("network", self.store)
            group = dist.ProcessGroupGloo(store, self.rank, self.size, patience)
            group.allreduce([torch.ones(1)]).wait()

        network.try_exchange(exchange, "gloo", network.CPU_LIMIT, timeout, self.addresses)

    def try_gpus(self, device: torch.device, timeout: int) -> None:
        """Lets all processes add a number on their GPUs. Raises Failed."""

        def exchange():
            total = torch.ones(1, device=device)
            dist.all_reduce(total)
            total.item()

        network.try_exchange(exchange, "NCCL", network.GPU_LIMIT, timeout, self.addresses)

    def end(self) -> None:
        """Ends the thread, unless it is connecting."""
        self.over = True
        self.calls.put(lambda: None)
        self.thread.join(1)

    def silent(self, timeout: int, rank: int) -> Failed:
        """The error of a process that gives no sign of life."""
        if rank in self.hosts:
            said = f"a sign of life from {self.unit} {rank} on {self.hosts[rank]}"
        else:
            units = "processes" if self.unit == "process" else "machines"
            where = "{}:{}".format(*self.address)
            said = f"all {units} to begin, which meet at {where}: no word from {self.unit} {rank}"
        return Failed(f"waited {timeout} s for {said}", missing=[rank])

    def told(self) -> BaseException:
        """The error for what other processes have told, or for a lost connection."""
        failed = [each for each in self.problems if each["kind"] != "stop"]
        if self.problems and not failed:
            return SystemExit(STOPPED)
        if not failed:
            where = "{}:{}".format(*self.address)
            text = f"no connection to {self.unit} 0 at {where}: {self.lost}"
            return Failed(text, missing=[0])
        lines: dict[str, str] = {}
        for each in failed:
            lines.setdefault(each["text"], each["who"])
        error = UserError if all(each["kind"] == "user" for each in failed) else Failed
        return error("; ".join(f"{who}: {text}" for text, who in lines.items()))

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
        deadline = time.monotonic() + patience
        while self.left < self.size and not self.lost and (stopped or not stop()):
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        self.end()

    def describe(self, error: BaseException) -> str:
        """The line about an error that the others read."""
        kind, text = "crash", f"{type(error).__name__}: {error}"
        if isinstance(error, UserError | Failed):
            kind, text = "user" if isinstance(error, UserError) else "crash", str(error)
        elif isinstance(error, SystemExit) and error.code == STOPPED:
            kind, text = "stop", ""
        who = f"{self.unit} {self.rank} on {socket.gethostname()}"
        return json.dumps({"kind": kind, "who": who, "text": text}) + "\n"
