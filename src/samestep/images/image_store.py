"""Images of a task on disk: decoded squares, or what it takes to decode them again.

Both give the same rows. Squares take side x side x 3 bytes each. Where they would take too much,
sources.arrow keeps the path of each image, or its encoded bytes, and workers decode it in training.
"""

import errno
import hashlib
import io
import itertools
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterable
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from tqdm import tqdm

from samestep.base.console import one_line
from samestep.data import cache, labels, sources, splits
from samestep.data.tables import Row
from samestep.images import image_data
from samestep.images.images import is_transparent, open_for_square, square

# pyarrow takes 0.2 s to import: the functions that need it import it.

BLOCK = 64  # images in a batch of sources.arrow, which is in memory as a whole
# Other errors of the operating system may pass. Decoders raise OSError without a number.
FAULTS_OF_FILES = (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES)
SHOWN = 10  # images that are named where many cannot be read


# ---- Listing -------------------------------------------------------------------------------------


def list_images(
    folder: Path, train: Iterable[Row], given: Iterable[Row]
) -> tuple[list[str], int, list[str]]:
    """The labels of all images, the number of those to train on, and the paths that tables name.

    Reads the rows once, and writes sources.arrow: for each image its path or its encoded bytes, and
    the place of its row, for people.
    """
    import pyarrow as pa

    found, named, number = [], [], 0
    schema = pa.schema({"path": pa.binary(), "bytes": pa.large_binary(), "place": pa.string()})
    rows = itertools.chain(zip(train, itertools.repeat(1)), zip(given, itertools.repeat(0)))
    with pa.ipc.new_file(str(folder / "sources.arrow"), schema) as writer:
        while block := [*itertools.islice(rows, BLOCK)]:
            written = []
            for (row, place), to_train in block:
                image, number = row["image"], number + to_train
                if isinstance(image, Image.Image):
                    file = io.BytesIO()
                    image.save(file, "PNG")
                    image = file.getvalue()
                if isinstance(image, str) and "named" in row:
                    named.append(image)
                kind, shown = "bytes", place.encode(errors="replace").decode()
                if isinstance(image, str):
                    kind, image = "path", os.fsencode(image)
                written.append({kind: image, "place": shown})
                found.append(sys.intern(row["label"]))
            writer.write(pa.RecordBatch.from_pylist(written, schema))
    return found, number, named


class Sources:
    """What `list_images` has written, in a memory map: (path or encoded bytes, place) of each."""

    def __init__(self, folder: Path):
        import pyarrow as pa

        self.file = pa.ipc.open_file(pa.memory_map(str(folder / "sources.arrow")))

    def read(self, number: int, first: int = 0, size: int = BLOCK) -> list[tuple[Any, str]]:
        """Images of a block."""
        rows = self.file.get_batch(number).slice(first, size).to_pylist()
        return [(row["bytes"] or os.fsdecode(row["path"]), row["place"]) for row in rows]

    def __getitem__(self, i: int) -> tuple[Any, str]:
        return self.read(i // BLOCK, i % BLOCK, 1)[0]


def hash_named_images(cfg: Any, paths: list[str]) -> dict[str, str]:
    """Digests of the images that tables name, by path; "": unreadable.

    Of many, those that are most of their folder count by it. It has no digest of hidden files.
    """
    folders, whole = Counter(map(os.path.dirname, paths)), set()
    if len(paths) > cache.MANY_FILES:
        there = [folder for folder in folders if os.path.isdir(folder or ".")]
        whole = {each for each in there if 2 * folders[each] > len(os.listdir(each or "."))}
    single = [
        path
        for path in paths
        if os.path.dirname(path) not in whole or os.path.basename(path).startswith(".")
    ]
    return cache.hash_files([*map(Path, whole), *map(Path, single)], cfg)


# ---- Storing -------------------------------------------------------------------------------------


def build(cfg: Any, folder: Path, side: int, shipped: Iterable[Row] | None) -> dict[str, Any]:
    """Fills the folder of prepared data: the images, as squares with sides of so many pixels;
    labels.npy, int64 (N,); labels.json, the names of the classes; the row numbers of each part.

    Returns the digest of these, and those of the images that tables name, for `cache.prepare`.
    `shipped`: rows in place of those of cfg.data. Raises ValueError where a part has too little, or
    a class that the training data lacks.
    """
    left_out: Counter = Counter()
    train, given = image_data.read_rows(cfg, left_out, shipped)
    texts, number, paths = list_images(folder, train, given or [])
    names, origins = check_classes(texts[:number], cfg), Sources(folder)
    named = hash_named_images(cfg, paths)
    hashes = store_images(folder, len(texts), number, len(names), side, cfg)
    readable = np.asarray(hashes.any(1))
    names = check_classes([text for i, text in enumerate(texts[:number]) if readable[i]], cfg)
    classes = {name: i for i, name in enumerate(names)}
    for i in (i for i in range(number, len(texts)) if readable[i]):
        try:
            labels.check_known({"label": texts[i]}, names, classes)
        except ValueError as error:
            field = image_data.given_field(cfg)
            raise ValueError(f"task.{field}: {origins[i][1]}: {error}") from None
    arrays = {"labels": np.array([classes.get(text, -1) for text in texts], np.int64)}
    arrays |= choose_parts(hashes, readable, arrays["labels"], number, given is None, cfg)
    left_out["unreadable"] = int((~readable).sum())
    sizes = (len(arrays["train"]), f"{len(arrays['validation']):,}")
    read = len(texts) + left_out.total() - left_out["unreadable"]
    sources.say_prepared("images", read, *sizes, left_out)
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", values)
    (folder / "labels.json").write_text(json.dumps(names), encoding="utf-8")
    digests = np.frombuffer(hashes.tobytes().hex().encode(), "S64")
    arrays["images"] = np.where(readable, digests, b"")
    return {"content": cache.hash_columns({"images": arrays}), "named": named}


def check_classes(texts: list[str], cfg: Any) -> list[str]:
    """The names of the classes, sorted. Raises ValueError for fewer than two."""
    names = sorted({*texts})
    if len(names) < 2:
        raise ValueError(
            f"task.data: {one_line(cfg.data, 100)} has {len(texts)} images of {len(names)} classes "
            f"({one_line(', '.join(names), 60) or 'none'}); give at least two classes"
        )
    return names


def store_images(
    folder: Path, count: int, train: int, classes: int, side: int, cfg: Any
) -> np.ndarray:
    """Decodes each image once. Returns the SHA-256 of its square: uint8 (N, 32).

    Writes the squares to images.npy, uint8 (N, side, side, 3), if they take at most cfg.decoded_gb.
    Otherwise writes what StoredImages needs, with sources.arrow, to make them again.

    The hash is 0 for an image that cannot be read, where cfg.unreadable_images is skip. Raises
    ValueError for one otherwise, and where the disk has no room. `train`: images to train on.
    """
    origins, size = Sources(folder), side * side * 3
    keep = count * size <= cfg.decoded_gb * 1e9
    more = f"are more than task.decoded_gb, {cfg.decoded_gb:g}: decoded whenever they are used"
    print(
        f"Preparing data: {count:,} images of {one_line(cfg.data, 100)}, {classes:,} classes; "
        f"{count * size / 1e6:,.1f} MB "
        f"{f'in {one_line(folder.parent, 100)}' if keep else more}",
        flush=True,
    )
    hashes, transparent = np.zeros((count, 32), np.uint8), np.zeros(count, bool)

    def store(number: int, source: tuple[Any, str]) -> str:
        """Stores an image. Returns the reason why it cannot be read, if so."""
        try:
            image = open_for_square(source[0], side)
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

    problems: list[tuple[int, str]] = []  # images that cannot be read, and why
    progress = tqdm(desc="images", total=count, leave=False, disable=None)
    threads = ThreadPool(min(os.cpu_count() or 1, 32))  # decoders release the GIL
    with threads, progress, open(folder / "images.npy", "wb") as file:
        if keep:
            if count * size > shutil.disk_usage(folder).free:
                hint = "give a larger disk, or lower --task.decoded_gb, or --task.cache_image_size"
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}; {hint}")
            header = {"descr": "|u1", "fortran_order": False, "shape": (count, side, side, 3)}
            np.lib.format.write_array_header_1_0(file, header)
            begin = file.tell()
            file.truncate(begin + count * size)  # an image that cannot be read is black
        for first in range(0, count, BLOCK):
            block = origins.read(first // BLOCK)
            found = threads.starmap(store, enumerate(block, first), 1)
            problems += [(i, each) for i, each in enumerate(found, first) if each]
            progress.update(len(block))
    for number, problem in problems[:SHOWN]:
        shown = one_line(f"{origins[number][1]}: {problem}")
        if cfg.unreadable_images == "refuse":
            field = "data" if number < train else "validation_data"
            raise ValueError(
                f"task.{field}: cannot read {shown}; of {count:,} images {len(problems):,} "
                "cannot be read; --task.unreadable_images skip leaves them out"
            )
        print(f"left out: {shown}", flush=True)
    if number := transparent.sum():
        print(
            f"Preparing data: {number:,} of {count - len(problems):,} images are transparent: put "
            f"on {cfg.background}",
            flush=True,
        )
    if keep:
        (folder / "sources.arrow").unlink()
    else:
        (folder / "images.npy").unlink()
        np.save(folder / "hashes.npy", hashes)
        settings = {"side": side, "background": cfg.background}
        (folder / "squares.json").write_text(json.dumps(settings), encoding="utf-8")
    return hashes


def choose_parts(
    hashes: np.ndarray, readable: np.ndarray, classes: np.ndarray, train: int, split: bool, cfg: Any
) -> dict[str, np.ndarray]:
    """The row numbers of both parts, without images that cannot be read.

    `train`: images to train on, which come first; `split`: no others are given, so some of them are
    held out. Raises ValueError where none is left to evaluate on.
    """
    rows = np.arange(len(hashes))
    parts = [part[readable[part]] for part in np.split(rows, [train])]
    if split:
        keys = hashes[parts[0], :8].copy().view("<u8")[:, 0]
        limits = splits.extremes([(keys, classes[parts[0]])])
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
            f"task.validation_data: no images to evaluate on among the {len(rows)} of "
            f"{one_line(cfg.data, 100)}; give --task.validation_data PATH"
        )
    return {"train": parts[0], "validation": parts[1]}


# ---- Reading -------------------------------------------------------------------------------------


class StoredImages(torch.utils.data.Dataset):
    """The images of a part, from a memory map that the processes of a machine share, or decoded.

    Row i is the square, uint8 (side, side, 3), its class, and `view`, the same object for all rows;
    with mixup it has the dataset, as "others". Raises ValueError, which names the image, where it
    is not the one that was prepared.
    """

    def __init__(self, folder: Path, part: str, view: dict[str, Any]):
        self.arguments, self.view = (folder, part, view), view
        if view["mixup"]:
            self.view = view | {"others": self}
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
        image = self.decode(int(number)) if self.squares is None else self.squares[number]
        return image, int(self.labels[number]), self.view

    def decode(self, number: int) -> np.ndarray:
        source, place = self.originals[number]
        try:
            pixels = square(source, **self.settings)
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
            f"task.data: {place}: {problem}; put back the image that was prepared, and the same "
            "command continues"
        )


def load(folder: Path, name: str) -> np.ndarray:
    return np.load(folder / f"{name}.npy", mmap_mode="r")
