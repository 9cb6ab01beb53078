"""Every answer gives a sound project, or is refused in one line that says what to write instead.

tests/golden/make.txt has what is typed on machines whose tools are stand-ins, and what comes of
it: lines that are printed, after + what is installed, after ? what nvidia-smi is asked.
"""

import ast
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from cookiecutter.cli import main as cookiecutter_command

import limits
from conftest import DEFAULT_SLUG, ROOT, SOURCE, bake, copy_template, template
from refusals import cases, table

sys.path.insert(0, str(ROOT))
import local_extensions

QUESTIONS = json.loads((ROOT / "cookiecutter.json").read_text(encoding="utf-8"))
VERBATIM = QUESTIONS["_copy_without_render"]
GOLDEN = ROOT / "tests" / "golden_tree.txt"
LIMITS = json.loads((ROOT / "tests" / "limits.json").read_text(encoding="utf-8"))
LICENSE_WORDS, ANSWERS = cases("licenses"), cases("answers")


def files(folder):
    """Every file below a folder, as sorted relative paths."""
    return sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file())


def check_files_parse(project):
    """Parse every file of a project with the parser of its kind; ruff parses Python."""
    for name in files(project):
        path = project / name
        if name.suffix == ".whl":
            continue
        text = path.read_text(encoding="utf-8")
        assert text.strip(), f"{name} is empty"
        assert text.endswith("\n") and not text.endswith("\n\n"), f"{name}: its end"
        if name.suffix in (".yaml", ".yml"):
            assert list(yaml.safe_load_all(text))
        elif name.suffix == ".toml":
            tomllib.loads(text)
        elif name.suffix in (".sh", ".sbatch"):
            subprocess.run(["sh" if name.suffix == ".sh" else "bash", "-n", path], check=True)


def check_ruff(folder):
    """Lint and format-check all projects in a folder, each with its own settings."""
    for command in (["check", "--quiet"], ["format", "--diff", "--quiet"]):
        words = [sys.executable, "-m", "ruff", *command, "--no-cache", str(folder)]
        ruff = subprocess.run(words, capture_output=True, text=True)
        assert ruff.returncode == 0, (ruff.stdout + ruff.stderr)[:3000]


@pytest.mark.parametrize("license_name, cluster, task, tracker", ANSWERS)
def test_a_project_is_what_was_asked_for(tmp_path, license_name, cluster, task, tracker):
    """Its files parse, its Python is a copy, its license and dependencies are those chosen."""
    project = bake(tmp_path, license=license_name, cluster=cluster, task=task, tracker=tracker).path
    check_files_parse(project)
    check_ruff(project)
    for name in files(project):
        if name.suffix not in (".py", ".whl"):  # Python may hold braces
            text = (project / name).read_text(encoding="utf-8")
            assert not re.search(r"(?<!\.)cookiecutter\.\w|\{%|%\}|\{#|(?<!\$)\{\{", text), name
    sources = {project / "task.py": template() / "templates" / task / "task.py"}
    for pattern in ("*.py", *VERBATIM):
        found = [*(template() / SOURCE).glob(pattern)]
        assert found or "cache" in pattern, f"_copy_without_render: nothing matches {pattern}"
        copies = {project / source.relative_to(template() / SOURCE): source for source in found}
        sources = {**copies, **sources}
    for copy, source in sources.items():
        assert copy.read_bytes() == source.read_bytes(), copy
        assert os.access(copy, os.X_OK) == os.access(source, os.X_OK), copy

    text = (project / "LICENSE").read_text(encoding="utf-8")
    year = datetime.now(UTC).year
    assert re.search(rf"Copyright (\(c\) )?{year},? My Training authors", text)
    assert [name for name, words in LICENSE_WORDS.items() if words in text] == [license_name]
    settings = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))
    metadata = settings["project"]
    assert settings["dependency-groups"] == {"dev": metadata["optional-dependencies"]["dev"]}
    names = {re.split("[<>=~!]", line)[0] for line in metadata["dependencies"]}
    trackers = set(QUESTIONS["tracker"]) - {"none"}
    assert names & trackers == {tracker} & trackers
    assert ("peft" in names) == (task in ("causal_lm", "preference"))
    assert ("scikit-learn" in names) == ("classification" in task)
    extras = {"dev", "deepspeed", "s3"} | (trackers - {tracker})
    assert set(metadata["optional-dependencies"]) == extras
    assert metadata["name"] == DEFAULT_SLUG and metadata["description"] == "My Training"


def test_the_lowest_versions_that_are_tried_are_the_bounds_of_a_project():
    """Of all tasks, trackers and extras."""
    text = (ROOT / SOURCE / "pyproject.toml").read_text(encoding="utf-8")
    bounds = re.findall(r'"([\w-]+)>=([\w.]+)"', text)
    lowest = re.findall(r"^([\w-]+)==(.+)$", (ROOT / "tests" / "lowest.txt").read_text(), re.M)
    assert lowest == sorted(lowest) and len(lowest) > 20
    assert {*lowest} == {each for each in bounds if each[0] != "setuptools"}


def imports(path, at_once=False):
    """The modules that a file imports when it runs, or at its start; the library's by their own
    names."""
    found, tree = set(), ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [each for each in tree.body if ast.unparse(each)[:16] != "if TYPE_CHECKING"]
    for node in tree.body if at_once else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_imports_of_the_library_go_down_and_in_no_circle():
    """In the order of the page that explains them, which names the programs too."""
    page = (ROOT / SOURCE / "docs" / "library.md").read_text(encoding="utf-8")
    table = page.partition("\n## Subpackages")[2].partition("\n## ")[0]
    rooms = re.findall(r"^\| `(\w+)` \|", table, flags=re.M)
    (verbs,) = re.findall(r"^\| `programs` .*: ([a-z, ]+) \|$", table, flags=re.M)
    assert {*verbs.split(", ")} == {p.stem for p in ROOT.glob("src/*/programs/[a-z]*.py")}
    paths = {
        ".".join(path.relative_to(ROOT / "src").with_suffix("").parts): path
        for path in (ROOT / "src").rglob("*.py")
        if path.stem not in ("__init__", "__main__")
    }
    arrows = {name: imports(path) & paths.keys() for name, path in paths.items()}
    assert {name.split(".")[1] for name in arrows} == {*rooms}
    depth = {name: rooms.index(name.split(".")[1]) for name in arrows}
    for name, targets in arrows.items():
        assert not [each for each in targets if depth[each] < depth[name]], name
    remaining = dict(arrows)
    while leaves := [name for name, targets in remaining.items() if not targets & {*remaining}]:
        for name in leaves:
            del remaining[name]
    assert not remaining, f"these import each other in a circle: {sorted(remaining)}"


def test_no_room_grows():
    """What is new pays with lines of the same room."""
    rooms = limits.rooms()
    assert list(LIMITS) == list(rooms)
    for room, paths in rooms.items():
        over = limits.count(paths) - LIMITS[room]["lines"]
        assert over <= 0, f"{room} exceeds tests/limits.json by {over} lines"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not in a repository")
def test_no_file_of_the_repository_is_large():
    """A wheel of 53 MB once came in with a merge; what is drawn or recorded has 200 kB at most."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    paths = [ROOT / os.fsdecode(name) for name in listed.stdout.split(b"\0") if name]
    assert len(paths) > 500
    assert [path for path in paths if path.is_file() and path.stat().st_size > 500_000] == []


def library_names(source):
    """What a file imports from the library, and what it uses of modules of the library."""
    found = set()
    imported = re.findall(r"^from samestep([\w.]*) import (\([^)]+\)|.+)$", source, flags=re.M)
    for package, names in imported:
        for name in re.findall(r"\w+", names):
            module = ROOT.joinpath("src", "samestep", *package.split("."), f"{name}.py")
            if module.exists():
                found |= {*re.findall(rf"\b{name}\.\w+", source)}
            else:
                found.add(name)
    return sorted(found)


@pytest.mark.parametrize("task", QUESTIONS["task"])
def test_a_task_uses_few_names_of_the_library(task):
    """A reader looks up each of them."""
    source = (ROOT / "templates" / task / "task.py").read_text(encoding="utf-8")
    names = library_names(source)
    assert len(names) <= (25 if task in ("causal_lm", "preference") else 20), names


@pytest.mark.parametrize("task", QUESTIONS["task"])
def test_a_project_is_a_few_files_on_the_library(projects, task):
    """train.py -> task.py, and both on samestep: there are no other arrows. What they import is a
    declared dependency: a package that only comes along with another one can go with it."""
    project = projects[task].path
    python = [name for name in files(project) if name.suffix == ".py"]
    assert [*map(str, python)] == ["task.py", "tests/test_training.py", "train.py"]
    own = {"train", "task"}
    assert imports(project / "train.py") & own == {"task"}
    assert not imports(project / "task.py") & own
    (wheel,) = project.glob("vendor/*")
    settings = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))
    version = wheel.name.removeprefix("samestep-").removesuffix("-py3-none-any.whl")
    assert f"samestep=={version}" in settings["project"]["dependencies"]
    assert settings["tool"]["uv"]["sources"]["samestep"]["path"] == f"vendor/{wheel.name}"
    with zipfile.ZipFile(wheel) as archive:
        for path in (ROOT / "src").rglob("*.py"):
            data = archive.read(str(path.relative_to(ROOT / "src")))
            if path.parent.name == "samestep" and path.name == "__init__.py":
                number = f'__version__ = "{version}"'.encode()
                data = data.replace(number, b'__version__ = "2.0.0.dev0"')
            assert data == path.read_bytes()
        assert archive.read(f"samestep/examples/{task}.py") == (project / "task.py").read_bytes()
    extras = settings["project"]["optional-dependencies"].values()
    declared = [*settings["project"]["dependencies"], *itertools.chain(*extras)]
    known = {re.split("[<>=~!]", line)[0].replace("-", "_") for line in declared} | own
    known |= {*sys.stdlib_module_names, "conftest", "yaml", "PIL", "sklearn"}
    for name in python:
        missing = {module.split(".")[0] for module in imports(project / name)} - known
        assert not missing, f"{name} imports {missing}"
    recipes = {path.stem for path in project.glob("configs/train/*")}
    assert recipes == {path.stem for path in (ROOT / "templates" / task).glob("*.yaml")}
    for name in recipes:
        text = (project / "configs" / "train" / f"{name}.yaml").read_text(encoding="utf-8")
        assert text.startswith("# ") and "accelerate launch --config_file configs/" in text
        assert f"configs/train/{name}.yaml" in text


def test_golden_tree(tmp_path):
    """The files of a project; if they change: make test ARGS="-k golden_tree" UPDATE_GOLDEN=1"""
    names = [re.sub(r"[+]\w{8}", "+CONTENT", str(name)) for name in files(bake(tmp_path).path)]
    tree = "".join(f"{name}\n" for name in names)
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(tree, encoding="utf-8")
    assert tree == GOLDEN.read_text(encoding="utf-8"), test_golden_tree.__doc__


SLUGS = {"日本語": "ri_ben_yu", "class": "class", "Torch": "project_torch", "1": "project_1"}
SLUGS |= {"My Training": "my_training", "x" * 100: "x" * 50, "!": "project"}


def test_default_slug_is_always_valid():
    for name, slug in SLUGS.items():
        assert local_extensions.default_slug(name) == slug and local_extensions.is_slug(slug)


@pytest.fixture
def cook(tmp_path):
    """Run the command `cookiecutter`: its exit code, what it printed, and the files it wrote."""

    def cook(*arguments, **config):
        config |= {"replay_dir": str(tmp_path / "replay"), "cookiecutters_dir": str(tmp_path)}
        file, new = tmp_path / "config.yaml", tmp_path / "new"
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        command = [template(), "--config-file", file, "-o", new, *arguments]
        result = CliRunner().invoke(cookiecutter_command, [*map(str, command)])
        return result.exit_code, result.output, files(new) if new.exists() else []

    return cook


def is_one_line(ended, words):
    """Whether cookiecutter ended with one line that holds these words, and without a file."""
    code, output, written = ended
    assert code == 1 and written == []
    assert output.count("\n") == 1 and words in output and len(output) < 300, output


INJECTION = '"; import os; os.system("touch pwned") #'
ACCEPTED = cases("accepted")


def test_hostile_answers_that_are_accepted(tmp_path):
    before = files(template())
    for number, answers in enumerate(ACCEPTED):
        project = bake(tmp_path / str(number), **answers).path
        assert project.parent == tmp_path / str(number)
        check_files_parse(project)
        metadata = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))
        told = {
            "project_name": metadata["project"]["description"],
            "project_slug": metadata["project"]["name"],
            "author_name": metadata["project"]["authors"][0]["name"],
        }
        assert answers.items() <= told.items()
        for recipe in project.glob("configs/train/*.yaml"):
            assert yaml.safe_load(recipe.read_text())["project"] == told["project_slug"]
    check_ruff(tmp_path)
    assert not list(tmp_path.rglob("pwned")) and files(template()) == before


@pytest.mark.parametrize("answers, words", table("answers"))
def test_hostile_answers_that_are_refused(tmp_path, cook, answers, words):
    before = files(template())
    ((question, answer),) = answers.items()
    is_one_line(cook("--no-input", f"{question}={answer}"), words)
    written = {path.name for path in tmp_path.iterdir()}  # a replay, by cookiecutter
    assert written <= {"config.yaml", "replay"} and files(template()) == before


def test_the_command_says_what_is_next_and_drops_caches(tmp_path):
    """Tools leave binary files in a template that somebody works on; no project gets them."""
    source = copy_template(tmp_path / "template")
    for cache in (".mypy_cache", "__pycache__", "tests/__pycache__"):
        (source / SOURCE / cache).mkdir(parents=True)
        (source / SOURCE / cache / "binary").write_bytes(b"{{ \xff")
    command = [sys.executable, "-m", "cookiecutter", "template", "--no-input", "-o", "new"]
    env = os.environ | {"HOME": str(tmp_path)}
    options = {"cwd": tmp_path, "env": env, "capture_output": True, "text": True}
    result = subprocess.run(command, check=True, **options)
    said = f"{DEFAULT_SLUG} is ready. Next, in it: make setup, then make train\n"
    assert (result.stdout, result.stderr) == (said, "")
    assert files(tmp_path / "new" / DEFAULT_SLUG) == files(bake(tmp_path / "clean").path)


def test_a_replayed_answer_is_checked_again_and_runs_no_code(tmp_path, cook):
    """A replay skips the questions, and so the first check."""
    bake(tmp_path / "first")
    context = json.loads((template().parent / "template.json").read_text(encoding="utf-8"))
    file = tmp_path / "replay.json"
    for question, answer, words in [
        ("project_slug", "../../x", "names no project"),
        ("cluster", INJECTION, "is none of none, slurm"),
    ]:
        changed = {**context, "cookiecutter": context["cookiecutter"] | {question: answer}}
        file.write_text(json.dumps(changed), encoding="utf-8")
        is_one_line(cook("--replay-file", file), words)
    hook = (ROOT / "hooks" / "post_gen_project.py").read_text(encoding="utf-8")
    assert "cookiecutter." not in hook and hook.count("{{") == 1
    assert not list(tmp_path.rglob("pwned"))
    file.write_text(json.dumps(context), encoding="utf-8")
    assert cook("--replay-file", file)[0] == 0


def test_edits_that_cannot_be_kept_are_not_skipped_over(cook, tmp_path):
    """cookiecutter -s asks only for what it renders: it would replace train.py."""
    project = tmp_path / "new" / DEFAULT_SLUG
    project.mkdir(parents=True)
    (project / "train.py").write_text("# mine\n")
    code, output, written = cook("--no-input", "-f", "-s")
    assert code == 1 and output.count("\n") == 1 and "Use `make update`" in output
    assert written == [Path(DEFAULT_SLUG, "train.py")]
    assert (project / "train.py").read_text() == "# mine\n"


TOOLS = ROOT / "tests" / "stand_ins"
TRANSCRIPT = ROOT / "tests" / "golden" / "make.txt"
RECIPES = ("configs/train/default.yaml", "configs/train/smoke.yaml")
PYPROJECT = """
[project]
dependencies = [
    "torch>=2.13",
]
"""


@pytest.fixture
def answer(tmp_path):
    """What comes of a command in a project whose tools are stand-ins."""
    for name in ("Makefile", "install.sh"):
        shutil.copy(template() / SOURCE / name, tmp_path)
    shutil.copytree(template() / SOURCE / "configs" / "accelerate", tmp_path / "configs/accelerate")
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    for name in ("vendor/samestep-1.0.0+0-py3-none-any.whl", *RECIPES):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    log = tmp_path / "log"
    env = {"PATH": f"{TOOLS}:/usr/bin:/bin", "MORE": str(TOOLS / "more"), "FAKE_LOG": str(log)}

    def answer(command):
        log.write_text("")
        options = {"cwd": tmp_path, "env": env, "stderr": subprocess.STDOUT, "text": True}
        result = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, **options)
        printed = re.sub(r"^make: .*\n", "", result.stdout, flags=re.M)
        printed = re.sub(r"^Makefile:\d+", "Makefile", printed, flags=re.M)
        printed = re.sub(r"done, \S+ in", "done, SIZE in", printed)
        printed += log.read_text() + f"exit code {result.returncode}\n" * bool(result.returncode)
        return f"$ {command}\n{printed}"

    return answer


MACHINES = re.split(r"\n(?=== )", TRANSCRIPT.read_text(encoding="utf-8").strip())


@pytest.mark.parametrize("number", range(len(MACHINES)))
def test_golden_of_what_is_installed_and_said(answer, number):
    title, *lines = MACHINES[number].splitlines(keepends=True)
    commands = [line[2:].strip() for line in lines if line.startswith("$ ")]
    found = (title + "".join(map(answer, commands))).strip()
    if os.environ.get("UPDATE_GOLDEN"):
        MACHINES[number] = found
        TRANSCRIPT.write_text("\n\n".join(map(str.strip, MACHINES)) + "\n", encoding="utf-8")
    assert found == MACHINES[number].strip()
