"""`make update` merges what is new in the template, keeps edits, and loses nothing of its owner."""

import json
import os
import subprocess
import sys

import pytest

from conftest import SOURCE, copy_template
from samestep.programs import update

ODD = {"project_name": 'A "b" \\ $HOME `id` \U0001f600', "author_name": "O'Neil; -- é"}
SLUG = "my_project"


class Repositories:
    """A template and a project, each a git repository, and how commands are run in the project."""

    def __init__(self, folder):
        self.template = copy_template(folder / "template")
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        self.env |= {"HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"}
        for who in ("AUTHOR", "COMMITTER"):
            self.env |= {f"GIT_{who}_NAME": "Test", f"GIT_{who}_EMAIL": "test@example.org"}
        self.commit(self.template)
        self.project = self.bake(folder / "new")
        self.commit(self.project)

    def bake(self, folder, template=None, slug=SLUG):
        """Runs cookiecutter, in a process as its users do; the project's path."""
        answers = {"tracker": "none", "project_slug": slug, **ODD}
        command = [sys.executable, "-m", "cookiecutter", template or self.template, "--no-input"]
        words = [f"{name}={answer}" for name, answer in answers.items()]
        self.run(*command, "--output-dir", folder, *words, folder=self.template.parent)
        return folder / slug

    def run(self, *command, folder=None, code=0):
        """What a command in the project printed, which ends with this exit code."""
        folder = folder or self.project
        options = {"cwd": folder, "env": self.env, "capture_output": True, "text": True}
        result = subprocess.run(list(map(str, command)), stdin=subprocess.DEVNULL, **options)
        assert result.returncode == code, f"{command}: {result.stdout}{result.stderr}"
        return result.stdout.strip() if code < 2 else result.stderr

    def git(self, *words, folder=None):
        return self.run("git", *words, folder=folder)

    def commit(self, folder, message="state"):
        """Commits everything in a folder, as the first commit if need be; its name."""
        self.git("init", "--quiet", folder=folder)
        self.git("add", "--all", folder=folder)
        self.git("commit", "--quiet", "--message", message, folder=folder)
        return self.git("rev-parse", "HEAD", folder=folder)

    def update(self, *words, code=0, folder=None):
        command = [sys.executable, "-m", "samestep", "update", "--template", self.template, *words]
        return self.run(*command, code=code, folder=folder)

    def refuses(self, words, *arguments, **options):
        """An update that ends in one line with these words, and changes nothing."""
        before = self.git("for-each-ref", folder=options.get("folder"))
        line = self.update(*arguments, code=2, **options)
        assert line.startswith("samestep update: ") and line.count("\n") == 1, line
        assert words in line, line
        assert self.git("for-each-ref", folder=options.get("folder")) == before

    def state(self):
        """HEAD, and what is not committed."""
        return self.git("rev-parse", "HEAD"), self.git("status", "--porcelain")

    def record(self):
        return json.loads((self.project / ".cookiecutter.json").read_text(encoding="utf-8"))


@pytest.fixture
def both(tmp_path):
    return Repositories(tmp_path)


def edit(path, old, new):
    """Replaces a text that a file has once."""
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{path}: {text.count(old)} x {old!r}"
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_an_update_brings_what_is_new_and_keeps_edits(both):
    """Twice: each update is one commit with the template's difference alone."""
    project, source = both.project, both.template / SOURCE
    first = both.git("rev-parse", "HEAD", folder=both.template)
    answers = both.record()["answers"]
    assert both.record()["template"] is None and both.record()["commit"] == first
    assert ODD.items() <= answers.items() and str(both.template) not in str(both.record())
    assert f"up to date: the template is at {first[:12]}" == both.update()

    # The owner edits train.py and task.py, adds and removes a file; the template does likewise.
    edit(project / "train.py", "\ndef main(", "\n# Mine.\ndef main(")
    edit(project / "task.py", "What is trained", "What I train")
    (project / "own.py").write_text("mine = 1\n")
    (project / "docs" / "problems.md").unlink()
    mine = both.commit(project)
    with open(source / "train.py", "a", encoding="utf-8") as file:
        file.write("# New.\n")
    (source / "docs" / "new.md").write_text("# {{ cookiecutter.mood }}\n")
    (source / "docs" / "tracking.md").unlink()
    edit(both.template / "cookiecutter.json", '    "__year"', '    "mood": "good",\n    "__year"')
    with open(both.template / "src" / "samestep" / "__init__.py", "a") as file:
        file.write("NEW = 1\n")
    second = both.commit(both.template)

    printed = both.update()
    assert (
        printed.splitlines()[0] == "mood is a new question, answered 'good'; mood=ANSWER changes it"
    )
    assert both.git("rev-parse", "HEAD^") == mine and both.state()[1] == ""
    train = (project / "train.py").read_text(encoding="utf-8")
    assert "# Mine.\n" in train and train.endswith("# New.\n")
    assert "What I train" in (project / "task.py").read_text(encoding="utf-8")
    assert (project / "docs" / "new.md").read_text() == "# good\n"
    (wheel,) = project.glob("vendor/*")
    settings = (project / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"samestep=={wheel.name.split("-")[1]}"' in settings and wheel.name in settings
    expected = {"template": None, "commit": second, "answers": {**answers, "mood": "good"}}
    assert both.record() == expected
    own = both.git("diff", "template", "--name-only").split()
    assert own == ["docs/problems.md", "own.py", "task.py", "train.py"]
    assert "up to date" in both.update()

    # The second time, with another answer.
    edit(source / "docs" / "new.md", "mood }}", "mood }} day")
    third = both.commit(both.template)
    tip = both.git("rev-parse", "template")
    both.update("mood=bad", "tracker=trackio")
    assert (project / "docs" / "new.md").read_text() == "# bad day\n"
    assert both.record()["answers"] == {**answers, "mood": "bad", "tracker": "trackio"}
    assert both.record()["commit"] == third and both.git("rev-parse", "template^") == tip
    changed = both.git("show", "--name-only", "--format=").splitlines()
    assert {".cookiecutter.json", "docs/new.md", "pyproject.toml"} <= {*changed}
    assert "train.py" not in changed and not [*project.glob("vendor/*")][1:]
    both.refuses("moood is not a question of the template: project_name", "moood=bad")


def test_conflicts_are_in_edited_lines_alone_and_an_update_can_be_undone(both):
    """A file that the owner removed counts as edited."""
    project, source = both.project, both.template / SOURCE
    for folder, word in ((project, "mine"), (source, "new")):
        edit(folder / "train.py", "\ndef main(", f"\n# {word}\ndef main(")
    edit(source / "docs" / "problems.md", "# Troubleshooting", "# Many runs")
    (project / "docs" / "problems.md").unlink()
    both.commit(project)
    second, before = both.commit(both.template), both.state()
    for _ in range(2):
        lines = both.update(code=1).splitlines()
        assert lines[0] == "conflicts in docs/problems.md, train.py"
        assert "<<<<<<< " in (project / "train.py").read_text(encoding="utf-8")
        both.refuses("there are uncommitted changes; commit or stash them")
        assert lines[2] == "or undo the update: git cherry-pick --abort"
        both.git("cherry-pick", "--abort")
        assert both.state() == before
    assert both.record()["commit"] != second
    both.update(code=1)
    both.git("checkout", "--theirs", "train.py")
    both.git("rm", "--quiet", "docs/problems.md")
    command = lines[1].partition(": ")[2].removesuffix(" && make setup")
    assert command == "git add --all && git commit --no-edit"
    both.run("bash", "-c", command)
    assert both.record()["commit"] == second and "up to date" in both.update()
    assert both.git("diff", "template", "--name-only") == "docs/problems.md"


@pytest.mark.slow
def test_what_cannot_be_updated_is_refused(both):
    """In one line that says what to do, and without a change."""
    project = both.project
    train = project / "train.py"
    train.write_text("# mine\n")
    both.refuses("there are uncommitted changes; commit or stash them")
    both.git("checkout", "train.py")
    command = [sys.executable, "-m", "samestep", "update"]
    line = both.run(*command, code=2)
    assert ".cookiecutter.json names no URL; write: make update TEMPLATE=URL_OR_PATH" in line
    line = both.run(*command, "--template", "https://me:secret@localhost:1/x", code=2)
    assert "localhost" in line and "secret" not in line and line.count("\n") == 1
    both.refuses("'mood' is not of the form NAME=ANSWER", "mood")
    both.refuses(
        "cannot be generated: GPL provided for choice variable license, but the", "license=GPL"
    )

    old = both.git("rev-parse", "HEAD", folder=both.template)
    (both.template / SOURCE / "notes.txt").write_text("new\n")
    both.commit(both.template)
    (project / ".git" / "info" / "exclude").write_text("notes.txt\n")
    (project / "notes.txt").write_text("mine\n")
    both.refuses("the update brings notes.txt, which is here and not committed")
    assert (project / "notes.txt").read_text() == "mine\n"
    both.git("branch", "template")
    both.refuses("rename it: git branch -m template NAME")
    both.git("branch", "-D", "template")
    (project / "notes.txt").unlink()
    both.update()
    both.git("checkout", "--quiet", old, folder=both.template)
    both.refuses(f"the template is at {old[:12]}, which is older than ")
    both.git("checkout", "--quiet", "template")
    both.git("checkout", "--quiet", "-", folder=both.template)
    (both.template / SOURCE / "notes.txt").unlink()
    both.commit(both.template)
    both.refuses("fatal: cannot force update the branch 'template'")
    both.git("checkout", "--quiet", "-")

    file = project / ".cookiecutter.json"
    for content, words in (
        ({"commit": "f" * 40}, "the template has no commit ffffffffffff, which .cookiecutter.json"),
        ({"commit": None}, "names no commit, as the template was not a git repository"),
        ({"commit": "--upload-pack=touch pwned"}, "names no commit"),
        ({"answers": {"task": ["causal_lm"]}}, "has no `answers` that are texts"),
        ({"template": ["x"]}, "`template` is neither a URL nor null"),
        ({"answers": {**both.record()["answers"], "project_slug": "../x"}}, "not a plain name"),
        ({"answers": {**both.record()["answers"], "author_name": "{{ 1 }}"}}, "contains Jinja"),
    ):
        file.write_text(json.dumps({**both.record(), **content}))
        both.commit(project)
        both.refuses(words)
        both.git("revert", "--no-edit", "HEAD")
    file.rename(project / "away.json")
    both.refuses("docs/library.md says how to write it")
    (project / "away.json").rename(file)
    (project / ".git").rename(both.template.parent / "away.git")
    line = both.update(code=2)
    assert "run: git init && git add --all && git commit -m generated" in line


def test_without_cookiecutter_a_line_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr(update.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(update.shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="cookiecutter is not installed; run: pipx install"):
        update.generate(tmp_path, "HEAD", {}, tmp_path)
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_a_url_is_recorded_without_credentials(both, tmp_path):
    """git is told that the address leads to a folder here."""
    url, public = (f"https://{user}example.org/template.git" for user in ("me:secret@", ""))
    for address in (url, public):
        both.git("config", "--global", "--add", f"url.{both.template}.insteadOf", address)
    both.project = both.bake(tmp_path / "by_url", url)
    assert both.record()["template"] == public
    both.commit(both.project)
    for words in (["--template", url], []):
        (both.template / SOURCE / "notes.txt").write_text(f"{len(words)}\n")
        new = both.commit(both.template)
        both.run(sys.executable, "-m", "samestep", "update", *words)
        assert both.record()["template"] == public and both.record()["commit"] == new
    files = [path for path in both.project.rglob("*") if path.is_file()]
    assert len(files) > 100 and not [path for path in files if b"secret" in path.read_bytes()]


@pytest.mark.slow
def test_a_project_in_a_subfolder_of_a_repository(both, tmp_path):
    """Beside a second one, whose equal files stay as they are; one file of the first is removed."""
    place = tmp_path / "mono" / "sub [x]"
    first, second = both.bake(place), both.bake(place, slug="other")
    (first / "docs" / "problems.md").unlink()
    both.commit(tmp_path / "mono")
    before = {path: path.read_bytes() for path in second.rglob("*") if path.is_file()}
    with open(both.template / SOURCE / "train.py", "a", encoding="utf-8") as file:
        file.write("# New.\n")
    both.commit(both.template)
    assert "2 files changed" in both.update(folder=first)
    assert (first / "train.py").read_text(encoding="utf-8").endswith("# New.\n")
    assert {path: path.read_bytes() for path in second.rglob("*") if path.is_file()} == before
    assert both.git("status", "--porcelain", folder=first) == ""
    own = both.git("diff", "template", "--name-only", folder=first).splitlines()
    assert own == [f"sub [x]/{first.name}/docs/problems.md"]
