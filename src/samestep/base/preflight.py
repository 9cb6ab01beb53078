"""What a program does before its other imports, which take seconds: import this module first.

Until the program handles signals itself, Ctrl-C ends it with one line.
"""

import contextlib
import os
import re
import signal
import sys
from pathlib import Path

STOPPED = 75  # exit code: stopped on request; the same command continues
BEFORE = "stopped before it began; the same command starts again"
TRAINING = ("train.py", "train_pipeline.py")
# What a launcher sets for each process, with the values of a single one.
LAUNCHED = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "", "MASTER_PORT": ""}


def begin() -> None:
    """Refuses an environment that no program here can work in, and makes Ctrl-C quiet."""
    main = os.path.realpath(getattr(sys.modules["__main__"], "__file__", None) or "")
    program = os.path.basename(main)
    if main == os.path.realpath(f"{os.path.dirname(__file__)}/../__main__.py"):
        program = " ".join(["samestep", *sys.argv[1:2]])
    elif program not in TRAINING:
        return  # a test or a notebook
    # DDP advises against find_unused_parameters, without which a branch for some rows hangs, and
    # sums are added in another order after each start.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:  # not in the background
        signal.signal(signal.SIGINT, lambda *_: leave(STOPPED, program, BEFORE))
    project = Path(os.getcwd() if program not in TRAINING else os.path.dirname(main))
    if problem := find_problem() or other_library(project):
        leave(2, program, problem)


def leave(code: int, program: str, line: str) -> None:
    """Ends this process at once; process 0 of a launch prints the line."""
    if os.environ.get("RANK", "0") == "0" or code == 2:
        with contextlib.suppress(OSError):  # nobody listens
            os.write(2, f"{program}: {line}\n".encode(errors="backslashreplace"))
    write_exit_code(code)
    os._exit(code)


def write_exit_code(code: int | str) -> None:
    """Writes the exit code for samestep launch on this machine: accelerate makes each one 1."""
    if os.environ.get("LOCAL_RANK", "0") == "0" and "EXIT_CODE_FILE" in os.environ:
        with contextlib.suppress(OSError):
            Path(os.environ["EXIT_CODE_FILE"]).write_text(str(code))


def find_problem() -> str:
    """What is wrong with the environment; empty: nothing."""
    left = [n for n, alone in LAUNCHED.items() if alone and os.environ.get(n, alone) != alone]
    missing = [n for n in LAUNCHED if n not in os.environ and n != "LOCAL_RANK"]
    if not left or not missing:
        return ""
    what = f"{left[0]} is {os.environ[left[0]][:60]!r} and {missing[0]} is not set"
    return f"{what}, which no launcher does: unset {' '.join(left)}"


def other_library(project: Path) -> str:
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


begin()
