"""How a model sees images: their size and normalization, rows of prepared data, crops and mixup."""

import errno
import functools
import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from samestep.base.console import one_line
from samestep.data import images
from samestep.data.images import resize
from samestep.data.views import Rows
from samestep.models import classification, pretrained

# Other errors of the operating system may pass. Decoders raise OSError without a number.
_FAULTS_OF_FILES = (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES)
_PROCESSOR = "preprocessor_config.json"  # in the folder of prepared data, and of the exported model
Row = dict[str, Any]


# ---- Image processor -----------------------------------------------------------------------------


def prepare_processor(cfg: Any, folder: Path) -> None:
    """Saves the image processor in `folder`, unless that of a run that resumes is there.

    It crops as `images.middle` does, whatever that of a pretrained model does, so that a pipeline
    sees images as the model has seen them here. Their pixels are those of the pretrained model's.
    """
    if (folder / _PROCESSOR).exists():
        return
    side, mean, std = cfg.image_size, [0.5] * 3, [0.5] * 3
    if cfg.model_name_or_path:
        from transformers import AutoImageProcessor

        own = pretrained.load(AutoImageProcessor, cfg)
        side, mean, std = _measure_processor(own, cfg.model_name_or_path)
    with pretrained.quiet():  # without torchvision, transformers remarks that it uses Pillow
        from transformers import BitImageProcessor

        BitImageProcessor(
            size={"shortest_edge": side},
            crop_size={"height": side, "width": side},
            resample=Image.Resampling.BICUBIC,
            image_mean=mean,
            image_std=std,
        ).save_pretrained(folder)


def _measure_processor(own: Any, name: str) -> tuple[int, list[float], list[float]]:
    """What read_processor returns, for the image processor of the pretrained model `name`.

    An image of four colors goes through it: black and white say what it subtracts and divides by,
    however its settings are called, and the others whether that is all that it does. Raises
    ValueError for a processor that does anything else to pixels.
    """
    image = np.zeros((94, 94, 3), np.uint8)  # no model has this size
    image[:47, 47:], image[47:, :47], image[47:, 47:] = 255, (255, 128, 0), (0, 64, 192)
    found = np.asarray(own(Image.fromarray(image), return_tensors="np").get("pixel_values", 0))
    side = (0, *found.shape)[-1]
    if found.shape != (1, 3, side, side) or side == len(image) or side > 8192:
        text = f"the image processor of {name} makes pixels of the shape {found.shape} of an image"
        raise ValueError(f"task.model_name_or_path: {text}; give one that makes squares of a size")
    near, far = side // 8, side - 1 - side // 8  # inside the colors, also where edges are cut off
    places = np.ix_([near, far], [near, far])
    theirs = found[0].transpose(1, 2, 0)[places].astype(float)
    black, white = theirs[0]
    span = np.where(white == black, 1.0, white - black)
    mean, std = np.round(-black / span, 6), np.round(1 / span, 6)
    ours = (resize(image, side)[places] / 255 - mean) / std
    if (worst := np.abs(theirs - ours)).max() > 1e-3:
        place = np.unravel_index(worst.argmax(), worst.shape)
        text = f"the image processor of {name} gives a pixel {theirs[place]:.4g}"
        hint = "give a model whose processor resizes, subtracts and divides alone"
        raise ValueError(
            f"task.model_name_or_path: {text}, training would give it {ours[place]:.4g}; {hint}"
        )
    return side, mean.tolist(), std.tolist()


@functools.cache
def read_processor(folder: Path) -> tuple[int, list[float], list[float]]:
    """Side in pixels of what the model sees; mean and standard deviation of the channels.

    It reads the file of the processor, since loading it would import transformers.
    """
    own = json.loads((folder / _PROCESSOR).read_text(encoding="utf-8"))
    return own["crop_size"]["height"], own["image_mean"], own["image_std"]


# ---- Rows ----------------------------------------------------------------------------------------


class Images(Rows):
    """Rows of a split: image, uint8 (S, S, 3), decoded when it is used, and label. The digest is
    that of the files of the images, and the labels."""

    sizes = None  # type: ignore[assignment]  # all have one size

    def __init__(self, dataset: Any, folder: Path):
        super().__init__(dataset, ["digest", "label"], [], None)
        self.side = read_processor(folder)[0]

    def __getitems__(self, places: list[int]) -> list[Row]:
        rows = self.dataset.__getitems__(places)
        return [{"image": decode(row, self.side), "label": row["label"]} for row in rows]


def decode(row: Row, side: int) -> np.ndarray:
    """The middle of the image of a prepared row; raises ValueError, which names the image, where it
    is not the one that was prepared."""
    problem = "it has changed"
    try:
        content = row["bytes"] or images.read_bytes(os.fsdecode(row["path"]))
        if hashlib.sha256(content).hexdigest() == row["digest"]:
            return images.middle(content, side)
    except Exception as error:
        passing = isinstance(error, OSError) and error.errno not in _FAULTS_OF_FILES
        if passing or isinstance(error, MemoryError):
            raise
        problem = getattr(error, "strerror", None) or one_line(error)
    hint = "put back the image that was prepared, and the same command continues"
    raise ValueError(f"task.data: {row['place']}: {problem}; {hint}")


def augment(row: Row, generator: torch.Generator, cfg: Any, data: Any) -> Row:
    """A random crop, or its mirror; with mixup it is mixed with that of another image.

    The label becomes a distribution, float32 (classes,), if it is smoothed or mixed.
    """
    side, classes = read_processor(data.folder)[0], data["train"].features["label"].num_classes
    image, label = crop(row["image"], generator, cfg, side), row["label"]
    if cfg.label_smoothing or cfg.mixup:
        label = _smooth(label, cfg.label_smoothing, classes)
    if cfg.mixup:
        others = data["train"]
        other = others[int(torch.randint(len(others), (), generator=generator))]
        seed = int(torch.randint(2**62, (), generator=generator))
        share = float(np.random.default_rng(seed).beta(cfg.mixup, cfg.mixup))
        pixels = crop(decode(other, side), generator, cfg, side)
        image = (share * image + (1 - share) * pixels + 0.5).astype(np.uint8)
        label = share * label + (1 - share) * _smooth(other["label"], cfg.label_smoothing, classes)
    return {"image": image, "label": label}


def _smooth(label: int, part: float, classes: int) -> np.ndarray:
    """A class as a distribution, float32 (classes,), of which a part is spread over all."""
    spread = np.full(classes, part / classes, np.float32)
    spread[label] += 1 - part
    return spread


def crop(image: np.ndarray, generator: torch.Generator, cfg: Any, side: int) -> np.ndarray:
    """A random crop, its aspect ratio between 3:4 and 4:3, as the model's square; or its mirror."""
    area, ratio, x, y, mirror = torch.rand(5, generator=generator).tolist()
    box = None
    if cfg.min_crop < 1:
        root = math.sqrt(1 - area * (1 - cfg.min_crop))
        stretch = (4 / 3) ** (ratio - 0.5)
        width, height = (len(image) * min(1, part) for part in (root * stretch, root / stretch))
        left, top = x * (len(image) - width), y * (len(image) - height)
        box = (left, top, left + width, top + height)
    if box or len(image) != side:
        image = resize(image, side, box)
    return image[:, ::-1] if cfg.flip and mirror < 0.5 else image


def pixel_values(rows: list[Row], cfg: Any, data: Any) -> torch.Tensor:
    """What the model sees, normalized: float32 (B, 3, side, side)."""
    side, *scale = read_processor(data.folder)
    squares = [row["image"] for row in rows]
    squares = [each if len(each) == side else resize(each, side) for each in squares]
    pixels = torch.from_numpy(np.stack(squares)).permute(0, 3, 1, 2)
    layout = torch.channels_last if cfg.channels_last else torch.contiguous_format
    pixels = pixels.contiguous(memory_format=layout).float()  # moved while they are bytes
    mean, std = (torch.tensor(each)[:, None, None] for each in scale)
    return pixels.div_(255).sub_(mean).div_(std)


# ---- What the trained model is asked -------------------------------------------------------------


def report(sums: dict, output: Path, data: Any) -> dict[str, Any]:
    """The scores of each class, and a picture of the confusion."""
    names = data["train"].features["label"].names
    return classification.report_table(sums["table"], names, output)


def test_inputs(rows: list[Row], cfg: Any, data: Any) -> list[tuple[Any, dict]]:
    """Test inputs of the export: images as the model sees them, and their pixel values."""
    side = read_processor(data.folder)[0]
    asked = [Image.fromarray(resize(row["image"], side)) for row in rows]
    values = [{"pixel_values": pixel_values([row], cfg, data)} for row in rows]
    return [*zip(asked, values, strict=True)]
