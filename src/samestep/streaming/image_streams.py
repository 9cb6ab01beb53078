"""Labelled images that are read from shards while the model trains: see streaming.py."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from samestep.base.console import one_line
from samestep.data.tables import Columns
from samestep.images import image_data, images
from samestep.streaming import streaming


def columns_of(cfg: Any) -> Columns:
    return {"image": cfg.image_column, "label": cfg.label_column}


def class_of(row: dict) -> list[str]:
    """The name of a label; raises ValueError for anything but a class."""
    row = {**row, "image": b"-"}
    image_data.check_image_row(row)
    return [row["label"]]


def prepare_index(cfg: Any) -> Path:
    """The folder of the index, with labels.json."""

    def build(folder: Path, names: set[str]) -> list[Path]:
        if len(names) < 2:
            shown = one_line(", ".join(names), 60) or "none"
            raise ValueError(f"task.data: the classes are {shown}; give at least two")
        path = folder / "labels.json"
        path.write_text(json.dumps(sorted(names)), encoding="utf-8")
        return [path]

    return streaming.prepare(cfg, columns_of(cfg), [], [], class_of, build)


class StreamedSquares(streaming.ShardRows):
    """The images of a part: rows like those of image_store.StoredImages, decoded when read."""

    def __init__(self, folder: Path, part: str, cfg: Any, side: int, view: dict[str, Any]):
        super().__init__(folder, part, cfg, columns_of(cfg))
        self.side, self.view, self.damaged = side, view, cfg.unreadable_images
        names = json.loads((folder / "labels.json").read_text(encoding="utf-8"))
        self.classes = {name: i for i, name in enumerate(names)}

    def complete(self, values: dict) -> tuple[np.ndarray, int, dict]:
        image_data.check_image_row(values)
        image, label = values["image"], values["label"]
        if isinstance(image, str):
            raise ValueError(f"the image is {one_line(repr(image), 60)}; shards hold images")
        if label not in self.classes:
            raise ValueError(f"the label {one_line(label, 60)} is none to train on")
        return images.square(image, self.side, self.cfg.background), self.classes[label], self.view
