"""Tensors in safetensors files: each process writes one, and any number of processes reads them.

    checkpoints/step-00000100/rank-00000.safetensors
    checkpoints/step-00000100/rank-00001.safetensors

torch.distributed.checkpoint (DCP) plans which process writes or reads which part of a tensor, so
one process, DDP, FSDP2, HSDP and tensor parallelism read each other's files. The files hold tensors
and their places, nothing that is executed. torch's HuggingFaceStorageReader reads them, too. They
are not written by its HuggingFaceStorageWriter: that keeps two more copies of a file in memory.
"""

import json
import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from samestep.processes.ranks import Ranks

RANK = int(os.environ.get("RANK", 0))
PLACES = "DCP_SHARDING_INFO"  # the name under which torch's reader looks for the places
NAMES = "rank-*.safetensors"


@dataclass
class Share:
    """What one process writes."""

    parts: dict[str, torch.Tensor]  # by the name of the tensor; on any device
    places: dict[str, dict]  # of each part: its offsets, and dtype and shape of the whole tensor


def take_share(tensors: dict[str, torch.Tensor], ranks: Ranks) -> Share:
    """This process's share of tensors that may be sharded, as DTensors. All processes must call it.

    If several processes hold the same part, one of them writes it. DCP deals the parts by size. A
    process need not have all tensors.
    """
    from torch.distributed.checkpoint import DefaultSavePlanner

    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(tensors, is_coordinator=RANK == 0)
    plans, _ = planner.create_global_plan(ranks.gather(planner.create_local_plan()))
    share = Share({}, {})
    for item in planner.finish_plan(plans[RANK]).items:
        name, whole, chunk = item.index.fqn, item.tensor_data.size, item.tensor_data.chunk
        if whole.numel() and not chunk.sizes.numel():  # there are more processes than rows
            continue
        part = share.parts[name] = planner.resolve_data(item).detach()
        dtype = str(part.dtype).removeprefix("torch.")
        share.places[name] = {"saved_offsets": [*chunk.offsets], "shape": [*whole], "dtype": dtype}
    return share


def write_share(share: Share, folder: Path) -> None:
    """Writes the file of this process; none if another process writes all of its tensors."""
    parts, storages = {}, set()
    for name, part in share.parts.items():
        part = part.cpu().contiguous()
        storage = part.untyped_storage().data_ptr()
        parts[name] = part.clone() if storage in storages else part  # safetensors refuses two views
        storages.add(storage)
    if parts:
        # One entry: safetensors writes several in any order, and the same state is the same bytes.
        metadata = {PLACES: json.dumps(share.places, sort_keys=True)}
        save_file(parts, folder / f"rank-{RANK:05}.safetensors", metadata)


class TensorReader:
    """The tensors of a folder: `dtypes` and `shapes` by name. A process reads only its parts."""

    def __init__(self, folder: Path):
        self.files: dict[tuple, Path] = {}  # by the name and the offsets of a part
        self.dtypes, self.shapes, self.chunks = {}, {}, defaultdict(list)
        for path in sorted(folder.glob(NAMES)):
            with safe_open(path, "pt") as file:
                for name, place in json.loads(file.metadata()[PLACES]).items():
                    offsets = torch.Size(place["saved_offsets"])
                    sizes = torch.Size(file.get_slice(name).get_shape())
                    self.files[name, offsets] = path
                    self.dtypes[name] = getattr(torch, place["dtype"])
                    self.shapes[name] = torch.Size(place["shape"])
                    self.chunks[name].append((offsets, sizes))

    @torch.no_grad()
    def read(self, tensors: dict[str, torch.Tensor]) -> None:
        """Overwrites these tensors, which must have the shapes of the saved ones."""
        from torch.distributed.checkpoint import DefaultLoadPlanner, metadata

        saved: dict[str, Any] = {}
        for name in tensors:
            chunks = [metadata.ChunkStorageMetadata(*each) for each in self.chunks[name]]
            properties = metadata.TensorProperties(self.dtypes[name])
            saved[name] = metadata.TensorStorageMetadata(properties, self.shapes[name], chunks)
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner(tensors, metadata.Metadata(saved), is_coordinator=True)
        by_file = defaultdict(list)
        for item in planner.create_local_plan().items:
            index = item.storage_index
            by_file[self.files[index.fqn, index.offset]].append(item)
        for path, items in by_file.items():
            with safe_open(path, "pt") as file:
                for item in items:
                    name = item.storage_index.fqn
                    if [*item.lengths] == file.get_slice(name).get_shape():
                        part = file.get_tensor(name)
                    else:
                        ends = zip(item.storage_offsets, item.lengths, strict=True)
                        where = tuple(slice(first, first + length) for first, length in ends)
                        part = file.get_slice(name)[where]
                    planner.resolve_tensor(item).detach().copy_(part)
