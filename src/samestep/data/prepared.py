"""Prepared data: what task.prepare_data returned, saved once in a folder that all processes load.

The key of the folder counts all that shapes the rows: fields of the task, the files that they name,
the code of prepare_data and views and what these reach by name in the project, and the code of the
library that reads data. The folder gets its name when it is complete.
"""

import contextlib
import copy
import dataclasses
import functools
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import datasets
import filelock
from pydantic_core import to_jsonable_python

from samestep.base.console import one_line
from samestep.base.fields import local_path
from samestep.base.files import (
    PERMANENT_ERRORS,
    UMASK,
    fsync,
    read_json_object,
    remove,
    replace_text,
)
from samestep.data import columns, sources
from samestep.data.cache import hash_file
from samestep.models import pretrained
from samestep.step.batches import seed_everything

INDEX, ROWS, WORK = "prepared.json", "rows", "work"  # names in a prepared folder
LOCK_SECONDS = 5  # of waiting for another process until it is said
LIBRARY = Path(__file__).parents[1]
SHAPING = ("data/*.py", "text/*.py", "models/pretrained.py")  # the library's code that shapes rows
ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class PreparedData(datasets.DatasetDict):
    """The splits that prepare_data returned, with the folder in which it has written files."""

    folder: Path


# ---- The config that prepare_data gets -----------------------------------------------------------


def hidden_fields(cfg: Any) -> set[str]:
    """Names of the fields that only the model reads: metadata=MODEL."""
    return {f.name for f in dataclasses.fields(cfg) if not f.metadata.get("shapes_data", True)}


@functools.cache
def guarded_class(kind: type) -> type:
    """A kind of config in which fields of the model cannot be read: they are not in the key."""
    hidden = hidden_fields(kind)

    def read(self: Any, name: str) -> Any:
        if name in hidden:
            raise ValueError(
                f"prepare_data reads task.{name}, which is marked as the model's alone; take "
                "MODEL out of its metadata in TaskConfig"
            )
        return object.__getattribute__(self, name)

    def pickled(self: Any) -> tuple:
        return rebuild_guarded, (kind, self.__dict__)

    return type(kind.__name__, (kind,), {"__getattribute__": read, "__reduce__": pickled})


def rebuild_guarded(kind: type, values: dict) -> Any:
    cfg = object.__new__(guarded_class(kind))
    cfg.__dict__.update(values)
    return cfg


# ---- Key -----------------------------------------------------------------------------------------


def key_of(cfg: Any, functions: Iterable[Callable], identity: str = "") -> str:
    """16 hex digits for all that shapes the rows but the files that they come from.

    `identity`: of the files of a run that resumes, which lie in the folder beforehand.
    """
    fields = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg)}
    for name in hidden_fields(cfg) | {"cache_dir"}:
        fields.pop(name, None)
    if isinstance(fields.get("data"), str):  # weights change the order alone
        fields["data"] = [each.data for each in sources.split_data(fields["data"])]
    if isinstance(cfg, pretrained.ModelConfig):
        fields["revision"] = pretrained.commit_of(cfg)
    parts = [to_jsonable_python(fields), code_of(functions), library_code(), identity]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def library_code() -> str:
    """A digest of the library's code that shapes rows."""
    files = [path for each in SHAPING for path in sorted(LIBRARY.glob(each))]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()


def code_of(functions: Iterable[Callable]) -> list[str]:
    """The compiled code of functions, and of what they reach by name in modules of the project.

    Constants count by their values. Comments and annotations do not count.
    """
    todo: list[Any] = [*functions]
    seen: set[int] = set()
    texts = []
    while todo:
        value = todo.pop()
        value = value.func if isinstance(value, functools.partial) else value
        value = getattr(value, "__wrapped__", value)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, type):
            own = {name: each for name, each in vars(value).items() if not name.startswith("__")}
            if dataclasses.is_dataclass(value):  # values of fields are in the key, or the model's
                own = {name: each for name, each in own.items() if name not in fields_of(value)}
            todo += [*own.values(), *value.__bases__]
        elif isinstance(value, property | staticmethod | classmethod):
            todo.append(getattr(value, "fget", None) or getattr(value, "__func__", None))
        elif isinstance(value, types.FunctionType):
            text, names = read_code(value.__code__)
            texts.append(text)
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            inner = dict(zip(value.__code__.co_freevars, cells, strict=True))
            spaces = [value.__globals__, inner]
            modules = [each for each in value.__globals__.values() if is_project_module(each)]
            modules += [sys.modules[name] for name in names if is_of_project(name)]
            for space in [*spaces, *map(vars, modules)]:
                todo += [space[name] for name in names if name in space]
            todo += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        elif not callable(value) and not isinstance(value, types.ModuleType):
            texts.append(plain_text(value))
        todo = [each for each in todo if not is_foreign(each)]
    return sorted(texts)


def is_foreign(value: Any) -> bool:
    """Whether this is a function or class of another package."""
    return isinstance(value, types.FunctionType | type) and not is_of_project(value.__module__)


def fields_of(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def read_code(code: types.CodeType) -> tuple[str, list[str]]:
    """A text for compiled code with the functions inside, and all names that it uses."""
    constants, names = [], [*code.co_names, *code.co_freevars]
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            text, more = read_code(value)
            constants.append(text)
            names += more
        else:
            constants.append(plain_text(value))
    return repr((code.co_name, code.co_code.hex(), constants, names)), names


def plain_text(value: Any) -> str:
    """A text for a constant, the same in every process."""
    if isinstance(value, set | frozenset):
        return repr(sorted(map(plain_text, value)))
    if isinstance(value, dict):
        return repr([(plain_text(key), plain_text(each)) for key, each in value.items()])
    return ADDRESS.sub("", repr(value))


def is_project_module(value: Any) -> bool:
    return isinstance(value, types.ModuleType) and is_of_project(value.__name__)


def is_of_project(module: str) -> bool:
    """Whether a module that is loaded lies in the folder of the project's task.py."""
    file = getattr(sys.modules.get(module), "__file__", None)
    root = getattr(sys.modules.get("task"), "__file__", None)
    if not file or not root or "site-packages" in Path(file).parts:
        return False
    return Path(file).resolve().is_relative_to(Path(root).resolve().parent)


# ---- Files that the rows come from ---------------------------------------------------------------


def files_of(cfg: Any, more: Iterable[Path] = ()) -> dict[str, Path]:
    """The files that fields of a task name, as a path, a folder, or sources with weights.

    Of a folder all files below, but hidden ones. Of a model's folder the files of its tokenizer.
    Each by a name that does not depend on where the folder lies.
    """
    given = {f"files/{number}": Path(path) for number, path in enumerate(more)}
    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        if field.name in hidden_fields(cfg) | {"cache_dir", "model_name_or_path"}:
            continue
        names = [value] if isinstance(value, str | Path) and str(value) else []
        if field.name == "data" and isinstance(value, str):
            names = [each.data for each in sources.split_data(value)]
        for name in names:
            if "://" not in str(name) and os.path.exists(os.path.expanduser(name)):
                given[f"{field.name}/{name}"] = local_path(str(name), field.name)
    found: dict[str, Path] = {}
    for name, path in given.items():
        found |= {f"{name}/{below}": file for below, file in files_below(path)}
    if isinstance(cfg, pretrained.ModelConfig):
        found |= {f"model/{path.name}": path for path in pretrained.used_files(cfg)}
    return found


def files_below(root: Path) -> Iterator[tuple[str, Path]]:
    """A file itself, or all files below a folder, each with its path there; no hidden ones."""
    if not root.is_dir():
        yield "", root
        return
    seen = set()  # links may lead back
    for folder, names, files in os.walk(root, followlinks=True):
        status = os.stat(folder)
        new = (status.st_dev, status.st_ino) not in seen
        seen.add((status.st_dev, status.st_ino))
        names[:] = sorted(name for name in names if new and not name.startswith("."))
        for name in sorted(files) if new else ():
            if not name.startswith("."):
                path = Path(folder, name)
                yield path.relative_to(root).as_posix(), path


def stamps_of(files: dict[str, Path]) -> dict[str, list[int]]:
    """Size, time and inode of each file."""
    found = {}
    for name, path in files.items():
        status = path.stat()
        found[name] = [status.st_size, status.st_mtime_ns, status.st_ino]
    return found


def hash_files(files: dict[str, Path]) -> dict[str, str]:
    """The SHA-256 of each file. Threads: reading and hashing release the GIL."""
    with ThreadPool(min(os.cpu_count() or 1, 16)) as pool:
        return dict(zip(files, pool.map(hash_file, files.values()), strict=True))


# ---- Preparing -----------------------------------------------------------------------------------


def prepare(task: Any, cfg: Any, kept: Path | None = None) -> PreparedData:
    """The data that task.prepare_data made of the task's fields; it is called if there is none.

    Sets the fields of cfg that it has changed. `kept`: a folder with the identity of the run that
    resumes, such as its tokenizer, which is not made anew where data has grown. Safe for processes
    that start together. Raises ValueError for a disk that is full or cannot be written.
    """
    cache = local_path(getattr(cfg, "cache_dir", ".cache/data"), "cache_dir")
    functions = [task.prepare_data, *filter(None, [getattr(task, "views", None)]), type(cfg)]
    more = [*map(Path, task.files(cfg))] if hasattr(task, "files") else []
    files = files_of(cfg, more)
    stamps, key = stamps_of(files), key_of(cfg, functions)
    wanted = identity_of(kept) if kept else ""
    found = find(cache, key, files, stamps)
    if wanted and not (found and read_index(found)["identity"] == wanted):
        print(f"Preparing data: the run keeps its {', '.join(names_in(kept))}", flush=True)
        key = key_of(cfg, functions, wanted)
        found = find(cache, key, files, stamps)
    if not found:
        with writes_to(cache), lock(cache, key):
            found = find(cache, key, files, stamps)
            if not found:
                folder = cache / f"{key}-{short_hash(stamps)}"
                found = build(task, cfg, folder, key, files, stamps, kept if wanted else None)
    for name, value in read_index(found)["changed"].items():
        setattr(cfg, name, value)
    return load(found)


def find(cache: Path, key: str, files: dict[str, Path], stamps: dict) -> Path | None:
    """The complete folder for a key and files, which other stamps may have; None: there is none.

    Where the sizes of all files are equal their contents decide: the disk may be another.
    """
    folder = cache / f"{key}-{short_hash(stamps)}"
    if is_intact(folder):
        return folder
    sizes = {name: stamp[0] for name, stamp in stamps.items()}
    digests: dict[str, str] = {}
    for other in sorted(cache.glob(f"{key}-{'?' * 16}")):
        known = read_index(other).get("files", {})
        if not files or {name: size for name, (size, _) in known.items()} != sizes:
            continue
        digests = digests or hash_files(files)
        if {name: own for name, (_, own) in known.items()} == digests and is_intact(other):
            with contextlib.suppress(OSError):  # on a read-only disk files are read each time
                folder.symlink_to(other.resolve().name)
            return other
    return None


def build(
    task: Any, cfg: Any, folder: Path, key: str, files: dict, stamps: dict, kept: Path | None
) -> Path:
    """Calls task.prepare_data, and saves what it returns in the folder."""
    for left in [folder, *folder.parent.glob(f"{key}-*.partial")]:  # of killed processes
        remove(left)
    partial = Path(tempfile.mkdtemp(".partial", f"{folder.name}-", folder.parent))
    partial.chmod(0o777 & ~UMASK)  # it was for the owner alone
    try:
        if kept:
            shutil.copytree(kept, partial, dirs_exist_ok=True)
        guarded = rebuild_guarded(type(cfg), copy.deepcopy(cfg.__dict__))
        with working_in(partial / WORK):
            seed_everything(0)  # an unseeded split is the same in every run
            rows = task.prepare_data(cfg=guarded, folder=partial)
            rows = {} if rows is None else rows
            if not isinstance(rows, dict) or not all(map(is_dataset, rows.values())):
                kind = type(rows).__name__
                raise ValueError(
                    f"task.prepare_data returns {kind}; give a datasets.DatasetDict with train and "
                    "validation, or None"
                )
            if rows:
                datasets.DatasetDict(rows).save_to_disk(partial / ROWS)
        remove(partial / WORK)
        for name in rows:
            columns.store_digests(datasets.load_from_disk(partial / ROWS / name))
        if stamps_of(files) != stamps:
            raise ValueError("task.data: files changed during the preparation: start again")
        digests = hash_files(files)
        before = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg)}
        changed = {n: guarded.__dict__[n] for n in before if guarded.__dict__[n] != before[n]}
        index = {"files": {n: [stamps[n][0], digests[n]] for n in files}, "changed": changed}
        index |= {"identity": identity_of(partial), "splits": [*rows]}
        replace_text(partial / INDEX, json.dumps(to_jsonable_python(index)))
        for path in [*partial.rglob("*"), partial]:
            fsync(path)
        try:
            partial.rename(folder)
        except OSError:  # without locks another process may have been first
            if not is_intact(folder):
                raise
        fsync(folder.parent)
    finally:
        if partial.exists():
            remove(partial)
    return folder


def is_dataset(value: Any) -> bool:
    return isinstance(value, datasets.Dataset)


@contextmanager
def working_in(work: Path) -> Iterator[None]:
    """Caches of `datasets` and temporary files lie in this folder: its caches, which know functions
    by their names, take an edited one for the old one."""
    work.mkdir()
    names = {"TMPDIR": str(work), "TOKENIZERS_PARALLELISM": "false"}
    before = {name: os.environ.get(name) for name in names}
    cache, tempdir = datasets.config.HF_DATASETS_CACHE, tempfile.tempdir
    os.environ.update(names)
    tempfile.tempdir, datasets.config.HF_DATASETS_CACHE = str(work), work
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        tempfile.tempdir, datasets.config.HF_DATASETS_CACHE = tempdir, cache
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def lock(cache: Path, key: str) -> Iterator[None]:
    """Holds the lock of a key. Waiting for another process is said once."""
    cache.mkdir(parents=True, exist_ok=True)
    held = filelock.FileLock(cache / f"{key}.lock")
    try:
        held.acquire(timeout=LOCK_SECONDS)
    except filelock.Timeout:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print("waiting for another process, which prepares the same data", flush=True)
        held.acquire(poll_interval=0.5)
    try:
        yield
    finally:
        held.release()


@contextmanager
def writes_to(cache: Path) -> Iterator[None]:
    """Turns errors of a disk that is full, or cannot be written, into a ValueError of one line."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.errno not in PERMANENT_ERRORS:
            raise
        reason = error.strerror or one_line(error)
        what = f"cannot write {one_line(cache, 100)}: {reason}"
        raise ValueError(f"task.cache_dir: {what}") from None


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
        if intact and identity_of(folder) == index["identity"]:
            return True
    except (OSError, ValueError, KeyError):  # Arrow's errors are of these kinds
        pass
    print(f"{one_line(folder, 100)} is damaged: preparing again", flush=True)
    return False


def names_in(folder: Path) -> list[str]:
    """The files that prepare_data wrote in a folder, besides rows."""
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    own = (INDEX, f"{ROWS}/", f"{WORK}/")
    return sorted(name for name in names if not name.startswith(own))


def identity_of(folder: Path) -> str:
    """A digest of the names and contents of these files; empty: there are none."""
    total = hashlib.sha256()
    names = names_in(folder)
    for name in names:
        content = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        total.update(f"{content} {name}\n".encode())
    return total.hexdigest()[:16] if names else ""


def copy_identity(folder: Path, to: Path) -> None:
    """Copies these files into an empty folder."""
    for name in names_in(folder):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, to / name)


def short_hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
