"""What people read: the pages of the template and of its projects.

They are short, their links lead somewhere, and the targets, verbs, files and flags that they name
exist. Slow tests run commands of them.
"""

import ast
import json
import re
import shutil
import sys
import textwrap
import zipfile

import pytest
from accelerate.commands.launch import launch_command_parser
from PIL import Image

from conftest import ROOT, SOURCE, bake, status, train_module
from refusals import cases
from samestep.__main__ import VERBS
from samestep.settings import config
from samestep.training import training

sys.path.append(str(ROOT / "docs"))
import render  # noqa: E402

QUESTIONS = json.loads((ROOT / "cookiecutter.json").read_text(encoding="utf-8"))
TASKS = QUESTIONS["task"]
FENCE = re.compile(r"^```([\w{}-]*)\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"(?<!!)\[[^\]\n]+\]\(([^)\s]+)\)")
# Of recipes of the cookbook, train_pipeline.py, torchrun and ckpt-chaos.
OTHER_FLAGS = "--config --patience --ema_decay --stages --tensor_parallel --nproc-per-node"
OTHER_FLAGS += " --nnodes --rdzv-endpoint --no-deps --ipc --shm-size"
# A command of ours, or flags by themselves.
OURS = re.compile(r"^(?:(?!.*\bpip ).*(?:\bmake |train\.py|-m samestep ).*|--.*)$", flags=re.M)


def pages(folder):
    """The pages of a folder by their names: README.md and its like, and docs/."""
    found = sorted([*folder.glob("*.md"), *folder.glob("docs/*.md")])
    return {str(page.relative_to(folder)): page for page in found if page.name != "CHANGELOG.md"}


def prose(page):
    """A page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def commands(page):
    """The commands of a page, within sentences too."""
    found = FENCE.findall(page.read_text("utf-8"))
    shown = [text for language, text in found if language in ("", "bash")]
    shown += re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(page))
    return OURS.findall("\n".join(shown).replace("\\\n", ""))


@pytest.fixture(scope="module")
def baked(tmp_path_factory):
    """A project of each task, with all clusters, and with recipes that train for a few steps."""
    folder, projects = tmp_path_factory.mktemp("docs"), {}
    for task in TASKS:
        projects[task] = bake(folder / task, task=task, tracker="none", cluster="all")
        path = projects[task].path
        (path / ".venv").symlink_to(sys.prefix)
        for recipe in path.glob("configs/train/*.yaml"):
            text = recipe.read_text(encoding="utf-8")
            recipe.write_text(re.sub(r"^max_steps: \d+", "max_steps: 6", text, flags=re.M))
    return projects


def test_first_pages_are_short_and_that_of_the_template_shows_the_loop(baked):
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(page.split()) <= 1200
    said = re.search(r"a library of ([\d,]+) lines", page)[1].replace(",", "")
    real = [path.read_text("utf-8").count("\n") for path in ROOT.glob("src/samestep/**/*.py")]
    assert abs(int(said) - sum(real)) <= 500
    trainer = (ROOT / "docs" / "from-trainer.md").read_text(encoding="utf-8")
    assert len(trainer.split()) <= 700
    own, shown = (code for language, code in FENCE.findall(page) if language == "python")
    assert textwrap.indent(own, 4 * " ") in training.__doc__ and own.count("\n") <= 12
    train = (ROOT / SOURCE / "train.py").read_text(encoding="utf-8")
    assert textwrap.indent(shown, 4 * " ") in train and shown.count("\n") <= 20
    # The lines of a script of one's own are those of train.py, with other arguments.
    own_loop = [line.split("(")[0].split(" model")[0] for line in own.splitlines()[3:]]
    places = [shown.find(line) for line in own_loop]
    assert -1 not in places and places == sorted(places), own_loop
    for project in baked.values():
        assert (project.path / "README.md").read_text(encoding="utf-8").count("\n") <= 150


def test_ten_pages_of_a_project_lie_rendered_in_the_repository(tmp_path):
    """python docs/render.py writes them anew."""
    found = render.render(bake(tmp_path).path)
    assert len(found) <= 11  # with README.md
    pages = [text.removeprefix(render.WRITTEN) for text in found.values()]
    assert sum(len(FENCE.sub("", text).split()) for text in pages) <= 7_200
    kept = {path.name: path.read_text("utf-8") for path in (ROOT / "docs/project").iterdir()}
    assert kept == found
    assert (ROOT / "docs" / "api.md").read_text("utf-8") == render.api()


def anchors(page):
    """The headings of a page, as GitHub names them in addresses."""
    found = re.findall(r"^#+ (.+)$", prose(page), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("place", [*TASKS, "template"])
def test_links_lead_to_pages_and_headings_and_python_parses(baked, place):
    folder = ROOT if place == "template" else baked[place].path
    all_pages, reached = pages(folder), set()
    for name, page in all_pages.items():
        for language, block in FENCE.findall(page.read_text("utf-8")):
            if language == "python":
                ast.parse(textwrap.dedent(block), filename=name)
        for target in LINK.findall(prose(page)):
            path, _, heading = target.replace("%7B", "{").replace("%7D", "}").partition("#")
            found = (page.parent / path).resolve() if path else page
            if not target.startswith("https://"):
                assert found.exists(), f"{name} links {target}"
                assert not heading or heading in anchors(found), f"{name} links {target}"
                reached.add(found)
    listed = re.findall(r"^[\w/-]+$", (ROOT / "docs" / "index.md").read_text(), flags=re.M)
    reached |= {(ROOT / "docs" / f"{name}.md").resolve() for name in listed}
    lonely = {name for name, page in all_pages.items() if page.resolve() not in reached}
    assert lonely <= {"README.md", "CONTRIBUTING.md", "docs/index.md"}, "no page links these"


@pytest.fixture(scope="module")
def flags():
    """The flags of train.py with any task, and those of all other programs."""
    found = {*OTHER_FLAGS.split()}
    for task in TASKS:
        with train_module(ROOT / "templates" / task / "task.py") as train:
            found |= {f"--{name}" for name in config.fields_of(train.Config)}
    for action in launch_command_parser()._actions:
        found.update(action.option_strings)
    for path in [*ROOT.glob("src/samestep/*/*.py"), *ROOT.glob("benchmarks/*.py")]:
        found.update(re.findall(r'"(--[\w-]+)"', path.read_text("utf-8")))
    return found


@pytest.mark.parametrize("place", [*TASKS, "template"])
def test_commands_name_what_is_there(baked, flags, place):
    folders = [baked[TASKS[0]].path, ROOT] if place == "template" else [baked[place].path]
    makefiles = [(folder / "Makefile").read_text("utf-8") for folder in (*folders, ROOT)]
    targets = {*re.findall(r"^([a-z-]+):", "\n".join(makefiles), flags=re.M)}
    texts = {name: "\n".join(commands(page)) for name, page in pages(folders[-1]).items()}
    for path in [*folders[-1].glob("configs/*/*.yaml"), *folders[-1].glob("cluster/*")]:
        comments = path.read_text(encoding="utf-8").replace("\\\n# ", "")
        found = re.findall(r"^# +((?:make|accelerate|python) .*)", comments, flags=re.M)
        texts[path.name] = "\n".join(found)
    for name, text in texts.items():
        unknown = {*re.findall(r"(?:^|&& )make ([a-z][a-z-]*)", text, flags=re.M)} - targets
        unknown |= {*re.findall(r"-m samestep ([a-z]+)", text)} - {*VERBS}
        unknown |= {*re.findall(r"(?<![\w-])--[a-z][\w.-]*", text)} - flags
        for path in re.findall(r"(?:configs|cluster|benchmarks)/[\w/*.-]+\w", text):
            there = any([*folder.glob(path)] for folder in folders)
            if not there and not path.endswith("X.yaml"):
                unknown.add(path)
        assert not unknown, f"{name} names {sorted(unknown)}"


SMOKE = ["--config", "configs/train/smoke.yaml", "--output_dir", "runs/default"]


@pytest.mark.slow
def test_commands_run(tmp_path, baked):
    project = baked[TASKS[0]].copied(tmp_path)
    path = project.path
    (wheel,) = path.glob("vendor/*.whl")  # which has the examples too
    zipfile.ZipFile(wheel).extractall(tmp_path / "library")
    project.train(1, *SMOKE)
    shutil.copytree(path / "runs" / "default", path / "runs" / "mine")
    for name, command in cases("commands"):
        assert command in (path / name).read_text("utf-8"), f"{name} has no {command}"
        project.run("bash", "-ec", command, PYTHONPATH=str(tmp_path / "library"))
        if command.startswith("mv"):  # the page says to remove the fields of the old task
            recipe = path / "configs" / "train" / "default.yaml"
            recipe.write_text(recipe.read_text().partition("\ntask:")[0] + "\n")
    assert status(path / "runs" / "plain")["state"] == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_the_first_command_tunes_a_model_on_the_rows_beside_it(tmp_path, baked, task):
    """With a folder in the place of the Hub's name, and each row in sixty versions."""
    project = baked[task].copied(tmp_path)
    length = {"text_classification": 512, "preference": 1024}.get(task)  # those of the recipe
    longer = ["--task.max_length", length] if length else []
    project.train(1, *SMOKE, *longer)
    (project.path / "photos").mkdir()
    for i in range(60):
        Image.new("RGB", (40, 40), (i, 0, 0)).save(project.path / "photos" / f"{i}.jpg")
    blocks = FENCE.findall((project.path / "README.md").read_text(encoding="utf-8"))
    rows = dict(reversed(blocks))["json"].splitlines() * 60
    rows = [re.sub(r'(?<=[.?])(?=")', f" {i}", row) for i, row in enumerate(rows[:60])]
    rows = [re.sub(r"photos/\d", f"photos/{i}", row) for i, row in enumerate(rows)]
    command = next(text for _, text in blocks if "--task.data" in text).split("\nmake ")[0]
    (project.path / re.search(r"--task.data (\S+)", command)[1]).write_text("\n".join(rows))
    command = re.sub(r"(?<=--task.model_name_or_path )\S+", "runs/default/model", command)
    small = "--max_steps 2 --global_batch_size 4 --micro_batch_size 4"
    project.run("bash", "-ec", command.replace('ARGS="', f'ARGS="{small} '))
    assert status(project.path / "runs" / "tuned")["state"] == "finished"
