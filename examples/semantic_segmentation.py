"""Semantic segmentation (SegFormer): a class for each pixel; mean IoU over all pixels.

make train ARGS="--max_steps 400 --learning_rate 4e-3"
make train ARGS="--task.data scenes --task.labels sky,road --task.model_name_or_path nvidia/mit-b0"
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import datasets
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageOps
from transformers import AutoImageProcessor, AutoModelForSemanticSegmentation, SegformerConfig
from transformers import SegformerImageProcessorPil as Processor
from transformers.models.conditional_detr.modeling_conditional_detr import replace_batch_norm

from samestep import DataConfig, ModelConfig, labels, load_splits, pretrained

UNIT, IGNORED = "pixels", 255
load_processor = cache(AutoImageProcessor.from_pretrained)


@dataclass
class TaskConfig(DataConfig, ModelConfig):
    data: str = ""
    """Rows {image, label}, label being an image of class numbers, 255 where a pixel does not count:
    a folder with metadata.jsonl, whose lines have image_file_name and label_file_name, a .parquet
    file, or a dataset on the Hub. Empty: drawn shapes."""
    labels: str = ""
    """Names of the classes 0, 1 and so on; empty: the numbers, or those of the drawn shapes."""
    image_size: int = 64
    """Side in pixels to which images are scaled."""


def drawn_rows() -> Iterator[dict]:
    """Discs and squares in front of noise; the first lines of an image do not count."""
    draw = random.Random(0)
    for i in range(600):
        noise = np.random.default_rng(i).integers(0, 120, (64, 64, 3), np.uint8)
        image, label = Image.fromarray(noise), Image.new("L", (64, 64), 0)
        for _ in range(draw.randrange(1, 4)):
            x, y, kind = draw.randrange(40), draw.randrange(40), draw.randrange(1, 3)
            for drawn, fill in ((image, (200, 220, 240)), (label, kind)):
                shape = "ellipse" if kind == 1 else "rectangle"
                getattr(ImageDraw.Draw(drawn), shape)([x, y, x + 20, y + 20], fill)
        ImageDraw.Draw(label).rectangle([0, 0, 63, draw.randrange(4)], IGNORED)
        yield {"image": image, "label": label}


def prepare_data(cfg: TaskConfig, folder: Path) -> datasets.DatasetDict:
    cfg.labels = cfg.labels or ("" if cfg.data else "ground,disc,square")
    names, seen = labels.parse_names(cfg.labels), set()

    def read(row: dict) -> dict:
        found = {*np.unique(row["label"]).tolist()} - {IGNORED}
        seen.update(found)
        sizes = row["label"].size, row["image"].size
        if sizes[0] != sizes[1] or found - {*range(len(names) or IGNORED)}:
            wanted = f"it should be {sizes[1]} with classes of task.labels"
            raise ValueError(f"a label of {sizes[0]} with classes {sorted(found)[:9]}: {wanted}")
        return {}

    pictures = {"images": ["image"], "masks": ["label"], "upright": True}
    splits = load_splits(cfg, ["image", "label"], read, made_up=drawn_rows, **pictures)
    names = names or [str(number) for number in range(max(seen, default=0) + 1)]
    if missing := [name for number, name in enumerate(names) if number not in seen]:
        print(f"Preparing data: no pixel has the class {', '.join(missing)}: scores leave it out")
    if len(seen) < 2:
        raise ValueError(f"task.data: all pixels have class {seen or 255}; 255 is none: give 0, 1")
    cfg.labels = labels.keep_names(names, folder)
    side = {"height": cfg.image_size, "width": cfg.image_size}
    pretrained.save_processor(Processor, cfg, folder, size=side, do_reduce_labels=False)
    return splits


def augment(row: dict, generator: torch.Generator) -> dict:
    """Image and label together: 70 to 100 % of each side, and half of them mirrored."""
    share, x, y, mirrored = torch.rand(4, generator=generator).tolist()
    width, height = (round(side * (0.7 + 0.3 * share)) for side in row["image"].size)
    left, top = round(x * (row["image"].width - width)), round(y * (row["image"].height - height))
    parts = {n: each.crop((left, top, left + width, top + height)) for n, each in row.items()}
    return {n: ImageOps.mirror(each) for n, each in parts.items()} if mirrored < 0.5 else parts


def collate(rows: list[dict], data) -> dict:
    """pixel_values, float32 (B, 3, S, S), and labels, int64 (B, S, S), IGNORED where none is."""
    images = [row["image"] for row in rows]
    labels = [np.asarray(row["label"]) for row in rows]
    return load_processor(data.folder)(images, labels, return_tensors="pt")


def count(batch: dict) -> int:
    return int((batch["labels"] != IGNORED).sum())


def build_model(cfg: TaskConfig) -> torch.nn.Module:
    """The BatchNorm of its head is frozen: its statistics would be those of a micro-batch."""
    options = {"hidden_sizes": [16, 32, 48, 64], "depths": [1] * 4, "decoder_hidden_size": 64}
    options |= {"classifier_dropout_prob": 0.0, "drop_path_rate": 0.0}
    given = (AutoModelForSemanticSegmentation, cfg, SegformerConfig(**options))
    model = pretrained.build_classifier(*given, labels.parse_names(cfg.labels), ("decode_head",))
    with torch.no_grad():  # its buffers would keep the graph of weights that are gone
        replace_batch_norm(model)
    return model


def logits_of(model: torch.nn.Module, batch: dict) -> torch.Tensor:
    """float32 (B, C, S, S); the model gives a quarter of the resolution."""
    logits = model(batch["pixel_values"]).logits.float()
    return F.interpolate(logits, batch["labels"].shape[1:], mode="bilinear", align_corners=False)


def loss_sum(model: torch.nn.Module, batch: dict) -> torch.Tensor:
    """Cross entropy of the pixels that count, in nats."""
    options = {"ignore_index": IGNORED, "reduction": "sum"}
    return F.cross_entropy(logits_of(model, batch), batch["labels"], **options)


def eval_sums(model: torch.nn.Module, batch: dict) -> dict:
    """The loss, and a table (C, C) of pixels: true class, predicted class."""
    logits, labels, size = logits_of(model, batch), batch["labels"], model.config.num_labels
    pairs = (labels * size + logits.argmax(1))[labels != IGNORED]
    table = torch.bincount(pairs, minlength=size**2).view(size, size)
    return {"loss": loss_sum(model, batch), "table": table}


def metrics(sums: dict) -> dict:
    """Mean over the classes of intersection over union; the fraction of pixels that are right."""
    table, right = sums["table"], sums["table"].diagonal()
    iou = right / (table.sum(0) + table.sum(1) - right)  # NaN for a class that is nowhere
    scores = {"miou": float(iou.nanmean()), "accuracy": float(right.sum() / table.sum())}
    return {"loss": float(sums["loss"] / table.sum()), **scores}


export = pretrained.export  # the model, with what prepare_data has saved
