"""Labelled images: rows of folders of classes, tables or the Hub, and how a model sees them."""

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from samestep.base.console import one_line
from samestep.data import cache, hub, labels, sources, tables
from samestep.data.tables import TABLES, Columns, Row
from samestep.images.images import resize
from samestep.models import classification, pretrained

ENDINGS = (*TABLES, *sources.IMAGES)


# ---- Reading -------------------------------------------------------------------------------------


def read_rows(
    cfg: Any, left_out: Counter, shipped: Iterable[Row] | None = None
) -> tuple[Iterator[Row], Iterator[Row] | None]:
    """Rows of an image and a label, to train on and, where some are given, to evaluate on.

    They are read one by one: encoded images of all rows may not fit into memory. `shipped`: rows in
    place of those of cfg.data. Raises ValueError for a row without an image or a class, unless
    cfg.incomplete_rows is skip; then `left_out` counts it.
    """
    columns: Columns = {"image": cfg.image_column, "label": cfg.label_column}
    sources.print_skipped_files(cfg, readable_endings(cfg.data), shipped=shipped is not None)
    on_hub, given, field = shipped is None and hub.is_hub_name(cfg.data), None, given_field(cfg)
    if on_hub:
        train = hub.read_hub_rows(cfg, cfg.data_split, columns, "data_split")
    else:
        train = shipped or read_local_rows(cfg.data, columns, "data")
    if cfg.validation_data:
        given = read_local_rows(cfg.validation_data, columns, field)
    elif cfg.validation_split:
        given = hub.read_hub_rows(cfg, cfg.validation_split, columns, field)
    return sources.valid_rows(train, cfg, "data", check_image_row, left_out), (
        given and sources.valid_rows(given, cfg, field, check_image_row, left_out)
    )


def given_field(cfg: Any) -> str:
    """The field that names validation rows, if one does."""
    return "validation_data" if cfg.validation_data else "validation_split"


def check_image_row(row: dict) -> None:
    """Turns the label into text, and the image into a path, its bytes or a Pillow image; raises
    ValueError for anything but an image and a class."""
    image, label = row["image"], row["label"]
    if isinstance(image, dict):  # as the Hub has them
        image = image.get("bytes") or image.get("path")
    for role, value in (("image", image), ("label", label)):
        blank = isinstance(value, (str, bytes)) and not value.strip()
        if value is None or blank or value != value:  # pandas writes NaN for a missing value
            raise sources.IncompleteRow(f"the {role} is empty")
    if not isinstance(image, (str, bytes, Image.Image)):
        raise ValueError(f"the image is {one_line(repr(image), 60)}; give a path")
    row["image"], row["label"] = image, labels.parse_class(label)


def readable_endings(data: str) -> tuple[str, ...]:
    """Endings of the files to read. In a folder .json is not one: tools keep notes in such files
    beside images."""
    is_folder = Path(data).expanduser().is_dir()
    return tuple(each for each in ENDINGS if not (each == ".json" and is_folder))


def read_local_rows(data: str, columns: Columns, field: str) -> Iterator[Row]:
    """The rows of the tables at a path; without these, the images in its folders of classes."""
    endings = readable_endings(data)
    files = sources.list_files(data, endings, field)
    if found := [file for file in files if tables.file_ending(file) in TABLES]:
        for table in found:
            yield from read_image_table(table, columns, field)
    else:
        yield from read_class_folders(Path(data).expanduser(), endings, field)


def read_image_table(table: Path, columns: Columns, field: str) -> Iterator[Row]:
    """The rows of a table. Paths of images are relative to its folder."""
    for row, place in tables.read_rows(table, columns, field):
        image = row["image"]
        if isinstance(image, dict) and not image.get("bytes"):
            image = image.get("path")
        if isinstance(image, str) and image.strip():
            place = f"{place}: {one_line(image, 100)}"
            image = os.path.join(table.parent, image)
        yield {**row, "image": image, "named": True}, place


def read_class_folders(root: Path, endings: Iterable[str], field: str) -> Iterator[Row]:
    """A row for each image; its label is the name of its folder."""
    for folder, names, _ in sources.walk(str(root), endings, field):
        label = sources.class_of(Path(folder, names[0]), root, field) if names else ""
        for name in names:
            path = os.path.join(folder, name)
            yield {"image": path, "label": label}, one_line(path, 200)


# ---- How a model sees them -----------------------------------------------------------------------


@cache.once_per_folder
def load_processor(cfg: Any, folder: Path | None) -> tuple[int, list[float], list[float]]:
    """Side in pixels, mean and std of the channels, by the image processor of a pretrained model.

    `folder`: that of the prepared data, or None if it is not known yet.
    Raises ValueError for a model without one, and for a processor without a size.
    """
    from transformers import AutoImageProcessor

    processor = pretrained.load(AutoImageProcessor, cfg).to_dict()
    size = processor.get("crop_size" if processor.get("do_center_crop") else "size") or {}
    side = size.get("height") or size.get("shortest_edge")
    if not isinstance(side, int) or not 1 <= side <= 8192:
        name = one_line(cfg.model_name_or_path, 100)
        raise ValueError(f"task.model_name_or_path: {name} does not say the size of its images")
    if processor.get("do_normalize"):
        return side, processor["image_mean"], processor["image_std"]
    return side, [0.0] * 3, [1.0] * 3


def load_view(cfg: Any, prepared: Path | None = None) -> dict[str, Any]:
    """How the model sees an image: its side in pixels, the mean and std of its channels, the number
    of classes (None where nothing is prepared), and the settings of augmentation and layout."""
    side, mean, std, classes = cfg.image_size, [0.5] * 3, [0.5] * 3, None
    if cfg.model_name_or_path:
        side, mean, std = load_processor(cfg, prepared)
    if prepared:
        classes = len(json.loads((prepared / "labels.json").read_text(encoding="utf-8")))
    names = ("min_crop", "flip", "mixup", "label_smoothing", "channels_last")
    view = {name: getattr(cfg, name) for name in names}
    return view | {"side": side, "mean": mean, "std": std, "classes": classes}


def stored_side(cfg: Any, is_small: bool) -> int:
    """Side in pixels of the squares to keep. `is_small`: the images have no more to show."""
    side = load_view(cfg)["side"]
    return cfg.cache_image_size or (
        side if is_small or cfg.min_crop == 1 else math.ceil(side * 8 / 7)
    )


def smooth(label: int, view: dict[str, Any]) -> np.ndarray:
    """A class as a distribution, float32 (classes,), of which a part is spread over all."""
    spread = np.full(view["classes"], view["label_smoothing"] / view["classes"], np.float32)
    spread[label] += 1 - view["label_smoothing"]
    return spread


def draw_other(view: dict[str, Any], generator: torch.Generator) -> tuple[tuple, float]:
    """A row to mix an image with, and the image's own share: beta distributed, from 0 to 1."""
    other = int(torch.randint(len(view["others"]), (), generator=generator))
    seed = int(torch.randint(2**62, (), generator=generator))
    share = np.random.default_rng(seed).beta(view["mixup"], view["mixup"])
    return view["others"][other], float(share)


def crop(image: np.ndarray, view: dict[str, Any], generator: torch.Generator) -> np.ndarray:
    """A random crop, its aspect ratio between 3:4 and 4:3, as the model's square; or its mirror."""
    area, ratio, x, y, mirror = torch.rand(5, generator=generator).tolist()
    if view["min_crop"] < 1:
        root = math.sqrt(1 - area * (1 - view["min_crop"]))
        stretch = (4 / 3) ** (ratio - 0.5)
        width, height = (len(image) * min(1, part) for part in (root * stretch, root / stretch))
        left, top = x * (len(image) - width), y * (len(image) - height)
        image = resize(image, view["side"], (left, top, left + width, top + height))
    return image[:, ::-1] if view["flip"] and mirror < 0.5 else image


def question(row: tuple, batch: dict) -> tuple[Any, dict]:
    """For the check of the export: the square of a row as the model sees it, and its pixel values,
    out of the batch of this row alone."""
    image = Image.fromarray(resize(row[0], row[2]["side"]))
    return image, {"pixel_values": batch["pixel_values"]}


def draw_samples(
    model: Any, dataset: Any, collate: Callable[[list], dict], names: list[str], path: Path
) -> Path:
    """Sixteen of 256 rows with the model's answers, wrong ones first."""
    chosen = np.random.default_rng(0).permutation(len(dataset))[:256]  # rows may be sorted by class
    rows, answers = [dataset[i] for i in chosen], []
    for start in range(0, len(rows), 16):
        part = rows[start : start + 16]
        pixels = collate(part)["pixel_values"].to(model.device)
        guesses = model(pixel_values=pixels).logits.argmax(1).tolist()
        pairs = zip(part, guesses, strict=True)
        answers += [(image, label, guess) for (image, label, _), guess in pairs]
    return classification.draw_images(answers, names, len(dataset), path)


def save_processor(view: dict[str, Any], output: Path) -> None:
    """Saves the image processor that pipeline("image-classification", output) loads.

    It crops as `images.square` does, whatever that of a pretrained model did, so that a pipeline
    sees images as the model has seen them here.
    """
    from transformers import BitImageProcessor
    from transformers.image_utils import PILImageResampling

    processor = BitImageProcessor(
        size={"shortest_edge": view["side"]},
        crop_size={"height": view["side"], "width": view["side"]},
        resample=PILImageResampling.BICUBIC,
        image_mean=view["mean"],
        image_std=view["std"],
    )
    processor.save_pretrained(output)
