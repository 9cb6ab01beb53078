"""What is trained: a model that gives an image a class.

train.py calls these functions. samestep/settings/contract.py says what each gets and returns:

    prepare_data(cfg)                     what happens once, before training: download, decode
    views(cfg, data)                      (train, validation)
    collate(rows)  count(batch)           a batch of rows; the number of its items in the loss
    build_model(cfg, data)                the model
    loss_sum(model, batch)                the loss, summed over the terms
    eval_sums(model, batch)  metrics(sums)   what evaluation adds up; the numbers from it
    export(model, output, cfg, data)      saves the trained model

and, if they are there: identity, augment, report, test_inputs.
`data` is what prepare_data returned: here, the folder of the prepared data. A whole task around
a plain nn.Module: python -m samestep example plain_module
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field

from samestep.base import fields
from samestep.base.fields import NOTHING, ROUNDING, SHAPE, Dropout, Heads, Layers, Width
from samestep.data import cache
from samestep.data.demo_data import digit_rows
from samestep.data.sources import DataConfig, by_source, check_data_config, split_data
from samestep.images import image_data, image_store, images
from samestep.images.image_store import StoredImages
from samestep.models import classification, pretrained
from samestep.models.pretrained import ModelConfig

# transformers takes 4 s to import, matplotlib 1 s: both wait for the functions that need them.

Batch = dict[str, torch.Tensor]
Row = tuple[np.ndarray, Any, dict]  # uint8 (side, side, 3), its class or classes, its load_view

Side = Annotated[int, Field(ge=1, le=4096)]
StoredSide = Annotated[int, Field(ge=0, le=8192)]
Crop = Annotated[float, Field(ge=0.01, le=1)]
Mixing = Annotated[float, Field(ge=0, le=100)]


# ---- Config --------------------------------------------------------------------------------------


@dataclass
class TaskConfig(DataConfig, ModelConfig):
    data: str = "digits"
    """Images to train on: digits (1,797 of 8 x 8 pixels, inside scikit-learn), a folder with a
    folder of images for each class (cats/1.jpg), a .jsonl, .csv, ... file whose rows name an
    image, by a path beside the file, and its class, or the name of a data set on the Hub."""
    image_column: str = "image"
    """Table: column of paths, or of images as the Hub has them."""
    label_column: str = "label"
    """Table: column of classes."""
    unreadable_images: Literal["refuse", "skip"] = "refuse"
    """Images that cannot be read: end the run, or name them and leave them out."""
    background: str = "white"
    """Colour behind transparent images, in training and in predictions: a name, or "#rrggbb"."""
    image_size: Side = field(default=32, metadata=SHAPE)
    """New model: side in pixels of the square that it sees; a pretrained model has its own."""
    cache_image_size: StoredSide = 0
    """Side in pixels of the square that is cut from the middle of each image and kept in cache_dir;
    0: that of the model, or a seventh more if crops are random."""
    decoded_gb: fields.Gigabytes = field(default=20, metadata=NOTHING)
    """Maximum GB of decoded squares in cache_dir, 3 x cache_image_size^2 bytes each. Where all take
    more, images are decoded when they are used: the same training, with more num_workers."""
    min_crop: Crop = 0.8
    """Smallest share of the square's area that a random crop keeps in training; 1: no crops."""
    flip: bool = False
    """Mirror half of the images in training; for images whose left and right mean the same."""
    mixup: Mixing = 0.0
    """In training each image is mixed with another one, which is drawn from all, by a share of the
    beta distribution with this parameter; 0: never. It reads two images a row."""
    label_smoothing: Dropout = 0.0
    """In training: this share of each label is spread over all classes."""
    architecture: Literal["vit", "resnet", "resnet_batchnorm"] = field(
        default="vit", metadata=SHAPE
    )
    """New model: a vision transformer, a ResNet v2 with GroupNorm, or a ResNet with BatchNorm,
    whose result depends on how a step is cut."""
    hidden_size: Width = field(default=64, metadata=SHAPE)
    """New model: its width; the four stages of a resnet double their width up to this one."""
    num_layers: Layers = field(default=2, metadata=SHAPE)
    """New model: layers of a vit; blocks in each stage of a resnet."""
    stages: list[fields.PositiveInt] | None = field(default=None, metadata=SHAPE)
    """New resnet for photos, with a narrow stem: blocks in each of its four stages, [3, 4, 6, 3] in
    a ResNet-50; null: num_layers in each."""
    patch_size: Side = field(default=8, metadata=SHAPE)
    """New vit: side in pixels of the patches of an image."""
    num_heads: Heads = 4
    """New vit: attention heads in a layer."""
    dropout: Dropout = 0.0
    """New vit: dropout in each layer; new resnet: share of its blocks that are left out at
    random."""
    channels_last: bool = field(default=False, metadata=ROUNDING)
    """Memory layout that convolutions on GPUs prefer in bf16 and fp16. For a resnet on a CPU, in
    fp32, it takes a sixth less time at 96 pixels and a width of 512, and the same at 32 and 128."""


def check_config(cfg: TaskConfig) -> None:
    """Raises ValueError for fields that exclude each other, before anything is read."""
    check_data_config(cfg, ["digits"])
    new, vit, digits = not cfg.model_name_or_path, cfg.architecture == "vit", cfg.data == "digits"
    patch = cfg.patch_size if vit and new else 1
    unit = cfg.num_heads if vit else 64  # a GroupNorm has 8 groups, of 1/8 of the width
    patches = (cfg.image_size // patch) ** 2
    rules = [
        ("data", len(split_data(cfg.data)) == 1, "one folder, file or data set"),
        ("validation_data", not (digits and cfg.validation_data), "empty, as digits has its own"),
        ("background", images.is_color(cfg.background), "a colour, as white or '#ffffff'"),
        ("image_size", cfg.image_size % patch == 0, f"a multiple of patch_size, {patch}"),
        ("hidden_size", cfg.hidden_size % unit == 0, f"a multiple of {unit}"),
        ("stages", len(cfg.stages or "four") == 4, "four numbers, as [3, 4, 6, 3]"),
    ]
    if vit and new:
        rules.append(("patch_size", patches <= 2**16, "larger: at most 65,536 fit into memory"))
    fields.check_fields(cfg, rules)
    names = "image_column label_column unreadable_images background incomplete_rows"
    drops = "vit or resnet"
    ignored = [("dropout", cfg.architecture in drops.split(), f"unless architecture is {drops}")]
    ignored += [("stages", not vit, "unless architecture is resnet or resnet_batchnorm")]
    fields.check_ignored_fields(cfg, [*ignored, (names, not digits, "where task.data is digits")])
    pretrained.check_unread(cfg)


# ---- Data ----------------------------------------------------------------------------------------


def prepare_data(cfg: TaskConfig) -> Path:
    """Decodes the images, once; the folder of the result.

    A field that shapes it is named here; else what was prepared with another value is taken.
    """
    check_config(cfg)
    ((_, cfg),) = by_source(cfg, image_data.readable_endings)
    digits = cfg.data == "digits"
    side = image_data.stored_side(cfg, digits)
    return cache.prepare(
        cfg,
        "image_column label_column unreadable_images background decoded_gb",
        lambda folder: image_store.build(cfg, folder, side, digit_rows() if digits else None),
        image_data.readable_endings,
        more=[side],
        shipped={"digits": []}.get,
        goes_on=False,
    )


def identity(cfg: TaskConfig, data: Path) -> str:
    return cache.short_digest(data / "labels.json")


def views(cfg: TaskConfig, data: Path) -> tuple[Any, Any]:
    view = image_data.load_view(cfg, data)
    return StoredImages(data, "train", view), StoredImages(data, "validation", view)


def augment(row: Row, generator: torch.Generator) -> Row:
    """A random crop, or its mirror; with mixup it is mixed with that of another image."""
    image, label, view = row
    image = image_data.crop(image, view, generator)
    if view["label_smoothing"] or view["mixup"]:
        label = image_data.smooth(label, view)
    if view["mixup"]:
        other, share = image_data.draw_other(view, generator)
        pixels = image_data.crop(other[0], view, generator)
        image = (share * image + (1 - share) * pixels + 0.5).astype(np.uint8)
        label = share * label + (1 - share) * image_data.smooth(other[1], view)
    return image, label, view


def collate(rows: list[Row]) -> Batch:
    """pixel_values, float32 (B, 3, side, side), normalised, and labels: classes, int64 (B,), or
    distributions, float32 (B, classes)."""
    view = rows[0][2]
    side = view["side"]
    squares = [image if len(image) == side else images.resize(image, side) for image, _, _ in rows]
    pixels = torch.from_numpy(np.stack(squares)).permute(0, 3, 1, 2)
    layout = torch.channels_last if view["channels_last"] else torch.contiguous_format
    pixels = pixels.contiguous(memory_format=layout).float()  # moved while they are bytes
    mean, std = (torch.tensor(view[name])[:, None, None] for name in ("mean", "std"))
    pixels = pixels.div_(255).sub_(mean).div_(std)
    labels = torch.from_numpy(np.stack([label for _, label, _ in rows]))
    return {"pixel_values": pixels, "labels": labels}


def count(batch: Batch) -> int:
    return len(batch["labels"])


# ---- Model and loss ------------------------------------------------------------------------------


def build_model(cfg: TaskConfig, data: Path) -> torch.nn.Module:
    """A model to start from, with new weights for other classes than its own, or a new one."""
    import transformers

    names = json.loads((data / "labels.json").read_text(encoding="utf-8"))
    classes = classification.class_settings(names)
    auto, config = transformers.AutoModelForImageClassification, None
    if cfg.model_name_or_path:
        classes["ignore_mismatched_sizes"] = True  # the head may be for other classes
        model = pretrained.load_model(auto, cfg, head=("classifier",), **classes)
    elif cfg.architecture == "vit":
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
            **classes,
        )
    else:
        classes |= {
            "embedding_size": cfg.hidden_size // (32 if cfg.stages else 8),
            "hidden_sizes": [cfg.hidden_size // part for part in (8, 4, 2, 1)],
            "depths": cfg.stages or [cfg.num_layers] * 4,
        }
        if cfg.architecture == "resnet":
            groups = min(32, cfg.hidden_size // 32) if cfg.stages else 8
            classes |= {"num_groups": groups, "drop_path_rate": cfg.dropout}
        kinds = {"resnet": transformers.BitConfig, "resnet_batchnorm": transformers.ResNetConfig}
        config = kinds[cfg.architecture](**classes)
    if config:
        model = pretrained.new_model(auto, config, cfg)
    model.config.background = cfg.background  # for predictions: image processors cannot hold it
    return model


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


@torch.no_grad()
def report(model: Any, sums: Batch, output: Path, cfg: TaskConfig, data: Path) -> dict:
    """The scores of each class, a picture of the confusion, and some images with their answers."""
    from samestep.base.pictures import try_picture

    names = [*model.config.id2label.values()]
    shown = classification.report_table(sums["table"], names, output)
    validation, path = views(cfg, data)[1], output / "samples.png"
    drawn = try_picture(image_data.draw_samples, model, validation, collate, names, path)
    return shown | {"samples": drawn}


def test_inputs(rows: list[Row], cfg: TaskConfig, data: Path) -> list:
    """Images as the model sees them, and its inputs: what the check of the export asks."""
    return [image_data.question(row, collate([row])) for row in rows]


def export(model: Any, output: Path, cfg: TaskConfig, data: Path) -> None:
    """Saves files that pipeline("image-classification", folder) loads."""
    with pretrained.quiet():  # without torchvision, transformers remarks that it uses Pillow
        model.save_pretrained(output)
        image_data.save_processor(image_data.load_view(cfg, data), output)
