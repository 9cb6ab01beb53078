"""One image: opened safely, put on a background, cut to a square."""

import io
import os
import stat
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageColor, ImageOps, UnidentifiedImageError

from samestep.base.console import one_line

# Pillow opens many more formats, EPS by starting Ghostscript.
IMAGES = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")


def open_image(source: str | Path | bytes) -> Any:
    """A Pillow image of a path or of bytes, not decoded yet, in one of the formats of IMAGES.

    Raises OSError or ValueError for anything else, and for more than 8 bits a channel, which RGB
    would cut off at 255.
    """
    warnings.filterwarnings("ignore", module="PIL")  # odd metadata, many pixels
    if isinstance(source, bytes):
        source = io.BytesIO(source)
    elif not stat.S_ISREG(os.stat(os.fspath(source)).st_mode):
        raise ValueError("it is a folder, a pipe or a device")
    try:
        image = Image.open(source, formats=IMAGES)
    except UnidentifiedImageError:
        raise UnidentifiedImageError(f"its format is none of {', '.join(IMAGES)}") from None
    if image.mode.startswith(("I", "F")):
        raise ValueError(f"its pixels have more than 8 bits (mode {image.mode})")
    return image


def flatten(image: Any, background: str) -> Any:
    """A Pillow image in RGB; the background shows where it is transparent."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    ground = Image.new("RGBA", image.size, background)
    return Image.alpha_composite(ground, image.convert("RGBA")).convert("RGB")


def is_color(text: str) -> bool:
    """Whether Pillow knows this text as an opaque colour."""
    try:
        color = ImageColor.getrgb(text)
    except ValueError:
        return False
    return len(color) == 3 and max(color) <= 255


def upright(image: Any) -> tuple[Any, str]:
    """A Pillow image turned as its EXIF block says, and what is wrong with the block, if anything:
    then it stays as it is. Raises what the decoder raises."""
    image.load()  # the block of some formats is behind the pixels
    try:
        return ImageOps.exif_transpose(image), ""
    except Exception as error:  # Pillow raises SyntaxError, struct.error and others for it
        return image, one_line(error)


def square(image: Any, side: int, background: str = "white") -> np.ndarray:
    """The middle of an image, upright and opaque: uint8 (side, side, 3), side in pixels.

    `image`: a path, bytes, or a Pillow image.
    """
    if not isinstance(image, Image.Image):
        image = open_image(image)
        image.draft(None, (2 * side, 2 * side))  # a large JPEG is decoded at a fraction of its size
    image = flatten(upright(image)[0], background)
    return np.asarray(ImageOps.fit(image, (side, side), Image.Resampling.BICUBIC))


def resize(image: np.ndarray, side: int, box: tuple | None = None) -> np.ndarray:
    """The image, or a box of it (left, top, right, bottom, in pixels), as a square of this side."""
    return np.asarray(Image.fromarray(image).resize((side, side), Image.Resampling.BICUBIC, box))
