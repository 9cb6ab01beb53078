"""Many byte strings on disk, read by their number: paths, or encoded images.

They lie one after the other in files of bounded size. An array, memory-mapped, has the place of
each. So neither writing nor reading keeps them in memory.
"""

from array import array
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

FILE_SIZE = 2**30  # bytes; a longer piece has a file of its own


class PieceWriter:
    """Writes NAME-00000.bin, ..., and at its end NAME.npy: int64 (N, 3), file, first byte, size."""

    def __init__(self, folder: Path, name: str):
        self.folder, self.name, self.places = folder, name, array("q")
        self.number, self.file = -1, cast(BinaryIO, None)

    def append(self, piece: bytes) -> None:
        if self.file is None or (self.file.tell() and self.file.tell() + len(piece) > FILE_SIZE):
            self.close_file()
            self.number += 1
            self.file = open(piece_file(self.folder, self.name, self.number), "wb")
        self.places.extend((self.number, self.file.tell(), len(piece)))
        self.file.write(piece)

    def close_file(self) -> None:
        if self.file:
            self.file.close()

    def __enter__(self) -> "PieceWriter":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close_file()
        places = np.frombuffer(self.places, np.int64).reshape(-1, 3)
        np.save(self.folder / f"{self.name}.npy", places)


class Pieces:
    """The pieces that a PieceWriter has written."""

    def __init__(self, folder: Path, name: str):
        self.folder, self.name = folder, name
        self.places = np.load(folder / f"{name}.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, i: int) -> bytes:
        number, first, size = self.places[i].tolist()
        with open(piece_file(self.folder, self.name, number), "rb", buffering=0) as file:
            file.seek(first)
            return file.read(size)

    def remove(self) -> None:
        for path in (self.folder / f"{self.name}.npy", *self.folder.glob(f"{self.name}-*.bin")):
            path.unlink()


def piece_file(folder: Path, name: str, number: int) -> Path:
    return folder / f"{name}-{number:05}.bin"
