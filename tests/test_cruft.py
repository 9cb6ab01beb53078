"""A generated project follows the template: `cruft update` brings what is new and keeps edits."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from conftest import DEFAULT_SLUG, ROOT, SOURCE, BakedProject, copy_template, wait_until


@pytest.fixture
def run(tmp_path):
    """Run git or cruft, away from the caller's configuration; return what it printed."""
    identity = {f"GIT_{who}_{key}": value for who in ("AUTHOR", "COMMITTER") for key, value in
                (("NAME", "Test"), ("EMAIL", "test@example.org"))}  # fmt: skip
    env = os.environ | {"HOME": str(tmp_path), "GIT_CONFIG_NOSYSTEM": "1"} | identity

    def run(folder, *command):
        if command[0] == "cruft":
            command = (str(Path(sys.executable).with_name("cruft")), *command[1:])
        result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        assert result.returncode == 0, f"{command}: {result.stdout}{result.stderr}"
        return result.stdout

    return run


def commit(run, folder):
    """Commit everything in a folder, as the first commit if need be."""
    run(folder, "git", "init", "--quiet")
    run(folder, "git", "add", "--all")
    run(folder, "git", "commit", "--quiet", "--message", "state")


@pytest.mark.slow
def test_update_brings_the_new_template_and_keeps_edits(tmp_path, run):
    template = copy_template(tmp_path / "template")
    commit(run, template)
    run(tmp_path, "cruft", "create", str(template), "--no-input")
    project = tmp_path / DEFAULT_SLUG
    commit(run, project)
    assert json.loads((project / ".cruft.json").read_text())["template"] == str(template)
    assert "up to date" in run(project, "cruft", "check")

    # The owner edits task.py; the template changes train.py, and needs a filter it did not have.
    task = project / "task.py"
    task.write_text(task.read_text(encoding="utf-8") + "\n# Mine.\n", encoding="utf-8")
    commit(run, project)
    train = template / SOURCE / "train.py"
    train.write_text(train.read_text(encoding="utf-8") + "\n# New.\n", encoding="utf-8")
    ignored = template / SOURCE / ".gitignore"
    ignored.write_text(ignored.read_text() + "{{ 'data/' | louder }}\n")
    filters = template / "template_filters.py"
    source = filters.read_text(encoding="utf-8")
    place = "        self.own_templates ="
    assert source.count(place) == 1
    louder = f'        environment.filters["louder"] = str.upper\n{place}'
    filters.write_text(source.replace(place, louder), encoding="utf-8")
    library = template / "src" / "samestep" / "__init__.py"
    library.write_text(library.read_text().replace("1.0.0", "1.0.1"))
    old = [path.name for path in project.glob("vendor/*")]
    commit(run, template)

    run(project, "cruft", "update", "--skip-apply-ask")
    assert (project / "train.py").read_bytes() == train.read_bytes()
    assert (project / ".gitignore").read_text().endswith("DATA/\n")
    assert task.read_text(encoding="utf-8").endswith("\n# Mine.\n")
    assert not list(project.rglob("*.rej")) and not list(project.rglob("*.orig"))
    changed = run(project, "git", "status", "--porcelain").split()[1::2]
    (wheel,) = project.glob("vendor/*")
    assert wheel.name.startswith("samestep-1.0.1+") and zipfile.is_zipfile(wheel)
    assert {".cruft.json", ".gitignore", "train.py", "pyproject.toml"} <= {*changed}
    paths = {f"vendor/{name}" for name in [*old, wheel.name]} | {"->"}
    assert {*changed} - paths <= {".cruft.json", ".gitignore", "train.py", "pyproject.toml", "R"}
    version = wheel.name.removeprefix("samestep-").removesuffix("-py3-none-any.whl")
    assert f'"samestep=={version}"' in (project / "pyproject.toml").read_text()

    # Both sides change the end of train.py and of task.py: conflicts are in these two alone.
    for name in ("train.py", "task.py"):
        with open(project / name, "a") as file:
            file.write("\n# Of the owner.\n")
    commit(run, project)
    for path in (train, template / "templates" / "tasks" / "causal_lm.py"):
        path.write_text(path.read_text() + "\n# Of the template.\n")
    commit(run, template)
    run(project, "cruft", "update", "--skip-apply-ask")
    status = run(project, "git", "status", "--porcelain").splitlines()
    assert {line[3:] for line in status if line[:2] == "UU"} == {"train.py", "task.py"}
    assert "<<<<<<<" in (project / "task.py").read_text()


@pytest.mark.slow
def test_refusal_is_one_line_of_cruft_too(tmp_path, run):
    """Cruft knows nothing of cookiecutter's exceptions and would print a traceback."""
    template = copy_template(tmp_path / "template")
    commit(run, template)
    command = [str(Path(sys.executable).with_name("cruft")), "create", str(template), "--no-input"]
    for answers, words in (
        ({"project_slug": "class"}, "Write for example: class_project"),
        ({"__year": "x"}, "__year: 'x' is not a year"),
    ):
        result = subprocess.run(
            [*command, "--extra-context", json.dumps(answers)],
            cwd=tmp_path,
            env=os.environ | {"HOME": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert result.returncode == 1 and result.stdout == ""
        assert result.stderr.count("\n") == 1 and words in result.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["template"]


BEFORE = "5c8e952a2bec9983a15031b981ec9c73625cecc2"  # the last commit without the library


@pytest.mark.slow
def test_project_from_before_the_library_moves_to_it_and_continues(tmp_path, run):
    """By docs/migrating.md, with edits of its owner, in the middle of a run: the same bytes."""
    found = subprocess.run(["git", "cat-file", "-e", BEFORE], cwd=ROOT, capture_output=True)
    if found.returncode:
        pytest.skip("this copy of the template has no history")
    template = tmp_path / "template"
    run(tmp_path, "git", "clone", "--quiet", str(ROOT), str(template))
    run(template, "git", "checkout", "--quiet", "-B", "main", BEFORE)
    run(tmp_path, "cruft", "create", str(template), "--no-input", "--checkout", "main")
    project = BakedProject(tmp_path / DEFAULT_SLUG)
    folder = project.path
    commit(run, folder)
    for name, old, new in (
        ("train.py", "    parameters = [p for p in model.", "    assert model  # mine\n"),
        ("task.py", "from tasklib.sources import", "from tasklib.tables import TABLES as MINE\n"),
    ):
        text = (folder / name).read_text(encoding="utf-8")
        assert text.count(old) == 1
        (folder / name).write_text(text.replace(old, new + old), encoding="utf-8")
    with open(folder / "task.py", "a") as file:
        file.write("\n\nassert MINE\n")
    own = "from tasklib import cache, text\nfrom tasklib.sources import DataConfig as Mine\n"
    own += "from training.monitor import skip_unless_finite\n"
    (folder / "own.py").write_text(f"{own}assert text.learn_vocabulary and cache.prepare_once\n")
    commit(run, folder)

    # One run to its end, and one that is stopped in its middle.
    flags = ["--config", "configs/train/smoke.yaml", "--output_dir"]
    project.run("python", "train.py", *flags, tmp_path / "whole", PYTHONPATH="")
    (begun,) = project.start(1, *flags, "runs/smoke", PYTHONPATH="")
    wait_until(lambda: [*folder.glob("runs/smoke/checkpoints/step-*")], begun)
    begun.terminate()
    assert begun.wait() == 75

    # The template goes on, and the project with it.
    for path in template.iterdir():
        if path.name != ".git":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(copy_template(tmp_path / "now"), template, dirs_exist_ok=True)
    commit(run, template)
    page = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    update, delete, move, after = re.findall(r"^```\n(.*?)^```$", page, flags=re.M | re.S)
    assert "# mine" in (folder / "train.py").read_text(encoding="utf-8")
    there = [name for name in delete.split()[2:] if (folder / name).exists()]
    assert there == delete.split()[2:]
    for line in update.replace("cruft update", "cruft update --skip-apply-ask").splitlines():
        run(folder, *line.partition("#")[0].split())
    assert not [name for name in there if (folder / name).exists()]
    (folder / ".venv").symlink_to(sys.prefix)
    text = (folder / "task.py").read_text(encoding="utf-8")  # the edit once more
    again = "from tasklib.tables import TABLES as MINE\n\nfrom samestep"
    text = text.replace("from samestep", again, 1) + "\n\nassert MINE\n"
    (folder / "task.py").write_text(text, encoding="utf-8")
    (lint,) = (line for line in after.splitlines() if line.startswith("make lint"))
    for script in (move.replace("- task.py", "- task.py own.py"), lint):
        run(folder, "bash", "-ec", script)
    assert "import TABLES as MINE" in (folder / "task.py").read_text(encoding="utf-8")
    project.run("python", "-c", "import own", PYTHONPATH=str(ROOT / "src"))
    assert "# mine" in (folder / "train.py").read_text(encoding="utf-8")
    printed = project.run("make", "train", "RECIPE=smoke", PYTHONPATH=str(ROOT / "src")).stdout
    assert "continuing from" in printed, printed
    for name in ("model/model.safetensors", "model/config.json"):
        assert (folder / "runs" / "smoke" / name).read_bytes() == (
            tmp_path / "whole" / name
        ).read_bytes()
