"""Import this module first: after an update an old library would fail without a reason."""

import contextlib
import os
import re
import sys
from pathlib import Path

from samestep.base import garbage
from samestep.base.launching import write_exit_code

# torch reads both when it is imported. DDP advises against find_unused_parameters, also where a
# weight is not used in later rows. Threads that wait give up their core: others slow each other.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _other_library(project: Path) -> str:
    """What is wrong where a project was updated, and its environment was not; empty: nothing."""
    installed, wanted = "", None  # empty: it lies beside train.py, or where it is made
    for folder in Path(__file__).resolve().parents[2].glob("samestep-*.dist-info"):
        installed = folder.name.removeprefix("samestep-").removesuffix(".dist-info")
    with contextlib.suppress(OSError, ValueError):
        text = (project / "pyproject.toml").read_text(encoding="utf-8")
        wanted = re.search(r"""["']samestep *== *([^"' ;]+)""", text)
    if not installed or not wanted or wanted[1] == installed:
        return ""
    asks = f"pyproject.toml asks for samestep {wanted[1]}"
    return f"{asks}, and {installed} is installed; run make setup"


garbage.collect_seldom()  # until the model is built
program = Path(sys.argv[0]).name.replace("__main__.py", "samestep")
if problem := _other_library(Path.cwd()) or _other_library(Path(sys.argv[0]).parent):
    sys.stderr.write(f"{program}: {problem}\n")
    write_exit_code(2)
    sys.exit(2)
if program == "train.py" and os.environ.get("RANK", "0") == "0" and sys.stderr.isatty():
    sys.stderr.write("train.py: importing torch, reading the data\n")  # seconds without a word
