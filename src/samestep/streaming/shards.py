"""Shards: large files of rows, on a disk or an object store, read by row or from the start.

A shard is a WebDataset .tar or a .parquet. A reader of a local file, a function, gives the values
of any row by their roles (image, text, label, ...) at the cost of one read. A .tar is read as it
is. A .parquet can only be decoded in row groups, so its columns are first unpacked into an Arrow
file.
"""

import contextlib
import functools
import hashlib
import io
import itertools
import json
import mmap
import os
import re
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from samestep.base.console import one_line
from samestep.base.files import PERMANENT_ERRORS
from samestep.data.sources import IncompleteRow, describe_skipped, walk_all
from samestep.data.tables import Columns, check_columns, column_names, select_columns

# fsspec and pyarrow take 0.2 s to import: they wait for the functions that need them.

WAITS = (0.5, 2, 8)  # seconds before a store is asked again
DIGESTS = ("ETag", "etag", "md5Hash", "content_hash", "blob_id")  # of a file's content, by stores
# The last two are of local files: the time of the last change of any kind, which cannot be set.
TIMES = ("mtime", "LastModified", "Last-Modified", "last_modified", "updated", "created", "ino")
BLOCK = 2**20
ENDINGS = (".tar", ".parquet")
ARCHIVES = (".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz")
# Members of a .tar that have a role where none is named after the column.
MEMBERS = {
    "image": ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff"),
    "text": ("txt",),
    "label": ("cls",),
}
KEY = re.compile(r"((?:.*/|)[^./]+)\.([^/]*)")  # of a member: that of its row, and what it holds


Reader = Callable[[int], dict[str, Any]]  # the number of a row to its values


class Shard(NamedTuple):
    """A shard in its store."""

    name: str  # below the data, the same on every machine
    path: str
    size: int  # bytes
    tag: str  # changes with the content, as far as the store tells
    kind: str  # tar or parquet


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
    train-{000..127}.tar.

    Raises ValueError if there are none, or if they are of several kinds.
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
                below = walk_all(root, (*ENDINGS, *ARCHIVES), field)
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
        if path.endswith(ARCHIVES):
            raise ValueError(
                f"task.{field}: {one_line(path, 100)} is compressed as a whole, so that its rows "
                "cannot be read one by one: unpack it to .tar"
            )
        if ending in ENDINGS and not re.search("(^|/)_.*/", name):  # _temporary/ of Spark
            shards.append(Shard(name, path, info["size"], tag_of(info), ending[1:]))
        else:
            others[ending or "no ending"] += 1
    kinds = sorted({shard.kind for shard in shards})
    if len(kinds) != 1:
        problem = f"holds shards of several kinds, {' and '.join(kinds)}: give one"
        if not kinds:
            skipped = describe_skipped(others)
            problem = f"no shards{skipped}; task.streaming reads .tar and .parquet files"
        if not folders:
            problem = "the range in braces is empty: give the smaller number first"
        raise ValueError(f"task.{field}: {one_line(data, 100)}: {problem}")
    return shards


def expand_braces(data: str) -> list[str]:
    """The paths of a pattern such as a-{000..127}.tar; of another path, itself."""
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


def unpack_parquet(store: Any, shard: Shard, target: Path, columns: Columns) -> None:
    import pyarrow

    names = column_names(columns)
    with open_parquet(store, shard) as table, pyarrow.OSFile(str(target), "wb") as out:
        fields = [table.schema_arrow.field(name) for name in names]
        coded = pyarrow.types.is_dictionary  # by numbers, which differ between groups of rows
        fields = [f.with_type(f.type.value_type) if coded(f.type) else f for f in fields]
        with pyarrow.ipc.new_file(out, schema := pyarrow.schema(fields)) as writer:
            for batch in batches(table, shard, names):
                writer.write_batch(batch.cast(schema))


def read_footer(
    store: Any, shard: Shard, columns: Columns, wanted: Columns
) -> tuple[int, int, list[dict]]:
    """Rows of a .parquet, about the bytes of its columns unpacked, and the wanted columns' values.

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


# ---- WebDataset ----------------------------------------------------------------------------------


def member_names(columns: Columns) -> set[str]:
    endings = (MEMBERS.get(role, ()) for role in columns)
    return {*column_names(columns), "json", *itertools.chain(*endings)}


def walk_tar(
    file: BinaryIO, columns: Columns, wanted: Columns
) -> Iterator[tuple[int, str, int, dict[str, bytes]]]:
    """For each row of a .tar: its first byte, its key, the bytes of its members with these columns,
    and the members with the wanted ones.

    Consecutive members with one key are a row. The last item has no key: where the rows end. Raises
    ValueError for a damaged, truncated or joined archive, for a link in place of a value, and for a
    row with two members of one name.
    """
    counted, read = member_names(columns), member_names(wanted)

    def regular_members() -> Iterator[tuple[str, str, tarfile.TarInfo]]:
        for member in archive:  # not archive.next(): Python 3.10 fails after the end
            archive.members = []  # type: ignore[attr-defined]  # it would keep all
            if not (match := KEY.fullmatch(member.name)):
                continue
            key, name = match[1], match[2].lower()
            if (member.islnk() or member.issym()) and name in counted | read:
                hint = "pack its content (tar --dereference --hard-dereference)"
                raise ValueError(f"{one_line(member.name, 60)} is a link: {hint}")
            if member.isreg():
                yield key, name, member

    with file, tarfile.open(fileobj=file, mode="r:") as archive:
        for key, row in itertools.groupby(regular_members(), lambda each: each[0]):
            begin, size, names, members = 0, 0, set(), {}
            for _, name, member in row:
                if name in names:
                    shown = f"{one_line(key, 60)} has two members {one_line(name)}"
                    raise ValueError(f"the row {shown}")
                begin = begin if names else member.offset
                names.add(name)
                size += member.size * (name in counted)
                if name in read:
                    members[name] = archive.extractfile(member).read()
            yield begin, key, size, members
        end = archive.offset
        archive.fileobj.seek(end)
        mark = archive.fileobj.read(512)  # tarfile takes a damaged header for the end
        if len(mark) < 512:
            raise ValueError("it has no end mark: it is truncated")
        if mark.strip(b"\0"):
            raise ValueError(f"the header at byte {end:,} is damaged")
        while block := archive.fileobj.read(BLOCK):
            if block.strip(b"\0"):
                hint = "if it is another archive, join them with tar --concatenate"
                raise ValueError(f"something follows the end mark at byte {end:,}; {hint}")
    yield end, "", 0, {}


def tar_row(members: dict[str, bytes], columns: Columns) -> dict[str, Any]:
    """The values of a row by their roles, from its members; None: there is none."""
    values = json.loads(members["json"]) if "json" in members else {}
    if not isinstance(values, dict):
        raise ValueError("its .json member is not an object")
    for role, names in columns.items():
        for column in {*column_names({role: names})} - {*values}:
            name = next((n for n in (column, *MEMBERS.get(role, ())) if n in members), None)
            if name and role != "image":
                text = members[name].decode("utf-8-sig")
                values[column] = text if role == "text" else text.strip()
            elif name:
                values[column] = members[name]
    return select_columns(values, columns)


def tar_reader(file: BinaryIO, columns: Columns, bounds: np.ndarray) -> Reader:
    """Rows of a .tar; `bounds`: the first byte of each, and the end of the last."""

    def read(row: int) -> dict[str, Any]:
        begin, end = (int(each) for each in bounds[row : row + 2])
        content = os.pread(file.fileno(), end - begin, begin)
        if len(content) < end - begin:
            raise ValueError("the archive is truncated")
        content += bytes(1024)  # an end mark
        *_, members = next(walk_tar(io.BytesIO(content), {}, columns))
        return tar_row(members, columns)

    return read


# ---- Whole shards --------------------------------------------------------------------------------


def bring(shard: Shard, data: str, target: Path, columns: Columns) -> None:
    """Writes a shard to a local file as its reader needs it: downloaded, or unpacked.

    `data`: the path or URL that names the store. Raises ValueError and ConnectionError.
    """
    store = open_store(data)[0]

    def write() -> None:
        if shard.kind == "parquet":
            unpack_parquet(store, shard, target, columns)
            return
        store.get_file(shard.path, str(target))
        size = target.stat().st_size
        if size != shard.size:
            raise OSError(f"it has {size:,} bytes instead of {shard.size:,}")

    ask_store(f"cannot read {one_line(shard.path, 150)}", write)


def rows_of(shard: Shard, data: str, columns: Columns) -> Iterator[Callable[[], dict[str, Any]]]:
    """For each row in turn a function that gives its values, or raises what is wrong with it.

    Where the store fails, it is read again, up to the row that is next. Raises ValueError and
    ConnectionError.
    """
    store, done, rows = open_store(data)[0], 0, None

    def read_all() -> Iterator[Callable[[], dict[str, Any]]]:
        if shard.kind == "tar":
            for _, key, _, members in walk_tar(store.open(shard.path, "rb"), {}, columns):
                yield from [functools.partial(tar_row, members, columns)] * bool(key)
            return
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

    bounds: np.ndarray  # of a .tar, int64 (rows + 1,); otherwise empty
    rows: int
    names: dict[str, int]  # of labels, with the number of their rows
    incomplete: list[str]  # rows without a label, and why
    bytes: int  # of the local file
    digest: str  # of the content, as far as it is known
    held: int  # bytes of its columns, about


def index_shard(
    shard: Shard,
    data: str,
    columns: Columns,
    open_local: Callable[[Shard], BinaryIO],
    label_names: Callable[[dict], list[str]] | None,
) -> ShardIndex:
    """Counts the rows of a shard and, where a function gives the names of a row's labels, those.

    `open_local` opens a shard on this machine, where it may have to be copied first.
    Raises ValueError for a shard that cannot be read, and ConnectionError.
    """
    what, store = f"cannot read {one_line(shard.path, 150)}", open_store(data)[0]
    wanted = {role: names for role, names in columns.items() if role == "label" and label_names}
    counts, incomplete = Counter(), []

    def count(place: object, read: Callable[..., dict], *arguments: Any) -> None:
        try:
            counts.update(label_names(read(*arguments)))
        except IncompleteRow as error:
            incomplete.append(f"row {place}: {error}")
        except ValueError as error:
            raise ValueError(f"row {place}: {error}") from None

    def read_digest() -> str:
        if shard.tag.startswith(DIGESTS):
            return shard.tag
        if is_url(data) and shard.kind == "tar":  # it is copied anyway
            return sample_digest(open_local(shard))
        return sample_digest(store.open(shard.path, "rb", cache_type="none"))

    bounds, size, held = [], shard.size, 0
    try:
        digest = ask_store(what, read_digest)
        if shard.kind == "tar":
            for begin, key, own, members in walk_tar(open_local(shard), columns, wanted):
                bounds.append(begin)
                held += own
                if key and wanted:
                    count(one_line(key, 100), tar_row, members, wanted)
            rows = len(bounds) - 1
        else:
            rows, size, labelled = ask_store(what, read_footer, store, shard, columns, wanted)
            held = size
            for i, row in enumerate(labelled):
                count(i, dict, row)
    except (ValueError, tarfile.TarError, EOFError) as error:
        text = one_line(error)
        raise ValueError(text if text.startswith("cannot read") else f"{what}: {text}") from None
    ends = np.array(bounds, np.int64)
    return ShardIndex(ends, rows, dict(counts), incomplete, size, digest, held)
