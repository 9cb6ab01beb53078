"""Object detection (Conditional DETR): boxes and their classes; average precision at IoU 0.5.

make train ARGS="--max_steps 500 --learning_rate 1e-3 --warmup_steps 50"
make train ARGS="--task.data photos --task.model_name_or_path microsoft/conditional-detr-resnet-50"
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import datasets
import numpy as np
import torch
from PIL import Image, ImageDraw
from transformers import AutoImageProcessor, AutoModelForObjectDetection, ConditionalDetrConfig
from transformers import ConditionalDetrImageProcessorPil as Processor
from transformers.loss import loss_deformable_detr as losses
from transformers.loss.loss_for_object_detection import box_iou, center_to_corners_format

from samestep import DataConfig, ModelConfig, labels, load_splits, map_rows, pretrained
from samestep.data.sources import IncompleteRow

UNIT, BINS = "boxes", 1000
NAMES = ("bbox", "bboxes", "boxes"), ("category", "categories", "category_id", "label", "labels")
load_processor = cache(AutoImageProcessor.from_pretrained)


@dataclass
class TaskConfig(DataConfig, ModelConfig):
    data: str = ""
    """Rows {image, objects}, objects being {bbox, category}: lists of boxes [x, y, width, height]
    in pixels, and of class numbers or names; or a list of such objects. A folder with
    metadata.jsonl, a .parquet file, or a dataset on the Hub. Empty: drawn shapes."""
    labels: str = ""
    """Names of the classes 0, 1 and so on; empty: those of the data, or its numbers."""
    image_size: int = 64
    """Largest side to which images are scaled; they are padded to a square of it."""


def drawn_rows() -> Iterator[dict]:
    draw = random.Random(0)
    for i in range(1000):
        noise = np.random.default_rng(i).integers(0, 60, (64, 64, 3), np.uint8)
        image, objects = Image.fromarray(noise), {"bbox": [], "category": []}
        for corner in draw.sample([(0, 0), (0, 32), (32, 0), (32, 32)], draw.randrange(1, 4)):
            kind, width, height = draw.randrange(2), draw.randrange(12, 24), draw.randrange(12, 24)
            x, y = corner[0] + draw.randrange(8), corner[1] + draw.randrange(8)
            style = [{"fill": "white"}, {"outline": "white", "width": draw.randrange(2, 5)}][kind]
            ImageDraw.Draw(image).rectangle([x, y, x + width, y + height], **style)
            objects["bbox"].append([x, y, width, height])
            objects["category"].append(["block", "frame"][kind])
        yield {"image": image, "objects": objects}


def read(row: dict) -> dict:
    """bbox and category as lists, by any of their usual names; or of a list of objects."""
    objects, (width, height) = row["objects"], row["image"].size
    if isinstance(objects, list):
        keys = objects[0] if objects else ("bbox", "category")
        objects = {key: [each[key] for each in objects] for key in keys}
    names = [next((key for key in known if key in objects), known[0]) for known in NAMES]
    boxes, kinds = (objects[name] for name in names)
    if len(boxes) != len(kinds):
        raise ValueError(f"{len(boxes)} boxes, of {len(kinds)} categories")
    for box in boxes:
        x, y, w, h = map(float, box)
        if not (w > 0 < h and -1 <= x < x + w <= width + 1 and -1 <= y < y + h <= height + 1):
            inside = f"[x, y, width, height] in pixels inside its image, {width} x {height}"
            raise IncompleteRow(f"box {box} is not {inside}")
    if boxes and max(map(max, boxes)) <= 1:
        raise IncompleteRow(f"box {boxes[0]} is below a pixel; give pixels, not parts")
    return {"objects": {"bbox": boxes, "category": [*map(labels.parse_class, kinds)]}}


def prepare_data(cfg: TaskConfig, folder: Path) -> datasets.DatasetDict:
    if not find_spec("scipy"):
        raise ValueError("the loss assigns boxes by scipy: pip install scipy")
    text, box = datasets.Value("string"), datasets.List(datasets.Value("float64"))
    features = {"objects": {"bbox": datasets.List(box), "category": datasets.List(text)}}
    options = {"made_up": drawn_rows, "features": features, "images": ["image"], "upright": True}
    splits = load_splits(cfg, ["image", "objects"], read, **options)
    seen = {kind for rows in splits.values() for row in rows["objects"] for kind in row["category"]}
    known, given = splits.classes.get("objects") or sorted(seen), labels.parse_names(cfg.labels)
    if seen and all(kind.isdecimal() for kind in seen):  # numbers of the classes
        known = [str(i) for i in range(len(given) or max(map(int, seen), default=0) + 1)]
    cfg.labels = labels.keep_names(given or known, folder)
    names = labels.parse_names(cfg.labels)
    known = known if given and len(known) == len(given) else names

    def number(row: dict) -> dict:
        kinds = row["objects"]["category"]
        if wrong := {*kinds} - {*known}:
            raise ValueError(f"a box of class {min(wrong)}, of the classes {', '.join(names)}")
        return {"objects": {**row["objects"], "category": [known.index(kind) for kind in kinds]}}

    largest = {"max_height": cfg.image_size, "max_width": cfg.image_size}
    square = {"height": cfg.image_size, "width": cfg.image_size}
    pretrained.save_processor(Processor, cfg, folder, size=largest, do_pad=True, pad_size=square)
    return map_rows(splits, number, keep=["image"])


def augment(row: dict, generator: torch.Generator) -> dict:
    """Half of the images are mirrored, with their boxes."""
    if torch.rand(1, generator=generator) < 0.5:
        return row
    image = row["image"].transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    boxes = [[image.width - x - w, y, w, h] for x, y, w, h in row["objects"]["bbox"]]
    return {"image": image, "objects": {**row["objects"], "bbox": boxes}}


def collate(rows: list[dict], data) -> dict:
    """pixel_values, float32 (B, 3, S, S), pixel_mask, int64 (B, S, S), and labels: for each image
    class_labels (N,) and boxes (N, 4), with their centers, in parts of the square."""
    images, annotations = [row["image"] for row in rows], []
    for row in rows:
        pairs = zip(row["objects"]["bbox"], row["objects"]["category"], strict=True)
        listed = [
            {"bbox": b, "category_id": k, "area": b[2] * b[3], "iscrowd": 0} for b, k in pairs
        ]
        annotations.append({"image_id": 0, "annotations": listed})
    batch = load_processor(data.folder)(images, annotations, return_tensors="pt")
    labels = [{name: each[name] for name in ("class_labels", "boxes")} for each in batch["labels"]]
    return {**batch, "labels": labels}


def count(batch: dict) -> int:
    return sum(len(each["boxes"]) for each in batch["labels"])


def build_model(cfg: TaskConfig) -> torch.nn.Module:
    sizes = {"model_type": "resnet", "layer_type": "basic", "embedding_size": 32}
    sizes |= {"hidden_sizes": [32, 64], "depths": [1, 1]}
    options = {"d_model": 64, "num_queries": 12, "dropout": 0.0}
    for part in ("encoder", "decoder"):
        options |= {f"{part}_layers": 2, f"{part}_ffn_dim": 128, f"{part}_attention_heads": 4}
    config = ConditionalDetrConfig(backbone_config=sizes, **options)
    given = (AutoModelForObjectDetection, cfg, config, labels.parse_names(cfg.labels))
    return pretrained.build_classifier(*given, ("class_labels_classifier",))


def outputs_of(model: torch.nn.Module, batch: dict) -> dict:
    """logits, float32 (B, Q, C), and pred_boxes, float32 (B, Q, 4)."""
    output = model(batch["pixel_values"], batch["pixel_mask"])
    return {"logits": output.logits.float(), "pred_boxes": output.pred_boxes.float()}


def loss_sum(model: torch.nn.Module, batch: dict) -> torch.Tensor:
    """The loss of transformers before it is divided by the number of boxes: transformers asks other
    processes for theirs, and would wait for those that have fewer micro-batches."""
    config, labels, outputs = model.config, batch["labels"], outputs_of(model, batch)
    costs = [getattr(config, f"{name}_cost") for name in ("class", "bbox", "giou")]
    matcher = losses.DeformableDetrHungarianMatcher(*costs)
    of = losses.DeformableDetrImageLoss(matcher, config.num_labels, config.focal_alpha, [])
    pairs = matcher(outputs, labels)
    parts = of.loss_labels(outputs, labels, pairs, 1) | of.loss_boxes(outputs, labels, pairs, 1)
    boxes = config.bbox_loss_coefficient * parts["loss_bbox"]
    return parts["loss_ce"] + boxes + config.giou_loss_coefficient * parts["loss_giou"]


def eval_sums(model: torch.nn.Module, batch: dict) -> dict:
    """The loss; of each class the boxes, and by bins of their score the predictions (C, BINS), and
    those that are right: the likeliest with an IoU of 0.5 or more for each box."""
    outputs, classes = outputs_of(model, batch), model.config.num_labels
    scores = outputs["logits"].sigmoid()
    bins = (scores * (BINS - 1)).long() + torch.arange(classes, device=scores.device) * BINS
    right = torch.zeros(classes * BINS)
    boxes = center_to_corners_format(outputs["pred_boxes"])
    for i, label in enumerate(batch["labels"]):
        overlap = box_iou(boxes[i], center_to_corners_format(label["boxes"]))[0]
        for kind in set(label["class_labels"].tolist()):
            left = overlap * (label["class_labels"] == kind)  # of boxes that no prediction has
            for query in scores[i, :, kind].argsort(descending=True, stable=True).tolist():
                best, box = left[query].max(0)
                if best >= 0.5:
                    right[bins[i, query, kind]] += 1
                    left[:, box] = 0
    kinds = torch.cat([label["class_labels"] for label in batch["labels"]])
    sums = {"loss": loss_sum(model, batch), "true": torch.bincount(kinds, minlength=classes)}
    found = torch.bincount(bins.flatten(), minlength=classes * BINS)
    return sums | {"found": found.view(classes, BINS), "right": right.view(classes, BINS)}


def metrics(sums: dict) -> dict:
    """The loss of a box; the mean over the classes of the area below precision by recall."""
    found, right = (sums[name].flip(1).cumsum(1) for name in ("found", "right"))
    precision = (right / found.clamp(min=1)).flip(1).cummax(1).values.flip(1)
    recall = right / sums["true"][:, None]
    gained = recall.diff(dim=1, prepend=torch.zeros_like(recall[:, :1]))
    areas = (precision * gained).sum(1)  # NaN for a class that is nowhere
    return {"loss": float(sums["loss"] / sums["true"].sum()), "ap50": float(areas.nanmean())}


export = pretrained.export  # the model, with what prepare_data has saved
