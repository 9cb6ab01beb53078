"""The key of prepared data: fields of the task, the project's code, and the files of rows.

The code is task.py without the functions that only training calls, and every other .py file of the
project but train.py and tests, by its bytes. Where the name of one of these functions stands
anywhere else in this code, all of task.py counts. A key has a lock.
"""

import ast
import contextlib
import dataclasses
import glob
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, Literal, get_origin, get_type_hints

import filelock
from pydantic_core import to_jsonable_python

from samestep.base.fields import as_json, local_path
from samestep.base.files import read_json_object, replace_text
from samestep.contract.contract import OPTIONAL, REQUIRED
from samestep.data.files import files_below
from samestep.state.provenance import LIBRARY, hash_functions, short_hash, statements_of

# The code of the library that shapes rows.
_SHAPING = ("data/*.py", "images/*.py", "text/*.py", "text/*.jinja", "models/pretrained.py")
# Functions of task.py that only training calls.
_TRAINING = {*REQUIRED, *OPTIONAL} - {"prepare_data", "views", "check_config", "files"}
_IS_NAMED = re.compile(rf"\b({'|'.join(sorted(_TRAINING))})\b")
_NAMES = ("_column", "_split")  # ends of fields that name no file
_DIGESTS = "digests"  # of files: the name of their table and of its lock
LOCK_SECONDS = 5  # of waiting for another process until it is said
_FOREIGN = {"site-packages", "vendor", "wandb"}  # folders with files of others


def key_of(cfg: Any, task: Any, digests: dict[str, str], identity: str = "") -> str:
    """16 hex digits for all that shapes the rows. `digests`: of the files that they come from.

    `identity`: of the files of a run that resumes, which lie in the folder beforehand.
    """
    fields = as_json(read_fields(cfg) | _call_all(cfg, "key_values"))
    facts = [fields, code_of(task), _library_code(), digests, identity]
    return short_hash(json.dumps(facts, sort_keys=True).encode())


def _call_all(cfg: Any, method: str) -> dict[str, Any]:
    """Call this method of each class of a config, a subclass last, and join what they return.

    key_values    {name: value} that counts in the key in place of a field, or beside the fields.
    named_files   {field: paths} of fields whose value is no path: the files that they name.
    """
    values = {}
    for kind in reversed(type(cfg).__mro__):
        if method in vars(kind):
            values |= vars(kind)[method](cfg)
    return values


def hidden_fields(cfg: Any) -> set[str]:
    """Names of the fields that only the model reads: metadata=MODEL."""
    return {f.name for f in dataclasses.fields(cfg) if not f.metadata.get("shapes_data", True)}


def read_fields(cfg: Any) -> dict[str, Any]:
    """The fields that shape rows, by name."""
    left_out = hidden_fields(cfg) | {"cache_dir"}
    names = [field.name for field in dataclasses.fields(cfg)]
    return {name: getattr(cfg, name) for name in names if name not in left_out}


# ---- Code ----------------------------------------------------------------------------------------


def _library_code() -> str:
    """A digest of the library's code that shapes rows."""
    files = [path for each in _SHAPING for path in sorted(LIBRARY.glob(each))]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()


def _read_code(task: Any) -> dict[str, str]:
    """The code that shapes rows, by the paths of its files, of which task.py is the first."""
    own = Path(task.__file__).absolute()
    kept = [node for name, node in statements_of(own) if name not in _TRAINING]
    found = {str(own): ast.unparse(ast.Module(kept, []))}
    for file, path in files_below(str(own.parent), is_data=False):
        if not file.endswith(".py") or file in (own.name, "train.py") or file[:6] == "tests/":
            continue
        if is_own(Path(path), own.parent) and not Path(path).resolve().is_relative_to(LIBRARY):
            found[path] = Path(path).read_bytes().decode(errors="surrogateescape")
    return found


def code_of(task: Any) -> dict[str, str]:
    """Digests of the project's code that shapes rows: see the head of this module."""
    (own, text), *others = _read_code(task).items()
    folder, file = os.path.split(own)
    module, found = file.removesuffix(".py"), hash_functions(Path(own), file)
    if not any(_IS_NAMED.search(each) for each in (text, *dict(others).values())):
        for name in _TRAINING:
            found.pop(f"{module}.{name}", None)
    for path, each in others:
        found[os.path.relpath(path, folder)] = short_hash(each.encode(errors="surrogateescape"))
    return found


def is_own(path: Path, root: Path) -> bool:
    """Whether a file or folder is one of the project: none that is hidden, of an environment or of
    others. (files_below leaves out the folders of runs.)"""
    below = path.relative_to(root).parts if path.is_relative_to(root) else (".",)
    if any(part.startswith(".") or part in _FOREIGN for part in below):
        return False
    inside = [each for each in path.parents if each.is_relative_to(root)]
    return not any((each / "pyvenv.cfg").exists() for each in inside)


# ---- Files ---------------------------------------------------------------------------------------


def files_of(cfg: Any, task: Any = None) -> dict[str, str]:
    """The files that fields of a task name, as a path, a folder or a pattern such as data/*.jsonl,
    or as `named_files` of its config says; those of its function `files`; and those that the code
    of the project names in quotes.

    Fields of columns and splits, and those with a choice, name no file. Of a folder all files
    below, but hidden ones. Each by a name that does not depend on where the folder lies. Raises
    ValueError for what is no file, and for prepared data among them.
    """
    more = task.files(cfg) if hasattr(task, "files") else []
    roots = {f"files/{number}": os.fspath(path) for number, path in enumerate(more)}
    roots |= _quoted_files(task) if task else {}
    kinds, named = get_type_hints(type(cfg)), _call_all(cfg, "named_files")
    for field, value in read_fields(cfg).items():
        if field.endswith(_NAMES) or get_origin(kinds[field]) is Literal:
            continue  # a folder may have the name of a column, or of a choice
        texts = [*texts_in(to_jsonable_python(value))]
        read = named.get(field, texts)
        for text in dict.fromkeys([*texts, *read]):
            path = os.path.expanduser(text)
            if not re.search(r"\w", text) or "://" in text:
                continue  # a separator such as "." or "/" is no folder
            matches = filter(os.path.isfile, glob.glob(path, recursive=True))
            for each in [path] if os.path.exists(path) else matches:
                _check_cache(cfg, each, field)
                if text in read:
                    roots[f"{field}/{text}{each.removeprefix(path)}"] = each
    return {f"{n}/{below}": file for n, root in roots.items() for below, file in files_below(root)}


def _quoted_files(task: Any) -> dict[str, str]:
    """The files whose names stand in quotes in the code: of the project, or beside the code."""
    found, root = {}, os.path.dirname(os.path.abspath(task.__file__))
    for path, text in _read_code(task).items():
        for name in re.findall(r"""["']([^"'\n]+)["']""", text):
            for folder in (root, os.path.dirname(path)):
                file = os.path.join(folder, name)
                if os.path.isfile(file) and not name.endswith(".py"):
                    found[f"task.py/{os.path.relpath(file, root)}"] = file
    return found


def _check_cache(cfg: Any, path: str, field: str) -> None:
    """Raise ValueError for a cache inside a folder of data, unless it is hidden there."""
    cache, root = cache_of(cfg).resolve(), Path(path).resolve()
    if root.is_dir() and cache.is_relative_to(root):
        if not any(part.startswith(".") for part in cache.relative_to(root).parts):
            raise ValueError(f"task.cache_dir: {cache} lies in task.{field}: give another")


def cache_of(cfg: Any) -> Path:
    return local_path(str(getattr(cfg, "cache_dir", ".cache/data")))


def texts_in(value: Any) -> Iterator[str]:
    """All texts in a value of JSON."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, str) and value:
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from texts_in(each)


def stamps_of(files: dict[str, str]) -> dict[str, list[int]]:
    """Size, inode and times of each file; raises ValueError for what is none.

    A file that takes the place of a removed one may get its inode, and any time of change but
    st_ctime_ns, which cannot be set.
    """
    found = {}
    for name, path in files.items():
        problem = ""
        try:
            status = os.stat(path)
            if not stat.S_ISREG(status.st_mode):
                problem = f"{path} is no regular file; remove it"
        except FileNotFoundError:
            problem = f"{path} is a link to nothing, or was removed"
        if problem:
            raise ValueError(f"task.{name.partition('/')[0]}: {problem}")
        times = [status.st_mtime_ns, status.st_ctime_ns]
        found[name] = [status.st_size, status.st_ino, *times]
    return found


def digests_of(cache: Path, files: dict[str, str], stamps: dict[str, list]) -> dict[str, str]:
    """The SHA-256 of each file. A table in the cache remembers it for the path, size, inode and
    times; one process reads what is not there."""
    table = cache / f"{_DIGESTS}.json"
    paths = {name: os.path.join(os.getcwd(), path) for name, path in files.items()}

    def is_known(name: str) -> bool:
        return known.get(paths[name], [])[:-1] == stamps[name]

    known = read_json_object(table)
    if not all(map(is_known, files)):
        with contextlib.ExitStack() as held:
            with contextlib.suppress(ValueError):  # a read-only disk: each start reads them
                held.enter_context(lock(cache, _DIGESTS))
            known = read_json_object(table)
            new = [name for name in files if not is_known(name)]
            for name, digest in hash_files({n: paths[n] for n in new}).items():
                known[paths[name]] = [*stamps[name], digest]
            with contextlib.suppress(OSError):
                replace_text(table, json.dumps(known))
    return {name: known[path][-1] for name, path in paths.items()}


def hash_files(files: dict[str, str]) -> dict[str, str]:
    """The SHA-256 of each file. Threads: reading and hashing release the GIL."""
    with ThreadPool(min(os.cpu_count() or 1, 16)) as pool:
        return dict(zip(files, pool.map(hash_file, files.values()), strict=True))


def hash_file(path: str) -> str:
    """A file's SHA-256."""
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def lock(cache: Path, key: str) -> Iterator[None]:
    """Holds the lock of a key. Waiting for another process is said once.

    Raises ValueError for a disk that has no locks, or cannot be written.
    """
    held = filelock.FileLock(cache / f"{key}.lock")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        held.acquire(timeout=LOCK_SECONDS)
    except filelock.Timeout:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print("waiting for another process, which prepares the same data", flush=True)
        held.acquire(poll_interval=0.5)
    except (OSError, NotImplementedError) as error:
        reason = getattr(error, "strerror", None) or "it has no locks"
        hint = "give a folder on another disk"
        raise ValueError(f"task.cache_dir: cannot lock {cache}: {reason}; {hint}") from None
    try:
        yield
    finally:
        held.release()
