"""Drop what the task has no use for, and what tools left behind; print what to do next."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

CACHES = (".mypy_cache", ".pytest_cache", ".ruff_cache")
NEXT_STEPS = """\
The project is ready. Next:
  cd {folder}
  make setup    # once: a virtual environment with PyTorch
  make train    # trains on this machine, without the network
"""


def main():
    """Tidy the new project, and say where it is as seen from where cookiecutter was started."""
    project = Path.cwd()
    # By name: with --overwrite-if-exists other folders and recipes here may be the owner's.
    for cache in [*map(project.joinpath, CACHES), *project.rglob("__pycache__")]:
        if cache.is_dir() and not cache.is_symlink():
            shutil.rmtree(cache)
    for recipe in project.glob("configs/train/*.yaml"):
        if recipe.is_file() and not recipe.read_bytes().strip():
            recipe.unlink()
    for module in ("chats", "confusion"):
        if f"\nimport {module}\n".encode() not in (project / "task.py").read_bytes():
            (project / f"{module}.py").unlink()
    start = Path(os.environ.get("PWD", project.parent))
    if start in project.parents:
        say(NEXT_STEPS.format(folder=project.relative_to(start)))
    # `cruft update` bakes into a temporary folder only to compare: nobody will work there.
    elif Path(tempfile.gettempdir()).resolve() not in project.resolve().parents:
        say(NEXT_STEPS.format(folder=project))


def say(text):
    """Print text if that is possible: cookiecutter would remove the project if this failed."""
    with contextlib.suppress(OSError):  # closed, full, or nobody listens
        os.write(1, f"{text}\n".encode(errors="surrogateescape"))


if __name__ == "__main__":
    main()
