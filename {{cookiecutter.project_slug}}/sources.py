"""Where a task's data comes from: files, folders, the Hub; its validation part; its cache.

A row is a pair: a dict with a value for each role that a task asks for (text, label, ...), and the
place where it stands, for whoever has to mend it. What is wrong with data is a ValueError of one
line. Rows are held in memory until a task has prepared them, and are not read again after that.
"""

import csv
import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# datasets takes 1 s to import: it waits for the function that needs it.

Row = tuple[dict[str, Any], str]
TABLES = (".jsonl", ".csv", ".parquet")
COMMIT = re.compile("[0-9a-f]{40}")


@dataclass
class DataConfig:
    """Fields that all tasks have for their data."""

    data: str = ""
    """Rows to train on: a file, a folder, or the name of a data set on the Hub."""
    data_config: str = ""
    """Of a data set on the Hub: its configuration, also called subset."""
    data_split: str = "train"
    """Of a data set on the Hub: the split to train on."""
    data_revision: str = ""
    """Of a data set on the Hub: the commit, 40 hex digits, since names and branches move on."""
    validation_data: str = ""
    """Rows to evaluate on, a file or a folder; empty: a part of the training rows is held out."""
    validation_split: str = ""
    """Of a data set on the Hub: the split to evaluate on; empty: as for validation_data."""
    validation_fraction: float = 0.1
    """Share of the training rows that is held out for evaluation, chosen by a hash of what they
    hold, so that it is the same on every machine and equal rows are never on both sides."""
    cache_dir: str = ".cache/data"
    """Where prepared data is kept, one folder for each combination of data and settings."""


def check_fields(cfg: Any, rules: list[tuple[str, bool, str]]) -> None:
    """Raises ValueError for the first wrong field of `rules`: (name, is it right, what must be)."""
    for name, right, wanted in rules:
        if not right:
            raise ValueError(f"task.{name} is {getattr(cfg, name)!r} but must be {wanted}")


def one_line(error: BaseException, longest: int = 300) -> str:
    """What an error says, or its type, without the lines and lists that libraries add."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


# ---- Files ---------------------------------------------------------------------------------------


def on_hub(data: str) -> bool:
    """Whether this names a data set on the Hub: OWNER/NAME or NAME, and nothing of that name here.

    What ends like a file is taken for a file that is missing.
    """
    if Path(data).expanduser().exists() or re.search(r"\.[A-Za-z]{2,7}$", data):
        return False
    return bool(re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", data))


def files(data: str, endings: Iterable[str], field: str = "data") -> list[Path]:
    """The files with these endings: `data` itself, or those below it, in the order of their paths.

    Raises ValueError if there is none.
    """
    path = Path(data).expanduser()
    found = [path] if path.is_file() else []
    for folder, folders, names in os.walk(path, followlinks=True):
        # Hidden ones are copies that notebooks and file managers keep.
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(folder, name) for name in names if not name.startswith(".")]
        here = Path(folder).parent.resolve()
        if Path(folder) != path and Path(folder).resolve() in (here, *here.parents):
            raise ValueError(f"task.{field}: {folder} is a link to a folder above itself")
    found = sorted(file for file in found if file.suffix.lower() in endings and file.is_file())
    if not found or not data:
        kinds = ", ".join(endings)
        raise ValueError(
            f"task.{field}: nothing to read at {data or 'an empty path'}; "
            f"pass --task.{field} PATH, a file or folder of {kinds}"
        )
    return found


def rows_of(path: Path, columns: dict[str, str], field: str = "data") -> Iterator[Row]:
    """The rows of one file; `columns` says for each role in which column it stands.

    A .txt file is a single row: its text, and the name of its folder as label.
    """
    place = str(path)
    try:
        kind = path.suffix.lower()
        if kind == ".txt":
            row = {"text": path.read_bytes().decode(), "label": path.absolute().parent.name}
            yield {role: cell(row.get(role)) for role in columns}, place
        elif kind == ".parquet":
            from pyarrow.parquet import ParquetFile

            with ParquetFile(path) as table:
                check_columns(table.schema_arrow.names, columns)
                number = 0
                for batch in table.iter_batches(columns=sorted({*columns.values()})):
                    for row in batch.to_pylist():
                        number += 1
                        yield roles(row, columns), f"{path}, row {number}"
        elif kind == ".csv":
            csv.field_size_limit(2**31 - 1)
            with open(path, encoding="utf-8-sig", newline="") as file:
                table = csv.DictReader(file, strict=True)
                check_columns(table.fieldnames or [], columns)
                for row in table:
                    place = f"{path}, line {table.line_num}"
                    if None in row or None in row.values():
                        raise ValueError(
                            f"not the {len(table.fieldnames)} fields of the first line"
                        )
                    yield roles(row, columns), place
        else:
            # By bytes: a line of JSON may hold characters that Python's text takes for line ends.
            with open(path, "rb") as file:
                for number, line in enumerate(file, 1):
                    place = f"{path}, line {number}"
                    if line.strip():
                        row = json.loads(line)
                        if not isinstance(row, dict):
                            raise ValueError(f"not an object: {row!r:.60}")
                        check_columns(list(row), columns)
                        yield roles(row, columns), place
    except (OSError, ValueError, csv.Error) as error:  # not UTF-8, not JSON, not Parquet, ...
        raise ValueError(f"task.{field}: cannot read {place}: {one_line(error)}") from None


def check_columns(found: Iterable[str], columns: dict[str, str]) -> None:
    """Raises ValueError for a column that is not there, with those that are, and its field."""
    for role, name in columns.items():
        if name not in found:
            there = ", ".join(map(str, found)) or "nothing"
            raise ValueError(
                f"no column {name} among {there}; name the one to take with --task.{role}_column"
            )


def roles(row: dict, columns: dict[str, str]) -> dict[str, Any]:
    return {role: cell(row[name]) for role, name in columns.items()}


def cell(value: Any) -> Any:
    """JSON can spell half of a surrogate pair, which is no character: `?` takes its place."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, list):
        return [cell(each) for each in value]
    if isinstance(value, dict):
        return {key: cell(each) for key, each in value.items()}
    return value


# ---- The Hub -------------------------------------------------------------------------------------


def hub_dataset(cfg: DataConfig, split: str, field: str = "data_split") -> Any:
    """A split of a data set on the Hub, downloaded once: a `datasets.Dataset`."""
    import datasets

    datasets.disable_progress_bars()
    try:
        found = datasets.load_dataset(
            cfg.data, cfg.data_config or None, split=split, revision=cfg.data_revision
        )
    except Exception as error:  # each of many libraries below has its own
        where = f"{cfg.data}, config {cfg.data_config or 'default'}, split {split}"
        raise ValueError(
            f"task.{field}: cannot load {where} from the Hub: {one_line(error)}"
        ) from None
    return found


def check_pinned(cfg: DataConfig) -> None:
    """Raises ValueError unless the data set of the Hub is named by a commit; says the newest."""
    if COMMIT.fullmatch(cfg.data_revision):
        return
    from huggingface_hub import HfApi

    asked = cfg.data_revision or "main"
    try:
        commit = HfApi().dataset_info(cfg.data, revision=asked).sha
    except Exception as error:
        raise ValueError(
            f"task.data: {cfg.data} is neither here nor on the Hub, or the Hub cannot be reached: "
            f"{one_line(error)}"
        ) from None
    raise ValueError(
        f"task.data_revision: data sets on the Hub change; write --task.data_revision {commit}, "
        f"which is {asked} of {cfg.data} now"
    )


def hub_rows(cfg: DataConfig, split: str, columns: dict[str, str], field: str) -> Iterator[Row]:
    """The rows of a split, as of a file; labels that the data set has names for are these."""
    import datasets

    dataset = hub_dataset(cfg, split, field)
    place = f"{cfg.data}, split {split}"
    try:
        check_columns(dataset.column_names, columns)
    except ValueError as error:
        raise ValueError(f"task.data: {place}: {error}") from None
    dataset = dataset.select_columns(sorted({*columns.values()}))
    for column in dataset.column_names:  # images as their bytes: decoded they would fill the memory
        if type(dataset.features[column]).__name__ == "Image":
            dataset = dataset.cast_column(column, datasets.Image(decode=False))
    features = {c: dataset.features[c] for c in dataset.column_names}
    names = {c: getattr(getattr(f, "feature", f), "names", None) for c, f in features.items()}
    for number, row in enumerate(dataset):
        for column, known in names.items():
            if known and isinstance(row[column], list):
                row[column] = [known[i] for i in row[column]]
            elif known and isinstance(row[column], int) and row[column] >= 0:
                row[column] = known[row[column]]
        yield roles(row, columns), f"{place}, row {number}"


# ---- Training and validation ---------------------------------------------------------------------


def read(
    cfg: DataConfig,
    columns: dict[str, str],
    endings: Iterable[str] = TABLES,
    shipped: Iterable[Row] | None = None,
) -> tuple[list[Row], list[Row] | None]:
    """All rows of `data`, and those of the validation data, or None where there is none given.

    `shipped`: rows that take the place of those of `data`, which is a name of the task's own.
    """
    if shipped is not None:
        train = list(shipped)
    elif on_hub(cfg.data):
        train = list(hub_rows(cfg, cfg.data_split, columns, "data_split"))
    else:
        found = files(cfg.data, endings)
        train = [row for file in found for row in rows_of(file, columns)]
    validation = None
    if cfg.validation_data:
        found = files(cfg.validation_data, endings, "validation_data")
        validation = [row for file in found for row in rows_of(file, columns, "validation_data")]
    elif cfg.validation_split and shipped is None and on_hub(cfg.data):
        validation = list(hub_rows(cfg, cfg.validation_split, columns, "validation_split"))
    return train, validation


def hold_out(
    rows: list[Row],
    fraction: float,
    key: Callable[[Row], str],
    stratum: Callable[[Row], Any] = lambda row: None,
) -> tuple[list[Row], list[Row]]:
    """Rows to train on and rows held out: by a hash of their key, and so the same everywhere.

    Rows of one key stay together. About this fraction of each stratum is held out, in whole keys; a
    stratum keeps one key to train on. Both parts are in the order of the hashes.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    ranked = sorted(groups.items(), key=lambda each: hashlib.sha256(each[0].encode()).digest())
    strata: dict[Any, list[list[Row]]] = {}
    for _, group in ranked:
        strata.setdefault(stratum(group[0]), []).append(group)
    held = set()
    for members in strata.values():
        wanted, taken = fraction * sum(map(len, members)), 0
        for group in members[:-1]:
            if taken + len(group) / 2 <= wanted:
                held.add(id(group))
                taken += len(group)
    largest = max(strata.values(), key=len)
    if not held and len(largest) > 1:
        held.add(id(largest[0]))
    parts = ([g for _, g in ranked if id(g) not in held], [g for _, g in ranked if id(g) in held])
    train, validation = ([row for group in part for row in group] for part in parts)
    return train, validation


# ---- Cache ---------------------------------------------------------------------------------------


def used_files(
    cfg: DataConfig, endings: Iterable[str], *more: Path, shipped: list[Path] | None = None
) -> list[list]:
    """Path, size and time of change of the files that data is made of, for `cache_folder`.

    What comes from the Hub is named by its commit, and checked here to be. `shipped`: the files of
    data that has a name of the task's own.
    """
    check_hub_fields(cfg, shipped is None and on_hub(cfg.data))
    found = [*more, *(shipped or [])]
    if shipped is not None:
        pass
    elif on_hub(cfg.data):
        check_pinned(cfg)
    else:
        found += files(cfg.data, endings)
    if cfg.validation_data:
        found += files(cfg.validation_data, endings, "validation_data")
    return [[str(f), f.stat().st_size, f.stat().st_mtime_ns] for f in found]


def check_hub_fields(cfg: DataConfig, from_hub: bool) -> None:
    """Raises ValueError for a field that nothing would read."""
    name = next(
        (n for n in ("data_config", "data_revision", "validation_split") if getattr(cfg, n)), ""
    )
    if name and not from_hub:
        raise ValueError(f"task.{name} is for data sets on the Hub; task.data is {cfg.data}")
    if cfg.validation_data and cfg.validation_split:
        raise ValueError("task.validation_data and task.validation_split: give one of them")


def digest(*files: Path) -> str:
    """16 hex digits that stand for the content of files."""
    found = hashlib.sha256()
    for file in files:
        found.update(hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()[:16]


def cache_folder(cfg: DataConfig, settings: list, used: list[list], code: str) -> Path:
    """The folder of prepared data; its name stands for all that shapes it.

    That is the fields of DataConfig, the task's own settings, the files, this file, and the code.
    """
    fields = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(DataConfig)}
    del fields["cache_dir"]
    code += Path(__file__).read_text(encoding="utf-8")
    text = json.dumps([fields, settings, used, code])
    return Path(cfg.cache_dir).expanduser() / hashlib.sha256(text.encode()).hexdigest()[:16]


def prepare(folder: Path, build: Callable[[Path], None]) -> Path:
    """Has `build` fill the folder, unless it is there; safe when many processes ask together.

    Gives the folder. What a killed process has left does not count, and is removed by the next.
    """
    if folder.exists():
        return folder
    from filelock import FileLock

    unfinished = folder.with_suffix(".unfinished")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            if not folder.exists():  # else another process was first
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir()
                build(unfinished)
                unfinished.rename(folder)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)  # a full disk gets it back
        raise ValueError(f"task.cache_dir: cannot write {folder}: {error}") from None
    return folder
