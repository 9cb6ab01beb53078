"""Bad input: one line that says what is wrong and where, exit code 2, and nothing is lost."""

import importlib
import json
import re
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from conftest import ROOT, all_files, checkpoint, train_module
from refusals import cases, check_ended, refused, table
from samestep.run import startup
from samestep.settings import config

DATA = []
for given, said in table("data"):
    ((name, content),) = given.items()
    DATA.append((name, content.encode("latin-1"), said))
# Flags, a file to write and its content, and what the line says.
CASES = [(flags, "", b"", said) for flags, said in table("flags")]
DATA += [("bad.yaml", text.encode(), said) for text, said in table("recipes")]
for name, content, said in DATA:
    flag = "--config" if name == "bad.yaml" else "--task.data"
    CASES.append((f"{flag} {name}", name, content, said))
REAL = [case for case in CASES if case[0] == "--learning_rat 3" or case[3] == DATA[4][2]]


@pytest.fixture(scope="module")
def place(project, tmp_path_factory):
    """A copy of a project, with a module that is never to be imported, whatever is named."""
    copied = type(project)(tmp_path_factory.mktemp("bad") / "project")
    shutil.copytree(project.path, copied.path)
    (copied.path / "spy.py").write_text("open('imported', 'w')\nclass Spy:\n    pass\n")
    yield copied
    assert not (copied.path / "imported").exists()


def prepared(place, folder, flags, file, content):
    """The words for a case after its file has been written."""
    if file:
        (place.path / file).write_bytes(content)
    words = [*flags.split(), "--task.cache_dir", str(folder / "cache")]
    words += [] if "--tracker" in words else ["--tracker", "none"]
    return words + ([] if "--output_dir" in words else ["--output_dir", str(folder / "run")])


@pytest.fixture(scope="module")
def train():
    """train.py as a module, with the default task."""
    with train_module(ROOT / "templates" / "causal_lm" / "task.py") as module:
        yield module


@pytest.fixture
def refuse(place, train, tmp_path, monkeypatch, capsys):
    """Prepares such a run, which is to end with one line that says these words."""
    monkeypatch.chdir(place.path)
    monkeypatch.setenv("HOME", str(place.path))

    def refuse(flags, file, content, said):
        words = prepared(place, tmp_path, flags, file, content)
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        if "trackio" in words:
            monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with refused(said):
            train.prepare()
        printed = capsys.readouterr().out.splitlines()
        assert [line for line in printed if line[:6] != "Prepar"] == []

    return refuse


@pytest.mark.parametrize("flags, file, content, said", CASES)
def test_bad_input_is_one_line(refuse, flags, file, content, said):
    refuse(flags, file, content, said)


@pytest.mark.parametrize("flags, said", table("two"))
def test_bad_input_of_two_processes_is_one_line(refuse, monkeypatch, flags, said):
    for variable, text in {"RANK": "0", "WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"}.items():
        monkeypatch.setenv(variable, text)
    refuse(flags, "", b"", said)


@pytest.mark.parametrize("flags, file, content, said", REAL)
def test_the_line_is_all_that_is_printed_and_the_exit_code_is_2(
    place, tmp_path, flags, file, content, said
):
    words = prepared(place, tmp_path, flags, file, content)
    for way in (["--check"], []):
        ((code, printed, errors),) = place.ends(1, *words, *way)
        printed = re.sub("^Prepar.*\n", "", printed, flags=re.M)
        check_ended([code, printed, errors], said, "train.py: ")


@dataclass
class Own:
    """Fields of an owner's task, of types that the shipped ones do not have."""

    hidden: list[int] = field(default_factory=lambda: [64])
    name: str | None = "a"
    depth: int | Literal["auto"] = "auto"
    points: list[tuple[int, float]] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)
    extra: Any = None
    source: str | list[dict[str, Any]] = ""
    folder: Path = Path("a")
    flag: bool = False


@dataclass
class Outer:
    own: Own = field(default_factory=lambda: Own(depth=3))


def parsed(tmp_path, text="", *flags):
    (tmp_path / "own.yaml").write_text(text)
    arguments = ["--config", str(tmp_path / "own.yaml"), *flags]
    return config.parse_config(Outer, arguments, "")[0].own


TYPES = {"folder": Path, "points": lambda pairs: [*map(tuple, pairs)]}  # YAML has no such values


def test_fields_of_other_types(tmp_path):
    """A flag means what the same text means in a recipe; config.yaml gives all of them back."""
    for name, text, value in cases("values"):
        value = TYPES[name](value) if name in TYPES else value
        expected = Own(**{"depth": 3, name: value})
        assert parsed(tmp_path, f"own: {{{name}: {text}}}") == expected
        assert parsed(tmp_path, "", f"--own.{name}", text) == expected
        assert parsed(tmp_path, "own:", f"--own.{name}={text}") == expected
        written = yaml.safe_dump(startup.resolved_config(Outer(expected)), allow_unicode=True)
        assert parsed(tmp_path, written) == expected


def test_fields_of_other_types_with_wrong_values(tmp_path):
    for value, said in table("values"):
        ((name, text),) = value.items()
        for arguments in ([f"own.{name}: {text}"], ["", f"--own.{name}", text]):
            with refused(said):
                parsed(tmp_path, *arguments)


def test_a_flag_that_may_be_a_text_is_one_as_it_is_written(tmp_path):
    for text in ("a #1/b", '"a"', "*.jsonl", "@a", "a: v2", "null", "[old] a", "{0}.jsonl"):
        assert parsed(tmp_path, "", "--own.source", text).source == text


def test_a_recipe_may_begin_with_a_mark_and_have_lines_of_windows(tmp_path):
    assert parsed(tmp_path, "\ufeff# mine\r\nown:\r\n  depth: 5\r\n").depth == 5
    with pytest.raises(ValueError, match=r"own.yaml: own.depth: Input should"):
        parsed(tmp_path, "\ufeff# mine\r\nown:\r\n  depth: x\r\n")


def test_a_url_with_a_password_or_a_token_is_refused_in_any_field(tmp_path):
    """Also in lists, in dicts and their keys; a version of a file and a container are no secret."""
    address = "s3://me:secret/of/mine@b"
    for name, text in [
        ("source", f"[{{path: {address}}}]"), ("extra", f"{{{address}: 1}}"),
        ("name", f"see {address}"), ("tags", "[a, 'https://b/c?token=secret']"),
        ("name", "https://secret@b/c"),
    ]:  # fmt: skip
        for arguments in ([f"own.{name}: {text}"], ["", f"--own.{name}={text}"]):
            with pytest.raises(ValueError, match=rf"own.{name} is .* with a password or a query"):
                parsed(tmp_path, *arguments)
    address = "s3://me:secret@b"
    for text in (f"own.depth: {address}", f"{address}: 1", f"own.hidden: [{address}]"):
        with refused("s3://b") as error:
            parsed(tmp_path, text)
        assert "secret" not in str(error.value)
    for text in ("abfs://container@account/a", "gs://b/c?generation=7", "hf://datasets/a/b@main"):
        assert parsed(tmp_path, f"own.name: {text}").name == text


RATES = cases("rates")


@pytest.mark.parametrize("recipe, flags, said", RATES)
def test_a_learning_rate_of_new_weights_is_named(project, train, monkeypatch, recipe, flags, said):
    monkeypatch.chdir(project.path)
    words = ["--config", f"configs/train/{recipe}.yaml", *flags.split()]
    cfg, _ = config.parse_config(train.Config, words, None)
    found = config.remarks_on_rate(cfg)
    assert len(found) == bool(said)
    assert all(re.search(f"^warning: learning_rate is {said}$", line) for line in found)


def test_help_names_every_flag_and_no_other(project):
    printed = project.run("python", "train.py", "--help")
    assert printed.stderr == "" and "\n--config configs/train/default.yaml" in printed.stdout
    assert "\n--task.data " in printed.stdout and "--task " not in printed.stdout
    assert "\n--eval_every 100    (minimum: 0, type: integer or const: epoch" in printed.stdout


def test_good_input_is_one_line_too_and_a_check_trains_nothing(tiny, tmp_path):
    flags = ["--output_dir", tmp_path / "run", "--check"]
    ((code, printed, errors),) = tiny.ends(1, *flags)
    assert code == 0 and errors == "" and printed.endswith("\n")
    assert "starts from the beginning; 12 steps" in printed.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_checkpoints_in_the_way_are_kept(tiny, output):
    """resume: never over checkpoints, none that is valid, and a manifest of something else."""
    base = ["--output_dir", output, "--max_steps", 4]
    tiny.train(1, *base)
    manifest = checkpoint(output, 4) / "manifest.json"
    whole = manifest.read_text()
    for text, flags, said in [
        (whole, ["--resume", "never"], "holds checkpoints and resume is never"),
        (whole[:-20], ["--check"], "no checkpoint in "),
        (json.dumps({**json.loads(whole), "config": None}), [], "no checkpoint in "),
    ]:
        manifest.write_text(text)
        before = all_files(output)
        check_ended(*tiny.ends(1, *base, *flags), said)
        assert before.items() <= all_files(output).items()


def test_world_size_that_disagrees_with_accelerate(tiny, tmp_path):
    """As when each of two processes believes that it is alone."""
    before = """
from unittest import mock
from samestep.processes.mesh import Layout
from samestep.launch import rendezvous
rendezvous.this_layout = lambda: Layout(2)
rendezvous.join = lambda _: mock.MagicMock(wait=lambda _: None)
"""
    said = "train.py: 2 processes were launched, but accelerate sees 1; check"
    check_ended(*tiny.ends(1, "--output_dir", tmp_path / "run", before=before), begin=said)


@pytest.mark.parametrize("words, said", table("programs"))
def test_a_mistake_is_found_before_a_program_starts_another(tiny, words, said):
    result = tiny.run("python", "-m", "samestep", *words.split(), check=False)
    check_ended(result, begin=said)
    assert not (tiny.path / "runs" / "refused").exists()


@pytest.mark.slow
def test_without_docstrings(project):
    """PYTHONOPTIMIZE=2 strips them; those of fields are in the source."""
    printed = project.run("python", "train.py", "--help", PYTHONOPTIMIZE="2").stdout
    assert "usage: accelerate launch" in printed and "Peak learning rate." in printed
    command = ["python", "-m", "samestep", "launch", "--help"]
    assert "train.py" in project.run(*command, PYTHONOPTIMIZE="2").stdout
