"""Labelled images, read from folders of classes, tables or the Hub."""

import io
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from samestep.base.console import one_line
from samestep.base.fields import local_path
from samestep.data import cache, hub, sources, tables
from samestep.data.splits import split_of
from samestep.data.tables import TABLES, Columns, Row
from samestep.images.images import resize
from samestep.models import pretrained

ENDINGS = (*TABLES, ".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")


# ---- Reading -------------------------------------------------------------------------------------


def read_rows(
    cfg: Any, left_out: Counter, shipped: Iterable[Row] | None = None
) -> tuple[Iterator[Row], Iterator[Row] | None]:
    """Rows of an image and a label, to train on and, where some are given, to evaluate on.

    They are read one by one: encoded images of all rows may not fit into memory. `shipped`: rows in
    place of those of cfg.data. Raises ValueError for a row without an image or a class, unless
    cfg.incomplete_rows is skip; then `left_out` counts it.
    """
    columns, field = {"image": cfg.image_column, "label": cfg.label_column}, given_field(cfg)
    sources.print_skipped_files(cfg, readable_endings(cfg.data), shipped=shipped is not None)
    on_hub, validation = shipped is None and hub.is_hub_name(cfg.data), None
    if shipped is not None:
        train = iter(shipped)
    elif on_hub:
        train = hub.read_hub_rows(cfg, cfg.data_split, columns, "data_split")
    else:
        train = read_local_rows(cfg.data, columns, "data")
    if cfg.validation_data:
        validation = read_local_rows(cfg.validation_data, columns, field)
    elif cfg.validation_split and on_hub:
        validation = hub.read_hub_rows(cfg, cfg.validation_split, columns, field)
    train = sources.valid_rows(train, cfg, "data", check_image_row, left_out)
    if validation:
        validation = sources.valid_rows(validation, cfg, field, check_image_row, left_out)
    return train, validation


def given_field(cfg: Any) -> str:
    """The field that names validation rows, if one does."""
    return "validation_data" if cfg.validation_data else "validation_split"


def check_image_row(row: dict) -> None:
    """Turns the label into text; raises ValueError for anything but an image and a class."""
    image, label = row["image"], row["label"]
    if isinstance(image, dict):
        image = image.get("bytes") or image.get("path")
    for role, value in (("image", image), ("label", label)):
        blank = isinstance(value, (str, bytes)) and not value.strip()
        if value is None or blank or value != value:  # pandas writes NaN for a missing value
            raise sources.IncompleteRow(f"the {role} is empty")
    if not isinstance(label, (str, int)):
        raise ValueError(f"the label is {one_line(repr(label), 60)}; give text or a whole number")
    if not isinstance(image, (str, bytes, Image.Image)):
        raise ValueError(f"the image is {one_line(repr(image), 60)}; give a path")
    row["label"] = str(label)


def readable_endings(data: str) -> tuple[str, ...]:
    """Endings of the files to read. In a folder .json is not one: tools keep notes in such files
    beside images."""
    in_folder = Path(data).expanduser().is_dir()
    return tuple(each for each in ENDINGS if not (in_folder and each == ".json"))


def read_local_rows(data: str, columns: Columns, field: str) -> Iterator[Row]:
    """The rows of the tables at a path; without a table, the images in its folders of classes."""
    endings = readable_endings(data)
    folders = [(folder, names) for folder, names, _ in sources.walk(data, endings, field) if names]
    tables_here = sorted(
        Path(folder, name)
        for folder, names in folders
        for name in names
        if tables.file_ending(name) in TABLES
    )
    for table in tables_here:
        yield from read_image_table(table, columns, field)
    if folders and not tables_here:
        yield from read_class_folders(Path(data).expanduser(), folders, field)
    elif not folders:
        sources.list_files(data, endings, field)  # raises, with the reason


def read_image_table(table: Path, columns: Columns, field: str) -> Iterator[Row]:
    """The rows of a table. Paths of images are relative to its folder."""
    for row, place in tables.read_rows(table, columns, field):
        image = row["image"]
        if isinstance(image, dict) and not image.get("bytes"):
            image = image.get("path")
        if isinstance(image, str) and image.strip():
            place = f"{place}: {one_line(image, 100)}"
            image = os.path.join(table.parent, image)
        yield {**row, "image": image}, place


def read_class_folders(
    root: Path, folders: list[tuple[str, list[str]]], field: str
) -> Iterator[Row]:
    """A row for each image; its label is the name of its folder.

    The folder of a split may be between. Raises ValueError for an image elsewhere.
    """
    for folder, names in folders:
        parts = Path(folder).relative_to(root).parts
        if len(parts) == 2 and split_of(parts[0]):
            parts = parts[1:]
        if len(parts) != 1:
            file = Path(folder, names[0])
            raise ValueError(
                f"task.{field}: {one_line(file, 150)} is not in the folder of its class; it should "
                f"be {one_line(root / 'CLASS' / file.name, 150)}"
            )
        for name in names:
            path = os.path.join(folder, name)
            yield {"image": path, "label": parts[0]}, one_line(path, 200)


def encode_image(image: Any) -> tuple[bytes, bool]:
    """The path of an image, or its encoded bytes, and whether it is a path."""
    if isinstance(image, dict):  # as the Hub has them
        image = image.get("bytes") or image["path"]
    if isinstance(image, str):
        return os.fsencode(image), True
    if isinstance(image, Image.Image):
        file = io.BytesIO()
        image.save(file, "PNG")
        image = file.getvalue()
    return image, False


def place_of(path: str) -> tuple[str, bool]:
    """The folder of an image, and whether it is a file that counts as data of its folder."""
    folder, name = os.path.split(path)
    return folder, tables.file_ending(name) in ENDINGS and not name.startswith(".")


def hash_named_images(
    cfg: Any, places: dict[tuple[str, bool], int], paths: Iterable[str]
) -> dict[str, str]:
    """Digests of the images that tables name, by path; "": unreadable.

    `places`: the number of images for each `place_of`. Those among the data are found by
    `cache.hash_input_files`. Where many are named, most of their folder, it counts as a whole.
    """
    among = set()
    for name in ("data", "validation_data"):
        root = getattr(cfg, name)
        if root and os.path.isdir(local_path(root, name)):
            found = sources.walk(root, ENDINGS, name)
            among |= {os.path.realpath(folder) for folder, names, _ in found if names}
    whole, single = set(), set()
    for (folder, counts), number in places.items():
        if counts and os.path.realpath(folder) in among:
            continue
        many = counts and number > cache.MANY_FILES and os.path.isdir(folder or ".")
        many = many and 2 * number > len(os.listdir(folder or "."))
        (whole if many else single).add((folder, counts))
    named = [Path(folder) for folder, _ in whole]
    named += [Path(path) for path in paths if place_of(path) in single] if single else []
    return cache.hash_files(named, cfg)


# ---- Pretrained models ---------------------------------------------------------------------------


@cache.once_per_folder
def load_processor(cfg: Any, folder: Path | None) -> tuple[int, list[float], list[float]]:
    """Side in pixels, mean and std of the channels, by the image processor of a pretrained model.

    `folder`: that of the prepared data, or None if it is not known yet.
    Raises ValueError for a model without one, and for a processor without a size.
    """
    from transformers import AutoImageProcessor

    source, name = pretrained.folder_of(cfg), one_line(cfg.model_name_or_path, 100)
    if source and (source / "config.json").exists() and not [*source.glob("*processor*.json")]:
        raise ValueError(
            f"task.model_name_or_path: {name} has no preprocessor_config.json, as models of images "
            "do"
        )
    processor = pretrained.load(AutoImageProcessor, cfg).to_dict()
    size = processor.get("crop_size" if processor.get("do_center_crop") else "size") or {}
    side = size.get("height") or size.get("shortest_edge")
    if not isinstance(side, int) or not 1 <= side <= 8192:
        raise ValueError(f"task.model_name_or_path: {name} does not say the size of its images")
    if processor.get("do_normalize"):
        return side, processor["image_mean"], processor["image_std"]
    return side, [0.0] * 3, [1.0] * 3


def load_view(cfg: Any, prepared: Path | None = None) -> dict[str, Any]:
    """How the model sees an image: its side in pixels, the mean and std of its channels, and the
    settings of augmentation and layout."""
    side, mean, std = cfg.image_size, [0.5] * 3, [0.5] * 3
    if cfg.model_name_or_path:
        side, mean, std = load_processor(cfg, prepared)
    view = {name: getattr(cfg, name) for name in ("min_crop", "flip", "channels_last")}
    return view | {"side": side, "mean": mean, "std": std}


def stored_side(cfg: Any, is_small: bool) -> int:
    """Side in pixels of the squares to keep. `is_small`: the images have no more to show."""
    side = load_view(cfg)["side"]
    return cfg.stored_size or (side if is_small or cfg.min_crop == 1 else math.ceil(side * 8 / 7))


def question(row: tuple, batch: dict) -> tuple[Any, dict]:
    """For the check of the export: the square of a row as the model sees it, and its pixel values,
    out of the batch of this row alone."""
    image = Image.fromarray(resize(row[0], row[2]["side"]))
    return image, {"pixel_values": batch["pixel_values"]}


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
