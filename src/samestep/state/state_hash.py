"""The hash of a training state: SHA-256 that depends on no layout, from the files of a checkpoint.

It is that of all that a resumed run continues from: of each tensor the name, the kind, the dtype,
the shape and the SHA-256 of the whole; and of the rest, such as learning rates, the JSON. One
process, DDP and FSDP2 get the same hash for the same state, however many files hold it. Numbers
that may differ between processes (counters of calls, times) are saved, and not hashed. This module
needs neither torch nor accelerate.
"""

import hashlib
import itertools
import json
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from samestep.state.checkpoints import hashing_threads, read_bytes

PLACES = "DCP_SHARDING_INFO"  # the entry of a safetensors file with the places of its tensors
VERSION = 2  # of the hash, as `state_version` in a manifest
_KINDS_OF_VERSION_1 = ("model.", "state.", "number.")  # see weights.py


class Part(NamedTuple):
    """A tensor of a file, which may be a part of a sharded one."""

    path: Path
    start: int  # byte of the file
    size: int
    shape: list[int]
    offsets: list[int]  # of its first value in the whole tensor


class Tensor(NamedTuple):
    dtype: str
    shape: list[int]
    parts: list[Part]


def _list_tensors(folder: Path, files: list[str]) -> dict[str, Tensor]:
    """List tensors, by name, from the headers of safetensors files in a folder."""
    tensors: dict[str, Tensor] = {}
    for path in (folder / name for name in sorted(files)):
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        places = json.loads(header.pop("__metadata__")[PLACES])
        for name, about in header.items():
            begin, end = about["data_offsets"]
            place = places[name]
            tensor = tensors.setdefault(name, Tensor(about["dtype"], place["shape"], []))
            start = 8 + length + begin
            part = Part(path, start, end - begin, about["shape"], place["saved_offsets"])
            tensor.parts.append(part)
    return tensors


def _hash_tensor(tensor: Tensor) -> str:
    """Return the SHA-256 of the bytes of a whole tensor, in C order.

    Raises ValueError unless its parts tile it: a resumed run would have other values in a gap.
    """
    digest = hashlib.sha256()
    places = [[*zip(part.offsets, part.shape, strict=True)] for part in tensor.parts]
    if not _is_whole(tensor) or any(
        _overlap(one, other) for one, other in itertools.combinations(places, 2)
    ):
        raise ValueError(f"the parts of {tensor.parts[0].path.parent} do not make whole tensors")
    if all(part.shape[1:] == tensor.shape[1:] for part in tensor.parts):  # cut by rows
        for part in sorted(tensor.parts, key=lambda part: part.offsets):
            for piece in read_bytes(part.path, part.start, part.size):
                digest.update(piece)
        return digest.hexdigest()
    first = tensor.parts[0]
    bytes_each = first.size // math.prod(first.shape)
    whole = np.empty([*tensor.shape, bytes_each], np.uint8)
    for part in tensor.parts:
        values = b"".join(read_bytes(part.path, part.start, part.size))
        ends = [start + size for start, size in zip(part.offsets, part.shape, strict=True)]
        place = tuple(map(slice, part.offsets, ends))
        whole[place] = np.frombuffer(values, np.uint8).reshape(*part.shape, bytes_each)
    digest.update(whole.reshape(-1).data)
    return digest.hexdigest()


def _is_whole(tensor: Tensor) -> bool:
    return sum(math.prod(part.shape) for part in tensor.parts) == math.prod(tensor.shape)


def _overlap(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> bool:
    """Return whether two parts share a value: (offset, size) of each dimension."""
    pairs = zip(one, other, strict=True)
    return all(max(a, b) < min(a + n, b + m) for (a, n), (b, m) in pairs)


def hash_tensors(
    folder: Path, files: list[str], share: int = 0, shares: int = 1
) -> dict[str, list]:
    """Return dtype, shape and SHA-256 of tensors by name, of one of `shares` parts of them."""
    tensors = _list_tensors(folder, files)
    sizes = {name: sum(part.size for part in tensor.parts) for name, tensor in tensors.items()}
    names = sorted(tensors, key=lambda name: (-sizes[name], name))[share::shares]
    with hashing_threads() as pool:
        digests = pool.map(_hash_tensor, [tensors[name] for name in names])
        return {
            name: [tensors[name].dtype, tensors[name].shape, digest]
            for name, digest in zip(names, digests, strict=True)
        }


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
    """Hash a state, of what `hash_tensors` of all processes have returned together, and of the
    manifest. Version 1 counted weights and moments alone."""
    if version == 1:
        counted = {n: about for n, about in tensors.items() if n.startswith(_KINDS_OF_VERSION_1)}
        return hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()
    entries = [[name, name.partition(".")[0], *about] for name, about in sorted(tensors.items())]
    text = json.dumps([entries, rest_of(manifest)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def describe_state(folder: Path, files: list[str], ranks: Any, manifest: dict) -> dict[str, Any]:
    """Return the hash of the state in these files, "" without any, and the seconds it took.

    All processes must call it, when the files are on the disk. Each hashes a share of the tensors.
    Where nodes share no folder, it is "" if one has a part of a tensor alone.
    """
    if not files:
        return {"state": ""}
    began = time.perf_counter()
    if any(ranks.nodes):
        with ranks.fail_together():
            files = [name for name in files if (folder / name).exists()]
            is_cut = not all(map(_is_whole, _list_tensors(folder, files).values()))
        if any(ranks.gather(is_cut)):
            return {"state": ""}
    with ranks.fail_together():
        share = hash_tensors(folder, files, *ranks.place_in_node)
    tensors = {name: about for hashed in ranks.gather(share) for name, about in hashed.items()}
    state = state_of(tensors, manifest)
    seconds = time.perf_counter() - began
    return {"state": state, "state_version": VERSION, "hash_seconds": seconds}


def chain_hash(manifest: dict) -> str:
    """Hash the entry that a checkpoint adds to the chain of its run; the next checkpoint's manifest
    has it as `previous`. Empty for a manifest without a state."""
    if not manifest.get("state"):
        return ""
    entry = [manifest["step"], manifest["state"], manifest["previous"]]
    return hashlib.sha256(json.dumps(entry).encode()).hexdigest()
