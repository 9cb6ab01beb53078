"""Shards: large files of rows, on a disk or an object store, read by (shard, row).

A shard is a WebDataset .tar, an .mds of MosaicML's streaming, or a .parquet. A reader takes a local
file and gives the values of any row by their roles (image, text, label, ...) at the cost of one
read. A .tar and an .mds are read as they are. A .parquet can only be decoded in row groups, so its
columns are first unpacked into an Arrow file, and a compressed .mds into a plain one.
"""

import contextlib
import hashlib
import io
import json
import mmap
import os
import re
import shutil
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from samestep.base.console import USER, one_line, without_credentials
from samestep.base.files import PERMANENT_ERRORS
from samestep.data.sources import IncompleteRow, describe_skipped
from samestep.data.tables import Columns, check_columns, column_names

# fsspec and pyarrow take 0.2 s to import: they wait for the functions that need them.

WAITS = (0.5, 2, 8)  # seconds before a store is asked again
DIGESTS = ("ETag", "etag", "md5Hash", "content_hash", "blob_id")  # of a file's content, by stores
# The last two are of local files: the time of the last change of any kind, which cannot be set.
TIMES = ("mtime", "LastModified", "Last-Modified", "last_modified", "updated", "created", "ino")
BLOCK = 2**20
ENDINGS = {".tar": "tar", ".mds": "mds", ".parquet": "parquet"}
ARCHIVES = (".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz")
COMPRESSIONS = {"zstd": "zstd", "gz": "gzip"}  # of MDS, by pyarrow's names
# Members of a .tar that have a role where none is named after the column.
MEMBERS = {
    "image": ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff"),
    "text": ("txt",),
    "label": ("cls",),
}
KEY = re.compile(r"((?:.*/|)[^./]+)\.([^/]*)")  # of a member: that of its row, and what it holds


class Shard(NamedTuple):
    """A shard in its store."""

    name: str  # below the data, the same on every machine
    path: str
    size: int  # bytes
    tag: str  # changes with the content, as far as the store tells
    kind: str  # tar, mds or parquet
    facts: dict[str, Any]  # of an .mds: its entry of index.json


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


def plain_path(path: str) -> str:
    """A path in a store without credentials, which may change while the data stays."""
    return without_credentials(path).partition("?")[0] if is_url(path) else path


def with_credentials(path: str, data: str) -> str:
    """A plain path with the credentials of the URL that names its store."""
    if not is_url(path):  # the store has taken them from the URL
        return path
    user, query = USER.search(data), data.partition("?")[2]
    path = path.replace("://", f"://{user[2]}@", 1) if user else path
    return f"{path}?{query}" if query else path


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

    Raises ValueError if there are none, if they are of several kinds, or if an MDS lacks one.
    """
    where = f"task.{field}: {one_line(data, 100)}"
    found: dict[str, dict] = {}
    roots, shards, others = [], [], Counter()
    for path in expand_braces(data):
        store, root = open_store(path)
        root, what = plain_path(root).rstrip("/"), f"task.{field}: {one_line(path, 100)}"
        info = {}
        if root.endswith(tuple(ENDINGS)):
            info = ask_store(what, store.info, with_credentials(root, path))
        if info.get("type", "directory") != "directory":
            found[root] = info
            root = os.path.dirname(root)
        elif ask_store(what, store.exists, with_credentials(f"{root}/index.json", path)):
            shards += list_mds(store, root, what, path)
        else:
            listed = list_folder(store, root, what, path)
            if not listed and not ask_store(what, store.exists, with_credentials(root, path)):
                raise ValueError(f"{what}: there is no such file or folder")
            found |= listed
        roots.append(f"{root}/")
    folder = os.path.commonprefix(roots).rpartition("/")[0]
    shards = [each._replace(name=each.path.removeprefix(folder).lstrip("/")) for each in shards]
    for path, info in sorted(found.items()):
        name = path.removeprefix(folder).lstrip("/")
        ending = os.path.splitext(path)[1].lower()
        if any(part.startswith((".", "_")) for part in name.split("/")):
            continue  # hidden, or a mark such as _SUCCESS
        if path.endswith(ARCHIVES):
            raise ValueError(
                f"task.{field}: {one_line(path, 100)} is compressed as a whole, so that its rows "
                "cannot be read one by one: unpack it to .tar"
            )
        if ending in (".tar", ".parquet"):
            if info.get("size") is None:
                raise ValueError(f"{where}: the store does not tell the size of {one_line(path)}")
            shards.append(Shard(name, path, info["size"], tag_of(info), ENDINGS[ending], {}))
        else:
            others[ending or "no ending"] += 1
    if not shards:
        raise ValueError(
            f"{where}: no shards{describe_skipped(others)}; task.streaming reads .tar and .parquet "
            "files, or a folder with the index.json of MDS"
        )
    kinds = sorted({shard.kind for shard in shards})
    if len(kinds) > 1:
        raise ValueError(f"{where}: holds shards of several kinds, {' and '.join(kinds)}: give one")
    return shards


def list_folder(store: Any, root: str, where: str, data: str) -> dict[str, dict]:
    """What the store says of each file below a folder, by its plain path."""
    folder = with_credentials(f"{root}/", data)
    listed = ask_store(where, store.find, folder, detail=True)
    # https joins relative links to the whole URL.
    return {plain_path(name.replace(f"{folder}/", f"{root}/")): listed[name] for name in listed}


def list_mds(store: Any, root: str, where: str, data: str) -> list[Shard]:
    """The shards that the index.json of an MDS names. `data`: the URL that names the folder."""
    content = ask_store(where, store.cat_file, with_credentials(f"{root}/index.json", data))
    try:
        entries = json.loads(content)["shards"]
        facts = [{**entry, **(entry["zip_data"] or entry["raw_data"])} for entry in entries]
        shards = [
            Shard(each["basename"], f"{root}/{each['basename']}", each["bytes"], "", "mds", entry)
            for each, entry in zip(facts, entries, strict=True)
        ]
        formats = {entry["format"] for entry in entries}
        for entry in entries:
            sizes = [len(entry[f"column_{each}"]) for each in ("names", "encodings", "sizes")]
            if len({*sizes}) > 1 or not isinstance(entry["samples"], int):
                raise ValueError
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"{where}/index.json is not the index of an MDS: write it anew") from None
    if formats != {"mds"}:
        names = one_line(", ".join(map(str, formats)), 60) or "none"
        raise ValueError(f"{where} has shards of the format {names}, not mds")
    listed = list_folder(store, root, where, data)
    for number, shard in enumerate(shards):
        info = listed.get(shard.path)
        if listed and not info:
            raise ValueError(f"{where}: the shard {one_line(shard.name, 60)} is missing")
        if info and info["size"] != shard.size:
            raise ValueError(
                f"{where}: the shard {one_line(shard.name, 60)} has {info['size']:,} bytes, and "
                f"index.json says {shard.size:,}: copy it again"
            )
        shards[number] = shard._replace(tag=tag_of(info or {}))
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


# ---- Bringing a shard here -----------------------------------------------------------------------


def is_packed(shard: Shard) -> bool:
    """Whether a shard must be unpacked before its rows can be read one by one."""
    return shard.kind == "parquet" or bool(shard.facts.get("zip_data"))


def local_size(shard: Shard) -> int:
    """Bytes of a shard whose rows can be read; of a .parquet, about those."""
    return shard.facts["raw_data"]["bytes"] if shard.kind == "mds" else shard.size


def bring(shard: Shard, data: str, target: Path, columns: Columns) -> None:
    """Writes a shard to a local file as its reader needs it: downloaded, unpacked.

    `data`: the path or URL that names the store. Raises ValueError and ConnectionError.
    """
    what = f"cannot read {one_line(shard.path, 150)}"
    store, path = open_store(data)[0], with_credentials(shard.path, data)
    if shard.kind == "parquet":
        ask_store(what, unpack_parquet, store, path, shard.size, target, columns)
        return
    packed = target.with_suffix(".packed") if is_packed(shard) else target

    def download() -> None:
        store.get_file(path, str(packed))
        check_size(packed, shard.size)

    try:
        ask_store(what, download)
        if packed != target:
            ask_store(what, unpack_mds, packed, shard, target)
    finally:
        if packed != target:
            packed.unlink(missing_ok=True)


def check_size(path: Path, expected: int) -> None:
    size = path.stat().st_size
    if size != expected:
        raise OSError(f"it has {size:,} bytes instead of {expected:,}")


@contextlib.contextmanager
def name_damage() -> Iterator[None]:
    """Turns what pyarrow raises for damaged content, OSError without a number, into ValueError:
    reading it again does not help. Those of stores and of the disk have one, or a class."""
    try:
        yield
    except OSError as error:
        if type(error) is OSError and error.errno is None:
            raise ValueError(f"it is damaged: {one_line(error)}") from None
        raise


def unpack_mds(packed: Path, shard: Shard, target: Path) -> None:
    import pyarrow

    algorithm = shard.facts["compression"].partition(":")[0]
    if algorithm not in COMPRESSIONS:
        names = " and ".join(COMPRESSIONS)
        raise ValueError(f"its compression is {one_line(algorithm, 40)}; only {names} are read")
    with name_damage(), pyarrow.OSFile(str(packed)) as file, open(target, "wb") as out:
        with pyarrow.CompressedInputStream(file, COMPRESSIONS[algorithm]) as stream:
            shutil.copyfileobj(stream, out, 2**20)
    check_size(target, shard.facts["raw_data"]["bytes"])


def unpack_parquet(store: Any, path: str, size: int, target: Path, columns: Columns) -> None:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    names = column_names(columns)
    # Buffers of 4 MB, and batches of about 8: memory must not grow with the groups of rows. fsspec
    # would read ahead for each column in turn.
    with (
        name_damage(),
        store.open(path, "rb", cache_type="none") as file,
        ParquetFile(file, pre_buffer=False, buffer_size=2**22) as table,
    ):
        check_columns(table.schema_arrow.names, columns)
        rows = max(2**23 * table.metadata.num_rows // size, 1)
        schema = pyarrow.schema([table.schema_arrow.field(name) for name in names])
        with pyarrow.OSFile(str(target), "wb") as out, pyarrow.ipc.new_file(out, schema) as writer:
            for batch in table.iter_batches(min(rows, 1024), columns=names):
                writer.write_batch(batch.select(names))


def read_footer(
    store: Any, path: str, columns: Columns, wanted: Columns
) -> tuple[int, int, list[dict]]:
    """Rows of a .parquet, about the bytes of its columns unpacked, and the wanted columns' values.

    Raises ValueError for a missing column.
    """
    from pyarrow.parquet import ParquetFile

    with name_damage(), store.open(path, "rb") as file, ParquetFile(file) as table:
        check_columns(table.schema_arrow.names, columns)
        facts, names = table.metadata, tuple(f"{name}." for name in column_names(columns))
        groups = [facts.row_group(i) for i in range(facts.num_row_groups)]
        chunks = [group.column(i) for group in groups for i in range(group.num_columns)]
        chunks = [each for each in chunks if f"{each.path_in_schema}.".startswith(names)]
        size = sum(each.total_uncompressed_size for each in chunks)
        values = table.read(column_names(wanted)).to_pylist() if wanted else []
        return facts.num_rows, size, values


# ---- Columns -------------------------------------------------------------------------------------


def by_role(columns: Columns, value_of: Callable[[str, str], Any]) -> dict[str, Any]:
    """The value of each role; of several columns a dict. `value_of` takes a role and a column."""
    return {
        role: value_of(role, names)
        if isinstance(names, str)
        else {name: value_of(role, name) for name in names}
        for role, names in columns.items()
    }


# ---- WebDataset ----------------------------------------------------------------------------------


def walk_tar(file: BinaryIO, columns: Columns) -> Iterator[tuple[int, str, dict]]:
    """For each row of a .tar: its first byte, its key, and the values of these columns.

    Consecutive members with one key are a row. The last item has no key: where the rows end. Raises
    ValueError for a damaged or truncated archive, and for a row with two members of one name.
    """
    wanted = {*column_names(columns), "json", *(end for role in columns for end in MEMBERS[role])}
    key, begin, names, members = None, 0, set(), {}
    with file, tarfile.open(fileobj=file, mode="r:") as archive:
        while member := archive.next():
            archive.members = []  # type: ignore[attr-defined]  # it would keep all
            match = KEY.fullmatch(member.name) if member.isreg() else None
            if not match:
                continue
            row, name = match[1], match[2].lower()
            if row != key:
                if key is not None:
                    yield begin, key, read_members(key, members, columns)
                key, begin, names, members = row, member.offset, set(), {}
            if name in names:
                raise ValueError(f"the row {one_line(key, 60)} has two members {one_line(name)}")
            if name == "jsonl":
                raise ValueError(
                    f"{one_line(member.name, 60)} holds several rows; write a .json member for each"
                )
            names.add(name)
            if name in wanted:
                members[name] = archive.extractfile(member).read()
        end = archive.offset
        archive.fileobj.seek(end)
        mark = archive.fileobj.read(512)  # tarfile takes a damaged header for the end
        if len(mark) < 512:
            raise ValueError("it has no end mark: it is truncated")
        if mark.strip(b"\0"):
            raise ValueError(f"the header at byte {end:,} is damaged")
    if key is not None:
        yield begin, key, read_members(key, members, columns)
    yield end, "", {}


def read_members(key: str, members: dict[str, bytes], columns: Columns) -> dict[str, Any]:
    """The values of a row; raises ValueError with its key."""
    try:
        return by_role(columns, tar_values(members))
    except ValueError as error:
        raise ValueError(f"row {one_line(key, 100)}: {one_line(error)}") from None


def tar_values(members: dict[str, bytes]) -> Callable[[str, str], Any]:
    """Looks up the value of a role's column in the members of a row; None: there is none."""
    values = json.loads(members["json"]) if "json" in members else {}
    if not isinstance(values, dict):
        raise ValueError("its .json member is not an object")

    def value_of(role: str, column: str) -> Any:
        if column in values:
            return values[column]
        name = next((n for n in (column, *MEMBERS.get(role, ())) if n in members), None)
        if name is None or role == "image":
            return members.get(name)
        text = members[name].decode()
        return text if role == "text" else text.strip()

    return value_of


class TarReader:
    """Rows of a .tar; `bounds`: the first byte of each, and the end of the last."""

    def __init__(self, file: BinaryIO, columns: Columns, bounds: np.ndarray):
        self.file, self.columns, self.bounds = file, columns, bounds

    def read(self, row: int) -> dict[str, Any]:
        begin, end = (int(each) for each in self.bounds[row : row + 2])
        content = os.pread(self.file.fileno(), end - begin, begin)
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            named = ((KEY.fullmatch(each.name), each) for each in archive if each.isreg())
            members = {m[2].lower(): archive.extractfile(each).read() for m, each in named if m}
        return by_role(self.columns, tar_values(members))

    def close(self) -> None:
        self.file.close()


# ---- MDS -----------------------------------------------------------------------------------------


def decode_mds(encoding: str, data: bytes) -> Any:
    """A value of an MDS. Images stay encoded. Raises ValueError for an encoding that is not read:
    pickles could run code.
    """
    name, _, form = encoding.partition(":")
    if name in ("bytes", "jpeg", "png"):
        return data
    if name in ("str", "str_int", "str_float"):
        text = data.decode()
        return text if name == "str" else int(text) if name == "str_int" else float(text)
    if name == "json":
        return json.loads(data)
    if name == "int" or re.fullmatch(r"u?int(8|16|32|64)|float(16|32|64)", name):
        return np.frombuffer(data, np.int64 if name == "int" else name)[0].item()
    if name == "pil":
        from PIL import Image

        width, height, length = np.frombuffer(data, np.uint32, 3).tolist()
        mode = data[12 : 12 + length].decode()
        return Image.frombytes(mode, (width, height), data[12 + length :])
    if name == "ndarray":
        return decode_array(form, data)
    raise ValueError(f"the encoding {one_line(encoding, 40)} of MDS is not read")


def decode_array(form: str, data: bytes) -> np.ndarray:
    """An array of an MDS. `form`: its type and shape; those that it leaves out begin the data."""
    dtype, _, shape = form.partition(":")
    types = {8 * 2**i + k: f"{kind}{8 * 2**i}" for i in range(4) for k, kind in enumerate(FLAVOURS)}
    at = 0
    if not dtype:
        dtype, at = types[data[0]], 1
    sizes = [int(each) for each in shape.split(",")] if shape else []
    if not shape:
        axes, width = data[at] >> 2, 2 ** (data[at] % 4)
        sizes = np.frombuffer(data, f"<u{width}", axes, at + 1).tolist()
        at += 1 + axes * width
    return np.frombuffer(data, dtype, offset=at).reshape(sizes)


FLAVOURS = ("uint", "int", "float")


class MdsReader:
    """Rows of an uncompressed .mds; `facts`: its entry of index.json."""

    def __init__(self, file: BinaryIO, columns: Columns, facts: dict[str, Any]):
        self.file, self.columns, self.facts = file, columns, facts

    def read(self, row: int) -> dict[str, Any]:
        file = self.file.fileno()
        begin, end = np.frombuffer(os.pread(file, 8, 4 * (row + 1)), np.uint32).tolist()
        data, at = os.pread(file, max(end - begin, 0), begin), 0
        names, sizes = self.facts["column_names"], list(self.facts["column_sizes"])
        for i, size in enumerate(sizes):
            if not size:
                sizes[i] = int(np.frombuffer(data, np.uint32, 1, at)[0])
                at += 4
        ends = np.cumsum([at, *sizes]).tolist()
        if ends[-1] != len(data):
            raise ValueError("its sizes do not add up: the shard is damaged")
        parts = {n: data[ends[i] : ends[i + 1]] for i, n in enumerate(names)}
        encodings = dict(zip(names, self.facts["column_encodings"], strict=True))
        return by_role(self.columns, lambda _, name: decode_mds(encodings[name], parts[name]))

    def close(self) -> None:
        self.file.close()


# ---- Parquet -------------------------------------------------------------------------------------


class ArrowReader:
    """Rows of the Arrow file that a .parquet was unpacked into, memory-mapped."""

    def __init__(self, file: BinaryIO, columns: Columns):
        import pyarrow

        with file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.columns = columns
        self.table = pyarrow.ipc.open_file(pyarrow.py_buffer(content)).read_all()

    def read(self, row: int) -> dict[str, Any]:
        return by_role(self.columns, lambda _, name: self.table.column(name)[row].as_py())

    def close(self) -> None:
        self.table = None


def open_reader(
    file: BinaryIO, shard: Shard, columns: Columns, bounds: np.ndarray | None = None
) -> "TarReader | MdsReader | ArrowReader":
    """The reader of a local file that `bring` wrote, or that needs no unpacking."""
    if shard.kind == "tar":
        return TarReader(file, columns, bounds)
    if shard.kind == "mds":
        return MdsReader(file, columns, shard.facts)
    return ArrowReader(file, columns)


# ---- Index ---------------------------------------------------------------------------------------


class ShardIndex(NamedTuple):
    """What is known of a shard before training."""

    bounds: np.ndarray | None  # of a .tar, int64 (rows + 1,); otherwise empty
    rows: int
    names: dict[str, int]  # of labels, with the number of their rows
    incomplete: int  # rows without a label
    first: str  # the first of them, and why
    bytes: int  # of the local file
    digest: str  # of the content, as far as it is known


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
    what = f"cannot read {one_line(shard.path, 150)}"
    wanted = {role: names for role, names in columns.items() if role == "label" and label_names}
    counts, incomplete, first = Counter(), 0, ""

    def count(place: object, values: dict) -> None:
        nonlocal incomplete, first
        try:
            counts.update(label_names(values))
        except IncompleteRow as error:
            incomplete, first = incomplete + 1, first or f"row {place}: {error}"
        except ValueError as error:
            raise ValueError(f"row {place}: {error}") from None

    bounds, size, values, store = [], shard.size, [], open_store(data)[0]
    path = with_credentials(shard.path, data)

    def read_digest() -> str:
        if shard.tag.startswith(DIGESTS):
            return shard.tag
        if not is_url(data):
            return sample_digest(open(shard.path, "rb", buffering=0))
        if shard.kind == "parquet":
            return sample_digest(store.open(path, "rb", cache_type="none"))
        return sample_digest(open_local(shard)) if shard.kind == "tar" or wanted else ""

    try:
        digest = ask_store(what, read_digest)
        if shard.kind == "tar":
            for begin, key, value in walk_tar(open_local(shard), wanted):
                bounds.append(begin)
                if key and wanted:
                    count(one_line(key, 100), value)
            rows = len(bounds) - 1
        elif shard.kind == "mds":
            check_columns(shard.facts["column_names"], columns)
            rows, size = shard.facts["samples"], shard.facts["raw_data"]["bytes"]
            if wanted:
                reader = MdsReader(open_local(shard), wanted, shard.facts)
                values = [reader.read(row) for row in range(rows)]
                reader.close()
        else:
            rows, size, listed = ask_store(what, read_footer, store, path, columns, wanted)
            values = [by_role(wanted, lambda _, name: each[name]) for each in listed]  # noqa: B023
        for row, value in enumerate(values):
            count(row, value)
    except (ValueError, tarfile.TarError, EOFError) as error:
        text = one_line(error)
        raise ValueError(text if text.startswith("cannot read") else f"{what}: {text}") from None
    except ConnectionError:
        raise
    except OSError as error:  # of the disk or the network that the shard lies on
        raise ConnectionError(f"{what}: {error.strerror or one_line(error)}") from None
    return ShardIndex(
        np.array(bounds, np.int64), rows, dict(counts), incomplete, first, size, digest
    )
