"""The code that prepares data, for the key of what it prepares.

Of this library the files of the rooms that read and shape data count, as they are. Of a project
count the functions, classes and constants that are used, found by the names in the source of the
function's module; of other modules of the project all, with what they import. Comments, docstrings,
annotations of functions and formatting of a project do not count, and other packages neither.
"""

import ast
import copy
import functools
import hashlib
import importlib.util
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from samestep.base.console import one_line

STARTED = time.time()
LIBRARY = Path(__file__).parents[1]
# What may shape data: these rooms, and how a tokenizer is loaded.
SHAPING = (
    *(f"{room}/*.py" for room in ("data", "images", "streaming", "text")),
    "models/pretrained.py",
)
FOREIGN = (str(LIBRARY), *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")))
STAR = "*"  # the name of: from a import *
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def library_code(*patterns: str) -> str:
    """A digest of files of this library; by default of all that may shape data."""
    found = (LIBRARY.glob(each) for each in patterns or SHAPING)
    texts = [read_source(str(path)) for paths in found for path in sorted(paths)]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def project_code(function: Callable) -> list[str]:
    """The statements of a project that define a function and all that it uses.

    Empty for a function of this library. Raises ValueError if a file was edited since the start:
    the code that runs may be older.
    """
    if isinstance(function, functools.partial):  # what it is bound to is in its module, or a value
        function = function.func
    module, texts, whole = function.__module__, [], set()
    todo, done = [STAR, function.__qualname__.partition(".")[0]], set()
    while project_file(module) and todo:
        if (name := todo.pop()) in done:
            continue
        done.add(name)
        for statement in definitions_of(module).get(name, []):
            texts.append(ast.unparse(statement))
            todo += [node.id for node in ast.walk(statement) if isinstance(node, ast.Name)]
            whole |= {*imported_by(statement, module)}
    done, todo = {module}, [*whole]
    while todo:
        if (name := todo.pop()) not in done and project_file(name):
            tree = parse(name)
            texts.append(ast.unparse(tree))
            todo += imported_by(tree, name)
        done.add(name)
    return sorted(texts)


@functools.cache  # it is asked for each name
def definitions_of(module: str) -> dict[str, list[ast.stmt]]:
    """The statements of a module that define or change each name."""
    found: dict[str, list[ast.stmt]] = {}
    for statement in parse(module).body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            for each in statement.names:
                alone = copy.copy(statement)
                alone.names = [each]
                found.setdefault(each.asname or each.name.partition(".")[0], []).append(alone)
            continue
        nodes = [*ast.walk(statement)]
        if isinstance(statement, DEFINITIONS):
            names = {statement.name}
        else:  # TABLE["a"] = b changes TABLE
            used = [node for node in nodes if isinstance(node, ast.Name)]
            stored = [node for node in used if isinstance(node.ctx, ast.Store)]
            names = {node.id for node in stored or used}
            names |= {node.name for node in nodes if isinstance(node, DEFINITIONS)}
            imported = [node for node in nodes if isinstance(node, ast.alias)]
            names |= {each.asname or each.name.partition(".")[0] for each in imported}
        for name in names:
            found.setdefault(name, []).append(statement)
    return found


def imported_by(tree: ast.AST, module: str) -> Iterator[str]:
    """The names of what is imported in some code: modules, and perhaps what they define."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            in_package = project_file(module).endswith("__init__.py")
            package = module if in_package else module.rpartition(".")[0]
            name = "." * node.level + (node.module or "")
            with suppress(ImportError):  # .helper of a module that is in no package
                source = importlib.util.resolve_name(name, package)
                yield source
                yield from (f"{source}.{each.name}" for each in node.names)


@functools.cache
def project_file(module: str) -> str:
    """The file of a module of the project; empty: it is another's, or there is none."""
    top = module.partition(".")[0]
    try:
        if module != top:  # finding it imports what it is in
            places = importlib.util.find_spec(top).submodule_search_locations
            if not places or is_foreign([*places][0]):
                return ""
        file = getattr(sys.modules.get(module), "__file__", None)
        file = file or importlib.util.find_spec(module).origin or ""
    except (ImportError, ValueError, AttributeError):  # no such module
        return ""
    return file if file.endswith(".py") and not is_foreign(file) else ""


def is_foreign(path: str) -> bool:
    packages = {"site-packages", "dist-packages"} & {*Path(path).parts}
    return bool(packages) or any(f"{path}/".startswith(f"{place}/") for place in FOREIGN)


@functools.cache  # an edit during the preparation must not change the key
def read_source(file: str) -> str:
    if STARTED < os.stat(file).st_mtime <= time.time():  # in the future: another clock's time
        raise ValueError(f"{one_line(file, 200)} was edited after the start: start again")
    return Path(file).read_text(encoding="utf-8")


def parse(module: str) -> ast.Module:
    """The code of a module of the project, without docstrings and the annotations of functions."""
    tree = ast.parse(read_source(project_file(module)))
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        if isinstance(node, (ast.Module, *DEFINITIONS)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree
