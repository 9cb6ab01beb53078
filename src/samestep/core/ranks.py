"""Exchanges sums, objects and errors between the processes of a run.

An error on one process must end all of them. Inside `Ranks.fail_together` all raise it at once.
Elsewhere the process that has it tells it in the store, see rendezvous.py; when it has ended, the
next exchange of the others fails, and they raise what it has told.
"""

import contextlib
import copy
import datetime
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import PartialState

from samestep.base.errors import Failed, UserError, as_user_error
from samestep.core.mesh import this_layout
from samestep.project.device import PROCESSES, use_cpu

SAVE_THREAD = "save"  # the name of the thread that writes a checkpoint in the background


class Ranks:
    """All processes of the run. They exchange small values in CPU memory, through gloo.

    Create it after data preparation, which may take longer than the timeout. `others`: what
    `rendezvous.join` has returned.
    """

    def __init__(self, timeout: int, others: Any = None):
        self.group, self.layout, self.timeout, self.others = None, this_layout(), timeout, others
        self.limit = datetime.timedelta(seconds=timeout)
        store: Any = others.wait(timeout) if others else None
        if PROCESSES > 1:
            others.try_exchange(lambda: self.gloo(store), torch.device("cpu"), timeout)
        else:
            store = restart_store()
        place: dict[str, Any] = {}
        if store:
            place = {"store": store, "rank": int(os.environ["RANK"]), "world_size": PROCESSES}
            if self.layout.deepspeed:  # it takes no store, but a group that exists
                device = torch.accelerator.current_accelerator() or torch.device("cpu")
                backend = dist.get_default_backend_for_device(device)
                dist.init_process_group(backend, timeout=self.limit, **place)
                place = {}
        state = PartialState(cpu=use_cpu(), timeout=self.limit, **place)
        if state.num_processes != PROCESSES:
            raise UserError(
                f"{PROCESSES} processes were launched, but accelerate sees {state.num_processes}; "
                "check distributed_type in the accelerate YAML"
            )
        if PROCESSES > 1:
            if state.device.type != "cpu":
                others.try_exchange(lambda: dist.group.WORLD, state.device, timeout)
            self.group = dist.new_group(backend="gloo", timeout=self.limit)

    def gloo(self, store: dist.Store) -> Any:
        """A group for one exchange: torch's own would take minutes to say what is wrong."""
        store = dist.PrefixStore("network", store)
        return dist.ProcessGroupGloo(store, int(os.environ["RANK"]), PROCESSES, self.limit)

    def for_thread(self) -> "Ranks":
        """The same processes with a group of their own, for a thread. All processes must call it.

        In one group, all processes must start their exchanges in the same order.
        """
        other = copy.copy(self)
        if self.group:
            other.group, other.others = dist.new_group(backend="gloo", timeout=self.limit), None
        return other

    def begin_exchange(self) -> Any:
        """The group, of several processes. The watcher tells who is behind in its exchanges."""
        if self.group and self.others:
            self.others.own["exchanges"] += 1
        return self.group

    def sum_over_ranks(self, *numbers: int, problem: Exception | None = None) -> list[int]:
        """Sums of integers over all processes. If a process has a problem, all of them raise it."""
        return PendingSum(self, numbers, problem).result()

    def sum_arrays(self, array: np.ndarray) -> np.ndarray:
        """The sum of an array over all processes; may change the array."""
        if group := self.begin_exchange():
            dist.all_reduce(torch.from_numpy(array), group=group)
        return array

    def gather(self, value: Any) -> list:
        """The value of each process, in the order of their ranks."""
        values = [value] * PROCESSES
        if group := self.begin_exchange():
            dist.all_gather_object(values, value, group=group)
        return values

    def gather_on_main(self, value: Any) -> list:
        """The value of each process on the main one, in the order of their ranks; elsewhere an
        empty list."""
        values: list | None = [value]
        if group := self.begin_exchange():
            values = [None] * PROCESSES if self.layout.rank == 0 else None
            dist.gather_object(value, values, dst=0, group=group)
        return values or []

    def from_main(self, value: Any) -> Any:
        """The main process's value, on every process."""
        return self.gather(value)[0]

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
        by_user, text = isinstance(problem, UserError), ""
        if problem:
            text = str(problem) or repr(problem)
            text = text if by_user else f"{type(problem).__name__}: {text}"
        who = f"process {os.environ.get('RANK', 0)} on {socket.gethostname()}"
        problems = [each for each in self.gather((by_user, text, who)) if each[1]]
        if not problems:
            return
        if problem and not by_user:
            raise problem  # with its traceback
        named = len(problems) < PROCESSES
        lines = [f"{who}: {text}" if named else text for _, text, who in problems]
        error = UserError if all(by_user for by_user, _, _ in problems) else Failed
        raise error("; ".join(dict.fromkeys(lines)))


class PendingSum:
    """`Ranks.sum_over_ranks` in the background."""

    def __init__(self, ranks: Ranks, numbers: Sequence[int], problem: Exception | None):
        self.ranks, self.problem = ranks, problem
        self.numbers, self.work = torch.tensor([*numbers, problem is not None]), None
        if group := ranks.begin_exchange():
            self.work = dist.all_reduce(self.numbers, group=group, async_op=True)

    def peek(self) -> list[int]:
        """The sums, even if a process has a problem; waits for all processes."""
        if self.work:
            self.work.wait()
            self.work = None
        return self.numbers.tolist()[:-1]

    def result(self) -> list[int]:
        """The sums. If a process has a problem, all of them raise it."""
        sums = self.peek()
        if self.numbers[-1]:
            self.ranks.raise_everywhere(self.problem)
        return sums


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
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every machine; samestep launch does it"
        )
    return None if restarts == "0" else dist.PrefixStore(f"restart-{restarts}", store)
