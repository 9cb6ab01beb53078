"""Pictures that replace older ones at once, and whose failure does not end a run."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from samestep.base.console import one_line


def save_figure(figure: Figure, output: Path) -> Path:
    """Writes a picture. Readers see the old one or the new one, never half of it."""
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # a name in letters that the font lacks
            figure.savefig(temporary, format=output.suffix[1:] or "png")
        os.replace(temporary, output)
    finally:
        temporary.unlink(missing_ok=True)
    return output


def try_picture(function: Callable[..., Path], *arguments: Any) -> Path | str:
    """The path of the picture that a function draws, or the reason why it failed."""
    try:
        return function(*arguments)
    except Exception as error:  # a picture is not worth a run, whatever the library raises
        return f"no picture: {one_line(error)}"
