"""Columns of a row by their roles.

A row is a pair: a dict with a value for each role that a task asks for (text, label, ...), and its
place (file and line), which error messages name.
"""

import itertools
from collections.abc import Container, Iterable
from typing import Any

from samestep.base.console import one_line

Row = tuple[dict[str, Any], str]
Columns = dict[str, str | list[str]]  # for each role its column, or several
SEPARATORS = {".csv": ",", ".tsv": "\t"}


def column_names(columns: Columns) -> list[str]:
    """The columns of all roles, each once."""
    names = [[name] if isinstance(name, str) else name for name in columns.values()]
    return sorted({*itertools.chain(*names)})


def check_columns(
    existing: Iterable[str], columns: Columns | None, optional: Container[str] = ()
) -> None:
    """Raises ValueError for a missing or ambiguous column; names the existing ones and the flag."""
    names = list(existing)
    for role in columns or {}:
        for name in column_names({role: columns[role]}):
            number = names.count(name)
            if number > 1 or (number == 0 and role not in optional):
                shown = one_line(", ".join(names[:20]), 100)
                problem = "more than one column" if number else "no column"
                field = f"{role}_column" if name == columns[role] else f"{role}_columns"
                hint = f"name the right one with --task.{field}"
                raise ValueError(f"{problem} {one_line(name, 60)} among {shown}; {hint}")


def select_columns(row: dict, columns: Columns | None) -> dict[str, Any]:
    """The values of each role; call `check_columns` before."""
    if columns is None:
        return replace_surrogates(row)
    return {
        role: replace_surrogates(row.get(name))
        if isinstance(name, str)
        else {each: replace_surrogates(row.get(each)) for each in name}
        for role, name in columns.items()
    }


def replace_surrogates(value: Any) -> Any:
    """JSON can spell half of a surrogate pair, which is not a character: `?` replaces it."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, list):
        return [replace_surrogates(each) for each in value]
    if isinstance(value, dict):
        return {replace_surrogates(key): replace_surrogates(each) for key, each in value.items()}
    return value
