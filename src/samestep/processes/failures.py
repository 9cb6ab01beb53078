"""From an error to a line, a status and an exit code: of train.py and of any script."""

import errno
import os
import sys
import traceback
from pathlib import Path

from samestep.base import run_folder
from samestep.base.console import is_main, one_line, print_json, read_place, without_credentials
from samestep.base.errors import Failed, UserError, catch, describe_os_error, is_out_of_memory
from samestep.base.files import DISK_FULL, replace_text
from samestep.base.launching import STOPPED


class Ended(SystemExit):
    """The end of a run that has told it, with its exit code: 75 where it was asked to stop."""


def speaks_for(error: BaseException) -> bool:
    """Whether this process prints the line about an error: the main one, unless that is gone."""
    rank, processes = read_place()
    return processes == 1 or rank == getattr(error, "speaker", 0)


def report(
    error: BaseException, program: str, output: Path | None = None, in_script: bool = False
) -> int:
    """Prints a line about an error, and writes it to status.json in `output`; the exit code.

    One process does so: the main one, unless that is gone. Of an error that nobody has foreseen,
    each process that has it tells what it is and where it was raised. The traceback then goes to a
    file of the run folder; without a folder, or with SAMESTEP_TRACEBACK=1, to the screen. With
    `in_script` each process prints its line, and tracebacks go to the screen.
    """
    if isinstance(error, Ended):
        return int(error.code or 0)
    code, line = exit_code_of(error)
    speaks = speaks_for(error)
    if speaks and output:
        state = "stopped" if code == STOPPED else "failed"
        reason = one_line(line or repr(error), 1000)
        written, _ = catch(run_folder.write_final_status, output, state, reason, code)
        speaks = written is not False
    speaks = speaks or in_script
    if not line and not isinstance(error, SystemExit):
        text = without_credentials("".join(traceback.format_exception(error)))
        on_screen = in_script or os.environ.get("SAMESTEP_TRACEBACK") == "1"
        folder = None if on_screen else output
        file = (folder or Path()) / f"error{'' if is_main() else '-' + os.environ['RANK']}.txt"
        if not folder or catch(replace_text, file, text)[1]:  # the disk is full, or it is gone
            sys.stderr.write(text)
            return code
        frames = traceback.extract_tb(error.__traceback__)
        own = [each for each in frames if "site-packages" not in each.filename] or frames
        place = f"{Path(own[-1].filename).name}, line {own[-1].lineno}"
        words = one_line(error, 300)
        line, speaks = f"{type(error).__name__}: {words} ({place}); traceback: {file}", True
    if isinstance(error, Failed) and program == "train.py":
        line = f"{error}; the same command continues from the newest checkpoint"
    if line and speaks:
        print_json(code, error=line)
        print(f"{program}: {one_line(line, 1000)}", file=sys.stderr)
    return code


def exit_code_of(error: BaseException) -> tuple[int, str | None]:
    """The exit code for an error, and one line about it; None instead asks for a traceback."""
    if isinstance(error, UserError):
        return 2, str(error)
    if isinstance(error, Failed):
        return 1, str(error)
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return 2, f"{describe_os_error(error)}: free some space; saved checkpoints are kept"
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        return 2, f"{describe_os_error(error)}: allow more open files, with ulimit -n"
    if isinstance(error, FileNotFoundError) and error.strerror == run_folder.REMOVED:
        return 1, describe_os_error(error)
    if is_out_of_memory(error):
        remedy = "give --micro_batch_size auto, or a lower number, and start again"
        return 1, f"the memory is full: {error}; {remedy}"
    if isinstance(error, SystemExit) and error.code == STOPPED:
        return STOPPED, "stopped before the first step; the same command starts again"
    if isinstance(error, SystemExit):
        return (1, error.code) if isinstance(error.code, str) else (error.code or 0, None)
    return 1, None
