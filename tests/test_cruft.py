"""A generated project follows the template: `cruft update` brings what is new and keeps edits."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from conftest import DEFAULT_SLUG, SOURCE, copy_template


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
    filters = template / "local_extensions" / "__init__.py"
    source = filters.read_text(encoding="utf-8")
    place = '        environment.globals["library_version"] ='
    assert source.count(place) == 1
    louder = f'        environment.filters["louder"] = str.upper\n{place}'
    filters.write_text(source.replace(place, louder), encoding="utf-8")
    library = template / "src" / "samestep" / "__init__.py"
    library.write_text(library.read_text().replace("2.0.0.dev0", "2.0.1"))
    old = [path.name for path in project.glob("vendor/*")]
    commit(run, template)

    run(project, "cruft", "update", "--skip-apply-ask")
    assert (project / "train.py").read_bytes() == train.read_bytes()
    assert (project / ".gitignore").read_text().endswith("DATA/\n")
    assert task.read_text(encoding="utf-8").endswith("\n# Mine.\n")
    assert not list(project.rglob("*.rej")) and not list(project.rglob("*.orig"))
    changed = run(project, "git", "status", "--porcelain").split()[1::2]
    (wheel,) = project.glob("vendor/*")
    assert wheel.name.startswith("samestep-2.0.1+") and zipfile.is_zipfile(wheel)
    expected = {".cruft.json", ".cookiecutter.json", ".gitignore", "train.py", "pyproject.toml"}
    assert expected <= {*changed}
    paths = {f"vendor/{name}" for name in [*old, wheel.name]} | {"->"}
    assert {*changed} - paths <= expected | {"R"}
    record = json.loads((project / ".cookiecutter.json").read_text())  # of `make update`
    assert record["commit"] == run(template, "git", "rev-parse", "HEAD").strip()
    assert record["template"] is None
    version = wheel.name.removeprefix("samestep-").removesuffix("-py3-none-any.whl")
    assert f'"samestep=={version}"' in (project / "pyproject.toml").read_text()
