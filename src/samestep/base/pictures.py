"""Pictures that replace older ones at once."""

import os
import warnings
from pathlib import Path

from matplotlib.figure import Figure


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
