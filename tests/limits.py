"""Counts the lines of each room. After a merge: python tests/limits.py > tests/limits.json

It prints today's counts, rounded up: a room that shrinks takes its limit along.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = ROOT / "{{cookiecutter.project_slug}}"
LIBRARY = ROOT / "src" / "samestep"
MAX_LINES = 300  # of a file that people own: it may grow up to this


def rooms() -> dict[str, list[Path]]:
    """The files of each room, by its name."""
    found = {"src/samestep/*.py": sorted(LIBRARY.glob("*.py"))}
    for folder in sorted(LIBRARY.iterdir()):
        files = sorted(folder.rglob("*.py"))
        if files:
            found[f"src/samestep/{folder.name}"] = files
    found["tests"] = sorted((ROOT / "tests").rglob("*.py"))
    found["benchmarks"] = sorted((ROOT / "benchmarks").glob("*.py"))
    found["template"] = sorted([*ROOT.glob("local_extensions/*.py"), *ROOT.glob("hooks/*.py")])
    found["train.py"] = [PROJECT / "train.py"]
    for path in sorted((ROOT / "templates").glob("*/task.py")):
        found[f"{path.parent.name}.py"] = [path]
    return found


def count(files: list[Path]) -> int:
    """The lines of some files."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def main() -> None:
    """Prints today's counts as limits.json has them, a room a line."""
    entries = []
    for name, files in rooms().items():
        lines = MAX_LINES if len(files) == 1 else -(-count(files) // 10) * 10
        entries.append(f'  "{name}": {{"lines": {lines}}}')
    print("{\n" + ",\n".join(entries) + "\n}")


if __name__ == "__main__":
    main()
