"""Exchanges sums, objects and errors between the processes of a run.

An error on one process must end all of them. Inside `Ranks.fail_together` all raise it at once.
Elsewhere the process that has it tells it in the store, see rendezvous.py; when it has ended, the
next exchange of the others fails, and they raise what it has told.
"""

import contextlib
import copy
import datetime
import hashlib
import socket
import uuid
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from samestep.base.errors import Failed, UserError, as_user_error
from samestep.processes.mesh import Layout
from samestep.processes.places import Places

SAVE_THREAD = "save"  # the name of the thread that writes a checkpoint in the background


class Ranks:
    """All processes of the run. They exchange small values in CPU memory, through gloo.

    They have a process group already, unless the process is alone. `timeout` in seconds.
    """

    def __init__(self, layout: Layout, timeout: int = 1800):
        self.layout, self.timeout = layout, timeout
        self.limit, self.group = datetime.timedelta(seconds=timeout), None
        if layout.processes > 1:
            self.group = dist.new_group(backend="gloo", timeout=self.limit)
        name = self.from_main(uuid.uuid4().hex)
        self.places = Places(layout.rank, layout.processes, name)
        # For each process the first that sees the same run folder: see Mirror.join.
        self.nodes = [0] * layout.processes

    @property
    def place_in_node(self) -> tuple[int, int]:
        """Return the number of this process among those that see its run folder, and theirs."""
        own, rank = self.nodes[self.layout.rank], self.layout.rank
        return self.nodes[:rank].count(own), self.nodes.count(own)

    def for_thread(self) -> "Ranks":
        """The same processes with a group of their own, for a thread. All processes must call it.

        In one group, all processes must start their exchanges in the same order.
        """
        other = copy.copy(self)
        if self.group:
            other.group = dist.new_group(backend="gloo", timeout=self.limit)
        return other

    def sum_over_ranks(self, *numbers: int, problem: Exception | None = None) -> list[int]:
        """Sums of integers over all processes. If a process has a problem, all of them raise it."""
        sums = self.sum_arrays(np.array([*numbers, problem is not None], np.int64)).tolist()
        if sums.pop():
            self.raise_everywhere(problem)
        return sums

    def sum_arrays(self, array: np.ndarray) -> np.ndarray:
        """The sum of an array over all processes; may change the array."""
        if self.group:
            dist.all_reduce(torch.from_numpy(array), group=self.group)
        return array

    def gather(self, value: Any) -> list:
        """The value of each process, in the order of their ranks."""
        values = [value] * self.layout.processes
        if self.group:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_on_main(self, value: Any) -> list:
        """What `gather` gives, on the main process alone; elsewhere an empty list."""
        values: list | None = [value]
        if self.group:
            values = [None] * self.layout.processes if self.layout.rank == 0 else None
            dist.gather_object(value, values, dst=0, group=self.group)
        return values or []

    def differ(self, text: str, copy: int | None = None, copies: int = 0) -> bool:
        """Return to all processes whether they gave different texts: one sum of digests.

        copy, copies: the number of this process in a group of so many, whose texts are compared;
        each text begins with its group then. Without them all processes are one group.
        """
        if copy is None:
            copy, copies = self.layout.rank, self.layout.processes
        digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.int64)
        # Numbers wrap around: those of equal texts add up to 0, others by chance, once in 2^256.
        return bool(self.sum_arrays(digest * np.int64(1 if copy else 1 - copies)).any())

    def join(self, values: dict[str, Any], merge: Callable[[Any, Any], Any]) -> dict[str, Any]:
        """Merge the values that processes have for a name, in any order. Each process gets those of
        a part of the names: in log2(processes) turns, in each of which two exchange a half."""
        rank, processes, step = self.layout.rank, self.layout.processes, 1
        paired = 1 << processes.bit_length() - 1
        extra = processes - paired  # so many give all they have to a neighbor first
        place = rank // 2 if rank < 2 * extra else rank - extra
        if rank < 2 * extra and rank % 2:
            self._send(values, rank - 1)
            return {}
        if rank < 2 * extra:
            values = _merged(values, self._receive(rank + 1), merge)
        while step < paired:
            other = place ^ step
            peer = 2 * other if other < extra else other + extra
            halves: tuple[dict, dict] = {}, {}
            for name, value in values.items():
                halves[zlib.crc32(name.encode()) & step == place & step][name] = value
            if place < other:
                self._send(halves[False], peer)
            received = self._receive(peer)
            if place > other:
                self._send(halves[False], peer)
            values = _merged(halves[True], received, merge)
            step *= 2
        return values

    def union(self, values: dict[str, Any]) -> dict[str, Any]:
        """The values of all processes by their names, on the main one; elsewhere no more than some.
        Neighbors join theirs, in log2(processes) turns."""
        rank, step = self.layout.rank, 1
        while step < self.layout.processes:
            if rank % (2 * step):
                self._send(values, rank - step)
                break
            if rank + step < self.layout.processes:
                values = values | self._receive(rank + step)
            step *= 2
        return values

    def _send(self, value: Any, rank: int) -> None:
        dist.send_object_list([value], rank, self.group)

    def _receive(self, rank: int) -> Any:
        values = [None]
        dist.recv_object_list(values, rank, self.group)
        return values[0]

    def from_main(self, value: Any) -> Any:
        """The main process's value, on every process."""
        values = [value]
        if self.group:
            dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    @contextlib.contextmanager
    def fail_together(self) -> Iterator[None]:
        """Runs its body on every process. If it fails on one of them, all raise the error.

        A ValueError is the user's: see as_user_error. All processes must enter it, also where
        `if accelerator.is_main_process` inside leaves the work to one.
        """
        problem = None
        try:
            with as_user_error():
                yield
        except Exception as error:
            problem = error
        self.raise_everywhere(problem)

    def raise_everywhere(self, problem: Exception | None) -> None:
        """Raises the problems of all processes on every process, each distinct one once."""
        if not self.sum_arrays(np.array([problem is not None], np.int64)).any():
            return
        by_user, text = isinstance(problem, UserError), ""
        if problem:
            text = str(problem) or repr(problem)
            text = text if by_user else f"{type(problem).__name__}: {text}"
        who = f"process {self.layout.rank} on {socket.gethostname()}"
        problems = [each for each in self.gather((by_user, text, who)) if each[1]]
        if problem and not by_user:
            raise problem  # with its traceback
        named = len(problems) < self.layout.processes
        lines = [f"{who}: {text}" if named else text for _, text, who in problems]
        error = UserError if all(by_user for by_user, _, _ in problems) else Failed
        raise error("; ".join(dict.fromkeys(lines)))


def _merged(values: dict, others: dict, merge: Callable[[Any, Any], Any]) -> dict:
    found = {name: merge(values[name], other) for name, other in others.items() if name in values}
    return values | others | found
