"""Tests the network between the processes, before a run relies on it.

A firewall, a wrong interface or a host name that stands for 127.0.0.1 lets processes meet at the
store of the main process, and hang in their first exchange, without a word. Here this is one line.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Callable

import psutil

from samestep.base.console import one_line
from samestep.processes.ranks import Failed, UserError, catch

# Seconds for the first exchange, for a timeout of 1800 s; a longer one raises them. Processes are
# all there when it begins. The one of GPUs includes their start, and NCCL's search for the paths
# between them.
CPU_LIMIT, GPU_LIMIT = 60, 180


def own_address() -> str:
    """Host and address where gloo waits for other processes.

    gloo takes the first interface of GLOO_SOCKET_IFNAME, or the address of the host's name, or
    127.0.0.1. Raises UserError if this machine has no such interface.
    """
    host, given = socket.gethostname(), os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not given:
        with contextlib.suppress(OSError):
            return f"{host} at {socket.gethostbyname(host)}"
        return f"{host} at 127.0.0.1"
    name, found = given.split(",")[0], psutil.net_if_addrs()
    if name not in found:
        there = ", ".join(found)
        raise UserError(f"GLOO_SOCKET_IFNAME is {given}, but {host} has the interfaces {there}")
    families = (socket.AF_INET, socket.AF_INET6)
    addresses = [each.address for each in found[name] if each.family in families]
    return f"{host} at {name} {(addresses or ['without an address'])[0]}"


def try_exchange(
    exchange: Callable, library: str, limit: float, timeout: int, addresses: list[str]
) -> None:
    """Calls `exchange` in a thread; raises Failed if it fails, or takes too long.

    While gloo and NCCL connect, no timeout of torch ends their calls (gloo: 5 minutes). `limit`,
    in seconds, grows with the run's `timeout`, and is never above it.
    """
    limit = min(limit * max(timeout / 1800, 1), timeout)
    ended: list[Exception | None] = []
    thread = threading.Thread(target=lambda: ended.append(catch(exchange)[1]), daemon=True)
    thread.start()
    thread.join(limit)
    if ended == [None]:
        return
    problem = f"exchanged nothing within {limit:.0f} s (a --timeout above 1800 raises that)"
    if ended:  # NCCL tells the cause in the end
        text, _, cause = str(ended[0]).partition("Last error:")
        first, *_ = (cause.strip() or text.strip()).split("\n")
        problem = f"failed: {one_line(first)}"
    main = "{MASTER_ADDR}:{MASTER_PORT}".format(**os.environ)
    variable = f"{library.upper()}_SOCKET_IFNAME"
    raise Failed(
        f"the processes reach the main process at {main}, but not each other: {library} {problem}; "
        f"{some([*dict.fromkeys(addresses)])}; {variable} is "
        f"{os.environ.get(variable) or 'not set'}: if nothing else is wrong, export the name of an "
        "interface that joins the machines, and open all ports on it"
    )


def some(names: list[str], most: int = 5) -> str:
    """The first names of a list, for a line."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
