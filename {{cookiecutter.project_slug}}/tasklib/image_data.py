"""Labelled images: read from folders of classes, tables or the Hub, and stored as squares."""

import dataclasses
import hashlib
import math
import os
import shutil
from collections.abc import Iterable
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from tqdm import tqdm

from tasklib import cache, hub, pretrained, sources, tables
from tasklib.images import is_transparent, open_for_square, square
from tasklib.messages import one_line
from tasklib.tables import TABLES, Row

ENDINGS = (*TABLES, ".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")


# ---- Reading -------------------------------------------------------------------------------------


def read_rows(cfg: Any, shipped: Iterable[Row] | None = None) -> tuple[list[Row], list[Row] | None]:
    """Rows of an image and a label, to train on and, where some are given, to evaluate on.

    `shipped`: rows in place of those of cfg.data. Raises ValueError for a row without an image or a
    class, unless cfg.incomplete_rows is skip.
    """
    columns = {"image": cfg.image_column, "label": cfg.label_column}
    validation = None
    sources.print_skipped_files(cfg, readable_endings(cfg.data), shipped=shipped is not None)
    if shipped is not None:
        train = list(shipped)
    elif hub.is_hub_name(cfg.data):
        hub_only = dataclasses.replace(cfg, validation_data="")  # it may be a folder of images
        train, validation = sources.read_splits(hub_only, columns)
    else:
        train = read_local_rows(cfg.data, columns, "data")
    if cfg.validation_data:
        validation = read_local_rows(cfg.validation_data, columns, "validation_data")
    field = "validation_data" if cfg.validation_data else "validation_split"
    train = sources.keep_valid_rows(train, cfg, "data", check_image_row)
    return train, validation and sources.keep_valid_rows(validation, cfg, field, check_image_row)


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
    if not isinstance(image, (str, bytes, Path, Image.Image)):
        raise ValueError(f"the image is {one_line(repr(image), 60)}; give a path")
    row["label"] = str(label)


def readable_endings(data: str) -> tuple[str, ...]:
    """Endings of the files to read. In a folder .json is not one: tools keep notes in such files
    beside images."""
    in_folder = Path(data).expanduser().is_dir()
    return tuple(each for each in ENDINGS if not (in_folder and each == ".json"))


def read_local_rows(data: str, columns: dict[str, str], field: str) -> list[Row]:
    """The rows of the tables at a path; without a table, the images in its folders of classes."""
    files = sources.list_files(data, readable_endings(data), field)
    listed = [file for file in files if tables.file_ending(file) in TABLES]
    if listed:
        return [row for table in listed for row in read_image_table(table, columns, field)]
    return read_class_folders(Path(data).expanduser(), files, field)


def read_image_table(table: Path, columns: dict[str, str], field: str) -> list[Row]:
    """The rows of a table. Paths of images are relative to its folder."""
    rows = []
    for row, place in tables.read_rows(table, columns, field):
        image = row["image"]
        if isinstance(image, dict) and not image.get("bytes"):
            image = image.get("path")
        if isinstance(image, str) and image.strip():
            place = f"{place}: {one_line(image, 100)}"
            path = os.path.join(table.parent, image)
            if "\0" in image or (os.path.exists(path) and not os.path.isfile(path)):
                raise ValueError(f"task.{field}: cannot read {place}: it is not a file")
            image = Path(path)
        rows.append(({**row, "image": image}, place))
    return rows


def read_class_folders(root: Path, files: list[Path], field: str) -> list[Row]:
    """A row for each image; its label is the name of its folder.

    Raises ValueError for an image elsewhere, and for a folder of parts such as train and val.
    """
    rows: list[Row] = []
    for file in files:
        folders = file.relative_to(root).parts[:-1]
        if len(folders) == 1 and not folders[0].startswith("."):  # not .ipynb_checkpoints
            rows.append(({"image": file, "label": folders[0]}, one_line(file, 200)))
        elif len(folders) == 2 and {*os.listdir(root)} & {"train", "training"}:
            inside = one_line(root, 100)
            raise ValueError(
                f"task.{field}: {inside} has parts, not classes, as {one_line(file, 150)} shows; "
                f"give each: --task.data {inside}/train --task.validation_data {inside}/val"
            )
        elif not any(folder.startswith(".") for folder in folders):
            raise ValueError(
                f"task.{field}: {one_line(file, 150)} is not in the folder of its class; it should "
                f"be {one_line(root / 'CLASS' / file.name, 150)}"
            )
    return rows


def hash_named_images(cfg: Any, rows: list[Row], is_shipped: bool) -> dict[str, str]:
    """Digests of the images that tables name, by path; "": unreadable.

    `cache.hash_input_files` finds all other files of the data.
    """
    listed: set[Path] = set()
    for name in ("data", "validation_data"):
        data = getattr(cfg, name)
        if data and not (name == "data" and (is_shipped or hub.is_hub_name(data))):
            listed.update(sources.list_files(data, ENDINGS, name))
    paths = [row["image"] for row, _ in rows if isinstance(row["image"], Path)]
    return cache.hash_files([path for path in paths if path not in listed], cfg, missing="")


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


# ---- Storing -------------------------------------------------------------------------------------


def store_squares(
    train: list[Row], validation: list[Row], path: Path, side: int, cfg: Any
) -> list[str]:
    """Writes the images of all rows to a .npy, uint8 (N, side, side, 3).

    Returns the SHA-256 of each square; "": the image cannot be read, and cfg.corrupt is skip.
    Raises ValueError for such an image otherwise, and where the disk has no room.
    """
    rows = train + validation
    shape = (len(rows), side, side, 3)
    check_disk(path.parent, math.prod(shape))
    squares = np.lib.format.open_memmap(path, "w+", np.uint8, shape)
    transparent = np.zeros(len(rows), bool)

    def store(number: int) -> tuple[str, str]:
        """The hash of the square, and the reason why there is none."""
        try:
            image = open_for_square(rows[number][0]["image"], side)
            transparent[number] = is_transparent(image)
            squares[number] = square(image, side, cfg.background)
        except UnidentifiedImageError:
            return "", "not an image"
        except Exception as error:  # each decoder has its own
            return "", one_line(error)
        return hashlib.sha256(squares[number]).hexdigest(), ""

    with ThreadPool(min(os.cpu_count() or 1, 32)) as pool:  # decoders release the GIL
        stored = pool.imap(store, range(len(rows)), chunksize=16)
        results = list(tqdm(stored, "images", len(rows), leave=False, disable=None))
    hashes = [key for key, _ in results]
    problems = [f"{rows[n][1]}: {problem}" for n, (_, problem) in enumerate(results) if problem]
    if problems and cfg.corrupt == "skip":
        for problem in problems[:10]:
            print(f"left out: {one_line(problem)}")
        if problems[10:]:
            print(f"and {len(problems) - 10:,} more", flush=True)
    elif problems:
        field = "validation_data" if all(hashes[: len(train)]) else "data"
        raise ValueError(
            f"task.{field}: cannot read {problems[0]}; of {len(rows):,} images {len(problems):,} "
            "cannot be read; --task.corrupt skip leaves them out"
        )
    readable = [number for number, key in enumerate(hashes) if key]
    if number := transparent[readable].sum():
        print(
            f"Preparing data: {number:,} of {len(readable):,} images are transparent: put on "
            f"{cfg.background}",
            flush=True,
        )
    return hashes


def check_disk(folder: Path, size: int) -> None:
    """Raises ValueError unless the disk has room for so many bytes."""
    needed, free = size / 1e6, shutil.disk_usage(folder).free / 1e6
    if needed > free:
        raise ValueError(
            f"task.cache_dir: the images take {needed:,.1f} MB, and the disk of "
            f"{one_line(folder.parent, 100)} has {free:,.1f} MB left; name another, or lower "
            "--task.stored_size"
        )


class StoredSquares(torch.utils.data.Dataset):
    """The stored images of a part, from a memory map that the processes of a machine share.

    Row i is the image, uint8 (side, side, 3), its class, and `view`, the same object for all rows.
    """

    def __init__(self, folder: Path, part: str, view: dict[str, Any]):
        self.arguments, self.view = (folder, part, view), view
        self.images = np.load(folder / "images.npy", mmap_mode="r")
        self.labels = np.load(folder / "labels.npy")
        self.numbers = np.load(folder / f"{part}.npy")

    def __reduce__(self):  # pickled, a memory map would become a copy of all images
        return StoredSquares, self.arguments

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, i: int) -> tuple[np.ndarray, int, dict]:
        number = self.numbers[i]
        return self.images[number], int(self.labels[number]), self.view
