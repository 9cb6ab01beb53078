"""Many byte strings on disk, read by their number: paths, or encoded images.

They lie one after the other in NAME.bin. NAME.npy, memory-mapped, has the place where each ends. So
neither writing nor reading keeps them in memory.
"""

from array import array
from pathlib import Path
from typing import Any

import numpy as np


class PieceWriter:
    """Writes NAME.bin, and at its end NAME.npy: int64 (N + 1,), of which the first is 0."""

    def __init__(self, folder: Path, name: str):
        self.path, self.ends = folder / f"{name}.npy", array("q", [0])
        self.file = open(folder / f"{name}.bin", "wb")

    def append(self, piece: bytes) -> None:
        self.file.write(piece)
        self.ends.append(self.file.tell())

    def __enter__(self) -> "PieceWriter":
        return self

    def __exit__(self, *_: Any) -> None:
        self.file.close()
        np.save(self.path, np.frombuffer(self.ends, np.int64))


class Pieces:
    """The pieces that a PieceWriter has written."""

    def __init__(self, folder: Path, name: str):
        self.folder, self.path, self.places = folder, folder / f"{name}.bin", folder / f"{name}.npy"
        self.ends = np.load(self.places, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, i: int) -> bytes:
        first, end = self.ends[i : i + 2].tolist()
        with open(self.path, "rb", buffering=0) as file:
            file.seek(first)
            return file.read(end - first)

    def remove(self) -> None:
        self.path.unlink()
        self.places.unlink()
