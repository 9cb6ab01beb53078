"""The inputs of a task: files, datasets of the Hub and bundled ones, and what is read of each."""

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset

from samestep.base.console import one_line
from samestep.data import files, sources
from samestep.data.files import File
from samestep.data.sources import DataConfig, split_data

Columns = dict[str, bool]  # that are read: whether each must be there
_Bundled = Mapping[str, Callable[[], Iterable[dict]]]
_HEAD = 20_000_000  # bytes of the beginnings of shards that are prepared, of a stream
_LEAST_HEADS, _MOST_HEADS = 16, 1000  # shards of these


@dataclass
class RowFormat:
    """What is read and stored of rows."""

    columns: Columns
    """The columns that are read."""
    normalize: Callable[[dict], dict]
    """Gets a row as it stands in a file, and returns what is stored of it. Raises IncompleteRow
    (cfg.incomplete_rows decides), or ValueError, which ends the run."""
    features: dict[str, Any]
    """The columns that `normalize` returns; text becomes large_string."""
    key: Callable[[dict], str] | None = None
    """Of a stored row: text that equal rows have in common, by default all of it."""
    group: Callable[[dict], str] | None = None
    """Of a stored row: rows with one group are all held out, or none; by default the content.
    cfg.group_column replaces it."""
    paths: tuple[str, ...] = ()
    """Columns of paths that are relative to their table."""
    hint: str = "name the right one with --task.*_column"
    """What to do about a column that is missing, or there twice."""


@dataclass
class Input:
    """The rows that a field names: of a source, or those to evaluate on."""

    field: str  # data or data_split, validation_data or validation_split
    data: str  # as the config has it
    name: str  # for metrics
    files: list[File] = field(default_factory=list)
    dataset: Dataset | None = None  # of the Hub, or bundled
    most: float = math.inf  # bytes of each file that are read, about
    group: str = ""  # a column that is read beside those of the format
    choose: Callable[["Input", dict], RowFormat] | None = None  # of the first row the format
    # Known when it is read:
    form: RowFormat | None = None
    names: list[str] = field(default_factory=list)  # of all columns of the first row
    columns: Columns = field(default_factory=dict)
    features: Mapping[str, Any] = field(default_factory=dict)  # of `datasets`, if it has any
    empty: set[File] = field(default_factory=set)  # without rows

    @property
    def is_validation(self) -> bool:
        return self.field.startswith("validation")

    @property
    def is_table(self) -> bool:
        return not self.files or files.file_ending(self.files[0].path) in files.TABLES


# ---- Files ---------------------------------------------------------------------------------------


def find_inputs(
    cfg: DataConfig, bundled: _Bundled, endings: tuple[str, ...], in_classes: bool = False
) -> list[Input]:
    """The rows of all sources, and then those to evaluate on, if there are any.

    Of a folder whose files are named for several splits those to train on, and, unless
    cfg.validation_data names others, those to evaluate on. `in_classes`: the folder of a file is
    its class, but for tables.
    """
    if getattr(cfg, "streaming", False):
        return _find_shards(cfg)
    inputs, given = [], []
    for source in split_data(cfg.data):
        data, name = source.data, source.name
        if data in bundled:
            dataset = Dataset.from_list([*bundled[data]()])
            inputs.append(Input("data", data, name, dataset=dataset))
        elif sources.is_hub_name(data):
            for field, found in (("data_split", inputs), ("validation_split", given)):
                if split := getattr(cfg, field):
                    options = (data, cfg.data_config, split, cfg.data_revision)
                    rows = load_split(*options, field)
                    found.append(Input(field, f"{data}, split {split}", name, dataset=rows))
        else:
            wanted = ("train",) if cfg.validation_data else ("train", "validation")
            listed = files.split_files(data, "data", wanted, endings, in_classes)
            _print_files(data, *listed)
            if not listed[0]:
                text = f"{one_line(data, 100)} has no file to train on, by the names"
                raise ValueError(f"task.data: {text}; name the right one")
            inputs.append(Input("data", data, name, listed[0]))
            if listed[1]:
                given.append(Input("validation_data", data, name, listed[1]))
    if data := cfg.validation_data:
        listed = files.split_files(data, "validation_data", ("validation",), endings, in_classes)
        _print_files(data, *listed)
        name = inputs[0].name if data == inputs[0].data else Path(data).name
        given.append(Input("validation_data", data, name, listed[1]))
    return [*inputs, *given]


def _print_files(data: str, train: list, held: list, others: list, unit: str = "files") -> None:
    """Prints how many files of a path are read, if there are several."""
    if len(train) + len(held) + len(others) > 1:
        text = f"{len(train):,} {unit} to train on, {len(held):,} to evaluate on, "
        text += f"{len(others):,} not read{name_first(others)}"
        print(f"Preparing data: {one_line(data, 100)} has {text}", flush=True)


def name_first(found: list[File]) -> str:
    """The first of these files, for a message."""
    return f" (the first: {one_line(found[0].name, 100)})" if found else ""


def _find_shards(cfg: DataConfig) -> list[Input]:
    """The beginnings of shards of a stream: of some to train on, and of those to evaluate on. All
    rows of shards that are named to evaluate on are read."""
    train, held, others = files.split_shards(cfg)
    _print_files(cfg.data, train, held, others, "shards")
    mean = sum(each.size for each in train) // len(train) + 1
    count = min(len(train), max(_LEAST_HEADS, _HEAD // mean), _MOST_HEADS)
    heads = [train[i * len(train) // count] for i in range(count)]
    most = math.inf if cfg.validation_data else _HEAD
    return [
        Input("data", cfg.data, "stream", heads, most=_HEAD / len(heads)),
        Input("validation_data", cfg.data, "stream", held, most=most),
    ]


# ---- The Hub -------------------------------------------------------------------------------------

# What is downloaded stays there, since offline it is all there is: a preparation has a cache of its
# own, which is removed.
_CACHE = os.environ.get("HF_DATASETS_CACHE")


def load_split(name: str, config: str, split: str, revision: str, field: str) -> Any:
    """A split of a dataset on the Hub, downloaded once: a `datasets.Dataset`.

    Raises ValueError unless `revision` is a commit; the message gives the newest one.
    """
    if not re.fullmatch("[0-9a-f]{40}", revision):
        from huggingface_hub import HfApi

        revision = revision or "main"
        try:
            commit = HfApi().dataset_info(name, revision=revision).sha
        except Exception as error:
            text = "is neither here nor on the Hub, or the Hub cannot be reached"
            raise ValueError(f"task.data: {name} {text}: {one_line(error)}") from None
        text = f"write --task.data_revision {commit}, which is {revision} of {name} now"
        raise ValueError(f"task.data_revision: datasets on the Hub change; {text}")
    datasets.disable_progress_bars()
    cache_dir = _CACHE or os.path.join(datasets.config.HF_CACHE_HOME, "datasets")
    how = {"split": split, "revision": revision, "cache_dir": cache_dir}
    try:
        found = datasets.load_dataset(name, config or None, **how)
        if not any(revision in each["filename"] for each in found.cache_files):
            raise ValueError("the Hub cannot be reached, and this disk has another commit of it")
    except Exception as error:  # each library underneath has its own
        if isinstance(error, datasets.exceptions.DatasetGenerationError):  # says nothing itself
            error = error.__cause__ or error
        where = f"{name}, config {config or 'default'}, split {split}"
        text = f"cannot load {where} from the Hub: {one_line(error)}"
        raise ValueError(f"task.{field}: {text}") from None
    return found
