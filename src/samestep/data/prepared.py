"""Prepared data: what task.prepare_data returned, saved once in a folder that all processes load.

The key of the folder counts all that shapes the rows: fields of the task, the files that they name,
the code of prepare_data and views and what these reach by name in the project, and the code of the
library that reads data. The folder gets its name when it is complete.
"""

import contextlib
import copy
import dataclasses
import errno
import functools
import hashlib
import inspect
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import filelock
import pyarrow as pa
from accelerate.utils import set_seed
from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from samestep.base.console import one_line, print_on_main
from samestep.base.files import (
    DISK_FULL,
    UMASK,
    comes_again,
    fsync,
    read_json_object,
    remove,
    replace_text,
)
from samestep.data import columns, prepared_key
from samestep.project.config import fields_of

INDEX, ROWS, WORK = "prepared.json", "rows", "work"  # names in a prepared folder
LOCK_SECONDS = 5  # of waiting for another process until it is said
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)  # on this disk


class PreparedData(datasets.DatasetDict):
    """The splits that prepare_data returned, with the folder in which it has written files."""

    folder: Path


# ---- The config that prepare_data gets -----------------------------------------------------------


@functools.cache
def guarded_class(kind: type) -> type:
    """A kind of config in which fields of the model cannot be read: they are not in the key."""
    hidden = prepared_key.hidden_fields(kind)

    def read(self: Any, name: str) -> Any:
        if name in hidden:
            raise ValueError(
                f"prepare_data reads task.{name}, which is marked as the model's alone; take "
                "MODEL out of its metadata in TaskConfig"
            )
        return object.__getattribute__(self, name)

    def pickled(self: Any) -> tuple:
        return rebuild, (kind, values_of(self))

    return type(kind.__name__, (kind,), {"__getattribute__": read, "__reduce__": pickled})


def rebuild(kind: type, values: dict) -> Any:
    cfg = object.__new__(guarded_class(kind))
    for name, value in values.items():
        object.__setattr__(cfg, name, value)
    return cfg


def values_of(cfg: Any) -> dict[str, Any]:
    """All values of a config, also of one that is guarded, frozen, or has slots."""
    values = dict(getattr(cfg, "__dict__", {}))
    for field in dataclasses.fields(cfg):
        values[field.name] = object.__getattribute__(cfg, field.name)
    return values


def changes_of(cfg: Any, guarded: Any) -> dict[str, Any]:
    """The fields that prepare_data has changed; raises ValueError for those of the model."""
    before, after = values_of(cfg), values_of(guarded)
    names = [each.name for each in dataclasses.fields(cfg)]
    changed = {name: after[name] for name in names if after[name] != before[name]}
    if wrong := sorted({*changed} & prepared_key.hidden_fields(cfg)):
        raise ValueError(
            f"prepare_data sets task.{wrong[0]}, which is marked as the model's alone; take MODEL "
            "out of its metadata in TaskConfig"
        )
    return changed


# ---- Preparing -----------------------------------------------------------------------------------


def prepare(task: Any, cfg: Any, kept: Path | None = None) -> PreparedData:
    """The data that task.prepare_data made of the task's fields; it is called if there is none.

    Sets the fields of cfg that it has changed. `kept`: a folder with the identity of the run that
    resumes, such as its tokenizer, which is not made anew where data has grown. Safe for processes
    that start together. Raises ValueError for a disk that is full or cannot be written.
    """
    cache = prepared_key.cache_of(cfg)
    files = prepared_key.files_of(cfg, task)
    stamps = prepared_key.stamps_of(files)
    key = prepared_key.key_of(cfg, task)
    wanted = identity_of(kept) if kept else ""
    found = find(cache, key, files, stamps)
    if wanted and not (found and read_index(found)["identity"] == wanted):
        print_on_main(f"Preparing data: the run keeps its {', '.join(names_in(kept))}")
        key = prepared_key.key_of(cfg, task, wanted)
        found = find(cache, key, files, stamps)
    if not found:
        with lock(cache, key):
            found = find(cache, key, files, stamps)
            if not found:
                found = build(task, cfg, cache, key, stamps, kept if wanted else None)
    kinds = fields_of(type(cfg))
    for name, value in read_index(found)["changed"].items():
        object.__setattr__(cfg, name, TypeAdapter(kinds[name][0]).validate_python(value))
    return load(found)


def find(cache: Path, key: str, files: dict[str, str], stamps: dict) -> Path | None:
    """The complete folder for a key and files, which other stamps may have; None: there is none.

    Where the sizes of all files are equal their contents decide: the disk may be another.
    """
    folder = folder_for(cache, key, stamps)
    if is_intact(folder):
        return folder
    sizes = {name: stamp[0] for name, stamp in stamps.items()}
    digests: dict[str, str] = {}
    for other in sorted(cache.glob(f"{key}-{'?' * 16}")):
        known = read_index(other).get("files", {})
        if (
            other == folder
            or not files
            or {name: size for name, (size, _) in known.items()} != sizes
        ):
            continue
        digests = digests or prepared_key.hash_files(files)
        if {name: own for name, (_, own) in known.items()} == digests and is_intact(other):
            with contextlib.suppress(OSError):  # on a read-only disk files are read each time
                folder.symlink_to(other.resolve().name)
            return other
    return None


def folder_for(cache: Path, key: str, stamps: dict) -> Path:
    return cache / f"{key}-{prepared_key.short_hash(stamps)}"


def build(task: Any, cfg: Any, cache: Path, key: str, stamps: dict, kept: Path | None) -> Path:
    """Calls task.prepare_data, and saves what it returns in a folder, whose path it returns."""
    folder = folder_for(cache, key, stamps)
    host = platform.node()[:60]  # another may prepare the same, where disks have no locks
    with writes_to(cache):
        for left in cache.glob(f".{key}-*.trash"):
            shutil.rmtree(left, ignore_errors=True)
        remove_partial(cache, key, host)
        if read_index(folder):
            print(f"{one_line(folder, 100)} is damaged: preparing again", flush=True)
        remove(folder)
        partial = Path(tempfile.mkdtemp(f".{host}.partial", f"{folder.name}-", cache))
        partial.chmod(0o777 & ~UMASK)  # it was for the owner alone
    try:
        with writes_to(cache):
            if kept:
                shutil.copytree(kept, partial, dirs_exist_ok=True)
            (partial / WORK).mkdir()
        guarded = rebuild(type(cfg), copy.deepcopy(values_of(cfg)))
        with working_in(partial / WORK), writes_to(cache, "task.prepare_data"):
            set_seed(0)  # an unseeded split is the same in every run
            given = {"cfg": guarded, "folder": partial}
            names = inspect.signature(task.prepare_data).parameters
            rows = check_rows(task.prepare_data(**{name: given[name] for name in names}))
            if rows:
                datasets.DatasetDict(rows).save_to_disk(partial / ROWS)
        with writes_to(cache):
            remove(partial / WORK)
            for name in rows:
                columns.store_digests(datasets.load_from_disk(partial / ROWS / name))
            files = prepared_key.files_of(cfg, task)
            digests = prepared_key.hash_files(files)
            if prepared_key.stamps_of(files) != stamps:
                raise ValueError("task.data: files changed during the preparation: start again")
            index = {
                "files": {name: [stamps[name][0], digests[name]] for name in files},
                "changed": changes_of(cfg, guarded),
                "identity": identity_of(partial),
                "splits": [*rows],
            }
            replace_text(partial / INDEX, json.dumps(index, default=to_jsonable_python))
            for path in [*partial.rglob("*"), partial]:
                if path.is_file() or path.is_dir():
                    fsync(path)
            try:
                partial.rename(folder)
            except OSError:  # without locks another process may have been first
                if not is_intact(folder):
                    raise
            fsync(cache)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def remove_partial(cache: Path, key: str, host: str) -> None:
    """Removes what processes of this host that were killed have left: of this key, and of others
    that nobody prepares now."""
    for left in cache.glob(f"*.{host}.partial"):
        other = left.name.partition("-")[0]
        held = filelock.FileLock(cache / f"{other}.lock", timeout=0)
        own = contextlib.nullcontext() if other == key else held
        with contextlib.suppress(filelock.Timeout, OSError, NotImplementedError), own:
            shutil.rmtree(left, ignore_errors=True)


def check_rows(rows: Any) -> dict[str, datasets.Dataset]:
    """What prepare_data returned, empty for None; raises ValueError for anything else."""
    if rows is None:
        return {}
    right = isinstance(rows, dict)
    if not right or not all(isinstance(each, datasets.Dataset) for each in rows.values()):
        raise ValueError(
            f"task.prepare_data returns {type(rows).__name__}; give a datasets.DatasetDict with "
            "train and validation, or None"
        )
    for name, split in rows.items():
        if not len(split):
            raise ValueError(
                f"task.prepare_data returns no row in {name}; add one, or leave it out"
            )
    return rows


@contextlib.contextmanager
def working_in(work: Path) -> Iterator[None]:
    """Caches of `datasets` lie in this folder: its caches, which know functions by their names,
    take an edited one for the old one. Those of rows that load_from_disk has read would lie beside
    these rows. (TMPDIR stays: sockets of its processes are there, whose
    paths have at most 107 bytes.)"""
    names = {"TOKENIZERS_PARALLELISM": "false"}
    caches: dict[str, Any] = {
        "HF_DATASETS_CACHE": work,
        "DOWNLOADED_DATASETS_PATH": work / "downloads",
        "EXTRACTED_DATASETS_PATH": work / "extracted",
    }
    beside = mock.patch.object(
        datasets.Dataset,
        "_get_cache_file_path",
        lambda _, fingerprint: str(work / f"cache-{fingerprint}.arrow"),
    )
    with mock.patch.dict(os.environ, names), mock.patch.multiple(datasets.config, **caches), beside:
        datasets.disable_progress_bars()
        yield


@contextlib.contextmanager
def lock(cache: Path, key: str) -> Iterator[None]:
    """Holds the lock of a key, where the disk has locks. Waiting for another is said once."""
    with writes_to(cache):
        cache.mkdir(parents=True, exist_ok=True)
        held = filelock.FileLock(cache / f"{key}.lock")
        try:
            held.acquire(timeout=LOCK_SECONDS)
        except filelock.Timeout:
            if os.environ.get("LOCAL_RANK", "0") == "0":
                print("waiting for another process, which prepares the same data", flush=True)
            held.acquire(poll_interval=0.5)
        except (OSError, NotImplementedError) as error:
            if isinstance(error, OSError) and error.errno not in NO_LOCKS:
                raise
    try:
        yield
    finally:
        held.release()


@contextlib.contextmanager
def writes_to(cache: Path, own: str = "") -> Iterator[None]:
    """Turns errors of a disk that is full, or cannot be written, into a ValueError of one line.

    `own`: the function of the task that runs, whose other errors of files are its own.
    """
    try:
        yield
    except Exception as error:
        causes: list[BaseException] = [error]  # `datasets` hides a full disk below its own
        while cause := causes[-1].__cause__ or causes[-1].__context__:
            causes.append(cause)
        numbers = [getattr(each, "errno", None) for each in causes]
        full = next((number for number in numbers if number in DISK_FULL), None)
        if not full and any("(os error 28)" in str(each) for each in causes):  # of `tokenizers`
            full = errno.ENOSPC
        number = getattr(error, "errno", None) if isinstance(error, OSError) else None
        known = isinstance(error, OSError) and comes_again(error)
        if full or known and not own:
            reason = os.strerror(full or number or 0)
            raise ValueError(f"task.cache_dir: cannot write {cache}: {reason}") from None
        if own and isinstance(error, OSError) and (known or number is None):
            raise ValueError(f"{own}: {one_line(error)}") from error
        raise


# ---- Prepared folders ----------------------------------------------------------------------------


def read_index(folder: Path) -> dict[str, Any]:
    return read_json_object(folder / INDEX)


def load(folder: Path) -> PreparedData:
    """The data of a complete folder."""
    folder = folder.resolve()
    splits = read_index(folder)["splits"]
    data = PreparedData({n: datasets.load_from_disk(folder / ROWS / n) for n in splits})
    data.folder = folder
    return data


def is_intact(folder: Path, verify: bool = False) -> bool:
    """Whether a folder is complete, and holds what was written; with `verify` all is read.

    Otherwise rows are read again where the stamps of their files differ.
    """
    index = read_index(folder)
    if not index:
        return False
    try:
        splits = [datasets.load_from_disk(folder / ROWS / name) for name in index["splits"]]
        intact = all(columns.is_intact(each, verify) for each in splits)
        return intact and identity_of(folder) == index["identity"]
    except (OSError, ValueError, LookupError, TypeError, pa.ArrowException):
        return False


def names_in(folder: Path) -> list[str]:
    """The files that prepare_data wrote in a folder, besides rows; no hidden ones, which file
    managers write."""
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    own = (INDEX, f"{ROWS}/", f"{WORK}/")
    return sorted(name for name in names if not name.startswith(own) and "/." not in f"/{name}")


def identity_of(folder: Path) -> str:
    """A digest of the names and contents of these files; empty: there are none."""
    digests = prepared_key.hash_files({name: str(folder / name) for name in names_in(folder)})
    lines = "".join(f"{content} {name}\n" for name, content in digests.items())
    return hashlib.sha256(lines.encode()).hexdigest()[:16] if lines else ""


def copy_identity(folder: Path, to: Path) -> None:
    """Copies these files into an empty folder."""
    for name in names_in(folder):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, to / name)
