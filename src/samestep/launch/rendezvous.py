"""The rendezvous of a run: what its processes write into torch's store, and their process group.

Data may take hours on one machine and seconds on the next: longer than the timeout of a process
group. So each process writes once that it prepares, that it is ready, or why it failed, and whoever
waits reads it. A thread looks for errors, since the main thread may wait for a device.
"""

import contextlib
import datetime
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState

from samestep.base.console import one_line, read_place
from samestep.base.errors import Failed, UserError, catch, some
from samestep.base.launching import STOPPED
from samestep.launch.device import use_cpu
from samestep.launch.launched import this_layout
from samestep.processes.ranks import SAVE_THREAD, Ranks

LOOK = 2  # seconds between two looks for an error of another process
GRACE = 10  # seconds after which it ends this process, whatever that does
_PATIENCE = 60  # seconds for which a process that fails before training tries to tell the others
_FIRST_LINE, _NEXT_LINE = 10, 600  # seconds of waiting until it is said, and until it is said again
_OPERATION = datetime.timedelta(seconds=60)  # the longest of the store
# Seconds for the first exchange, for a timeout of 1800 s; a longer one raises them. That of GPUs
# includes their start, and NCCL's search for the paths between them.
LIMITS = {"gloo": 60, "NCCL": 180}


def join(end: Callable[[BaseException], Any]) -> "Rendezvous | None":
    """Joins the other processes of the run; None if there are none.

    `end` ends this process for an error of another one, from a thread.
    """
    rank, processes = read_place()
    if processes == 1:
        return None
    restart_store()  # raises what the user must correct
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise UserError(f"RANK and WORLD_SIZE are set, and {name} is not: use a launcher")
    return Rendezvous(rank, processes, end)


class Rendezvous:
    """A process among several. Their store has `preparing/RANK` and `ready/RANK`, one `error`, how
    many are ready, `go` once all are, and how many will not ask again: when all will not, it may
    end. No process asks for the keys of all, unless it waits long."""

    def __init__(self, rank: int, processes: int, end: Callable[[BaseException], Any]):
        self.rank, self.end_process = rank, end
        self.all, self.host = range(processes), socket.gethostname()
        self.address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.place = f"{self.address[0]}:{self.address[1]}"
        # Otherwise the launcher serves it.
        self.serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self.store: Any = None  # once there is a connection
        self.lost = ""  # why there is none any more
        self.error: list[str] = []  # of another process: its kind, who has it, its text
        node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        is_first = os.environ.get("LOCAL_RANK", "0") == "0"
        # One process of a node asks often; of a thousand, all others ask more rarely.
        self.asking = processes / node if is_first else processes
        self.has_left, self.leaving = False, threading.Lock()
        self.preparing, self.over = True, threading.Event()  # over: the main thread ends by itself
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def watch(self) -> None:
        """Connects, and looks for an error. Ends this process for it, unless that does so itself:
        it may prepare data, or wait for a device, which waits for the process that has failed."""
        try:
            if self.serves:
                self.server = dist.TCPStore(*self.address, is_master=True, wait_for_workers=False)
            while catch(socket.create_connection, self.address, 5)[1]:  # it has not begun
                time.sleep(0.1)
            store = dist.PrefixStore("words", self.connect(_OPERATION))
            store.set(f"preparing/{self.rank}", self.host)
            self.store = store
            pause = LOOK * max(1, self.asking / 1000)
            while not self.over.wait(pause) and not self.look():
                pass
        except Exception as error:  # of the network, or of the store
            self.lost = str(error).partition("\n")[0]
        if not self.error and not self.preparing or self.over.wait(GRACE):
            return
        for thread in threading.enumerate():
            if thread.name == SAVE_THREAD:  # a run that fails keeps the checkpoint that it began
                thread.join()
        self.end_process(self.error_of_others())

    def connect(self, timeout: datetime.timedelta) -> dist.Store:
        """A connection of its own: one that waits lets no other thread call it."""
        store = restart_store() or dist.TCPStore(*self.address, wait_for_workers=False)
        store.set_timeout(timeout)
        return store

    def look(self) -> list[str]:
        """The error of another process, if there is one."""
        if self.store and not self.error and self.store.check(["error"]):
            self.error = json.loads(self.store.get("error"))
            self.ask_no_more()
        return self.error

    def ask_no_more(self) -> None:
        """Counts this process among those that the store need not wait for."""
        with self.leaving:
            if not self.has_left:
                self.has_left = True
                self.store.add("done", 1)

    def wait(self, timeout: int) -> dist.Store:
        """Waits until all processes are ready; returns a store for their group.

        Raises the error of another process, or Failed if one is not ready after `timeout` seconds.
        """
        began, line_due = time.monotonic(), _FIRST_LINE + (LOOK if self.rank else 0)
        pause = 0.05 * max(1, self.asking / 100)
        # gloo waits at its address, unless it is told an interface.
        address = catch(socket.gethostbyname, self.host)[0] or "127.0.0.1"
        ready, self.preparing = False, False
        try:
            while not ready or not self.store.check(["go"]):
                if self.lost or self.look():
                    raise self.error_of_others()
                if self.store and not ready:
                    self.store.set(f"ready/{self.rank}", f"{self.host} at {address}")
                    if self.store.add("ready", 1) == len(self.all):
                        self.store.set("go", "")
                    ready = True
                waited = time.monotonic() - began
                if waited > min(line_due, timeout):
                    line_due += _NEXT_LINE
                    names, missing = self.late(is_known=waited <= timeout)
                    remedy = "prepare the data first, with samestep prepare, or raise --timeout"
                    if waited > timeout:
                        raise Failed(f"waited {timeout} s for {names}; {remedy}", missing)
                    if self.store and not self.rank:
                        self.store.set("late", names)
                    if os.environ.get("LOCAL_RANK", "0") == "0":
                        print(f"waiting for {names}", flush=True)
                time.sleep(pause)
            return self.connect(datetime.timedelta(seconds=timeout))
        except dist.DistError as error:
            self.lost = str(error).partition("\n")[0]
            raise self.error_of_others() from error

    def late(self, is_known: bool) -> tuple[str, list[int]]:
        """Who is not ready, in words, and their ranks; the words of the main process, if known."""
        if not self.store:
            return f"process 0 to begin; all meet at {self.place}", [0]
        if is_known and self.rank and self.store.check(["late"]):
            return self.store.get("late").decode(), []
        late = self.lacking("ready", [*self.all])
        not_begun = {*self.lacking("preparing", late)}
        begun = [rank for rank in late if rank not in not_begun]
        hosts = [self.store.get(f"preparing/{rank}").decode() for rank in begun]
        names = [*dict.fromkeys(hosts)]
        verb = "prepares" if len(names) == 1 else "prepare"
        words = [f"{some(names)}, which {verb} data"] if names else []
        if absent := [str(rank) for rank in late if rank not in begun]:
            words.append(f"process {some(absent)} to begin")
        return ", and for ".join(words), late

    def lacking(self, key: str, ranks: list[int]) -> list[int]:
        """Which of these have no such key: few requests where few have none."""
        if not ranks or self.store.check([f"{key}/{rank}" for rank in ranks]):
            return []
        half = len(ranks) // 2
        if not half:
            return ranks
        return self.lacking(key, ranks[:half]) + self.lacking(key, ranks[half:])

    def unreachable(self, library: str, problem: str) -> Failed:
        """The error of processes that reach the store, and not each other."""
        variable = f"{library.upper()}_SOCKET_IFNAME"
        values = [catch(self.store.get, f"ready/{rank}")[0] or b"?" for rank in self.all]
        addresses = some([*dict.fromkeys(value.decode() for value in values)])
        return Failed(
            f"the processes reach the main process at {self.place}, but not each other: {library} "
            f"{problem}; {addresses}; {variable} is {os.environ.get(variable) or 'not set'}: if "
            "nothing else is wrong, export the name of an interface that joins the machines, and "
            "open all ports on it"
        )

    @contextlib.contextmanager
    def first_exchange(self, library: str, timeout: int) -> Iterator[None]:
        """Raises Failed if the body fails, and ends this process if it takes too long.

        A firewall, a wrong interface or a host name that stands for 127.0.0.1 lets processes meet
        at the store, and hang in their first exchange, without a word. While gloo and NCCL connect,
        no timeout of torch ends their calls (gloo: 5 minutes).
        """
        limit = min(LIMITS[library] * max(timeout / 1800, 1), timeout)
        problem = f"exchanged nothing within {limit:.0f} s (a --timeout above 1800 raises that)"
        timer = threading.Timer(limit, lambda: self.end_process(self.unreachable(library, problem)))
        timer.daemon = True
        timer.start()
        try:
            yield
        except RuntimeError as error:
            raise self.unreachable(library, f"failed: {one_line(error)}") from error
        finally:
            timer.cancel()

    # ---- Errors

    def error_of_others(self) -> BaseException:
        """The error that another process has told, or that of a lost connection."""
        if not self.error:
            text = f"no connection to process 0 at {self.place}: {self.lost}"
            return Failed(text, missing=[0])
        kind, who, text = self.error
        if kind == "stop":
            return SystemExit(STOPPED)
        return (UserError if kind == "user" else Failed)(f"{who}: {text}")

    def explain(self, error: BaseException, timeout: int) -> BaseException:
        """Replaces an error of gloo by what another process has told, or by who does not answer."""
        text = str(error)
        timed_out = "Timed out" in text or "timeout caused pair closure" in text
        if not isinstance(error, RuntimeError) or not (timed_out or "gloo/transport" in text):
            return error
        # Each that is left comes here. A process that fails tells why before its connections close.
        catch(lambda: self.store.set(f"waiting/{self.rank}", ""))
        deadline = time.monotonic() + 2 * LOOK
        while time.monotonic() < deadline and not catch(self.look)[0]:
            time.sleep(0.02)
        if self.error:
            return self.error_of_others()
        if not timed_out:
            return Failed("lost the connection to another process, which has died")
        missing, problem = catch(self.lacking, "waiting", [*self.all])
        missing = [0] if problem else missing  # it served the store
        answer = f"no answer from process {some([*map(str, missing)])}" if missing else "all answer"
        return Failed(f"waited {timeout} s for the other processes; {answer}", missing)

    def leave(self, error: BaseException | None, stop: Callable[[], int]) -> None:
        """Tells the others why this process ends, if it fails. The one that serves the store waits
        until the others are done with it, or until `stop()`."""
        self.over.set()
        stopped = bool(stop())
        deadline = time.monotonic() + (_PATIENCE if self.preparing and not stopped else GRACE)

        def may_wait() -> bool:
            in_time = not self.lost and time.monotonic() < deadline
            return in_time and (stopped or not stop())

        while error and not self.store and not stopped and may_wait():
            time.sleep(0.02)
        if not self.store:
            return
        self.thread.join(1)
        if error and not self.error:
            kind, text = "crash", f"{type(error).__name__}: {error}"
            if isinstance(error, UserError | Failed):
                kind, text = "user" if isinstance(error, UserError) else "crash", str(error)
            elif isinstance(error, SystemExit) and error.code == STOPPED:
                kind = "stop"
            word = json.dumps([kind, f"process {self.rank} on {self.host}", text])
            catch(self.store.compare_set, "error", "", word)
        catch(self.ask_no_more)
        others_ask = lambda: self.store.add("done", 0) < len(self.all)  # noqa: E731
        while self.serves and may_wait() and catch(others_ask)[0]:
            time.sleep(0.02)


def form_group(timeout: int, others: Rendezvous | None) -> Ranks:
    """Makes PartialState, and the processes of the run, once all of them are ready."""
    layout, limit = this_layout(), datetime.timedelta(seconds=timeout)
    store = others.wait(timeout) if others else restart_store()
    place: dict[str, Any] = {}
    if store:
        place = {"store": store, "rank": layout.rank, "world_size": layout.processes}
    with others.first_exchange("gloo", timeout) if others else contextlib.nullcontext():
        if store and layout.deepspeed:  # it takes no store, but a group that exists
            device = torch.accelerator.current_accelerator() or torch.device("cpu")
            backend = dist.get_default_backend_for_device(device)
            dist.init_process_group(backend, timeout=limit, **place)
            place = {}
        state = PartialState(cpu=use_cpu(), timeout=limit, **place)
        if state.num_processes != layout.processes:
            raise UserError(
                f"{layout.processes} processes were launched, but accelerate sees "
                f"{state.num_processes}; check distributed_type in the accelerate YAML"
            )
        ranks = Ranks(layout, timeout)
        ranks.gather(0)
    if others and state.device.type != "cpu":
        with others.first_exchange("NCCL", timeout):
            ones = torch.ones(1, device=state.device)
            dist.all_reduce(ones)
            ones.item()
    return ranks


def restart_store() -> dist.Store | None:
    """The store where processes meet after torchelastic restarted the processes (`--max_restarts`).

    Where its launcher keeps the store, as with the static rendezvous, that still holds the
    addresses of the processes that died. The new ones write theirs under another prefix. Elsewhere
    process 0 creates a new store.

    Raises UserError where several launchers share a store through c10d: after a restart they
    disagree about its address, and have counted different numbers of restarts.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
    alone = os.environ["GROUP_WORLD_SIZE"] == "1" or os.environ["TORCHELASTIC_MAX_RESTARTS"] == "0"
    if alone and restarts == "0":
        return None
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False)
    # Static launchers keep their own entries in this store; those of c10d lie in another one.
    entry = f"{os.environ['TORCHELASTIC_RUN_ID']}/torchelastic/role_info/0"
    if not alone and not store.check([entry]):
        raise UserError(
            "with the c10d rendezvous, several launchers and --max_restarts, first export "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every node; samestep launch does it"
        )
    return None if restarts == "0" else dist.PrefixStore(f"restart-{restarts}", store)
