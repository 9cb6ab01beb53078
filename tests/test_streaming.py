"""Rows read from shards: the index is made once, the copies on this disk stay bounded, and the
promises of prepared data hold.
"""

import contextlib
import functools
import json
import multiprocessing
import os
import pickle
import shutil
import time
import tracemalloc
from multiprocessing.pool import ThreadPool

import fsspec
import numpy as np
import pyarrow
import pytest
from fsspec.implementations.local import LocalFileSystem
from pyarrow import parquet

from conftest import bake, digest, lines, load_task, trained, wait_until
from samestep.base import console
from samestep.step import batches
from samestep.streaming import shards, streaming

texts = load_task("text_classification")

STREAMED = ["--task.streaming", "true", "--task.shuffle_window", 2]
FLAGS = ["--task.max_length", 16, "--task.hidden_size", 32, "--task.num_heads", 2]
FLAGS += ["--task.vocab_size", 400, "--global_batch_size", 16, "--micro_batch_size", 4]
FLAGS += ["--log_every", 1, "--warmup_steps", 2]


class CountingStore(LocalFileSystem):
    """Local files as a store: names what is opened, and fails as often as it is told."""

    protocol = "counting"
    opened: list[str] = []
    failures: list[Exception] = []

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("counting://"))

    def _open(self, path, *arguments, **options):
        if self.failures:
            raise self.failures.pop()
        self.opened.append(os.path.basename(path))
        return super()._open(path, *arguments, **options)


fsspec.register_implementation("counting", CountingStore)


@pytest.fixture(autouse=True)
def store(monkeypatch):
    """A store of local files: a path behind counting://."""
    monkeypatch.setattr(CountingStore, "opened", [])
    monkeypatch.setattr(CountingStore, "failures", [])
    monkeypatch.setattr(shards, "WAITS", (0, 0))
    return CountingStore


@pytest.fixture
def config(tmp_path):
    """Settings of a very small task, with the data given as keywords."""

    def make(data, **fields):
        small = {"vocab_size": 300, "max_length": 16, "shuffle_window": 2, "streaming": True}
        small["cache_dir"] = str(tmp_path / "cache")
        return texts.TaskConfig(**{"data": str(data), **small, **fields})

    return make


# ---- Shards --------------------------------------------------------------------------------------


def write_table(path, rows, **options):
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, **options)


WORDS = "red green blue dog cat house tree sun moon sea".split()


def make_rows(count, seed, number, words=(3, 8)):
    """Rows of a shard, of three classes."""
    rng = np.random.default_rng([seed, number])
    for i in range(count):
        text = " ".join(
            [*rng.choice(WORDS, rng.integers(*words, endpoint=True)), f"{seed} {number} {i}"]
        )
        yield {"text": text, "start": text.split()[0], "label": ("cat", "dog", "owl")[i % 3]}


def write_texts(folder, counts=(7, 5, 6), seed=0, words=(3, 8)):
    """Shards with so many rows each."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, count in enumerate(counts):
        rows = [*make_rows(count, seed, number, words)]
        write_table(folder / f"part-{number:03}.parquet", rows, row_group_size=max(3, count // 4))
    return folder


def expected(counts=(7, 5, 6), seed=0):
    """The rows that `write_texts` writes, as a task reads them."""
    rows = [row for number, count in enumerate(counts) for row in make_rows(count, seed, number)]
    return [{"text": row["text"], "label": row["label"]} for row in rows]


def read(dataset):
    return [dataset.read(i) for i in range(len(dataset))]


def datasets(cfg):
    """The training and the validation rows."""
    return texts.views(cfg, texts.prepare_data(cfg))


def digest_of(cfg):
    return texts.cache.content_digest(texts.prepare_data(cfg))


def listed(prepared, part="train"):
    return json.loads((prepared / f"{part}.json").read_text())


def ids_of(row):
    return row["input_ids"].tolist()


@pytest.mark.parametrize("scheme", ["", "counting://"])
def test_rows_are_those_of_the_shards(config, tmp_path, scheme):
    held = write_texts(tmp_path / "held", (4,), seed=1)
    data = write_texts(tmp_path / "rows")
    cfg = config(f"{scheme}{data}", validation_data=f"{scheme}{held}")
    prepared = texts.prepare_data(cfg)
    train, validation = texts.views(cfg, prepared)
    assert read(train) == expected() and read(validation) == expected((4,), 1)
    (source,) = train.sources
    assert [*source.shards] == [7, 5, 6] and (source.rows, source.window) == (18, 2)
    again = pickle.loads(pickle.dumps(train))
    rows = again.__getitems__([17, 0, 9])
    assert [*map(ids_of, rows)] == [ids_of(train[i]) for i in (17, 0, 9)]
    assert len(pickle.dumps(train)) < 3000
    assert json.loads((prepared / "names.json").read_text()) == ["cat", "dog", "owl"]


def test_digest_depends_on_content_and_not_on_place_or_time(config, tmp_path):
    first = digest_of(config(write_texts(tmp_path / "a")))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    os.utime(tmp_path / "b" / "part-000.parquet", (1, 1))
    assert digest_of(config(tmp_path / "b")) == first
    assert digest_of(config(f"counting://{tmp_path / 'a'}")) == first
    assert digest_of(config(write_texts(tmp_path / "c", (7, 5, 5)))) != first
    assert digest_of(config(tmp_path / "a", validation_fraction=0.9)) != first


# ---- Index ---------------------------------------------------------------------------------------


def test_index_goes_on_where_it_was_and_names_a_changed_shard(
    config, tmp_path, monkeypatch, capsys
):
    data, seen, index = write_texts(tmp_path / "rows", (3,) * 6), [], shards.index_shard
    cfg, stops = config(data), [4]

    def index_some(shard, *arguments):
        if [len(seen)] == stops:
            raise RuntimeError("interrupted")
        seen.append(shard.name)
        return index(shard, *arguments)

    monkeypatch.setattr(streaming, "THREADS", 1)
    monkeypatch.setattr(shards, "index_shard", index_some)
    with pytest.raises(RuntimeError):
        texts.prepare_data(cfg)
    stops.clear()
    first = texts.prepare_data(cfg)
    assert sorted(seen) == [f"part-{i:03}.parquet" for i in range(6)]  # each once
    assert texts.prepare_data(cfg) == first and len(seen) == 6
    write_texts(tmp_path / "other", (4,), seed=5)
    shutil.copy(tmp_path / "other" / "part-000.parquet", data / "part-002.parquet")
    capsys.readouterr()
    second = texts.prepare_data(cfg)
    assert seen[6:] == ["part-002.parquet"] and second != first
    assert f"{data}/part-002.parquet has changed: indexing it again" in capsys.readouterr().out
    content = texts.cache.content_digest(second)
    assert content != texts.cache.content_digest(first)
    for record in (tmp_path / "cache" / "shard_index").iterdir():  # damaged
        record.write_bytes(record.read_bytes()[:40])
    shutil.rmtree(second)
    assert digest_of(cfg) == content and len(seen) == 13


def test_whole_shards_are_held_out(config, tmp_path):
    data = write_texts(tmp_path / "rows", (10,) * 10)
    held = {}
    for fraction in (0.02, 0.05, 0.35):
        cfg = config(data, validation_fraction=fraction)
        train, validation = datasets(cfg)
        held[fraction] = {shard.name for shard in validation.shards}
        assert not held[fraction] & {shard.name for shard in train.shards}
        assert len(train) == 100 - 10 * len(held[fraction])
        assert len(validation) == min(round(100 * fraction), 10 * len(held[fraction]))
        assert len({*map(validation.locate, range(len(validation)))}) == len(validation)
    assert [*map(len, held.values())] == [1, 2, 4] and held[0.02] < held[0.05] < held[0.35]
    few = config(data, validation_fraction=0.35, validation_rows=25)
    assert {shard.name for shard in datasets(few)[1].shards} < held[0.35]
    assert validation.sources[0].shards is None
    with pytest.raises(ValueError, match="has rows in one shard alone, so that none can be held"):
        texts.prepare_data(config(data / "part-001.parquet"))


def test_shards_of_splits_are_known_by_their_names(config, tmp_path, capsys):
    for number, split in enumerate(("train", "val", "test")):
        write_texts(tmp_path / "rows" / split, seed=number)
    cfg = config(f"counting://{tmp_path}/rows")
    prepared = texts.prepare_data(cfg)
    for part, split in (("train", "train"), ("validation", "val")):
        names = [name for name, *_ in listed(prepared, part)["shard"]]
        assert names == [f"{split}/part-{i:03}.parquet" for i in range(3)]
    said = "has, by the names: 3 files to train on, 3 to evaluate on; not read: 3 for test"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("scheme", ["", "counting://", "link", "file://"])
def test_a_shard_replaced_by_one_of_equal_size_and_time_is_seen(config, tmp_path, scheme, capsys):
    """In its place, beside it or where a link leads: texts that swap their labels are other
    data."""
    data = tmp_path / "rows"
    data.mkdir()
    paths = [data / f"{number}.parquet" for number in range(2)]
    if scheme in ("link", "file://"):
        links, paths = paths, [tmp_path / path.name for path in paths]
        for link, path in zip(links, paths, strict=True):
            link.symlink_to(path)
    scheme = scheme.removeprefix("link")

    def write(*words):
        rows = [{"text": f"{words[i % 2]} {i}", "label": "ab"[i % 2]} for i in range(8)]
        options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
        for path in paths:
            write_table(path, rows, **options)
        return [path.stat() for path in paths]

    times = write("good", "evil")
    first = digest_of(config(f"{scheme}{data}"))
    assert digest_of(config(f"{scheme}{data}")) == first
    capsys.readouterr()
    for path, new, old in zip(paths, write("evil", "good"), times, strict=True):
        assert new.st_size == old.st_size
        os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))
    assert digest_of(config(f"{scheme}{data}")) != first
    assert capsys.readouterr().out.count("has changed: indexing it again") == 2


def test_linked_shards_and_folders_are_read_and_broken_links_refused(config, tmp_path):
    data, held = (write_texts(tmp_path / name) for name in ("rows", "held"))
    (tmp_path / "cached").mkdir()
    (tmp_path / "cached" / "0.parquet").symlink_to(data / "part-000.parquet")
    (data / "part-000.parquet").rename(tmp_path / "blob")
    (data / "part-000.parquet").symlink_to(tmp_path / "blob")
    (tmp_path / "cached" / "more").symlink_to(data)
    train, _ = datasets(config(tmp_path / "cached", validation_data=str(held)))
    assert read(train) == expected()[:7] + expected()
    (data / "part-001.parquet").unlink()
    (data / "part-001.parquet").symlink_to("none")
    with pytest.raises(ValueError, match="task.data: .*/more/part-001.parquet is a broken link"):
        texts.prepare_data(config(tmp_path / "cached", validation_data=str(held)))


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


def test_rows_on_both_sides_are_said(config, tmp_path, capsys, monkeypatch):
    """Of equal shards, and of a shard that is given, whatever the labels."""
    (tmp_path / "a").mkdir()

    def write(name, some, labels):
        rows = [{"text": text, "label": labels[i % 2]} for i, text in enumerate(some)]
        write_table(tmp_path / name, rows)

    def overlap_of(data, **fields):
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        capsys.readouterr()
        texts.prepare_data(config(data, **fields))
        found = [line for line in capsys.readouterr().out.splitlines() if " rows too: " in line]
        return found and found[0].removeprefix("Preparing data: ").partition(" validation rows")[0]

    given = str(tmp_path / "given.parquet")
    write("given.parquet", ["text 1 3", "other", "text 0 9", "text 1 3"], "ba")
    for number in range(6):
        write(f"a/{number}.parquet", [f"text {number % 3} {i}" for i in range(10)], "ab")
    assert overlap_of(tmp_path / "a", validation_data=given) == "3 of 4"
    assert overlap_of(f"counting://{tmp_path / 'a'}", validation_data=given) == "3 of 4"
    # Of six shards two by two are equal.
    assert overlap_of(tmp_path / "a", validation_fraction=0.1) == "6 of 6"
    for number in range(3, 6):
        os.unlink(tmp_path / f"a/{number}.parquet")
    assert overlap_of(tmp_path / "a", validation_fraction=0.4) == []
    monkeypatch.setattr(streaming, "COMPARED", 15)
    assert overlap_of(tmp_path / "a", validation_data=given).startswith("at least ")


# ---- Copies on this machine ----------------------------------------------------------------------


def in_order(dataset, seed=0, passes=1):
    """The rows of a training, as train.py reads them."""
    rows = batches.SampleDataset(dataset, None, seed)
    return rows, range(0, passes * len(dataset), 4)


def bytes_of_copies(folder):
    """A copy and the place that is kept for it count once. A background copy may delete a file."""
    sizes = {}
    for file in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            size = streaming.room_of(file) if file.suffix == ".partial" else file.stat().st_size
            sizes[file.name.partition(".")[0]] = max(size, sizes.get(file.name, 0))
    return sum(sizes.values())


@pytest.fixture
def large(config, tmp_path):
    """Training rows of shards of 100 kB, without copies, and the bytes of a copy."""

    def make(count, scheme="counting://", copies=None, **fields):
        data = write_texts(tmp_path / "rows", (12,) * count, words=(2000, 2000))
        train, _ = datasets(config(f"{scheme}{data}", **fields))
        size = max(each.stat().st_size for each in tmp_path.glob("cache/shards/*.parquet"))
        shutil.rmtree(tmp_path / "cache" / "shards")
        CountingStore.opened.clear()
        if copies:
            train.cfg.shard_cache_gb = copies * size / 1e9
        return pickle.loads(pickle.dumps(train)), size, tmp_path / "cache" / "shards"

    return make


def test_reads_stay_in_a_window_and_copies_stay_bounded(large, store):
    """Each shard is copied once a pass, and the folder never holds more than the field allows."""
    train, size, folder = large(12, copies=5.5)
    rows, starts = in_order(train)
    opened, used = [], []
    for start in starts:
        found = rows.__getitems__(range(start, min(start + 4, len(train))))
        opened.append({train.locate(i)[0] for i, _ in found})
        used.append(bytes_of_copies(folder))
        time.sleep(0.01)
    assert max(used) <= 5.5 * size
    seen = [number for numbers in opened for number in numbers]
    for number in seen:  # a window has 2 shards, thus 6 batches
        places = [i for i, numbers in enumerate(opened) if number in numbers]
        assert places[-1] - places[0] <= 6
    expected = {shard.name for shard in train.shards}
    assert {*store.opened} == expected and len(store.opened) <= len(expected) + 2  # the next pass


def test_copies_wait_for_room_and_what_the_dead_have_left_goes(large, monkeypatch):
    train, size, folder = large(9, shuffle_window=1, copies=2.5)
    folder.mkdir()
    (folder / f"dead.{9 * size}.partial").touch()
    used, unpack = [], shards.unpack

    def unpack_slowly(*arguments):
        unpack(*arguments)
        time.sleep(0.2)
        used.append(bytes_of_copies(folder))

    monkeypatch.setattr(shards, "unpack", unpack_slowly)
    with ThreadPool(4) as pool:
        pool.starmap(train.cache.bring, zip(train.shards, train.bytes, strict=True))
    assert len(used) == len(train.shards) and max(used) <= 2.5 * size
    assert not [*folder.glob("*.partial")]


def test_memory_does_not_grow_with_a_group_of_rows(tmp_path):
    rng, found = np.random.default_rng(0), []
    for rows in (2000, 6000):
        data = tmp_path / str(rows)
        data.mkdir()
        table = [{"text": rng.bytes(5000), "label": "ab"[i % 2]} for i in range(rows)]
        write_table(data / "a.parquet", table)
        columns = {"text": "text", "label": "label"}
        (shard,), target = shards.list_shards(str(data), "data"), tmp_path / "unpacked"
        tracemalloc.start()
        shards.unpack(shard, str(data), target, columns)
        found.append(tracemalloc.get_traced_memory()[1])  # what was read of the file
        tracemalloc.stop()
    assert found[1] < 1.2 * found[0] < target.stat().st_size


def test_next_window_is_fetched_ahead(large, store):
    train, _, _ = large(12, validation_fraction=0.05)
    rows, starts = in_order(train)
    for start in starts[:5]:  # of the first window, of 24 rows
        found = rows.__getitems__(range(start, start + 4))
    wait_until(lambda: len(store.opened) >= 4)
    later = {train.locate(i)[0] for i in rows.ids(range(24, 48))}
    assert {train.shards[n].name for n in later} <= {*store.opened}
    assert len(store.opened) == 4 and found


def read_all(dataset, seed, queue):
    rows, starts = in_order(dataset, seed)
    found = [row for start in starts for row in rows.__getitems__(range(start, start + 4))]
    queue.put({i: ids_of(row) for i, row in found})


def test_processes_share_the_copies(large):
    """Four processes, each in an order of its own, and room for a third of the shards."""
    train, _, folder = large(13, "file://", validation_fraction=0.05, copies=4.5)
    wanted = {i: ids_of(train[i]) for i in range(len(train))}
    fork = multiprocessing.get_context("fork")
    queue = fork.Queue()
    started = [fork.Process(target=read_all, args=(train, seed, queue)) for seed in range(4)]
    for each in started:
        each.start()
    assert [queue.get(timeout=60) for _ in started] == [wanted] * 4
    for each in started:
        each.join()
    read(train)  # a process that ends leaves the copies that it had begun
    wait_until(lambda: not [*folder.glob("*.partial")])


# ---- What goes wrong -----------------------------------------------------------------------------


def test_store_that_fails_for_a_moment(large, store):
    train, _, folder = large(2, validation_fraction=0.1)
    store.failures += [OSError("reset")] * 2
    assert train.read(0) and not store.failures
    train, shard = pickle.loads(pickle.dumps(train)), train.shards[0]
    shutil.rmtree(folder)
    store.failures += [OSError("connection reset by peer")] * 40
    with pytest.raises(ConnectionError) as error:
        train.cache.bring(shard, 1)
    text = "the store failed 3 times, the last time with connection reset by peer"
    assert str(error.value) == f"cannot read {shard.path}: {text}"
    store.failures.clear()
    store.failures += [PermissionError("403 Forbidden")]
    with pytest.raises(ValueError, match="cannot read .*: 403 Forbidden"):
        train.cache.bring(shard, 1)
    assert not [*folder.glob("*.partial")]


def test_patterns_of_several_folders_and_a_folder_named_like_a_shard(config, tmp_path):
    """All folders are read, also below a hidden one; names are those below what they share."""
    for number in range(2):
        write_texts(tmp_path / ".store" / f"rows-{number}", seed=number)
    cfg = config(f"{tmp_path}/.store/rows-{{0..1}}", validation_fraction=0.01)
    prepared = texts.prepare_data(cfg)
    shards_of = [*listed(prepared)["shard"], *listed(prepared, "validation")["shard"]]
    names = sorted(name for name, *_ in shards_of)
    assert names == [f"rows-{n}/part-{i:03}.parquet" for n in range(2) for i in range(3)]
    train, validation = texts.views(cfg, prepared)
    held = sum(listed(prepared, "validation")["rows"])
    assert len(read(train)) + held == 36 and read(validation)
    data = write_texts(
        tmp_path / "rows.parquet",
    )  # as Spark writes them
    (data / "_SUCCESS").touch()
    write_texts(data / "_temporary" / "0")
    (data / "part-000.parquet").rename(data / "_0.parquet")
    train, _ = datasets(config(data, validation_data=str(data / "_0.parquet")))
    assert read(train) == expected()


def test_categories_may_differ_between_groups_of_rows(tmp_path):
    """Each group of a .parquet has a dictionary of its own."""
    names, columns = [f"{i // 1024}" for i in range(3000)], {"label": "kind"}
    parts = [pyarrow.array(names[i : i + 1024]).dictionary_encode() for i in range(0, 3000, 1024)]
    table = pyarrow.table({"kind": pyarrow.chunked_array(parts)})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=1024)
    (shard,) = shards.list_shards(str(tmp_path), "data")
    shards.unpack(shard, str(tmp_path), tmp_path / "unpacked", columns)
    read = shards.arrow_reader(open(tmp_path / "unpacked", "rb"), columns)
    assert [read(i)["label"] for i in range(3000)] == names


def test_copies_larger_than_their_shards_say_stay_bounded(config, tmp_path):
    """A .parquet tells the size of a text that is repeated once. Names may have dots."""
    (tmp_path / "rows").mkdir()
    for number in range(9):
        text = f"text {number} " * 500
        rows = [{"a.text": text, "a.label": "ab"[i % 2]} for i in range(100)]
        write_table(tmp_path / "rows" / f"{number}.parquet", rows)
    fields = {"shuffle_window": 1, "shard_cache_gb": 2e-3}
    fields |= {"text_column": "a.text", "label_column": "a.label"}
    cfg = config(tmp_path / "rows", **fields)
    prepared = texts.prepare_data(cfg)
    train, _ = texts.views(cfg, prepared)
    assert min(listed(prepared)["bytes"]) > 4000
    for i in range(0, len(train), 100):
        train.read(i)
        copies = [*(tmp_path / "cache" / "shards").glob("*.parquet")]
        assert 0 < sum(file.stat().st_size for file in copies) < 2e6
    assert len(copies) == 5


def test_missing_shards_are_named(config, tmp_path):
    pattern = f"{write_texts(tmp_path / 'rows')}/part-{{000..003}}.parquet"
    with pytest.raises(ValueError, match="part-003.parquet: there is no such file"):
        texts.prepare_data(config(pattern))
    train, _ = datasets(config(pattern.replace("003", "002"), validation_fraction=0.1))
    assert len(train.shards) == 2
    shutil.rmtree(tmp_path / "cache" / "shards")
    for shard in train.shards:
        os.unlink(shard.path)
    with pytest.raises(ValueError, match=r"cannot read .*parquet: there is no such file"):
        train[0]


def test_damaged_shards_are_named(config, tmp_path):
    """One whose footer and labels can be read, and one that changed since the start."""
    data = write_texts(tmp_path / "rows", (8,) * 3)
    path = data / "part-001.parquet"
    held = str(data / "part-000.parquet")
    train, _ = datasets(config(data, validation_data=held))
    content, first = path.read_bytes(), parquet.read_metadata(path).row_group(0).column(0)
    shutil.rmtree(tmp_path / "cache" / "shards")
    start = first.dictionary_page_offset
    path.write_bytes(content[:start] + b"x" * 40 + content[start + 40 :])
    with pytest.raises(ValueError, match="part-001.parquet: it has changed since the start; start"):
        train.read(8)
    with pytest.raises(ConnectionError, match="cannot read .*part-001.parquet: .*deserialize"):
        read(datasets(config(data, validation_data=held))[0])


def test_rows_without_a_label(config, tmp_path, capsys):
    for number in range(2):
        rows = [{"text": f"text {i}", "label": ["a", "b", None][i % 3]} for i in range(4)]
        write_table(tmp_path / f"{number}.parquet", rows)
    pattern = f"{tmp_path}/{{0..1}}.parquet"
    with pytest.raises(ValueError, match="0.parquet, row 2: the label is empty; 2 such rows; --t"):
        texts.prepare_data(config(pattern))
    train, _ = datasets(config(pattern, incomplete_rows="skip"))
    assert "the next row of the shard replaces each" in capsys.readouterr().out
    assert train.read(2) == train.read(3) == {"text": "text 3", "label": "a"}


def shards_of(counts=(7, 5, 6), damaged=""):
    def make(path):
        write_texts(path, counts)
        if damaged:
            content = (path / damaged).read_bytes()
            (path / damaged).write_bytes(content[: len(content) // 3])

    return make


@pytest.mark.parametrize(
    ("make", "fields", "problem"),
    [
        (
            lambda path: (path / "a.tar").touch(),
            {},
            r"no shards \(skipped 1 other file: 1 .tar\); task.streaming reads .parquet files",
        ),
        (
            shards_of(damaged="part-001.parquet"),
            {},
            "^task.data: .*part-001.parquet: .*Parquet magic bytes not found in footer",
        ),
        (shards_of([]), {}, "task.data: .*rows: no shards; task"),
        (
            lambda path: (write_texts(path) / "a.tar").touch(),
            {},
            "rows: has 1 .tar archives, which task.streaming does not read; move them elsewhere",
        ),
        (shards_of(), {"cache_dir": "rows/cache"}, "rows/cache lies in task.data"),
        (
            shards_of(),
            {"label_column": "kind"},
            "no column kind among text, start, label; name the right one with --task.label_column",
        ),
        (
            shards_of((400,) * 5),
            {"shard_cache_gb": 1e-5},
            "task.shard_cache_gb is 1e-05, but two windows of 2 shards take",
        ),
        (
            shards_of([]),
            {"data": "s3://bucket/x", "streaming": False, "shuffle_window": 8},
            "--task.streaming true reads shards",
        ),
        (shards_of([]), {"data": "stdlib"}, "stdlib is not a folder or URL of shards"),
        (shards_of([]), {"data": "owner/name"}, "its files, hf://datasets/owner/name"),
        (shards_of(), {"streaming": False}, "unless task.streaming is true"),
        (shards_of([]), {"data": "./nothing"}, "task.data: ./nothing: there is no such file or"),
        (shards_of(), {"data": "rows/part-{002..000}.parquet"}, "the range in braces is empty"),
        (
            lambda path: write_texts(path / "_old"),
            {},
            r"no shards \(skipped 3 other files: 3 .parquet\)",
        ),
        (shards_of([]), {"data": "https://me:x@y/z"}, "must be a URL without credentials"),
        (shards_of([]), {"data": "ftx://x/y"}, "cannot open ftx://x/y: Protocol not known"),
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
    return bake(tmp_path_factory.mktemp("streams"), task="text_classification", tracker="none")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """Eight shards, seen as a store, of which one is held out."""
    folder = write_texts(tmp_path_factory.mktemp("shelf") / "rows", (11, 9) * 4)
    return f"file://{folder}"


def losses(output):
    return [(line["step"], line["loss"], line["batch_hash"]) for line in lines(output, "loss")]


@pytest.mark.slow
def test_processes_and_kills_change_nothing(project, shelf):
    """As for prepared data: 1, 2 and 4 processes; killed between two checkpoints and continued."""
    flags = [*FLAGS, *STREAMED, "--task.data", shelf, "--max_steps", 12, "--save_every", 4]
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

own_views = views


def views(cfg, data):
    found = own_views(cfg, data)
    for each in found:
        each.sources = [Source("data", len(each), 1, None, 1)]
        each.sizes = lambda number=len(each): np.zeros(number, int)
    return found
"""


@pytest.mark.slow
def test_streaming_equals_prepared(tmp_path):
    """The same rows in the same order give the same losses to the last bit."""
    project = bake(tmp_path, task="text_classification", tracker="none")
    with open(project.path / "task.py", "a", encoding="utf-8") as file:
        file.write(ONE_SOURCE)
    data, held = write_texts(tmp_path / "rows", (30, 20)), write_texts(tmp_path / "held", (10,), 1)
    flags = [*FLAGS, "--task.data", data, "--task.validation_data", held, "--max_steps", 8]
    flags += ["--task.text_pair_column", "start"]
    runs = [project.path / "runs" / name for name in ("streamed", "prepared")]
    project.train(1, *flags, "--task.streaming", "true", "--output_dir", runs[0])
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

    def _open(self, path, *arguments, **options):
        if os.path.exists("down") and "part-000" not in path:
            raise OSError("503 Slow Down")
        return super()._open(path, *arguments, **options)

fsspec.register_implementation("shaky", Shaky)
shards.WAITS = (0.01, 0.01)
"""


@pytest.mark.slow
def test_store_that_fails_ends_a_run_that_can_continue(tmp_path):
    """Exit code 1, for launchers that try again; the same command goes on."""
    project = bake(tmp_path, task="text_classification", tracker="none")
    data = write_texts(tmp_path / "rows", (11, 9) * 4)
    with open(project.path / "task.py", "a", encoding="utf-8") as file:
        file.write(SHAKY)
    flags = [*FLAGS, *STREAMED, "--max_steps", 12, "--save_every", 2]
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
