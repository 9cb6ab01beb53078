"""The hash of a training state: SHA-256 that depends on no layout, from the files of a checkpoint.

It is that of all that a resumed run continues from: of each tensor the name, the kind, the dtype,
the shape and the hash of the whole; and of the rest, such as learning rates, the JSON. One process,
DDP and FSDP2 get the same hash for the same state, however many files hold it. Numbers that may
differ between processes (counters of calls, times) are saved, and not hashed. This module needs
neither torch nor accelerate.

The hash of a tensor is the tree of RFC 6962 over leaves of 2^k rows, of 4 kB together or of one
row: each process hashes what it wrote, and neighbors join what they have. Before version 3 it was
the SHA-256 of all bytes.
"""

import hashlib
import json
import math
import mmap
import time
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from samestep.state.checkpoints import hashing_threads

PLACES = "DCP_SHARDING_INFO"  # the entry of a safetensors file with the places of its tensors
VERSION = 3  # of the hash, as `state_version` in a manifest
_KINDS_OF_VERSION_1 = ("model.", "state.", "number.")  # see weights.py
_LEAF = 4096  # bytes of a leaf of more than one row, at most


class Part(NamedTuple):
    """A tensor of a file, which may be a part of a sharded one."""

    content: memoryview  # of the file
    shape: list[int]
    offsets: list[int]  # of its first value in the whole tensor


class Tensor(NamedTuple):
    dtype: str
    shape: list[int]
    parts: list[Part]

    @property
    def value_bytes(self) -> int:
        """Return the bytes of a value; 0 for a tensor without any."""
        values = sum(math.prod(part.shape) for part in self.parts)
        return sum(len(part.content) for part in self.parts) // max(values, 1)


def _list_tensors(folder: Path, files: list[str]) -> dict[str, Tensor]:
    """List tensors, by name, from the headers of safetensors files in a folder."""
    tensors: dict[str, Tensor] = {}
    for path in (folder / name for name in sorted(files)):
        with open(path, "rb") as file:
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start].tobytes())
        places = json.loads(header.pop("__metadata__")[PLACES])
        for name, about in header.items():
            begin, end = about["data_offsets"]
            place = places[name]
            tensor = tensors.setdefault(name, Tensor(about["dtype"], place["shape"], []))
            values = content[start + begin : start + end]
            tensor.parts.append(Part(values, about["shape"], place["saved_offsets"]))
    return tensors


def _runs(part: Part, whole: list[int]) -> list[tuple[int, memoryview]]:
    """Return the runs of bytes of a part that follow each other in the whole tensor, too, each with
    its first byte there."""
    if not part.content:
        return []
    cut = [i for i, size in enumerate(part.shape) if size != whole[i]]
    step = len(part.content) // math.prod(part.shape)
    steps: list[int] = []  # bytes between two neighbors, of each dimension
    for size in reversed(whole):
        steps.insert(0, step)
        step *= size
    starts = np.array([sum(a * b for a, b in zip(part.offsets, steps, strict=True))])
    for size, step in zip(part.shape[: max(cut, default=0)], steps, strict=False):
        starts = (starts[:, None] + step * np.arange(size)).reshape(-1)
    size = len(part.content) // len(starts)
    return [(s, part.content[i * size : (i + 1) * size]) for i, s in enumerate(starts.tolist())]


class Tree:
    """The hash of a tensor of which any parts are known: nodes of its tree, and pieces of leaves.

    shape: of the whole tensor. value_bytes: of a value.
    """

    def __init__(self, dtype: str, shape: list[int], value_bytes: int):
        self.dtype, self.shape = dtype, shape
        self.size = value_bytes * math.prod(shape)
        self.leaf = max(value_bytes * math.prod(shape[1:]), 1)
        while 2 * self.leaf <= _LEAF:
            self.leaf *= 2
        self.count = -(-self.size // self.leaf)  # leaves
        self.nodes: dict[tuple[int, int], bytes] = {}  # by the first leaf, and their number
        self.pieces: dict[int, list[tuple[int, bytes]]] = {}  # by leaf: first byte, and bytes
        self.overlaps = False  # whether parts do, or one ends past the last value

    def read(self, part: Part) -> None:
        """Add a part."""
        for start, content in _runs(part, self.shape):
            self.overlaps |= start + len(content) > self.size
            content = content[: max(self.size - start, 0)]
            end = start + len(content)
            low = min(-(-start // self.leaf) * self.leaf, end)  # where whole leaves begin
            high = max(end // self.leaf * self.leaf, low)
            self.add_leaves(low // self.leaf, content[low - start : high - start])
            for first, last in ((start, low), (high, end)):
                if first < last:
                    values = content[first - start : last - start].tobytes()
                    self.pieces.setdefault(first // self.leaf, []).append((first, values))
        self.join_pieces()

    def add_leaves(self, first: int, content: memoryview) -> None:
        """Add whole leaves, from number `first` on. Little is done between two hashes: each lets
        other threads hash."""
        places = range(0, len(content), self.leaf)
        level = [_hash_leaf(content[i : i + self.leaf]) for i in places]
        width = 1
        while level:
            if first & width:  # the right half of a node whose left one is not here
                self.add(first, width, level.pop(0))
                first += width
            if len(level) % 2:
                self.add(first + (len(level) - 1) * width, width, level.pop())
            pairs = zip(level[::2], level[1::2], strict=True)
            level = [hashlib.sha256(b"\1" + left + right).digest() for left, right in pairs]
            width *= 2

    def add(self, first: int, width: int, digest: bytes) -> None:
        """Add a node: of `width` leaves, a power of two. Two halves become their parent at once."""
        while other := self.nodes.pop((first ^ width, width), b""):
            left, right = (other, digest) if first & width else (digest, other)
            digest = hashlib.sha256(b"\1" + left + right).digest()
            first, width = first & ~width, 2 * width
        self.overlaps |= (first, width) in self.nodes
        self.nodes[first, width] = digest

    def join_pieces(self) -> None:
        """Join pieces that follow each other, and hash leaves that are whole."""
        pieces, self.pieces = self.pieces, {}
        for number, found in pieces.items():
            joined: list[tuple[int, list[bytes]]] = []
            end = -1
            for start, content in sorted(found):
                self.overlaps |= start < end
                if start != end:
                    joined.append((start, []))
                joined[-1][1].append(content)
                end = start + len(content)
            known = [(start, b"".join(contents)) for start, contents in joined]
            if len(known[0][1]) == min(self.leaf, self.size - number * self.leaf):
                self.add(number, 1, _hash_leaf(known[0][1]))
            else:
                self.pieces[number] = known

    def merge(self, other: "Tree") -> "Tree":
        """Add what another tree knows of the same tensor; return this one."""
        same = (self.dtype, self.shape, self.size) == (other.dtype, other.shape, other.size)
        self.overlaps |= other.overlaps or not same
        for (first, width), digest in other.nodes.items():
            self.add(first, width, digest)
        for number, pieces in other.pieces.items():
            self.pieces.setdefault(number, []).extend(pieces)
        self.join_pieces()
        return self

    def digest(self) -> str:
        """Return the hash of the tensor; raise ValueError unless its parts are there, once."""
        end, nodes = 0, sorted(self.nodes.items())
        for (first, width), _ in nodes:
            self.overlaps |= first != end
            end = first + width
        if self.overlaps or self.pieces or end != self.count:
            raise ValueError("the parts do not make whole tensors")
        root = nodes[-1][1] if nodes else hashlib.sha256().digest()
        for _, left in reversed(nodes[:-1]):
            root = hashlib.sha256(b"\1" + left + root).digest()
        return hashlib.sha256(f"{self.dtype} {self.shape} ".encode() + root).hexdigest()


def _hash_leaf(content: bytes | memoryview) -> bytes:
    digest = hashlib.sha256(b"\0")
    digest.update(content)  # not a copy: a row of many experts has hundreds of MB
    return digest.digest()


def read_trees(folder: Path, files: list[str]) -> dict[str, Tree]:
    """Return what the tensors in these files tell of their hashes, by name."""

    def read(tensor: Tensor) -> Tree:
        tree = Tree(tensor.dtype, tensor.shape, tensor.value_bytes)
        for part in tensor.parts:
            tree.read(part)
        return tree

    tensors = _list_tensors(folder, files)
    with hashing_threads() as pool:
        return dict(zip(tensors, pool.map(read, tensors.values()), strict=True))


def _close(trees: dict[str, Tree], folder: Path) -> dict[str, list]:
    """Return dtype, shape and hash of tensors; raise ValueError unless all parts were there."""
    try:
        return {name: [tree.dtype, tree.shape, tree.digest()] for name, tree in trees.items()}
    except ValueError:
        raise ValueError(f"the parts of {folder} do not make whole tensors") from None


# ---- The state -----------------------------------------------------------------------------------


def hash_tensors(folder: Path, files: list[str], version: int = VERSION) -> dict[str, list]:
    """Return dtype, shape and hash of the tensors in these files, by name.

    Raises ValueError unless the files have all parts of each, once.
    """
    if version > 2:
        return _close(read_trees(folder, files), folder)
    tensors = _list_tensors(folder, files)
    return {n: [each.dtype, each.shape, _hash_bytes(each, folder)] for n, each in tensors.items()}


def _hash_bytes(tensor: Tensor, folder: Path) -> str:
    """Return the hash of a tensor before version 3: of its bytes, in C order."""
    digest, end = hashlib.sha256(), 0
    runs = [run for part in tensor.parts for run in _runs(part, tensor.shape)]
    for start, content in sorted(runs, key=itemgetter(0)):
        if start == end:
            digest.update(content)
            end += len(content)
    size = tensor.value_bytes * math.prod(tensor.shape)
    if not size == end == sum(len(part.content) for part in tensor.parts):
        raise ValueError(f"the parts of {folder} do not make whole tensors")
    return digest.hexdigest()


def rest_of(manifest: dict) -> dict[str, Any]:
    """Return what a state is beside its tensors, from the manifest of a checkpoint."""
    hashed = {f"attribute.{path}" for path in manifest.get("hashed_attributes", ())}
    others = {}
    for name, packed in manifest.get("others", {}).items():
        if name.startswith("registered."):  # it may count the calls of its process
            others[name] = without_numbers(packed)
        elif not name.startswith("attribute.") or name in hashed:
            others[name] = packed
    names = ("step", "samples", "lanes", "trains", "added_groups")
    return {"others": others, **{name: manifest.get(name) for name in names}}


def without_numbers(packed: Any) -> Any:
    """Return a packed state with None for its numbers, but those of schedulers: `last_epoch`."""
    if isinstance(packed, dict):
        ((kind, value),) = packed.items()
        if kind == "dict" and any(key == "last_epoch" for key, _ in value):
            return packed
        return {kind: without_numbers(value)}
    if isinstance(packed, list):
        return [without_numbers(entry) for entry in packed]
    is_number = isinstance(packed, int | float) and not isinstance(packed, bool)
    return None if is_number else packed


def state_of(tensors: dict[str, list], manifest: dict, version: int = VERSION) -> str:
    """Hash a state, of what `hash_tensors` returns of all files, and of the manifest. Version 1
    counted weights and moments alone."""
    if version == 1:
        counted = {n: about for n, about in tensors.items() if n.startswith(_KINDS_OF_VERSION_1)}
        return hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()
    entries = [[name, name.partition(".")[0], *about] for name, about in sorted(tensors.items())]
    text = json.dumps([entries, rest_of(manifest)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def describe_state(
    folder: Path, own: list[str] | None, ranks: Any, manifest: dict
) -> dict[str, Any]:
    """Return the hash of the state in a folder, "" without any, and the seconds it took.

    All processes must call it, when their files are on the disk. Each hashes its `own`; None where
    the files have no hash of the state.
    """
    if own is None:
        return {"state": ""}
    began = time.perf_counter()
    with ranks.fail_together():
        trees = read_trees(folder, own)
    trees = ranks.join(trees, Tree.merge)
    with ranks.fail_together():
        tensors = _close(trees, folder)
    tensors, state = ranks.union(tensors), ""
    with ranks.fail_together():
        if ranks.layout.rank == 0:
            if tensors.keys() ^ manifest.get("tensors", tensors).keys():
                raise ValueError(f"the parts of {folder} do not make whole tensors")
            state = state_of(tensors, manifest)
    state = ranks.from_main(state)
    seconds = time.perf_counter() - began
    return {"state": state, "state_version": VERSION, "hash_seconds": seconds}


def chain_hash(manifest: dict) -> str:
    """Hash the entry that a checkpoint adds to the chain of its run; the next checkpoint's manifest
    has it as `previous`. Empty for a manifest without a state."""
    if not manifest.get("state"):
        return ""
    entry = [manifest["step"], manifest["state"], manifest["previous"]]
    return hashlib.sha256(json.dumps(entry).encode()).hexdigest()
