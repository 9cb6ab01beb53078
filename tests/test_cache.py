"""Prepared data: by what it is known, how it is written, and what is done when it is damaged."""

import contextlib
import dataclasses
import errno
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np
import pytest

from conftest import ROOT, SOURCE, load_task
from samestep.base import workers
from samestep.data import cache, own_code, sources

ROWS = 200
PATHS = [str(ROOT / SOURCE), str(ROOT / "templates" / "tasks")]


@pytest.fixture
def cfg(tmp_path):
    """Settings with a data file that is older than the memo's two seconds."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(ROWS)))
    return sources.DataConfig(data=str(file), cache_dir=str(tmp_path / "cache"))


@pytest.fixture
def later(monkeypatch):
    """Lets the two seconds pass within which a file that changed is not in the memo."""
    now = time.time_ns
    monkeypatch.setattr(cache.time, "time_ns", lambda: now() + 3_000_000_000)


def name(cfg):
    return cache.cache_folder(cfg, [], cache.hash_input_files(cfg, (".jsonl",)))


def build(folder, number=ROWS):
    (folder / "train").mkdir()
    np.save(folder / "train" / "rows.npy", np.arange(number))
    (folder / "names.json").write_text("[]")
    return {"content": "1" * 64}


def prepare(cfg, made=None):
    """The prepared folder; `made` counts how often it was built."""

    def counted(folder):
        if made is not None:
            made.append(folder)
        return build(folder)

    return cache.prepare_once(cfg, lambda: name(cfg), counted)


def unprivileged(function):
    """Calls a function in a child that is not root; what it gives, or the text of its ValueError.

    Called by root, whom no permissions stop.
    """
    ThreadPool(1).close()  # imports what a child that is not root may not find
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setuid(65534)
            answer = [str(function()), ""]
        except ValueError as error:
            answer = ["", str(error)]
        except BaseException as error:
            answer = ["", f"{type(error)}: {error}"]
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        answer = json.loads(pipe.read())
    os.waitpid(child, 0)
    return answer


def open_to_all(path):
    """Lets everybody pass through the folders above, which pytest keeps to their owner."""
    for folder in path.parents:
        if folder.stat().st_uid == os.getuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


# ---- The key -------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [False, True], ids=["new", "in the memo"])
def test_a_file_edited_in_place_with_equal_size_and_time_has_another_key(cfg, known, request):
    if known:
        request.getfixturevalue("later")
    before, file = name(cfg), Path(cfg.data)
    about, content = file.stat(), file.read_bytes()
    assert (Path(cfg.cache_dir) / "digests.json").exists() == known
    for other in (content.replace(b'row 7"', b'row 8"', 1), content) * 2:
        file.write_bytes(other)
        os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
        assert file.stat().st_size == about.st_size
        assert (name(cfg) == before) == (other == content)


@pytest.fixture
def read(monkeypatch):
    """The files that are read in full."""
    real, paths = cache.hash_file, []
    monkeypatch.setattr(cache, "hash_file", lambda path: (paths.append(Path(path)), real(path))[1])
    return paths


def test_a_folder_with_a_file_that_has_just_changed_is_not_in_the_memo(cfg, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "MANY_FILES", 0)  # so that folders count
    cfg.data, keys = str(tmp_path / "many"), set()
    os.mkdir(cfg.data)
    file = Path(cfg.data, "a.jsonl")
    file.write_text("[0]")
    time.sleep(0.05)
    settled = time.time_ns()
    time.sleep(0.05)
    monkeypatch.setattr(cache.time, "time_ns", lambda: settled + 2_000_000_000)
    for content in ("[1]", "[2]"):  # in place: the folder keeps its times
        file.write_text(content)
        keys.add(name(cfg))
    assert len(keys) == 2


def test_a_broken_memo_is_made_again(cfg, later):
    before, memo = name(cfg), Path(cfg.cache_dir) / "digests.json"
    for content in (b"\xff", *(json.dumps({cfg.data: odd}).encode() for odd in (5, None, []))):
        memo.write_bytes(content)
        assert name(cfg) == before
        assert len(json.loads(memo.read_text())[cfg.data]) == 5


def test_files_beside_the_data_and_counts_of_other_files_are_part_of_the_key(cfg, tmp_path):
    cfg.data, more = str(tmp_path), tmp_path / "tokenizer.model"
    cfg.cache_dir, keys = str(tmp_path / ".cache"), set()
    for name, content in (("tokenizer.model", "a"), ("tokenizer.model", "b"), ("b.jsonl.gz", "")):
        (tmp_path / name).write_text(content)
        keys.add(str(cache.hash_input_files(cfg, (".jsonl",), more)))
    assert len(keys) == 3


def test_all_that_shapes_the_data_is_part_of_the_key_but_weights(cfg):
    plain = cache.cache_folder(cfg, [1], ["a"])
    found = [cache.cache_folder(cfg, [2], ["a"]), cache.cache_folder(cfg, [1], ["b"])]
    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        other = f"{value}x" if isinstance(value, str) else value / 2
        folder = cache.cache_folder(dataclasses.replace(cfg, **{field.name: other}), [1], ["a"])
        if field.name == "cache_dir":
            assert folder.name == plain.name and folder.parent != plain.parent
        else:
            found.append(folder)
    assert len({plain, *found}) == 1 + len(found) == len(dataclasses.fields(cfg)) + 2
    mixtures = (dataclasses.replace(cfg, data=data) for data in ("a:2,b:3", "a:1,b:5"))
    assert len({cache.cache_folder(each, [], []) for each in mixtures}) == 1


USES = """
try:
    from . import other
except ImportError:
    import other
import package.most
from package import part as inner
if True:
    from stars import *

memo = {}

TABLE = {}
TABLE["a"] = "first"

if True:
    def chosen(word):
        return word

class Reader:
    def read(self, text):
        return other.clean(text) + TABLE["a"] + chosen(text)

def prepare(text):
    from package.deep import finish
    memo[text] = text
    return [finish(inner.scale(Reader().read(each))) for each in package.most.cut(star(text))]

def loss():
    import unread
    return unread.SIZE
"""
MODULES = {
    "uses": USES,
    "other": "def clean(text):\n    return text\n",
    "stars": "def star(text):\n    return text\n",
    "unread": "SIZE = 1\n",
    "package/most": "def cut(text):\n    return text[:3]\n",
    "package/part": "from . import deep\nSIZE = 3\ndef scale(text):\n    return text * SIZE\n",
    "package/deep": "import re\nX = re.compile('a')\ndef finish(text):\n    return X.sub('', text)",
}
EDITS = [  # module, before, after, whether the key is another one
    ("uses", "return [finish", "return [finish(each) or finish", True),
    ("uses", '"first"', '"second"', True),
    ("uses", "memo[text] = text", "memo[text] = 1", True),
    ("uses", "return word", "return word + word", True),
    ("uses", "self, text):", "self, text, more=None):", True),
    ("uses", "part as inner", "most as inner", True),
    ("other", "return text", "return text.strip()", True),
    ("package/part", "3", "4", True),
    ("package/most", "3", "4", True),
    ("stars", "return text", "return [text]", True),
    ("package/deep", "'a'", "'b'", True),
    ("uses", "    return [", "    # a comment\n    return [", False),
    ("uses", "class Reader:", 'class Reader:\n    """Reads."""\n', False),
    ("uses", "def prepare(text):", "def prepare(\n    text: 'str',\n) -> list:", False),
    ("uses", "return unread.SIZE", "return 2", False),
    ("unread", "1", "2", False),
    ("other", "def clean", "# a comment\ndef clean", False),
]


@pytest.fixture
def fresh(monkeypatch):
    """Forgets what was read of modules; tells `own_code` that it started so long ago."""

    def forget(seconds=-60):
        for function in vars(own_code).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()
        monkeypatch.setattr(own_code, "STARTED", time.time() - seconds)

    yield forget
    forget()


def test_the_key_takes_what_a_function_runs_and_no_comment(cfg, tmp_path, monkeypatch, fresh):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "package").mkdir()

    def key():
        fresh()
        for module in {"package", *(each.replace("/", ".") for each in MODULES)} & {*sys.modules}:
            del sys.modules[module]
        prepare = load_task("uses").prepare
        found = cache.cache_folder(cfg, [], [], prepare)
        if "most as inner" not in (tmp_path / "uses.py").read_text():
            prepare("a b")  # its memo grows
        assert cache.cache_folder(cfg, [], [], functools.partial(prepare, "a b")) == found
        return found

    for name, source in MODULES.items():
        (tmp_path / f"{name}.py").write_text(source)
    first = key()
    for name, before, after, differs in EDITS:
        assert before in MODULES[name]
        (tmp_path / f"{name}.py").write_text(MODULES[name].replace(before, after, 1))
        assert (key() != first) == differs, (name, after)
        (tmp_path / f"{name}.py").write_text(MODULES[name])
    assert key() == first


TASKS = ["seq2seq", "text_classification"]


@pytest.mark.parametrize("name", TASKS)
def test_editing_what_prepares_the_data_of_a_task_prepares_it_anew(
    cfg, name, tmp_path, monkeypatch, fresh
):
    """Of a task the functions that prepare its data, of the library the rooms that read data."""
    task = load_task(name)
    library = tmp_path / "samestep"
    shutil.copytree(own_code.LIBRARY, library, ignore=shutil.ignore_patterns("__pycache__"))
    source = Path(task.__file__).read_text()
    copy = tmp_path / f"{name}.py"
    monkeypatch.setattr(own_code, "LIBRARY", library)
    monkeypatch.setattr(task, "__file__", str(copy))

    def key(path=copy, old="", new=""):
        copy.write_text(source)
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))
        fresh()
        found = cache.cache_folder(cfg, [], [], task.prepare_data)
        path.write_text(text)
        return found

    first = key()
    assert key() == first
    for function, differs in {"prepare_data": 1, "check_config": 1, "loss_sum": 0}.items():
        assert (key(copy, f"def {function}(", f"def {function}(*more, ") != first) == differs
    assert key(copy, "class TaskConfig(", "class TaskConfig(object, ") == first
    files = {"data/sources": 1, "text/units": 1, "images/images": 1, "models/attention": 0}
    for file, differs in files.items():
        path = library / f"{file}.py"
        assert (key(path, "import", "import abc\nimport") != first) == differs


def test_code_that_was_edited_after_the_start_prepares_nothing(tmp_path, monkeypatch, fresh):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "shaped_early.py"
    file.write_text("def encode(text):\n    return text\n")
    encode = load_task("shaped_early").encode
    fresh(60)
    with pytest.raises(ValueError, match=r"shaped_early.py was edited .*: start again$"):
        own_code.project_code(encode)
    for seconds in (-3600, 3600):  # before the start, and by a clock that is ahead
        os.utime(file, (time.time() + seconds,) * 2)
        own_code.project_code(encode)


def test_the_cache_does_not_lie_among_the_data(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}")
    cfg = sources.DataConfig(data=str(tmp_path), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="^task.cache_dir: .* lies in task.data"):
        name(cfg)
    cfg.cache_dir = str(tmp_path / ".cache" / "data")
    name(cfg)


# ---- The content ---------------------------------------------------------------------------------


def test_the_content_digest_stands_for_every_value_and_for_nothing_else():
    def columns():
        rows = [np.arange(i % 5, dtype=np.int32) for i in range(50)]
        return {"ids": rows, "labels": np.arange(50), "weight": np.ones(50, np.float32)}

    whole = cache.hash_columns({"train": columns(), "validation": columns()})
    assert whole == cache.hash_columns({"train": columns(), "validation": columns()})
    # The same on any machine: a number that was computed on another day.
    assert cache.hash_columns({"a": {"b": np.arange(3)}})[:16] == "1af3f1d604ab5cbe"
    changed = []
    for column in columns():
        rows = columns()
        rows[column][-1] = rows[column][-1] + 1
        changed += [{"train": rows, "validation": columns()}]
        changed += [{"train": columns(), "validation": rows}]
    other = columns() | {"labels": np.arange(50, dtype=np.int32)}
    moved = columns()
    moved["ids"][1], moved["ids"][2] = moved["ids"][1][:0], np.array([0, 0, 1], np.int32)
    changed += [{"train": each, "validation": columns()} for each in (other, moved)]
    assert len({whole, *map(cache.hash_columns, changed)}) == len(changed) + 1


# ---- Damage --------------------------------------------------------------------------------------


def zero_half(path):
    with open(path, "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(size // 2)
        file.write(bytes(size - size // 2))


ROWS_FILE = "train/rows.npy"
DAMAGE = {
    "half zeroed": lambda f: zero_half(f / ROWS_FILE),
    "missing": lambda f: (f / ROWS_FILE).unlink(),
    "a pipe": lambda f: ((f / ROWS_FILE).unlink(), os.mkfifo(f / ROWS_FILE)),
    "index missing": lambda f: (f / "index").unlink(),
    "index flipped": lambda f: zero_half(f / "index"),
    "a link in its place": lambda f: (shutil.rmtree(f), f.symlink_to("nowhere")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_data_is_prepared_again_with_one_line(cfg, capsys, damage):
    made = []
    folder = prepare(cfg, made)
    assert prepare(cfg, made) == folder and len(made) == 1
    DAMAGE[damage](folder)
    capsys.readouterr()
    assert prepare(cfg, made) == folder and len(made) == 2
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1 and printed.endswith(": preparing again\n")
    assert np.load(folder / "train" / "rows.npy").tolist() == list(range(ROWS))
    assert prepare(cfg, made) == folder and len(made) == 2
    left = {path.name for path in Path(cfg.cache_dir).iterdir() if path.name[0] != "."}
    assert left == {folder.name, f"{folder.name}.lock", "digests.json", "digests.lock"}


def test_a_file_is_read_again_only_when_something_of_it_changed(cfg, later, read):
    folder = prepare(cfg)
    read.clear()
    assert prepare(cfg) == folder and read == []
    for path in (Path(cfg.data), folder / "names.json"):
        os.utime(path)
        assert prepare(cfg) == folder and prepare(cfg) == folder and read == [path]
        shutil.copy2(path, folder.parent / "copy")
        (folder.parent / "copy").replace(path)  # another inode
        assert prepare(cfg) == folder and prepare(cfg) == folder and read == [path] * 2
        read.clear()
    (folder.parent / "digests.json").unlink()
    prepare(cfg)
    prepare(cfg)
    assert sorted(path.name for path in read) == ["names.json", "rows.jsonl", "rows.npy"]


def test_everything_is_on_the_disk_before_it_has_its_name(cfg, monkeypatch):
    flushed, renamed = [], []
    real, rename = os.fsync, Path.rename

    def note(handle):
        flushed.append(Path(os.readlink(f"/proc/self/fd/{handle}")))
        real(handle)

    def noted(path, target):
        renamed.append([Path(path), len(flushed)])
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(Path, "rename", noted)
    folder = prepare(cfg)
    [[unfinished, before]] = renamed
    wanted = {".", "train", "train/rows.npy", "names.json", "index"}
    assert wanted <= {str(os.path.relpath(path, unfinished)) for path in flushed[:before]}
    assert flushed[before - 1] == unfinished and flushed[before] == folder.parent


@needs_root
def test_a_cache_that_cannot_be_written_can_be_read(cfg, tmp_path):
    folder, cache = prepare(cfg), Path(cfg.cache_dir)
    open_to_all(cache / "x")
    for path in (cache, *cache.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    assert unprivileged(lambda: prepare(cfg)) == [str(folder), ""]
    zero_half(folder / "train" / "rows.npy")
    problem = unprivileged(lambda: prepare(cfg))[1]
    assert problem.startswith("task.cache_dir: cannot write ") and "Permission denied" in problem


# ---- Failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raised, kind, said",
    [
        (ValueError("task.data: bad row"), ValueError, "^task.data: bad row$"),
        (OSError(errno.ENOLCK, "No locks"), ValueError, "task.cache_dir: cannot write .*: No l"),
        (OSError(errno.ENOSPC, "No space left on device"), ValueError, "task.cache_dir: cannot wr"),
        (OSError("5 requested and 3 written"), ValueError, "cannot write .*: 5 requested and 3"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), BrokenPipeError, "Broken pipe"),
        (SystemExit(75), SystemExit, "75"),
    ],
)
def test_a_failed_preparation_leaves_nothing_and_the_next_tries_anew(cfg, raised, kind, said):
    def fail(folder):
        build(folder)
        raise raised

    for _ in range(2):
        with pytest.raises(kind, match=said):
            cache.prepare_once(cfg, lambda: name(cfg), fail)
        assert not [p for p in Path(cfg.cache_dir).iterdir() if p.is_dir()]
    assert prepare(cfg).exists()


@pytest.mark.parametrize("problem", [None, ValueError("task.data: half a row")])
def test_files_that_change_while_they_are_prepared_are_said(cfg, problem):
    def change(folder):
        Path(cfg.data).write_text('{"text": "other"}')
        if problem:
            raise problem
        return build(folder)

    before = name(cfg)
    with pytest.raises(ValueError, match="files changed during the preparation"):
        cache.prepare_once(cfg, lambda: name(cfg), change)
    assert not before.exists()


# ---- A process of its own ------------------------------------------------------------------------


def test_a_signal_ends_the_learning_of_a_vocabulary_and_leaves_no_child(tmp_path):
    program = f"""
import os, signal, sys
sys.path[:0] = {PATHS!r}
from samestep.data import cache
from samestep.base import workers
from samestep.data import sources
def stop(*_):
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
def learn():
    print(os.getpid(), flush=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # as deaf as a library
    while True:
        pass
workers.run_in_child(learn)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    child = int(process.stdout.readline())
    code = None
    while code is None:  # Python loses an exception of a hook of fork; shutdown.py repeats it
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout=1)
    assert code == 75
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_what_goes_wrong_in_a_child_is_one_line(tmp_path):
    def write():
        (tmp_path / "done").write_text("it is")

    def fail():
        raise RuntimeError("two\nlines")

    workers.run_in_child(write)
    assert (tmp_path / "done").read_text() == "it is"
    with pytest.raises(ValueError, match="^task.data: two lines; give fewer or other rows$"):
        workers.run_in_child(fail)
    with pytest.raises(ValueError, match="ended with SIGKILL, perhaps for lack of memory"):
        workers.run_in_child(lambda: os.kill(os.getpid(), signal.SIGKILL))
    with contextlib.suppress(ChildProcessError):
        assert os.waitpid(-1, os.WNOHANG) == (0, 0)


# ---- The tasks -----------------------------------------------------------------------------------


def test_the_digest_of_a_task_is_that_of_its_values(tmp_path):
    """The same in another cache and after another name; another one where one row is another."""
    task, found = load_task("seq2seq"), []
    for i, other in enumerate(("fish", "fish", "tree")):
        words = [other if n == 70 else "many" for n in range(120)]
        rows = [{"source": f"text {n} of {word}", "target": f"{n}"} for n, word in enumerate(words)]
        file = tmp_path / f"rows{i}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        cfg = task.TaskConfig(data=str(file), cache_dir=str(tmp_path / f"cache{i}"), vocab_size=300)
        found.append(task.cache.content_digest(task.prepare_data(cfg)))
    assert found[0] == found[1] != found[2] and len(found[0]) == 64


# ---- The lock ------------------------------------------------------------------------------------

HOLD = """
import sys, time
sys.path[:0] = {paths}
from pathlib import Path
from samestep.data import cache
with cache.file_lock(Path({path!r})):
    print("held", flush=True)
    time.sleep(1000)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock at tmp_path / "lock"."""
    program = HOLD.format(paths=PATHS, path=str(tmp_path / "lock"))
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process
        process.kill()


@pytest.mark.parametrize("lost", [False, True], ids=["killed", "on a lost machine"])
def test_whoever_waits_for_a_lock_says_so_once(holder, tmp_path, capsys, monkeypatch, lost):
    """A lock that a machine keeps, which is lost, can be deleted."""
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.5)
    path, let_go = tmp_path / "lock", threading.Event()
    actions = [let_go.set, path.unlink if lost else holder.kill]
    threading.Timer(1.5, lambda: [action() for action in actions]).start()
    with cache.file_lock(path):
        assert let_go.is_set()
    assert capsys.readouterr().out == (
        "waiting for another process, which prepares the same data; if its machine is gone, delete "
        f"{path}\n"
    )


def test_a_child_that_outlives_the_preparation_does_not_keep_the_lock(tmp_path):
    with cache.file_lock(tmp_path / "lock"):
        if (fork := os.fork()) == 0:
            time.sleep(60)
            os._exit(0)
    try:
        with cache.file_lock(tmp_path / "lock"):
            assert os.waitpid(fork, os.WNOHANG) == (0, 0)  # it still lives
    finally:
        os.kill(fork, signal.SIGKILL)
        os.waitpid(fork, 0)
