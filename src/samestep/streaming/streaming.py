"""Rows that are read from shards while the model trains: see shards.py for the formats.

`prepare` makes an index once: the rows of each shard, the names of the labels, the shards that are
held out. A `ShardRows` then reads row i by its shard and its place there. Unpacked shards pass
through a cache of bounded size on the local disk.

The order of a run (step/batches.py) takes the shards of an epoch in random order, `window` at a
time, and shuffles the rows of these. So reads stay within a window, and the next one is fetched
meanwhile. The price: rows meet in a step only if their shards meet in a window. Where a shard holds
neighbours (one class, one website), a window should hold many shards. The cache needs room for two
windows.
"""

import contextlib
import functools
import hashlib
import json
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.pool import ThreadPool
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Annotated, Any, BinaryIO, NamedTuple

import numpy as np
import torch
from pydantic import Field
from tqdm import tqdm

from samestep.base.console import one_line, without_credentials
from samestep.base.fields import (
    NOTHING,
    Gigabytes,
    check_fields,
    check_ignored_fields,
    local_path,
)
from samestep.base.files import fsync
from samestep.data import cache, hub, sources, splits
from samestep.data.own_code import library_code
from samestep.data.sources import IncompleteRow, Source, split_data
from samestep.streaming import shards
from samestep.streaming.shards import Columns, Reader, Shard, ShardIndex

Window = Annotated[int, Field(ge=1, le=1_000_000)]
THREADS = 16  # that make the index: they wait for the disk or the network
COPIES = 4  # that a process makes at a time
ENDINGS = (".parquet", ".tokens", ".tar")  # of copies; .tar: those of an earlier version
MOST_OPEN = 256  # shards in a process
COMPARED = 20_000  # rows that are compared to find training rows that are held out, too

CODE = ("streaming/shards.py", "data/tables.py")  # on which the index of a shard depends

# ---- Fields --------------------------------------------------------------------------------------


@dataclass
class StreamFields:
    """Fields of a task whose rows can be read from shards; it has those of DataConfig too."""

    streaming: bool = False
    """Read rows while the model trains, and prepare none: task.data is a folder, or a URL such as
    s3://bucket/folder, of .parquet files."""
    shuffle_window: Window = 8
    """streaming: shards whose rows are shuffled together. More are closer to a full shuffle, and
    take more of shard_cache_gb."""
    shard_cache_gb: Gigabytes = field(default=50.0, metadata=NOTHING)
    """streaming: room for unpacked shards in cache_dir; at least two windows."""


def check_streaming(cfg: Any, shipped: Iterable[str]) -> None:
    """Raises ValueError for fields that do not go with streaming, or without it."""
    names = "shuffle_window shard_cache_gb"
    check_ignored_fields(cfg, [(names, cfg.streaming, "unless task.streaming is true")])
    if not cfg.streaming:
        return
    rules = [("data", len(split_data(cfg.data)) == 1, "one folder or URL of shards")]
    for name in ("data", "validation_data"):  # URLs are stored and shown
        url = getattr(cfg, name)
        text = "a URL without credentials: give them as the package of the store takes them"
        rules.append((name, without_credentials(url) == url, text))
    check_fields(cfg, rules)
    if cfg.data in shipped or hub.is_hub_name(cfg.data):
        example = f"hf://datasets/{cfg.data}" if "/" in cfg.data else "hf://datasets/OWNER/NAME"
        raise ValueError(
            f"task.streaming: {one_line(cfg.data, 60)} is not a folder or URL of shards; of a data "
            f"set on the Hub give the URL of its files, {one_line(example, 100)}"
        )


# ---- Index ---------------------------------------------------------------------------------------


class Indexed(NamedTuple):
    """A shard with an index, whose names stay in a file: they may be many."""

    shard: Shard
    record: Path
    index: ShardIndex


def prepare(
    cfg: Any,
    columns: Columns,
    known: list[str],
    settings: list,
    label_names: Callable[[dict], list[str]] | None,
    build: Callable[[Path, set[str]], list[Path]],
) -> Path:
    """The folder with the index of all shards, made once, as `cache.prepare_once` does.

    `known`: the names of the labels, where the fields give them; else a pass over the shards finds
    them, with `label_names`, which gives the names in a row's values; None: rows have no labels.
    `build` gets the folder and the names. It adds files of the task, and returns those that the
    digest covers. `settings` are those of `cache.cache_folder`. Raises ValueError and
    ConnectionError.
    """
    cache.check_cache_outside_data(cfg)
    fields = [name for name in ("data", "validation_data") if getattr(cfg, name)]
    listed = {name: shards.list_shards(getattr(cfg, name), name) for name in fields}
    counts = splits.count(splits.split_of(shard.name) for shard in listed["data"])
    if counts["validation"] and not cfg.validation_data:
        cfg = replace(cfg, validation_data=cfg.data)
        listed["validation_data"] = listed["data"]
    for name, found in listed.items():
        if own := splits.count(splits.split_of(shard.name) for shard in found):
            split = splits.choose(own, name, getattr(cfg, name))
            listed[name] = [shard for shard in found if splits.split_of(shard.name) == split]
    settings = [columns, known, *settings]
    folder = cache.cache_folder(cfg, settings, listed, build)

    def build_all(folder: Path) -> dict[str, str]:
        if counts:
            splits.print_split(counts, cfg.data, cfg.validation_data == cfg.data)
        names = None if known else label_names
        found = [index_shards(cfg, *each, settings, names) for each in listed.items()]
        facts = write_index(cfg, folder, found, {*known}, build)
        say_overlap(*(ShardRows(folder, part, cfg, columns) for part in ("train", "validation")))
        return facts

    return cache.prepare_once(cfg, lambda: folder, build_all)


def index_shards(
    cfg: Any,
    field: str,
    listed: list[Shard],
    settings: list,
    label_names: Callable[[dict], list[str]] | None,
) -> list[Indexed]:
    """The index of each shard. A shard that was indexed before, and has not changed, is not read.

    Each is a file of its own, so that an interrupted pass goes on where it was.
    """
    data, columns = getattr(cfg, field), settings[0]
    used = [columns, library_code(*CODE)]
    if label_names:
        used = [settings, library_code(*CODE, "data/labels.py")]
    folder = local_path(cfg.cache_dir, "cache_dir") / "shard_index"
    folder.mkdir(parents=True, exist_ok=True)

    def index(shard: Shard) -> Indexed:
        name = json.dumps([shard.path, used])
        record = folder / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"
        stamp = json.dumps([shard.size, shard.tag])
        known, found = load_record(record)
        if known != stamp:
            if known:
                path = one_line(shard.path, 150)
                print(f"Preparing data: {path} has changed: indexing it again", flush=True)
            found = shards.index_shard(shard, data, columns, label_names)
            partial = record.with_suffix(f".{os.getpid()}.partial")
            partial.write_text(json.dumps([stamp, *found]), encoding="utf-8")
            partial.replace(record)
        return Indexed(shard, record, found._replace(names={}))

    print(f"Preparing data: {len(listed):,} shards of {one_line(data, 100)}", flush=True)
    with ThreadPool(THREADS) as pool:
        done = pool.imap(index, listed)
        try:
            found = list(tqdm(done, "shards", len(listed), leave=False, disable=None))
        except ValueError as error:
            raise ValueError(f"task.{field}: {error}") from None
    rows = [(shard.path, row) for shard, _, index in found for row in index.incomplete]
    if rows:
        text = f"{one_line(rows[0][0], 150)}, {rows[0][1]}; {len(rows):,} such rows"
        if cfg.incomplete_rows == "refuse":
            hint = "--task.incomplete_rows skip reads the next row of the shard in place of each"
            raise ValueError(f"task.{field}: {text}; {hint}")
        print(f"Preparing data: {text}: the next row of the shard replaces each", flush=True)
    return found


def load_record(path: Path) -> tuple[str, ShardIndex | None]:
    """The stamp and the index of a shard; empty: there is none, or it is damaged."""
    try:
        stamp, *facts = json.loads(path.read_text(encoding="utf-8"))
        return stamp, ShardIndex(*facts)
    except (OSError, ValueError, TypeError):
        return "", None


def hash_name(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def hold_out(cfg: Any, found: list[Indexed]) -> tuple[set[str], int]:
    """Names of the shards that are held out, chosen by their hashes, and how many rows are used.

    Whole shards are held out, of which no more rows are used than the fields allow.
    """
    filled = [each for each in found if each.index.rows]
    hashes = [int.from_bytes(hash_name(each.shard.name)[:8], "big") for each in filled]
    keys, rows = np.array(hashes, np.uint64), np.array([each.index.rows for each in filled])
    limits = splits.extremes([(keys, np.zeros(len(keys), int))])
    held = splits.hold_out(keys, rows, limits, cfg.validation_fraction, cfg.validation_rows)
    if filled and not held:
        raise ValueError(
            f"task.data: {one_line(cfg.data, 100)} has rows in one shard alone, so that none can "
            "be held out; give --task.validation_data"
        )
    chosen = splits.is_in(keys, held)
    wanted = max(1, round(cfg.validation_fraction * rows.sum()))
    names = {each.shard.name for each, one in zip(filled, chosen, strict=True) if one}
    return names, min(wanted, cfg.validation_rows, int(rows[chosen].sum()))


def write_index(
    cfg: Any,
    folder: Path,
    found: list[list[Indexed]],
    given: set[str],
    build: Callable[[Path, set[str]], list[Path]],
) -> dict[str, str]:
    """Writes the index of both parts, and what `build` adds. Returns the digest of all of it.

    Raises ValueError for a part without rows, and for a label that the training rows lack.
    """
    train, validation, origin = found[0], found[-1], "validation_data"
    used = sum(each.index.rows for each in validation)
    if len(found) == 1:
        (held, used), origin = hold_out(cfg, train), "data"
        validation = [each for each in train if each.shard.name in held]
        train = [each for each in train if each.shard.name not in held]
    digest, total = hashlib.sha256(), sum(each.index.rows for each in train)
    for name, rows in (("data", total), (origin, used)):
        if not rows:
            raise ValueError(f"task.{name}: no rows in {one_line(getattr(cfg, name), 100)}")
    labels = write_part(folder, "train", "data", train, total, digest)
    names = given or {*labels}
    held_names = write_part(folder, "validation", origin, validation, used, digest)
    if unknown := min({*held_names} - names, default=None):
        path = one_line(held_names[unknown], 150)
        raise ValueError(
            f"task.{origin}: the label {one_line(unknown, 60)} of {path} is none to train on"
        )
    text = f"{total:,} rows of {len(train):,} shards to train"
    text += f" and {used:,} rows of {len(validation):,} to evaluate on"
    print(f"Preparing data: {text}", flush=True)
    for file in build(folder, names):
        digest.update(file.read_bytes())
    return {"content": digest.hexdigest()}


def write_part(
    folder: Path, part: str, origin: str, own: list[Indexed], used: int, digest: Any
) -> dict[str, str]:
    """Writes the shards of a part to PART.json, and adds them to the digest.

    Returns the names of the labels, each with a shard that has it.
    `origin`: the field that names their store.
    """
    facts = {"origin": origin, "used": used, "shard": [each.shard for each in own]}
    for name in ("rows", "bytes"):
        facts[name] = [getattr(each.index, name) for each in own]
    (folder / f"{part}.json").write_text(json.dumps(facts), encoding="utf-8")
    labels: dict[str, str] = {}
    for shard, record, _ in own:
        index = load_record(record)[1]
        labels |= {name: shard.path for name in index.names}
        # {}: digests of finished runs have it.
        line = [part, shard.name, shard.size, index.digest, {}, index.rows, index.names]
        digest.update(json.dumps(line, sort_keys=True).encode())
    return labels


# ---- Shards on this machine ----------------------------------------------------------------------


class ShardCache:
    """Copies of shards, unpacked, in a folder of bounded size on this machine.

    All processes of a machine share the folder. The copies that were opened longest ago are deleted
    when room is needed. A process that has one open reads on. A copy that is being made is a file
    NAME.BYTES.partial, for which so many bytes are kept; its process holds the lock NAME.lock.
    """

    def __init__(self, cfg: Any, data: str, columns: Columns):
        self.folder = local_path(cfg.cache_dir, "cache_dir") / "shards"
        self.limit, self.data, self.columns = int(cfg.shard_cache_gb * 1e9), data, columns

    def path(self, shard: Shard) -> Path:
        """Where the copy of a shard is, or will be."""
        name = json.dumps([self.data, *shard, self.columns])
        return self.folder / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.parquet"

    def write(self, shard: Shard, target: Path) -> None:
        """Writes the copy of a shard."""
        shards.unpack(shard, self.data, target, self.columns)

    def open(self, shard: Shard, size: int) -> BinaryIO:
        """The copy of a shard. For `size` see `bring`."""
        for _ in range(10):
            with contextlib.suppress(FileNotFoundError):  # another process needed room
                return open(self.bring(shard, size), "rb", buffering=0)
        raise ValueError(f"cannot read {one_line(shard.path, 150)}: it is no longer there")

    def bring(self, shard: Shard, size: int, is_wanted: Callable[[], bool] = lambda: True) -> Path:
        """The path of the copy of a shard, made if it is not there, and still wanted.

        `size`: about the bytes of the copy. Raises ValueError and ConnectionError.
        """
        path = self.path(shard)
        if not path.exists():
            what = f"a copy of {one_line(shard.path, 150)}, which another thread or process makes"
            with cache.writes_to(self.folder), cache.file_lock(path.with_suffix(".lock"), what):
                if not path.exists() and is_wanted():
                    self.copy(shard, path, path.with_suffix(f".{size}.partial"))
        self.touch(shard)
        return path

    def touch(self, shard: Shard) -> None:
        """Keeps the copy of a shard longer than those that were not touched since."""
        with contextlib.suppress(FileNotFoundError):  # another process needed room
            os.utime(self.path(shard))

    def copy(self, shard: Shard, path: Path, partial: Path) -> None:
        """Makes the copy of a shard once there is room for it."""
        shards.check_unchanged(shard, self.data)
        try:
            while not self.make_room(partial):
                time.sleep(0.05)  # other copies are under way
            self.write(shard, partial)
            self.make_room(partial)  # of a repeated text a .parquet tells the size once
            fsync(partial)  # a power cut must not leave half a copy
            with cache.file_lock(self.folder / "room.lock"):  # nobody may miss both of them
                partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def make_room(self, partial: Path) -> bool:
        """Deletes old copies, and keeps a place for a new one.

        False: the places of others leave too little.
        """
        with cache.file_lock(self.folder / "room.lock"):
            copies, places, needed = [], 0, room_of(partial)
            for path in self.folder.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    if path.suffix in ENDINGS:
                        status = path.stat()
                        copies.append((status.st_mtime, status.st_size, path))
                    elif path.suffix == ".partial" and path != partial:
                        if cache.is_locked(path.with_name(f"{path.name.partition('.')[0]}.lock")):
                            places += room_of(path)
                        else:  # its process is dead
                            path.unlink()
            excess = sum(size for _, size, _ in copies) + places + needed - self.limit
            for _, size, path in sorted(copies):
                if excess > 0:
                    path.unlink(missing_ok=True)
                    excess -= size
            if excess > 0 and places:
                return False
            partial.touch()
            return True


def room_of(partial: Path) -> int:
    """The bytes that an unfinished copy needs: those in its name, or more if it has more."""
    written = partial.stat().st_size if partial.exists() else 0
    return max(int(partial.suffixes[-2][1:]), written)


# ---- Rows ----------------------------------------------------------------------------------------


class ShardPart:
    """The shards of a part, and how the values in them become rows: `complete` of a subclass."""

    def __init__(self, folder: Path, part: str, cfg: Any, columns: Columns):
        self.folder, self.part, self.cfg, self.columns = folder, part, cfg, columns
        facts = json.loads((folder / f"{part}.json").read_text(encoding="utf-8"))
        self.shards = [Shard(*each) for each in facts["shard"]]
        self.rows, self.bytes = (np.array(facts[name], np.int64) for name in ("rows", "bytes"))
        self.ends, self.used = np.cumsum(self.rows), facts["used"]
        # Of shards for validation that their names tell, the field is empty.
        self.field = facts["origin"]
        self.data = getattr(cfg, self.field) or cfg.data

    def by_hash(self) -> list[int]:
        """The numbers of all shards, in an order that their names decide."""
        return sorted(range(len(self.shards)), key=lambda n: hash_name(self.shards[n].name))

    def read_row(self, read: Callable[[], dict], number: int, place: int) -> Any:
        """A row of a shard; None: it cannot be read, and the fields allow to leave it out."""
        try:
            return self.complete(read())
        except (ValueError, OverflowError) as error:  # as of a date
            hint = ""
            if isinstance(error, IncompleteRow):
                if self.cfg.incomplete_rows == "skip":
                    return None
                hint = "; --task.incomplete_rows skip leaves it out"
            where = f"{one_line(self.shards[number].path, 150)}, row {place}"
            raise ValueError(f"cannot read {where}: {one_line(error)}{hint}") from None

    def complete(self, values: dict[str, Any]) -> Any:
        """The row that the values of its roles give. Raises ValueError for values that cannot."""
        return values


class ShardRows(ShardPart, torch.utils.data.Dataset):
    """The rows of a part, shard after shard. In place of a row that is left out, the next one of
    its shard is read.

    `sources` and `ahead` tell train.py the order in which rows are best read, and how far ahead
    `fetch` should be told of them.
    """

    arguments: tuple  # that it was made with

    def __new__(cls, *arguments: Any) -> "ShardRows":
        self = super().__new__(cls)
        self.arguments = arguments
        return self

    def __reduce__(self):  # without open files
        return type(self), self.arguments

    def __init__(self, folder: Path, part: str, cfg: Any, columns: Columns):
        super().__init__(folder, part, cfg, columns)
        self.cache = self.make_cache()
        self.readers: OrderedDict[int, tuple[BinaryIO, Reader]] = OrderedDict()  # the last used
        # Shards that `fetch` was told of, and whether no reader has opened them since.
        self.asked: OrderedDict[int, bool] = OrderedDict()
        self.queue, self.owner = SimpleQueue(), 0  # of shards to copy, and the process that does it
        window = min(1 if part == "validation" else cfg.shuffle_window, len(self.rows))
        needed = np.sort(self.bytes)[-2 * window :].sum()
        if needed > self.cache.limit:
            raise ValueError(
                f"task.shard_cache_gb is {cfg.shard_cache_gb:g}, but two windows of {window} "
                f"shards take {needed / 1e9:,.3g} GB; give more, or a smaller task.shuffle_window"
            )

    def make_cache(self) -> ShardCache:
        return ShardCache(self.cfg, self.data, self.columns)

    def __len__(self) -> int:
        return self.used

    @property
    def sources(self) -> list[Source]:
        """One source. Its shards are read in windows; evaluation reads rows as they come."""
        in_order = self.part == "validation"
        rows = None if in_order else self.rows
        return [Source(self.part, len(self), 1, rows, self.cfg.shuffle_window)]

    @property
    def ahead(self) -> int:
        """Samples from here to where `fetch` should know what comes: a window."""
        return int(self.rows.mean() * self.cfg.shuffle_window)

    def fetch(self, ids: Iterable[int]) -> None:
        """Copies the shards of these rows in the background."""
        if self.owner != os.getpid():  # a fork has no threads
            self.queue, self.owner = SimpleQueue(), os.getpid()
            for _ in range(COPIES):
                Thread(target=self.copy_asked, args=(self.queue,), daemon=True).start()
        for number in {self.locate(i)[0] for i in ids}:
            if number not in self.asked:
                self.asked[number] = True
                self.queue.put(number)
            elif self.asked[number]:  # older copies make room first, which have been read
                self.cache.touch(self.shards[number])
        while len(self.asked) > 3 * self.cfg.shuffle_window:
            self.asked.popitem(last=False)

    def copy_asked(self, queue: SimpleQueue) -> None:
        """Copies the shards of a queue, for ever. An error shows when a row of the shard is read.

        What a reader has opened meanwhile is passed over: its copy may be gone again by now.
        """
        while True:
            number = queue.get()
            is_wanted = functools.partial(self.asked.get, number)
            if is_wanted():
                with contextlib.suppress(Exception):
                    self.cache.bring(self.shards[number], int(self.bytes[number]), is_wanted)

    def locate(self, i: int) -> tuple[int, int]:
        """The shard of row i, and its place there. Rows that are used lie evenly among all."""
        place = i * int(self.ends[-1]) // self.used
        number = int(np.searchsorted(self.ends, place, "right"))
        return number, place - int(self.ends[number] - self.rows[number])

    def sample(self) -> Iterator[dict[str, Any]]:
        """The values of some rows, for a look at the data: COMPARED at most, evenly from those
        of the shards on this machine that fill 1 GB."""
        chosen, is_remote = self.by_hash(), shards.is_url(self.data)
        if is_remote:
            chosen = [n for n in chosen if self.cache.path(self.shards[n]).exists()]
        before = np.cumsum(self.bytes[chosen]) - self.bytes[chosen]
        chosen = [n for n, size in zip(chosen, before, strict=True) if size < 1e9]
        total = int(self.ends[-1])
        step = int(self.rows[chosen].sum()) * self.used // total // COMPARED + 1
        for number in chosen:
            end = int(self.ends[number])
            rows = (end - int(self.rows[number]), end)
            first, last = (-(-row * self.used // total) for row in rows)
            places = [self.locate(i)[1] for i in range(-(-first // step) * step, last, step)]
            if is_remote:
                reads: Any = (functools.partial(self.reader(number), place) for place in places)
            else:  # without a copy
                wanted = {*places}
                decoded = enumerate(shards.rows_of(self.shards[number], self.data, self.columns))
                reads = (read for place, read in decoded if place in wanted)
            for read in reads:
                with contextlib.suppress(Exception):  # training tells what cannot be read
                    yield read()

    def reader(self, number: int) -> Reader:
        """The reader of a shard; some of those that were used last stay open."""
        if number in self.readers:
            self.readers.move_to_end(number)
            return self.readers[number][1]
        if number in self.asked:
            self.asked[number] = False
        file = self.cache.open(self.shards[number], int(self.bytes[number]))
        self.readers[number] = file, self.make_reader(number, file)
        while len(self.readers) > min(2 * self.cfg.shuffle_window, MOST_OPEN):
            self.readers.popitem(last=False)[1][0].close()
        return self.readers[number][1]

    def make_reader(self, number: int, file: BinaryIO) -> Reader:
        return shards.arrow_reader(file, self.columns)

    def read(self, i: int) -> Any:
        """Row i, or the first readable row after it in its shard, if the fields allow it.

        Raises ValueError with the place.
        """
        number, row = self.locate(i)
        reader, rows = self.reader(number), int(self.rows[number])
        for place in ((row + step) % rows for step in range(rows)):
            found = self.read_row(functools.partial(reader, place), number, place)
            if found is not None:
                return found
        raise ValueError(f"cannot read any row of {one_line(self.shards[number].path, 150)}")

    def __getitem__(self, i: int) -> Any:
        return self.__getitems__([i])[0]

    def __getitems__(self, ids: list[int]) -> list:
        self.fetch(ids)
        return [self.read(i) for i in ids]


def say_overlap(train: ShardRows, validation: ShardRows) -> None:
    """Prints how many of the validation rows are training rows too, of some of each."""
    known, held = ([*map(hash_values, each.sample())] for each in (train, validation))
    least, known = "at least " * (len(known) < len(train)), {*known}
    sources.say_overlap(sum(each in known for each in held), len(held), least)


def hash_values(values: dict[str, Any]) -> bytes:
    """A hash of the values of a row without its label."""
    return hash_name(repr([value for role, value in values.items() if role != "label"]))
