"""Where the rows of a task come from: files, folders or the Hub.

Errors in the data are a ValueError of one line.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from samestep.base.console import one_line
from samestep.base.fields import (
    NOTHING,
    Fraction,
    check_fields,
    check_ignored_fields,
    is_local_name,
)
from samestep.base.workers import count_cores
from samestep.data.files import describe_shards, split_shards

_OF_DATA = HUB, HELD_OUT, OWN = "a dataset of the Hub", "rows that are held out", "your own data"
# Fields, and what reads them: one of these, or another field with this value. A line counts for the
# tasks that have its fields.
_READ_BY = (
    ("data_config data_split data_revision validation_split", HUB),
    ("validation_fraction validation_rows group_column", HELD_OUT),
    ("text_column text_pair_column label_column source_column target_column", OWN),
    ("prompt_column completion_column chosen_column rejected_column", OWN),
    ("messages_column tools_column image_column group_column", OWN),
    ("text_column", "rows text"),
    ("prompt_column completion_column", "rows prompt", "rows chat"),
    ("messages_column tools_column train_on", "rows chat"),
    ("overlong", "rows prompt", "rows chat", "packing best_fit", "packing none"),
    ("lanes", "streaming True"),
    ("label_smoothing", "loss_type sigmoid"),
    ("simpo_gamma", "loss_type simpo"),
    ("dropout", "architecture vit", "architecture resnet"),
    ("stages", "architecture resnet", "architecture resnet_batchnorm"),
)
_ValidationRows = Annotated[int, Field(ge=1, le=10**9)]
Lanes = Annotated[int, Field(ge=1, le=65_536)]


class _WeightedData(NamedTuple):
    """One of several sources of data, and its share of the samples of a step."""

    data: str
    weight: int
    name: str  # short, for metrics


@dataclass
class DataConfig:
    """The data fields that all tasks share."""

    # Data
    data: str = ""
    """Training rows: a file, a folder, or the name of a dataset on the Hub."""
    data_config: str = ""
    """Dataset on the Hub: its configuration, also called subset."""
    data_split: str = "train"
    """Dataset on the Hub: the training split."""
    data_revision: str = ""
    """Dataset on the Hub: the commit, 40 hex digits, because names and branches move on."""
    validation_data: str = ""
    """Validation rows: a file or a folder; empty: the files of `data` that are named validation,
    valid, val or dev, or without these a fraction of the training rows, which is held out."""
    validation_split: str = ""
    """Dataset on the Hub: the validation split; empty: as for validation_data."""
    validation_fraction: Fraction = 0.1
    """Fraction of the training rows held out for evaluation, about. A hash of each row's content
    decides: the choice is the same everywhere, equal rows stay on one side, and no row is
    held out of more data that was trained on before."""
    validation_rows: _ValidationRows = 1000
    """Maximum number of rows that are held out: an evaluation of 1,000 rows takes about a tenth of
    the time of 100 steps of 32 samples."""
    group_column: str = ""
    """Column whose value says what belongs together (a patient, a conversation): rows with one
    value are all held out, or none; empty: rows that are equal."""
    incomplete_rows: Literal["refuse", "skip"] = "refuse"
    """Rows without a text, label or answer: end the run, or count and skip them."""
    cache_dir: str = field(default=".cache/data", metadata=NOTHING)
    """Folder for prepared data; each combination of data and settings has a subfolder."""

    def key_values(self) -> dict[str, Any]:
        """Leave weights out of the key of prepared data: they change the order alone."""
        return {"data": [source.data for source in split_data(self.data)]}

    def named_files(self) -> dict[str, list[str]]:
        """Name the files and folders of the sources."""
        return {"data": [source.data for source in split_data(self.data)]}

    def num_proc(self, parts: int) -> int | None:
        """Processes for `map` of a dataset: one for each part, at most the number of cores; None:
        this process alone."""
        number = min(count_cores(), parts)
        return number if number > 1 else None


@dataclass
class StreamConfig(DataConfig):
    """Fields of causal_lm, whose rows can be read from shards."""

    streaming: bool = False
    """Read rows while the model trains, and prepare only those to evaluate on: task.data is a
    folder, or a URL such as s3://bucket/folder, of .jsonl, .json, .csv, .tsv, .parquet, .txt or .md
    files."""
    lanes: Lanes = 4
    """streaming: parts of a step, each of which reads shards of its own. At most as many as shards;
    they divide global_batch_size. Best at least as many as there are micro-batches in a step."""

    def key_values(self) -> dict[str, Any]:
        """Add the list of shards to the key of prepared data."""
        if not self.streaming:
            return {}
        train, held, _ = split_shards(self)
        return {"shards": [describe_shards(train), describe_shards(held)]}

    def named_files(self) -> dict[str, list[str]]:
        """Name no file of a stream, whose shards are not read for the key."""
        return {"data": [], "validation_data": []} if self.streaming else {}


def check_data_config(cfg: DataConfig, shipped: Iterable[str]) -> None:
    """Raises ValueError for fields of DataConfig that cannot work, before any row is read.

    `shipped`: names of bundled datasets.
    """
    check_fields(cfg, [("cache_dir", cfg.cache_dir, "a folder")])
    sources = [each.data for each in split_data(cfg.data)]
    for data in sources:
        check_fields(cfg, [("data", data, "a path, or a name")])
        if data in shipped and os.path.lexists(data):
            text = f"{data} is a bundled dataset, and a file or folder here: rename it"
            raise ValueError(f"task.data: {text}, or give ./{data}")
    streaming = getattr(cfg, "streaming", None)  # None: the task has no such field
    for given in [*sources, cfg.validation_data]:
        if "://" in given and not streaming:
            name = "data" if given in sources else "validation_data"
            hint = "" if streaming is None else "; --task.streaming true reads shards there"
            raise ValueError(f"task.{name}: {given} is a URL: download the data first{hint}")
    if streaming:
        held = "empty while task.streaming is true: whole shards are held out"
        rules = [
            ("data", "," not in cfg.data, "one folder or URL of shards"),
            ("group_column", not cfg.group_column, held),
        ]
        check_fields(cfg, rules)
        if cfg.data in shipped or is_hub_name(cfg.data):
            example = f"hf://datasets/{cfg.data if '/' in cfg.data else 'OWNER/NAME'}"
            hint = f"of a dataset on the Hub give the URL of its files, {example}"
            text = f"{cfg.data} is not a folder or URL of shards; {hint}"
            raise ValueError(f"task.streaming: {text}")
    both = cfg.validation_split and cfg.validation_data
    check_fields(cfg, [("validation_split", not both, "empty beside task.validation_data")])
    check_read(cfg, shipped)


def check_read(cfg: DataConfig, shipped: Iterable[str], rows: str = "auto") -> None:
    """Raises ValueError for the first field that is set although nothing reads it: see _READ_BY.

    `rows`: their kind, where task.rows leaves it open.
    """
    sources = {each.data for each in split_data(cfg.data)} - {*shipped}
    facts = {OWN} if sources else set()
    if any(map(is_hub_name, sources)):
        facts.add(HUB)
    if not (cfg.validation_data or cfg.validation_split):
        facts.add(HELD_OUT)
    own = {each.name for each in fields(cfg)}
    named = {each.split()[0] for _, *readers in _READ_BY for each in readers}
    facts |= {f"{name} {getattr(cfg, name)}" for name in named & own}
    if "rows auto" in facts:
        kinds = ("text", "prompt", "chat") if rows == "auto" else (rows,)
        facts |= {f"rows {kind}" for kind in kinds}
    for names, *readers in _READ_BY:
        if readers[0] in _OF_DATA or readers[0].split()[0] in own:
            known = " ".join(each for each in names.split() if each in own)
            is_read = not facts.isdisjoint(readers)
            check_ignored_fields(cfg, [(known, is_read, f"without {' or '.join(readers)}")])


# ---- Sources -------------------------------------------------------------------------------------


def is_hub_name(data: str) -> bool:
    """Whether this names a dataset on the Hub: OWNER/NAME or NAME, and no local file or folder.

    A name that ends like a file (rows.csv) counts as a missing file.
    """
    if os.path.lexists(os.path.expanduser(data)) or re.search(r"\.[A-Za-z]{2,7}$", data):
        return False
    return bool(re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", data)) and not is_local_name(data)


def split_data(data: str) -> list[_WeightedData]:
    """The sources that `data` names, as a.jsonl:2,b.jsonl; a weight that is not given is 1.

    Raises ValueError for what is no whole weight, and for a source that is named twice.
    """
    if os.path.lexists(os.path.expanduser(data)) or not re.search(r",|:\d+$", data):
        return [_WeightedData(data, 1, data)]
    found: list[tuple[str, int]] = []
    for part in data.split(","):
        name, weight = re.fullmatch(r"(.*?)(?::(-?[\d.]+))?", part.strip(), re.DOTALL).groups()
        if not name or weight and not (weight.isdecimal() and int(weight)):
            shown = one_line(repr(part), 60)
            hint = "give each as PATH:WEIGHT, with a whole weight of at least 1"
            raise ValueError(f"task.data: one of its sources is {shown}; {hint}")
        found.append((name, int(weight or 1)))
    paths = [path for path, _ in found]
    if len({os.path.realpath(os.path.expanduser(path)) for path in paths}) < len(paths):
        raise ValueError(f"task.data: {data} names a source twice; add its weights")
    names = [Path(path).name or path for path in paths]
    names = names if len({*names}) == len(names) else paths
    return [_WeightedData(*each, name) for each, name in zip(found, names, strict=True)]


# ---- Rows ----------------------------------------------------------------------------------------


def field_of(split: str, cfg: DataConfig) -> str:
    """The field that names the rows of a split."""
    if split == "train" or not (cfg.validation_data or cfg.validation_split):
        return "data"
    return "validation_data" if cfg.validation_data else "validation_split"


class IncompleteRow(ValueError):
    """A row has no label, no text or no answer."""


def require_value(name: str, value: Any) -> None:
    """Raises IncompleteRow for null, for blanks, and for NaN, which tables use for null."""
    if value is None or value != value or not str(value).strip():
        raise IncompleteRow(f"the {name} is {'NaN' if value != value else 'empty'}")


def require_text(name: str, value: Any) -> str:
    """The text; raises ValueError for what is none, or blank."""
    require_value(name, value)
    if not isinstance(value, str):
        raise ValueError(f"the {name} is {value!r:.60} but must be text")
    return value
