"""Shards: large .parquet files, on a disk or an object store, read by row or from the start.

A .parquet can only be decoded in row groups, so its columns are first unpacked into a local Arrow
file. A reader of that, a function, gives the values of any row by their roles (text, label, ...)
at the cost of one read.
"""

import contextlib
import functools
import hashlib
import itertools
import mmap
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from samestep.base.console import one_line
from samestep.base.files import PERMANENT_ERRORS
from samestep.data.sources import IncompleteRow, describe_skipped, walk_all
from samestep.data.tables import Columns, check_columns, column_names, select_columns

# fsspec and pyarrow take 0.2 s to import: they wait for the functions that need them.

WAITS = (0.5, 2, 8)  # seconds before a store is asked again
ENDINGS = (".parquet",)
DIGESTS = ("ETag", "etag", "md5Hash", "content_hash", "blob_id")  # of a file's content, by stores
# The last two are of local files: the time of the last change of any kind, which cannot be set.
TIMES = ("mtime", "LastModified", "Last-Modified", "last_modified", "updated", "created", "ino")
BLOCK = 2**20


Reader = Callable[[int], dict[str, Any]]  # the number of a row to its values


class Shard(NamedTuple):
    """A shard in its store."""

    name: str  # below the data, the same on every machine
    path: str
    size: int  # bytes
    tag: str  # changes with the content, as far as the store tells


# ---- Stores --------------------------------------------------------------------------------------


def is_url(data: str) -> bool:
    return "://" in data


def open_store(data: str) -> tuple[Any, str]:
    """The fsspec filesystem of a path or URL, and the path in it. Raises ValueError."""
    import fsspec

    try:
        return fsspec.core.url_to_fs(os.path.expanduser(data))
    except (ImportError, ValueError) as error:  # an unknown protocol, or a package is missing
        raise ValueError(f"cannot open {one_line(data, 100)}: {one_line(error)}") from None


def ask_store(what: str, function: Callable, *arguments: Any, **options: Any) -> Any:
    """The result of a call to a store, which is repeated when it fails for a moment.

    Raises ValueError for what will fail again, and ConnectionError after the last attempt.
    """
    for wait in (*WAITS, None):
        try:
            return function(*arguments, **options)
        except FileNotFoundError:
            raise ValueError(f"{what}: there is no such file") from None
        except (PermissionError, ValueError, NotImplementedError) as error:
            raise ValueError(f"{what}: {one_line(error)}") from None
        except Exception as error:  # each store has its own
            if isinstance(error, OSError) and error.errno in PERMANENT_ERRORS:
                raise  # of the local disk: full, for example
            if wait is None:
                number = len(WAITS) + 1
                problem = f"the store failed {number} times, the last time with {one_line(error)}"
                raise ConnectionError(f"{what}: {problem}") from None
            time.sleep(wait)


def list_shards(data: str, field: str) -> list[Shard]:
    """The shards at a path or URL, by name: a file, all files below a folder, or a pattern such as
    train-{000..127}.parquet.

    Raises ValueError if there are none.
    """
    found: dict[str, dict] = {}
    folders, shards, others = [], [], Counter()
    for path in expand_braces(data):
        store, root = open_store(path)
        root, what = root.rstrip("/"), f"task.{field}: {one_line(path, 100)}"
        info = ask_store(what, store.info, root) if root.endswith(ENDINGS) else {}
        if info.get("type", "directory") != "directory":
            found[root] = info
            root = os.path.dirname(root)
        else:  # perhaps of the name of a shard, as Spark writes them
            if is_url(path.removeprefix("file://")):
                listed = ask_store(what, store.find, f"{root}/", detail=True)
            else:  # `find` follows no links, and leaves out folders that it may not read
                below = walk_all(root, ENDINGS, field)
                names = [os.path.join(folder, name) for folder, own, _ in below for name in own]
                listed = {name: ask_store(what, store.info, name) for name in names}
                others += sum((each for *_, each in below), Counter())
            if not listed and not ask_store(what, store.exists, root):
                raise ValueError(f"{what}: there is no such file or folder")
            found |= listed
        folders.append(f"{root}/")
    folder = os.path.commonprefix(folders).rpartition("/")[0]
    for path, info in sorted(found.items()):
        name = path.removeprefix(folder).lstrip("/")
        ending = os.path.splitext(path)[1].lower()
        if re.search(r"(^|/)\.", name):
            continue  # hidden
        if ending in ENDINGS and not re.search("(^|/)_.*/", name):  # _temporary/ of Spark
            shards.append(Shard(name, path, info["size"], tag_of(info)))
        else:
            others[ending or "no ending"] += 1
    if not shards:
        problem = f"no shards{describe_skipped(others)}; task.streaming reads .parquet files"
        if not folders:
            problem = "the range in braces is empty: give the smaller number first"
        raise ValueError(f"task.{field}: {one_line(data, 100)}: {problem}")
    if others[".tar"]:  # rows of other shards, perhaps
        problem = f"has {others['.tar']:,} .tar archives, which task.streaming does not read"
        raise ValueError(f"task.{field}: {one_line(data, 100)}: {problem}; move them elsewhere")
    return shards


def expand_braces(data: str) -> list[str]:
    """The paths of a pattern such as a-{000..127}.parquet; of another path, itself."""
    match = re.search(r"\{(\d+)\.\.(\d+)\}", data)
    if not match:
        return [data]
    first, last = match.groups()
    numbers = (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    paths = (data[: match.start()] + number + data[match.end() :] for number in numbers)
    return [each for path in paths for each in expand_braces(path)]


def tag_of(info: dict) -> str:
    """What a store says that changes with the content of a file; empty: nothing."""
    tags = [f"{name} {info[name]}" for name in (*DIGESTS, *TIMES) if info.get(name)]
    return tags[0] if tags and tags[0].startswith(DIGESTS) else ", ".join(tags)


def check_unchanged(shard: Shard, data: str) -> None:
    """Raises ValueError for a shard of the local disk that is no longer the one in the index."""
    if is_url(data):  # stores tell less of a single file
        return
    what = f"cannot read {one_line(shard.path, 150)}"
    info = ask_store(what, open_store(data)[0].info, shard.path)
    if (info["size"], tag_of(info)) != (shard.size, shard.tag):
        raise ValueError(f"{what}: it has changed since the start; start again")


def sample_digest(file: BinaryIO) -> str:
    """SHA-256 of a file of at most 16 MB; of a larger one, of 16 blocks that lie evenly in it."""
    last = max(file.seek(0, os.SEEK_END) - BLOCK, 0)
    places = range(0, last, BLOCK) if last <= 15 * BLOCK else [last * i // 15 for i in range(15)]
    digest = hashlib.sha256()
    with file:
        for place in (*places, last):
            file.seek(place)
            digest.update(file.read(BLOCK))
    return digest.hexdigest()


# ---- Parquet -------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_parquet(store: Any, shard: Shard) -> Iterator[Any]:
    """A `ParquetFile` that reads in buffers of 4 MB: memory must not grow with the groups of rows.

    fsspec would read ahead for each column in turn.
    """
    from pyarrow.parquet import ParquetFile

    with (
        store.open(shard.path, "rb", cache_type="none") as file,
        ParquetFile(file, pre_buffer=False, buffer_size=2**22) as table,
    ):
        yield table


def batches(table: Any, shard: Shard, names: list[str]) -> Iterator[Any]:
    """Some rows of these columns at a time, of about 8 MB."""
    rows = max(2**23 * table.metadata.num_rows // shard.size, 1)
    for batch in table.iter_batches(min(rows, 1024), columns=names):
        yield batch.select(names)


def unpack(shard: Shard, data: str, target: Path, columns: Columns) -> None:
    """Writes columns of a shard to a local Arrow file.

    `data`: the path or URL that names the store. Raises ValueError and ConnectionError.
    """
    import pyarrow

    store, names = open_store(data)[0], column_names(columns)

    def write() -> None:
        with open_parquet(store, shard) as table, pyarrow.OSFile(str(target), "wb") as out:
            fields = [table.schema_arrow.field(name) for name in names]
            coded = pyarrow.types.is_dictionary  # by numbers, which differ between groups of rows
            fields = [f.with_type(f.type.value_type) if coded(f.type) else f for f in fields]
            with pyarrow.ipc.new_file(out, schema := pyarrow.schema(fields)) as writer:
                for batch in batches(table, shard, names):
                    writer.write_batch(batch.cast(schema))

    ask_store(f"cannot read {one_line(shard.path, 150)}", write)


def read_footer(
    store: Any, shard: Shard, columns: Columns, wanted: Columns
) -> tuple[int, int, list[dict]]:
    """Rows of a shard, about the bytes of its columns unpacked, and the wanted columns' values.

    Raises ValueError for a missing column.
    """
    from pyarrow.parquet import ParquetFile

    with store.open(shard.path, "rb") as file, ParquetFile(file) as table:
        check_columns(table.schema_arrow.names, columns)
        facts, names = table.metadata, tuple(f"{name}." for name in column_names(columns))
        groups = [facts.row_group(i) for i in range(facts.num_row_groups)]
        chunks = [group.column(i) for group in groups for i in range(group.num_columns)]
        chunks = [each for each in chunks if f"{each.path_in_schema}.".startswith(names)]
        size = sum(each.total_uncompressed_size for each in chunks)
        values = table.read(column_names(wanted)).to_pylist() if wanted else []
        return facts.num_rows, size, [select_columns(row, wanted) for row in values]


def arrow_row(table: Any, columns: Columns, row: int) -> dict[str, Any]:
    values = {name: table.column(name)[row].as_py() for name in column_names(columns)}
    return select_columns(values, columns)


def arrow_reader(file: BinaryIO, columns: Columns) -> Reader:
    """Rows of the Arrow file that a .parquet was unpacked into, memory-mapped."""
    import pyarrow

    content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    table = pyarrow.ipc.open_file(pyarrow.py_buffer(content)).read_all()
    return functools.partial(arrow_row, table, columns)


def rows_of(shard: Shard, data: str, columns: Columns) -> Iterator[Callable[[], dict[str, Any]]]:
    """For each row in turn a function that gives its values, or raises what is wrong with it.

    Where the store fails, it is read again, up to the row that is next. Raises ValueError and
    ConnectionError.
    """
    store, done, rows = open_store(data)[0], 0, None

    def read_all() -> Iterator[Callable[[], dict[str, Any]]]:
        with open_parquet(store, shard) as table:
            for batch in batches(table, shard, column_names(columns)):
                for row in range(batch.num_rows):
                    yield functools.partial(arrow_row, batch, columns, row)

    def read_next() -> Callable[[], dict[str, Any]] | None:
        nonlocal done, rows
        current, rows = rows or itertools.islice(read_all(), done, None), None
        found = next(current, None)
        done, rows = done + 1, current
        return found

    while found := ask_store(f"cannot read {one_line(shard.path, 150)}", read_next):
        yield found


class ShardIndex(NamedTuple):
    """What is known of a shard before training."""

    rows: int
    names: dict[str, int]  # of labels, with the number of their rows
    incomplete: list[str]  # rows without a label, and why
    bytes: int  # of its columns unpacked, about
    digest: str  # of the content, as far as it is known


def index_shard(
    shard: Shard, data: str, columns: Columns, label_names: Callable[[dict], list[str]] | None
) -> ShardIndex:
    """Counts the rows of a shard and, where a function gives the names of a row's labels, those.

    Raises ValueError for a shard that cannot be read, and ConnectionError.
    """
    what, store = f"cannot read {one_line(shard.path, 150)}", open_store(data)[0]
    wanted = {role: names for role, names in columns.items() if role == "label" and label_names}
    counts, incomplete = Counter(), []

    def read_digest() -> str:
        if shard.tag.startswith(DIGESTS):
            return shard.tag
        return sample_digest(store.open(shard.path, "rb", cache_type="none"))

    digest = ask_store(what, read_digest)
    rows, size, labelled = ask_store(what, read_footer, store, shard, columns, wanted)
    for place, row in enumerate(labelled):
        try:
            counts.update(label_names(row))
        except IncompleteRow as error:
            incomplete.append(f"row {place}: {error}")
        except ValueError as error:
            raise ValueError(f"{what}: row {place}: {error}") from None
    return ShardIndex(rows, dict(counts), incomplete, size, digest)
