"""Images: opened safely, put on a background, cut to squares."""

import io
import math
import os
import stat
import warnings
from pathlib import Path

# Pillow opens many formats more, EPS by starting Ghostscript.
IMAGES = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")


def open_image(source: str | Path | bytes):
    """A Pillow image of a path or of bytes, not decoded yet, in one of the formats of IMAGES.

    Raises OSError or ValueError for anything else; for more than 8 bits, which RGB would cut off at
    255; and beyond Pillow's limit on pixels, of which Pillow itself would only warn.
    """
    from PIL import Image, UnidentifiedImageError

    warnings.filterwarnings("ignore", module="PIL")  # odd metadata, or the limit
    if isinstance(source, bytes):
        source = io.BytesIO(source)
    elif not stat.S_ISREG(os.stat(os.fspath(source)).st_mode):
        raise ValueError("it is a folder, a pipe or a device")
    try:
        image = Image.open(source, formats=IMAGES)
    except UnidentifiedImageError:
        raise UnidentifiedImageError(f"its format is none of {', '.join(IMAGES)}") from None
    except Image.DecompressionBombError as error:
        raise ValueError(str(error)) from None
    if math.prod(image.size) > (Image.MAX_IMAGE_PIXELS or math.inf):
        width, height = image.size
        raise ValueError(
            f"it has {width:,} x {height:,} pixels, more than {Image.MAX_IMAGE_PIXELS:,}, Pillow's "
            "limit"
        )
    if image.mode.startswith(("I", "F")):
        raise ValueError(f"its pixels have more than 8 bits (mode {image.mode})")
    return image


def is_transparent(image) -> bool:
    """Whether something would show through some pixels of a Pillow image."""
    return image.has_transparency_data and image.convert("RGBA").getextrema()[3][0] < 255


def flatten(image, background: str):
    """A Pillow image in RGB; the background shows where it is transparent."""
    from PIL import Image

    if not is_transparent(image):
        return image.convert("RGB")
    ground = Image.new("RGBA", image.size, background)
    return Image.alpha_composite(ground, image.convert("RGBA")).convert("RGB")
