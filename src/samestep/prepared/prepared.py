"""Prepared data: what task.prepare_data returned, saved once in a folder that all processes load.

The name of the folder is its key: a hash of the fields of the task, of the project's code, of the
library's that reads data, and of the files that fields name. It gets its name when it is complete.
"""

import contextlib
import copy
import dataclasses
import errno
import hashlib
import inspect
import io
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints
from unittest import mock

import datasets
import filelock
import huggingface_hub.constants
import pyarrow as pa
from accelerate.utils import set_seed
from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from samestep.base.console import one_line, print_on_main
from samestep.base.errors import some
from samestep.base.files import DISK_FULL, fsync, read_json_object, remove, replace_text
from samestep.data import views
from samestep.prepared import prepared_key

INDEX, ROWS, _WORK = "prepared.json", "rows", "work"  # names in a prepared folder


class _PreparedData(datasets.DatasetDict):
    """The splits that prepare_data returned, with the folder in which it has written files."""

    folder: Path


# ---- Preparing -----------------------------------------------------------------------------------


def prepare(task: Any, cfg: Any, kept: Path | None = None, stored: str = "") -> _PreparedData:
    """The data that task.prepare_data made of the task's fields; it is called if there is none.

    Sets the fields of cfg that it has changed. `kept`: a folder with the identity of the run that
    resumes, such as its tokenizer, which is not made anew where data has grown. `stored`: the name
    of a folder that is taken if it is there. Safe for processes that start together. Raises
    ValueError for a disk that is full, cannot be written, or has no locks.
    """
    cache = prepared_key.cache_of(cfg)
    folder = cache / stored
    if not (stored and is_intact(folder)):
        files = prepared_key.files_of(cfg, task)
        stamps = prepared_key.stamps_of(files)
        digests = prepared_key.digests_of(cache, files, stamps)
        folder = cache / prepared_key.key_of(cfg, task, digests)
        wanted = identity_of(kept) if kept else ""
        if wanted and not (is_intact(folder) and _read_index(folder)["identity"] == wanted):
            print_on_main(f"Preparing data: the run keeps its {', '.join(names_in(kept))}")
            folder = cache / prepared_key.key_of(cfg, task, digests, wanted)
        if not is_intact(folder):
            with prepared_key.lock(cache, folder.name):
                if not is_intact(folder):
                    build(task, cfg, folder, stamps, kept if wanted else None)
    kinds = get_type_hints(type(cfg), include_extras=True)
    for name, value in _read_index(folder)["changed"].items():
        object.__setattr__(cfg, name, TypeAdapter(kinds[name]).validate_python(value))
    return load(folder)


def build(task: Any, cfg: Any, folder: Path, stamps: dict, kept: Path | None) -> None:
    """Calls task.prepare_data, and saves what it returns in the folder; under its lock."""
    cache, partial = folder.parent, folder.with_name(f"{folder.name}.partial")
    _remove_partial(cache, folder.name)
    if _read_index(folder):
        print(f"{one_line(folder, 100)} is damaged: preparing again", flush=True)
    remove(folder)
    code = prepared_key.code_of(task)
    newest = max(cache.glob(f"*/{INDEX}"), key=os.path.getmtime, default=folder / INDEX)
    before = read_json_object(newest).get("code", {})
    if changed := [name for name in code if before.get(name, code[name]) != code[name]]:
        print(f"Preparing data: {some(changed)} changed since the last time", flush=True)
    given = copy.deepcopy(cfg)
    try:
        (partial / _WORK).mkdir(parents=True)
        if kept:
            shutil.copytree(kept, partial, dirs_exist_ok=True)
        with _working_in(partial / _WORK), _only_named_files(task, cfg), _only_fields_of_data(cfg):
            set_seed(0)  # an unseeded split is the same in every run
            arguments = {"cfg": given, "folder": partial}
            names = inspect.signature(task.prepare_data).parameters
            rows = check_rows(task.prepare_data(**{name: arguments[name] for name in names}))
            if rows:
                datasets.DatasetDict(rows).save_to_disk(partial / ROWS)
        remove(partial / _WORK)
        for name in rows:
            views.store_digests(datasets.load_from_disk(partial / ROWS / name))
        after = prepared_key.stamps_of(prepared_key.files_of(cfg, task))
        # prepare_data may write a file that the code names in quotes.
        checked = [name for name in {*stamps, *after} if not name.startswith("task.py/")]
        if any(stamps.get(name) != after.get(name) for name in checked):
            raise ValueError("task.data: files changed during the preparation: start again")
        changed, identity = _changes_of(cfg, given), identity_of(partial)
        index = {"changed": changed, "identity": identity, "splits": [*rows], "code": code}
        replace_text(partial / INDEX, json.dumps(index, default=to_jsonable_python))
        for path in [*partial.rglob("*"), partial]:
            if path.is_file() or path.is_dir():
                fsync(path)
        partial.rename(folder)
        fsync(cache)
    except Exception as error:
        _reraise_full_disk(error, cache)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _reraise_full_disk(error: BaseException, cache: Path) -> None:
    """Raises an error again, as a ValueError of one line where a full disk is its cause."""
    cause: BaseException | None = error
    while cause:  # `datasets` hides a full disk below an error of its own, `tokenizers` in a text
        if getattr(cause, "errno", None) in DISK_FULL or "(os error 28)" in str(cause):
            reason = os.strerror(getattr(cause, "errno", errno.ENOSPC))
            raise ValueError(f"task.cache_dir: cannot write {cache}: {reason}") from None
        cause = cause.__cause__ or cause.__context__
    raise error


def _remove_partial(cache: Path, key: str) -> None:
    """Removes what a kill has left of this key, whose lock is held, and of others without one."""
    for left in cache.glob("*.partial"):
        other = left.name.removesuffix(".partial")
        held = filelock.FileLock(cache / f"{other}.lock", timeout=0)
        own = contextlib.nullcontext() if other == key else held
        with contextlib.suppress(filelock.Timeout, OSError), own:
            shutil.rmtree(left, ignore_errors=True)


def _changes_of(cfg: Any, given: Any) -> dict[str, Any]:
    """The fields that prepare_data has changed; raises ValueError for those of the model."""
    names = [each.name for each in dataclasses.fields(cfg)]
    changed = {n: getattr(given, n) for n in names if getattr(given, n) != getattr(cfg, n)}
    if wrong := sorted({*changed} & prepared_key.hidden_fields(cfg)):
        raise ValueError(
            f"prepare_data sets task.{wrong[0]}, which is marked as the model's alone; take MODEL "
            "out of its metadata in TaskConfig"
        )
    return changed


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
    return rows


# ---- While prepare_data runs ---------------------------------------------------------------------


@contextlib.contextmanager
def _only_fields_of_data(cfg: Any) -> Iterator[None]:
    """Fields of the model cannot be read: they are not in the key."""
    hidden = prepared_key.hidden_fields(cfg)

    def read(self: Any, name: str) -> Any:
        if name in hidden:
            raise ValueError(
                f"prepare_data reads task.{name}, which is marked as the model's alone; take "
                "MODEL out of its metadata in TaskConfig"
            )
        return object.__getattribute__(self, name)

    with mock.patch.object(type(cfg), "__getattribute__", read):
        yield


@contextlib.contextmanager
def _only_named_files(task: Any, cfg: Any) -> Iterator[None]:
    """A file of the project that Python opens to read must be named by a field or files(cfg), or be
    written by prepare_data itself; .py files are in the key."""
    root = Path(task.__file__).absolute().parent
    places = [str(prepared_key.cache_of(cfg)), huggingface_hub.constants.HF_HOME]
    places += [huggingface_hub.constants.HF_HUB_CACHE, *prepared_key.files_of(cfg, task).values()]
    places += prepared_key.texts_in(to_jsonable_python(prepared_key.read_fields(cfg)))
    known = {Path(os.path.realpath(os.path.expanduser(each))) for each in places}
    plain_open = io.open

    def open_named(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, str | os.PathLike) and prepared_key.is_own(Path(file).absolute(), root):
            path = Path(os.path.realpath(file))
            if "r" not in mode:
                known.add(path)
            elif path.is_file() and path.suffix != ".py" and not {path, *path.parents} & known:
                raise ValueError(
                    f"task.prepare_data reads {one_line(file, 100)}, which no field names: data "
                    "would not be prepared anew after an edit of it; name it in files(cfg)"
                )
        return plain_open(file, mode, *args, **kwargs)

    with mock.patch("builtins.open", open_named), mock.patch("io.open", open_named):
        yield


@contextlib.contextmanager
def _working_in(work: Path) -> Iterator[None]:
    """Caches of `datasets` lie in this folder: its caches, which know functions by their names,
    take an edited one for the old one. Those of rows that load_from_disk has read would lie beside
    these rows. (TMPDIR stays: paths of sockets, which are there, have at most 107 bytes.)"""
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


# ---- Prepared folders ----------------------------------------------------------------------------


def _read_index(folder: Path) -> dict[str, Any]:
    return read_json_object(folder / INDEX)


def load(folder: Path) -> _PreparedData:
    """The data of a complete folder."""
    folder = folder.resolve()
    splits = _read_index(folder)["splits"]
    data = _PreparedData({n: datasets.load_from_disk(folder / ROWS / n) for n in splits})
    data.folder = folder
    return data


def is_intact(folder: Path, verify: bool = False) -> bool:
    """Whether a folder is complete, and holds what was written; with `verify` all is read.

    Otherwise rows are read again where the stamps of their files differ.
    """
    index = _read_index(folder)
    if not index:
        return False
    try:
        splits = [datasets.load_from_disk(folder / ROWS / name) for name in index["splits"]]
        intact = all(views.is_intact(each, verify) for each in splits)
        return intact and identity_of(folder) == index["identity"]
    except (OSError, ValueError, LookupError, TypeError, pa.ArrowException):
        return False


def names_in(folder: Path) -> list[str]:
    """The files that prepare_data wrote, besides rows; no hidden ones, as file managers write."""
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    own = (INDEX, f"{ROWS}/", f"{_WORK}/")
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
