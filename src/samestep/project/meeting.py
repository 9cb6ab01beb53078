"""How train.py's processes form their group: before there is one, and after data preparation."""

import datetime
import os
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState

from samestep.base.errors import UserError
from samestep.core.ranks import Ranks
from samestep.project.device import use_cpu
from samestep.project.launched import this_layout


def meet(timeout: int, others: Any = None) -> Ranks:
    """Makes PartialState, and the processes of the run. `others`: see rendezvous.py."""
    layout, limit = this_layout(), datetime.timedelta(seconds=timeout)
    store = others.wait(timeout) if others else None
    several = layout.processes > 1
    if several:
        others.try_exchange(lambda: gloo(store, limit), torch.device("cpu"), timeout)
    else:
        store = restart_store()
    place: dict[str, Any] = {}
    if store:
        place = {"store": store, "rank": layout.rank, "world_size": layout.processes}
        if layout.deepspeed:  # it takes no store, but a group that exists
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
    if several and state.device.type != "cpu":
        others.try_exchange(lambda: dist.group.WORLD, state.device, timeout)
    return Ranks(layout, timeout, others)


def gloo(store: Any, limit: datetime.timedelta) -> Any:
    """A group for one exchange: torch's own would take minutes to say what is wrong."""
    store, layout = dist.PrefixStore("network", store), this_layout()
    return dist.ProcessGroupGloo(store, layout.rank, layout.processes, limit)


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
