"""Rows that are prepared in units: the same bytes on any number of cores, after any interruption.

Units have a few kB here, so that little data makes many of them.
"""

import contextlib
import csv
import errno
import gzip
import io
import itertools
import json
import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

import reference
from conftest import ROOT, SOURCE, load_task
from samestep.base import workers
from samestep.data import cache, tables
from samestep.text import corpus, token_rows, tokenizing, unit_files, units

IGNORE_INDEX = -100
WORDS = "the quick brown fox jumps over a lazy dog and runs far away".split()
UNIT = 3000  # bytes
KINDS = ("jsonl", "csv", "parquet", "json", "jsonl.gz", "jsonl.zst", "csv.gz", "tsv")
SMALL = {"vocab_size": 300, "hidden_size": 16, "num_heads": 2, "num_layers": 1}


def make_texts(number, seed=0):
    """Different texts of a few words, with a comma, a quote and sometimes a line break in them."""
    draw = random.Random(seed)
    return [
        f'{i}, "{seed}" ' + " ".join(draw.choices(WORDS, k=10)) + "\nü end." * (i % 3 == 0)
        for i in range(number)
    ]


TEXTS = make_texts(300)


@pytest.fixture
def task():
    return load_task("causal_lm")


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    """Changes the size of units; a few kB at first."""
    monkeypatch.setattr(tables, "BLOCK", 1024)
    monkeypatch.setattr(tables, "SEARCHED", 64)

    def change(size):
        monkeypatch.setattr(units, "SMALLEST", size)
        monkeypatch.setattr(units, "LARGEST", size)

    change(UNIT)
    return change


@pytest.fixture
def config(tmp_path):
    def make(data, where="cache", name="causal_lm", **fields):
        small = SMALL | {"cache_dir": str(tmp_path / where)}
        small |= {"context_length": 32} if name == "causal_lm" else {}
        return load_task(name).TaskConfig(data=str(data), **{**small, **fields})

    return make


def write(path, texts=TEXTS):
    """The texts as a file whose kind is that of its name."""
    kind, _, compression = path.name.partition(".")[2].partition(".")
    rows, content = [{"text": each} for each in texts], io.StringIO(newline="")
    if kind == "parquet":
        pa.parquet.write_table(pa.table({"text": texts}), path, row_group_size=20)
        return path
    if kind in ("csv", "tsv"):
        table = csv.writer(content, delimiter="\t" if kind == "tsv" else ",")
        table.writerows([["text"], *([each] for each in texts)])
    elif kind == "txt":
        content.writelines(f"{each}\n" for each in texts)
    elif kind == "json":
        json.dump(rows, content)
    else:
        content.writelines(json.dumps(row) + "\n" for row in rows)
    compress = {"": bytes, "gz": gzip.compress, "zst": lambda data: pa.compress(data, "zstd")}
    path.write_bytes(compress[compression](content.getvalue().encode()))
    return path


def write_rows(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def contents(folder):
    """The bytes of each file of a prepared folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def times(folder, pattern="*"):
    """When files of units were written; a file that is replaced has another inode."""
    found = {path.relative_to(folder): path.stat() for path in folder.rglob(f"0{pattern}")}
    return {name: (status.st_mtime_ns, status.st_ino) for name, status in found.items()}


def finished(folder):
    """The units that are done, with the times of their files."""
    done, files = {each.with_suffix("") for each in times(folder, "*.json")}, times(folder)
    return {name: at for name, at in files.items() if name.with_name(name.name[:6]) in done}


def number_of_units(folder):
    return len(times(folder, "*.json"))


def labels(task, cfg):
    """All labels that count, of training and of validation."""
    folder = task.prepare_data(cfg)
    found = []
    for part in task.views(cfg, folder):
        rows = task.collate([part[i] for i in range(len(part))])
        found.append(rows["labels"][rows["labels"] != IGNORE_INDEX])
    return folder, *found


def documents(task, cfg):
    """The texts of both parts."""
    folder, *parts = labels(task, cfg)
    decode = corpus.load_tokenizer(cfg, folder).decode
    return [[each for each in decode(part).split("<|endoftext|>") if each] for part in parts]


def in_child(function):
    """Calls a function in a process group of its own; the group's id, and how the process ended."""
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            os.setsid()
            function()
            os._exit(0)
        os._exit(1)
    return child, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# ---- The same bytes ------------------------------------------------------------------------------


def talk(text):
    return [{"role": "user", "content": text}, {"role": "assistant", "content": text[::-1]}]


ROWS = {  # a task, what a row is made of a text and its number, settings
    "stream": ("causal_lm", lambda text, i: {"text": text}, {}),
    "best_fit": ("causal_lm", lambda text, i: {"text": text}, {"packing": "best_fit"}),
    "chats": ("causal_lm", lambda text, i: {"messages": talk(text)}, {}),
    "classes": ("text_classification", lambda text, i: {"text": text, "label": f"c{i % 4}"}, {}),
    "pairs": ("seq2seq", lambda text, i: {"source": text, "target": f"t {i}"}, {}),
    "preferences": (
        "preference",
        lambda text, i: {"prompt": text, "chosen": f" {i}", "rejected": f" {i}?"},
        {},
    ),
}


@pytest.mark.parametrize("name, row, fields", ROWS.values(), ids=ROWS)
def test_any_number_of_cores_writes_the_same_bytes(
    config, tmp_path, monkeypatch, name, row, fields
):
    every = make_texts(200), make_texts(100, 1) * 2
    data = ",".join(
        str(write_rows(tmp_path / f"{n}.jsonl", [row(text, i) for i, text in enumerate(texts)]))
        for n, texts in enumerate(every)
    )
    found = []
    for cores in (1, 3):
        monkeypatch.setattr(workers, "count_cores", lambda cores=cores: cores)
        cfg = config(f"{data}:3", f"cache{cores}", name, **fields)
        folder = load_task(name).prepare_data(cfg)
        assert number_of_units(folder) > 5
        found.append(contents(folder))
    assert found[0] == found[1]


def test_every_kind_of_file_gives_the_same_tokens_in_one_unit_or_many(
    task, config, tmp_path, small_units
):
    small_units(10**9)
    wanted = labels(task, config(write(tmp_path / "whole.jsonl"), "whole"))
    assert number_of_units(wanted[0]) == 1
    small_units(UNIT)
    for kind in KINDS:
        folder, *found = labels(task, config(write(tmp_path / f"a.{kind}"), kind))
        assert number_of_units(folder) > 4 or kind == "json", kind
        assert all(torch.equal(*pair) for pair in zip(found, wanted[1:], strict=True)), kind


@pytest.mark.parametrize("kind, size", [("txt", 700), ("txt", UNIT), ("txt.gz", 700)])
def test_a_long_text_in_pieces_is_that_text(
    task, config, tmp_path, small_units, kind, size, capsys
):
    small_units(size)
    data = write(tmp_path / f"a.{kind}")
    folder, *found = labels(task, config(data))
    assert number_of_units(folder) > (4 if kind == "txt" else 1)
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("Prepared: 1 documents read, 1 to train on, 1 (")
    assert said.endswith(" to evaluate on; the end of a single text is held out")
    decode = corpus.load_tokenizer(config(data), folder).decode
    text = write(tmp_path / "whole.txt").read_text(encoding="utf-8")
    assert decode(torch.cat(found)).replace("<|endoftext|>", "") == text
    assert len(found[1]) / len(torch.cat(found)) == pytest.approx(0.1, abs=0.03)


def test_the_vocabulary_is_learnt_from_the_same_rows_whatever_else_the_file_holds(
    task, config, tmp_path, monkeypatch
):
    monkeypatch.setattr(units, "SAMPLE", 3000)
    rows = [{"text": each, "other": "x" * 100} for each in TEXTS]
    wide = write_rows(tmp_path / "wide.jsonl", rows)
    folders = [
        task.prepare_data(config(data, f"{data.stem}-cache"))
        for data in (wide, write(tmp_path / "a.jsonl"))
    ]
    assert len({(folder / tokenizing.FILE).read_bytes() for folder in folders}) == 1


def test_files_of_other_endings_are_texts_where_the_fields_name_them(task, config, tmp_path):
    """Packed ones too; the vocabulary and the rows are those of the same texts in .txt files."""
    plain, named = tmp_path / "plain", tmp_path / "named"
    for folder, names in ((plain, "abc"), (named, ["a.md", "b.PY", "c.1.gz"])):
        folder.mkdir()
        for name, number in zip(names, range(3), strict=True):
            text = "\n".join(TEXTS[100 * number : 100 * number + 100]).encode()
            path = folder / (f"{name}.txt" if folder == plain else name)
            path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    (named / "left.html").write_text("out")
    wanted = labels(task, config(plain))[1:]
    found = labels(task, config(named, file_extensions=".md, .py,.1"))[1:]
    assert all(map(torch.equal, found, wanted)) and len(wanted[0])
    for wrong in ("md", ".csv", ".a b"):
        with pytest.raises(
            ValueError, match="task.file_extensions: '.*' cannot be read as text; write"
        ):
            task.prepare_data(config(named, file_extensions=wrong))


# ---- Interruptions -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("cores", [1, 2])
def test_kills_at_every_moment_leave_the_bytes_of_an_undisturbed_run(
    task, config, tmp_path, monkeypatch, cores
):
    """Each start is killed a little later than the one before, when something reaches the disk."""
    monkeypatch.setattr(workers, "count_cores", lambda: cores)
    data = write(tmp_path / "a.jsonl", TEXTS[:200])
    wanted = task.prepare_data(config(data, "calm"))
    folder = tmp_path / "torn" / wanted.name
    unfinished = folder.with_suffix(".unfinished")
    fsync, left = os.fsync, multiprocessing.Value("i", 0)

    def kill_in_time(handle):
        with left.get_lock():
            left.value -= 1
        if left.value == 0:
            os.killpg(os.getpgid(0), signal.SIGKILL)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", kill_in_time)
    done = {}
    for start in range(90):
        left.value = 2 + start
        _, code = in_child(lambda: task.prepare_data(config(data, "torn")))
        if not code:
            break
        assert code == -signal.SIGKILL
        before, done = done, finished(folder if folder.exists() else unfinished)
        kept = {name: at for name, at in before.items() if unfinished.joinpath(name).exists()}
        assert kept.items() <= done.items()  # what is done is not written again
    assert 5 < start < 89 and number_of_units(wanted) > 4 and done
    assert contents(folder) == contents(wanted) and not unfinished.exists()
    assert not [*folder.parent.glob("*.trash")]


def test_processes_end_when_the_one_that_started_them_is_killed(
    task, config, tmp_path, monkeypatch
):
    monkeypatch.setattr(workers, "count_cores", lambda: 2)
    data, commit = write(tmp_path / "a.jsonl"), unit_files.UnitWriter.commit
    parent = multiprocessing.Value("i", 0)

    def commit_and_kill(self, facts):
        commit(self, facts)
        with contextlib.suppress(ProcessLookupError):
            os.kill(parent.value, signal.SIGKILL)
        time.sleep(0.05)

    def start():
        parent.value = os.getpid()
        task.prepare_data(config(data))

    monkeypatch.setattr(unit_files.UnitWriter, "commit", commit_and_kill)
    group, code = in_child(start)
    assert code == -signal.SIGKILL
    deadline = time.monotonic() + 300
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.05)


@pytest.mark.parametrize(
    "place, error",
    [("scan", OSError(errno.ENOSPC, "full")), ("vocabulary", OSError("full")), ("tokens", None)],
)
def test_what_is_done_is_kept_where_a_disk_is_full_or_a_process_is_killed(
    task, config, tmp_path, monkeypatch, place, error
):
    monkeypatch.setattr(workers, "count_cores", lambda: 1)
    data, commit = write(tmp_path / "a.jsonl"), unit_files.UnitWriter.commit
    wanted = task.prepare_data(config(data, "calm"))

    def end(*_):
        if error:
            raise error
        os.kill(os.getpid(), signal.SIGKILL)

    def commit_or_end(self, facts):
        if self.name == "000003" and self.folder.name.startswith("scan") == (place == "scan"):
            end()
        commit(self, facts)

    said = "cache_dir: cannot write .*: full$" if error else "data: .*SIGKILL.* lack of memory"
    with monkeypatch.context() as patch:
        if place == "vocabulary":
            patch.setattr(tokenizing, "replace_text", end)
        else:
            patch.setattr(unit_files.UnitWriter, "commit", commit_or_end)
        with pytest.raises(ValueError, match=f"^task.{said}"):
            task.prepare_data(config(data))
    (unfinished,) = (tmp_path / "cache").glob("*.unfinished")
    done = finished(unfinished)
    scanned = {name.name[:6] for name in done if name.parent.name == "scan-0"}
    tokenised = {name.name[:6] for name in done if name.parent.name != "scan-0"}
    assert len(scanned) == 3 if place == "scan" else len(scanned) > 5
    assert len(tokenised) == (3 if place == "tokens" else 0)
    monkeypatch.setattr(unit_files, "remove", lambda path: None)
    folder = task.prepare_data(config(data))
    assert done.items() <= times(folder).items()
    found = contents(folder)
    assert {name for name, data in contents(wanted).items() if data != found[name]} <= {cache.INDEX}


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda path: os.truncate(path, 5003), "files changed during the preparation: start again"),
        (lambda path: path.unlink(), "nothing to read at"),
    ],
)
def test_a_file_that_changes_between_the_passes(task, config, tmp_path, monkeypatch, change, said):
    data, choose = write(tmp_path / "a.jsonl"), units.hold_out
    monkeypatch.setattr(units, "hold_out", lambda *given: (change(data), choose(*given))[1])
    with pytest.raises(ValueError, match=f"^task.data: {said}"):
        task.prepare_data(config(data))


# ---- Damage --------------------------------------------------------------------------------------


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "name, damage",
    [
        ("000002.tokens", flip),
        ("000001.json", flip),
        ("tokenizer.json", lambda path: path.unlink()),
        ("000009.odd", lambda path: path.write_text("not ours")),
    ],
)
def test_what_is_damaged_is_named_and_made_again(task, config, tmp_path, capsys, name, damage):
    cfg = config(write(tmp_path / "a.jsonl"))
    folder = task.prepare_data(cfg)
    wanted = contents(folder)
    damage(folder / name)
    (folder.parent / "digests.json").unlink()
    capsys.readouterr()
    assert task.prepare_data(cfg) == folder
    assert f" has a damaged file: {name}: preparing again\n" in capsys.readouterr().out
    assert contents(folder) == wanted
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == [folder.name]


@pytest.mark.parametrize(
    "name, damage", [("json", flip), ("rows", flip), ("sample", lambda path: os.truncate(path, 0))]
)
def test_damaged_notes_of_the_first_pass_are_written_again(
    task, config, tmp_path, monkeypatch, name, damage
):
    data = write(tmp_path / "a.jsonl")
    wanted = task.prepare_data(config(data, "calm"))
    with monkeypatch.context() as patch:
        patch.setattr(units, "hold_out", lambda *_: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            task.prepare_data(config(data))
    (unfinished,) = (tmp_path / "cache").glob("*.unfinished")
    damage(unfinished / "scan-0" / f"000001.{name}")
    (unfinished / ".scan-0-1.trash").mkdir()  # a start was killed while it removed its notes
    assert contents(task.prepare_data(config(data))) == contents(wanted)
    assert not [*(tmp_path / "cache").rglob("*.trash")]


# ---- Errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, line, said",
    [
        ("a.jsonl", b'{"text": ', "line 251: invalid JSON"),
        ("a.jsonl", b'{"text": 1}', "line 251: the text is 1 but must be text"),
        ("a.jsonl", b'{"text": " "}', "line 251: the text is empty; --task.incomplete_rows skip"),
        ("a.txt", b"abc \xff def", "line 251: byte 0xff is not UTF-8"),
    ],
)
def test_an_error_in_a_later_piece_names_its_line(
    task, config, tmp_path, monkeypatch, name, line, said
):
    """The first one, on any number of cores."""
    monkeypatch.setattr(workers, "count_cores", lambda: 2)
    lines = [json.dumps({"text": each}).encode() for each in TEXTS]
    later = [] if name == "a.txt" else [b"[]"]
    data = tmp_path / name
    data.write_bytes(b"\n".join([*lines[:250], line, *lines[250:280], *later, *lines[280:]]))
    with pytest.raises(ValueError) as error:
        task.prepare_data(config(data))
    assert said in str(error.value) and "\n" not in str(error.value)
    assert not [*(tmp_path / "cache").glob("*.unfinished")]


def test_skipped_and_equal_rows_of_all_units_are_counted_and_the_first_is_named(
    task, config, tmp_path, capsys
):
    texts = [*TEXTS, *TEXTS[:10]]
    for at in (290, 140, 70):
        texts.insert(at, "")
    found = documents(task, config(write(tmp_path / "a.jsonl", texts), incomplete_rows="skip"))
    assert f"313 documents read, {len(found[0])} to " in (out := capsys.readouterr().out)
    assert "; left out: 3 incomplete: the text is empty (the first: " in out
    assert "a.jsonl, line 71); 10 are equal to others\n" in out
    assert sorted(itertools.chain(*found)) == sorted([*TEXTS, *TEXTS[:10]])


# ---- Held out, and several sources ---------------------------------------------------------------


def test_more_units_than_files_that_may_be_open(tmp_path):
    files = [(tmp_path / f"{number}", 2) for number in range(1500)]
    for path, _ in files:
        path.write_bytes(b"\1\0\2\0")
    flat = token_rows.Flat(files, "<u2")
    assert [flat.read(i, i + 2).tolist() for i in (*range(0, 3000, 2), 1)][-2:] == [[1, 2], [2, 1]]
    assert len(os.listdir("/dev/fd")) < 1200


def test_a_long_text_among_others_is_on_one_side(task, config, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    wholes = []
    for i in range(6):
        write(folder / f"{i}.txt", make_texts(150 if i % 2 else 10, i))
        wholes.append((folder / f"{i}.txt").read_text(encoding="utf-8"))
    cfg = config(folder, validation_fraction=0.5)
    found = documents(task, cfg)
    assert sorted(itertools.chain(*found)) == sorted(wholes)
    long = [[each for each in part if len(each) > 2 * UNIT] for part in found]
    assert all(long) and number_of_units(task.prepare_data(cfg)) > 6


def test_sources_with_weights_are_the_parts_of_both_datasets(task, config, tmp_path):
    a, b = (write(tmp_path / f"{n}.jsonl", make_texts(200, i)) for i, n in enumerate("ab"))
    cfg = config(f"{a}:2,{b}")
    folder = task.prepare_data(cfg)
    decode = corpus.load_tokenizer(cfg, folder).decode
    for part in task.views(cfg, folder):
        weights = [(each.name, each.weight) for each in part.sources]
        assert weights == [("a.jsonl", 2), ("b.jsonl", 1)]
        first = 0
        for number, each in enumerate(part.sources):
            rows = task.collate([part[i] for i in range(first, first + each.rows)])
            learnt = decode(rows["labels"][rows["labels"] != IGNORE_INDEX])
            assert f'"{number}"' in learnt and f'"{1 - number}"' not in learnt
            first += each.rows
        assert first == len(part)


@pytest.mark.parametrize("name", ["text_classification", "seq2seq"])
def test_rows_held_out_of_each_source_are_those_of_a_split_in_memory(config, tmp_path, name):
    """In the order of their hashes; a bound takes the first of them. Sources lie one by one."""
    task, is_class = load_task(name), name == "text_classification"
    every = [
        [(text, f"c{i // 3 % 4}") for i, text in enumerate(make_texts(n, n))] for n in (400, 90)
    ]
    every[0] += every[0][:50]
    every[1] = [(text, "d" if label == "c3" else label) for text, label in every[1]]
    names = ("text", "label") if is_class else ("source", "target")
    paths = [
        write_rows(tmp_path / f"{i}.jsonl", [dict(zip(names, row, strict=True)) for row in rows])
        for i, rows in enumerate(every)
    ]

    def held_out(rows):
        label = (lambda row: row[0][1]) if is_class else (lambda row: None)
        rows = [(row, "") for row in rows]
        return [row[0] for row, _ in reference.hold_out(rows, 0.1, lambda row: row[0][0], label)[1]]

    for bound in (2000, 40, 2):
        data = f"{paths[0]}:3,{paths[1]}:2"
        cfg = config(data, name=name, validation_rows=bound)
        folder = task.prepare_data(cfg)
        decode = (task.text_data if is_class else task.pairs).load_tokenizer(cfg, folder).decode
        parts = task.views(cfg, folder)
        for part in parts:
            sources = [(each.name, each.weight) for each in part.sources]
            assert sources == [("0.jsonl", 3), ("1.jsonl", 2)]
            assert part.sizes().tolist() == [row["length"] for row in part]
        texts, held = (
            [decode(row["input_ids"], skip_special_tokens=True) for row in part] for part in parts
        )
        for rows, mine, out in zip(every, *(part.sources for part in parts), strict=True):
            own, held = held[: out.rows], held[out.rows :]
            assert own == held_out(rows)[: len(own)] and 0 < len(own) <= bound // 2
            assert bound < 2000 or own == held_out(rows)
            learnt, texts = texts[: mine.rows], texts[mine.rows :]
            assert learnt == [row[0] for row in rows if row[0] not in own]
        assert not held and not texts
    cfg.data = f"{paths[0]},{paths[1]}:7"  # another mixture of the same prepared rows
    assert task.prepare_data(cfg) == folder
    assert [each.weight for each in task.views(cfg, folder)[0].sources] == [1, 7]


def test_each_class_keeps_a_text_and_numbers_have_exact_sums(config, tmp_path):
    task = load_task("text_classification")
    values = [1e16 if i % 2 else -1e16 + i for i in range(100)]
    rows = [
        {"text": f"text {i}", "label": "often" if i < 97 else f"once {i}", "number": values[i]}
        for i in range(100)
    ]
    data = write_rows(tmp_path / "a.jsonl", rows)
    cfg = config(data, name="text_classification")
    train, _ = task.views(cfg, task.prepare_data(cfg))
    assert {int(row["labels"]) for row in train} == {0, 1, 2, 3}
    number = {"label_column": "number", "problem_type": "regression"}
    folder = task.prepare_data(config(data, name="text_classification", **number))
    held = [i for i in range(100) if units.hash_of(f"text {i}") < 0.1 * 2**64]
    kept = [value for i, value in enumerate(values) if i not in held]
    mean = math.fsum(kept) / len(kept)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in kept) / len(kept))
    assert json.loads((folder / "scale.json").read_text()) == [mean, std]


# ---- Memory --------------------------------------------------------------------------------------

PREPARE = """
import pathlib, resource, sys
sys.path[:0] = {paths!r}
import causal_lm
causal_lm.prepare_data(causal_lm.TaskConfig(data={data!r}, cache_dir={cache!r}, **{fields!r}))
status = pathlib.Path("/proc/self/status").read_text()  # ru_maxrss counts the parent's, from before
print("peak", int(status.split("VmHWM:")[1].split()[0]) // 1024)
print("peak", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind, megabytes", [("jsonl", 120), ("txt.gz", 60), ("csv.gz", 60)])
def test_memory_does_not_grow_with_the_data(tmp_path, kind, megabytes):
    """The peak of this process and that of its largest child, in MB."""
    draw, data = random.Random(0), tmp_path / f"a.{kind}"
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 9))) for _ in range(9000)]
    write(data, [" ".join(draw.choices(words, k=500)) for _ in range(320 * megabytes)])
    assert kind.endswith("gz") or data.stat().st_size > megabytes * 10**6
    fields = {"context_length": 512, "vocab_size": 2000}
    program = PREPARE.format(
        paths=[str(ROOT / SOURCE), str(ROOT / "templates" / "tasks")],
        data=str(data), cache=str(tmp_path / "cache"), fields=fields,
    )  # fmt: skip
    command = [sys.executable, "-B", "-c", program]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    peaks = [int(line.split()[1]) for line in result.stdout.splitlines() if "peak" in line]
    assert all(peak < 700 for peak in peaks), peaks
