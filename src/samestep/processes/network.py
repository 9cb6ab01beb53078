"""Tests the network between the processes, before a run relies on it.

A firewall, a wrong interface or a host name that stands for 127.0.0.1 lets processes meet at the
store of the main process, and hang in their first exchange, without a word. Here this is one line.
"""

import datetime
import json
import os
import socket
import threading
from collections.abc import Callable

import psutil
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from samestep.base.console import one_line

# Seconds for the first exchange, for a timeout of 1800 s; a longer one raises them. Processes are
# all there when it begins. The one of GPUs includes their start, and NCCL's search for the paths
# between them.
CPU_LIMIT, GPU_LIMIT = 60, 180
MAIN = "{MASTER_ADDR}:{MASTER_PORT}"


class NetworkError(RuntimeError):
    """The processes do not reach each other."""


def own_address() -> str:
    """Host, interface and address where gloo waits for other processes.

    gloo takes the first interface of GLOO_SOCKET_IFNAME, or the address of the host's name, or
    127.0.0.1. Raises ValueError if this machine has no such interface.
    """
    host, given = socket.gethostname(), os.environ.get("GLOO_SOCKET_IFNAME", "")
    families = (socket.AF_INET, socket.AF_INET6)
    found = {
        name: [each.address for each in addresses if each.family in families]
        for name, addresses in psutil.net_if_addrs().items()
    }
    if given:
        name = given.split(",")[0]
        if name not in found:
            there = ", ".join(found)
            raise ValueError(
                f"GLOO_SOCKET_IFNAME is {given}, but {host} has the interfaces {there}"
            )
        return f"{host} at {name} {(found[name] or ['without an address'])[0]}"
    try:
        address = socket.gethostbyname(host)
    except OSError:
        address = "127.0.0.1"
    name = next((name for name, addresses in found.items() if address in addresses), "lo")
    return f"{host} at {name} {address}"


def meet(store: dist.Store, value: list) -> list[list]:
    """The values of all processes, in the order of their ranks, through the store alone.

    Raises NetworkError that names the processes that are missing when the store's timeout is over.
    """
    keys = [f"network/{rank}" for rank in range(int(os.environ["WORLD_SIZE"]))]
    store.set(keys[int(os.environ["RANK"])], json.dumps(value))
    try:
        return [json.loads(each) for each in store.multi_get(keys)]
    except dist.DistError:
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        more = ", ..." if len(missing) > 10 else ""
        raise NetworkError(f"no word from process {', '.join(missing[:10])}{more}") from None


def try_exchange(
    exchange: Callable, library: str, limit: float, timeout: int, addresses: list[str]
) -> None:
    """Calls `exchange` in a thread; raises NetworkError if it fails, or takes too long.

    While gloo and NCCL connect, no timeout of torch ends their calls (gloo: 5 minutes). `limit`,
    in seconds, grows with the run's `timeout`, and is never above it.
    """
    problems, limit = [], min(limit * max(timeout / 1800, 1), timeout)

    def catch():
        try:
            exchange()
        except Exception as error:
            problems.append(error)

    thread = threading.Thread(target=catch, daemon=True)
    thread.start()
    thread.join(limit)
    if not thread.is_alive() and not problems:
        return
    problem = f"exchanged nothing within {limit:.0f} s (a --timeout above 1800 raises that)"
    if problems:  # NCCL tells the cause in the end
        text, _, cause = str(problems[0]).partition("Last error:")
        first = (cause.strip() or text.strip() or repr(problems[0])).splitlines()[0]
        problem = f"failed: {one_line(first)}"
    main, variable = MAIN.format(**os.environ), f"{library.upper()}_SOCKET_IFNAME"
    where = list(dict.fromkeys(addresses))
    raise NetworkError(
        f"the processes reach the main process at {main}, but not each other: {library} {problem}; "
        f"{', '.join(where[:8])}{', ...' if len(where) > 8 else ''}; {variable} is "
        f"{os.environ.get(variable) or 'not set'}: if nothing else is wrong, export the name of an "
        "interface that joins the machines, and open all ports on it"
    ) from next(iter(problems), None)


def try_cpus(timeout: int, store: dist.Store | None = None) -> tuple[dist.Store, list[str]]:
    """Waits for all processes, at most `timeout` s, and lets them add a number through gloo.

    Returns the store where they have met, and host, interface and address of each process. Process
    groups must use this store: process 0 may be its server. `store`: one that is there already.
    Raises NetworkError, or ValueError for an interface that does not exist.
    """
    rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    patience = datetime.timedelta(seconds=timeout)
    address, problem = "", ""
    try:
        address = own_address()
    except ValueError as error:
        problem = str(error)
    try:
        store = store or next(rendezvous("env://", timeout=patience))[0]
        store.set_timeout(patience)
        addresses, problems = map(list, zip(*meet(store, [address, problem]), strict=True))
    except (NetworkError, dist.DistError) as error:
        main = MAIN.format(**os.environ)
        raise NetworkError(
            f"waited {timeout} s for all processes to begin, which meet at {main}: {error}"
        ) from error
    if any(problems):
        raise ValueError("; ".join(dict.fromkeys(filter(None, problems))))

    def exchange():
        meeting = dist.PrefixStore("network", store)
        group = dist.ProcessGroupGloo(meeting, rank, processes, patience)
        group.allreduce([torch.ones(1)]).wait()

    try_exchange(exchange, "gloo", CPU_LIMIT, timeout, addresses)
    return store, addresses


def try_gpus(device: torch.device, timeout: int, addresses: list[str]) -> None:
    """Lets all processes add a number on their GPUs; raises NetworkError if that does not end."""

    def exchange():
        total = torch.ones(1, device=device)
        dist.all_reduce(total)
        total.item()

    try_exchange(exchange, "NCCL", GPU_LIMIT, timeout, addresses)
