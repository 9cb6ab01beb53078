"""Data sets of the Hugging Face Hub, pinned to a commit."""

import os
import re
from collections.abc import Container, Iterator
from typing import Any

from samestep.base.console import one_line
from samestep.base.fields import is_local_name, local_path
from samestep.data.tables import Columns, Row, check_columns, column_names, select_columns

# datasets takes 1 s to import: the functions that need it import it.

# What is downloaded stays there, since offline it is all there is: a preparation has a cache of its
# own, which is removed.
CACHE = os.environ.get("HF_DATASETS_CACHE")
COMMIT = re.compile("[0-9a-f]{40}")


def is_hub_name(data: str) -> bool:
    """Whether this names a data set on the Hub: OWNER/NAME or NAME, and no local file or folder.

    A name that ends like a file (rows.csv) counts as a missing file.
    """
    if os.path.lexists(local_path(data, "data")) or re.search(r"\.[A-Za-z]{2,7}$", data):
        return False
    return bool(re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", data)) and not is_local_name(data)


def load_hub_split(cfg: Any, split: str, field: str = "data_split") -> Any:
    """A split of a data set on the Hub, downloaded once: a `datasets.Dataset`."""
    import datasets

    datasets.disable_progress_bars()
    cache_dir = CACHE or os.path.join(datasets.config.HF_CACHE_HOME, "datasets")
    how = {"split": split, "revision": cfg.data_revision, "cache_dir": cache_dir}
    try:
        found = datasets.load_dataset(cfg.data, cfg.data_config or None, **how)
        stored = [each["filename"] for each in found.cache_files]
        if COMMIT.fullmatch(cfg.data_revision) and not any(cfg.data_revision in f for f in stored):
            raise ValueError("the Hub cannot be reached, and this disk has another commit of it")
        return found
    except Exception as error:  # each library underneath has its own
        if isinstance(error, datasets.exceptions.DatasetGenerationError):  # says nothing itself
            error = error.__cause__ or error
        where = f"{cfg.data}, config {cfg.data_config or 'default'}, split {split}"
        where = one_line(where, 200)
        raise ValueError(
            f"task.{field}: cannot load {where} from the Hub: {one_line(error)}"
        ) from None


def check_commit(cfg: Any) -> None:
    """Raises ValueError unless data_revision is a commit; the message gives the newest one."""
    if COMMIT.fullmatch(cfg.data_revision):
        return
    from huggingface_hub import HfApi

    revision = cfg.data_revision or "main"
    try:
        commit = HfApi().dataset_info(cfg.data, revision=revision).sha
    except Exception as error:
        raise ValueError(
            f"task.data: {one_line(cfg.data, 100)} is neither here nor on the Hub, or the Hub "
            f"cannot be reached: {one_line(error)}"
        ) from None
    raise ValueError(
        f"task.data_revision: data sets on the Hub change; write --task.data_revision {commit}, "
        f"which is {one_line(revision, 60)} of {cfg.data} now"
    )


def open_columns(
    cfg: Any, split: str, columns: Columns, field: str, optional: Container[str] = ()
) -> Any:
    """These columns of a split, memory-mapped. Images stay encoded bytes."""
    import datasets

    dataset = load_hub_split(cfg, split, field)
    try:
        check_columns(dataset.column_names, columns, optional)
    except ValueError as error:
        place = one_line(f"{cfg.data}, split {split}", 200)
        raise ValueError(f"task.data: {place}: {error}") from None
    existing = {*dataset.column_names}
    dataset = dataset.select_columns([n for n in column_names(columns) if n in existing])
    for column in dataset.column_names:  # decoded images of all rows would not fit into memory
        if type(dataset.features[column]).__name__ == "Image":
            dataset = dataset.cast_column(column, datasets.Image(decode=False))
    return dataset


def read_range(dataset: Any, columns: Columns, place: str, start: int, stop: int) -> Iterator[Row]:
    """The rows from `start` up to `stop`; class numbers become names where the data has names."""
    place = one_line(place, 200)
    classes = class_names({c: dataset.features[c] for c in dataset.column_names})
    for number, row in enumerate(dataset.select(range(start, stop)), start):
        yield select_columns(name_classes(row, classes), columns), f"{place}, row {number}"


def class_names(features: dict[str, Any]) -> dict[str, list[str] | None]:
    """The names of the classes of each column; None: it has none."""
    return {c: getattr(getattr(f, "feature", f), "names", None) for c, f in features.items()}


def name_classes(row: dict[str, Any], class_names: dict[str, list[str] | None]) -> dict[str, Any]:
    """The row with names in place of the numbers of classes."""
    for column, value in row.items():
        names = class_names[column]
        if names and isinstance(value, list):
            row[column] = [names[i] for i in value]
        elif names and isinstance(value, int) and value >= 0:
            row[column] = names[value]
    return row
