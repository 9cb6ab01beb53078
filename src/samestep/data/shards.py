"""Shards: files that are read while the model trains, on a disk or in a store.

Whole shards are held out, by the hash of their names without the extensions: the same ones in each
format.
"""

import functools
import hashlib
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from samestep.base.console import one_line, without_credentials
from samestep.base.fields import check_fields, check_ignored_fields, local_path
from samestep.data import hub, splits
from samestep.data.folders import (
    COMPRESSIONS,
    TABLES,
    choose,
    divide,
    file_ending,
    files_below,
    split_of,
)

EXTENSIONS = (".txt", *TABLES, ".tar")
# Names that stores give a digest of a file, or else a time.
TAGS = ("ETag", "etag", "sha256", "md5Hash", "blob_id", "LastModified", "last_modified", "updated")
TAGS += ("created", "mtime")
ENDS = 65_536  # bytes from both ends of a local shard that are compared


class Shard(NamedTuple):
    path: str
    name: str  # below the folder or URL
    size: int  # in bytes
    tag: str  # what a store says of the content, or a digest of both ends


def check_streaming(cfg: Any, bundled: Any) -> None:
    """Raises ValueError for data that cannot be streamed, and fields that do not go with it."""
    if not cfg.streaming:
        check_ignored_fields(cfg, [("lanes", False, "unless task.streaming is true")])
        return
    held = "empty while task.streaming is true: whole shards are held out"
    rules = [
        ("data", "," not in cfg.data, "one folder or URL of shards"),
        ("group_column", not cfg.group_column, held),
    ]
    for name in ("data", "validation_data"):  # URLs are stored and shown
        url = getattr(cfg, name)
        text = "a URL without credentials: give them as the package of the store takes them"
        rules.append((name, without_credentials(url) == url, text))
    check_fields(cfg, rules)
    if cfg.data in bundled or hub.is_hub_name(cfg.data):
        example = f"hf://datasets/{cfg.data}" if "/" in cfg.data else "hf://datasets/OWNER/NAME"
        hint = f"of a data set on the Hub give the URL of its files, {example}"
        raise ValueError(f"task.streaming: {cfg.data} is not a folder or URL of shards; {hint}")


def list_shards(data: str, field: str) -> dict[str, list[Shard]]:
    """The shards of a folder or URL by their splits, in the order of their names. Raises
    ValueError."""
    if "://" in data:
        found = list_store(data, field)
    else:
        root = local_path(data, field)
        found = []
        for below, path in files_below(str(root)) if root.exists() else ():
            if file_ending(path) in EXTENSIONS:
                name = below or root.name
                found.append(Shard(path, name, os.stat(path).st_size, digest_ends(path)))
        found.sort(key=lambda each: Path(each.path))
    if not found:
        kinds = ", ".join(EXTENSIONS)
        raise ValueError(f"task.{field}: there is no shard at {data}, of {kinds}")
    return divide({each: split_of(each.name) for each in found})


def list_store(url: str, field: str) -> list[Shard]:
    """The shards below a URL, by fsspec."""
    import fsspec

    try:
        store, root = fsspec.core.url_to_fs(url)
        files = store.find(root, detail=True)
    except Exception as error:  # each store has its own
        text = f"task.{field}: cannot list {one_line(url)}: {one_line(error)}"
        if isinstance(error, ValueError | ImportError | FileNotFoundError):
            raise ValueError(text) from None
        raise ConnectionError(text) from None  # it may pass
    found = []
    for path, about in sorted(files.items()):
        if file_ending(path) in EXTENSIONS:
            known = [str(about[each]) for each in TAGS if each in about]
            tag = known[0] if known else ""
            name = path.removeprefix(root).lstrip("/") or path.rpartition("/")[2]
            found.append(Shard(store.unstrip_protocol(path), name, about["size"], tag))
    return found


def digest_ends(path: str) -> str:
    """A digest of the first and the last bytes of a file."""
    with open(path, "rb") as file:
        content = file.read(ENDS)
        file.seek(max(os.stat(path).st_size - ENDS, 0))
        return hashlib.sha256(content + file.read()).hexdigest()[:16]


def split_shards(cfg: Any) -> tuple[list[Shard], list[Shard]]:
    """The shards to train on, and those to evaluate on: those of cfg.validation_data; those that
    are named so; or those that are held out, about cfg.validation_fraction, and at least one."""
    return split_once(cfg.data, cfg.validation_data, cfg.validation_fraction)


@functools.cache  # a start lists them for the key, to prepare and to train: it sees one list
def split_once(data: str, validation_data: str, fraction: float) -> tuple[list[Shard], list[Shard]]:
    by_split = list_shards(data, "data")
    train = choose(by_split, "train", "data", data)
    if validation_data:
        more = list_shards(validation_data, "validation_data")
        return train, choose(more, "validation", "validation_data", validation_data)
    if "validation" in by_split:
        return train, by_split["validation"]
    digests = [hashlib.sha256(name_alone(each.name).encode()).digest() for each in train]
    hashes = np.array([int.from_bytes(each[:8], "big") for each in digests], np.uint64)
    sizes, labels = np.ones(len(hashes)), np.zeros(len(hashes), int)
    chosen = splits.hold_out(hashes, sizes, labels, fraction, len(hashes))
    if not len(chosen):
        hint = "cut it, or give --task.validation_data PATH"
        raise ValueError(f"task.data: {data} is one shard, and one is held out; {hint}")
    held = [each for each, own in zip(train, hashes, strict=True) if own in chosen]
    return [each for each in train if each not in held], held


def name_alone(name: str) -> str:
    """The name of a shard without its extensions."""
    stem, ending = os.path.splitext(name)
    return os.path.splitext(stem)[0] if ending.lower() in COMPRESSIONS else stem


def describe(shards: list[Shard]) -> str:
    """A digest of names, sizes and tags."""
    lines = [f"{each.name} {each.size} {each.tag}\n" for each in shards]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
