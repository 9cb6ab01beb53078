"""Lists the names of the library that a file uses: what its reader has to look up.

    python tests/library_names.py                             # those of templates/TASK/task.py
    python tests/library_names.py templates/causal_lm/task.py

A name is what a file imports from a module, or an attribute of a module that it imports:
`next_token.loss_sum` is one name however often it stands there, and so is `TaskFields` with all of
its attributes. A module of which no attribute is used counts by itself.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "src"
LIBRARY = "samestep"


def is_module(dotted: str) -> bool:
    """Whether a dotted name is a module or a package of the library."""
    path = SOURCES.joinpath(*dotted.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def imported(tree: ast.AST) -> dict[str, str]:
    """The names under which a file knows parts of the library: the dotted name of each."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] != LIBRARY:
                    continue
                if alias.asname:
                    found[alias.asname] = alias.name
                else:  # `import samestep.base.preflight` binds the first name alone
                    found[LIBRARY] = LIBRARY
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == LIBRARY:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def library_names(source: str) -> list[str]:
    """The names of the library that a file with this text uses, sorted, each without `samestep.`

    Each goes up to the first part that is no module: of `next_token.loss_sum.__doc__` it is
    `models.next_token.loss_sum`.
    """
    tree = ast.parse(source)
    known = imported(tree)
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Name, ast.Attribute)) or isinstance(node.ctx, ast.Store):
            continue
        first, *rest = ast.unparse(node).split(".")
        if first not in known or not all(map(str.isidentifier, rest)):
            continue
        dotted = known[first]
        for part in rest:
            if not is_module(dotted):
                break
            dotted = f"{dotted}.{part}"
        found.add(dotted)
    modules = {name for name in found if any(each.startswith(f"{name}.") for each in found)}
    return sorted(name.removeprefix(f"{LIBRARY}.") for name in found - modules)


def main(paths: list[Path]) -> None:
    """Prints the names of each file below their number."""
    for path in paths:
        names = library_names(path.read_text(encoding="utf-8"))
        print(f"{path.parent.name}/{path.name}: {len(names)}")
        for name in names:
            print(f"    {name}")


if __name__ == "__main__":
    given = [Path(each) for each in sys.argv[1:]]
    main(given or sorted((ROOT / "templates").glob("*/task.py")))
