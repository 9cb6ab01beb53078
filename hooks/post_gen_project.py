"""Drop what the task has no use for, and what tools left behind; print what to do next."""

import os
import shutil
import tempfile
from pathlib import Path

NEXT_STEPS = """\
The project is ready. Next:
  cd {folder}
  make setup    # once: a virtual environment with PyTorch
  make train    # trains on this machine, without the network
"""


def main():
    """Tidy the new project, and say where it is as seen from where cookiecutter was started."""
    project = Path.cwd()
    for cache in [*project.glob(".*_cache"), *project.rglob("__pycache__")]:
        shutil.rmtree(cache)
    for recipe in project.glob("configs/train/*.yaml"):
        if not recipe.read_text(encoding="utf-8").strip():
            recipe.unlink()
    if "import confusion\n" not in (project / "task.py").read_text(encoding="utf-8"):
        (project / "confusion.py").unlink()
    start = Path(os.environ.get("PWD", project.parent))
    if start in project.parents:
        print(NEXT_STEPS.format(folder=project.relative_to(start)))
    # `cruft update` bakes into a temporary folder only to compare: nobody will work there.
    elif Path(tempfile.gettempdir()).resolve() not in project.resolve().parents:
        print(NEXT_STEPS.format(folder=project))


if __name__ == "__main__":
    main()
