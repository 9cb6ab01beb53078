"""Counts lines and tokens by room. After a merge: python tests/limits.py > tests/limits.json

It prints today's counts, rounded up: a room that shrinks takes its limit along. Tokens are counted
beside lines, so that denser lines gain nothing; comments and line breaks are none.
"""

import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = ROOT / "{{cookiecutter.project_slug}}"
LIBRARY = ROOT / "src" / "samestep"
MAX_LINES = 300  # of a file that people own: it may grow up to this
UNCOUNTED = "COMMENT NL NEWLINE INDENT DEDENT ENCODING ENDMARKER".split()


def rooms() -> dict[str, list[Path]]:
    """The files of each room, by its name."""
    found = {"src/samestep/*.py": sorted(LIBRARY.glob("*.py"))}
    for folder in sorted(LIBRARY.iterdir()):
        files = sorted(folder.rglob("*.py"))
        if files:
            found[f"src/samestep/{folder.name}"] = files
    found["tests"] = sorted((ROOT / "tests").rglob("*.py"))
    found["template"] = sorted([*ROOT.glob("local_extensions/*.py"), *ROOT.glob("hooks/*.py")])
    found["train.py"] = [PROJECT / "train.py"]
    for path in sorted((ROOT / "templates").glob("*/task.py")):
        found[f"{path.parent.name}.py"] = [path]
    return found


def count_tokens(path: Path) -> int:
    """The tokens of a file; an f-string is one, as in Python below 3.12."""
    total = 0
    inside = 0  # f-strings that are open
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            name = tokenize.tok_name[token.type]
            if name == "FSTRING_START":
                if inside == 0:
                    total += 1
                inside += 1
            elif name == "FSTRING_END":
                inside -= 1
            elif inside == 0 and name not in UNCOUNTED:
                total += 1
    return total


def count(files: list[Path]) -> dict[str, int]:
    """The lines and tokens of some files."""
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    return {"lines": lines, "tokens": sum(map(count_tokens, files))}


def main() -> None:
    """Prints today's counts as limits.json has them, a room a line."""
    entries = []
    for name, files in rooms().items():
        counts = count(files)
        lines = MAX_LINES if len(files) == 1 else -(-counts["lines"] // 10) * 10
        tokens = -(-counts["tokens"] // 100) * 100
        entries.append(f'  "{name}": {{"lines": {lines}, "tokens": {tokens}}}')
    print("{\n" + ",\n".join(entries) + "\n}")


if __name__ == "__main__":
    main()
