"""Tensors in safetensors files: each process writes one, and any number of processes reads them.

    checkpoints/step-00000100/rank-00000.safetensors
    checkpoints/step-00000100/rank-00001.safetensors

torch.distributed.checkpoint (DCP) plans which process writes or reads which part of a tensor, so
one process, DDP, FSDP2, HSDP and tensor parallelism read each other's files. The files hold tensors
and their places, nothing that is executed. torch's HuggingFaceStorageReader reads them. They are
not written by its HuggingFaceStorageWriter: that keeps two more copies of a file in memory.
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save, save_file

from samestep.processes.alike import is_dense
from samestep.processes.ranks import Ranks
from samestep.state.state_hash import PLACES


@dataclass
class Share:
    """What one process writes."""

    rank: int  # of this process
    parts: dict[str, torch.Tensor]  # by the name of the tensor; on any device
    places: dict[str, dict]  # of each part: its offsets, and dtype and shape of the whole tensor


def take_share(tensors: dict[str, torch.Tensor], ranks: Ranks) -> Share:
    """Take this process's share of tensors that may be DTensors. All processes must call it.

    Of several processes that hold the same part one writes it. A process need not have all tensors.
    """
    from torch.distributed.checkpoint import DefaultSavePlanner

    rank, planner = ranks.layout.rank, DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(tensors, is_coordinator=rank == 0)
    plans, _ = planner.create_global_plan(ranks.gather(planner.create_local_plan()))
    share = Share(rank, {}, {})
    for item in planner.finish_plan(plans[rank]).items:
        name, whole, chunk = item.index.fqn, item.tensor_data.size, item.tensor_data.chunk
        if whole.numel() and not chunk.sizes.numel():  # there are more processes than rows
            continue
        part = share.parts[name] = planner.resolve_data(item).detach()
        dtype = str(part.dtype).removeprefix("torch.")
        share.places[name] = {"saved_offsets": [*chunk.offsets], "shape": [*whole], "dtype": dtype}
    return share


@functools.cache
def _holds(dtype: torch.dtype) -> bool:
    """Return whether a file can hold tensors of this type."""
    try:
        save({"": torch.zeros(1, dtype=dtype)})
    except Exception:  # safetensors raises KeyError, torch others
        return False
    return True


def check_kind(name: str, values: torch.Tensor) -> None:
    """Raise ValueError for a tensor that no file could hold."""
    if not is_dense(values):
        raise ValueError(
            f"{name} is a tensor of layout {values.layout}, and a checkpoint holds values in rows: "
            "make it again at each start, and keep it in an attribute"
        )
    if not _holds(values.dtype):
        raise ValueError(
            f"{name} is of {values.dtype}, and a checkpoint holds none of that type: keep its "
            "parts, such as torch.view_as_real(...)"
        )


def write_share(share: Share, folder: Path) -> None:
    """Write the file of this process; none if another process writes all of its tensors."""
    parts, storages = {}, set()
    for name, part in share.parts.items():
        part = part.cpu().contiguous()
        storage = part.untyped_storage().data_ptr()
        parts[name] = part.clone() if storage in storages else part  # safetensors refuses two views
        storages.add(storage)
    if parts:
        # One entry, for the same bytes: several get any order (safetensors/safetensors#584).
        metadata = {PLACES: json.dumps(share.places, sort_keys=True)}
        save_file(parts, folder / f"rank-{share.rank:05}.safetensors", metadata)


class TensorReader:
    """The tensors of a folder: `dtypes` and `shapes` by name. A process reads only its parts."""

    def __init__(self, folder: Path):
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

        self.files = HuggingFaceStorageReader(str(folder))
        listed = self.files.fs.ls
        # Hidden files are not verified: torch would load them, too.
        self.files.fs.ls = lambda path: [n for n in listed(path) if Path(n).name[0] != "."]
        self.metadata = self.files.read_metadata()
        tensors = sorted(self.metadata.state_dict_metadata.items())
        self.shapes = {name: saved.size for name, saved in tensors}
        self.dtypes = {name: saved.properties.dtype for name, saved in tensors}

    @torch.no_grad()
    def read(self, tensors: dict[str, torch.Tensor]) -> None:
        """Overwrite these tensors, which must have the shapes of the saved ones."""
        from torch.distributed.checkpoint import DefaultLoadPlanner

        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner(tensors, self.metadata, is_coordinator=True)
        self.files.set_up_storage_reader(self.metadata, is_coordinator=True)
        self.files.read_data(planner.create_local_plan(), planner)
