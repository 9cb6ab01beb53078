"""prepare_data runs once for its key: what prepares anew, what is found again, and what is lost."""

import json
import os
import shutil

import pytest
import yaml

from conftest import ROOT, lines, make_tiny

WORDS = "a tall old man sold red apples and then ran home to his small house by the sea".split()
RECIPE = (
    "max_steps: 4\nglobal_batch_size: 8\nmicro_batch_size: 4\nwarmup_steps: 0\neval_every: 2\n"
    "save_every: 2\nkeep_checkpoints: 0\nlog_every: 1\nlearning_rate: 0.01\nnum_workers: 0\n"
)
HEAD = "def prepare_data(cfg, folder: Path) -> datasets.DatasetDict:\n"


def write_rows(folder, first=0, last=60, name="texts.jsonl"):
    texts = [" ".join(WORDS[(i * k) % 17] for k in range(1, 5 + i % 9)) for i in range(first, last)]
    path = folder / name
    path.write_text(
        "".join(json.dumps({"text": f"{text} {i}"}) + "\n" for i, text in enumerate(texts))
    )
    return path


@pytest.fixture
def texts(tmp_path):
    """A project whose task is tests/tasks/texts.py, which says when it prepares data."""
    project = make_tiny(tmp_path)
    (project.path / "configs" / "train" / "default.yaml").write_text(RECIPE)
    shutil.copy(ROOT / "tests" / "tasks" / "texts.py", project.path / "task.py")
    change(project, HEAD, f'{HEAD}    print("PREPARES", flush=True)\n')
    write_rows(project.path)
    return project


def change(project, *changes, file="task.py"):
    """Replaces texts of a file of the project, given in pairs."""
    path = project.path / file
    text = path.read_text()
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text)


def prepares(project, *flags, processes=1, **options):
    """How often a start prepares data."""
    return project.train(processes, "--check", *flags, **options).count("PREPARES")


def refused(project, *flags):
    """The one line with which a start ends."""
    text = project.train(1, "--check", *flags, codes=[2])
    assert "Traceback" not in text, text
    return text.rstrip("\n").split("\n")[-1]


def folders(project):
    found = (project.path / ".cache" / "data").glob("*-" + "?" * 16)
    return [folder for folder in found if not folder.is_symlink()]


def test_prepared_once_and_found_again(texts):
    first = texts.train(1)
    assert first.count("PREPARES") == 1
    config = yaml.safe_load((texts.path / "runs/default/config.yaml").read_text())
    assert config["task"]["lower"] == "yes"
    second = texts.train(2, "--output_dir", "runs/two")  # on two processes, from the same folder
    assert "PREPARES" not in second
    config = yaml.safe_load((texts.path / "runs/two/config.yaml").read_text())
    assert config["task"]["lower"] == "yes"  # applied at the second start
    (folder,) = folders(texts)
    assert not (folder / "work").exists() and (folder / "tokenizer.json").exists()
    assert (texts.path / "runs/two/identity/tokenizer.json").exists()
    one, two = (lines(texts.path / f"runs/{name}", "loss") for name in ("default", "two"))
    assert [each["loss"] for each in one] == pytest.approx([each["loss"] for each in two], rel=1e-5)
    assert [each["batch_hash"] for each in one] == [each["batch_hash"] for each in two]


CLEAN = "def clean(text: str) -> str:\n    return text.lower()\n"
CODE = {  # task.py, helpers.py, and edits: of which file, old, new
    "function": (CLEAN, "", "task.py", ".lower()", ".upper()"),
    "module": ("from helpers import clean", CLEAN, "helpers.py", ".lower()", ".upper()"),
    "attribute": (
        "import helpers as h\nclean = h.clean", CLEAN, "helpers.py", ".lower()", ".upper()",
    ),
    "constant": (
        "CUT = 9\n" + CLEAN.replace("lower()", "lower()[:CUT]"), "", "task.py",
        "CUT = 9", "CUT = 5",
    ),
    "lambda": ("clean = lambda text: text.lower()", "", "task.py", ".lower()", ".upper()"),
    "table": (
        "def low(text): return text.lower()\nTABLE = {}\nTABLE['low'] = low\n"
        "def clean(text): return TABLE['low'](text)", "", "task.py", ".lower()", ".upper()",
    ),
    "method": (
        "import helpers\nCLEANER = helpers.Cleaner()\n"
        "def clean(text): return CLEANER.run(text)",
        "class Base:\n    def run(self, text): return text.lower()\nclass Cleaner(Base): pass\n",
        "helpers.py", ".lower()", ".upper()",
    ),
    "decorator": (
        "import functools\ndef low(function):\n    @functools.wraps(function)\n"
        "    def call(text): return function(text).lower()\n    return call\n"
        "@low\ndef clean(text): return text", "", "task.py", ".lower()", ".upper()",
    ),
    "local import": (
        "def clean(text):\n    from package import words\n    return words.clean(text)", CLEAN,
        "package/words.py", ".lower()", ".upper()",
    ),
    "relative import": (
        "def clean(text):\n    import package.words\n    return package.words.clean(text)",
        "from .other import clean", "package/other.py", ".lower()", ".upper()",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CODE)
def test_an_edit_of_what_prepare_data_reaches_prepares_anew(texts, name):
    own, other, file, old, new = CODE[name]
    change(texts, CLEAN, own + "\n")
    (texts.path / "package").mkdir()
    (texts.path / "package" / "__init__.py").write_text("")
    (texts.path / "package" / "words.py").write_text(other)
    (texts.path / "package" / "other.py").write_text(CLEAN)
    (texts.path / "helpers.py").write_text(other)
    assert prepares(texts) == 1
    tokens = {folder: (folder / "tokenizer.json").read_bytes() for folder in folders(texts)}
    change(texts, "def loss_sum(model, batch):\n", "def loss_sum(model, batch):\n    del_ = 1\n")
    assert prepares(texts) == 0  # an edit that it does not reach
    change(texts, old, new, file=file)
    assert prepares(texts) == 1
    (other,) = set(folders(texts)) - set(tokens)
    assert (
        other / "tokenizer.json"
    ).read_bytes() not in tokens.values()  # datasets has no old rows
    assert prepares(texts) == 0


def test_fields_of_the_model_do_not_count(texts):
    assert prepares(texts) == 1
    assert prepares(texts, "--task.dropout", 0.1) == 0
    change(texts, "default=0.0, metadata", "default=0.2, metadata")
    assert prepares(texts) == 0
    assert prepares(texts, "--task.length", 16) == 1
    change(texts, "    rows = datasets.load", "    print(cfg.dropout)\n    rows = datasets.load")
    assert "prepare_data reads task.dropout, which is marked as the model's" in refused(texts)
    change(texts, "print(cfg.dropout)", "cfg.dropout = 0.5")
    assert "prepare_data sets task.dropout, which is marked as the model's" in refused(texts)


def test_files_count_by_content(texts):
    file = texts.path / "texts.jsonl"
    assert prepares(texts) == 1
    os.utime(file, (1, 1))
    copied = shutil.copy(file, texts.path / "copy")
    os.replace(copied, file)  # another inode, and another time
    assert prepares(texts) == 0
    assert prepares(texts) == 0 and len(folders(texts)) == 1
    text = file.read_text()
    times = file.stat()
    file.write_text(text.replace("red", "big"))  # of the same size and time
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    os.replace(shutil.copy2(file, texts.path / "copy"), file)
    assert prepares(texts) == 1
    folder = texts.path / "all"
    folder.mkdir()
    write_rows(folder)
    change(texts, "data_files=cfg.data,", "data_dir=cfg.data,")
    flags = ("--task.data", "all")
    assert prepares(texts, *flags) == 1
    write_rows(folder, name=".hidden.jsonl")
    assert prepares(texts, *flags) == 0
    write_rows(folder, last=20, name="a\nb.jsonl")
    assert prepares(texts, *flags) == 1
    os.mkfifo(folder / "pipe")
    assert "pipe is no regular file" in refused(texts, *flags)
    (folder / "pipe").unlink()
    (folder / "link").symlink_to("nowhere")
    assert "link is a link to nothing" in refused(texts, *flags)
    assert "lies in task.data" in refused(texts, *flags, "--task.cache_dir", "all/cache")


RETURNS = {
    "None": "task.prepare_data returns None, and task.py has no views",
    "[1]": "task.prepare_data returns list; give a datasets.DatasetDict",
    "rows.to_iterable_dataset()": "returns IterableDataset; give a datasets.DatasetDict",
    "datasets.IterableDatasetDict(train=rows.to_iterable_dataset())": "returns IterableDatasetDict",
    "datasets.DatasetDict(train=rows)": "task.prepare_data returns no split validation; add it",
    "datasets.DatasetDict(train=rows, validation=rows.select([]))": "returns no row in validation",
    "open('nothing.txt')": "task.prepare_data: [Errno 2] No such file or directory: 'nothing.txt'",
    "datasets.load_dataset('json', data_files='no.jsonl')": "task.prepare_data: Unable to find",
}


@pytest.mark.parametrize("value", RETURNS)
def test_what_prepare_data_gives_wrongly_is_one_line(texts, value):
    change(texts, "    rows = rows.map(", f"    return {value}\n    rows = rows.map(")
    assert RETURNS[value] in refused(texts)
    left = (texts.path / ".cache" / "data").iterdir()
    assert not [path for path in left if path.name.endswith(".partial")]
