"""What is trained: a model that says which class an image belongs to. Its data, loss and metrics.

train.py calls these functions. training/contract.py says what each gets and returns:

    prepare_data(cfg)                     what happens once, before training: download, tokenise
    datasets(cfg, prepared)               (train, validation)
    collate(rows)  count(batch)           a batch of rows; the number of its loss terms
    build_model(cfg, prepared)            the model
    loss_sum(model, batch)                the loss, summed over the terms
    eval_sums(model, batch)  metrics(sums)   what evaluation adds up; the numbers from it
    export(model, output, cfg, prepared)  saves the trained model

and, if they are there: identity, digest, augment, sizes, report. `prepared` is what prepare_data
returned. examples/task.py is a whole task around a plain nn.Module.
"""

import dataclasses
import hashlib
import json
import math
import os
import shutil
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageColor, ImageOps, UnidentifiedImageError
from tqdm import tqdm

from tasklib import cache, confusion, hub, images, pretrained, sources, tables
from tasklib.fields import ROUNDING, SHAPE, check_fields, check_ignored_fields
from tasklib.images import flatten, is_transparent, open_image
from tasklib.messages import one_line

# transformers takes 4 s to import, sklearn and matplotlib 1 s: they wait for who needs them.

Batch = dict[str, torch.Tensor]
Row = tuple[np.ndarray, int, dict]  # uint8 (side, side, 3), its class, and what `look` gives
IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
ENDINGS = (*tables.TABLES, *IMAGES)


# ---- Config --------------------------------------------------------------------------------------


@dataclass
class TaskConfig(sources.DataConfig, pretrained.ModelConfig):
    data: str = "digits"
    """Images to train on: digits (1,797 of 8 x 8 pixels, inside scikit-learn), a folder with a
    folder of images for each class (cats/1.jpg), a .jsonl, .csv, ... file whose rows name an
    image, by a path beside the file, and its class, or the name of a data set on the Hub."""
    image_column: str = "image"
    """Of a table: the column of paths, or of images as the Hub has them."""
    label_column: str = "label"
    """Of a table: the column of classes."""
    corrupt: Literal["refuse", "skip"] = "refuse"
    """Whether images that cannot be read end the run, or are named and left out."""
    background: str = "white"
    """Colour behind transparent images, in training and in predict.py: a name, or "#rrggbb"."""
    image_size: int = field(default=32, metadata=SHAPE)
    """Side in pixels of the square that a new model sees; a pretrained one has its own."""
    stored_size: int = 0
    """Side of the square that is cut from the middle of each image and kept in cache_dir; 0: that
    of the model, or a seventh more where crops are random."""
    min_crop: float = 0.8
    """Smallest share of the square's area that a random crop keeps in training; 1: no crops."""
    flip: bool = False
    """Mirror half of the images in training: where left and right mean the same."""
    architecture: Literal["vit", "resnet"] = field(default="vit", metadata=SHAPE)
    """A new model: a vision transformer, or a ResNet v2 with GroupNorm (with BatchNorm the result
    would depend on how a step is cut)."""
    hidden_size: int = field(default=64, metadata=SHAPE)
    """Width of a new model; of a resnet, whose four stages double it, that of the last."""
    num_layers: int = field(default=2, metadata=SHAPE)
    """Layers of a vit; blocks in each stage of a resnet."""
    patch_size: int = field(default=8, metadata=SHAPE)
    """vit: side in pixels of the patches that the square is cut into."""
    num_heads: int = 4
    """vit: attention heads in a layer."""
    dropout: float = 0.0
    """vit: dropout in each layer; resnet: share of its blocks that are left out at random."""
    channels_last: bool = field(default=False, metadata=ROUNDING)
    """For a resnet: the memory layout that convolutions on GPUs like in bf16 and fp16. On a CPU, in
    fp32, it takes a sixth less time at 96 pixels and a width of 512, and the same at 32 and 128."""


def check(cfg: TaskConfig) -> None:
    """Refuse settings that cannot work before anything is read."""
    sources.check_data_config(cfg, ["digits"])
    new, vit, digits = not cfg.model_name_or_path, cfg.architecture == "vit", cfg.data == "digits"
    patch = max(cfg.patch_size, 1) if vit and new else 1
    unit = max(cfg.num_heads, 1) if vit else 64  # a GroupNorm has 8 groups, of 1/8 of the width
    rules = [
        ("validation_data", not (digits and cfg.validation_data), "empty, as digits has its own"),
        ("background", is_color(cfg.background), "a colour, as white or '#ffffff'"),
        ("stored_size", 0 <= cfg.stored_size <= 8192, "from 0 to 8,192"),
        ("min_crop", 0.01 <= cfg.min_crop <= 1, "from 0.01 to 1"),
        ("patch_size", 1 <= cfg.patch_size <= 4096, "from 1 to 4,096"),
        ("num_layers", 1 <= cfg.num_layers <= 1000, "from 1 to 1,000"),
        ("num_heads", 1 <= cfg.num_heads <= 1024, "from 1 to 1,024"),
        ("image_size", 1 <= cfg.image_size <= 4096, "from 1 to 4,096"),
        ("image_size", cfg.image_size % patch == 0, f"a multiple of patch_size, {patch}"),
        ("hidden_size", 1 <= cfg.hidden_size <= 2**16, "from 1 to 65,536"),
        ("hidden_size", cfg.hidden_size % unit == 0, f"a multiple of {unit}"),
        ("dropout", 0 <= cfg.dropout < 1, "at least 0 and below 1"),
    ]
    patches = (cfg.image_size // patch) ** 2
    if vit and new:
        rules.append(("patch_size", patches <= 2**16, "larger: at most 65,536 fit into memory"))
    check_fields(cfg, rules)
    if new:
        layer = (12 if vit else 2) * cfg.hidden_size
        outside = patches + 3 * patch**2 if vit else 0
        pretrained.check_memory(cfg.hidden_size * (cfg.num_layers * layer + outside))
    read = "image_column label_column corrupt background incomplete_rows"
    check_ignored_fields(cfg, [(read, not digits, "where task.data is digits")])
    pretrained.check_unread(cfg)


def is_color(text: str) -> bool:
    """Whether Pillow takes it for a colour that nothing shows through."""
    try:
        color = ImageColor.getrgb(text)
    except ValueError:
        return False
    return len(color) == 3 and max(color) <= 255


def prepare_data(cfg: TaskConfig) -> Path:
    """Checks the settings, and decodes the images, once, into `prepared_folder(cfg)`."""
    check(cfg)
    return cache.prepare_once(cfg, lambda: prepared_folder(cfg), lambda folder: build(cfg, folder))


def identity(cfg: TaskConfig, folder: Path) -> str:
    return cache.short_digest(folder / "labels.json")


def digest(cfg: TaskConfig, folder: Path) -> str:
    return cache.content_digest(folder)


# ---- Data ----------------------------------------------------------------------------------------


class Squares(torch.utils.data.Dataset):
    """The stored images of a part, from a memory map that the processes of a machine share."""

    def __init__(self, folder: Path, part: str, seen: dict[str, Any]):
        self.made_of, self.seen = (folder, part, seen), seen
        self.images = np.load(folder / "images.npy", mmap_mode="r")
        self.labels = np.load(folder / "labels.npy")
        self.numbers = np.load(folder / f"{part}.npy")

    def __reduce__(self):  # pickled, a memory map would become a copy of all images
        return Squares, self.made_of

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, i: int) -> Row:
        number = self.numbers[i]
        return self.images[number], int(self.labels[number]), self.seen


def datasets(cfg: TaskConfig, folder: Path) -> tuple[Squares, Squares]:
    seen = look(cfg)
    return Squares(folder, "train", seen), Squares(folder, "validation", seen)


def look(cfg: TaskConfig) -> dict[str, Any]:
    """How the model sees an image: its side in pixels, the mean and std of its channels, ...

    Those of a pretrained model are its image processor's.
    """
    seen = {name: getattr(cfg, name) for name in ("min_crop", "flip", "channels_last")}
    seen |= {"side": cfg.image_size, "mean": [0.5] * 3, "std": [0.5] * 3}
    if cfg.model_name_or_path:
        from transformers import AutoImageProcessor

        folder, name = pretrained.folder_of(cfg), one_line(cfg.model_name_or_path, 100)
        if folder and (folder / "config.json").exists() and not [*folder.glob("*processor*.json")]:
            raise ValueError(
                f"task.model_name_or_path: {name} has no preprocessor_config.json, as models of "
                "images do"
            )
        facts = pretrained.load(AutoImageProcessor, cfg).to_dict()
        size = facts.get("crop_size" if facts.get("do_center_crop") else "size") or {}
        seen["side"] = size.get("height") or size.get("shortest_edge")
        if not isinstance(seen["side"], int) or not 1 <= seen["side"] <= 8192:
            raise ValueError(f"task.model_name_or_path: {name} does not say the size of its images")
        normal = facts.get("do_normalize")
        seen["mean"], seen["std"] = (
            (facts["image_mean"], facts["image_std"]) if normal else ([0.0] * 3, [1.0] * 3)
        )
    return seen


def resize(image: np.ndarray, side: int, box: tuple | None = None) -> np.ndarray:
    """The image, or a box of it (left, top, right, bottom, in pixels), as a square of this side."""
    return np.asarray(Image.fromarray(image).resize((side, side), Image.Resampling.BICUBIC, box))


def augment(row: Row, generator: torch.Generator) -> Row:
    """A random crop, its aspect ratio between 3:4 and 4:3, as the model's square; or its mirror."""
    image, label, seen = row
    area, ratio, x, y, mirror = torch.rand(5, generator=generator).tolist()
    if seen["min_crop"] < 1:
        root = math.sqrt(1 - area * (1 - seen["min_crop"]))
        stretch = (4 / 3) ** (ratio - 0.5)
        width, height = (len(image) * min(1, part) for part in (root * stretch, root / stretch))
        left, top = x * (len(image) - width), y * (len(image) - height)
        image = resize(image, seen["side"], (left, top, left + width, top + height))
    if seen["flip"] and mirror < 0.5:
        image = image[:, ::-1]
    return image, label, seen


def collate(rows: list[Row]) -> Batch:
    """pixel_values, float32 (B, 3, side, side), normalised, and labels, int64 (B,)."""
    seen = rows[0][2]
    side = seen["side"]
    images = [image if len(image) == side else resize(image, side) for image, _, _ in rows]
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2) / 255
    mean, std = (torch.tensor(seen[name])[:, None, None] for name in ("mean", "std"))
    layout = torch.channels_last if seen["channels_last"] else torch.contiguous_format
    pixels = ((pixels - mean) / std).contiguous(memory_format=layout)
    return {"pixel_values": pixels, "labels": torch.tensor([label for _, label, _ in rows])}


def count(batch: Batch) -> int:
    return len(batch["labels"])


# ---- Model and loss ------------------------------------------------------------------------------


def build_model(cfg: TaskConfig, folder: Path) -> torch.nn.Module:
    """A new or a pretrained model, with what `report` and `export` need besides its weights."""
    import transformers

    names = json.loads((folder / "labels.json").read_text(encoding="utf-8"))
    classes = {"num_labels": len(names), "id2label": dict(enumerate(names))}
    classes["label2id"] = {name: i for i, name in enumerate(names)}
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
        config = transformers.BitConfig(
            embedding_size=cfg.hidden_size // 8,
            hidden_sizes=[cfg.hidden_size // part for part in (8, 4, 2, 1)],
            depths=[cfg.num_layers] * 4,
            num_groups=8,
            drop_path_rate=cfg.dropout,
            **classes,
        )
    if config:
        model = pretrained.new_model(auto, config, cfg)
    model.config.background = cfg.background  # for predict.py: image processors have no such thing
    return model


def loss_sum(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Cross entropy, in nats."""
    logits = model(pixel_values=batch["pixel_values"]).logits.float()
    return F.cross_entropy(logits, batch["labels"], reduction="sum")


# ---- Evaluation and export -----------------------------------------------------------------------


@torch.no_grad()
def eval_sums(model: torch.nn.Module, batch: Batch) -> Batch:
    """The loss, and the confusion matrix (C, C): images of class i that were taken for class j."""
    logits = model(pixel_values=batch["pixel_values"]).logits.float()
    loss = F.cross_entropy(logits, batch["labels"], reduction="sum")
    true, guess = (F.one_hot(i, logits.shape[1]) for i in (batch["labels"], logits.argmax(1)))
    return {"loss": loss, "confusion": true.T.float() @ guess.float()}


def metrics(sums: Batch) -> dict[str, float]:
    """Loss in nats an image; macro F1 is the mean over classes that were there, or guessed."""
    loss = float(sums["loss"] / sums["confusion"].sum())
    return {"loss": loss, **confusion.scores(sums["confusion"])}


def report(model: Any, sums: Batch, output: Path, cfg: TaskConfig, folder: Path) -> dict[str, Any]:
    """The scores of each class, which were taken for which, and some images."""
    from tasklib.pictures import try_picture

    names = [model.config.id2label[i] for i in range(model.config.num_labels)]
    found = confusion.report(sums["confusion"], names, output)
    images, path = datasets(cfg, folder)[1], output / "samples.png"
    return found | {"samples": try_picture(draw_samples, model, images, names, path)}


@torch.no_grad()
def draw_samples(model: Any, images: Squares, names: list[str], path: Path) -> Path:
    """Sixteen out of 256 validation images: first wrong ones, and of each class in turn."""
    from matplotlib.figure import Figure

    from tasklib.pictures import save_figure

    drawn = np.random.default_rng(0).permutation(len(images))[:256]
    rows = [images[i] for i in drawn]  # at random, since classes may follow each other
    shown = []
    for start in range(0, len(rows), 16):
        part = rows[start : start + 16]
        pixels = collate(part)["pixel_values"].to(model.device)
        guesses = model(pixel_values=pixels).logits.argmax(1).tolist()
        shown += zip(part, guesses, strict=True)
    before: Counter = Counter()

    def rank(pair: tuple[Row, int]) -> tuple[bool, int]:
        """Whether it is right, and how many of its class came before it."""
        (_, label, _), guess = pair
        before[label, label == guess] += 1
        return label == guess, before[label, label == guess]

    shown.sort(key=rank)
    wrong = sum(label != guess for (_, label, _), guess in shown)
    figure = Figure((8, 9), dpi=150, layout="constrained")
    part = f" (of {len(images):,} validation images)"
    figure.suptitle(f"{wrong} of {len(rows)} predictions are wrong{part}")
    panels = figure.subplots(4, 4).flat
    for axes, ((image, label, _), guess) in zip(panels, shown, strict=False):
        axes.imshow(image)
        said, color = shorten(names[label]), "black"
        if guess != label:
            said, color = f"predicted {shorten(names[guess])}\ntrue {said}", "#D55E00"
        axes.set_title(said, fontsize=9, color=color, parse_math=False)
    for axes in figure.axes:
        axes.set_axis_off()
    return save_figure(figure, path)


def shorten(name: str) -> str:
    return one_line(name, 20)


def export(model: Any, output: Path, cfg: TaskConfig, folder: Path) -> None:
    """Files that pipeline("image-classification", folder) loads.

    The processor crops as `square` does, whatever that of a pretrained model did: a pipeline sees
    images as the model has seen them here.
    """
    seen = look(cfg)
    with pretrained.quiet():  # without torchvision it says that it takes Pillow
        from transformers import BitImageProcessor

        processor = BitImageProcessor(
            size={"shortest_edge": seen["side"]},
            crop_size={"height": seen["side"], "width": seen["side"]},
            resample=Image.Resampling.BICUBIC,
            image_mean=seen["mean"],
            image_std=seen["std"],
        )
        model.save_pretrained(output)
        processor.save_pretrained(output)


# ---- Preparation ---------------------------------------------------------------------------------


def prepared_folder(cfg: TaskConfig) -> Path:
    """Its name depends on all that shapes the data: settings, files and code.

    Images that a table names are not among the files: `build` gives their digests.
    """
    settings = [stored_side(cfg), cfg.image_column, cfg.label_column, cfg.corrupt, cfg.background]
    used = [] if cfg.data == "digits" else cache.hash_input_files(cfg, ENDINGS)
    shaped_by = [images, stored_side, look, build, named_images, read, check_row]
    shaped_by += [endings_of, local_rows, opened, square]
    return cache.cache_folder(cfg, settings, used, shaped_by)


def stored_side(cfg: TaskConfig) -> int:
    side = look(cfg)["side"]
    return cfg.stored_size or (side if cfg.min_crop == 1 else math.ceil(side * 8 / 7))


def build(cfg: TaskConfig, folder: Path) -> dict[str, Any]:
    """Writes images.npy (N, side, side, 3), labels.npy (N,), their names, and each part's rows.

    Gives the digest of these, and those of the images that tables name.
    """
    train, validation = read(cfg)
    rows = train + (validation or [])
    label = [row["label"] for row, _ in rows]
    known = sorted({*label[: len(train)]})
    for row, place in validation or []:
        if row["label"] not in known:
            raise ValueError(
                f"task.validation_data: {place}: class {one_line(repr(row['label']), 60)} is not "
                f"in the training data, which has {one_line(', '.join(known[:20]), 200)}"
                f"{', ...' * (len(known) > 20)}"
            )
    named = named_images(cfg, rows)
    shape = (len(rows), *[stored_side(cfg)] * 2, 3)
    needed, free = math.prod(shape) / 1e6, shutil.disk_usage(folder).free / 1e6
    print(
        f"Preparing data: {len(rows):,} images of {one_line(cfg.data, 100)}, {len(known):,} "
        f"classes; {needed:,.1f} MB in {one_line(folder.parent, 100)}",
        flush=True,
    )
    if needed > free:
        raise ValueError(
            f"task.cache_dir: the images take {needed:,.1f} MB, and the disk of "
            f"{one_line(folder.parent, 100)} has {free:,.1f} MB left; name another, or lower "
            "--task.stored_size"
        )
    images = np.lib.format.open_memmap(folder / "images.npy", "w+", np.uint8, shape)
    transparent = np.zeros(len(rows), bool)

    def store(number: int) -> tuple[str, str]:
        """A hash of what is stored, and what is wrong with the image."""
        try:
            image = opened(rows[number][0]["image"], shape[1])
            transparent[number] = is_transparent(image)
            images[number] = square(image, shape[1], cfg.background)
        except UnidentifiedImageError:
            return "", "not an image"
        except Exception as error:  # each decoder has its own
            return "", one_line(error)
        return hashlib.sha256(images[number]).hexdigest(), ""

    with ThreadPool(min(os.cpu_count() or 1, 32)) as pool:  # decoders let other threads run
        stored = pool.imap(store, range(len(rows)), chunksize=16)
        found = list(tqdm(stored, "images", len(rows), leave=False, disable=None))
    good = [number for number, (key, _) in enumerate(found) if key]
    problems = [f"{rows[n][1]}: {problem}" for n, (_, problem) in enumerate(found) if problem]
    parts = [[n for n in good if n < len(train)], [n for n in good if n >= len(train)]]
    if problems and cfg.corrupt == "refuse":
        field = "data" if len(parts[0]) < len(train) else "validation_data"
        raise ValueError(
            f"task.{field}: cannot read {problems[0]}; of {len(rows):,} images {len(problems):,} "
            "cannot be read; --task.corrupt skip leaves them out"
        )
    for problem in problems[:10]:
        print(f"left out: {one_line(problem)}")
    if problems[10:]:
        print(f"and {len(problems) - 10:,} more", flush=True)
    if number := transparent[good].sum():
        print(
            f"Preparing data: {number:,} of {len(good):,} images are transparent: put on "
            f"{cfg.background}",
            flush=True,
        )

    names = sorted({label[number] for number in parts[0]})
    if len(names) < 2:
        raise ValueError(
            f"task.data: {one_line(cfg.data, 100)} has {len(parts[0])} images of {len(names)} "
            f"classes ({one_line(', '.join(names), 60) or 'none'}); give at least two classes"
        )
    if validation is None:
        share = cfg.validation_fraction
        parts = sources.hold_out(parts[0], share, lambda n: found[n][0], lambda n: label[n])
    if not parts[1]:
        raise ValueError(
            f"task.validation_data: no images to evaluate on among the {len(rows)} of "
            f"{one_line(cfg.data, 100)}; give --task.validation_data PATH"
        )
    place = {name: i for i, name in enumerate(names)}
    arrays = {"labels": np.array([place.get(name, -1) for name in label], np.int64)}
    arrays |= {"train": np.sort(parts[0]), "validation": np.sort(parts[1])}
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", values)
    (folder / "labels.json").write_text(json.dumps(names), encoding="utf-8")
    arrays["images"] = np.array([key for key, _ in found], "S64")  # their digests stand for them
    return {"content": cache.hash_columns({"images": arrays}), "named": named}


def named_images(cfg: TaskConfig, rows: list[tables.Row]) -> dict[str, str]:
    """Digests of the images that rows name and that are not files of the data; "": unreadable."""
    known: set[Path] = set()
    for name in ("data", "validation_data"):
        data = getattr(cfg, name)
        if data and data != "digits" and not (name == "data" and hub.is_hub_name(data)):
            known.update(sources.list_files(data, ENDINGS, name))
    paths = [row["image"] for row, _ in rows if isinstance(row["image"], Path)]
    return cache.hash_files([path for path in paths if path not in known], cfg, missing="")


def read(cfg: TaskConfig) -> tuple[list[tables.Row], list[tables.Row] | None]:
    """Rows of an image and a label, to train on and, where there are such, to evaluate on."""
    columns = {"image": cfg.image_column, "label": cfg.label_column}
    validation = None
    sources.print_skipped_files(cfg, endings_of(cfg.data), shipped=cfg.data == "digits")
    if cfg.data == "digits":
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = [Image.fromarray(i) for i in (digits.images * 255 / 16).round().astype(np.uint8)]
        pairs = zip(images, digits.target.tolist(), strict=True)
        train = [({"image": image, "label": label}, "digits") for image, label in pairs]
    elif hub.is_hub_name(cfg.data):
        elsewhere = dataclasses.replace(cfg, validation_data="")  # may be a folder of images
        train, validation = sources.read_splits(elsewhere, columns)
    else:
        train = local_rows(cfg.data, columns, "data")
    if cfg.validation_data:
        validation = local_rows(cfg.validation_data, columns, "validation_data")
    field = "validation_data" if cfg.validation_data else "validation_split"
    train = sources.keep_valid_rows(train, cfg, "data", check_row)
    return train, validation and sources.keep_valid_rows(validation, cfg, field, check_row)


def check_row(row: dict) -> None:
    """Turns the label into text; raises ValueError for anything but an image and a class."""
    image, label = row["image"], row["label"]
    if isinstance(image, dict):
        image = image.get("bytes") or image.get("path")
    for role, value in (("image", image), ("label", label)):
        blank = isinstance(value, (str, bytes)) and not value.strip()
        if value is None or blank or value != value:  # NaN: what pandas writes for nothing
            raise sources.IncompleteRow(f"the {role} is empty")
    if not isinstance(label, (str, int)):
        raise ValueError(f"the label is {one_line(repr(label), 60)}; give text or a whole number")
    if not isinstance(image, (str, bytes, Path, Image.Image)):
        raise ValueError(f"the image is {one_line(repr(image), 60)}; give a path")
    row["label"] = str(label)


def endings_of(data: str) -> tuple[str, ...]:
    """What is read: of a folder no .json, since tools leave notes of that kind beside images."""
    in_folder = Path(data).expanduser().is_dir()
    return tuple(each for each in ENDINGS if not (in_folder and each == ".json"))


def local_rows(data: str, columns: dict[str, str], field: str) -> list[tables.Row]:
    """The rows of the tables at a path; without a table, the images in its folders."""
    root, rows = Path(data).expanduser(), []
    files = sources.list_files(data, endings_of(data), field)
    listed = [file for file in files if tables.file_ending(file) in tables.TABLES]
    for table in listed:
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
    for file in [] if listed else files:
        folders = file.relative_to(root).parts[:-1]
        if len(folders) == 1 and not folders[0].startswith("."):  # as .ipynb_checkpoints does
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


def opened(image: Any, side: int) -> Image.Image:
    """Pillow's image of a path, of {"bytes": ...}, or itself."""
    if not isinstance(image, Image.Image):
        image = open_image(image["bytes"] if isinstance(image, dict) else image)
        image.draft(None, (2 * side, 2 * side))  # a large JPEG is decoded at a part of its size
    return image


def square(image: Any, side: int, background: str = "white") -> np.ndarray:
    """The middle of an image, uint8 (side, side, 3), where it is transparent on the background."""
    image = flatten(ImageOps.exif_transpose(opened(image, side)), background)
    return np.asarray(ImageOps.fit(image, (side, side), Image.Resampling.BICUBIC))
