"""Errors that become one line: what the user has to correct, and what ended another process."""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from samestep.base.console import one_line, print_on_main
from samestep.base.files import comes_again
from samestep.base.run_folder import REMOVED


class UserError(ValueError):
    """An error that the user has to correct: printed as one line, exit code 2."""

    def __init__(self, text: str):
        super().__init__(_last_line(text))


class Failed(RuntimeError):
    """An error that ended another process of the run, or that may pass: printed as one line, exit
    code 1.

    `missing`: the ranks of processes that are gone. The first that is left prints the line.
    """

    def __init__(self, text: str, missing: Sequence[int] = ()):
        super().__init__(_last_line(text))
        self.speaker = next(rank for rank in range(len(missing) + 1) if rank not in missing)


def _last_line(text: str) -> str:
    """The text of an error. A DataLoader gives an error anew, with the traceback of its worker."""
    if "in DataLoader worker process" not in text:
        return text
    return re.sub(r"^[\w.]+: ", "", text.strip().splitlines()[-1])


@contextlib.contextmanager
def as_user_error() -> Iterator[None]:
    """Turns errors that the user's input causes into UserError.

    These are ValueError, and the errors of Python, torch and the operating system for input that is
    too large, nested too deeply, or in a file that cannot be read.
    """
    try:
        yield
    except (ValueError, OverflowError, RecursionError) as error:
        raise UserError(str(error)) from error
    except OSError as error:
        if type(error) is ConnectionError:  # a task's words; Python's own errors are subclasses
            raise Failed(str(error)) from error
        # Other errors may be temporary. They count as crashes, which launchers retry.
        if not comes_again(error) or error.strerror == REMOVED:
            raise
        raise UserError(describe_os_error(error)) from error
    except (MemoryError, RuntimeError) as error:
        # torch's messages for a size that no machine has. A full GPU may have room next time.
        sizes = "DefaultCPUAllocator|overflow|negative dimension"
        if not isinstance(error, MemoryError) and not re.search(sizes, str(error)):
            raise
        raise UserError(f"there is not enough memory for these settings: {error}") from error


def describe_os_error(error: OSError) -> str:
    """The file and the reason of an error of the operating system."""
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the machine or a GPU ran out of memory."""
    words = r"out of memory|not enough memory|allocate memory|ALLOC_FAILED"
    full = isinstance(error, RuntimeError) and re.search(words, str(error))
    of_torch = type(error).__name__ == "OutOfMemoryError"  # this module needs no torch
    return bool(full) or of_torch or isinstance(error, MemoryError)


def catch(function: Callable, *arguments: Any) -> tuple[Any, Exception | None]:
    """(result, None), or (None, the exception that the function raised)."""
    try:
        return function(*arguments), None
    except Exception as error:
        return None, error


def attempt(failure: str, function: Callable, *arguments: Any) -> Any:
    """What the function returns; None, and a line, if it fails: the run goes on without it."""
    result, problem = catch(function, *arguments)
    if problem:
        print_on_main(f"{failure}: {type(problem).__name__}: {one_line(problem)}")
    return result


def some(names: list[str], most: int = 5) -> str:
    """The first names of a list, for a line."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
