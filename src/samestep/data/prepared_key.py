"""The key of prepared data: fields of the task, code that shapes rows, and the files of rows.

An edit of what prepare_data and views reach prepares data anew, and an edit of loss_sum does not.
"""

import ast
import dataclasses
import hashlib
import json
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from samestep.base.console import one_line
from samestep.base.fields import local_path
from samestep.data.cache import hash_file
from samestep.data.sources import DataConfig, split_data
from samestep.models import pretrained

LIBRARY = Path(__file__).parents[1]
SHAPING = ("data/*.py", "text/*.py", "models/pretrained.py")  # the library's code that shapes rows
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
CONSTANTS = (bool, int, float, str, bytes)


def key_of(cfg: Any, task: Any, identity: str = "") -> str:
    """16 hex digits for all that shapes the rows but the files that they come from.

    `identity`: of the files of a run that resumes, which lie in the folder beforehand.
    """
    fields = read_fields(cfg)
    if isinstance(cfg, DataConfig):  # weights change the order alone
        fields["data"] = [each.data for each in split_data(fields["data"])]
    if isinstance(cfg, pretrained.ModelConfig):
        fields["revision"] = pretrained.commit_of(cfg)
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


class Statement:
    """A statement of a module, outside of functions and classes: what it defines and uses."""

    def __init__(self, node: ast.stmt):
        self.node = node
        inside = list(ast.walk(node))
        self.imports = [each for each in inside if isinstance(each, ast.Import | ast.ImportFrom)]
        self.names = {each.id for each in inside if isinstance(each, ast.Name)}
        self.defined = self.names  # a loop, or words.append(...), changes what it mentions
        if isinstance(node, DEFINITIONS):
            self.defined = {node.name}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            parts = [each for target in targets for each in ast.walk(target)]
            self.defined = {each.id for each in parts if isinstance(each, ast.Name)}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [each.asname or each.name.partition(".")[0] for each in node.names]
            self.defined = {*names}
        self.names |= {each.attr for each in inside if isinstance(each, ast.Attribute)}
        for each in self.imports:
            self.names.update(*(alias.name.split(".") for alias in each.names))


def code_of(task: Any, cfg: Any) -> list[str]:
    """The statements of the project that define prepare_data, views and what these reach by name.

    Names lead to all modules of the project that such statements import, in functions as well.
    Constants count by their values too. Comments, and fields of the config, do not count.
    """
    kinds = {kind.__name__ for kind in type(cfg).__mro__}
    names = {"prepare_data", "views", type(cfg).__name__, "*"}
    modules = {Path(task.__file__).resolve(): read_statements(Path(task.__file__), kinds)}
    reached: list[Statement] = []
    texts: list[str] = []
    while True:
        new = [(file, each) for file, left in modules.items() for each in left]
        new = [(file, each) for file, each in new if each.defined & names]
        if not new:
            return sorted(texts)
        for file, each in new:
            modules[file].remove(each)
            reached.append(each)
            names |= each.names
            texts += [ast.dump(each.node), *constants_of(file, each)]
            for path in imported_files(each, file, Path(task.__file__).resolve().parent):
                if path not in modules:
                    modules[path] = read_statements(path, kinds)


def read_statements(file: Path, kinds: set[str]) -> list[Statement]:
    """The statements of a module, without the fields of these classes of configs."""
    nodes = ast.parse(file.read_bytes()).body
    for node in nodes:
        if isinstance(node, ast.ClassDef) and node.name in kinds:
            node.body = [
                each for each in node.body if not isinstance(each, ast.AnnAssign | ast.Expr)
            ]
    return [Statement(node) for node in nodes]


def constants_of(file: Path, statement: Statement) -> list[str]:
    """Values of the numbers and texts that a statement defines: they may come from outside."""
    if not isinstance(statement.node, ast.Assign | ast.AnnAssign):
        return []
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(file):
            values = {name: vars(module).get(name) for name in sorted(statement.defined)}
            return [f"{n}={value!r}" for n, value in values.items() if type(value) in CONSTANTS]
    return []


def imported_files(statement: Statement, file: Path, root: Path) -> Iterator[Path]:
    """The files below `root` that a statement of a file imports."""
    folders = [root, *(Path(each).resolve() for each in sys.path)]
    own = [each for each in dict.fromkeys(folders) if each.is_relative_to(root)]
    own = [each for each in own if not {"site-packages", "dist-packages"} & {*each.parts}]
    for each in statement.imports:
        names = [alias.name for alias in each.names]
        places = own
        if isinstance(each, ast.ImportFrom):
            module = each.module or ""
            names = [f"{module}.{name}".strip(".") for name in names]
        if isinstance(each, ast.ImportFrom) and each.level:
            places = [file.parents[each.level - 1]]
            names.append("__init__")
        for folder in places:
            for name in names:
                yield from files_of_module(folder, name.split("."))


def files_of_module(folder: Path, parts: list[str]) -> Iterator[Path]:
    """The files that an import of a module below a folder runs, if they are there."""
    for part in parts:
        folder = folder / part
        for path in (folder.with_name(f"{part}.py"), folder / "__init__.py"):
            if path.is_file():
                yield path.resolve()


# ---- Files ---------------------------------------------------------------------------------------


def files_of(cfg: Any, more: Iterable[Any] = ()) -> dict[str, str]:
    """The files that fields of a task name, as a path, a folder, or sources with weights.

    Of a folder all files below, but hidden ones. Of a model's folder the files of its tokenizer.
    Each by a name that does not depend on where the folder lies. `more`: of the function `files`.
    Raises ValueError for what is no file, and for prepared data among them.
    """
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
    cache = cache_of(cfg).resolve()
    found: dict[str, str] = {}
    for name, path in roots.items():
        root = Path(path).resolve()
        below = cache.relative_to(root).parts if cache.is_relative_to(root) else (".",)
        if not any(part.startswith(".") for part in below):
            field = name.partition("/")[0]
            shown = one_line(cache, 100)
            raise ValueError(f"task.cache_dir: {shown} lies in task.{field}: give another")
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


def files_below(root: str) -> Iterator[tuple[str, str]]:
    """A file itself, or all files below a folder, each with its path there; no hidden ones."""
    if not os.path.isdir(root):
        yield "", root
        return
    seen = set()  # links may lead back
    for folder, names, files in os.walk(root, onerror=raise_error, followlinks=True):
        status = os.stat(folder)
        new = (status.st_dev, status.st_ino) not in seen
        seen.add((status.st_dev, status.st_ino))
        names[:] = sorted(name for name in names if new and not name.startswith("."))
        for name in sorted(files) if new else ():
            if not name.startswith("."):
                path = os.path.join(folder, name)
                yield os.path.relpath(path, root) if folder != root else name, path


def raise_error(error: OSError) -> None:
    raise error


def stamps_of(files: dict[str, str]) -> dict[str, list[int]]:
    """Size, time and inode of each file; raises ValueError for what is none."""
    found = {}
    for name, path in files.items():
        try:
            status = os.stat(path)
        except FileNotFoundError:
            problem = f"{one_line(path, 200)} is a link to nothing, or was removed"
            raise ValueError(f"task.{name.partition('/')[0]}: {problem}") from None
        if not stat.S_ISREG(status.st_mode):
            problem = f"{one_line(path, 200)} is no regular file"
            raise ValueError(f"task.{name.partition('/')[0]}: {problem}; remove it")
        found[name] = [status.st_size, status.st_mtime_ns, status.st_ino]
    return found


def hash_files(files: dict[str, str]) -> dict[str, str]:
    """The SHA-256 of each file. Threads: reading and hashing release the GIL."""
    with ThreadPool(min(os.cpu_count() or 1, 16)) as pool:
        return dict(zip(files, pool.map(hash_file, files.values()), strict=True))
