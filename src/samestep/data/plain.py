"""Rows for a task that is written with plain `datasets`: see examples/."""

from collections.abc import Iterable
from pathlib import Path

import datasets
import numpy as np

from samestep.data.rows import hash_of, hold_out

_HELD_OUT = 0.1  # fraction of the rows for validation, where there is no such split


def load_splits(
    data: str | Iterable[dict], columns: list[str], images: Iterable[str] = ()
) -> datasets.DatasetDict:
    """The splits train and validation, with these columns, of rows, a file (.jsonl, .csv, .parquet,
    .txt), a folder of files, or a dataset on the Hub. `images`: columns of images, or their paths.

    Without a split validation, a tenth of the rows is held out by the hash of each: more rows move
    none of them. Raises ValueError for a missing column, and for what cannot be read.
    """
    try:
        if not isinstance(data, str):
            splits = {"train": datasets.Dataset.from_list([*data])}
        elif Path(data).is_file():
            splits = datasets.load_dataset(str(Path(data).parent), data_files=Path(data).name)
        else:
            splits = datasets.load_dataset(data)
    except (FileNotFoundError, datasets.exceptions.DatasetsError) as error:
        reason = str(error.__cause__ or error).strip().split("\n")[0]
        raise ValueError(f"task.data {data}: {reason}") from error
    for name in [each for each in ("train", "validation") if each in splits]:
        found = splits[name].column_names
        if missing := [each for each in columns if each not in found]:
            raise ValueError(
                f"task.data has no column {', '.join(missing)} in its split {name}; rename one of "
                f"{', '.join(found)}"
            )
        rows = splits[name].select_columns(columns)
        for column in images:
            rows = rows.cast_column(column, datasets.Image())
            for i in range(len(rows)):
                try:
                    rows[i][column].load()
                except (OSError, SyntaxError, ValueError, AttributeError) as error:  # None: no load
                    text = f"row {i} has an unreadable {column}: {error}"
                    raise ValueError(f"task.data: {text}") from error
        splits[name] = rows
    if "train" not in splits:
        raise ValueError(f"task.data {data} has no split train; it has {', '.join(splits)}")
    if "validation" not in splits:
        splits["train"], splits["validation"] = _hold_out(splits["train"])
    return datasets.DatasetDict({name: splits[name] for name in ("train", "validation")})


def _hold_out(rows: datasets.Dataset) -> tuple[datasets.Dataset, datasets.Dataset]:
    """The rows to train on and those held out, at least one: equal rows are on one side."""
    tables = rows.with_format("arrow").iter(1000)  # images count by their bytes, or their paths
    plain = (row for table in tables for row in table.to_pylist())
    hashes = np.array([hash_of(repr(row)) for row in plain], np.uint64)
    is_held = np.isin(hashes, hold_out(hashes, _HELD_OUT, len(hashes)))
    return rows.select(np.flatnonzero(~is_held)), rows.select(np.flatnonzero(is_held))
