"""Write the library's wheel, drop what was not chosen, say what is next. No answer stands here."""

import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

TEMPLATE = os.fsdecode(bytes.fromhex("{{ template_root }}"))
NEXT_STEPS = """\
The project is ready. Next:
  cd {folder}
  make setup    # once: a virtual environment with PyTorch
  make train    # trains on this machine, without the network
"""


def main():
    """Tidy the new project, and say where it is as seen from where cookiecutter was started."""
    project = Path.cwd()
    # By name: with --overwrite-if-exists other folders here may be the owner's.
    for name in (".mypy_cache", ".pytest_cache", ".ruff_cache", "__pycache__", "tests/__pycache__"):
        shutil.rmtree(project / name, ignore_errors=True)
    for path in [*project.glob("configs/train/*.yaml"), *project.glob("cluster/*")]:
        if path.is_file() and not path.read_bytes().strip():  # rendered for another answer
            path.unlink()
    with contextlib.suppress(OSError):  # something is in it, or it is not there
        (project / "cluster").rmdir()
    sys.path.insert(0, TEMPLATE)
    from local_extensions import wheel

    wheel.write(project / "vendor")
    start = Path(os.environ.get("PWD", project.parent))
    folder = project.relative_to(start) if start in project.parents else project
    # An update bakes into a temporary folder only to compare: nobody will work there.
    if folder != project or Path(tempfile.gettempdir()).resolve() not in project.parents:
        with contextlib.suppress(OSError):  # nobody listens: cookiecutter would remove all
            os.write(1, f"{NEXT_STEPS.format(folder=folder)}\n".encode(errors="surrogateescape"))


if __name__ == "__main__":
    main()
