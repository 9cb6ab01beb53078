"""The code of the project that a function runs, for the key of what the function prepares.

It is found by the names in the source: functions, classes and constants of the function's module
and of other modules of the project, this library among them, and what these use in turn. Comments,
docstrings, annotations of functions and formatting do not count, and other packages neither.
"""

import ast
import functools
import importlib.util
import os
import symtable
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

from samestep.base.console import one_line

STARTED = time.time()
INSTALLED = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
LIBRARY = f"{Path(__file__).parents[1]}{os.sep}"
EVERYTHING = "*"  # in place of a name: all of a module
IMPORTS = (ast.Import, ast.ImportFrom)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
Place = tuple[str, str]  # a module and a name in it


def own_code(roots: Iterable[Callable], without: Iterable[str] = ()) -> list[str]:
    """The statements that define the functions and all that they use, in the same order everywhere.

    `without`: modules that are left out. Raises ValueError if a file was edited since the start:
    the code that runs may be older.
    """
    # Of partial(function, ...) the function; what it is bound to is in its module, or is a value.
    roots = [root.func if isinstance(root, functools.partial) else root for root in roots]
    todo = [(root.__module__, root.__qualname__.partition(".")[0]) for root in roots]
    code: dict[Place, list[str]] = {}
    while todo:
        module, name = place = todo.pop()
        if place not in code and module not in without and find_file(module):
            code[place], more = read_place(module, name)
            todo += more
    return sorted(text for texts in code.values() for text in texts)


@functools.cache
def read_place(module: str, name: str) -> tuple[list[str], list[Place]]:
    """The statements that define a name of a module, and the places that they use."""
    definitions, texts, used = read_module(module), [], []
    if name == EVERYTHING:
        plain = [each for each, found in definitions.items() if not isinstance(found[0], IMPORTS)]
        return texts, [(module, each) for each in plain]
    if name not in definitions and find_file(f"{module}.{name}"):
        return texts, [(f"{module}.{name}", EVERYTHING)]
    for statement in definitions.get(name) or definitions.get(EVERYTHING, []):
        if isinstance(statement, IMPORTS):  # one may be: from a import *
            for alias, place in imported(statement, module):
                if alias.partition(".")[0] in (name, EVERYTHING):
                    used.append((place[0], name) if alias == EVERYTHING else place)
        else:
            texts.append(ast.unparse(statement))
            used += places_in(statement, texts[-1], module)
    return texts, used


def places_in(statement: ast.stmt, text: str, module: str) -> Iterator[Place]:
    """The places that a statement uses: `text.FILE` is FILE of the module text."""
    attributes: dict[str, set[str]] = {}
    for node in ast.walk(statement):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            attributes.setdefault(node.value.id, set()).add(node.attr)
        elif isinstance(node, IMPORTS):
            yield from (place for _, place in imported(node, module))
    for name in global_names(symtable.symtable(text, module, "exec")):
        imports = [each for each in read_module(module).get(name, []) if isinstance(each, IMPORTS)]
        found = dict(chain(*(imported(each, module) for each in imports)))
        other, what = found.get(name, (module, name))
        if what == EVERYTHING:
            yield from ((other, each) for each in attributes.get(name, [EVERYTHING]))
        else:
            yield module, name


def global_names(table: symtable.SymbolTable) -> set[str]:
    """The names of the module that code uses, with those of the functions inside it."""
    top = table.get_type() == "module"
    found = {each.get_name() for each in table.get_symbols() if top or each.is_global()}
    return found.union(*map(global_names, table.get_children()))


def imported(statement: ast.Import | ast.ImportFrom, module: str) -> Iterator[tuple[str, Place]]:
    """The names that a statement imports, and what they stand for; of `import a.b` the name a.b."""
    for each in statement.names:
        alias = each.asname or each.name
        if isinstance(statement, ast.Import):
            yield alias, (each.name, EVERYTHING)
            continue
        source = statement.module or ""
        if statement.level:
            inside_package = find_file(module).endswith("__init__.py")
            base = [*module.split("."), *[""] * inside_package][: -statement.level]
            source = ".".join([*base, source] if source else base)
        inside = f"{source}.{each.name}"
        yield alias, (inside, EVERYTHING) if find_file(inside) else (source, each.name)


# ---- Modules -------------------------------------------------------------------------------------


@functools.cache
def find_file(module: str) -> str:
    """The file of a module of the project; empty: it is another's, or there is none."""
    top = module.partition(".")[0]
    try:
        if module != top:  # finding it imports what it is in
            places = importlib.util.find_spec(top).submodule_search_locations
            if not places or is_installed([*places][0]):
                return ""
        file = getattr(sys.modules.get(module), "__file__", None)
        file = file or importlib.util.find_spec(module).origin or ""
    except (ImportError, ValueError, AttributeError):  # no such module
        return ""
    return file if file.endswith(".py") and not is_installed(file) else ""


def is_installed(path: str) -> bool:
    if f"{path}{os.sep}".startswith(LIBRARY):
        return False  # this library, wherever it lies
    packages = {"site-packages", "dist-packages"} & {*Path(path).parts}
    return bool(packages) or any(path.startswith(f"{place}{os.sep}") for place in INSTALLED)


@functools.cache  # an edit during the preparation must not change the key
def read_source(module: str) -> str:
    file = find_file(module)
    if STARTED < os.stat(file).st_mtime <= time.time():  # in the future: another clock's time
        raise ValueError(f"{one_line(file, 200)} was edited after the start: start again")
    return Path(file).read_text(encoding="utf-8")


@functools.cache
def read_module(module: str) -> dict[str, list[ast.stmt]]:
    """The statements of a module that define or change each name."""
    found: dict[str, list[ast.stmt]] = {}
    for statement in without_remarks(ast.parse(read_source(module))).body:
        if isinstance(statement, DEFINITIONS):
            names = {statement.name}
        elif isinstance(statement, IMPORTS):
            names = {each.asname or each.name.partition(".")[0] for each in statement.names}
        else:  # TABLE["a"] = b changes TABLE
            every = [each for each in ast.walk(statement) if isinstance(each, ast.Name)]
            stored = [each for each in every if isinstance(each.ctx, ast.Store)]
            inner = [each for each in ast.walk(statement) if isinstance(each, DEFINITIONS)]
            names = {each.id for each in stored or every} | {each.name for each in inner}
        for name in names:
            found.setdefault(name, []).append(statement)
    return found


def without_remarks(tree: ast.Module) -> ast.Module:
    """The same code without docstrings and the annotations of functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        for name in ("body", "orelse", "finalbody"):
            if isinstance(body := getattr(node, name, None), list):
                kept = [each for each in body if not is_text(each)]
                setattr(node, name, kept or [ast.Pass()] * (len(body) > 0))
    return tree


def is_text(statement: ast.AST) -> bool:
    value = getattr(statement, "value", None) if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)
