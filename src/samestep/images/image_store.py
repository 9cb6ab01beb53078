"""Images of a task on disk: decoded squares, or what it takes to decode them again.

Both give the same rows. Squares take side x side x 3 bytes each. Where they would take too much,
`sources` keeps the path of each image, or its encoded bytes, and workers decode it in training.
"""

import errno
import hashlib
import json
import os
import shutil
from array import array
from collections import Counter
from collections.abc import Iterable
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import UnidentifiedImageError
from tqdm import tqdm

from samestep.base.console import one_line
from samestep.data import cache, labels, sources, splits
from samestep.data.tables import Row
from samestep.images import image_data
from samestep.images.image_data import encode_image, given_field, place_of
from samestep.images.images import is_transparent, open_for_square, square
from samestep.text import pieces

BLOCK = 10_000  # images that wait for a thread at once
# Other errors of the operating system may pass. Decoders raise OSError without a number.
FAULTS_OF_FILES = (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES)
SHOWN = 10  # images that are named where many cannot be read


# ---- Listing -------------------------------------------------------------------------------------


class ImageList:
    """All images, those to train on first. Row numbers count from 0.

    names      of the classes, in the order in which they were met
    classes    int32 (N,): the place of each image's class in `names`
    train      number of the images to train on
    places     number of the images given by a path, for each `image_data.place_of`
    """

    def __init__(self, folder: Path, train: Iterable[Row], validation: Iterable[Row], cfg: Any):
        """Reads all rows once, and writes paths and encoded bytes into `folder`.

        Raises ValueError for a validation row of a class that no training row has.
        """
        numbers: dict[str, int] = {}
        classes, is_path, self.places = array("i"), bytearray(), Counter()
        writers = [pieces.PieceWriter(folder, name) for name in ("sources", "rows")]
        with writers[0] as encoded, writers[1] as origins:
            for rows in (train, validation):
                for row, place in rows:
                    piece, named = encode_image(row["image"])
                    encoded.append(piece)
                    origins.append(place.encode(errors="replace"))
                    is_path.append(named)
                    self.places.update([place_of(os.fsdecode(piece))] if named else [])
                    classes.append(numbers.setdefault(row["label"], len(numbers)))
                if rows is train:
                    self.train = len(classes)
        np.save(folder / "is_path.npy", np.frombuffer(is_path, bool))
        self.names, self.classes = [*numbers], np.frombuffer(classes, np.int32)
        self.folder, self.sources = folder, Sources(folder)
        rows = np.arange(len(self))
        self.check_classes(rows[self.train :], rows[: self.train], given_field(cfg))

    def __len__(self) -> int:
        return len(self.classes)

    def paths(self) -> Iterable[Any]:
        """The paths of the images that have one."""
        return (self.sources[i] for i in np.flatnonzero(self.sources.is_path))

    def names_of(self, rows: np.ndarray) -> set[str]:
        return {self.names[i] for i in np.unique(self.classes[rows])}

    def check_classes(self, rows: np.ndarray, others: np.ndarray, field: str) -> None:
        """Raises ValueError for the first of these rows whose class none of the others has."""
        known = sorted(self.names_of(others))
        unknown = np.array([name not in {*known} for name in self.names], bool)
        for i in rows[unknown[self.classes[rows]]][:1]:
            try:
                labels.check_known({"label": self.names[self.classes[i]]}, known, known)
            except ValueError as error:
                message = f"task.{field}: {self.sources.place(i)}: {error}"
                raise ValueError(message) from None


class Sources:
    """For each image its path, or its encoded bytes as {"bytes": ...}."""

    def __init__(self, folder: Path):
        self.pieces, self.rows = pieces.Pieces(folder, "sources"), pieces.Pieces(folder, "rows")
        self.is_path = np.load(folder / "is_path.npy", mmap_mode="r")

    def __getitem__(self, i: int) -> str | dict:
        piece = self.pieces[i]
        return os.fsdecode(piece) if self.is_path[i] else {"bytes": piece}

    def place(self, i: int) -> str:
        """Where the image comes from, for messages: its path, or a table and a line."""
        return self.rows[i].decode()

    def remove(self) -> None:
        self.pieces.remove()
        self.rows.remove()
        (self.pieces.folder / "is_path.npy").unlink()


# ---- Storing -------------------------------------------------------------------------------------


def store_images(images: ImageList, side: int, cfg: Any) -> np.ndarray:
    """Decodes each image once. Returns the SHA-256 of its square: uint8 (N, 32).

    Writes the squares to images.npy, uint8 (N, side, side, 3), if they take at most cfg.decoded_gb.
    Otherwise writes what StoredImages needs to make them again.

    The hash is 0 for an image that cannot be read, where cfg.corrupt is skip. Raises ValueError for
    one otherwise, and where the disk has no room for the squares.
    """
    folder, count, size = images.folder, len(images), side * side * 3
    keep = count * size <= cfg.decoded_gb * 1e9
    more = f"are more than task.decoded_gb, {cfg.decoded_gb:g}: decoded whenever they are used"
    print(
        f"Preparing data: {count:,} images of {one_line(cfg.data, 100)}, {len(images.names):,} "
        f"classes; {count * size / 1e6:,.1f} MB "
        f"{f'in {one_line(folder.parent, 100)}' if keep else more}",
        flush=True,
    )
    hashes, transparent = np.zeros((count, 32), np.uint8), np.zeros(count, bool)
    problems: dict[int, str] = {}  # of the images that cannot be read

    def store(number: int) -> str:
        """Stores an image. Returns the reason why it cannot be read, if so."""
        try:
            image = open_for_square(images.sources[number], side)
            transparent[number] = is_transparent(image)
            pixels = square(image, side, cfg.background)
        except UnidentifiedImageError:
            return "not an image"
        except Exception as error:  # each decoder has its own
            return one_line(error) or type(error).__name__
        hashes[number] = np.frombuffer(hashlib.sha256(pixels.data).digest(), np.uint8)
        if keep and os.pwrite(file.fileno(), pixels.data, begin + number * size) < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return ""

    progress = tqdm(desc="images", total=count, leave=False, disable=None)
    threads = ThreadPool(min(os.cpu_count() or 1, 32))  # decoders release the GIL
    with threads, progress, open(folder / "images.npy", "wb") as file:
        if keep:
            free = shutil.disk_usage(folder).free
            if count * size > free:
                raise ValueError(
                    f"task.cache_dir: the images take {count * size / 1e6:,.1f} MB, and the disk "
                    f"of {one_line(folder.parent, 100)} has {free / 1e6:,.1f} MB left; name "
                    "another, or lower --task.decoded_gb, or --task.stored_size"
                )
            header = {"descr": "|u1", "fortran_order": False, "shape": (count, side, side, 3)}
            np.lib.format.write_array_header_1_0(file, header)
            begin = file.tell()
            file.truncate(begin + count * size)  # an image that cannot be read is black
        for start in range(0, count, BLOCK):
            numbers = range(start, min(start + BLOCK, count))
            for number, problem in zip(numbers, threads.map(store, numbers, 4), strict=True):
                if problem:
                    problems[number] = problem
            progress.update(len(numbers))
    report_problems(images, problems, cfg)
    if number := transparent.sum():
        print(
            f"Preparing data: {number:,} of {count - len(problems):,} images are transparent: put "
            f"on {cfg.background}",
            flush=True,
        )
    if not keep:
        (folder / "images.npy").unlink()
        np.save(folder / "hashes.npy", hashes)
        settings = {"side": side, "background": cfg.background}
        (folder / "squares.json").write_text(json.dumps(settings), encoding="utf-8")
    return hashes


def build(cfg: Any, folder: Path, side: int, shipped: Iterable[Row] | None) -> dict[str, Any]:
    """Fills the folder of prepared data: the images, as squares with sides of so many pixels;
    labels.npy (N,), labels.json, and the row numbers of each part.

    Returns the digest of these, and those of the images that tables name, for `cache.prepare`.
    `shipped`: rows in place of those of cfg.data.
    """
    left_out: Counter = Counter()
    train, given = image_data.read_rows(cfg, left_out, shipped)
    found = ImageList(folder, train, given or [], cfg)
    named = image_data.hash_named_images(cfg, found.places, found.paths())
    hashes = store_images(found, side, cfg)
    arrays, names = choose_parts(found, hashes, given is None, cfg)
    read = len(found) + left_out.total()
    left_out["unreadable"] = int((~hashes.any(1)).sum())
    sizes = (len(arrays["train"]), f"{len(arrays['validation']):,}")
    sources.say_prepared("images", read, *sizes, left_out)
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", values)
    (folder / "labels.json").write_text(json.dumps(names), encoding="utf-8")
    text = np.frombuffer(hashes.tobytes().hex().encode(), "S64")
    arrays["images"] = np.where(hashes.any(1), text, b"")  # empty: it cannot be read
    if (folder / "images.npy").exists():
        found.sources.remove()
    return {"content": cache.hash_columns({"images": arrays}), "named": named}


def report_problems(images: ImageList, problems: dict[int, str], cfg: Any) -> None:
    """Names the first images that cannot be read; raises ValueError unless they are left out."""
    for number, problem in [*problems.items()][:SHOWN]:
        shown = one_line(f"{images.sources.place(number)}: {problem}")
        if cfg.corrupt == "refuse":
            field = "data" if number < images.train else "validation_data"
            raise ValueError(
                f"task.{field}: cannot read {shown}; of {len(images):,} images {len(problems):,} "
                "cannot be read; --task.corrupt skip leaves them out"
            )
        print(f"left out: {shown}", flush=True)


# ---- Parts ---------------------------------------------------------------------------------------


def choose_parts(
    images: ImageList, hashes: np.ndarray, split: bool, cfg: Any
) -> tuple[dict[str, np.ndarray], list[str]]:
    """The labels of all images, int64 (N,), and the row numbers of both parts; the classes' names.

    `split`: no validation rows are given. Images that cannot be read are in no part. Raises
    ValueError where a part has too little, or a class that the training data lacks.
    """
    rows, data = np.arange(len(images)), one_line(cfg.data, 100)
    parts = [part[hashes[part].any(1)] for part in np.split(rows, [images.train])]
    names = sorted(images.names_of(parts[0]))
    if len(names) < 2:
        raise ValueError(
            f"task.data: {data} has {len(parts[0])} images of {len(names)} classes "
            f"({one_line(', '.join(names), 60) or 'none'}); give at least two classes"
        )
    images.check_classes(parts[1], parts[0], given_field(cfg))
    if split:
        keys = hashes[parts[0], :8].copy().view("<u8")[:, 0]
        limits = splits.extremes([(keys, images.classes[parts[0]])])
        most = cfg.validation_rows
        held = splits.hold_out(keys, np.ones(len(keys)), limits, cfg.validation_fraction, most)
        held_out = splits.is_in(keys, held)
        parts = [parts[0][~held_out], parts[0][held_out]]
    else:
        known = {row.tobytes() for row in hashes[parts[0]]}
        both = sum(row.tobytes() in known for row in hashes[parts[1]])
        sources.say_overlap(both, len(parts[1]))
    if not len(parts[1]):
        raise ValueError(
            f"task.validation_data: no images to evaluate on among the {len(rows)} of {data}; give "
            "--task.validation_data PATH"
        )
    known_names = {name: i for i, name in enumerate(names)}
    numbers = np.array([known_names.get(name, -1) for name in images.names], np.int64)
    labels = numbers[images.classes]
    return {"labels": labels, "train": parts[0], "validation": parts[1]}, names


# ---- Reading -------------------------------------------------------------------------------------


class StoredImages(torch.utils.data.Dataset):
    """The images of a part, from a memory map that the processes of a machine share, or decoded.

    Row i is the square, uint8 (side, side, 3), its class, and `view`, the same object for all rows.
    Raises ValueError, which names the image, where it is not the one that was prepared.
    """

    def __init__(self, folder: Path, part: str, view: dict[str, Any]):
        self.arguments, self.view = (folder, part, view), view
        self.labels, self.numbers = load(folder, "labels"), load(folder, part)
        self.sources = [sources.Source("data", len(self.numbers), 1, None, 1)]
        self.squares = self.originals = None
        if (folder / "images.npy").exists():
            self.squares = load(folder, "images")
        else:
            self.originals, self.hashes = Sources(folder), load(folder, "hashes")
            self.settings = json.loads((folder / "squares.json").read_text(encoding="utf-8"))

    def __reduce__(self):  # pickled, a memory map would become a copy of all images
        return StoredImages, self.arguments

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, i: int) -> tuple[np.ndarray, int, dict]:
        number = self.numbers[i]
        image = self.decode(number) if self.squares is None else self.squares[number]
        return image, int(self.labels[number]), self.view

    def decode(self, number: int) -> np.ndarray:
        try:
            pixels = square(self.originals[number], **self.settings)
        except Exception as error:
            passing = isinstance(error, OSError) and error.errno not in FAULTS_OF_FILES
            if passing or isinstance(error, MemoryError):
                raise
            problem = getattr(error, "strerror", None) or one_line(error)
        else:
            if hashlib.sha256(pixels.data).digest() == self.hashes[number].tobytes():
                return pixels
            problem = "it has changed, or another version of Pillow decodes it otherwise"
        raise ValueError(
            f"task.data: {self.originals.place(number)}: {problem}; put back the image that was "
            "prepared, and the same command continues"
        )


def load(folder: Path, name: str) -> np.ndarray:
    return np.load(folder / f"{name}.npy", mmap_mode="r")
