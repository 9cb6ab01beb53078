"""Rows read from shards: every format gives the same rows, the index is made once, the copies on
this disk stay bounded, and the promises of prepared data hold.
"""

import contextlib
import functools
import io
import json
import multiprocessing
import os
import pickle
import shutil
import tarfile
import time
import tracemalloc
from multiprocessing.pool import ThreadPool

import fsspec
import numpy as np
import pyarrow
import pytest
from fsspec.implementations.local import LocalFileSystem
from PIL import Image
from pyarrow import parquet

from conftest import bake, digest, lines, load_task, trained, wait_until
from samestep.base import console
from samestep.images.images import square
from samestep.step import batches
from samestep.streaming import shards, streaming

images = load_task("image_classification")
texts = load_task("text_classification")

TINY = ["--task.hidden_size", 64, "--task.num_layers", 1, "--task.patch_size", 16]
SHORT = ["--global_batch_size", 16, "--micro_batch_size", 4, "--warmup_steps", 2, "--log_every", 1]
STREAMED = ["--task.streaming", "true", "--task.shuffle_window", 2]
SHORT += ["--task.flip", "true", *TINY]
TEXT = ["--task.max_length", 16, "--task.hidden_size", 32, "--task.num_heads", 2]
TEXT += ["--task.vocab_size", 400, "--global_batch_size", 16, "--micro_batch_size", 16]
TEXT += ["--log_every", 1, "--warmup_steps", 2]


class CountingStore(LocalFileSystem):
    """Local files as a store: counts what it is asked for, and fails as often as it is told, or
    gives half a file."""

    protocol = "counting"
    copied: list[str] = []
    failures: list[Exception | str] = []

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("counting://"))

    def get_file(self, path, target, **options):
        failure = self.failures.pop() if self.failures else None
        if isinstance(failure, Exception):
            raise failure
        self.copied.append(os.path.basename(path))
        super().get_file(path, target, **options)
        if failure == "half":
            os.truncate(target, os.path.getsize(target) // 2)


fsspec.register_implementation("counting", CountingStore)


@pytest.fixture(autouse=True)
def store(monkeypatch):
    """A store of local files: a path behind counting://."""
    monkeypatch.setattr(CountingStore, "copied", [])
    monkeypatch.setattr(CountingStore, "failures", [])
    monkeypatch.setattr(shards, "WAITS", (0, 0))
    return CountingStore


@pytest.fixture
def config(tmp_path):
    """Settings of a very small task, with the data given as keywords."""

    def make(data, **fields):
        small = {"image_size": 8, "patch_size": 4, "hidden_size": 16, "num_layers": 1}
        small |= {"min_crop": 1.0, "cache_dir": str(tmp_path / "cache"), "shuffle_window": 2}
        return images.TaskConfig(data=str(data), **{"streaming": True, **small, **fields})

    return make


# ---- Shards --------------------------------------------------------------------------------------


def pictures(number, seed=0, side=10):
    """(encoded image, class) of so many rows."""
    rng = np.random.default_rng(seed)
    for i in range(number):
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (side, side + 2, 3), np.uint8)).save(file, "PNG")
        yield file.getvalue(), ("cat", "dog", "owl")[i % 3]


def add(archive, name, content):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def write_tar(path, members):
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            add(archive, name, content)


def members(rows, endings, first=0):
    for i, row in enumerate(rows, first):
        yield from ((f"{i:06}.{end}", part) for end, part in zip(endings, row, strict=True))


def write_table(path, rows, **options):
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, **options)


WORDS = "red green blue dog cat house tree sun moon sea".split()
KINDS = ["tar", "tar.json", "parquet"]
MEMBERS = {"image": "png", "text": "txt", "label": "cls"}  # of a .tar, by their columns


def write_shards(folder, kind, parts):
    """Shards of one kind with these rows, dicts; of tar.json all but images is in one member."""
    folder.mkdir(parents=True, exist_ok=True)
    first = 0
    for number, rows in enumerate(parts):
        path = folder / f"part-{number:03}.{kind.partition('.')[0]}"
        if kind == "parquet":
            images = [{**r, "image": {"bytes": r["image"]}} if "image" in r else r for r in rows]
            write_table(path, images, row_group_size=3)
        else:
            names = [each for each in rows[0] if kind == "tar" or each == "image"]
            found = [[encoded(row[name]) for name in names] for row in rows]
            if kind == "tar.json":
                others = ({n: v for n, v in row.items() if n not in names} for row in rows)
                found = [[*f, json.dumps(o).encode()] for f, o in zip(found, others, strict=True)]
            endings = [MEMBERS.get(name, name) for name in names] + ["json"] * (kind != "tar")
            write_tar(path, members(found, endings, first))
        first += len(rows)
    return folder


def encoded(value):
    return value.encode() if isinstance(value, str) else value


def write_images(folder, kind, counts=(7, 5, 6), seed=0, side=10):
    """Shards with so many rows each, of one kind."""
    parts = (pictures(count, [seed, number], side) for number, count in enumerate(counts))
    return write_shards(folder, kind, [[{"image": i, "label": c} for i, c in p] for p in parts])


def write_texts(folder, kind, counts=(30, 25, 35), seed=0):
    """Texts of some words; the label says whether there is a dog."""
    rng, parts = np.random.default_rng(seed), []
    for count in counts:
        some = [" ".join(rng.choice(WORDS, rng.integers(3, 9))) for _ in range(count)]
        named = ((text, text.split()[0], "dog" if "dog" in text else "no") for text in some)
        parts.append([dict(zip(("text", "start", "label"), row, strict=True)) for row in named])
    return write_shards(folder, kind, parts)


def expected(cfg, counts=(7, 5, 6), seed=0):
    """The rows that `write_images` writes, as a task should give them."""
    names, side = ["cat", "dog", "owl"], images.image_data.stored_side(cfg, False)
    parts = [pictures(count, [seed, number]) for number, count in enumerate(counts)]
    return [(square(image, side), names.index(name)) for part in parts for image, name in part]


def equal(rows, others):
    return len(rows) == len(others) and all(
        (row[0] == other[0]).all() and row[1] == other[1]
        for row, other in zip(rows, others, strict=True)
    )


def read(dataset):
    return [dataset[i] for i in range(len(dataset))]


def datasets(cfg):
    """The training and the validation rows."""
    return images.datasets(cfg, images.prepare_data(cfg))


def digest_of(cfg):
    return images.cache.content_digest(images.prepare_data(cfg))


def listed(prepared, part="train"):
    return json.loads((prepared / f"{part}.json").read_text())


@pytest.mark.parametrize("scheme", ["", "counting://"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_the_same_rows(config, tmp_path, kind, scheme):
    held = write_images(tmp_path / "held", kind, (4,), seed=1)
    data = write_images(tmp_path / "rows", kind)
    cfg = config(f"{scheme}{data}", validation_data=f"{scheme}{held}")
    prepared = images.prepare_data(cfg)
    train, validation = images.datasets(cfg, prepared)
    assert equal(read(train), expected(cfg)) and equal(read(validation), expected(cfg, (4,), 1))
    (source,) = train.sources
    assert [*source.shards] == [7, 5, 6] and (source.rows, source.window) == (18, 2)
    again = pickle.loads(pickle.dumps(train))
    assert equal(again.__getitems__([17, 0, 9]), [train[17], train[0], train[9]])
    assert len(pickle.dumps(train)) < 3000
    assert json.loads((prepared / "labels.json").read_text()) == ["cat", "dog", "owl"]


def test_digest_depends_on_content_and_not_on_place_or_time(config, tmp_path):
    first = digest_of(config(write_images(tmp_path / "a", "tar")))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    os.utime(tmp_path / "b" / "part-000.tar", (1, 1))
    assert digest_of(config(tmp_path / "b")) == first
    assert digest_of(config(f"counting://{tmp_path / 'a'}")) == first
    assert digest_of(config(write_images(tmp_path / "c", "tar", (7, 5, 5)))) != first
    assert digest_of(config(tmp_path / "a", validation_fraction=0.9)) != first


def test_odd_members_of_archives(config, tmp_path):
    """Long names, folders, links, hidden files; endings in capitals; a row with other members."""
    rows, folder = [*pictures(6)], tmp_path / "rows"
    folder.mkdir()
    for number, form in enumerate((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)):
        with tarfile.open(folder / f"{number}.tar", "w", format=form) as archive:
            archive.addfile(tarfile.TarInfo("./._000.png"))
            link = tarfile.TarInfo("link.seg.png")
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(link)
            for i, (image, name) in enumerate(rows):
                mark = b"\xef\xbb\xbf" * (i % 2)  # that some programs write before UTF-8
                parts = {"PNG": image, "txt": b"?", "seg.png": b"-", "cls": mark + name.encode()}
                for end, part in parts.items():
                    add(archive, f"{'folder/' * 30}é.d/{i}.{end}", part)
    train, _ = datasets(config(folder, validation_fraction=0.4))
    names = ["cat", "dog", "owl"]
    assert equal(read(train), [(square(i, train.side), names.index(n)) for i, n in rows])


# ---- Index ---------------------------------------------------------------------------------------


def test_index_goes_on_where_it_was_and_names_a_changed_shard(
    config, tmp_path, monkeypatch, capsys
):
    data, seen, index = write_images(tmp_path / "rows", "tar", (3,) * 6), [], shards.index_shard
    cfg, stops = config(data), [4]

    def index_some(shard, *arguments):
        if [len(seen)] == stops:
            raise RuntimeError("interrupted")
        seen.append(shard.name)
        return index(shard, *arguments)

    monkeypatch.setattr(streaming, "THREADS", 1)
    monkeypatch.setattr(shards, "index_shard", index_some)
    with pytest.raises(RuntimeError):
        images.prepare_data(cfg)
    stops.clear()
    first = images.prepare_data(cfg)
    assert sorted(seen) == [f"part-{i:03}.tar" for i in range(6)]  # each once
    assert images.prepare_data(cfg) == first and len(seen) == 6
    write_images(tmp_path / "other", "tar", (4,), seed=5)
    shutil.copy(tmp_path / "other" / "part-000.tar", data / "part-002.tar")
    capsys.readouterr()
    second = images.prepare_data(cfg)
    assert seen[6:] == ["part-002.tar"] and second != first
    assert f"{data}/part-002.tar has changed: indexing it again" in capsys.readouterr().out
    content = images.cache.content_digest(second)
    assert content != images.cache.content_digest(first)
    for record in (tmp_path / "cache" / "shard_index").iterdir():  # damaged
        record.write_bytes(record.read_bytes()[:200])
    shutil.rmtree(second)
    assert digest_of(cfg) == content and len(seen) == 13


def test_whole_shards_are_held_out(config, tmp_path):
    data = write_images(tmp_path / "rows", "tar", (10,) * 10)
    held = {}
    for fraction in (0.02, 0.1, 0.35):
        cfg = config(data, validation_fraction=fraction)
        train, validation = datasets(cfg)
        held[fraction] = {shard.name for shard in validation.shards}
        assert not held[fraction] & {shard.name for shard in train.shards}
        assert len(train) == 100 - 10 * len(held[fraction])
        assert len(validation) == min(round(100 * fraction), 10 * len(held[fraction]))
        assert len({*map(validation.locate, range(len(validation)))}) == len(validation)
    assert len(held[0.1]) == 1 and len(held[0.35]) == 6 and held[0.02] == held[0.1] < held[0.35]
    few = config(data, validation_fraction=0.35, validation_rows=25)
    assert {shard.name for shard in datasets(few)[1].shards} < held[0.35]
    assert validation.sources[0].shards is None
    with pytest.raises(ValueError, match="has rows in one shard alone, so that none can be held"):
        images.prepare_data(config(data / "part-001.tar"))


def test_shards_of_splits_are_known_by_their_names(config, tmp_path, capsys):
    for number, split in enumerate(("train", "val", "test")):
        write_images(tmp_path / "rows" / split, "tar", seed=number)
    cfg = config(f"counting://{tmp_path}/rows")
    prepared = images.prepare_data(cfg)
    assert [part.copied for part in images.datasets(cfg, prepared)] == [True, True]
    for part, split in (("train", "train"), ("validation", "val")):
        names = [name for name, *_ in listed(prepared, part)["shard"]]
        assert names == [f"{split}/part-{i:03}.tar" for i in range(3)]
    said = "has, by the names: 3 files to train on, 3 to evaluate on; not read: 3 for test"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    "kind, scheme", [("tar", ""), ("parquet", "counting://"), ("tar", "link"), ("tar", "file://")]
)
def test_a_shard_replaced_by_one_of_equal_size_and_time_is_seen(
    config, tmp_path, kind, scheme, capsys
):
    """In its place, beside it or where a link leads: other images of the same lengths are other
    data."""
    data = tmp_path / "rows"
    data.mkdir()
    paths = [data / f"{number}.{kind}" for number in range(2)]
    if scheme in ("link", "file://"):
        links, paths = paths, [tmp_path / path.name for path in paths]
        for link, path in zip(links, paths, strict=True):
            link.symlink_to(path)
    scheme = scheme.removeprefix("link")

    def write(*words):
        found = [(f"{words[i % 2]} {i}".encode(), "ab"[i % 2]) for i in range(8)]
        rows = [{"image": {"bytes": image}, "label": name} for image, name in found]
        options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
        for path in paths:
            if kind == "tar":
                pairs = ((image, name.encode()) for image, name in found)
                write_tar(path, members(pairs, ("png", "cls")))
            else:
                write_table(path, rows, **options)
        return [path.stat() for path in paths]

    times = write("good", "evil")
    first = digest_of(config(f"{scheme}{data}"))
    assert digest_of(config(f"{scheme}{data}")) == first
    capsys.readouterr()
    for path, new, old in zip(paths, write("nice", "grim"), times, strict=True):
        assert new.st_size == old.st_size
        os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))
    assert digest_of(config(f"{scheme}{data}")) != first
    assert capsys.readouterr().out.count("has changed: indexing it again") == 2


def test_linked_shards_and_folders_are_read_and_broken_links_refused(config, tmp_path):
    data, held = (write_images(tmp_path / name, "parquet") for name in ("rows", "held"))
    (tmp_path / "cached").mkdir()
    (tmp_path / "cached" / "0.parquet").symlink_to(data / "part-000.parquet")
    (data / "part-000.parquet").rename(tmp_path / "blob")
    (data / "part-000.parquet").symlink_to(tmp_path / "blob")
    (tmp_path / "cached" / "more").symlink_to(data)
    train, _ = datasets(config(tmp_path / "cached", validation_data=str(held)))
    assert equal(read(train), expected(config(""))[:7] + expected(config("")))
    (data / "part-001.parquet").unlink()
    (data / "part-001.parquet").symlink_to("none")
    with pytest.raises(ValueError, match="task.data: .*/more/part-001.parquet is a broken link"):
        images.prepare_data(config(tmp_path / "cached", validation_data=str(held)))


def test_a_large_shard_counts_by_blocks_of_it(tmp_path):
    path = tmp_path / "large"
    for size in (0, 1, 2**20, 2**24, 2**24 + 1, 2**26):
        with open(path, "wb") as file:
            file.truncate(size)
        found = {shards.sample_digest(open(path, "rb"))}
        places = {0, size // 2, size - 1} if 0 < size <= 2**24 else {0, size - 1} if size else {0}
        for place in places:
            content = bytearray(path.read_bytes())
            content[place : place + 1] = b"x"
            (tmp_path / "other").write_bytes(content)
            found.add(shards.sample_digest(open(tmp_path / "other", "rb")))
        assert len(found) == 1 + len(places)


def write_tar_of(path, texts, labels="ab"):
    """A .tar of texts, whose labels alternate."""
    path.parent.mkdir(exist_ok=True)
    parts = ((text.encode(), labels[i % 2].encode()) for i, text in enumerate(texts))
    write_tar(path, members(parts, ("txt", "cls")))


def test_rows_on_both_sides_are_said(tmp_path, capsys, monkeypatch, config):
    """Of equal shards, of a shard that is given, and of images in each format."""
    given = str(tmp_path / "given.tar")
    write_tar_of(tmp_path / "given.tar", ["text 1 3", "other", "text 0 9", "text 1 3"], "ba")

    def overlap(module, cfg):
        capsys.readouterr()
        module.prepare_data(cfg)
        found = [line for line in capsys.readouterr().out.splitlines() if " rows too: " in line]
        return found and found[0].removeprefix("Preparing data: ").partition(" validation rows")[0]

    def overlap_of(data, **fields):
        cache = str(tmp_path / f"cache{len([*tmp_path.iterdir()])}")
        fields |= {"streaming": True, "vocab_size": 300, "cache_dir": cache}
        return overlap(texts, texts.TaskConfig(data=str(data), **fields))

    for number in range(6):
        write_tar_of(tmp_path / f"a/{number}.tar", [f"text {number % 3} {i}" for i in range(10)])
    assert overlap_of(tmp_path / "a", validation_data=given) == "3 of 4"
    assert overlap_of(f"counting://{tmp_path / 'a'}", validation_data=given) == "3 of 4"
    # Of six shards two by two are equal.
    assert overlap_of(tmp_path / "a", validation_fraction=0.1) == "6 of 6"
    for number in range(3, 6):
        os.unlink(tmp_path / f"a/{number}.tar")
    assert overlap_of(tmp_path / "a", validation_fraction=0.4) == []
    for kind in KINDS:
        data = write_images(tmp_path / kind, kind, (4, 5, 6))
        held = write_images(tmp_path / f"{kind}-held", kind, (4, 2), 0)
        assert overlap(images, config(data, validation_data=str(held))) == "6 of 6"
    monkeypatch.setattr(streaming, "COMPARED", 15)
    found = overlap_of(tmp_path / "a", validation_data=given)
    assert found.startswith("at least ")


# ---- Copies on this machine ----------------------------------------------------------------------


def in_order(dataset, seed=0, passes=1):
    """The rows of a training, as train.py reads them."""
    rows = batches.SampleDataset(dataset, images, seed)
    rows.augment = None
    return rows, range(0, passes * len(dataset), 4)


def bytes_of_copies(folder):
    """A copy and the place that is kept for it count once. A background copy may delete a file."""
    sizes = {}
    for file in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            size = streaming.room_of(file) if file.suffix == ".partial" else file.stat().st_size
            sizes[file.name.partition(".")[0]] = max(size, sizes.get(file.name, 0))
    return sum(sizes.values())


def test_reads_stay_in_a_window_and_copies_stay_bounded(config, tmp_path, store):
    """Each shard is copied once a pass, and the folder never holds more than the field allows."""
    data = write_images(tmp_path / "rows", "tar", (12,) * 12, side=80)
    size = (data / "part-000.tar").stat().st_size
    cfg = config(f"counting://{data}", shard_cache_gb=5.5 * size / 1e9)
    train, _ = datasets(cfg)
    for file in (tmp_path / "cache" / "shards").glob("*.tar"):
        file.unlink()
    store.copied.clear()
    rows, starts = in_order(train)
    opened, used = [], []
    for start in starts:
        found = rows.__getitems__(range(start, min(start + 4, len(train))))
        opened.append({train.locate(i)[0] for i, _ in found})
        used.append(bytes_of_copies(tmp_path / "cache" / "shards"))
        time.sleep(0.01)
    assert max(used) <= 5.5 * size
    seen = [number for numbers in opened for number in numbers]
    for number in seen:  # a window has 2 shards, thus 6 batches
        places = [i for i, numbers in enumerate(opened) if number in numbers]
        assert places[-1] - places[0] <= 6
    expected = {shard.name for shard in train.shards}
    assert {*store.copied} == expected and len(store.copied) <= len(expected) + 2  # the next pass


def test_copies_wait_for_room_and_what_the_dead_have_left_goes(
    config, tmp_path, store, monkeypatch
):
    data = write_images(tmp_path / "rows", "tar", (12,) * 9, side=80)
    size, folder = (data / "part-000.tar").stat().st_size, tmp_path / "cache" / "shards"
    cfg = config(f"counting://{data}", shuffle_window=1, shard_cache_gb=2.5 * size / 1e9)
    train, _ = datasets(cfg)
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / f"dead.{9 * size}.partial").touch()
    used, get_file = [], store.get_file

    def get_slowly(self, path, target, **options):
        get_file(self, path, target, **options)
        used.append(bytes_of_copies(folder))
        time.sleep(0.02)

    monkeypatch.setattr(store, "get_file", get_slowly)
    with ThreadPool(4) as pool:
        pool.map(train.cache.bring, train.shards)
    assert len(used) == len(train.shards) and max(used) <= 2.5 * size
    assert not [*folder.glob("*.partial")]


def test_memory_does_not_grow_with_a_group_of_rows(tmp_path):
    rng, found = np.random.default_rng(0), []
    for rows in (2000, 6000):
        data = tmp_path / str(rows)
        data.mkdir()
        table = [{"image": {"bytes": rng.bytes(5000)}, "label": "ab"[i % 2]} for i in range(rows)]
        write_table(data / "a.parquet", table)
        columns = {"image": "image", "label": "label"}
        (shard,), target = shards.list_shards(str(data), "data"), tmp_path / "unpacked"
        tracemalloc.start()
        shards.bring(shard, str(data), target, columns)
        found.append(tracemalloc.get_traced_memory()[1])  # what was read of the file
        tracemalloc.stop()
    assert found[1] < 1.2 * found[0] < target.stat().st_size


def test_next_window_is_fetched_ahead(config, tmp_path, store):
    data = write_images(tmp_path / "rows", "tar", (12,) * 12)
    cfg = config(f"counting://{data}", validation_fraction=0.2)
    train, _ = datasets(cfg)
    shutil.rmtree(tmp_path / "cache" / "shards")
    store.copied.clear()
    rows, starts = in_order(train)
    for start in starts[:5]:  # of the first window, of 24 rows
        found = rows.__getitems__(range(start, start + 4))
    deadline = time.monotonic() + 300
    while len(store.copied) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    later = {train.locate(i)[0] for i in rows.ids(range(24, 48))}
    assert {train.shards[n].name for n in later} <= {*store.copied}
    assert len(store.copied) == 4 and found


def read_all(dataset, seed, queue):
    rows, starts = in_order(dataset, seed)
    found = [row for start in starts for row in rows.__getitems__(range(start, start + 4))]
    queue.put({i: int(row[0].sum()) for i, row in found})  # the image, as one number


def test_processes_share_the_copies(config, tmp_path):
    """Four processes, each in an order of its own, and room for a third of the shards."""
    data = write_images(tmp_path / "rows", "parquet", (12,) * 13, side=80)
    cfg = config(f"file://{data}", validation_fraction=0.05)
    train, _ = datasets(cfg)
    cfg.shard_cache_gb = float(4.5 * train.bytes.max() / 1e9)
    train, _ = datasets(cfg)
    wanted = {i: int(row[0].sum()) for i, row in enumerate(read(train))}
    fork = multiprocessing.get_context("fork")
    queue = fork.Queue()
    started = [fork.Process(target=read_all, args=(train, seed, queue)) for seed in range(4)]
    for each in started:
        each.start()
    assert [queue.get(timeout=60) for _ in started] == [wanted] * 4
    for each in started:
        each.join()
    read(train)  # a process that ends leaves the copies that it had begun
    wait_until(lambda: not [*(tmp_path / "cache" / "shards").glob("*.partial")])


# ---- What goes wrong -----------------------------------------------------------------------------


def test_store_that_fails_for_a_moment(config, tmp_path, store):
    cfg = config(f"counting://{write_images(tmp_path / 'rows', 'tar')}")
    store.failures += [OSError("reset"), "half"]
    train, _ = datasets(cfg)
    for i in range(len(train)):
        train.read(i)  # train[i] would also copy in the background
    assert not store.failures
    assert all(train.cache.path(each).stat().st_size == each.size for each in train.shards)
    shutil.rmtree(tmp_path / "cache" / "shards")
    store.failures += [OSError("connection reset by peer")] * 40
    train = pickle.loads(pickle.dumps(train))
    with pytest.raises(ConnectionError) as error:
        train.cache.bring(train.shards[0])
    text = "the store failed 3 times, the last time with connection reset by peer"
    assert str(error.value) == f"cannot read {train.shards[0].path}: {text}"
    store.failures.clear()
    store.failures += [PermissionError("403 Forbidden")]
    with pytest.raises(ValueError, match="cannot read .*: 403 Forbidden"):
        train.cache.bring(train.shards[0])
    assert not [*(tmp_path / "cache" / "shards").glob("*.partial")]


def test_patterns_of_several_folders_and_a_folder_named_like_a_shard(config, tmp_path):
    """All folders are read, also below a hidden one; names are those below what they share."""
    for number in range(2):
        write_images(tmp_path / ".store" / f"rows-{number}", "tar", seed=number)
    cfg = config(f"{tmp_path}/.store/rows-{{0..1}}", validation_fraction=0.01)
    prepared = images.prepare_data(cfg)
    shards_of = [*listed(prepared)["shard"], *listed(prepared, "validation")["shard"]]
    names = sorted(name for name, *_ in shards_of)
    assert names == [f"rows-{n}/part-{i:03}.tar" for n in range(2) for i in range(3)]
    train, validation = images.datasets(cfg, prepared)
    held = sum(listed(prepared, "validation")["rows"])
    assert len(read(train)) + held == 36 and read(validation)
    data = write_images(tmp_path / "rows.parquet", "parquet")  # as Spark writes them
    (data / "_SUCCESS").touch()
    write_images(data / "_temporary" / "0", "parquet")
    (data / "part-000.parquet").rename(data / "_0.parquet")
    train, _ = datasets(config(data, validation_data=str(data / "_0.parquet")))
    assert equal(read(train), expected(cfg))


def test_categories_may_differ_between_groups_of_rows(tmp_path):
    """Each group of a .parquet has a dictionary of its own."""
    names, columns = [f"{i // 1024}" for i in range(3000)], {"label": "kind"}
    parts = [pyarrow.array(names[i : i + 1024]).dictionary_encode() for i in range(0, 3000, 1024)]
    table = pyarrow.table({"kind": pyarrow.chunked_array(parts)})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=1024)
    (shard,) = shards.list_shards(str(tmp_path), "data")
    shards.bring(shard, str(tmp_path), tmp_path / "unpacked", columns)
    read = shards.arrow_reader(open(tmp_path / "unpacked", "rb"), columns)
    assert [read(i)["label"] for i in range(3000)] == names


def test_copies_larger_than_their_shards_say_stay_bounded(tmp_path):
    """A .parquet tells the size of a text that is repeated once. Names may have dots."""
    (tmp_path / "rows").mkdir()
    for number in range(9):
        text = f"text {number} " * 500
        rows = [{"a.text": text, "a.label": "ab"[i % 2]} for i in range(100)]
        write_table(tmp_path / "rows" / f"{number}.parquet", rows)
    fields = {"cache_dir": str(tmp_path / "cache"), "vocab_size": 300, "max_length": 16}
    fields |= {"streaming": True, "shuffle_window": 1, "shard_cache_gb": 2e-3}
    fields |= {"text_column": "a.text", "label_column": "a.label"}
    cfg = texts.TaskConfig(data=str(tmp_path / "rows"), **fields)
    prepared = texts.prepare_data(cfg)
    train, _ = texts.datasets(cfg, prepared)
    assert min(listed(prepared)["bytes"]) > 4000
    for i in range(0, len(train), 100):
        train.read(i)
        copies = [*(tmp_path / "cache" / "shards").glob("*.parquet")]
        assert 0 < sum(file.stat().st_size for file in copies) < 2e6
    assert len(copies) == 5


def cut(path, share=0.3):
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def test_an_archive_that_is_cut_anywhere(tmp_path):
    """Either all rows are found, or an error says that it is truncated."""
    path = write_images(tmp_path / "rows", "tar", (4,)) / "part-000.tar"
    content = path.read_bytes()
    shard = shards.list_shards(str(path), "data")[0]
    found = []
    for size in range(0, len(content), 256):
        path.write_bytes(content[:size])
        try:
            index = shards.index_shard(shard, "", {}, lambda _: open(path, "rb"), None)
            found.append(index.rows)
        except ValueError as error:
            assert "part-000.tar" in str(error)
    assert {*found} == {4} and len(found) < 40


def test_missing_shards_are_named(config, tmp_path):
    data = write_images(tmp_path / "tar", "tar")
    pattern = f"{data}/part-{{000..003}}.tar"
    with pytest.raises(ValueError, match="part-003.tar: there is no such file"):
        images.prepare_data(config(pattern))
    cfg = config(pattern.replace("003", "002"), validation_fraction=0.1)
    train, _ = datasets(cfg)
    assert len(train.shards) == 2
    for shard in train.shards:
        os.unlink(shard.path)
    with pytest.raises(ValueError, match=r"cannot read .*tar: it is no longer there"):
        train[0]


def test_damaged_archives_and_rows(config, tmp_path):
    data = write_images(tmp_path / "rows", "tar", (8,) * 3)
    content = bytearray((data / "part-001.tar").read_bytes())
    with tarfile.open(data / "part-001.tar") as archive:
        members = archive.getmembers()
    broken = content[:]
    broken[members[6].offset + 150] ^= 1  # of the header's checksum
    (data / "part-001.tar").write_bytes(broken)
    with pytest.raises(ValueError, match=r"part-001.tar: the header at byte \d[\d,]+ is damaged"):
        images.prepare_data(config(data))
    content[members[6].offset_data : members[6].offset_data + 20] = b"x" * 20  # of an image
    (data / "part-001.tar").write_bytes(content)
    cfg = config(data, validation_data=str(data / "part-000.tar"))
    train, _ = datasets(cfg)
    with pytest.raises(ValueError, match="cannot read .*part-001.tar, row 3: its format is none"):
        train[8 + 3]
    cfg = config(data, validation_data=str(data / "part-000.tar"), unreadable_images="skip")
    train, _ = datasets(cfg)
    assert equal([train[8 + 3]], [train[8 + 4]])  # the next row in its place


def test_rows_without_a_label(config, tmp_path, capsys):
    (tmp_path / "rows").mkdir()
    for number in range(2):
        rows = [(i, b"" if n == "owl" else n.encode()) for i, n in pictures(4, number)]
        write_tar(tmp_path / "rows" / f"{number}.tar", members(rows, ("png", "cls")))
    with pytest.raises(ValueError, match="0.tar, row 000002: the label is empty; 2 such rows; --t"):
        images.prepare_data(config(tmp_path / "rows"))
    cfg = config(tmp_path / "rows", incomplete_rows="skip")
    train, _ = datasets(cfg)
    assert "the next row of the shard replaces each" in capsys.readouterr().out
    assert equal([train[2]], [train[3]])


def archive_with_link(kind):
    """Makes an archive with a row whose label is a link to that of another."""

    def make(path):
        write_images(path, "tar")
        link = tarfile.TarInfo("1.cls")
        link.type, link.linkname = kind, "000000.cls"
        with tarfile.open(path / "part-001.tar", "a") as archive:
            archive.addfile(link)

    return make


def join_archives(path):
    whole = path / "part-000.tar"
    write_images(path, "tar")
    whole.write_bytes(whole.read_bytes() + bytes(2**20) + (path / "part-001.tar").read_bytes())


def archive(*rows):
    return lambda path: write_tar(path / "a.tar", rows)


def shards_of(*kinds, damage=None, counts=(7, 5, 6)):
    def make(path):
        for kind in kinds:
            write_images(path, kind, counts)
        if damage:
            cut(path / damage)

    return make


@pytest.mark.parametrize(
    ("make", "fields", "problem"),
    [
        (lambda path: write_tar(path / "a.tar.gz", []), {}, "unpack it to .tar"),
        (lambda path: (path / "a.csv").write_text("a"), {}, r"no shards \(skipped 1 other file: 1"),
        (
            shards_of("tar", damage="part-001.tar"),
            {},
            "^task.data: .*part-001.tar: .*it is truncated",
        ),
        (
            shards_of("parquet", damage="part-001.parquet"),
            {},
            "^task.data: .*part-001.parquet: .*Parquet magic bytes not found in footer",
        ),
        (shards_of("tar", "parquet"), {}, "several kinds, parquet and tar: give one"),
        (archive(), {}, "task.data: no rows in"),
        (archive(("1.cls", b"a"), ("1.cls", b"b")), {}, "a.tar: the row 1 has two members cls"),
        (lambda path: (path / "a.tar").write_text("no archive"), {}, "a.tar: "),
        (archive(("1.json", b"{")), {}, "a.tar: row 1: Expecting property name"),
        (archive_with_link(tarfile.LNKTYPE), {}, "part-001.tar: 1.cls is a link: pack its content"),
        (archive_with_link(tarfile.SYMTYPE), {}, "part-001.tar: 1.cls is a link: pack its content"),
        (join_archives, {}, "000.tar: something follows the end mark at byte .*tar --concatenate"),
        (shards_of("tar"), {"cache_dir": "rows/cache"}, "rows/cache lies in task.data"),
        (
            shards_of("parquet"),
            {"label_column": "kind"},
            "no column kind among image, label; name the right one with --task.label_column",
        ),
        (
            shards_of("parquet", counts=(400,) * 5),
            {"shard_cache_gb": 0.001},
            "task.shard_cache_gb is 0.001, but two windows of 2 shards take 0.00",
        ),
        (
            shards_of(),
            {"data": "s3://bucket/x", "streaming": False, "shuffle_window": 8},
            "--task.streaming true reads shards",
        ),
        (shards_of(), {"data": "digits"}, "digits is not a folder or URL of shards"),
        (shards_of(), {"data": "owner/name"}, "its files, hf://datasets/owner/name"),
        (shards_of(), {"data": "x.tar", "streaming": False}, "unless task.streaming is true"),
        (shards_of(), {"data": "./nothing"}, "task.data: ./nothing: there is no such file or"),
        (shards_of("tar"), {"data": "rows/part-{002..000}.tar"}, "the range in braces is empty"),
        (
            lambda path: write_images(path / "_old", "tar"),
            {},
            r"no shards \(skipped 3 other files: 3 .tar\)",
        ),
        (
            shards_of(),
            {"data": "https://me:x@y/z.tar"},
            "must be a URL without credentials",
        ),
        (shards_of(), {"data": "ftx://x/y.tar"}, "cannot open ftx://x/y.tar: Protocol not known"),
    ],
)
def test_data_that_cannot_be_streamed(config, tmp_path, monkeypatch, make, fields, problem):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows").mkdir()
    make(tmp_path / "rows")
    with pytest.raises(ValueError, match=problem) as error:
        datasets(config(**{"data": tmp_path / "rows", **fields}))
    assert "\n" not in str(error.value)


# ---- Training ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return bake(tmp_path_factory.mktemp("streams"), task="image_classification", tracker="none")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """Eight shards of .tar, seen as a store, of which one is held out."""
    folder = write_images(tmp_path_factory.mktemp("shelf") / "rows", "tar", (11, 9) * 4)
    return f"file://{folder}"


def losses(output):
    return [(line["step"], line["loss"], line["batch_hash"]) for line in lines(output, "loss")]


@pytest.mark.slow
def test_processes_and_kills_change_nothing(project, shelf):
    """As for prepared data: 1, 2 and 4 processes; killed between two checkpoints and continued."""
    flags = [*SHORT, *STREAMED, "--task.data", shelf, "--max_steps", 12, "--save_every", 4]
    flags += ["--task.cache_dir", ".cache/shelf", "--keep_checkpoints", 0]
    found = {}
    for processes in (1, 2, 4):
        output = project.path / "runs" / f"shelf-{processes}"
        project.train(processes, *flags, "--output_dir", output)
        found[processes] = losses(output)
        for one, other in zip(found[1], found[processes], strict=True):
            assert one[::2] == other[::2] and one[1] == pytest.approx(other[1], rel=1e-5)
        (score,) = lines(output, "eval_loss")
        (first,) = lines(project.path / "runs" / "shelf-1", "eval_loss")
        assert score["accuracy"] == first["accuracy"]
    for processes, workers in ((2, 0), (1, 2)):
        output = project.path / "runs" / f"killed-{processes}"
        more = [*flags, "--output_dir", output, "--num_workers", workers]
        runs = project.start(processes, *more)
        wait_until(functools.partial(trained, output, 6), runs[0])
        for run in runs:
            run.kill()
            run.wait()
        project.train(processes, *more)
        whole = project.path / "runs" / f"shelf-{processes}"
        last = "checkpoints/step-00000012"
        assert digest(whole / last) == digest(output / last)


# Prepared rows have no windows, and are sorted by their length.
ONE_SOURCE = """

from samestep.data.sources import Source


def sources(dataset):
    return [Source("data", len(dataset), 1, None, 1)]
"""


@pytest.mark.slow
@pytest.mark.parametrize("task", ["image_classification", "text_classification"])
def test_streaming_equals_prepared(tmp_path, task):
    """The same rows in the same order give the same losses to the last bit."""
    project = bake(tmp_path, task=task, tracker="none")
    write, flags, code = write_images, SHORT, ONE_SOURCE
    if task == "text_classification":
        write, flags = write_texts, TEXT
        code += "\n\ndef sizes(dataset):\n    return np.zeros(len(dataset), int)\n"
    with open(project.path / "task.py", "a", encoding="utf-8") as file:
        file.write(code)
    data = write(tmp_path / "rows", "parquet", (30, 20))
    held = write(tmp_path / "held", "parquet", (10,), seed=1)
    flags = [*flags, "--task.data", data, "--task.validation_data", held, "--max_steps", 8]
    runs = [project.path / "runs" / name for name in ("streamed", "prepared")]
    project.train(1, *flags, "--task.streaming", "true", "--output_dir", runs[0])
    flags += ["--task.streaming", "false", "--task.shuffle_window", 8]
    project.train(1, *flags, "--output_dir", runs[1])
    assert losses(runs[0]) == losses(runs[1]) and len(losses(runs[0])) == 8
    assert lines(runs[0], "eval_loss")[0] == lines(runs[1], "eval_loss")[0]


# A store that fails where there is a file `down`.
SHAKY = """
import os
import fsspec
from fsspec.implementations.local import LocalFileSystem
from samestep.streaming import shards

class Shaky(LocalFileSystem):
    protocol = "shaky"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("shaky://"))

    def get_file(self, path, target, **_):
        if os.path.exists("down") and "part-000" not in path:
            raise OSError("503 Slow Down")
        super().get_file(path, target)

fsspec.register_implementation("shaky", Shaky)
shards.WAITS = (0.01, 0.01)
"""


@pytest.mark.slow
def test_store_that_fails_ends_a_run_that_can_continue(tmp_path):
    """Exit code 1, for launchers that try again; the same command goes on."""
    project = bake(tmp_path, task="image_classification", tracker="none")
    data = write_images(tmp_path / "rows", "tar", (11, 9) * 4)
    with open(project.path / "task.py", "a", encoding="utf-8") as file:
        file.write(SHAKY)
    flags = [*SHORT, *STREAMED, "--max_steps", 12, "--save_every", 2]
    flags += ["--task.data", f"shaky://{data}"]
    whole, output = (project.path / "runs" / name for name in ("whole", "again"))
    project.train(1, *flags, "--output_dir", whole)
    shutil.rmtree(project.path / ".cache" / "data" / "shards")
    (project.path / "down").touch()
    printed = project.train(2, *flags, "--output_dir", output, codes=[1])
    text = "the store failed 3 times, the last time with 503 Slow Down; the same command continues"
    assert text in printed and "Traceback" not in printed
    (project.path / "down").unlink()
    project.train(1, *flags, "--output_dir", output)
    assert losses(output) == losses(whole)


@pytest.mark.parametrize(
    "url, clean",
    [
        ("https://me:x@host:8/a.tar?sig=1&se=2", "https://host:8/a.tar"),
        ("https://token@host/a", "https://host/a"),
        ("https://host/a?versionId=3&token=x", "https://host/a?versionId=3"),
        ("s3://KEY:SE/CR+ET@bucket/a", "s3://bucket/a"),
        ("gs://bucket/a?access_token=x", "gs://bucket/a"),
        ("simplecache::ftp://me:x@y@host/a", "simplecache::ftp://host/a"),
        ("cannot read URL('https://h/a?sig=x'): 403", "cannot read URL('https://h/a'): 403"),
        *((each, each) for each in (
            "hf://datasets/owner/name@main/a:b", "abfs://container@account/a", "a?b", "/a:b@c",
            "http://host:80/a@b.tar", "s3://bucket/a:b@c", "github://owner:name@main/a", "why?://",
        )),
    ],
)  # fmt: skip
def test_what_counts_as_a_credential(url, clean):
    assert console.without_credentials(url) == console.one_line(url) == clean


def test_texts_of_every_format(tmp_path):
    found = []
    for kind in KINDS:
        fields = {"cache_dir": str(tmp_path / "cache"), "vocab_size": 300, "streaming": True}
        data, held = (write_texts(tmp_path / kind / name, kind) for name in ("rows", "held"))
        fields |= {"max_length": 16, "validation_data": str(held), "text_pair_column": "start"}
        cfg = texts.TaskConfig(data=str(data), **fields)
        prepared = texts.prepare_data(cfg)
        train, validation = texts.datasets(cfg, prepared)
        rows = train.__getitems__(range(90))
        found.append([{n: v.tolist() for n, v in row.items()} for row in rows])
        assert found[-1] == found[0] and len(validation) == 90
        assert json.loads((prepared / "names.json").read_text()) == ["dog", "no"]
