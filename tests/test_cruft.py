"""A generated project follows the template: `cruft update` brings what is new and keeps edits."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from conftest import SOURCE, copy_template, edit

ODD = {"project_name": 'A "b" \\ $HOME `id` \U0001f600', "author_name": "O'Neil; -- é"}
ANSWERS = {"project_slug": "my_project", **ODD}


@pytest.fixture
def run(tmp_path):
    """Run git, cruft or cookiecutter, away from the caller's configuration; what it printed."""
    (tmp_path / ".gitconfig").write_text("[user]\nname = Test\nemail = test@example.org\n")
    env = os.environ | {"HOME": str(tmp_path), "GIT_CONFIG_NOSYSTEM": "1"}

    def run(folder, *command, code=0):
        if command[0] != "git":
            command = (str(Path(sys.executable).with_name(command[0])), *command[1:])
        result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        assert result.returncode == code, f"{command}: {result.stdout}{result.stderr}"
        return result.stdout

    return run


def commit(run, folder):
    """Commit everything in a folder, as the first commit if need be."""
    run(folder, "git", "init", "--quiet")
    run(folder, "git", "add", "--all")
    run(folder, "git", "commit", "--quiet", "--message", "state")


def read_record(project):
    """What the project says of its template."""
    return json.loads((project / ".cruft.json").read_text(encoding="utf-8"))


def test_update_brings_the_new_template_and_keeps_edits_and_a_url_has_no_credentials(tmp_path, run):
    """git is told that the address leads to a folder here. A folder that is in no repository has no
    commit, and is never taken for up to date."""
    template = copy_template(tmp_path / "template")
    update = ["cruft", "update", "--skip-apply-ask", "--template-path", template]
    run(tmp_path, "cookiecutter", template, "--no-input", "--output-dir", "before")
    (before,) = (tmp_path / "before").iterdir()
    assert read_record(before)["template"] is None  # no path of this machine
    commit(run, template)
    run(before, *update, code=1)
    url, public = (f"https://{user}example.org/template.git" for user in ("me:secret@", ""))
    run(tmp_path, "git", "config", "--global", f"url.{template}.insteadOf", url)
    project = tmp_path / "sub [x]" / ANSWERS["project_slug"]
    project.parent.mkdir()
    words = [f"{name}={text}" for name, text in ANSWERS.items()]
    run(project.parent, "cookiecutter", url, "--no-input", *words)
    commit(run, project.parent)
    record = read_record(project)
    assert record["template"] == public
    assert record["commit"] == run(template, "git", "rev-parse", "HEAD").strip()
    assert ODD.items() <= record["context"]["cookiecutter"].items()
    files = [path for path in project.rglob("*") if path.is_file()]
    assert len(files) > 50 and not [path for path in files if b"secret" in path.read_bytes()]
    assert "already up to date" in run(project, *update)

    # The owner edits task.py; the template changes train.py, and needs a filter it did not have.
    task = project / "task.py"
    task.write_text(task.read_text(encoding="utf-8") + "\n# Mine.\n", encoding="utf-8")
    (project / "docs" / "problems.md").unlink()
    commit(run, project.parent)
    train = template / SOURCE / "train.py"
    train.write_text(train.read_text(encoding="utf-8") + "\n# New.\n", encoding="utf-8")
    ignored = template / SOURCE / ".gitignore"
    ignored.write_text(ignored.read_text() + "{{ 'data/' | louder }}\n")
    place = '        environment.globals["library_version"] ='
    louder = f'        environment.filters["louder"] = str.upper\n{place}'
    edit(template / "local_extensions" / "__init__.py", place, louder)
    edit(template / "src" / "samestep" / "__init__.py", "2.0.0.dev0", "2.0.1")
    old = [path.name for path in project.glob("vendor/*")]
    commit(run, template)

    run(project, *update)
    assert (project / "train.py").read_bytes() == train.read_bytes()
    assert (project / ".gitignore").read_text().endswith("DATA/\n")
    assert task.read_text(encoding="utf-8").endswith("\n# Mine.\n")
    assert not list(project.rglob("*.rej")) and not list(project.rglob("*.orig"))
    names = ["--name-only", "--relative", "--no-renames"]
    changed = run(project, "git", "diff", "HEAD", *names).splitlines()
    (wheel,) = project.glob("vendor/*")
    assert wheel.name.startswith("samestep-2.0.1+") and zipfile.is_zipfile(wheel)
    vendor = {f"vendor/{name}" for name in [*old, wheel.name]}
    assert {*changed} == {".cruft.json", ".gitignore", "train.py", "pyproject.toml"} | vendor
    record = read_record(project)
    assert record["commit"] == run(template, "git", "rev-parse", "HEAD").strip()
    assert ODD.items() <= record["context"]["cookiecutter"].items()
    version = wheel.name.removeprefix("samestep-").removesuffix("-py3-none-any.whl")
    assert f'"samestep=={version}"' in (project / "pyproject.toml").read_text()
    commit(run, project.parent)
    assert "already up to date" in run(project, *update)

    # cruft itself gives the answers as a text.
    given = ["--no-input", "--extra-context", json.dumps(ANSWERS)]
    run(tmp_path, "cruft", "create", template, *given)
    record = read_record(tmp_path / "my_project")
    assert record["template"] == str(template)
    assert ODD.items() <= record["context"]["cookiecutter"].items()
