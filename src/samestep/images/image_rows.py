"""Labelled images as a `datasets.DatasetDict`: read from folders of classes, tables or the Hub,
held out by the content of their files, and decoded once to see that they can be.
"""

import hashlib
import os
from functools import cache, partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import datasets

from samestep.base.console import one_line
from samestep.base.fields import check_fields, local_path
from samestep.data import demo_data, images, labels, readers, sources
from samestep.data.files import IMAGES, TABLES, File, file_ending, list_files
from samestep.data.inputs import Input, RowFormat, find_inputs
from samestep.data.rows import load_rows
from samestep.images import image_data
from samestep.models import pretrained

BUNDLED = "digits"
ENDINGS = (*TABLES, *IMAGES)
COLUMNS = {
    "path": datasets.Value("binary"),  # as the file system has it: a name may be no text
    "bytes": datasets.Value("large_binary"),  # of an image inside a table or of the Hub
    "digest": datasets.Value("string"),  # SHA-256 of the file
    "label": datasets.Value("string"),
}


# ---- Config --------------------------------------------------------------------------------------


def check_config(cfg: Any) -> None:
    """Raises ValueError for fields that exclude each other, before anything is read."""
    sources.check_data_config(cfg, [BUNDLED])
    is_bundled = cfg.data == BUNDLED
    is_new = not cfg.model_name_or_path
    is_vit = cfg.architecture == "vit"
    unit = cfg.num_heads if is_vit else 64  # a GroupNorm has 8 groups, of 1/8 of the width
    patch = cfg.patch_size if is_vit and is_new else 1
    patches = (cfg.image_size // patch) ** 2
    rules = [
        ("data", len(sources.split_data(cfg.data)) == 1, "one folder, file or dataset"),
        ("validation_data", not (is_bundled and cfg.validation_data), "empty for digits"),
        ("image_size", cfg.image_size % patch == 0, f"a multiple of patch_size, {patch}"),
        ("hidden_size", cfg.hidden_size % unit == 0, f"a multiple of {unit}"),
        ("stages", len(cfg.stages or "four") == 4, "four numbers, as [3, 4, 6, 3]"),
    ]
    if is_vit and is_new:
        rules.append(("patch_size", patches <= 2**16, "larger: at most 65,536 fit into memory"))
    check_fields(cfg, rules)
    pretrained.check_unread(cfg)


# ---- Files ---------------------------------------------------------------------------------------


def named_files(cfg: Any) -> list[str]:
    """The images that tables name: data is prepared again where one has changed."""
    found: dict[str, None] = {}
    for field in ("data", "validation_data"):
        root = os.path.abspath(local_path(getattr(cfg, field)))
        if not getattr(cfg, field) or not os.path.exists(root):
            continue  # bundled, or of the Hub
        for each in list_files(root, field, ENDINGS)[0]:
            if file_ending(each.path) in TABLES:
                status = os.stat(each.path)
                stamps = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
                found |= dict.fromkeys(_images_of(each, field, cfg.image_column, stamps))
    return [*filter(os.path.isfile, found)]


@cache  # a start asks several times
def _images_of(table: File, field: str, column: str, stamps: tuple) -> list[str]:
    """Read the paths in a table, once while its stamps stay the same; none of one that holds the
    images themselves."""
    form = RowFormat({column: True}, dict, {}, paths=(column,))
    source = Input(field, table.path, "", [table], form=form)
    cells = (row[column] for row, _, _ in readers.read(source, sources.DataConfig(), []))
    first = next((cell for cell in cells if cell is not None), None)
    if not isinstance(first, str):
        return []
    return [first, *(cell for cell in cells if isinstance(cell, str))]


# ---- Rows ----------------------------------------------------------------------------------------


def normalize(row: dict, cfg: Any) -> dict[str, Any]:
    """The path or the bytes of an image, a digest of its file, and the name of its class.

    Raises IncompleteRow for a row without an image or a class, and for a file that is no image.
    """
    image, label = row[cfg.image_column], row[cfg.label_column]
    if isinstance(image, dict):  # as the Hub has them
        image = image.get("bytes") or image.get("path")
    sources.require_value("image", image)
    sources.require_value("label", label)
    if not isinstance(image, str | bytes):
        raise ValueError(f"the image is {image!r:.60}; give a path")
    stored: dict[str, Any] = {"label": labels.parse_class(label)}
    try:
        content = images.read_bytes(image) if isinstance(image, str) else image
    except (OSError, ValueError) as error:
        raise sources.IncompleteRow(one_line(error)) from None
    stored["digest"] = hashlib.sha256(content).hexdigest()
    return stored | ({"path": os.fsencode(image)} if isinstance(image, str) else {"bytes": image})


def read_rows(cfg: Any, folder: Path) -> datasets.DatasetDict:
    """The columns of COLUMNS as splits train and validation, `label` as a number.

    The image processor and the names of the classes are saved in `folder`; a run that resumes finds
    its own there. Raises ValueError for an image that cannot be decoded, or leaves it out.
    """
    image_data.prepare_processor(cfg, folder)
    bundled = {BUNDLED: demo_data.digit_rows}
    inputs = find_inputs(cfg, bundled, ENDINGS, in_classes=True)
    columns = {cfg.image_column: True, cfg.label_column: True}
    form = RowFormat(columns, partial(normalize, cfg=cfg), COLUMNS, key=itemgetter("digest"))
    form.paths = (cfg.image_column,)
    rows = load_rows(inputs, cfg, form)
    is_given = any(each.is_validation for each in inputs)
    classes = datasets.ClassLabel(names=labels.learn(rows, cfg, folder, is_given)["names"])
    options = {"cfg": cfg, "side": image_data.read_processor(folder)[0]}
    for split, part in rows.items():
        numbers = classes.str2int([*part["label"]])
        part = part.remove_columns(["source", "file", "line", "label"])
        rows[split] = part.add_column("label", numbers, feature=classes).filter(
            _is_readable,
            input_columns=["path", "bytes", "place"],
            num_proc=cfg.num_proc(len(part) // 100),
            fn_kwargs={**options, "field": sources.field_of(split, cfg)},
        )
    return rows


def _is_readable(path: bytes, content: bytes, place: str, cfg: Any, side: int, field: str) -> bool:
    """Whether an image can be decoded. Raises ValueError for one that cannot, unless
    cfg.incomplete_rows is skip."""
    try:
        images.middle(content or os.fsdecode(path), side)
    except MemoryError:
        raise
    except Exception as error:  # each decoder has its own
        text = f"{place}: {one_line(error)}"
        if cfg.incomplete_rows == "refuse":
            hint = "--task.incomplete_rows skip leaves such images out"
            raise ValueError(f"task.{field}: {text}; {hint}") from None
        print(f"Preparing data: left out: {text}", flush=True)
        return False
    return True
