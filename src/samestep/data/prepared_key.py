"""The key of prepared data: fields of the task, code that shapes rows, and the files of rows.

An edit of what prepare_data and views reach prepares data anew, and an edit of loss_sum does not.
"""

import dataclasses
import hashlib
import importlib
import json
import os
import re
import stat
import sys
import types
from collections.abc import Iterator
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from samestep.base.fields import local_path
from samestep.data.folders import describe_shards, files_below, split_shards
from samestep.data.sources import DataConfig, split_data
from samestep.models import pretrained

LIBRARY = Path(__file__).parents[1]
# The code of the library that shapes rows.
SHAPING = ("data/*.py", "images/*.py", "text/*.py", "models/pretrained.py")
ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def key_of(cfg: Any, task: Any, identity: str = "") -> str:
    """16 hex digits for all that shapes the rows but the files that they come from.

    `identity`: of the files of a run that resumes, which lie in the folder beforehand.
    """
    fields = read_fields(cfg)
    if isinstance(cfg, DataConfig):  # weights change the order alone
        fields["data"] = [each.data for each in split_data(fields["data"])]
    if isinstance(cfg, pretrained.ModelConfig):
        fields["revision"] = pretrained.commit_of(cfg)
    if getattr(cfg, "streaming", False):
        chosen = split_shards(cfg)
        fields["shards"] = [describe_shards(each) for each in (chosen.train, chosen.held)]
    return short_hash([to_jsonable_python(fields), code_of(task, cfg), library_code(), identity])


def short_hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def hidden_fields(cfg: Any) -> set[str]:
    """Names of the fields that only the model reads: metadata=MODEL."""
    return {f.name for f in dataclasses.fields(cfg) if not f.metadata.get("shapes_data", True)}


def read_fields(cfg: Any) -> dict[str, Any]:
    """The fields that shape rows, by name."""
    left_out = hidden_fields(cfg) | {"cache_dir"}
    names = [field.name for field in dataclasses.fields(cfg)]
    return {name: getattr(cfg, name) for name in names if name not in left_out}


# ---- Code ----------------------------------------------------------------------------------------


def library_code() -> str:
    """A digest of the library's code that shapes rows."""
    files = [path for each in SHAPING for path in sorted(LIBRARY.glob(each))]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()


def code_of(task: Any, cfg: Any) -> list[str]:
    """The compiled code of prepare_data and views, and of what these reach by name in the project:
    functions, classes, constants, and modules that functions import.

    Comments, annotations, and fields of the config do not count.
    """
    root = Path(task.__file__).resolve().parent
    todo: list[Any] = [task.prepare_data, getattr(task, "views", None), type(cfg)]
    seen: dict[int, Any] = {}
    texts: list[str] = []
    while todo:
        value = todo.pop()
        if id(value) in seen or is_foreign(value, root):
            continue
        seen[id(value)] = value
        inner = ("__wrapped__", "__func__", "fget", "func", "pattern")
        todo += [getattr(value, name, None) for name in inner]
        if isinstance(value, types.FunctionType):
            text, names = read_code(value.__code__)
            texts.append(text)
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            spaces = [value.__globals__, dict(zip(value.__code__.co_freevars, cells, strict=True))]
            modules = [each for each in value.__globals__.values() if is_module(each, root)]
            for name in imported_names(names - {*value.__globals__}, names, root):
                modules.append(importlib.import_module(name))
            for space in [*spaces, *map(vars, modules)]:
                todo += [space[name] for name in sorted(names) if name in space]
            todo += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        elif isinstance(value, type):
            fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
            left_out = {each.name for each in fields}  # their values count where it is used
            own = vars(value).items()
            todo += [v for n, v in own if not n.startswith("__") and n not in left_out]
            todo += value.__bases__
        elif isinstance(value, dict):
            todo += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set | frozenset):
            todo += value
        elif not is_foreign(type(value), root):  # others count by their repr alone
            todo += [type(value), getattr(value, "__dict__", None)]
        if not isinstance(value, type | types.FunctionType | types.ModuleType):
            texts.append(plain_text(value))
    return sorted(texts)


def imported_names(first: set[str], names: set[str], root: Path) -> Iterator[str]:
    """The modules below `root` that a function may import, of the names that it uses."""
    for name in sorted(each for each in first if each.isidentifier()):
        if (root / f"{name}.py").is_file():
            yield name
        for other in sorted(names) if (root / name).is_dir() else ():
            if (root / name / f"{other}.py").is_file():
                yield f"{name}.{other}"


def is_module(value: Any, root: Path) -> bool:
    """Whether this is a module of the project."""
    file = getattr(value, "__file__", None) if isinstance(value, types.ModuleType) else None
    inside = file and Path(file).resolve().is_relative_to(root)
    return bool(inside) and not {"site-packages", "dist-packages"} & {*Path(file).parts}


def is_foreign(value: Any, root: Path) -> bool:
    """Whether this is nothing, or a function or class of another package."""
    if not isinstance(value, types.FunctionType | type):
        return value is None
    return not is_module(sys.modules.get(value.__module__), root)


def read_code(code: types.CodeType) -> tuple[str, set[str]]:
    """A text for compiled code with the functions inside, and all names that it uses."""
    constants, names = [], {*code.co_freevars}
    for name in code.co_names:
        names |= {*name.split(".")}
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            text, more = read_code(value)
            names |= more
        else:
            text = plain_text(value)
        constants.append(text)
    return repr((code.co_name, code.co_code.hex(), constants, sorted(names))), names


def plain_text(value: Any) -> str:
    """A text for a value, the same in every process."""
    if isinstance(value, set | frozenset):
        return repr(sorted(map(plain_text, value)))
    if isinstance(value, list | tuple):
        return repr([*map(plain_text, value)])
    if isinstance(value, dict):
        return repr([(plain_text(key), plain_text(each)) for key, each in value.items()])
    return ADDRESS.sub("", repr(value))


# ---- Files ---------------------------------------------------------------------------------------


def files_of(cfg: Any, task: Any = None) -> dict[str, str]:
    """The files that fields of a task name, as a path, a folder, or sources with weights; and those
    of its function `files`.

    Of a folder all files below, but hidden ones. Of a model's folder the files of its tokenizer.
    Each by a name that does not depend on where the folder lies. Raises ValueError for what is no
    file, and for prepared data among them.
    """
    more = task.files(cfg) if hasattr(task, "files") else []
    roots = {f"files/{number}": os.fspath(path) for number, path in enumerate(more)}
    for field, value in read_fields(cfg).items():
        if field == "model_name_or_path" and isinstance(cfg, pretrained.ModelConfig):
            continue  # its weights shape no rows
        texts = list(texts_in(to_jsonable_python(value)))
        if field == "data" and isinstance(cfg, DataConfig):
            texts = [each.data for each in split_data(value)]
        for text in texts:
            path = os.path.expanduser(text)
            # A separator such as "." or "/" is no folder.
            if re.search(r"\w", text) and "://" not in text and os.path.exists(path):
                roots[f"{field}/{text}"] = path
    # Of a stream the list of shards is in the key.
    listed = ("data", "validation_data") if getattr(cfg, "streaming", False) else ()
    cache = cache_of(cfg).resolve()
    found: dict[str, str] = {}
    for name, path in roots.items():
        root = Path(path).resolve()
        below = cache.relative_to(root).parts if cache.is_relative_to(root) else (".",)
        if not any(part.startswith(".") for part in below):
            field = name.partition("/")[0]
            raise ValueError(f"task.cache_dir: {cache} lies in task.{field}: give another")
        if name.partition("/")[0] not in listed:
            found |= {f"{name}/{below}": file for below, file in files_below(path)}
    if isinstance(cfg, pretrained.ModelConfig):
        found |= {f"model/{path.name}": str(path) for path in pretrained.used_files(cfg)}
    return found


def cache_of(cfg: Any) -> Path:
    return local_path(str(getattr(cfg, "cache_dir", ".cache/data")), "cache_dir")


def texts_in(value: Any) -> Iterator[str]:
    """All texts in a value of JSON."""
    if isinstance(value, str) and value:
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from texts_in(each)
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
        try:
            status = os.stat(path)
        except FileNotFoundError:
            problem = f"{path} is a link to nothing, or was removed"
            raise ValueError(f"task.{name.partition('/')[0]}: {problem}") from None
        if not stat.S_ISREG(status.st_mode):
            problem = f"{path} is no regular file; remove it"
            raise ValueError(f"task.{name.partition('/')[0]}: {problem}")
        times = [status.st_mtime_ns, status.st_ctime_ns]
        found[name] = [status.st_size, status.st_ino, *times]
    return found


def hash_files(files: dict[str, str]) -> dict[str, str]:
    """The SHA-256 of each file. Threads: reading and hashing release the GIL."""
    with ThreadPool(min(os.cpu_count() or 1, 16)) as pool:
        return dict(zip(files, pool.map(hash_file, files.values()), strict=True))


def hash_file(path: str) -> str:
    """A file's SHA-256."""
    digest = hashlib.sha256()
    block = bytearray(1 << 20)
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(block):
            digest.update(memoryview(block)[:size])
    return digest.hexdigest()
