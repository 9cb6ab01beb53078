"""The rows of a task.py of your own, and of examples/: by the readers that all tasks have.

    load_splits   rows of files, of the Hub, or of a function, as splits train and validation
    map_rows      rows to what is trained on: errors name the row, and what is cut off is counted

The place of each row is in a column that batches do not see: `samestep when` finds rows by it.
"""

import hashlib
import json
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import datasets
import numpy as np
import pyarrow

from samestep.base.console import one_line
from samestep.data import files, images, rows
from samestep.data.inputs import Input, RowFormat, find_inputs
from samestep.data.readers import drop_nulls
from samestep.data.sources import DataConfig, IncompleteRow, check_data_config, require_value

_PLACE, _NUMBER = "place", "number of the row"  # the first is hidden, the second goes
_ENDINGS = (*files.TABLES, *files.TEXTS, *files.IMAGES)
_Row = dict[str, Any]


# ---- Reading -------------------------------------------------------------------------------------


def load_splits(
    data: DataConfig | str | Iterable[_Row],
    columns: Iterable[str],
    read: Callable[[_Row], _Row] | None = None,
    *,
    made_up: Callable[[], Iterable[_Row]] | None = None,
    features: dict[str, Any] | None = None,
    images: Iterable[str] = (),
    masks: Iterable[str] = (),
    paths: Iterable[str] = (),
    upright: bool = False,
) -> "Splits":
    """The splits train and validation of the rows of task.data, and their `classes`: for a column
    of a .parquet file or of the Hub the names of all classes that its type has.

    data       the config of the task, a DataConfig; or a path or name; or rows.
    columns    that rows must have. Cells of .csv and .tsv are text.
    read       gets a row and returns what is stored of it, beside images. Its ValueError ends the
               run with the place of the row; task.incomplete_rows says what IncompleteRow does.
    made_up    makes the rows where task.data is empty.
    features   of what is stored, by `datasets`; else those of the first row, and a row that does
               not have them is refused.
    images     columns of an image or several, stored as RGB of 8 bits, upright, on white.
    masks      columns of an image of class numbers, stored as it is.
    paths      columns of other files. A table may name a file of column X in X_file_name, or that
               of the first such column in file_name.
    upright    labels are places in an image: one that its EXIF block turns is refused.

    Raises ValueError, with file and line, for a missing value and all that cannot be used.
    """
    cfg = data if isinstance(data, DataConfig) else DataConfig(data if type(data) is str else "")
    if isinstance(data, DataConfig | str) and (cfg.data or not made_up):
        check_data_config(cfg, [])
        inputs = find_inputs(cfg, {}, _ENDINGS)
        if len({each.name for each in inputs if not each.is_validation}) > 1:
            raise ValueError(f"task.data: {cfg.data} has several sources; give one file or folder")
    else:
        given: Any = made_up() if made_up else data
        made = datasets.Dataset.from_list([*given])
        inputs = [Input("data", "made-up rows", "made-up rows", dataset=made)]
    columns, pictures, kinds = [*columns], [*images, *masks], dict(features or {})

    def choose(source: Input, first: _Row) -> RowFormat:
        """The format of rows with the columns of the first one."""
        typed = source.dataset.features if source.dataset else {}
        for name in columns:
            kind = getattr(typed.get(name), "feature", typed.get(name))
            if isinstance(kind, datasets.Image) and name not in pictures:
                pictures.append(name)
        own = {name: name for name in columns}
        for name in [*paths, *reversed(pictures)]:  # the first of them last
            given = [name, f"{name}_file_name", "file_name"]
            own[name] = next((each for each in given if each in first), name)
        form = RowFormat(dict.fromkeys(own.values(), True), normalize, kinds, _key_of)
        form.normalize = lambda row: normalize({name: row[own[name]] for name in own})
        form.paths, form.hint = tuple(own[n] for n in [*pictures, *paths]), "rename the right one"
        return form

    def normalize(row: _Row) -> _Row:
        for name in columns:
            _require_values(name, row[name])
        stored = {}
        for name in pictures:
            row[name], stored[name] = _open(name, row[name], name in masks, upright)
        others = {name: row[name] for name in columns if name not in pictures}
        stored |= _call(read, row) if read else others
        for name, value in stored.items():
            if name not in kinds:
                kinds[name] = _feature_of(value, name in pictures)
            elif name not in pictures:
                _check_kind(name, value, kinds[name], name in (features or {}))
        return stored

    splits = rows.load_rows(inputs, cfg, choose)
    found = _hide({name: part.remove_columns([*rows.NUMBERS]) for name, part in splits.items()})
    found.classes = {name: _names_in(kind) for name, kind in inputs[0].features.items()}
    return found


def _names_in(feature: Any) -> list[str]:
    """The names of the classes of a feature, or inside of it; empty: it has none."""
    inner = getattr(feature, "feature", feature)
    parts = [*inner.values()] if isinstance(inner, dict) else []
    return getattr(inner, "names", None) or next(filter(None, map(_names_in, parts)), [])


def _call(function: Callable[[_Row], Any], row: _Row) -> Any:
    """What a function of the task makes of a row: what is missing in a row is an error of it."""
    try:
        return function(row)
    except IncompleteRow:
        raise
    except ValueError as error:
        raise ValueError(one_line(error, 300)) from error
    except (LookupError, TypeError, AttributeError) as error:
        shown = f"{type(error).__name__}: {one_line(error)}"
        raise ValueError(f"the task cannot read it ({shown})") from error


def _require_values(name: str, value: Any) -> None:
    """Raises IncompleteRow for a missing value, also inside a list."""
    require_value(name, value)
    for each in value if isinstance(value, list) else ():
        if each is None or each != each:
            raise IncompleteRow(f"the {name} has {'NaN' if each else 'null'} in its list")


def _open(name: str, cell: Any, is_mask: bool, upright: bool) -> tuple[Any, Any]:
    """The Pillow images of a cell, and what is stored of them; raises IncompleteRow."""
    if isinstance(cell, list):
        found = [_open(name, each, is_mask, upright) for each in cell]
        return [image for image, _ in found], [stored for _, stored in found]
    try:
        image, content, turned = images.read_plain(cell, is_mask)
    except MemoryError:
        raise
    except Exception as error:  # each decoder has its own
        raise IncompleteRow(f"the {name} cannot be used: {one_line(error)}") from None
    if turned and upright:
        raise ValueError(
            f"the {name} is turned by its EXIF block, and its labels may be of either way up; save "
            "it as it is seen (PIL.ImageOps.exif_transpose), with labels that fit"
        )
    return image, {"bytes": content, "path": None}


def _feature_of(value: Any, is_image: bool) -> Any:
    if is_image:
        return datasets.List(datasets.Image()) if isinstance(value, list) else datasets.Image()
    return datasets.Dataset.from_list([{"value": value}]).features["value"]


def _check_kind(name: str, value: Any, kind: Any, is_given: bool) -> None:
    """Raises ValueError for a value that Arrow would refuse, or change."""
    shape = datasets.Features({name: kind}).arrow_schema.field(0).type
    try:
        found = pyarrow.array([value], shape)
        fits = is_given or drop_nulls(found.to_pylist()) == drop_nulls([value])
    except (pyarrow.ArrowException, TypeError):
        fits = False
    if not fits:
        raise ValueError(f"the {name} is {value!r:.60} but must be {shape}, as in the rows before")


def _key_of(row: _Row) -> str:
    """Text that equal rows have in common."""

    def digest(value: Any) -> str:
        content = value if isinstance(value, bytes) else np.asarray(value).tobytes()
        return hashlib.sha256(content).hexdigest()

    return json.dumps(row, default=digest)


class Splits(datasets.DatasetDict):
    """The rows to train and to evaluate on."""

    classes: dict[str, list[str]]


def _hide(splits: dict[str, datasets.Dataset]) -> Splits:
    """Rows whose batches do not see the places."""
    found = {}
    for name, part in splits.items():
        shown = [column for column in part.column_names if column != _PLACE]
        found[name] = part.with_format(None, columns=shown)
    return Splits(found)


# ---- What is trained on --------------------------------------------------------------------------


class _LazyRow(dict):
    """A row of a batch of one, whose images are decoded when they are looked at."""

    def __init__(self, batch: Any):
        self.batch = batch

    def __missing__(self, name: str) -> Any:
        self[name] = self.batch[name][0]
        return self[name]


def map_rows(
    splits: datasets.DatasetDict,
    encode: Callable[[_Row], _Row | list[_Row]],
    keep: Iterable[str] = (),
) -> datasets.DatasetDict:
    """What `encode` makes of each row of load_splits, one or several, beside the columns to `keep`.

    What it returns as `cut`, {names in the plural: (lost, whole)}, is added up and printed, as what
    task.max_length removes. A ValueError of `encode` gets the place of the row.
    """
    found = {}
    for split, part in splits.items():
        lost, whole = Counter[str](), Counter[str]()

        def encode_row(
            batch: Any, numbers: list[int], lost: Counter = lost, whole: Counter = whole
        ) -> _Row:
            row = _LazyRow(batch)
            try:
                encoded = _call(encode, row)
            except ValueError as error:
                if str(error).startswith("task."):
                    raise
                raise ValueError(f"task.data: {row[_PLACE]}: {error}") from None
            encoded = encoded if isinstance(encoded, list) else [encoded]
            for each in encoded:
                for name, (gone, every) in each.pop("cut", {}).items():
                    lost[name] += gone
                    whole[name] += every
            columns = {name: [each[name] for each in encoded] for name in encoded[0]}
            return {_NUMBER: numbers * len(encoded), **columns}

        how = {"batched": True, "batch_size": 1, "with_indices": True}
        how["new_fingerprint"] = uuid.uuid4().hex  # the function has state: it is never cached
        plain = part.with_format(None)
        made = plain.map(encode_row, remove_columns=plain.column_names, **how)
        kept = plain.select_columns([*keep, _PLACE]).select(made[_NUMBER])
        made = made.remove_columns(_NUMBER)
        found[split] = datasets.concatenate_datasets([kept, made], axis=1)
        if cut := [f"{n:,} of {whole[each]:,} {each}" for each, n in lost.items() if n]:
            print(f"Prepared {split}: task.max_length removes {', '.join(cut)}", flush=True)
    return _hide(found)
