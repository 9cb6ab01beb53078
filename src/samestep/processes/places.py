"""Where each process is: a save or an evaluation that one process does alone ends all with a line.

All processes must save and evaluate together. Each writes into torch's store where it is; one that
has waited for a minute reads where the others are.
"""

import atexit
import os
import threading
import time
from collections import Counter

import torch.distributed as dist

from samestep.base.errors import UserError

PATIENCE = 60  # seconds
_BEAT = 5  # seconds between two writes of a place that has changed


class Places:
    """The places of the processes of a run: the step that each computes, or what it waits for.

    name: of this start of the run, the same on all processes. A launcher may keep torch's store
    when it starts them again, and each launcher counts its own restarts.
    """

    def __init__(self, rank: int, processes: int, name: str):
        self.rank, self.processes = rank, processes
        self.prefix = f"samestep/{name}"
        # The process that ends all, and how many others know it.
        self.ended_by, self.known = f"{self.prefix}/ended", f"{self.prefix}/known"
        self.place = self.written = "0 step 0"
        self.times: Counter[str] = Counter()  # of each meeting
        self.ended = threading.Event()
        self.thread: threading.Thread | None = None

    def start_step(self, number: int) -> None:
        """Note that this process has begun a step."""
        self.place = f"{number} step {number}"
        if self.processes > 1 and not self.thread:
            self.thread = threading.Thread(target=self._write_places, daemon=True)
            self.thread.start()
            atexit.register(self._end)

    def meet(self, what: str, number: int) -> None:
        """Wait for all processes before what they do together after step `number`.

        Raises UserError if, after a minute, another process waits elsewhere or is in a later step.
        """
        if self.processes == 1 or not dist.is_initialized():  # a run that ends has left its group
            return
        try:
            self._meet(dist.distributed_c10d._get_default_store(), what, number)
        except dist.DistError:  # the store has died: if a process has, too, the next exchange fails
            pass
        self.place = f"{number} after {what}"

    def _meet(self, store: dist.Store, what: str, number: int) -> None:
        """Count the processes that are here until all are."""
        self.times[what] += 1
        key = f"{self.prefix}/{what}/{number}/{self.times[what]}"
        self.place = f"{number} {what}"
        store.add(key, 1)
        pause, limit = 1e-3, time.monotonic() + PATIENCE
        while store.add(key, 0) < self.processes and time.monotonic() < limit:
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        if store.add(key, 0) < self.processes:
            self._check_others(store, what, number)

    def _check_others(self, store: dist.Store, what: str, number: int) -> None:
        """Raise UserError if another process is in a later step, or waits for something else; tell
        the others. One that is merely late is waited for."""
        for rank in range(self.processes):
            name = f"{self.prefix}/place/{rank}"
            place = store.get(name).decode() if store.check([name]) else ""
            step, _, other = place.partition(" ")
            waits = other and other != what and not other.startswith(("after", "step"))
            is_elsewhere = bool(step) and (int(step) > number or (step == str(number) and waits))
            if rank != self.rank and is_elsewhere:
                store.set(self.ended_by, str(self.rank))
                limit = time.monotonic() + 2 * _BEAT
                while store.add(self.known, 0) < self.processes - 1 and time.monotonic() < limit:
                    time.sleep(0.1)
                raise UserError(
                    f"{what} after step {number} has waited {PATIENCE} s on process {self.rank} "
                    f"for process {rank}, which is at {other}: all processes must call it, so "
                    "leave it out of `if accelerator.is_main_process`"
                )

    def _write_places(self) -> None:
        """Write where this process is, now and then, also while it waits; end it with another."""
        store = dist.distributed_c10d._get_default_store()
        try:
            while not self.ended.wait(_BEAT):
                if self.place != self.written:
                    self.written = self.place
                    store.set(f"{self.prefix}/place/{self.rank}", self.written)
                if store.check([self.ended_by]) and store.get(self.ended_by) != b"%d" % self.rank:
                    store.add(self.known, 1)
                    os._exit(2)  # before its main thread tells of a lost connection
        except RuntimeError:  # the store has ended
            return

    def _end(self) -> None:
        """Let the thread end before Python does: torch's store may not be in use then."""
        self.ended.set()
        assert self.thread
        self.thread.join()
