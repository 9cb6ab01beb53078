"""The files below a folder, or in a store: by their extensions, and by the split that their names
say.

A word of KEYWORDS counts with a space, a dash, a dot, an underscore or a digit beside it, or
nothing: train.jsonl, wiki_test-00001.txt, dev/. The outermost folder decides, then the file.
"""

import functools
import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from samestep.base.console import one_line, print_on_main
from samestep.data import splits

TABLES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}  # for all but .parquet, which compresses itself
READABLE = (".txt", *TABLES, *COMPRESSIONS)
SHARDS = (".txt", *TABLES, ".tar")  # of a stream
# Names that stores give a digest of a file, or else a time.
TAGS = ("ETag", "etag", "sha256", "md5Hash", "blob_id", "LastModified", "last_modified", "updated")
TAGS += ("created", "mtime")
ENDS = 65_536  # bytes from both ends of a local shard that are compared
IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
KEYWORDS = {
    "test": "test|testing|eval|evaluation",
    "validation": "validation|valid|dev|val",
    "train": "train|training",
}
PATTERNS = {
    split: re.compile(rf"(?<![^-._ 0-9])({words})(?![^-._ 0-9])", re.IGNORECASE)
    for split, words in KEYWORDS.items()
}
T = TypeVar("T")  # a path or a shard
ANY = re.compile("|".join(KEYWORDS.values()), re.IGNORECASE)


def file_ending(path: Path | str) -> str:
    """A file's ending in lower case. A compressed file has the inner one: .csv for rows.CSV.GZ."""
    stem, ending = os.path.splitext(str(path).lower())
    inner = os.path.splitext(stem)[1] if ending in COMPRESSIONS else ""
    return inner if inner and inner != ".parquet" else ending


def files_below(root: str) -> Iterator[tuple[str, str]]:
    """A file itself, or all files below a folder, each with its path there; no hidden ones, and
    none of a run whose folder lies there.

    Raises OSError for a folder that cannot be read: its rows would be missing unnoticed.
    """
    if not os.path.isdir(root):
        yield "", root
        return
    seen = set()  # links may lead back
    for folder, names, files in os.walk(root, onerror=raise_error, followlinks=True):
        status = os.stat(folder)
        new = (status.st_dev, status.st_ino) not in seen
        seen.add((status.st_dev, status.st_ino))
        if folder != root and {"status.json", "hardware.yaml"} <= {*files}:
            skip_run(folder)
            new = False
        names[:] = sorted(name for name in names if new and not name.startswith("."))
        for name in sorted(files) if new else ():
            if not name.startswith("."):
                path = os.path.join(folder, name)
                yield os.path.relpath(path, root) if folder != root else name, path


@functools.cache
def skip_run(folder: str) -> None:
    """Prints, once in a start, that the files of a run are no data."""
    print_on_main(f"Preparing data: {one_line(folder, 100)} is the folder of a run: not read")


def raise_error(error: OSError) -> None:
    raise error


class Files(NamedTuple):
    """The files of a folder, sorted by path."""

    by_split: dict[str, list[Path]]
    skipped: Counter  # the number of others by their extensions


def list_files(data: str, extensions: Iterable[str], field: str = "data") -> Files:
    """The files with these extensions: `data` itself, or those below it.

    Raises ValueError if there are none.
    """
    root = os.path.expanduser(data)
    wanted = tuple(extensions)
    found: dict[Path, str] = {}
    skipped: Counter = Counter()
    for below, path in files_below(root) if os.path.exists(root) else ():
        name = path.lower()
        if name.endswith(wanted) or file_ending(path) in wanted:
            # The name of an image, or of a file with an extension of one's own, says none.
            named = below if name.endswith(READABLE) else os.path.dirname(below)
            found[Path(path)] = split_of(named)
        else:
            skipped["".join(Path(path).suffixes[-2:])[-20:] or "no ending"] += 1
    if not found:
        raise nothing_to_read(data, wanted, field, skipped)
    found = dict(sorted(found.items()))
    return Files({"": [*found]} if are_classes(found, root) else divide(found), skipped)


def nothing_to_read(data: str, wanted: tuple[str, ...], field: str, skipped: Counter) -> ValueError:
    """An error that says why there are no files."""
    shown = data or "an empty path"
    if os.path.islink(os.path.expanduser(data)) and not skipped:
        return ValueError(f"task.{field}: {shown} is a broken link: fix or remove it")
    packed = f" (text also compressed: {' or '.join(COMPRESSIONS)})"
    return ValueError(
        f"task.{field}: nothing to read at {shown}{describe_skipped(skipped)}; pass "
        f"--task.{field} PATH, a file or folder of {', '.join(wanted)}{packed}"
    )


def split_of(path: str) -> str:
    """The split of a file or folder by its path below the data; empty: it has none."""
    if not ANY.search(path):  # of most files, of which there may be a million
        return ""
    for name in path.split("/"):
        for split, pattern in PATTERNS.items():
            if pattern.search(name):
                return split
    return ""


def are_classes(splits: dict[Path, str], root: str) -> bool:
    """Whether folders of images lie side by side that are not all named like splits: `test tube`
    beside `bottle` is a class."""
    if "" not in splits.values() or {path.parent.parent for path in splits} != {Path(root)}:
        return False
    return all(path.name.lower().endswith(IMAGES) for path in splits)


def divide(splits: dict[T, str]) -> dict[str, list[T]]:
    """Files by their splits; all as "" if their names do not divide them.

    "train" beside names that say nothing is no split: it may be a class, or the title of a text.
    """
    found = {*splits.values()}
    if len(found) == 1 or found == {"train", ""}:
        return {"": [*splits]}
    by_split: dict[str, list[T]] = {}
    for file, split in splits.items():
        by_split.setdefault(split, []).append(file)
    return by_split


def choose(by_split: dict[str, list[T]], split: str, field: str, data: str) -> list[T]:
    """The files of a split, train or validation; where none is named train, those of no split.

    Raises ValueError if there are none.
    """
    if [*by_split] == [""] or (split == "train" and "train" not in by_split):
        split = ""
    if split not in by_split:
        there = " and ".join(sorted({*by_split} - {""}))
        raise ValueError(
            f"task.{field}: {data} holds files for {there}, by their names, and none to "
            f"{'train' if field == 'data' else 'evaluate'} on; name the right one"
        )
    return by_split[split]


def print_splits(by_split: dict[str, list[Path]], data: str, evaluates: bool) -> None:
    """Prints what is done with files of several splits; `evaluates`: on those for validation."""
    counts = {split or "no split": len(paths) for split, paths in by_split.items()}
    if len(counts) > 1:
        number = counts.pop("train" if "train" in counts else "no split")
        text = f"{number:,} files to train on" if number > 1 else "1 file to train on"
        if evaluates:
            text += f", {counts.pop('validation'):,} to evaluate on"
        others = ", ".join(f"{number:,} for {split}" for split, number in counts.items())
        text += f"; not read: {others}" if others else ""
        print(f"Preparing data: {one_line(data, 100)} has, by the names: {text}", flush=True)


def print_skipped(files: Files, data: str) -> None:
    """Prints the extensions of files, where there are several, and those that are not read."""
    read = Counter(file_ending(path) for paths in files.by_split.values() for path in paths)
    if files.skipped or len(read) > 1:  # one of them may describe the data
        text = f"{list_endings(read)}{describe_skipped(files.skipped)}"
        print(f"Preparing data: {one_line(data, 100)}: {one_line(text, 400)}", flush=True)


def list_endings(counts: Counter) -> str:
    """Numbers of files by ending, the most first, ten at most."""
    most = sorted(counts.items(), key=lambda each: (-each[1], each[0]))[:10]
    return ", ".join(f"{number:,} {ending}" for ending, number in most)


def describe_skipped(others: Counter) -> str:
    """The number of skipped files by ending, as part of a sentence; empty: none."""
    number = others.total()
    if not number:
        return ""
    files = "other files" if number > 1 else "other file"
    return f" (skipped {number:,} {files}: {list_endings(others)})"


def check_class_folders(files: Iterable[Path], data: str, field: str) -> None:
    """Raises ValueError for a file that is not in the folder of its class, below `data` or below
    the folder of a split there. Prints the folders beside these that have no file."""
    root = Path(data).expanduser()
    first: dict[Path, Path] = {}
    for path in files:
        first.setdefault(path.parent, path)
    for folder, path in first.items() if len(first) > 1 else ():
        parts = folder.relative_to(root).parts
        if len(parts) == 2 and split_of(parts[0]):
            parts = parts[1:]
        if len(parts) != 1:
            wanted = root / "CLASS" / path.name
            text = f"{path} is not in the folder of its class; it should be {wanted}"
            raise ValueError(f"task.{field}: {text}")
    beside = [each for above in {folder.parent for folder in first} for each in above.iterdir()]
    empty = [each.name for each in beside if each.is_dir() and each not in first]
    empty = sorted(name for name in empty if not name.startswith("."))
    if empty and len(first) > 1:
        text = f"{one_line(data, 100)}: nothing to read in the folders of classes "
        print(f"Preparing data: {text}{one_line(', '.join(empty), 200)}", flush=True)


# ---- Shards --------------------------------------------------------------------------------------


class Shard(NamedTuple):
    """A file that is read while the model trains. Whole ones are held out, by the hash of their
    names without the extensions: the same ones in each format."""

    path: str
    name: str  # below the folder or URL
    size: int  # in bytes
    tag: str  # what a store says of the content, or a digest of both ends


class ShardSplit(NamedTuple):
    """The shards to train on, and those to evaluate on."""

    train: list[Shard]
    held: list[Shard]
    is_given: bool  # those to evaluate on are named, and not held out by a hash
    skipped: Counter  # the number of other files by their extensions


@functools.cache  # a start lists them for the key, to prepare and to train: it sees one list
def list_shards(data: str, field: str) -> tuple[list[Shard], Counter]:
    """The shards of a folder or URL in the order of their names, and the number of other files."""
    found: list[Shard] = []
    skipped: Counter = Counter()
    for path, name, about in list_store(data, field) if "://" in data else list_folder(data):
        if file_ending(path) in SHARDS:
            tag = next((str(about[each]) for each in TAGS if each in about), "")
            if "://" not in data:
                tag = digest_ends(path)
            found.append(Shard(path, name, about["size"], tag))
        else:
            skipped[file_ending(path)] += 1
    return found, skipped


def list_folder(data: str) -> list[tuple[str, str, dict]]:
    """Path, name and size of all files of a folder."""
    root = os.path.expanduser(data)
    found = []
    for below, path in files_below(root) if os.path.exists(root) else ():
        found.append((path, below or os.path.basename(root), {"size": os.stat(path).st_size}))
    return sorted(found, key=lambda each: Path(each[0]))


def list_store(url: str, field: str) -> list[tuple[str, str, dict]]:
    """URL and name of all files below a URL, and what the store says of them, by fsspec."""
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
    for path, about in sorted(files.items()):
        name = path.removeprefix(root).lstrip("/") or path.rpartition("/")[2]
        found.append((store.unstrip_protocol(path), name, about))
    return found


def digest_ends(path: str) -> str:
    """A digest of the first and the last bytes of a file."""
    with open(path, "rb") as file:
        content = file.read(ENDS)
        file.seek(max(os.stat(path).st_size - ENDS, 0))
        return hashlib.sha256(content + file.read()).hexdigest()[:16]


def split_shards(cfg: Any, extensions: tuple[str, ...] = SHARDS) -> ShardSplit:
    """The shards with these extensions. To evaluate on are those of cfg.validation_data; those that
    are named so; or those that are held out, about cfg.validation_fraction, and at least one."""
    by_split, skipped = divide_shards(cfg.data, "data", extensions)
    train = choose(by_split, "train", "data", cfg.data)
    if data := cfg.validation_data:
        more, _ = divide_shards(data, "validation_data", extensions)
        given = choose(more, "validation", "validation_data", data)
        return ShardSplit(train, given, True, skipped)
    if "validation" in by_split:
        return ShardSplit(train, by_split["validation"], True, skipped)
    digests = [hashlib.sha256(name_alone(each.name).encode()).digest() for each in train]
    hashes = np.array([int.from_bytes(each[:8], "big") for each in digests], np.uint64)
    sizes, labels = np.ones(len(hashes)), np.zeros(len(hashes), int)
    chosen = splits.hold_out(hashes, sizes, labels, cfg.validation_fraction, len(hashes))
    if not len(chosen):
        hint = "cut it, or give --task.validation_data PATH"
        raise ValueError(f"task.data: {cfg.data} is one shard, and one is held out; {hint}")
    pairs = list(zip(train, np.isin(hashes, chosen).tolist(), strict=True))
    held = [shard for shard, is_held in pairs if is_held]
    return ShardSplit([shard for shard, is_held in pairs if not is_held], held, False, skipped)


def divide_shards(
    data: str, field: str, extensions: tuple[str, ...]
) -> tuple[dict[str, list[Shard]], Counter]:
    """The shards by their splits, and the number of other files; raises ValueError for none."""
    listed, others = list_shards(data, field)
    found = [each for each in listed if file_ending(each.path) in extensions]
    unread = (each.path for each in listed if file_ending(each.path) not in extensions)
    skipped = others + Counter(map(file_ending, unread))
    if not found:
        where = f"{data}{describe_skipped(skipped)}, of {', '.join(extensions)}"
        raise ValueError(f"task.{field}: there is no shard at {where}")
    return divide({each: split_of(each.name) for each in found}), skipped


def name_alone(name: str) -> str:
    """The name of a shard without its extensions."""
    stem, ending = os.path.splitext(name)
    return os.path.splitext(stem)[0] if ending.lower() in COMPRESSIONS else stem


def describe_shards(shards: list[Shard]) -> str:
    """A digest of names, sizes and tags."""
    lines = [f"{each.name} {each.size} {each.tag}\n" for each in shards]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
