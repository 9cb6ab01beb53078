"""Tensors in safetensors files: each process writes one, and any number of processes reads them.

    checkpoints/step-00000100/rank-00000.safetensors
    checkpoints/step-00000100/rank-00001.safetensors

Which process writes which part of a tensor is a function of names, shapes and the layout: none asks
another. The manifest has names, shapes and cuts, so a process opens the files that it needs, and
one process, DDP, FSDP2, HSDP and tensor parallelism read each other's. The files hold tensors and
their places, nothing that is executed; HuggingFaceStorageReader of torch's DCP reads them, too.
"""

import functools
import heapq
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save, save_file

from samestep.processes.alike import is_dense
from samestep.processes.mesh import Layout
from samestep.processes.ranks import Ranks
from samestep.processes.sharding import is_dtensor, local
from samestep.state.state_hash import PLACES

_WRITERS = 8  # of what processes have in common, at most: a reader opens the files of all of them


@dataclass
class Share:
    """What one process writes.

    index: of each tensor its dtype, its shape, the rank that writes its first part, and its cuts in
    their order: a dimension, the number of parts, and the ranks from one to the next.
    """

    rank: int  # of this process
    parts: dict[str, torch.Tensor]  # by the name of the tensor; on any device
    places: dict[str, dict]  # of each part: its offsets, and dtype and shape of the whole tensor
    index: dict[str, list]

    @property
    def files(self) -> list[str]:
        """Return the name of the file of this process; none if it writes no tensor."""
        return [file_of(self.rank)] if self.parts else []


def file_of(rank: int) -> str:
    return f"rank-{rank:05}.safetensors"


def take_share(
    tensors: dict[str, torch.Tensor], ranks: Ranks, alone: Collection[str] = ()
) -> Share:
    """Take this process's share of tensors that may be DTensors; `alone`: what no other has.

    A process that has a part alone writes it. What several have is assigned by size to eight of
    them at most, evenly spread. All processes of a stage have the same names and shapes.
    """
    rank, peers, loads = ranks.layout.rank, ranks.layout.peers, {}
    share = Share(rank, {}, {}, {})
    for name, values in sorted(tensors.items(), key=lambda each: (-each[1].nbytes, each[0])):
        holders, cuts, distance = peers, [], 0
        if name in alone:
            holders = [rank]
        elif is_dtensor(values):
            holders = _holders_of(values.device_mesh, values.placements, ranks.layout)
            cuts, distance = _cuts_of(values.device_mesh, values.placements)
        writers = holders[:: -(-len(holders) // _WRITERS)]
        # The largest first, each to the writer with the least.
        queue = loads.setdefault(len(writers), [(0, i) for i in range(len(writers))])
        least, number = queue[0]
        heapq.heapreplace(queue, (least + values.nbytes, number))
        part, writer, shape = local(values).detach(), writers[number], [*values.shape]
        dtype = str(part.dtype).removeprefix("torch.")
        share.index[name] = [dtype, shape, writer - distance, cuts]
        if writer == rank and (part.numel() or not values.numel()):  # else too few rows
            place = {"saved_offsets": _offsets_of(values), "shape": shape, "dtype": dtype}
            share.parts[name], share.places[name] = part, place
    return share


@functools.lru_cache
def _holders_of(mesh: Any, placements: tuple, layout: Layout) -> list[int]:
    """Return the ranks that have this process's part of a DTensor."""
    same = [
        slice(None) if placement.is_replicate() else slice(at, at + 1)
        for at, placement in zip(mesh.get_coordinate(), placements, strict=True)
    ]
    inside, peers = mesh.mesh[tuple(same)].flatten().tolist(), layout.peers
    if mesh.mesh.numel() == len(peers):
        return inside
    first, covered, origins = int(mesh.mesh.min()), set(), []
    distances = (mesh.mesh.flatten() - first).tolist()
    for rank in peers:  # the other meshes of this form, whose processes have copies
        if rank not in covered:
            covered |= {rank + distance for distance in distances}
            origins.append(rank)
    return [origin + rank - first for origin in origins for rank in inside]


@functools.lru_cache
def _cuts_of(mesh: Any, placements: tuple) -> tuple[list[list[int]], int]:
    """Return the cuts of a DTensor as Share.index has them, and the ranks from the process that has
    the first part to this one. The ranks of a mesh are evenly spread along each dimension."""
    cuts, later, distance = [], [], 0
    for i, (placement, at) in enumerate(zip(placements, mesh.get_coordinate(), strict=True)):
        if not placement.is_replicate():
            line = mesh.mesh.movedim(i, 0).reshape(mesh.mesh.shape[i], -1)[:, 0].tolist()
            stride = line[1] - line[0] if len(line) > 1 else 0
            # FSDP cuts the parts of tensor parallelism, which comes after it in the mesh.
            order = later if hasattr(placement, "split_factor") else cuts
            order.append([placement.dim, len(line), stride])
            distance += at * stride
    return cuts + later[::-1], distance


def _offsets_of(values: torch.Tensor) -> list[int]:
    """Return the place of this process's part of a tensor in the whole."""
    if not is_dtensor(values):
        return [0] * values.dim()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    about = values.shape, values.device_mesh, values.placements
    return [*compute_local_shape_and_global_offset(*about)[1]]


def find_ranks(
    first: int, cuts: list, shape: Collection[int], offsets: Collection[int], size: Collection[int]
) -> Iterator[int]:
    """Yield the ranks that have written values of a block of a tensor, which has such an entry in
    an index: `size` values from `offsets` on."""
    wanted = [*zip(offsets, (a + n for a, n in zip(offsets, size, strict=True)), strict=True)]

    def cut(rank: int, block: list[tuple[int, int]], left: list) -> Iterator[int]:
        if not left:
            yield rank
            return
        (dim, parts, stride), *others = left
        begin, end = block[dim]
        each = max(-(-(end - begin) // parts), 1)
        low, high = max(wanted[dim][0], begin), min(wanted[dim][1], end)
        for number in range((low - begin) // each, -(-(high - begin) // each)):
            part = begin + number * each, min(begin + (number + 1) * each, end)
            yield from cut(rank + number * stride, [*block[:dim], part, *block[dim + 1 :]], others)

    if all(size):
        yield from cut(first, [(0, count) for count in shape], cuts)


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
        save_file(parts, folder / file_of(share.rank), metadata)


class TensorReader:
    """The tensors of a folder: `dtypes` and `shapes` by name. A process reads only its parts.

    saved: the manifest of the checkpoint, by which it opens the files that it needs; without it all
    files are opened at once.
    """

    def __init__(self, folder: Path, saved: dict | None = None):
        self.folder, self.index = Path(folder), (saved or {}).get("tensors", {})
        self.opened: set[str] = set()
        # By tensor: a file, the offsets of its part and its shape.
        self.parts: dict[str, list[tuple[Any, list[int], list[int]]]] = {}
        index = sorted(self.index.items())
        self.shapes = {name: torch.Size(shape) for name, (_, shape, *_) in index}
        self.dtypes = {name: getattr(torch, dtype) for name, (dtype, *_) in index}
        if not self.index:
            self._open_all()

    def _open_all(self) -> None:
        # Hidden files are not verified.
        for path in sorted(self.folder.glob("[!.]*.safetensors")):
            self._open(path.name)
        self.shapes = dict(sorted(self.shapes.items()))

    def _open(self, name: str) -> None:
        if name in self.opened:
            return
        self.opened.add(name)
        file = safe_open(self.folder / name, "pt")
        for tensor, place in json.loads(file.metadata()[PLACES]).items():
            part = file, place["saved_offsets"], file.get_slice(tensor).get_shape()
            self.parts.setdefault(tensor, []).append(part)
            self.shapes.setdefault(tensor, torch.Size(place["shape"]))
            self.dtypes.setdefault(tensor, getattr(torch, place["dtype"]))

    @torch.no_grad()
    def read(self, tensors: dict[str, torch.Tensor]) -> None:
        """Overwrite these tensors, which must have the shapes of the saved ones.

        Raises ValueError unless the files have all values.
        """
        for name, values in tensors.items():
            target, offsets = local(values.detach()), _offsets_of(values)
            if name in self.index:
                _, shape, first, cuts = self.index[name]
                for rank in find_ranks(first, cuts, shape, offsets, target.shape):
                    if (self.folder / file_of(rank)).exists():
                        self._open(file_of(rank))
            if self._copy(name, target, offsets) != target.numel():
                self._open_all()  # the index is no more than a hint
                if self._copy(name, target, offsets) != target.numel():
                    raise ValueError(f"{self.folder} does not have all values of {name}")

    def _copy(self, name: str, target: torch.Tensor, offsets: list[int]) -> int:
        """Copy what the opened files have of a block of a tensor; return the number of values."""
        count = 0
        for file, starts, shape in self.parts.get(name, ()):
            here, there = [], []
            for start, size, offset, wanted in zip(
                starts, shape, offsets, target.shape, strict=True
            ):
                low, high = max(start, offset), min(start + size, offset + wanted)
                here.append(slice(low - offset, max(high, low) - offset))
                there.append(slice(low - start, max(high, low) - start))
            part = target[tuple(here)]
            if part.numel():
                is_whole = [*part.shape] == shape
                values = file.get_tensor(name) if is_whole else file.get_slice(name)[tuple(there)]
                part.copy_(values)
            count += part.numel()
        return count
