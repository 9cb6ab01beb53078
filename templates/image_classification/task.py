"""What is trained: a model that gives an image a class.

train.py calls these functions; docs/task.md says what each gets and returns. One that names `data`
gets what prepare_data returned, loaded from its folder, data.folder.
"""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import datasets
import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field

from samestep.base.fields import MODEL, ROUNDING
from samestep.data.sources import DataConfig
from samestep.images import image_data, image_rows
from samestep.models import classification, pretrained
from samestep.models.pretrained import ModelConfig

# transformers takes 4 s to import, matplotlib 1 s: both wait for the functions that need them.

Batch = dict[str, torch.Tensor]
Side = Annotated[int, Field(ge=1, le=4096)]
Size = Annotated[int, Field(ge=1, le=65_536)]
Crop = Annotated[float, Field(ge=0.01, le=1)]
Mixing = Annotated[float, Field(ge=0, le=100)]
Dropout = Annotated[float, Field(ge=0, lt=1)]


# ---- Config --------------------------------------------------------------------------------------


@dataclass
class TaskConfig(DataConfig, ModelConfig):
    data: str = "digits"
    """Images to train on: digits (1,797 of 8 x 8 pixels, inside scikit-learn), a folder with a
    folder of images for each class (cats/1.jpg), a .jsonl, .csv, ... file whose rows name an
    image, by a path beside the file, and its class, or the name of a dataset on the Hub."""
    image_column: str = "image"
    """Table: column of paths, or of images as the Hub has them."""
    label_column: str = "label"
    """Table: column of classes."""
    image_size: Side = 32
    """New model: side in pixels of the square that it sees; a pretrained model has its own."""
    min_crop: Crop = 0.8
    """About the smallest fraction of the square's area that a random crop keeps; 1: no crops."""
    flip: bool = field(default=False, metadata=MODEL)
    """Mirror half of the images in training; for images whose left and right mean the same."""
    mixup: Mixing = field(default=0.0, metadata=MODEL)
    """In training each image is mixed with another one, drawn from all, by a fraction of the beta
    distribution with this parameter; 0: none is. It reads two images a sample."""
    label_smoothing: Dropout = field(default=0.0, metadata=MODEL)
    """In training: this fraction of each label is spread over all classes."""
    architecture: Literal["vit", "resnet", "resnet_batchnorm"] = field(
        default="vit", metadata=MODEL
    )
    """New model: a vision transformer, a ResNet v2 with GroupNorm, or a ResNet with BatchNorm,
    whose result depends on the micro-batches."""
    hidden_size: Size = field(default=64, metadata=MODEL)
    """New model: its width; the four stages of a resnet double their width up to this one."""
    num_layers: Size = field(default=2, metadata=MODEL)
    """New model: layers of a vit; blocks in each stage of a resnet."""
    stages: list[Size] | None = field(default=None, metadata=MODEL)
    """New resnet for photos, with a narrow stem: blocks in each of its four stages, [3, 4, 6, 3] in
    a ResNet-50; null: num_layers in each."""
    patch_size: Side = field(default=8, metadata=MODEL)
    """New vit: side in pixels of the patches of an image."""
    num_heads: Size = field(default=4, metadata=MODEL)
    """New vit: attention heads in a layer."""
    dropout: Dropout = field(default=0.0, metadata=MODEL)
    """New vit: dropout in each layer; new resnet: fraction of its blocks that are left out at
    random."""
    channels_last: bool = field(default=False, metadata=ROUNDING | MODEL)
    """Memory layout that convolutions on GPUs prefer in bf16 and fp16. For a resnet on a CPU, in
    fp32, it takes a sixth less time at 96 pixels and a width of 512, and the same at 32 and 128."""


check_config = image_rows.check_config  # fields that exclude each other


# ---- Data ----------------------------------------------------------------------------------------


def prepare_data(cfg: TaskConfig, folder: Path) -> datasets.DatasetDict:
    """`path` or `bytes` of each image, and `label`, int64. Each is decoded once, to check it."""
    return image_rows.read_rows(cfg, folder)


files = image_rows.named_files  # images that a table names


def views(cfg: TaskConfig, data: Any) -> tuple[Any, Any]:
    """Rows {image, label}: the middle of an image, uint8 (S, S, 3), decoded when it is used."""
    train = image_data.Images(data["train"], data.folder)
    return train, image_data.Images(data["validation"], data.folder)


def augment(row: dict, generator: torch.Generator, cfg: TaskConfig, data: Any) -> dict:
    """A random crop, perhaps mirrored; with mixup it is mixed with that of another image."""
    return image_data.augment(row, generator, cfg, data)


def collate(rows: list[dict], cfg: TaskConfig, data: Any) -> Batch:
    """pixel_values, float32 (B, 3, side, side), normalized, and labels: classes, int64 (B,), or
    distributions, float32 (B, classes)."""
    pixels = image_data.pixel_values(rows, cfg, data)
    labels = torch.from_numpy(np.stack([row["label"] for row in rows]))
    return {"pixel_values": pixels, "labels": labels}


def count(batch: Batch) -> int:
    return len(batch["labels"])


# ---- Model and loss ------------------------------------------------------------------------------


def build_model(cfg: TaskConfig, data: Any) -> torch.nn.Module:
    """The pretrained model, with new weights for other classes than its own, or a new one."""
    import transformers

    names = data["train"].features["label"].names
    auto = transformers.AutoModelForImageClassification
    if cfg.architecture == "vit":
        config = transformers.ViTConfig(
            image_size=cfg.image_size,
            patch_size=cfg.patch_size,
            hidden_size=cfg.hidden_size,
            intermediate_size=4 * cfg.hidden_size,
            num_hidden_layers=cfg.num_layers,
            num_attention_heads=cfg.num_heads,
            hidden_dropout_prob=cfg.dropout,
            attention_probs_dropout_prob=cfg.dropout,
            initializer_range=cfg.hidden_size**-0.5,  # the usual 0.02 is too little when narrow
        )
    else:
        sizes: dict[str, Any] = {
            "embedding_size": cfg.hidden_size // (32 if cfg.stages else 8),
            "hidden_sizes": [cfg.hidden_size // part for part in (8, 4, 2, 1)],
            "depths": cfg.stages or [cfg.num_layers] * 4,
        }
        if cfg.architecture == "resnet":
            groups = min(32, cfg.hidden_size // 32) if cfg.stages else 8
            sizes |= {"num_groups": groups, "drop_path_rate": cfg.dropout}
        kinds = {"resnet": transformers.BitConfig, "resnet_batchnorm": transformers.ResNetConfig}
        config = kinds[cfg.architecture](**sizes)
    return pretrained.build_classifier(auto, cfg, config, names, ("classifier",))


def loss_sum(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Cross entropy, in nats."""
    logits = model(pixel_values=batch["pixel_values"]).logits.float()
    return F.cross_entropy(logits, batch["labels"], reduction="sum")


# ---- Evaluation and export -----------------------------------------------------------------------


@torch.no_grad()
def eval_sums(model: torch.nn.Module, batch: Batch) -> Batch:
    """The loss, and the table (C, C) of classification.py."""
    logits = model(pixel_values=batch["pixel_values"]).logits.float()
    loss = F.cross_entropy(logits, batch["labels"], reduction="sum")
    return {"loss": loss, "table": classification.count_answers(logits, batch["labels"])}


def metrics(sums: Batch) -> dict[str, float]:
    """The mean loss of an image, in nats, accuracy and macro F1."""
    loss = float(sums["loss"] / sums["table"].sum())
    return {"loss": loss, **classification.score_table(sums["table"])}


def report(model: Any, sums: dict, output: Path, cfg: TaskConfig, data: Any) -> dict[str, Any]:
    """The scores of each class, and a picture of the confusion."""
    return image_data.report(sums, output, data)


test_inputs = image_data.test_inputs  # that the check of the export gives to both models


def export(model: Any, output: Path, cfg: TaskConfig, data: Any) -> None:
    """Saves files that pipeline("image-classification", output) loads."""
    model.save_pretrained(output)
    shutil.copy(data.folder / "preprocessor_config.json", output)
