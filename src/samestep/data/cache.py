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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from samestep.base.console import one_line, without_credentials
from samestep.base.fields import local_path
from samestep.base.files import PERMANENT_ERRORS, fsync, read_json_object, remove
from samestep.data import hub, sources
from samestep.data.own_code import own_code
from samestep.data.sources import DataConfig
from samestep.models import pretrained

MANY_FILES = 1000  # in a tree: more of them count by their folders
LOCK_SECONDS = 5  # of waiting for a lock until it is said
PASSING_ERRORS = (errno.EMFILE, errno.ESTALE, errno.ETIMEDOUT)  # not the fault of a file
MEMO = "digests.json"  # the stamps and digests of files that were read, by their paths
INDEX = "index"  # of a prepared folder: the SHA-256 of its second line, which is JSON


# ---- Key -----------------------------------------------------------------------------------------


def cache_folder(cfg: DataConfig, settings: Any, used: Any, shaped_by: Iterable[Callable]) -> Path:
    """The folder for prepared data; its name is a hash of all that shapes the data.

    `settings`: values of the task's own fields, and `used`: the files (`hash_input_files`), both as
    JSON. `shaped_by`: the functions that prepare the data. All that they use of the project counts
    (`own_code`), but for this module, which keeps the data.
    """
    fields = {each.name: getattr(cfg, each.name) for each in dataclasses.fields(DataConfig)}
    del fields["cache_dir"]
    # Weights and credentials shape nothing.
    fields["data"] = [without_credentials(each.data) for each in sources.split_data(cfg.data)]
    fields["validation_data"] = without_credentials(cfg.validation_data)
    code = own_code(shaped_by, [__name__, own_code.__module__])
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
    found, skipped, given = [*more, *(shipped or [])], [], []
    if shipped is None and hub.is_hub_name(cfg.data):
        hub.check_commit(cfg)
    elif shipped is None:
        given.append(("data", cfg.data))
    if cfg.validation_data:
        given.append(("validation_data", cfg.validation_data))
    for name, path in given:
        paths, folders, number, others = [], [], 0, Counter()
        read = endings(path) if callable(endings) else endings
        for folder, names, skipped_here in sources.walk(path, read, name):
            others += skipped_here
            number += len(names)
            folders += [Path(folder)] * bool(names)
            if number <= MANY_FILES:
                paths += [Path(folder, each) for each in names]
        paths = folders if number > MANY_FILES else sorted(paths)
        found += paths or sources.list_files(path, read, name)  # raises, with the reason
        skipped.append(others)
    counted: list[Any] = [sorted(each.items()) for each in skipped]
    return [*hash_files(found, cfg).items(), *counted]


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


def content_digest(folder: Path) -> str:
    """The "content" that `build` returned when the folder was prepared."""
    return read_index(folder)["content"]


def digest_of(prepared: Any) -> str:
    """The content digest if this is a folder that was prepared here; else an empty text."""
    if isinstance(prepared, Path) and (prepared / INDEX).is_file():
        with contextlib.suppress(ValueError):  # a file of this name, but not ours
            return content_digest(prepared)
    return ""


def short_digest(*files: Path) -> str:
    """16 hex digits for the content of files."""
    digests = (hashlib.sha256(file.read_bytes()).digest() for file in files)
    return hashlib.sha256(b"".join(digests)).hexdigest()[:16]


# ---- Digests of files ----------------------------------------------------------------------------


def file_stamp(status: os.stat_result) -> list[int]:
    """Size, times and inode. They change with the file: its ctime cannot be set back."""
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def read_stamp(path: str) -> list[int]:
    """The stamp of a file. A folder's size is the number of its entries. Raises OSError."""
    status = os.stat(path)
    stamp = file_stamp(status)
    return [len(os.listdir(path)), *stamp[1:]] if stat.S_ISDIR(status.st_mode) else stamp


def hash_file(path: Path | str) -> tuple[str, list[int]]:
    """A file's SHA-256 and its stamp. Raises OSError, also for a pipe or device: it may block."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as file:
        status, digest, block = os.fstat(file.fileno()), hashlib.sha256(), bytearray(1 << 20)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(0, "not a file", str(path))
        while size := file.readinto(block):
            digest.update(memoryview(block)[:size])
    return digest.hexdigest(), file_stamp(status)


def hash_path(path: str, missing: str | None, settled: int) -> tuple[str, list[int]]:
    """A digest of a file, or of the names and contents of a folder's own files; and its stamp.

    Hidden files and folders inside do not count. The stamp is empty if something changed after the
    time `settled`, in ns, or cannot be read: the digest is `missing` then; None: raise ValueError.
    """
    try:
        if not os.path.isdir(path):
            digest, stamp = hash_file(path)
            return digest, stamp if stamp[2] < settled else []
        stamp, total = read_stamp(path), hashlib.sha256()  # a later change makes another stamp
        old = stamp[2] < settled
        with os.scandir(path) as entries:
            names = sorted(e.name for e in entries if not (e.name.startswith(".") or e.is_dir()))
        for start in range(0, len(names), 10_000):
            some = names[start : start + 10_000]
            hash_one = functools.partial(hash_path, missing=missing, settled=settled)
            hashed = map_in_threads(hash_one, [os.path.join(path, name) for name in some])
            for name, (digest, own_stamp) in zip(some, hashed, strict=True):
                total.update(f"{digest} {name}\0".encode(errors="surrogateescape"))
                old = old and bool(own_stamp)
        return total.hexdigest(), stamp if old else []
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        if getattr(error, "errno", None) in PASSING_ERRORS:
            raise
        if missing is not None:
            return missing, []
        if isinstance(error, ValueError):
            raise
        shown = one_line(path, 200)
        raise ValueError(f"cannot read {shown}: {error.strerror}; fix or remove it") from None


def map_in_threads(function: Callable, items: list) -> list:
    """[function(item) for item in items], in threads: hashing and reading release the GIL."""
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 32)) as pool:
        return list(pool.map(function, items))


def hash_files(
    paths: Iterable[Path], cfg: DataConfig, missing: str | None = None
) -> dict[str, str]:
    """The digest of each file or folder (`hash_path`) by its path.

    A memo in the cache folder spares reading what has the same size, times and inode. What changed
    less than two seconds before it was read is not in the memo: another change might leave the same
    times. Of processes that start together, the first reads and the others wait for its memo; if
    the memo cannot be written, each reads.
    """
    cache, names = local_path(cfg.cache_dir, "cache_dir"), list(dict.fromkeys(map(str, paths)))

    def read_memo() -> dict[str, str]:
        memo, digests = read_json_object(cache / MEMO), {}
        for name in names:
            # hash_path reports what is wrong with a file; an odd memo is made again.
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                *stamp, digest = memo[os.path.abspath(name)]
                if read_stamp(name) == stamp:
                    digests[name] = digest
        return digests

    digests = read_memo()
    if len(digests) < len(names):
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # a read-only disk
                stack.enter_context(file_lock(cache / "digests.lock"))
                digests = read_memo()
            settled = time.time_ns() - 2_000_000_000
            hash_one = functools.partial(hash_path, missing=missing, settled=settled)
            new = [name for name in names if name not in digests]
            folders = [name for name in new if os.path.isdir(name)]  # each has threads of its own
            files = [name for name in new if name not in {*folders}]
            hashed = dict(zip(files, map_in_threads(hash_one, files), strict=True))
            hashed |= {name: hash_one(name) for name in folders}
            digests |= {name: digest for name, (digest, _) in hashed.items()}
            remember(cache, {n: [*stamp, digest] for n, (digest, stamp) in hashed.items() if stamp})
    return {name: digests[name] for name in names}


def remember(cache: Path, known: dict[str, list]) -> None:
    """Adds stamps and digests of files to the memo; a failure is ignored, as only time is lost."""
    partial = cache / f"{MEMO}.{os.getpid()}.partial"
    with contextlib.suppress(OSError):
        if known:
            own = {os.path.abspath(name): saved for name, saved in known.items()}
            partial.write_text(json.dumps(read_json_object(cache / MEMO) | own), encoding="utf-8")
            partial.replace(cache / MEMO)
    with contextlib.suppress(OSError):
        partial.unlink(missing_ok=True)


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
            print(
                f"waiting for {what}; if its machine is gone, delete {one_line(path, 200)}",
                flush=True,
            )
        time.sleep(min(0.02 + (time.monotonic() - start) / 5, 1))


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock of `file_lock`."""
    with open(path, "a", encoding="utf-8") as file:
        return not try_lock(file)  # closing the file frees it


def try_lock(file: TextIO) -> bool:
    """Locks an open file, unless another process holds it. Raises OSError if there are no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise
        reason = "this disk has no file locks; give a folder on another one"
        raise OSError(error.errno, reason, file.name) from None
    return True


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

    Its name is a hash of all that shapes the data: the fields `names` of the task, and those of
    DataConfig; the JSON values `more`; the code of the function in which `build` stands; the files
    of each source with these `endings` (perhaps a function of the path), those of the tokenizer of
    a model to start from, and `files`. `shipped(data)`: the files of data that the task brings
    along; None: `data` is a path, or a data set on the Hub.
    """
    files, more = [*files], [*more]

    def name_folder() -> Path:
        beside = [*pretrained.used_files(cfg), *files]
        used = [
            hash_input_files(own, endings, *beside, shipped=shipped(own.data))
            for _, own in sources.by_source(cfg, endings)
        ]
        settings = [getattr(cfg, name) for name in names.split()]
        return cache_folder(cfg, settings + more, used, [build])

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
    removes them; or, if `build` goes on from them, it gets them, and also a folder with a damaged
    file.
    """
    folder = name_folder()
    if not find_fault(folder, cfg):
        return folder
    unfinished = folder.with_suffix(".unfinished")
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(file_lock(folder.with_suffix(".lock")))
        except OSError as error:
            raise write_error(folder, error) from None
        fault = find_fault(folder, cfg)
        if not fault:
            return folder
        try:
            if not goes_on:
                remove(unfinished)
            if os.path.lexists(folder):
                print(f"{one_line(folder, 100)} {fault}: preparing again", flush=True)
                if goes_on:
                    with contextlib.suppress(OSError, ValueError):  # nothing is known of its files
                        for name in find_damaged(folder, cfg):
                            remove(folder / name)
                        remove(unfinished)
                        folder.rename(unfinished)
                remove(folder)
            unfinished.mkdir(exist_ok=True)
            remove(unfinished / INDEX)
            facts, problem = {}, None
            try:
                facts = build(unfinished)
            except ValueError as error:  # a file that changes while it is read has odd ones
                problem = error
            if name_folder() != folder:
                raise ValueError("task.data: files changed during the preparation: start again")
            if problem:
                raise problem
            commit_folder(folder, unfinished, facts)
        except BaseException as error:
            if not goes_on or type(error) is ValueError:
                remove(unfinished)  # frees a full disk
            if isinstance(error, MemoryError):
                problem = f"{one_line(cfg.data, 60)} does not fit into the memory of this machine"
                error = ValueError(f"task.data: {problem}: give fewer rows ({one_line(error, 60)})")
            plain = type(error) is OSError and error.errno is None  # numpy: a full disk
            if plain or isinstance(error, OSError) and error.errno in PERMANENT_ERRORS:
                error = write_error(folder, error)
            raise error from None
    return folder


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


def write_error(folder: Path, error: BaseException) -> ValueError:
    reason = getattr(error, "strerror", None) or one_line(error)
    return ValueError(f"task.cache_dir: cannot write {one_line(folder, 100)}: {reason}")


def commit_folder(folder: Path, unfinished: Path, facts: dict) -> None:
    """Turns a filled folder into prepared data. Files, index and names reach the disk in turn.

    The index holds the size and SHA-256 of each file, and its own SHA-256. `facts["hashed"]` has
    those of files that are on the disk already.
    """
    files = dict(facts.pop("hashed", {}))
    new = [name for name in sorted(list_sizes(unfinished)) if name not in files]
    map_in_threads(fsync, [unfinished / name for name in new])
    hashed = map_in_threads(hash_file, [unfinished / name for name in new])
    files |= {name: [stamp[0], digest] for name, (digest, stamp) in zip(new, hashed, strict=True)}
    text = json.dumps({**facts, "files": files}).encode()
    own = hashlib.sha256(text).hexdigest().encode()
    (unfinished / INDEX).write_bytes(own + b"\n" + text + b"\n")
    for path in [unfinished / INDEX, *(p for p in unfinished.rglob("*") if p.is_dir())]:
        fsync(path)
    fsync(unfinished)
    unfinished.rename(folder)
    fsync(folder.parent)
    known = {str(folder / name): digest for name, (_, digest) in files.items()}
    remember(folder.parent, {name: [*read_stamp(name), each] for name, each in known.items()})


def read_index(folder: Path) -> dict:
    """The index of a prepared folder; raises ValueError if it is missing or damaged."""
    path = folder / INDEX
    if not path.is_file():
        raise ValueError("has no index")
    own, _, text = path.read_bytes().partition(b"\n")
    if hashlib.sha256(text.removesuffix(b"\n")).hexdigest().encode() != own:
        raise ValueError("has a damaged index")
    return json.loads(text)


def list_sizes(folder: Path) -> dict[str, int]:
    """The size of each file below a folder; -1 for a link, a pipe or a device.

    Hidden files do not count: file managers and network disks create them.
    """
    sizes = {}
    for path in folder.rglob("*"):
        status, below = path.lstat(), path.relative_to(folder)
        hidden = any(part.startswith(".") for part in below.parts)
        if not stat.S_ISDIR(status.st_mode) and not hidden:
            sizes[below.as_posix()] = status.st_size if stat.S_ISREG(status.st_mode) else -1
    return sizes


def find_fault(folder: Path, cfg: DataConfig) -> str:
    """The fault of a prepared folder, or of the input files it names; empty: it is intact."""
    try:
        damaged, named = find_damaged(folder, cfg), read_index(folder).get("named", {})
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) in PASSING_ERRORS:
            raise
        return getattr(error, "strerror", None) or str(error)
    if damaged:
        return f"has a damaged file: {one_line(damaged[0], 60)}"
    digests = hash_files(map(Path, named), cfg, missing="")
    changed = next((name for name in named if digests[name] != named[name]), "")
    return changed and f"is out of date, as {one_line(changed, 100)} has changed"


def find_damaged(folder: Path, cfg: DataConfig) -> list[str]:
    """The files of a prepared folder that its index does not vouch for, or that are missing.

    Names and sizes are compared; bytes where the memo of `hash_files` does not know the file, as
    one that has changed since it was written. Raises OSError or ValueError without an intact index.
    """
    files, sizes = read_index(folder)["files"], list_sizes(folder)
    del sizes[INDEX]
    whole = {folder / name: name for name in files if sizes.get(name) == files[name][0]}
    digests = hash_files(whole, cfg, missing="")
    intact = {name for path, name in whole.items() if digests[str(path)] == files[name][1]}
    return [name for name in {**sizes, **files} if name not in intact]
