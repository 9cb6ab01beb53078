"""Prepared data on disk: a folder whose name depends on all that shapes it, written once.

Two digests matter. The key (`cache_folder`) names the folder; it depends on the input: settings,
files, code. The content digest (`hash_columns`) depends on the output: the rows themselves.
"""

import contextlib
import dataclasses
import errno
import fcntl
import functools
import hashlib
import json
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from samestep.base.console import one_line
from samestep.base.fields import local_path
from samestep.base.files import PERMANENT_ERRORS, fsync, read_json_object, remove, replace_text
from samestep.data import hub, sources
from samestep.data.own_code import library_code, project_code
from samestep.data.sources import DataConfig
from samestep.models import pretrained

MANY_FILES = 1000  # in a tree: more of them count by their folders
LOCK_SECONDS = 5  # of waiting for a lock until it is said
# Errors of a file; others are the disk's, and may pass.
OF_A_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM)
OF_A_FILE += (errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP)
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)  # on this disk
MEMO = "digests.json"  # the stamps and digests of files that were read, by their paths
INDEX = "index"  # of a prepared folder: the SHA-256 of its second line, which is JSON


# ---- Key -----------------------------------------------------------------------------------------


def cache_folder(cfg: DataConfig, settings: Any, used: Any, build: Callable | None = None) -> Path:
    """The folder for prepared data; its name is a hash of all that shapes the data.

    `settings`: values of the task's own fields, and `used`: the files (`hash_input_files`), both as
    JSON. `build`: the function that prepares the data. All that it uses of the project counts, and
    the library's own code (`own_code.py`).
    """
    fields = {each.name: getattr(cfg, each.name) for each in dataclasses.fields(DataConfig)}
    del fields["cache_dir"]
    fields["data"] = [each.data for each in sources.split_data(cfg.data)]  # without weights
    code = [*(project_code(build) if build else []), library_code()]
    key = hashlib.sha256(json.dumps([fields, settings, used, code]).encode()).hexdigest()[:16]
    return local_path(cfg.cache_dir, "cache_dir") / key


def hash_input_files(
    cfg: DataConfig,
    endings: Iterable[str] | Callable[[str], Iterable[str]],
    *more: Path,
    shipped: list[Path] | None = None,
) -> list[list]:
    """Paths and digests of the files that the data comes from, for `cache_folder`.

    Data on the Hub counts by its commit, which is checked here. Skipped files are counted, so that
    a new one is reported. `endings`: perhaps a function of the path. `more`: files beside the data,
    such as a tokenizer. `shipped`: the files, if `data` names data that the task brings along.

    More than 1,000 files count by their folders (`hash_path`): a start then lists folders, and
    asks about no file. It cannot see a file that was overwritten in place (`cp` over it, `>>`,
    `rsync --inplace`), since its folder keeps its times. It sees files that were added, removed,
    renamed or replaced, and reads a folder again after `touch FOLDER`.
    """
    check_cache_outside_data(cfg)
    on_hub = shipped is None and hub.is_hub_name(cfg.data)
    if on_hub:
        hub.check_commit(cfg)
    found, skipped = [*more, *(shipped or [])], []
    for name in ("data", "validation_data"):
        path = getattr(cfg, name)
        if not path or name == "data" and (on_hub or shipped is not None):
            continue
        listed = sources.walk(path, endings(path) if callable(endings) else endings, name)
        if sum(len(names) for _, names, _ in listed) > MANY_FILES:
            found += [Path(folder) for folder, names, _ in listed if names]
        else:
            found += sorted(Path(folder, file) for folder, names, _ in listed for file in names)
        skipped.append(sorted(sum((others for *_, others in listed), Counter()).items()))
    digests = hash_files(found, cfg)
    if unread := next((path for path, digest in digests.items() if not digest), ""):
        raise ValueError(f"cannot read {one_line(unread, 200)}: fix or remove it")
    return [*map(list, digests.items()), *skipped]


def check_cache_outside_data(cfg: DataConfig) -> None:
    """Raises ValueError if prepared data would count as data, which would change its own key."""
    cache = local_path(cfg.cache_dir, "cache_dir").resolve()
    for name in ("data", "validation_data"):
        data = local_path(getattr(cfg, name) or os.devnull, name).resolve()
        below = cache.relative_to(data).parts if cache.is_relative_to(data) else (".",)
        if not any(part.startswith(".") for part in below):
            shown = one_line(cfg.cache_dir, 60)
            raise ValueError(f"task.cache_dir: {shown} lies in task.{name}: give another")


# ---- Content -------------------------------------------------------------------------------------


def hash_columns(parts: dict[str, dict[str, Any]]) -> str:
    """64 hex digits for the columns of each part: names, types, shapes and values.

    A column is an array, or a list of arrays of one type. The digest is the same on every machine
    and with every version of the libraries; the bytes of Arrow files are not.
    """
    total = hashlib.sha256()
    for part, columns in parts.items():
        for name, values in sorted(columns.items()):
            arrays = [values] if isinstance(values, np.ndarray) else values
            shapes = [array.shape for array in arrays]
            dtype = arrays[0].dtype.newbyteorder("<") if arrays else np.dtype(bool)
            total.update(repr((part, name, dtype.str, shapes)).encode())
            for array in arrays:
                total.update(np.ascontiguousarray(array, dtype))  # type: ignore[arg-type]
    return total.hexdigest()


def short_digest(*files: Path) -> str:
    """16 hex digits for the content of files."""
    digests = (hashlib.sha256(file.read_bytes()).digest() for file in files)
    return hashlib.sha256(b"".join(digests)).hexdigest()[:16]


# ---- Digests of files ----------------------------------------------------------------------------


def hash_files(paths: Iterable[Path | str], cfg: DataConfig) -> dict[str, str]:
    """The digest of each file or folder (`hash_path`) by its path; empty: it cannot be read.

    A memo in the cache folder spares reading what has the same stamp. Of processes that start
    together, the first reads and the others wait for its memo; if the memo cannot be written, each
    reads.
    """
    cache, names = local_path(cfg.cache_dir, "cache_dir"), list(dict.fromkeys(map(str, paths)))
    digests = recall(cache, names)
    if len(digests) < len(names):
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # a read-only disk
                stack.enter_context(file_lock(cache / "digests.lock"))
            digests = recall(cache, names)
            new = [name for name in names if name not in digests]
            files = [name for name in new if not os.path.isdir(name)]
            hashed = dict(zip(files, hash_all(files), strict=True))
            # Each folder has threads of its own.
            hashed |= {name: hash_path(name) for name in new if name not in hashed}
            digests |= {name: digest for name, (digest, _) in hashed.items()}
            remember(cache, {n: [*stamp, digest] for n, (digest, stamp) in hashed.items() if stamp})
    return {name: digests[name] for name in names}


def recall(cache: Path, names: list[str]) -> dict[str, str]:
    """The digests of files and folders that have the stamp that the memo knows."""
    memo, digests = read_json_object(cache / MEMO), {}
    for name in names:
        with contextlib.suppress(OSError, TypeError, ValueError):  # gone, or an odd memo
            *stamp, digest = memo.get(os.path.abspath(name), [""])
            if digest and read_stamp(name) == stamp:
                digests[name] = digest
    return digests


def remember(cache: Path, known: dict[str, list]) -> None:
    """Adds stamps and digests to the memo; a failure is ignored, as only time is lost."""
    if known:
        own = {os.path.abspath(name): saved for name, saved in known.items()}
        with contextlib.suppress(OSError):
            text = json.dumps(read_json_object(cache / MEMO) | own)
            replace_text(cache / MEMO, text, cache / f"{MEMO}.{os.getpid()}.partial")


def read_stamp(path: str) -> list[int]:
    """Size (of a folder: its entries), times and inode. They change with the content: a ctime
    cannot be set back."""
    status = os.stat(path)
    size = len(os.listdir(path)) if stat.S_ISDIR(status.st_mode) else status.st_size
    return [size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def hash_path(path: str) -> tuple[str, list[int]]:
    """A digest of a file, or of the names and contents of a folder's own files; and its stamp.

    Hidden files and folders inside do not count. The digest of what cannot be read is empty. So is
    the stamp of what changed in the last two seconds: another change might leave the same times.
    """
    settled = time.time_ns() - 2_000_000_000
    try:
        stamp = read_stamp(path)  # first: a change while the content is read makes another
        if not os.path.isdir(path):
            return hash_file(path), stamp if stamp[2] < settled else []
        with os.scandir(path) as entries:
            names = sorted(e.name for e in entries if not (e.name.startswith(".") or e.is_dir()))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        if isinstance(error, OSError) and error.errno not in OF_A_FILE:
            raise
        return "", []
    total, old = hashlib.sha256(), stamp[2] < settled
    hashed = hash_all([os.path.join(path, name) for name in names])
    for name, (digest, own_stamp) in zip(names, hashed, strict=True):
        total.update(f"{digest} {name}\0".encode(errors="surrogateescape"))
        old = old and bool(own_stamp)
    return total.hexdigest(), stamp if old else []


def hash_all(paths: list[str]) -> Iterator[tuple[str, list[int]]]:
    """`hash_path` of each, in threads: reading and hashing release the GIL."""
    with ThreadPool(min(os.cpu_count() or 1, 32)) as pool:
        yield from pool.imap(hash_path, paths, 16)


def hash_file(path: Path | str) -> str:
    """A file's SHA-256. Raises OSError, also for a pipe or a device, which may block."""
    if not os.path.isfile(path):
        raise FileNotFoundError(errno.ENOENT, "no file", str(path))
    digest, block = hashlib.sha256(), bytearray(1 << 20)
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(block):
            digest.update(memoryview(block)[:size])
    return digest.hexdigest()


# ---- Lock ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def file_lock(
    path: Path, what: str = "another process, which prepares the same data"
) -> Iterator[None]:
    """Holds a lock between processes, also those of other machines that share the disk.

    The kernel frees it when its holder ends, however that ends. A main thread that waits for longer
    than some seconds says once for `what`. Raises OSError if the file cannot be written or locked.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    start, said = time.monotonic(), os.environ.get("LOCAL_RANK", "0") != "0"
    said = said or threading.current_thread() is not threading.main_thread()
    while True:
        with open(path, "a", encoding="utf-8") as file:
            # Without a name somebody has deleted the file, and others lock a new one.
            if try_lock(file) and os.fstat(file.fileno()).st_nlink:
                try:
                    yield
                finally:
                    fcntl.flock(file, fcntl.LOCK_UN)  # a child may have the file open
                return
        if not said and time.monotonic() - start > LOCK_SECONDS:
            said = True
            # A machine that was switched off keeps its lock on some network disks.
            gone = f"if its machine is gone, delete {one_line(path, 200)}"
            print(f"waiting for {what}; {gone}", flush=True)
        time.sleep(min(0.02 + (time.monotonic() - start) / 5, 1))


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock of `file_lock`."""
    with open(path, "a", encoding="utf-8") as file:
        return not try_lock(file)  # closing the file frees it


def try_lock(file: TextIO) -> bool:
    """Locks an open file, unless another process holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


@contextlib.contextmanager
def writes_to(folder: Path) -> Iterator[None]:
    """Turns errors of a disk that is full, or cannot be written, into a ValueError of one line."""
    try:
        yield
    except OSError as error:
        full = type(error) is OSError and error.errno is None  # as numpy says it
        if not full and error.errno not in (*PERMANENT_ERRORS, *NO_LOCKS):
            raise
        reason = error.strerror or one_line(error)
        what = f"cannot write {one_line(folder, 100)}: {reason}"
        raise ValueError(f"task.cache_dir: {what}") from None


# ---- Prepared folders ----------------------------------------------------------------------------


def prepare(
    cfg: Any,
    names: str,
    build: Callable[[Path], dict],
    endings: Iterable[str] | Callable[[str], Iterable[str]],
    *,
    more: Iterable[Any] = (),
    files: Iterable[Path] = (),
    shipped: Callable[[str], list[Path] | None] = lambda data: None,
    goes_on: bool = True,
) -> Path:
    """The folder of the prepared data, which `build(folder)` fills unless it is there: see
    `prepare_once`.

    Its name is a hash of all that shapes the data: the fields `names` of the task (`revision` by
    its commit, since a branch moves on), and those of DataConfig; the JSON values `more`; the code
    of the function in which `build` stands; the files of each source with these `endings` (perhaps
    a function of the path), those of the tokenizer of a model to start from, and `files`.
    `shipped(data)`: the files of data that the task brings along; None: `data` is a path, or a data
    set on the Hub.
    """
    files, more = [*files], [*more]

    def name_folder() -> Path:
        beside = [*pretrained.used_files(cfg), *files]
        used = [
            hash_input_files(own, endings, *beside, shipped=shipped(own.data))
            for _, own in sources.by_source(cfg, endings)
        ]
        settings = [getattr(cfg, name) for name in names.split() if name != "revision"]
        commit = pretrained.commit_of(cfg) if "revision" in names.split() else None
        return cache_folder(cfg, [*settings, commit, *more], used, build)

    return prepare_once(cfg, name_folder, build, goes_on)


def prepare_once(
    cfg: DataConfig,
    name_folder: Callable[[], Path],
    build: Callable[[Path], dict],
    goes_on: bool = False,
) -> Path:
    """The prepared folder that `name_folder` names; `build(folder)` fills it if it is not intact.

    `build` returns {"content": `hash_columns(...)`, "named": digests of input files that are not
    part of the key} for the index, which is written last. Safe for processes that start together:
    one builds, the others wait. Leftovers of killed processes do not count, and the next process
    removes them; or, if `build` goes on from them, it gets them.
    """
    folder = name_folder()
    if not find_fault(folder, cfg):
        return folder
    unfinished = folder.with_suffix(".unfinished")
    with writes_to(folder), file_lock(folder.with_suffix(".lock")):
        fault = find_fault(folder, cfg)
        if not fault:
            return folder
        if os.path.lexists(folder):
            print(f"{one_line(folder, 100)} {fault}: preparing again", flush=True)
            remove(folder)
        try:
            if not goes_on:
                remove(unfinished)
            unfinished.mkdir(exist_ok=True)
            remove(unfinished / INDEX)
            problem = None
            try:
                facts = build(unfinished)
            except ValueError as error:  # a file that changes while it is read has odd rows
                problem = error
            if name_folder() != folder:
                raise ValueError("task.data: files changed during the preparation: start again")
            if problem:
                raise problem
            commit_folder(folder, unfinished, facts)
        except BaseException as error:
            if not goes_on or type(error) is ValueError:
                remove(unfinished)  # frees a full disk
            raise
    return folder


def commit_folder(folder: Path, unfinished: Path, facts: dict) -> None:
    """Turns a filled folder into prepared data. Files, index and names reach the disk in turn.

    The index holds the size and SHA-256 of each file, and its own SHA-256. `facts["hashed"]` has
    those of files that are on the disk already.
    """
    files = dict(facts.pop("hashed", {}))
    for path in sorted(files_below(unfinished)):
        name = path.relative_to(unfinished).as_posix()
        if name not in files:
            fsync(path)
            files[name] = [path.stat().st_size, hash_file(path)]
    text = json.dumps({**facts, "files": files}).encode()
    own = hashlib.sha256(text).hexdigest().encode()
    (unfinished / INDEX).write_bytes(own + b"\n" + text + b"\n")
    for path in [unfinished / INDEX, *(p for p in unfinished.rglob("*") if p.is_dir())]:
        fsync(path)
    fsync(unfinished)
    unfinished.rename(folder)
    fsync(folder.parent)
    paths = {str(folder / name): digest for name, (_, digest) in files.items()}
    remember(folder.parent, {path: [*read_stamp(path), paths[path]] for path in paths})


def read_index(folder: Path) -> dict:
    """The index of a prepared folder; raises ValueError if it is missing or damaged."""
    path = folder / INDEX
    if not path.is_file():
        raise ValueError("has no index")
    own, _, text = path.read_bytes().partition(b"\n")
    if hashlib.sha256(text.removesuffix(b"\n")).hexdigest().encode() != own:
        raise ValueError("has a damaged index")
    return json.loads(text)


def files_below(folder: Path) -> Iterator[Path]:
    """All but folders and hidden files, which file managers and network disks create."""
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if not hidden and (path.is_symlink() or not path.is_dir()):
            yield path


def find_fault(folder: Path, cfg: DataConfig) -> str:
    """The fault of a prepared folder, or of the input files it names; empty: it is intact.

    Bytes are read where the memo of `hash_files` does not know the file: it is new, or changed.
    """
    try:
        index = read_index(folder)
    except ValueError as error:
        return str(error)
    files = {str(folder / name): digest for name, (_, digest) in index["files"].items()}
    named = index.get("named", {})
    digests = hash_files([*files, *named], cfg)
    there = {str(path) for path in files_below(folder) if path != folder / INDEX}
    for path in sorted({*files} | there):
        if path not in files or path not in there or digests[path] != files[path]:
            return f"has a damaged file: {one_line(os.path.relpath(path, folder), 60)}"
    changed = next((path for path in named if digests[path] != named[path]), "")
    return changed and f"is out of date, as {one_line(changed, 100)} has changed"


def content_digest(folder: Path) -> str:
    """The "content" that `build` returned when the folder was prepared."""
    return read_index(folder)["content"]


def digest_of(prepared: Any) -> str:
    """The content digest if this is a folder that was prepared here; else an empty text."""
    if isinstance(prepared, Path) and (prepared / INDEX).is_file():
        with contextlib.suppress(ValueError):  # a file of this name, but not ours
            return content_digest(prepared)
    return ""


def once_per_folder(load: Callable) -> Callable:
    """Keeps what `load(cfg, folder)` returns for a prepared folder: a tokenizer, for example.

    The model to start from, and other files that it is read from, may change during training. The
    weights still belong to what was read first.
    """
    loaded = {}

    @functools.wraps(load)
    def load_once(cfg: Any, folder: Path | None = None) -> Any:
        key = (folder, cfg.model_name_or_path)
        if folder is None or key not in loaded:
            loaded[key] = load(cfg, folder)
        return loaded[key]

    return load_once
