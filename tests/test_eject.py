"""The verbs that write into a project, and a project whose library lies beside train.py."""

import shutil
import zipfile

import pytest

from conftest import bake, edit
from refusals import check_ended

SAMESTEP = ("python", "-m", "samestep")


@pytest.fixture(scope="module")
def ejected(tmp_path_factory):
    """A project whose owner has ejected the library, and changed a line of it."""
    project = bake(tmp_path_factory.mktemp("ejected"), tracker="none")
    (project.path / ".samestep.partial" / "old").mkdir(parents=True)  # of a copy that was cut short
    said = project.run(*SAMESTEP, "eject").stdout
    assert said.startswith("samestep/ has the library's ") and said.count("\n") == 1
    assert not (project.path / "samestep" / "old").exists()
    console = project.path / "samestep" / "base" / "console.py"
    edit(console, "tqdm.write(escaped(text", "tqdm.write('mine: ' + escaped(text")
    return project


def test_eject_overwrites_nothing_and_is_listed(ejected):
    check_ended(ejected.run(*SAMESTEP, "eject", check=False), begin="samestep eject: ")
    assert not (ejected.path / ".samestep.partial").exists()
    listed = ejected.run(*SAMESTEP).stdout
    assert "launch     trains: becomes train.py" in listed and "eject " in listed


@pytest.mark.slow
def test_what_was_ejected_is_what_runs(ejected):
    flags = ["--config", "configs/train/smoke.yaml", "--max_steps", 3, "--output_dir", "runs/a"]
    assert "mine: step 3/3  eval_loss" in ejected.train(1, *flags)
    launch = ["accelerate", "launch", "--quiet", "--config_file", "configs/accelerate/cpu.yaml"]
    assert "mine: runs/a is finished" in ejected.run(*launch, "train.py", *flags).stdout


@pytest.mark.slow
def test_a_library_that_the_project_does_not_ask_for_is_refused(ejected, tmp_path):
    """After git pull or make update, without make setup: before any import of it can fail."""
    project = bake(tmp_path, tracker="none")
    (wheel,) = project.path.glob("vendor/*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "library")
    path = {"PYTHONPATH": str(tmp_path / "library")}
    settings = project.path / "pyproject.toml"
    version = wheel.name.split("-")[1]
    commands = (["train.py", "--help"], ["-m", "samestep", "plot", "--help"])
    assert [project.run("python", *words, **path).returncode for words in commands] == [0, 0]
    settings.write_text(settings.read_text().replace(version, "1.0.0+0123abcd"))
    said = f"pyproject.toml asks for samestep 1.0.0+0123abcd, and {version} is installed; run make"
    for words in commands:
        check_ended(project.run("python", *words, check=False, **path), said)
    # One that lies beside train.py is the project's own.
    shutil.copytree(ejected.path / "samestep", project.path / "samestep")
    assert project.run("python", *commands[0], **path).returncode == 0
