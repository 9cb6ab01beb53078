"""What comes before the other imports of a program: import this module first.

After an update of the project, imports of the old library would fail without a reason.
"""

import contextlib
import os
import re
import sys
from pathlib import Path

from samestep.base.launching import write_exit_code

# DDP advises against find_unused_parameters, also where a weight is not used in later rows. torch
# reads the variable when it is imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


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


if problem := _other_library(Path.cwd()) or _other_library(Path(sys.argv[0]).parent):
    program = Path(sys.argv[0]).name.replace("__main__.py", "samestep")
    sys.stderr.write(f"{program}: {problem}\n")
    write_exit_code(2)
    sys.exit(2)
