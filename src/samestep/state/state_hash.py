"""The hash of a training state: SHA-256 that depends on no layout, from the files of a checkpoint.

It is that of the weights, the buffers, and what the optimizer keeps for each weight: by name, the
dtype, the shape and the SHA-256 of the whole tensor. One process, DDP and FSDP2 get the same hash
for the same state, however many files hold it. This module needs neither torch nor accelerate.
"""

import hashlib
import json
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from samestep.state.checkpoints import hashing_threads, read_bytes

PLACES = "DCP_SHARDING_INFO"  # the entry of a safetensors file with the places of its tensors
KINDS = ("model.", "state.", "number.")  # see weights.py


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
    """List the tensors that count, by name, from the headers of safetensors files in a folder."""
    tensors: dict[str, Tensor] = {}
    for path in (folder / name for name in sorted(files)):
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        places = json.loads(header.pop("__metadata__")[PLACES])
        for name, about in header.items():
            if not name.startswith(KINDS):
                continue
            begin, end = about["data_offsets"]
            place = places[name]
            tensor = tensors.setdefault(name, Tensor(about["dtype"], place["shape"], []))
            start = 8 + length + begin
            part = Part(path, start, end - begin, about["shape"], place["saved_offsets"])
            tensor.parts.append(part)
    return tensors


def _hash_tensor(tensor: Tensor) -> str:
    """Return the SHA-256 of the bytes of a whole tensor, in C order."""
    digest = hashlib.sha256()
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


def state_of(tensors: dict[str, list]) -> str:
    """Hash a state, of what `hash_tensors` of all processes have returned together."""
    return hashlib.sha256(json.dumps(tensors, sort_keys=True).encode()).hexdigest()


def describe_state(folder: Path, files: list[str], ranks: Any) -> dict[str, Any]:
    """Return the hash of the state in these files, "" without any, and the seconds it took.

    All processes must call it, when the files are on the disk. Each hashes a share of the tensors.
    """
    if not files:
        return {"state": ""}
    began = time.perf_counter()
    with ranks.fail_together():
        share = hash_tensors(folder, files, ranks.layout.rank, ranks.layout.processes)
    tensors = {name: about for hashed in ranks.gather(share) for name, about in hashed.items()}
    return {"state": state_of(tensors), "hash_seconds": time.perf_counter() - began}


def chain_hash(manifest: dict) -> str:
    """Hash the entry that a checkpoint adds to the chain of its run; the next checkpoint's manifest
    has it as `previous`. Empty for a manifest without a state."""
    if not manifest.get("state"):
        return ""
    entry = [manifest["step"], manifest["state"], manifest["previous"]]
    return hashlib.sha256(json.dumps(entry).encode()).hexdigest()
