"""The key of prepared data: fields of the task, code that shapes rows, and the files of rows.

An edit of what prepare_data and views reach prepares data anew, and an edit of loss_sum does not.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import copy
import dataclasses
import functools
import glob
import hashlib
import importlib.util
import json
import os
import re
import stat
import types
from collections.abc import Iterator
from multiprocessing.pool import ThreadPool
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from pydantic_core import to_jsonable_python

from samestep.base.fields import local_path
from samestep.data.folders import describe_shards, files_below, split_shards
from samestep.data.sources import DataConfig, split_data
from samestep.models import pretrained

LIBRARY = Path(__file__).parents[1]
# The code of the library that shapes rows.
SHAPING = ("data/*.py", "images/*.py", "text/*.py", "models/pretrained.py")


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
        local = [each.path for each in chosen.train + chosen.held if "://" not in each.path]
        fields["times"] = [os.stat(path).st_mtime_ns for path in local]  # tags are of both ends
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
    """The source of prepare_data and views, and of what these reach by name in the project:
    functions, classes, constants, and modules that are imported.

    A plain constant also counts by its value, which may come from a file. Comments do not count,
    nor do fields of the config.
    """
    root = Path(task.__file__).absolute().parent
    todo: list[tuple[Any, str]] = [(task, "prepare_data"), (task, "views")]  # module and name
    describe(type(cfg), root, todo)
    texts: dict[tuple[str, str], str] = {}
    while todo:
        module, name = todo.pop()
        place = (getattr(module, "__name__", "task"), name)
        value = vars(module).get(name)
        if place in texts or name.startswith("__") or isinstance(value, types.ModuleType):
            continue
        texts[place] = f"{'.'.join(place)} is {describe(value, root, todo)}"
        statements = statements_of(getattr(module, "__file__", None) or "")
        for node in [*statements.get(name, []), *statements.get("*", [])]:
            part = part_of(node, name, value, cfg)
            texts[place] += f"\n{ast.unparse(part)}"
            names = {name, *names_in(part)}
            for each in modules_of(part, module, names, root):
                todo += [(each, other) for other in names]
    return sorted(texts.values())


@functools.cache  # a process keeps the code that it began with
def statements_of(file: str) -> dict[str, list[Any]]:
    """The statements of a module by the names that they bind, or whose values they may change."""
    table: dict[str, list[Any]] = {}
    for node in ast.parse(Path(file).read_bytes()).body if file.endswith(".py") else ():
        names = names_in(node)
        if isinstance(node, ast.If) and "__name__" in names:
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {each.asname or each.name for each in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            decorators = [ast.unparse(each) for each in node.decorator_list]  # clean.register
            names = {node.name, *(each.partition(".")[0] for each in decorators if "." in each)}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            stored = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
            names = {each.id for each in stored if isinstance(each.ctx, ast.Store)} or names
        for name in names:
            table.setdefault(name, []).append(node)
    return table


def part_of(node: Any, name: str, value: Any, cfg: Any) -> Any:
    """The part of a statement that counts: of imports one name; of the class of cfg all but its
    fields, whose values are in the key."""
    part = copy.copy(node)
    if isinstance(node, ast.Import | ast.ImportFrom):
        part.names = [each for each in node.names if {name, "*"} & {each.asname, each.name}]
    elif isinstance(node, ast.ClassDef) and value in type(cfg).__mro__:
        fields = {each.name for each in dataclasses.fields(cfg)}
        part.body = ast.parse("pass").body
        for each in node.body:
            is_field = isinstance(each, ast.AnnAssign) and ast.unparse(each.target) in fields
            if not (is_field or isinstance(each, ast.Expr)):
                part.body.append(each)
    return part


def names_in(node: ast.stmt) -> set[str]:
    """The names that a statement and its functions use, but for their variables and annotations."""
    codes = [compile(ast.Module([node], []), "", "exec")]  # with the __future__ of this module
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return {name for code in codes for name in code.co_names}


def modules_of(node: ast.stmt, module: Any, names: set[str], root: Path) -> list[Any]:
    """A module, and the project's modules that its statement imports or names."""
    modules = [module]
    for each in ast.walk(node):
        base = ""
        if isinstance(each, ast.ImportFrom):
            base = "." * each.level + (each.module or "")
            base = importlib.util.resolve_name(base, getattr(module, "__package__", "")) + "."
        for alias in each.names if isinstance(each, ast.Import | ast.ImportFrom) else ():
            name = base + alias.name
            if find_module(name.partition(".")[0], root):
                modules += find_module(name, root) + find_module(name.rpartition(".")[0], root)
    for each in modules:  # by lib, then by lib.words
        values = [vars(each).get(name) for name in names]
        for value in [value for value in values if isinstance(value, types.ModuleType)]:
            modules += [own for own in find_module(value.__name__, root) if own not in modules]
    return modules


def find_module(name: str, root: Path) -> list[types.ModuleType]:
    """The module of this name, imported; empty for one of another package, and for none."""
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(name)
        places = [spec.origin or "", *(spec.submodule_search_locations or [])] if spec else []
        for path in map(Path, places):  # as it was found: a link in the project is its own
            outside = path.is_relative_to(LIBRARY) or path.is_relative_to(Path(os.__file__).parent)
            if path.is_relative_to(root) and "site-packages" not in path.parts and not outside:
                return [importlib.import_module(name)]
    return []


def describe(value: Any, root: Path, reached: list, above: tuple[int, ...] = ()) -> str:
    """A text for a value, the same in every process; an object of another package is its type.

    Functions and classes of the project in it are added to `reached`.
    """
    if isinstance(value, str | bytes | int | float | complex | PurePath | None):
        return repr(value)
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    inner: list[Any] = []
    modules = find_module(getattr(value, "__module__", None) or "", root)
    if isinstance(value, types.FunctionType | type):
        inner = [value.__qualname__]
        reached += [(module, value.__qualname__.partition(".")[0]) for module in modules]
    elif isinstance(value, dict | types.MappingProxyType):
        inner = [each for pair in value.items() for each in pair]
    elif isinstance(value, list | tuple | set | frozenset | collections.deque):
        inner = [*value]
    elif modules:
        inner = [*getattr(value, "__dict__", {}).items()]
    above = (*above, id(value))
    texts = [describe(each, root, reached, above) for each in inner if id(each) not in above]
    texts = sorted(texts) if isinstance(value, set | frozenset) else texts
    return f"{type(value).__qualname__}({', '.join(texts)})"


# ---- Files ---------------------------------------------------------------------------------------


def files_of(cfg: Any, task: Any = None) -> dict[str, str]:
    """The files that fields of a task name, as a path, a folder, a pattern such as data/*.jsonl, or
    sources with weights; and those of its function `files`.

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
            if re.search(r"\w", text) and "://" not in text:
                matches = filter(os.path.isfile, glob.glob(path, recursive=True))
                for each in [path] if os.path.exists(path) else matches:
                    roots[f"{field}/{text}{each.removeprefix(path)}"] = each
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
