"""What is done with an exception: it is kept, or it becomes a line and the run goes on."""

from collections.abc import Callable
from typing import Any

from samestep.base.console import one_line, print_on_main


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
