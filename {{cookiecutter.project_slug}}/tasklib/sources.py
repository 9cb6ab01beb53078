"""Where a task's data comes from: files, folders, the Hub; its validation part; its cache.

A row is a pair: a dict with a value for each role that a task asks for (text, label, ...), and the
place where it stands, for whoever has to mend it. What is wrong with data is a ValueError of one
line. Rows are held in memory until a task has prepared them, and are not read again after that.
"""

import codecs
import contextlib
import csv
import dataclasses
import errno
import hashlib
import io
import itertools
import json
import os
import re
import signal
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tasklib.fields import NOTHING
from tasklib.files import PERMANENT_ERRORS, flush, read_json_object, remove
from tasklib.messages import one_line

# datasets takes 1 s to import, pyarrow 0.2 s: they wait for the function that needs them.

Row = tuple[dict[str, Any], str]
Columns = dict[str, str | list[str]]
TABLES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
PACKED = {".gz": "gzip", ".zst": "zstd"}  # what may stand around all but .parquet
SEPARATORS = {".csv": ",", ".tsv": "\t"}
MOST_PACKED = 200  # times the size of a packed file that it may hold; text packs to a tenth
COMMIT = re.compile("[0-9a-f]{40}")
STOPS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1}
INDEX = "index"  # of prepared data: the SHA-256 of its second line, which is JSON
CODE = Path(__file__).read_text(encoding="utf-8")
# Of fields: what a continued run may change. "shape": never, since weights would not fit.


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
    incomplete_rows: Literal["refuse", "skip"] = "refuse"
    """Whether rows without a text, a label or an answer end the run, or are counted and skipped."""
    cache_dir: str = field(default=".cache/data", metadata=NOTHING)
    """Where prepared data is kept, one folder for each combination of data and settings."""


def check_fields(cfg: Any, rules: list[tuple[str, bool, str]]) -> None:
    """Raises ValueError for the first wrong field of `rules`: (name, is it right, what must be)."""
    for name, value in vars(cfg).items():
        if isinstance(value, str) and value != value.encode(errors="replace").decode():
            raise ValueError(f"task.{name}: {one_line(value, 60)} is not UTF-8")
    for name, right, wanted in rules:
        if not right:
            value = one_line(repr(getattr(cfg, name)), 60)
            raise ValueError(f"task.{name} is {value} but must be {wanted}")


def check_read(cfg: Any, rules: list[tuple[str, bool, str]]) -> None:
    """Raises ValueError for the first field that is set, and that nothing would read.

    `rules`: (names of fields, is something reading them, what else would have to be).
    """
    defaults = {each.name: each.default for each in dataclasses.fields(cfg)}
    for names, is_read, wanted in rules:
        for name in names.split():
            value = getattr(cfg, name)
            if not is_read and value != defaults[name]:
                value, default = (one_line(repr(v), 60) for v in (value, defaults[name]))
                raise ValueError(
                    f"task.{name} is {value}, but nothing reads it {wanted}; leave it out, or give "
                    f"its default, {default}"
                )


def check_data(cfg: Any, shipped: Iterable[str]) -> None:
    """Raises ValueError for fields of DataConfig that cannot work, before anything is read.

    `shipped`: names of data that the task has itself.
    """
    rules = [
        ("data", cfg.data, "a path, or a name"),
        ("cache_dir", cfg.cache_dir, "the path of a folder"),
        ("validation_fraction", 0 < cfg.validation_fraction < 1, "between 0 and 1"),
    ]
    check_fields(cfg, rules)
    local_path(cfg.cache_dir, "cache_dir")
    local_path(cfg.validation_data, "validation_data")
    hub = cfg.data not in shipped and on_hub(cfg.data)
    what = f"where task.data is {one_line(cfg.data, 60)}, which is no data set on the Hub"
    split = hub and not cfg.validation_data
    given = cfg.validation_data or cfg.validation_split
    check_read(
        cfg,
        [
            ("data_config data_split data_revision", hub, what),
            ("validation_split", hub, what),
            ("validation_split", split, "beside task.validation_data"),
            ("validation_fraction", not given, "beside rows to evaluate on"),
        ],
    )


# ---- Files ---------------------------------------------------------------------------------------


def local_path(text: str, field: str) -> Path:
    """The path that a field names, whether something is there or not.

    Raises ValueError for what no file system takes for one, or does not let us look at.
    """
    try:
        path = Path(text).expanduser()
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError, RuntimeError) as error:  # too long, with a NUL, of no user
        reason = getattr(error, "strerror", None) or one_line(error)
        raise ValueError(f"task.{field}: {one_line(text, 60)}: {reason}; give another") from None
    return path


def on_hub(data: str) -> bool:
    """Whether this names a data set on the Hub: OWNER/NAME or NAME, and nothing of that name here.

    What ends like a file is taken for a file that is missing.
    """
    if os.path.lexists(local_path(data, "data")) or re.search(r"\.[A-Za-z]{2,7}$", data):
        return False
    return bool(re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", data)) and not is_path(data)


def is_path(name: str) -> bool:
    """Whether nothing on the Hub can have this name, or it is below a folder that is here."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return True
    first, _, rest = name.partition("/")
    return bool(rest) and (first == "runs" or Path(first).is_dir())


def files(data: str, endings: Iterable[str], field: str = "data") -> list[Path]:
    """The files with these endings: `data` itself, or those below it, in the order of their paths.

    Raises ValueError if there is none, and for anything that cannot be reached: a class or a part
    of the rows would be missing without a word.
    """
    found, others = listing(data, endings, field)
    if not found:
        kinds, packed = ", ".join(endings), f" (text also packed, as {' or '.join(PACKED)})"
        raise ValueError(
            f"task.{field}: nothing to read at {one_line(data, 100) or 'an empty path'}"
            f"{told(others)}; pass --task.{field} PATH, a file or folder of {kinds}{packed}"
        )
    return found


def kind(path: Path) -> str:
    """A file's ending in lower case; of what is packed the one below: .csv of rows.CSV.GZ."""
    ending, below = path.suffix.lower(), Path(path.stem).suffix.lower()
    return below if ending in PACKED and below in (".txt", *TABLES[:-1]) else ending


def listing(data: str, endings: Iterable[str], field: str) -> tuple[list[Path], Counter]:
    """The files with these endings, sorted, and the number of other files by their endings.

    Hidden ones do not count: they are copies that notebooks and file managers keep.
    """
    root = local_path(data, field)
    found: list[Path] = []
    others: Counter = Counter()
    seen: dict[tuple[int, int], str] = {}
    left = [str(root)] if data else []
    while left:
        path = left.pop()
        try:
            about = os.stat(path)
            if stat.S_ISDIR(about.st_mode):
                names = sorted(name for name in os.listdir(path) if not name.startswith("."))
                left += [os.path.join(path, name) for name in names]
        except OSError as error:
            if path == str(root) and not os.path.lexists(path):
                break
            reason = "a link to nothing" if os.path.islink(path) else "not to be read"
            raise ValueError(
                f"task.{field}: {one_line(path, 100)} is {reason} ({error.strerror}): mend or "
                "remove it"
            ) from None
        if stat.S_ISDIR(about.st_mode):
            first = seen.setdefault((about.st_dev, about.st_ino), path)
            if first != path:
                above = path.startswith(os.path.join(first, ""))
                what = f"a link to a folder above itself, {one_line(first, 100)}"
                what = what if above else f"the same folder as {one_line(first, 100)}"
                raise ValueError(f"task.{field}: {one_line(path, 100)} is {what}: remove one")
        elif not stat.S_ISREG(about.st_mode):
            raise ValueError(
                f"task.{field}: {one_line(path, 100)} is neither file nor folder: remove it"
            )
        elif kind(Path(path)) not in endings:
            others["".join(Path(path).suffixes[-2:])[-20:] or "no ending"] += 1
        elif path != path.encode(errors="replace").decode():
            raise ValueError(
                f"task.{field}: the name of {one_line(path, 100)} is not UTF-8: give it another"
            )
        else:
            found.append(Path(path))
    return sorted(found), others


def told(others: Counter) -> str:
    """How many files are passed over, as a part of a sentence."""
    if not others:
        return ""
    kinds = ", ".join(f"{n:,} {one_line(kind, 20)}" for kind, n in others.most_common(10))
    number = sum(others.values())
    return f" (passed over {number:,} other file{'s' * (number > 1)}: {kinds})"


def say_passed_over(cfg: DataConfig, endings: Iterable[str], shipped: bool = False) -> None:
    """Prints what is not read beside the data, as files whose endings are nearly right."""
    asked = [("data", "" if shipped or on_hub(cfg.data) else cfg.data)]
    for name, data in (*asked, ("validation_data", cfg.validation_data)):
        if others := listing(data, endings, name)[1]:
            print(f"Preparing data: {one_line(data, 100)}{told(others)}", flush=True)


def rows_of(
    path: Path, columns: Columns | None, field: str = "data", optional: Container[str] = ()
) -> Iterator[Row]:
    """The rows of one file; `columns` says for each role in which column it stands.

    A role of several columns gets a dict of their values. An optional role whose column is missing
    is None. Without `columns` all are given by their names. A .txt file is a single row: its text,
    and the name of its folder as label.
    """
    where = place = one_line(path, 200)
    ending, names, ended = kind(path), names_in(columns or {}), 0

    def decoded(file: io.BufferedReader) -> Iterator[str]:
        """Its lines, each with the end that it has; `place` is that of the last one."""
        nonlocal place
        lines = io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="")
        for number, line in enumerate(lines, 1):
            place = f"{where}, line {number}"
            yield line if line.isascii() else line.encode(errors="surrogateescape").decode()

    try:
        if ending == ".parquet":
            from pyarrow.parquet import ParquetFile

            with ParquetFile(path) as table:
                there = table.schema_arrow.names
                check_columns(there, columns, optional)
                taken, number = [name for name in names if name in there], 0
                for batch in table.iter_batches(columns=None if columns is None else taken):
                    for row in batch.to_pylist():
                        number += 1
                        yield roles(row, columns), f"{where}, row {number}"
            return
        with opened(path) as file:
            if ending == ".txt":
                row = {"text": file.read().decode(), "label": path.absolute().parent.name}
                yield {role: cell(row.get(role)) for role in columns or row}, place
            elif ending in SEPARATORS:
                csv.field_size_limit(2**31 - 1)
                lines = decoded(file)
                first = next(lines, "")
                if re.fullmatch(r'"?sep=."?\s*', first):  # Excel's; the separator is found anyway
                    first = next(lines, "")
                needed = {r: n for r, n in (columns or {}).items() if r not in optional}
                mark = separator(first, SEPARATORS[ending], {*names_in(needed)})
                if mark != SEPARATORS[ending] and columns is not None:
                    about = f"separated by {called(mark)}, not by {called(SEPARATORS[ending])}"
                    print(f"Preparing data: {where}: the fields seem to be {about}", flush=True)
                table = csv.DictReader(itertools.chain([first], lines), strict=True, delimiter=mark)
                check_columns(table.fieldnames or [], columns, optional)
                for row in table:
                    if None in row or None in row.values():
                        more, most = row.pop(None, []), len(table.fieldnames)
                        number = len(more) + sum(value is not None for value in row.values())
                        raise ValueError(f"the first line has {most} fields, this one {number}")
                    yield roles(row, columns), place
                    ended = table.line_num
            else:
                # By bytes: a line of JSON may hold characters that Python's text takes for ends.
                entries = listed(file.read()) if ending == ".json" else file
                for number, entry in enumerate(entries, 1):
                    place = f"{where}, {'line' if isinstance(entry, bytes) else 'row'} {number}"
                    if isinstance(entry, bytes) and not entry.strip():
                        continue
                    row = json.loads(entry) if isinstance(entry, bytes) else entry
                    if not isinstance(row, dict):
                        raise ValueError(f"not an object: {row!r:.60}")
                    check_columns(list(row), columns, optional)
                    yield roles(row, columns), place
    except MemoryError:
        raise
    except Exception as error:  # not UTF-8, not JSON, too deep, ...: each library has its own
        problem = one_line(error)
        if isinstance(error, UnicodeDecodeError):
            if place == where:
                place = f"{where}, line {error.object.count(10, 0, error.start) + 1}"
            problem = f"byte 0x{error.object[error.start]:02x} is not UTF-8; save it as UTF-8"
        elif isinstance(error, json.JSONDecodeError):
            place = f"{where}, line {error.lineno}" if place == where else place
            problem = f"no JSON from column {error.colno} on: {error.msg}"
        elif isinstance(error, csv.Error) and "unexpected end of data" in problem:
            place, problem = f"{where}, line {ended + 1}", 'a " is opened and never closed'
        raise ValueError(f"task.{field}: cannot read {place}: {problem}") from None


class Unpacked(io.RawIOBase):
    """The bytes that a packed file holds; far too many of them, as of a bomb, are an error."""

    def __init__(self, path: Path):
        import pyarrow

        self.left = max(MOST_PACKED * path.stat().st_size, 2**28)
        packed = pyarrow.OSFile(str(path))
        self.stream = pyarrow.CompressedInputStream(packed, PACKED[path.suffix.lower()])

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            number = self.stream.readinto(buffer)
        except OSError as error:
            raise ValueError(f"it is broken, or not packed as its name says ({error})") from None
        self.left -= number
        if self.left < 0:
            raise ValueError(
                f"it holds more than {MOST_PACKED} times its size; unpack it if that is right"
            )
        return number


@contextlib.contextmanager
def opened(path: Path) -> Iterator[io.BufferedReader]:
    """The bytes of a file, unpacked, without the mark that some programs put before UTF-8."""
    packed = path.suffix.lower() in PACKED
    with io.BufferedReader(Unpacked(path), 2**16) if packed else open(path, "rb") as file:
        start = file.peek(3)[:3]
        if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise ValueError("it is UTF-16; save it as UTF-8")
        if start == codecs.BOM_UTF8:
            file.read(3)
        yield file


def separator(line: str, own: str, wanted: set[str]) -> str:
    """What stands between the names of a header: `own`, unless they are there only with another.

    Where none has these names, it is the first that divides the line.
    """
    found = {m: next(csv.reader([line], delimiter=m), []) for m in (own, ",", ";", "\t", "|")}
    right = [mark for mark, names in found.items() if wanted and wanted <= {*names}]
    return next(iter(right + [mark for mark, names in found.items() if len(names) > 1]), own)


def called(mark: str) -> str:
    return {",": "commas", "\t": "tabs"}.get(mark, mark)


def listed(content: bytes) -> list:
    """The objects of a JSON file: of its list, or of the only list of objects in its object.

    Lines, where each is an object of its own, as many programs write them to .json too.
    """
    try:
        value = json.loads(content)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and content.lstrip()[:1] == b"{":
            return content.splitlines()
        raise
    if isinstance(value, dict):
        lists = {
            name: each
            for name, each in value.items()
            if isinstance(each, list) and each and all(isinstance(row, dict) for row in each)
        }
        if len(lists) > 1:
            some = one_line(", ".join(lists), 60)
            raise ValueError(f"it has several lists of objects: {some}; make a file of each")
        value = next(iter(lists.values()), value)
    if not isinstance(value, list):
        raise ValueError("it is neither a list of objects nor an object with one such list in it")
    return value


def names_in(columns: Columns) -> list[str]:
    """The columns of all roles, each once."""
    names = [[name] if isinstance(name, str) else name for name in columns.values()]
    return sorted({*itertools.chain(*names)})


def check_columns(
    found: Iterable[str], columns: Columns | None, optional: Container[str] = ()
) -> None:
    """Raises ValueError for a column that is not there, with those that are, and its field."""
    names = list(found)
    if columns and not names:
        raise ValueError("it is empty: there are no names of columns")
    for role in columns or {}:
        for name in names_in({role: columns[role]}):
            often = names.count(name)
            if often > 1 or (often == 0 and role not in optional):
                there = one_line(", ".join(names[:20]), 100)
                some = "more than one column" if often else "no column"
                field = f"{role}_column" + "s" * (name != columns[role])
                raise ValueError(
                    f"{some} {one_line(name, 60)} among {there}; name the one to take with "
                    f"--task.{field}"
                )


def roles(row: dict, columns: Columns | None) -> dict[str, Any]:
    """What a row has for each role; check_columns has found all but optional ones."""
    if columns is None:
        return cell(row)
    return {
        role: cell(row.get(name))
        if isinstance(name, str)
        else {each: cell(row.get(each)) for each in name}
        for role, name in columns.items()
    }


def first_columns(cfg: DataConfig, endings: Iterable[str]) -> list[str]:
    """The names of the columns of the data: those of its first row."""
    if on_hub(cfg.data):
        check_pinned(cfg)
        return hub_dataset(cfg, cfg.data_split).column_names
    for file in files(cfg.data, endings):
        row = first_object(file) if kind(file) == ".json" else None
        if row := row or next((row for row, _ in rows_of(file, None)), None):
            return list(row)
    return []


def first_object(path: Path) -> dict | None:
    """The first object of a JSON file that is a list, without reading the rest; None: not found."""
    with contextlib.suppress(ValueError), opened(path) as file:  # rows_of says what is wrong
        text = file.read(2**20).decode(errors="ignore").lstrip()
        if text.startswith("["):
            row = json.JSONDecoder().raw_decode(text[1:].lstrip())[0]
            return row if isinstance(row, dict) else None
    return None


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
        where = one_line(where, 200)
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
            f"task.data: {one_line(cfg.data, 100)} is neither here nor on the Hub, or the Hub "
            f"cannot be reached: {one_line(error)}"
        ) from None
    raise ValueError(
        f"task.data_revision: data sets on the Hub change; write --task.data_revision {commit}, "
        f"which is {one_line(asked, 60)} of {cfg.data} now"
    )


def hub_rows(
    cfg: DataConfig, split: str, columns: Columns, field: str, optional: Container[str] = ()
) -> Iterator[Row]:
    """The rows of a split, as of a file; labels that the data set has names for are these."""
    import datasets

    dataset = hub_dataset(cfg, split, field)
    place = one_line(f"{cfg.data}, split {split}", 200)
    try:
        check_columns(dataset.column_names, columns, optional)
    except ValueError as error:
        raise ValueError(f"task.data: {place}: {error}") from None
    dataset = dataset.select_columns([n for n in names_in(columns) if n in dataset.column_names])
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


def for_vocabulary(texts: Iterable[str]) -> Iterator[str]:
    """The texts for a BPE to learn from, with spaces in runs of more than 1,000 characters.

    The time that a run takes grows with its square: one of 3 MB would take hours.
    """
    for text in texts:
        yield re.sub(r"(\S{1000})(?=\S)", r"\1 ", text)


def warn_of_overlap(train: Iterable[str], validation: Iterable[str]) -> None:
    """Says how many validation rows, by what stands for them, are training rows too."""
    known, validation = {*train}, [*validation]
    often = sum(each in known for each in validation)
    if often:
        number = f"{often:,} of {len(validation):,} validation rows are training rows too"
        print(f"Preparing data: {number}: evaluation will look better than it is", flush=True)


# ---- Training and validation ---------------------------------------------------------------------


def read(
    cfg: DataConfig,
    columns: Columns,
    endings: Iterable[str] = TABLES,
    shipped: Iterable[Row] | None = None,
    optional: Container[str] = (),
) -> tuple[list[Row], list[Row] | None]:
    """All rows of `data`, and those of the validation data, or None where there is none given.

    `shipped`: rows that take the place of those of `data`, which is a name of the task's own.
    `optional`: roles whose column may be missing; they are None then.
    """

    def local(field: str) -> list[Row]:
        found = files(getattr(cfg, field), endings, field)
        return [row for file in found for row in rows_of(file, columns, field, optional)]

    def split(field: str) -> list[Row]:
        return list(hub_rows(cfg, getattr(cfg, field), columns, field, optional))

    if shipped is not None:
        train = list(shipped)
    else:
        train = split("data_split") if on_hub(cfg.data) else local("data")
    say_passed_over(cfg, endings, shipped is not None)
    validation = None
    if cfg.validation_data:
        validation = local("validation_data")
    elif cfg.validation_split and shipped is None and on_hub(cfg.data):
        validation = split("validation_split")
    return train, validation


class Incomplete(ValueError):
    """A row has no label, no text or no answer."""


def complete(
    rows: list[Row], cfg: DataConfig, field: str, check: Callable[[dict], None]
) -> list[Row]:
    """The rows that `check` passes, which may change them; raises ValueError for any other.

    Incomplete ones are counted and left out where cfg.incomplete_rows is skip.
    """
    kept, left = [], []
    for row, place in rows:
        try:
            check(row)
        except ValueError as error:
            incomplete = isinstance(error, Incomplete)
            if not incomplete or cfg.incomplete_rows == "refuse":
                hint = "; --task.incomplete_rows skip leaves such rows out" * incomplete
                raise ValueError(f"task.{field}: {place}: {error}{hint}") from None
            left.append(f"{place}: {error}")
        else:
            kept.append((row, place))
    if left:
        size = f"{len(left):,} of {len(rows):,} incomplete rows"
        print(f"Preparing data: left out {size}, the first: {left[0]}", flush=True)
    return kept


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
    """Paths and digests of the files that data is made of, for `cache_folder`.

    What comes from the Hub is named by its commit, and checked here to be. Files that are passed
    over are counted: a new one is said. `shipped`: the files of data that has a name of the task's
    own.
    """
    found, counts, read = [*more, *(shipped or [])], [], []
    if shipped is None and on_hub(cfg.data):
        check_pinned(cfg)
    elif shipped is None:
        check_apart(cfg)
        read.append(("data", cfg.data))
    if cfg.validation_data:
        read.append(("validation_data", cfg.validation_data))
    for name, path in read:
        paths, others = listing(path, endings, name)
        found += paths or files(path, endings, name)  # which says that there is none
        counts.append(others)
    return [*digests(found, cfg).items(), *(sorted(each.items()) for each in counts)]


def check_apart(cfg: DataConfig) -> None:
    """Raises ValueError where prepared data would be taken for data, and change its own name."""
    cache, data = (local_path(path, "data").resolve() for path in (cfg.cache_dir, cfg.data))
    below = cache.relative_to(data).parts if cache.is_relative_to(data) else (".",)
    if not any(part.startswith(".") for part in below):
        raise ValueError(
            f"task.cache_dir: {one_line(cfg.cache_dir, 60)} lies in task.data: give another"
        )


def digest(*files: Path) -> str:
    """16 hex digits that stand for the content of files."""
    found = hashlib.sha256()
    for file in files:
        found.update(hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()[:16]


def content_of(parts: dict[str, dict[str, Any]]) -> str:
    """64 hex digits that stand for the columns of each part: names, types, shapes and values.

    A column is an array, or a list of arrays of one type. The digest is the same on every machine
    and with any version of the libraries, which the bytes of Arrow's files are not.
    """
    found = hashlib.sha256()
    for part, columns in parts.items():
        for name, values in sorted(columns.items()):
            arrays = [values] if isinstance(values, np.ndarray) else values
            shapes = [array.shape for array in arrays]
            kind = arrays[0].dtype.newbyteorder("<") if arrays else np.dtype(bool)
            found.update(repr((part, name, kind.str, shapes)).encode())
            for array in arrays:
                found.update(np.ascontiguousarray(array, kind))
    return found.hexdigest()


def cache_folder(cfg: DataConfig, settings: list, used: list[list], code: str) -> Path:
    """The folder of prepared data; its name stands for all that shapes it.

    That is the fields of DataConfig, the task's own settings, the files, this file, and the code.
    """
    fields = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(DataConfig)}
    del fields["cache_dir"]
    text = json.dumps([fields, settings, used, code + CODE])
    return local_path(cfg.cache_dir, "cache_dir") / hashlib.sha256(text.encode()).hexdigest()[:16]


# ---- Cache: digests of files ---------------------------------------------------------------------


def stamp(about: os.stat_result) -> list[int]:
    """What changes whenever a file does: the time of change (ctime) cannot be set back."""
    return [about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino]


def sha256(path: Path | str) -> tuple[str, list[int]]:
    """A file's SHA-256 and its stamp; raises OSError, also for what is no file and might block."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as file:
        about, found, block = os.fstat(file.fileno()), hashlib.sha256(), bytearray(1 << 20)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(0, "not a file", str(path))
        while size := file.readinto(block):
            found.update(memoryview(block)[:size])
    return found.hexdigest(), stamp(about)


def side_by_side(function: Callable, items: list) -> list:
    """A function's results for the items, from threads: hashing and reading let others run."""
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 32)) as pool:
        return list(pool.map(function, items))


def digests(paths: Iterable[Path], cfg: DataConfig, missing: str | None = None) -> dict[str, str]:
    """SHA-256 of each file, by its path; raises ValueError for one that cannot be read.

    Content decides, not size and time. A file is read again only when its size, its times or its
    inode are not those in the memo of the cache folder; one that was changed less than two seconds
    before it was read is not in the memo, since a later change might leave the same times. Of
    processes that start together the first reads, and the others wait for its memo. Where that
    cannot be written, each reads. `missing` is the digest of a file that cannot be read.
    """
    cache, names = local_path(cfg.cache_dir, "cache_dir"), list(dict.fromkeys(map(str, paths)))

    def known() -> dict[str, str]:
        memo, found = read_json_object(cache / "digests.json"), {}
        for name in names:
            saved = memo.get(os.path.abspath(name))
            if isinstance(saved, list) and len(saved) == 5 and isinstance(saved[4], str):
                with contextlib.suppress(OSError, ValueError):  # said below
                    if stamp(os.stat(name)) == saved[:4]:
                        found[name] = saved[4]
        return found

    def look(name: str) -> tuple[str, list[int]]:
        try:
            return sha256(name)
        except (OSError, ValueError) as error:  # ValueError: its name has a NUL
            if missing is not None:
                return missing, []
            reason = getattr(error, "strerror", None) or one_line(error)
            raise ValueError(
                f"cannot read {one_line(name, 200)}: {reason}; mend it, or take it away"
            ) from None

    found = known()
    if len(found) < len(names):
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError, NotImplementedError):  # read-only: each for itself
                stack.enter_context(lock(cache / "digests.lock"))
                found = known()
            now, new = time.time_ns(), [name for name in names if name not in found]
            looked = dict(zip(new, side_by_side(look, new), strict=True))
            found |= {name: value for name, (value, _) in looked.items()}
            old = {n: [*s, v] for n, (v, s) in looked.items() if s and now - s[2] > 2_000_000_000}
            if old:
                added = {os.path.abspath(name): saved for name, saved in old.items()}
                write_json(cache / "digests.json", read_json_object(cache / "digests.json") | added)
    return {name: found[name] for name in names}


def lock(path: Path) -> Any:
    """A lock among processes, to be entered; raises OSError where its file cannot be written."""
    from filelock import FileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(path)


def write_json(path: Path, value: dict) -> None:
    """Replaces a small file of the cache, if it can be written: nothing is lost without it."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with contextlib.suppress(OSError):
        partial.write_text(json.dumps(value), encoding="utf-8")
        partial.replace(path)
    with contextlib.suppress(OSError):
        partial.unlink(missing_ok=True)


# ---- Cache: prepared data ------------------------------------------------------------------------


def prepare(cfg: DataConfig, name: Callable[[], Path], build: Callable[[Path], dict]) -> Path:
    """Has `build` fill the folder that `name` gives, unless it is there as it was written.

    Gives the folder. `build` gives {"content": what `content_of` says, "named": digests of files
    that are not in the folder's name}, for the index, which is written last. Safe when many
    processes ask together; when the first fails, those that were waiting raise what it has raised.
    What a killed process has left does not count, and is removed by the next.
    """
    asked, folder = time.time(), name()
    if seen_by_this_boot(folder) and not fault_of(folder, cfg):
        return folder
    unfinished, failed = folder.with_suffix(".unfinished"), folder.with_suffix(".failed")
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock(folder.with_suffix(".lock")))
        except (OSError, NotImplementedError) as error:
            if not fault_of(folder, cfg):  # read-only, and whole
                return folder
            raise cannot_write(folder, error) from None
        fault = fault_of(folder, cfg)
        if not fault:
            return folder
        failure = read_json_object(failed)
        if isinstance(at := failure.get("at"), float) and at > asked:
            raise ValueError(str(failure.get("problem")))
        try:
            remove(unfinished)
            if os.path.lexists(folder):
                print(f"{one_line(folder, 100)} {fault}: preparing again", flush=True)
                aside = folder.with_suffix(f".discarded-{os.getpid()}")
                remove(aside)
                folder.rename(aside)  # first, as another run may have it open
                remove(aside)
            unfinished.mkdir()
            facts = build(unfinished)
            if name() != folder:
                raise ValueError("task.data: files changed while they were prepared: start again")
            commit(folder, unfinished, facts)
            remove(failed)
        except BaseException as error:
            remove(unfinished)  # a full disk gets it back
            if isinstance(error, MemoryError):
                what = f"{one_line(cfg.data, 60)} does not fit into the memory of this machine"
                error = ValueError(f"task.data: {what}: give fewer rows ({one_line(error, 60)})")
            elif isinstance(error, OSError) and error.errno in PERMANENT_ERRORS:
                error = cannot_write(folder, error)
            if isinstance(error, ValueError):
                write_json(failed, {"at": time.time(), "problem": str(error)})
            raise error from None
    return folder


def cannot_write(folder: Path, error: Exception) -> ValueError:
    reason = getattr(error, "strerror", None) or one_line(error)
    return ValueError(f"task.cache_dir: cannot write {one_line(folder, 100)}: {reason}")


def commit(folder: Path, unfinished: Path, facts: dict) -> None:
    """Turns a filled folder into prepared data: contents, index and names reach the disk in turn.

    The index holds sizes and SHA-256 of all files, and its own.
    """
    paths = sorted(path for path in unfinished.rglob("*") if path.is_file())
    found = side_by_side(lambda path: (flush(path), sha256(path))[1], paths)
    listed = {
        path.relative_to(unfinished).as_posix(): [about[0], digest]
        for path, (digest, about) in zip(paths, found, strict=True)
    }
    text = json.dumps({**facts, "files": listed}).encode()
    own = hashlib.sha256(text).hexdigest().encode()
    (unfinished / INDEX).write_bytes(own + b"\n" + text + b"\n")
    for path in [unfinished / INDEX, *(p for p in unfinished.rglob("*") if p.is_dir())]:
        flush(path)
    flush(unfinished)
    unfinished.rename(folder)
    flush(folder.parent)
    write_seen(folder, stamps(folder))


def read_index(folder: Path) -> dict:
    """The index of a prepared folder; raises ValueError where it is not what was written."""
    path = folder / INDEX
    if not path.is_file():
        raise ValueError("has no index")
    own, _, text = path.read_bytes().partition(b"\n")
    if hashlib.sha256(text.removesuffix(b"\n")).hexdigest().encode() != own:
        raise ValueError("is not what was written: its index is broken")
    return json.loads(text)


def stamps(folder: Path) -> dict[str, list[int]]:
    """The stamp of each file below a folder, links not followed; of what is no file, nothing.

    What file managers and network disks hide there does not count.
    """
    found = {}
    for path in folder.rglob("*"):
        about = path.lstat()
        below = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in below.parts)
        if not stat.S_ISDIR(about.st_mode) and not hidden:
            found[below.as_posix()] = stamp(about) * stat.S_ISREG(about.st_mode)
    return found


def fault_of(folder: Path, cfg: DataConfig) -> str:
    """What is wrong with prepared data, or with the files that it names; empty: nothing.

    Names and sizes, and the index's own digest, are compared each time. The bytes of all files are
    compared when a machine sees them for the first time since it was started, and whenever a file's
    size, times or inode are not as they were then: reading all at each start would take as long as
    the disk does, and what a disk or a crash does to files, it does before or changes these.
    """
    try:
        index, found = read_index(folder), stamps(folder)
        written, named = index["files"], index.get("named", {})
        sizes = {name: about[:1] for name, about in found.items() if name != INDEX}
        wrong = [n for n in {**sizes, **written} if sizes.get(n) != written.get(n, [])[:1]]
        if not wrong and not seen_by_this_boot(folder):
            digests_now = side_by_side(lambda name: sha256(folder / name)[0], list(written))
            pairs = zip(written.items(), digests_now, strict=True)
            wrong = [name for (name, (_, digest)), now in pairs if digest != now]
        if wrong:
            return f"is not what was written: {one_line(wrong[0], 60)}"
        write_seen(folder, found)
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) in (errno.EMFILE, errno.ESTALE, errno.ETIMEDOUT):
            raise  # no fault of the files
        return getattr(error, "strerror", None) or str(error)
    now = digests(map(Path, named), cfg, missing="")
    changed = next((name for name in named if now[name] != named[name]), "")
    return changed and f"is out of date, as {one_line(changed, 100)} has changed"


def boot() -> list[str]:
    """What stands for the time since this machine was started; empty where it does not say."""
    try:
        return [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), socket.gethostname()]
    except OSError:
        return []


def seen_file(folder: Path) -> Path:
    """Where this machine notes what it has seen: others may share the disk."""
    return folder.with_suffix(f".{socket.gethostname()}.seen")


def seen_by_this_boot(folder: Path) -> bool:
    """Whether the files are those that were written or read in full since this machine started."""
    try:
        found = stamps(folder)
    except OSError:
        return False
    seen = read_json_object(seen_file(folder))
    return bool(boot()) and seen == {"boot": boot(), "files": found}


def write_seen(folder: Path, found: dict[str, list[int]]) -> None:
    """Notes that files with these stamps are as they were written."""
    if boot():
        write_json(seen_file(folder), {"boot": boot(), "files": found})


def content(folder: Path) -> str:
    """What `content_of` said of prepared data when it was written."""
    return read_index(folder)["content"]


# ---- Processes -----------------------------------------------------------------------------------


def in_child(function: Callable, *arguments) -> None:
    """Calls a function in a forked process, for the files that it writes.

    A library that does not return to Python for half a minute would keep this process from hearing
    a signal: the child has the signals' defaults, and is killed when what waits for it is told to
    stop. Raises ValueError with what the function raised, or where the child was killed.
    """
    reader, writer = os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # the child must not run our handlers
    child, ended = None, None
    try:
        child = os.fork()
        if child == 0:
            work(function, arguments, writer)
        os.close(writer)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        with open(reader, "rb") as pipe:
            problem = pipe.read().decode()
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        if child and ended is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if -ended in STOPS:  # a signal to all, which has reached the child first
        raise SystemExit(75)
    if ended < 0:
        name = signal.Signals(-ended).name
        problem = f"its preparation was ended by {name}, perhaps for want of memory"
    if ended:
        raise ValueError(f"task.data: {problem}; give fewer or other rows")


def work(function: Callable, arguments: tuple, writer: int) -> None:
    """The child's part: ends it, with what went wrong written to the pipe."""
    problem = "it failed"
    try:
        for number in STOPS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        function(*arguments)
        problem = ""
    except BaseException as error:
        problem = one_line(error)
    finally:
        os.write(writer, problem.encode())
        os._exit(bool(problem))


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in what takes longer; where signals cannot be heard, nothing."""

    def late(*_) -> None:
        raise TimeoutError(f"it takes longer than {seconds:g} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, late)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, 1)  # again, should a library swallow one
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
