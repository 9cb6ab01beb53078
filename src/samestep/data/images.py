"""One image: opened safely, put on white, cut to a square."""

import contextlib
import io
import os
import stat
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

# Pillow opens many more formats, EPS by starting Ghostscript.
IMAGES = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")


def read_bytes(path: str | Path) -> bytes:
    """Those of a regular file; raises ValueError for a pipe, which would block."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError("it is a folder, a pipe or a device")
    return Path(path).read_bytes()


def open_image(source: str | Path | bytes) -> Any:
    """A Pillow image of a path or of bytes, not decoded yet, in one of the formats of IMAGES.

    Raises OSError or ValueError for anything else, and for more than 8 bits a channel, which RGB
    would cut off at 255.
    """
    warnings.filterwarnings("ignore", module="PIL")  # odd metadata, many pixels
    content = source if isinstance(source, bytes) else read_bytes(source)
    try:
        image = Image.open(io.BytesIO(content), formats=IMAGES)
    except UnidentifiedImageError:
        raise UnidentifiedImageError(f"its format is none of {', '.join(IMAGES)}") from None
    if image.mode.startswith(("I", "F")):
        raise ValueError(f"its pixels have more than 8 bits (mode {image.mode})")
    return image


def upright(image: Any) -> Any:
    """A Pillow image in RGB, turned as its EXIF block says, on white where it is transparent. A
    broken block is ignored. Raises what the decoder raises."""
    image.load()  # the block of some formats is behind the pixels
    with contextlib.suppress(Exception):  # Pillow raises SyntaxError, struct.error and others
        ImageOps.exif_transpose(image, in_place=True)
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    ground = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(ground, image.convert("RGBA")).convert("RGB")


def read_plain(cell: Any, is_mask: bool) -> tuple[Any, bytes, bool]:
    """An image as a Pillow image, the bytes of a file of it, and whether its EXIF block turns it.

    `cell`: a path, bytes, or {bytes, path}. It is upright, in RGB and on white; a mask, an image of
    class numbers, stays as it is. Raises OSError or ValueError for anything else.
    """
    if isinstance(cell, dict):
        cell = cell.get("bytes") or cell.get("path")
    if not isinstance(cell, str | bytes):
        raise ValueError(f"it is {cell!r:.60}; give a path")
    content = read_bytes(cell) if isinstance(cell, str) else cell
    image = Image.open(io.BytesIO(content), formats=IMAGES) if is_mask else open_image(content)
    image.load()  # the block of some formats is behind the pixels
    turned, given = 0, True
    with contextlib.suppress(Exception):  # a broken block is ignored
        turned = image.getexif().get(ExifTags.Base.Orientation, 1)
        given = turned == 1
    if is_mask and image.mode == "1":
        image, given = image.convert("L").point(bool), False
    elif is_mask and image.mode not in ("L", "P", "I", "I;16"):
        raise ValueError(f"it has the mode {image.mode}; give class numbers, in one channel")
    elif not is_mask and not (given and image.mode == "RGB" and not image.has_transparency_data):
        image, given = upright(image), False
    if not given:
        file = io.BytesIO()
        image.save(file, "PNG", compress_level=1)
        content = file.getvalue()
    return image, content, turned in range(2, 9)


def middle(image: Any, side: int) -> np.ndarray:
    """The middle of an image, upright and opaque: uint8 (S, S, 3), S of its own.

    `image`: a path, bytes, or a Pillow image. A large JPEG is decoded at a fraction of its size, of
    at least 2 * `side`.
    """
    if not isinstance(image, Image.Image):
        image = open_image(image)
        image.draft(None, (2 * side, 2 * side))
    image = upright(image)
    size = min(image.size)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return np.asarray(image.crop((left, top, left + size, top + size)))


def resize(image: np.ndarray, side: int, box: tuple | None = None) -> np.ndarray:
    """The image, or a box of it (left, top, right, bottom, in pixels), as a square of this side."""
    return np.asarray(Image.fromarray(image).resize((side, side), Image.Resampling.BICUBIC, box))
