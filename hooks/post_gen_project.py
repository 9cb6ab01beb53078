"""Write the library's wheel, drop what was not chosen, print what to do next."""

import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

CACHES = (".mypy_cache", ".pytest_cache", ".ruff_cache")
TEMPLATE = os.fsdecode(bytes.fromhex("{{ '' | template_root }}"))
CLUSTER_FILES = {
    "slurm": "slurm.sbatch",
    "kubernetes": "kubernetes.yaml",
    "skypilot": "skypilot.yaml",
}
CLUSTER = "{{ cookiecutter.cluster }}"
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
    sys.path.insert(0, TEMPLATE)
    import library_wheel

    library_wheel.write(project / "vendor")
    drop_clusters(project / "cluster")
    start = Path(os.environ.get("PWD", project.parent))
    if start in project.parents:
        say(NEXT_STEPS.format(folder=project.relative_to(start)))
    # `cruft update` bakes into a temporary folder only to compare: nobody will work there.
    elif Path(tempfile.gettempdir()).resolve() not in project.resolve().parents:
        say(NEXT_STEPS.format(folder=project))


def drop_clusters(folder):
    """Remove the files of clusters that were not chosen, and the folder if nothing is left."""
    for cluster, name in CLUSTER_FILES.items():
        if CLUSTER not in (cluster, "all"):
            (folder / name).unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def say(text):
    """Print text if that is possible: cookiecutter would remove the project if this failed."""
    with contextlib.suppress(OSError):  # closed, full, or nobody listens
        os.write(1, f"{text}\n".encode(errors="surrogateescape"))


if __name__ == "__main__":
    main()
