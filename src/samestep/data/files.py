"""The files below a folder, or in a store: by their endings, and by the split that their names say.

A word of WORDS counts with a space, a dash, a dot, an underscore or a digit beside it, or nothing:
train.jsonl, wiki_test-00001.txt, dev/. The outermost folder decides, then the file.
"""

import functools
import hashlib
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from samestep.base.console import one_line, print_on_main

TABLES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
TEXTS = (".txt", ".md")
IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
SHARDS = (*TEXTS, *TABLES)  # of a stream
PACKED = ".gz"  # may follow the ending of all but .parquet, which compresses itself
WORDS = {
    "test": "test|testing|eval|evaluation",
    "validation": "validation|valid|dev|val",
    "train": "train|training",
}
# Names that stores give a digest of a file, or else a time.
TAGS = ("ETag", "etag", "sha256", "md5Hash", "blob_id", "LastModified", "last_modified", "updated")
TAGS += ("created", "mtime")
_ENDS = 65_536  # bytes from both ends of a local shard that are compared


class File(NamedTuple):
    """A file with rows, on a disk or in a store."""

    path: str
    name: str  # below the folder or URL
    size: int  # in bytes
    tag: str = ""  # what a store says of the content


def file_ending(path: str) -> str:
    """A file's ending in lower case. A compressed file has the inner one: .csv for rows.CSV.GZ."""
    stem, ending = os.path.splitext(path.lower())
    return os.path.splitext(stem)[1] if ending == PACKED else ending


def files_below(root: str, is_data: bool = True) -> Iterator[tuple[str, str]]:
    """A file itself, or all files below a folder, each with its path there; no hidden ones, and
    none of a run whose folder lies there, which is said of data.

    Raises OSError for a folder of data that cannot be read: its rows would be missing unnoticed.
    """
    if not os.path.isdir(root):
        yield "", root
        return
    seen = set()  # links may lead back
    refuse = _raise_error if is_data else None
    for folder, names, files in os.walk(root, onerror=refuse, followlinks=True):
        status = os.stat(folder)
        new = (status.st_dev, status.st_ino) not in seen
        seen.add((status.st_dev, status.st_ino))
        if folder != root and {"status.json", "hardware.yaml"} <= {*files}:
            new = False
            if is_data:
                _skip_run(folder)
        names[:] = sorted(name for name in names if new and not name.startswith("."))
        for name in sorted(files) if new else ():
            if not name.startswith("."):
                path = os.path.join(folder, name)
                yield os.path.relpath(path, root) if folder != root else name, path


@functools.cache
def _skip_run(folder: str) -> None:
    """Prints, once in a start, that the files of a run are no data."""
    print_on_main(f"Preparing data: {one_line(folder, 100)} is the folder of a run: not read")


def _raise_error(error: OSError) -> None:
    raise error


# ---- Listing -------------------------------------------------------------------------------------


def list_files(data: str, field: str, endings: tuple[str, ...]) -> tuple[list[File], list[File]]:
    """The files with these endings, sorted by their names, and all others.

    What lies beside others is no row: a .json beside images, and beside tables a text and images,
    which they name. Raises ValueError if there are none.
    """
    every = _list_store(data, field) if "://" in data else list_folder(data)
    read = {file_ending(each.path) for each in every} & {*endings}
    if read & {*IMAGES}:
        read -= {".json"}
    if read & {*TABLES}:
        read -= {*TEXTS, *IMAGES}
    if not read:
        if not every and os.path.islink(os.path.expanduser(data)):
            raise ValueError(f"task.{field}: {data} is a broken link: fix or remove it")
        where = f"nothing to read at {data or 'an empty path'}"
        where += f", but {len(every):,} other files" if every else ""
        hint = f"a file or folder of {', '.join(endings)} (also {PACKED})"
        raise ValueError(f"task.{field}: {where}; pass --task.{field} PATH, {hint}")
    found: tuple[list[File], list[File]] = [], []
    for each in sorted(every, key=lambda each: each.name.split("/")):
        found[file_ending(each.path) not in read].append(each)
    names = {each.name for each in found[0]}
    for name in names & {name + PACKED for name in names}:
        text = f"{one_line(data, 100)} has {one_line(name, 100)} and the same without {PACKED}"
        raise ValueError(f"task.{field}: {text}; remove one")
    return found


def list_folder(data: str) -> list[File]:
    """All files below a folder, or a file itself."""
    root = os.path.expanduser(data)
    found = []
    for name, path in files_below(root) if os.path.exists(root) else ():
        size = os.stat(path).st_size if os.path.exists(path) else 0  # the key refuses dead links
        found.append(File(path, name or os.path.basename(root), size))
    return found


def _list_store(url: str, field: str) -> list[File]:
    """All files below a URL, by fsspec."""
    import fsspec

    try:
        store, root = fsspec.core.url_to_fs(url)
        files = store.find(root, detail=True)
    except Exception as error:  # each store has its own
        text = f"task.{field}: cannot list {one_line(url)}: {one_line(error)}"
        if isinstance(error, ValueError | ImportError | FileNotFoundError):
            raise ValueError(text) from None
        raise ConnectionError(text) from None  # it may pass
    found = []
    for path, about in files.items():
        name = path.removeprefix(root).lstrip("/") or path.rpartition("/")[2]
        tag = next((str(about[each]) for each in TAGS if each in about), "")
        found.append(File(store.unstrip_protocol(path), name, about["size"], tag))
    return found


# ---- Splits --------------------------------------------------------------------------------------


def _split_of(name: str, in_classes: bool = False) -> str:
    """The split that a name says, the outermost folder before the file; empty: none. Where folders
    are classes one has to be called exactly so: `test tube` is a class."""
    *parts, file = name.split("/")
    is_exact = in_classes and file_ending(file) not in TABLES
    if not is_exact:
        parts.append(file)
    return next(filter(None, (_split_in(part, is_exact) for part in parts)), "")


@functools.lru_cache(10_000)  # many files lie in one folder
def _split_in(part: str, is_exact: bool) -> str:
    """The split that one name of a path says."""
    beside = "[^-._ 0-9]"
    for split, words in WORDS.items():
        pattern = f"^({words})$" if is_exact else f"(?<!{beside})({words})(?!{beside})"
        if re.search(pattern, part, re.IGNORECASE):
            return split
    return ""


def split_files(
    data: str, field: str, wanted: tuple[str, ...], endings: tuple[str, ...], in_classes: bool
) -> tuple[list[File], list[File], list[File]]:
    """The files of a path to train on, those to evaluate on, and all that are not read.

    Of the splits that are `wanted` names count if they divide the files: where none says train,
    those that say nothing are trained on. Else all are of the first of `wanted`: "train" beside
    names that say nothing is no split, it may be the title of a text.
    """
    found, others = list_files(data, field, endings)
    if in_classes:
        _check_class_folders(found, field)
    splits = {each: _split_of(each.name, in_classes) for each in found}
    named = {*splits.values()}
    chosen: dict[str, list[File]] = {"train": [], "validation": []}
    for split in wanted:
        name = "" if split == "train" and "train" not in named else split
        chosen[split] = [each for each in found if splits[each] == name]
    if len(named) == 1 or named == {"train", ""}:
        chosen = {split: found if split == wanted[0] else [] for split in chosen}
    read = {*chosen["train"], *chosen["validation"]}
    others = others + [each for each in found if each not in read]
    return chosen["train"], chosen["validation"], others


def _check_class_folders(files: list[File], field: str) -> None:
    """Raises ValueError for a file that is not in the folder of its class: CLASS/x or
    SPLIT/CLASS/x, where SPLIT says train, validation or test. Tables have their labels inside."""
    for each in files:
        *folders, file = each.name.split("/")
        is_split = [bool(_split_of(f"{folder}/", True)) for folder in folders]
        if file_ending(file) not in TABLES and is_split not in ([False], [True, False]):
            problem = f"{one_line(each.path, 200)} is not in the folder of its class"
            hint = f"it should be CLASS/{file} or, for example, train/CLASS/{file}"
            raise ValueError(f"task.{field}: {problem}; {hint}")


# ---- Shards --------------------------------------------------------------------------------------


@functools.cache  # a start lists them for the key, to prepare and to train: it sees one list
def _split_shards(data: str, field: str) -> tuple[list[File], list[File], list[File]]:
    wanted = ("train", "validation") if field == "data" else ("validation",)
    return split_files(data, field, wanted, SHARDS, False)


def _hash_name(shard: File) -> bytes:
    """A digest of a shard's name, the same in each format."""
    stem = os.path.splitext(shard.name.removesuffix(PACKED))[0]
    return hashlib.sha256(stem.encode()).digest()


def split_shards(cfg: Any) -> tuple[list[File], list[File], list[File]]:
    """The shards of a stream to train on, those to evaluate on, and the other files.

    To evaluate on are those of cfg.validation_data, or those that are named so; or one is held
    out, that with the smallest hash of its name without the endings.
    """
    train, held, others = _split_shards(cfg.data, "data")
    if cfg.validation_data:
        held = _split_shards(cfg.validation_data, "validation_data")[1]
    held = held or [min(train, key=_hash_name)]
    paths = {each.path for each in held}
    train = [each for each in train if each.path not in paths]
    if not train:
        hint = "cut it, or give --task.validation_data PATH"
        raise ValueError(f"task.data: {cfg.data} is one shard, which is evaluated on; {hint}")
    return train, held, others


def describe_shards(shards: list[File]) -> str:
    """A digest of names, sizes and tags; that of a local shard is a digest of both ends."""
    lines = ""
    for each in shards:
        tag = each.tag
        if "://" not in each.path:
            with open(each.path, "rb") as file:
                content = file.read(_ENDS)
                file.seek(max(os.stat(each.path).st_size - _ENDS, 0))
                tag = hashlib.sha256(content + file.read()).hexdigest()[:16]
        lines += f"{each.name} {each.size} {tag}\n"
    return hashlib.sha256(lines.encode()).hexdigest()
