"""One watcher a process: who lives, who is ready, and why a run ends, through one store.

Preparing may take hours on one machine and seconds on the next: longer than the timeout of a
process group. So a thread of each process says in a store, from its start to its end, that it
lives, that it is ready, or why it failed. The checks of `samestep launch` on several machines meet
in the same way.
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

import torch
import torch.distributed as dist

from samestep.base.console import one_line, read_place
from samestep.base.errors import Failed, UserError, catch, some
from samestep.base.launching import STOPPED
from samestep.core.ranks import SAVE_THREAD
from samestep.project.meeting import restart_store

BEAT = 2  # seconds between two signs of life
GRACE = 10  # seconds in which others find the same error by themselves, or learn that all stop
HANGS = 30  # seconds after which a process that trains, and has not found it, waits for a device
LINGER = 60  # seconds for which a process that failed tries to tell the others
FIRST_LINE, NEXT_LINE = 10, 600  # seconds of waiting until it is said, and until it is said again
OPERATION = datetime.timedelta(seconds=60)  # the longest of the store
# Seconds for the first exchange, for a timeout of 1800 s; a longer one raises them. Processes are
# all there when it begins. The one of GPUs includes their start, and NCCL's search for the paths
# between them.
CPU_LIMIT, GPU_LIMIT = 60, 180


def join(end: Callable[[BaseException], Any] | None = None) -> "Rendezvous | None":
    """Joins the other processes of the run; None if there are none.

    `end` ends this process for an error of another one, from a thread.
    """
    if read_place()[1] > 1:
        restart_store()  # raises what the user must correct
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if missing := [name for name in names if name not in os.environ]:
            raise UserError(f"RANK and WORLD_SIZE are set, and {missing[0]} is not: use a launcher")
        place = [os.environ[name] for name in names]
        shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return Rendezvous("process", place, place[0] == "0" and not shared, end)
    if "LAUNCH_RENDEZVOUS" in os.environ:  # a check of samestep launch, on one of several machines
        place = os.environ["LAUNCH_RENDEZVOUS"].split()
        return Rendezvous("machine", place, place[0] == "0", end)
    return None


class Rendezvous:
    """A process among several, or a check among those of several machines: `unit`, "process" or
    "machine".

    Each says something of itself in an entry of its own. Process 0 reads these, and sums them up in
    an entry for all. A thread does it, since any call of the store may block. `serves`: whether the
    store lies in this process.
    """

    def __init__(self, unit: str, place: list[str], serves: bool, end: Callable | None = None):
        rank, size, host, port = place
        self.unit, self.rank, self.size, self.serves = unit, int(rank), int(size), serves
        self.address, self.place = (host, int(port)), f"{host}:{port}"
        self.own: dict[str, Any] = {"host": socket.gethostname(), "beat": 0, "exchanges": 0}
        self.own |= {"address": "", "problem": None, "left": False}  # address: it is ready
        self.all: dict[str, Any] = {"met": False, "left": False, "problems": [], "hosts": {}}
        self.heard: dict[int, tuple[int, float]] = {}  # the newest sign of life, and when it came
        self.lost = ""  # why there is no connection any more
        self.preparing, self.interrupted, self.over = True, False, False
        self.end_process, self.ending = end, False  # ending: the main thread knows of an error
        self.store: Any = None
        self.news: queue.SimpleQueue = queue.SimpleQueue()  # something to say, or to learn soon
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    # The thread

    def watch(self) -> None:
        """Exchanges signs of life until the rendezvous is over. Ends a preparation in vain."""
        pause, known_at = 0.01, 0.0
        try:
            if self.serves:
                self.server = dist.TCPStore(*self.address, is_master=True, wait_for_workers=False)
            while catch(socket.create_connection, self.address, 5)[1]:  # it has not begun
                time.sleep(0.5)
            self.store = self.open_store(OPERATION)
            while not self.over:
                self.exchange()
                if self.all["problems"]:
                    known_at = known_at or time.monotonic()
                    known_for = time.monotonic() - known_at
                    stops = all(each["kind"] == "stop" for each in self.all["problems"])
                    if self.preparing and (stops or known_for > GRACE):
                        self.interrupt()
                    elif known_for > HANGS:
                        self.end_if_hanging()
                waits = self.own["address"] and not self.all["met"]
                soon = waits or self.own["left"] or self.all["problems"]
                pause = min(2 * pause, 1) if soon else BEAT
                with contextlib.suppress(queue.Empty):
                    self.news.get(timeout=pause)
                    pause = 0.01
        except Exception as error:  # of the network, or of the store
            self.lost = str(error).partition("\n")[0]
            if not self.wait_while(lambda: self.preparing, GRACE):
                self.interrupt()
            self.wait_while(lambda: not self.ending, HANGS)
            self.end_if_hanging()

    def open_store(self, timeout: datetime.timedelta) -> dist.Store:
        """A connection of its own: one that waits lets no other thread call it."""
        store = restart_store() if self.unit == "process" else None
        store = store or dist.TCPStore(*self.address, wait_for_workers=False)
        store.set_timeout(timeout)
        return store

    def exchange(self) -> None:
        """Says something of this process, and reads what all have said."""
        self.own["beat"] += 1
        self.store.set(f"own/{self.rank}", json.dumps(self.own))
        if self.rank == 0:
            self.sum_up()
            self.store.set("all", json.dumps(self.all))
        elif self.store.check(["all"]):
            self.all = json.loads(self.store.get("all"))
            self.hear(0, self.all["beat"])

    def hear(self, rank: int, beat: int) -> None:
        """Notes a sign of life."""
        if self.heard.get(rank, (0, 0.0))[0] != beat:
            self.heard[rank] = beat, time.monotonic()

    def sum_up(self) -> None:
        """Sums up what all have said, on process 0."""
        ranks = range(self.size)
        begun = [r for r in ranks if r in self.heard or self.store.check([f"own/{r}"])]
        values = self.store.multi_get([f"own/{rank}" for rank in begun])
        said = dict(zip(begun, map(json.loads, values), strict=True))
        for rank, each in said.items():
            self.hear(rank, each["beat"])
        newest = max(each["exchanges"] for each in said.values())
        late = [each["host"] for each in said.values() if not each["address"]]
        absent = [str(rank) for rank in ranks if rank not in said]
        verb = "prepares" if len({*late}) == 1 else "prepare"
        waits = [f"{some([*dict.fromkeys(late)])}, which {verb} data"] if late else []
        waits += [f"{self.unit} {some(absent)} to begin"] if absent else []
        self.all = {
            "beat": self.own["beat"],
            "waits": f"waiting for {', and for '.join(waits)}",
            "met": self.all["met"] or not waits,
            "hosts": {str(rank): each["host"] for rank, each in said.items() if waits},
            "addresses": some([*dict.fromkeys(each["address"] for each in said.values())]),
            "problems": [each["problem"] for each in said.values() if each["problem"]],
            "behind": [rank for rank, each in said.items() if each["exchanges"] < newest],
            "left": not absent and all(each["left"] for each in said.values()),
        }

    def interrupt(self) -> None:
        """Ends the preparation of this process."""
        self.interrupted, self.preparing = True, False
        signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)

    def end_if_hanging(self) -> None:
        """Ends this process, in which another one's error has not arrived: the main thread waits
        for a device, which waits for the other process. NCCL would do so after the timeout."""
        if self.ending or not self.all["problems"] or not dist.is_initialized():
            return
        for thread in threading.enumerate():
            if thread.name == SAVE_THREAD:  # a run that fails keeps the checkpoint that it began
                thread.join()
        if self.end_process:
            self.end_process(self.error_of_others())

    # The main thread

    def post(self, **entries: Any) -> None:
        """Tells the others something of this process."""
        self.own |= entries
        self.news.put(None)  # a SimpleQueue, since a signal handler may interrupt this

    @staticmethod
    def wait_while(condition: Callable[[], Any], seconds: float) -> bool:
        """Waits, but no longer than that; whether the condition has ended."""
        deadline = time.monotonic() + seconds
        while condition() and time.monotonic() < deadline:
            time.sleep(0.02)
        return not condition()

    def wait(self, timeout: int) -> dist.Store | None:
        """Waits until all processes are ready; returns a store for their group.

        Raises what another process has told, or Failed if one gives no sign of life for `timeout`
        seconds.
        """
        self.preparing = False
        host = self.own["host"]  # gloo waits at its address, unless it is told an interface
        self.post(address=f"{host} at {catch(socket.gethostbyname, host)[0] or '127.0.0.1'}")
        began = time.monotonic()
        line_due = began + FIRST_LINE
        while not self.all["met"]:
            if self.all["problems"] or self.lost:
                raise self.error_of_others()
            now = time.monotonic()
            for rank in [0] if self.rank else range(1, self.size):
                if now - max(began, self.heard.get(rank, (0, 0.0))[1]) > timeout + 2 * BEAT:
                    raise self.silent(timeout, rank)
            if now > line_due and "waits" in self.all:
                line_due = now + NEXT_LINE
                if os.environ.get("LOCAL_RANK", "0") == "0":
                    print(self.all["waits"], flush=True)
            time.sleep(0.02)
        if self.unit == "process":
            return self.open_store(datetime.timedelta(seconds=timeout))
        self.post(left=True)  # the launchers can meet at this port when the first has ended
        self.wait_while(lambda: not (self.lost or self.serves and self.all["left"]), LINGER)
        self.end()
        return None

    def try_exchange(self, group: Any, device: torch.device, timeout: int) -> None:
        """Lets all processes, which are ready, add a number; raises Failed.

        A firewall, a wrong interface or a host name that stands for 127.0.0.1 lets processes meet
        at the store, and hang in their first exchange, without a word. While gloo and NCCL connect,
        no timeout of torch ends their calls (gloo: 5 minutes). So they are called in a thread.

        `group`: a function that makes it, or returns it.
        """

        def exchange() -> None:
            total = torch.ones(1, device=device)
            group().allreduce([total]).wait()
            total.item()

        library, limit = ("gloo", CPU_LIMIT) if device.type == "cpu" else ("NCCL", GPU_LIMIT)
        limit = min(limit * max(timeout / 1800, 1), timeout)
        ended: list[Exception | None] = []
        thread = threading.Thread(target=lambda: ended.append(catch(exchange)[1]), daemon=True)
        thread.start()
        thread.join(limit)
        if ended == [None]:
            return
        problem = f"exchanged nothing within {limit:.0f} s (a --timeout above 1800 raises that)"
        if ended:
            problem = f"failed: {one_line(ended[0])}"
        variable = f"{library.upper()}_SOCKET_IFNAME"
        raise Failed(
            f"the processes reach the main process at {self.place}, but not each other: {library} "
            f"{problem}; {self.all['addresses']}; {variable} is "
            f"{os.environ.get(variable) or 'not set'}: if nothing else is wrong, export the name "
            "of an interface that joins the machines, and open all ports on it"
        )

    def end(self) -> None:
        """Ends the thread, unless it is connecting."""
        self.over = True
        self.news.put(None)
        self.thread.join(1)

    # Errors

    def silent(self, timeout: int, rank: int) -> Failed:
        """The error of a process that gives no sign of life."""
        said = f"a first word from {self.unit} {rank}; all meet at {self.place}"
        if host := self.all["hosts"].get(str(rank)):
            said = f"a sign of life from {self.unit} {rank} on {host}"
        return Failed(f"waited {timeout} s for {said}", missing=[rank])

    def error_of_others(self) -> BaseException:
        """The error for what other processes have told, or for a lost connection."""
        failed = [each for each in self.all["problems"] if each["kind"] != "stop"]
        if self.all["problems"] and not failed:
            return SystemExit(STOPPED)
        if not failed:
            text = f"no connection to {self.unit} 0 at {self.place}: {self.lost}"
            return Failed(text, missing=[0])
        lines: dict[str, str] = {}
        for each in failed:
            lines.setdefault(each["text"], each["who"])
        error = UserError if all(each["kind"] == "user" for each in failed) else Failed
        return error("; ".join(f"{who}: {text}" for text, who in lines.items()))

    def explain(self, error: BaseException, timeout: int) -> BaseException:
        """Replaces an error of gloo by what another process has told, or by who does not answer."""
        text = str(error)
        behind = "timeout caused pair closure" in text  # behind an exchange that timed out
        if not isinstance(error, RuntimeError) or not ("gloo/transport" in text or behind):
            return error
        # A process that fails tells why before its connections close. It takes a moment to arrive.
        self.wait_while(lambda: not (self.all["problems"] or self.lost), 2 * BEAT)
        if self.all["problems"]:
            return self.error_of_others()
        if "Timed out" not in text and not behind:
            return Failed("lost the connection to another process, which has died")
        main = self.rank and (self.lost or time.monotonic() - self.heard[0][1] > 3 * BEAT)
        missing = [0] if main else self.all["behind"]
        answer = f"no answer from process {some([*map(str, missing)])}" if missing else "all answer"
        return Failed(f"waited {timeout} s for the other processes; {answer}", missing)

    def leave(self, error: BaseException, stop: Callable[[], int]) -> None:
        """Tells the others why this process ends, and waits until they know, or until `stop()`."""
        if self.over:
            return
        kind, text = "crash", f"{type(error).__name__}: {error}"
        if isinstance(error, UserError | Failed):
            kind, text = "user" if isinstance(error, UserError) else "crash", str(error)
        elif isinstance(error, SystemExit) and error.code == STOPPED:
            kind, text = "stop", ""
        problem = {"kind": kind, "who": f"{self.unit} {self.rank} on {self.own['host']}"}
        stopped = bool(stop())
        patience = LINGER if self.preparing and not stopped else GRACE
        if stopped and not self.store:  # nobody to tell
            patience = 0
        self.preparing = False
        if self.all["problems"] or self.lost:
            self.post(left=True)
        else:
            self.post(left=True, problem={**problem, "text": text})
        self.wait_while(
            lambda: not (self.all["left"] or self.lost) and (stopped or not stop()), patience
        )
        self.end()
