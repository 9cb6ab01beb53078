"""prepare_data runs once for its key: what prepares anew, what is found again, and what is lost."""

import contextlib
import dataclasses
import importlib
import json
import os
import re
import shutil
import signal
import sys
import time
from typing import Literal
from unittest import mock

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
import yaml

from conftest import ROOT, edit, kill_after, make_tiny, manifest, preloaded, write_recipe
from refusals import cases
from same import check_same_curve
from samestep.prepared import prepared_key, run_data

WORDS = "a tall old man sold red apples and then ran home to his small house by the sea".split()
HEAD = "def prepare_data(cfg, folder: Path) -> datasets.DatasetDict:\n"


def write_rows(folder, first=0, last=60, name="texts.jsonl"):
    texts = [" ".join(WORDS[(i * k) % 17] for k in range(1, 5 + i % 9)) for i in range(first, last)]
    path = folder / name
    path.write_text(
        "".join(json.dumps({"text": f"{text} {i}"}) + "\n" for i, text in enumerate(texts))
    )
    return path


def make_texts(folder):
    """A project whose task is tests/tasks/texts.py, and its rows."""
    project = write_recipe(make_tiny(folder), "texts")
    shutil.copy(ROOT / "tests" / "tasks" / "texts.py", project.path / "task.py")
    write_rows(project.path)
    return project


@pytest.fixture
def texts(tmp_path):
    """Such a project, which says when it prepares data."""
    project = make_texts(tmp_path)
    change(project, ", num_proc=2", "")
    change(project, HEAD, f'{HEAD}    print("PREPARES", flush=True)\n')
    return project


def change(project, *changes, file="task.py"):
    """Replaces texts of a file of the project, given in pairs."""
    edit(project.path / file, *changes)


def prepares(project, *flags, processes=1, **options):
    """How often a start prepares data."""
    return project.train(processes, "--check", *flags, **options).count("PREPARES")


def refused(project, *flags):
    """The one line with which a start ends."""
    text = project.train(1, "--check", *flags, codes=[2])
    return text.rstrip("\n").split("\n")[-1]


def folders(project):
    return [path for path in (project.path / ".cache" / "data").iterdir() if path.is_dir()]


CHECKPOINT = "checkpoints/step-00000004"


def filled(run):
    """A field that prepare_data fills in, as config.yaml and the newest manifest have it."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    return config["task"]["lower"], manifest(run / CHECKPOINT)["config"]["task"]["lower"]


def test_prepared_once_and_found_again(texts):
    first = texts.train(1)
    assert first.count("PREPARES") == 1
    assert filled(texts.path / "runs/default") == ("auto", "yes")
    second = texts.train(2, "--output_dir", "runs/two")  # on two processes, from the same folder
    assert "PREPARES" not in second and "together, but" not in first + second
    assert filled(texts.path / "runs/two") == ("auto", "yes")  # applied at the second start
    (folder,) = folders(texts)
    assert not (folder / "work").exists() and (folder / "tokenizer.json").exists()
    assert (texts.path / "runs/two/identity/tokenizer.json").exists()
    check_same_curve(*(texts.path / "runs" / name for name in ("default", "two")), rel=1e-5)


CLEAN = "def clean(text: str) -> str:\n    return text.lower()\n"
CODE = yaml.safe_load((ROOT / "tests" / "code.yaml").read_text(encoding="utf-8"))
TASK, FILES, *CASES = CODE.values()


def code(folder, *changes, **files):
    """The code in the key of a task, in a folder of its own, after a change of all files."""
    for name, text in {**FILES, "../linked.py": CLEAN, **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.replace(*changes) if changes else text)
    (folder / "linked.py").symlink_to("../linked.py")
    own = ("task", "lib", "lib.words", "linked", "back")
    with mock.patch.object(sys, "path", [str(folder), *sys.path]):
        task = importlib.import_module("task")
    files = prepared_key.files_of(task.TaskConfig(data=""), task)
    found = prepared_key.code_of(task) | prepared_key.hash_files(files)
    for name in own:  # of the library no module is imported twice
        sys.modules.pop(name, None)
    return found


@pytest.mark.parametrize("case", [*CASES[0], *CASES[1]])
def test_the_key_has_the_code_that_prepare_data_reaches(tmp_path, case):
    own, returned, old, new = case.values()
    text = TASK.replace("{}", own, 1).replace("{}", returned)
    before = code(tmp_path / "a" / "b", **{"task.py": text})
    assert code(tmp_path / "c" / "d", **{"task.py": text}) == before
    assert (code(tmp_path / "e" / "f", old, new, **{"task.py": text}) != before) == (
        case in CASES[0]
    )


@pytest.mark.parametrize(
    "file, counts",
    [("back.py", True), ("vendor/a.py", False), ("wandb/a.py", False), ("env/bin/a.py", False)],
)
def test_all_of_a_task_is_in_the_key_if_another_file_names_its_loss(tmp_path, file, counts):
    """A search of the text. Folders of others are no files of the project."""
    files = {"task.py": TASK.replace("{}", "", 1).replace("{}", "cfg.size")}
    files |= {"env/pyvenv.cfg": "", "plain.py": "import task\n", file: "# as loss_sum does\n"}
    before = code(tmp_path / "a" / "b", **files)
    edited = code(tmp_path / "c" / "d", "return TOLD", "return 1", **files)
    assert (edited != before) == counts
    assert (file in before) == counts


def test_a_file_counts_by_its_bytes(tmp_path):
    """Another end of line is another file, and so is a byte that is no UTF-8."""
    found, text = [], TASK.replace("{}", "", 1).replace("{}", "cfg.size")
    for number, content in enumerate((b"# a\n", b"# a\r\n", b"# \xff\n", b"# \xfe\n")):
        folder = tmp_path / str(number) / "project"
        folder.mkdir(parents=True)
        (folder / "helper.py").write_bytes(content)
        found.append(code(folder, **{"task.py": text})["helper.py"])
    assert len({*found}) == 4


@pytest.mark.parametrize("path", sorted((ROOT / "templates").glob("*/task.py")), ids=str)
def test_an_edit_of_the_loss_prepares_nothing_anew(tmp_path, path):
    text = path.read_text()
    keys = []
    for edited in ("nothing", "loss_sum|collate|eval_sums|metrics", "prepare_data", "views"):
        changed = re.sub(rf"(?ms)^(def ({edited})\(.*?:\n)(?=    \S)", r"\1    x = 1\n", text)
        assert changed != text or edited == "nothing"
        keys.append(code(tmp_path / edited[:4] / "a", **{"task.py": changed}))
    assert keys[0] == keys[1] and keys[0] not in keys[2:]


def test_an_edit_of_another_module_prepares_anew(texts):
    change(texts, CLEAN, "from helpers import clean\n")
    (texts.path / "helpers.py").write_text(CLEAN)
    assert prepares(texts) == 1
    change(texts, ".lower()", ".upper()", file="helpers.py")
    (old,) = folders(texts)
    assert "helpers.py changed since the last time\nPREPARES" in texts.train(1, "--check")
    (new,) = {*folders(texts)} - {old}
    names = [(folder / "tokenizer.json").read_bytes() for folder in (old, new)]
    assert names[0] != names[1]  # the cache of `datasets` would give the old rows
    assert prepares(texts) == 0


def test_fields_of_the_model_do_not_count(texts):
    assert prepares(texts) == 1
    assert prepares(texts, "--task.dropout", 0.1) == 0
    change(texts, "dropout: float = field(default=0.0", "dropout: float = field(default=0.2")
    assert prepares(texts) == 0
    assert prepares(texts, "--task.length", 16) == 1
    change(texts, "    rows = datasets.load", "    print(cfg.dropout)\n    rows = datasets.load")
    assert "prepare_data reads task.dropout, which is marked as the model's" in refused(texts)
    change(texts, "print(cfg.dropout)", "cfg.dropout = 0.5")
    assert "prepare_data sets task.dropout, which is marked as the model's" in refused(texts)


NESTED = """@dataclass
class Inner:
    names: set[str]
    alpha: float = 0.5


@dataclass
class TaskConfig:
    inner: Inner = field(default_factory=lambda: Inner({f"name {i}" for i in range(40)}))
    \"\"\"Names and a number.\"\"\"
"""


def test_a_field_of_a_nested_dataclass_and_a_set_are_kept(texts):
    """A set has another order in each process."""
    change(texts, "@dataclass\nclass TaskConfig:\n", NESTED)
    change(texts, HEAD, f"{HEAD}    cfg.inner.alpha = 0.25\n")
    assert "PREPARES" in texts.train(1)
    assert "PREPARES" not in texts.train(2, "--output_dir", "runs/two")
    inner = manifest(texts.path / "runs/two" / CHECKPOINT)["config"]["task"]["inner"]
    assert inner["alpha"] == 0.25 and inner["names"] == sorted(inner["names"])


def test_a_file_of_the_same_size_and_time_counts_by_its_content(texts):
    assert prepares(texts) == 1
    file = texts.path / "texts.jsonl"
    times = (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    copy = shutil.copy(file, texts.path / "copy")
    os.replace(copy, file)  # another inode, and another time of change
    os.utime(file, ns=times)
    assert prepares(texts) == 0 and len(folders(texts)) == 1
    with open(copy, "w") as other:
        other.write(file.read_text().replace("red", "big"))
    os.utime(copy, ns=times)
    os.replace(copy, file)
    assert prepares(texts) == 1


def test_a_question_takes_the_rows_of_the_run(texts):
    """Not those that the files have now; nothing is prepared anew."""
    texts.train(1)
    before = folders(texts)
    write_rows(texts.path, first=7)
    printed = texts.check_asked(texts.path / "runs/default", 2)
    assert "PREPARES" not in printed and folders(texts) == before


def test_a_folder_with_the_name_of_a_column_or_a_choice_is_no_data(texts):
    """Those of other texts are."""
    Config = dataclasses.make_dataclass(
        "Config",
        [("word", str, "c"), ("text_column", str, "a"), ("kind", Literal["b"], "b")],
    )
    for name in "abc":
        (texts.path / name).mkdir()
        (texts.path / name / "file").touch()
    with contextlib.chdir(texts.path):
        assert [*prepared_key.files_of(Config())] == ["word/c/file"]


def test_what_prepare_data_gives_wrongly_is_one_line(texts):
    given = "datasets.DatasetDict(train=rows)"
    change(texts, "    rows = rows.map(", f"    return {given}\n    rows = rows.map(")
    assert "task.prepare_data returns no split validation; add it" in refused(texts)
    left = (texts.path / ".cache" / "data").iterdir()
    assert not [path for path in left if path.name.endswith(".partial")]


# ---- Processes that are killed, or start together ------------------------------------------------


PREPARE = """
import os, signal, sys, threading
sys.path[0] = os.getcwd()
import task
from samestep.prepared import prepared, prepared_key
prepared_key.LOCK_SECONDS = 0.5

def read(data="texts.jsonl", **more):
    for name, value in more.items():
        setattr(task, name, value)
    return prepared.prepare(task, task.TaskConfig(data=data, cache_dir="cache"))
"""
READ = "assert sum(map(len, read().values())) == 60"


@pytest.fixture
def program(texts):
    """Runs Python after PREPARE in a fork with the project: its exit code and output."""
    return lambda code: texts.run("python", "-c", f"{PREPARE}\n{code}", check=False)


def rows_file(texts):
    (file,) = texts.path.glob("cache/*/rows/train/*.arrow")
    return file


def cached(texts):
    return [path.name for path in (texts.path / "cache").iterdir() if path.is_dir()]


def test_four_that_start_together_prepare_once(texts):
    change(texts, '"PREPARES", flush=True)', '"PREPARES", flush=True); import time; time.sleep(2)')
    count = "hashes = prepared.prepared_key.hash_file\n"
    count += "prepared.prepared_key.hash_file = lambda path: [print('READS'), hashes(path)][1]\n"
    words = ["-c", f"{PREPARE}\n{count}{READ}"]
    ends = preloaded(texts.path, [texts.env()] * 4, words, 60)
    assert [code for code, *_ in ends] == [0] * 4, ends
    printed = "".join(printed for _, printed, _ in ends)
    assert printed.count("PREPARES") == 1
    identity = len([*texts.path.glob("cache/*/*token*.json")])
    assert printed.count("READS") == 1 + 4 * identity  # one reads the data, each the identity
    waits = sorted(printed.count("waiting for another process") for _, printed, _ in ends)
    assert waits == [0, 1, 1, 1]


KILL = """
threading.Timer({0}, os.kill, (os.getpid(), signal.SIGKILL)).start()
read()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_killed_at_ten_moments_it_prepares_again(texts, program):
    start = time.monotonic()
    assert program(READ).returncode == 0
    taken = time.monotonic() - start
    for number in range(10):
        shutil.rmtree(texts.path / "cache")
        assert program(KILL.format(taken * (number + 1) / 10)).returncode == -signal.SIGKILL
        result = program(READ)
        assert result.returncode == 0, result.stderr
        assert len(cached(texts)) == 1


@pytest.mark.parametrize("case", cases("disks"))
def test_a_full_disk_or_one_without_locks_is_one_line(texts, program, case):
    code, said = case.values()
    many = "import datasets; rows = datasets.Dataset.from_dict({'x': [*range(5000)]})\n"
    given = "prepare_data=lambda cfg, folder: datasets.DatasetDict(train=rows, validation=rows)"
    result = program(f"{many}{code}\nread({given})")
    assert f"ValueError: task.cache_dir: {said}" in result.stderr
    assert not cached(texts)


@pytest.mark.parametrize(
    "reads", ["open('words' + '.txt').read()", "Path('words', '.').with_suffix('.txt').read_text()"]
)
def test_a_file_that_nothing_names_is_refused(texts, program, reads):
    """Also in a process of `map`; not one that prepare_data has written itself."""
    (texts.path / "words.txt").write_text("of")
    own = "Path('own.txt').write_text('a'); Path('own.txt').read_text()"
    change(
        texts,
        "    return text.lower()",
        f"    {own}; name = 'words' + '.txt'; {reads}\n    return text.lower()",
    )
    change(texts, '"text": clean(row["text"])}', '"text": clean(row["text"])}, num_proc=2')
    said = "task.prepare_data reads words.txt, which no field names: "
    assert said in program("read()").stderr
    result = program("read(files=lambda cfg: ['words.txt'])")
    assert result.returncode == 0, result.stderr


def test_a_damaged_file_is_prepared_again(texts, program):
    assert program(READ).returncode == 0
    content = bytearray(rows_file(texts).read_bytes())
    content[len(content) // 2] ^= 1
    for damaged in (content, content[: len(content) // 2], b""):
        rows_file(texts).write_bytes(damaged)
        result = program(READ)
        assert result.returncode == 0, result.stderr
        assert result.stdout.count("is damaged: preparing again") == 1
    file = rows_file(texts)
    os.replace(shutil.copy(file, texts.path / "copy"), file)  # with another inode
    assert program(READ).stdout == ""


def test_a_read_only_disk_with_data_will_do(texts, program):
    (texts.path / "home").mkdir()
    assert program(READ).returncode == 0
    for file in (texts.path / "texts.jsonl", rows_file(texts)):
        os.utime(file, (1, 1))
    for folder in (texts.path / "cache", texts.path / "home"):
        for path in [*folder.rglob("*"), folder]:
            path.chmod(0o555 if path.is_dir() else 0o444)
    # Without the capabilities of root, whom permissions do not bind.
    refuse = (
        "import ctypes, struct\nos.environ['HOME'] = 'home'\n"
        "ctypes.CDLL(None).capset(struct.pack('Ii', 0x20080522, 0), bytes(24))\n"
    )
    result = program(refuse + READ)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    result = program(f"{refuse}open('other.jsonl', 'w').close()\nread('other.jsonl')")
    assert "task.cache_dir: cannot lock cache: Permission denied" in result.stderr


# ---- Identity and digests ------------------------------------------------------------------------


def test_a_run_keeps_its_tokenizer_where_data_has_grown(texts):
    texts.train(1, "--max_steps", 2)
    run = texts.path / "runs" / "default"
    tokenizer = (run / "identity" / "tokenizer.json").read_bytes()
    write_rows(texts.path, last=120)
    printed = texts.train(1, "--accept_changes", "true")
    assert printed.count("Preparing data: the run keeps its") == 1
    assert "PREPARES" not in texts.train(1)
    assert (run / "identity" / "tokenizer.json").read_bytes() == tokenizer
    assert (run / "model" / "tokenizer.json").read_bytes() == tokenizer


DRAWS = """
TaskConfig = dataclass(slots=True)(TaskConfig)


def draw(rows):
    import random, numpy, torch
    places = [*range(len(rows))]
    random.shuffle(places)
    places = [places[i] for i in numpy.random.permutation(len(rows))]
    train, validation = torch.utils.data.random_split(places, [0.8, 0.2])
    return rows.select([*train]), rows.select([*validation])


def views(cfg, data):
    train, validation = draw(data["train"])
    return train.with_format("torch"), validation


plain = prepare_data


def prepare_data(cfg, folder):
    rows = plain(cfg, folder)
    return datasets.DatasetDict(train=draw(rows["train"])[0], validation=rows["validation"])


"""


def test_unseeded_draws_are_the_same_after_a_kill_and_on_two_processes(texts):
    change(texts, "def metrics(sums)", f"{DRAWS}def metrics(sums)")
    texts.train(1, "--output_dir", "runs/a")
    shutil.rmtree(texts.path / ".cache")
    texts.train(1, "--output_dir", "runs/b", before=kill_after("runs/b", 2), codes=[-9])
    shutil.rmtree(texts.path / ".cache")
    texts.train(2, "--output_dir", "runs/b")
    runs = [texts.path / "runs" / name for name in "ab"]
    check_same_curve(*runs)
    own, other = (manifest(run / CHECKPOINT)["data"] for run in runs)
    assert own == other


OTHER_ROWS = """
def views(cfg, data):
    import os, random
    places = [*range(len(data["train"]))]
    random.Random(os.environ.get("WORD")).shuffle(places)
    return data["train"].select(places[:30]), data["train"].select(places[9:])


"""


def test_views_that_give_other_rows_are_named_as_that(texts):
    change(texts, "def metrics(sums)", f"{OTHER_ROWS}def metrics(sums)")
    texts.train(1, env={"WORD": "a"})
    printed = texts.train(1, codes=[2], env={"WORD": "b"})
    said = "train.py: task.views gives other rows of the same data than at an earlier start: "
    assert f"{said}runs/default/{CHECKPOINT}" in printed


def test_every_row_is_in_the_digest():
    def stored(tokens):
        ids = pa.ListArray.from_arrays(np.arange(0, len(tokens) + 1, 2, dtype=np.int32), tokens)
        return datasets.Dataset(pa.table({"ids": ids, "n": np.arange(len(tokens) // 2)}))

    many = np.zeros(160_000, np.uint16)
    one = many.copy()
    one[2 * 70_001] = 1
    assert run_data.digest_view(stored(many)) != run_data.digest_view(stored(one))

    tokens = np.arange(6000, dtype=np.uint16)
    data = stored(tokens)
    first = run_data.digest_view(data)
    changed = tokens.copy()
    changed[2 * 2001 + 1] += 1
    later = lambda n: [i > 3 for i in n]  # noqa: E731
    views = [
        stored(changed), data.shuffle(seed=1), data.filter(later, input_columns="n", batched=True),
        data.select(range(2999)), data.sort("n", reverse=True), data.rename_column("n", "m"),
        data.select_columns(["ids"]),
    ]  # fmt: skip
    digests = [run_data.digest_view(view) for view in views]
    assert len({first, *digests}) == 1 + len(views) and all(digests)
    parts = [data.select(range(start, start + 600)) for start in range(0, 3000, 600)]
    same = [datasets.concatenate_datasets(parts), data.with_format("torch")]
    same.append(data.shuffle(seed=1).sort("n").flatten_indices())
    assert {run_data.digest_view(view) for view in same} == {first}
    for view in (data.with_transform(lambda rows: rows), torch.utils.data.Subset(data, range(9))):
        assert run_data.digest_view(view) == ""


@pytest.mark.slow
def test_all_is_read_to_verify_it(texts):
    """A byte that has changed behind the stamps of a file is found by reading it."""
    verify = ["python", "-m", "samestep", "prepare", "--verify"]
    assert "prepared in " in texts.run(*verify).stdout
    (folder,) = folders(texts)
    file = next((folder / "rows" / "train").glob("*.arrow"))
    before, content = file.stat(), bytearray(file.read_bytes())
    place = content.rindex(b"\x05")
    content[place] ^= 1
    with open(file, "r+b") as opened:
        opened.write(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    result = texts.run(*verify, check=False)
    assert result.returncode == 2 and "is damaged" in result.stdout + result.stderr
