"""What people read: the pages of the template and of its projects.

They are short, their links lead somewhere, and the targets, verbs, files and flags that they name
exist; their words are those of the field. Slow tests run commands of them, and
the examples and the notebook. The JSON schema, by which editors check recipes, knows what train.py
knows.
"""

import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile

import jsonschema
import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from PIL import Image

import samestep
from conftest import ROOT, SOURCE, bake, lines, status, train_module, write_recipe
from refusals import cases, refused, table
from samestep.__main__ import VERBS
from samestep.programs.schema import recipe_schema
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


def test_first_pages_are_short_and_that_of_the_template_shows_the_lines_of_the_loop(baked):
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(page.split()) <= 1000
    said = re.search(r"a library of ([\d,]+) lines", page)[1].replace(",", "")
    real = [path.read_text("utf-8").count("\n") for path in ROOT.glob("src/samestep/**/*.py")]
    assert abs(int(said) - sum(real)) <= 500
    assert len((ROOT / "docs" / "from-trainer.md").read_text("utf-8").split()) <= 700
    shown, diff = (code for language, code in FENCE.findall(page) if language in ("yaml", "diff"))
    own = "".join(re.findall(r"^\+((?!from ).*\n)", diff, flags=re.M))
    assert textwrap.indent(own, 4 * " ") in training.__doc__ and own.count("\n") <= 12
    train = (ROOT / SOURCE / "train.py").read_text(encoding="utf-8")
    own_loop = [line.split("(")[0].split(" model")[0] for line in own.splitlines()[3:]]
    places = [train.find(line) for line in own_loop]
    assert -1 not in places and places == sorted(places), own_loop
    fsdp2 = (ROOT / SOURCE / "configs/accelerate/fsdp2.yaml").read_text(encoding="utf-8")
    assert {*shown.splitlines()} < {*fsdp2.splitlines()}
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


WORDS = cases("words").items()
FORBIDDEN = {re.compile(rf"\b({word})\b", re.I): instead for word, instead in WORDS}


def found(place, text):
    """The forbidden words of a text, each with what to write."""
    text = re.sub(r"`[^`\n]*`|\]\([^)\s]*\)|\b[A-Z]{2,}\b", "", text)  # code, links, names
    for word, instead in FORBIDDEN.items():
        yield from (f"{place}: {match[0]}: {instead}" for match in word.finditer(text))


def test_pages_use_the_words_of_the_field():
    wrong, pages = [], [*ROOT.glob("docs/**/*.md"), *ROOT.glob(f"{SOURCE}/docs/*.md")]
    for page in [ROOT / "README.md", ROOT / SOURCE / "README.md", *pages]:
        text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S)
        wrong += found(page.name, text)
    assert not wrong


def test_no_fence_is_wider_than_a_narrow_window():
    """But for diffs of train.py and task.py, which the site wraps, and autodoc."""
    wide, pages = [], [*ROOT.glob("docs/**/*.md"), *ROOT.glob(f"{SOURCE}/docs/*.md")]
    for page in [ROOT / "README.md", ROOT / SOURCE / "README.md", *pages]:
        for language, code in FENCE.findall(page.read_text("utf-8")):
            lines = [] if language in ("diff", "{eval-rst}") else code.splitlines()
            wide += [f"{page.name}: {line}" for line in lines if len(line) > 88]
    assert not wide


def strings(node):
    """The strings of a part of a program."""
    constants = [each for each in ast.walk(node) if isinstance(each, ast.Constant)]
    return [each.value for each in constants if isinstance(each.value, str)]


def shown(tree):
    """What a user reads of a module: errors, the help of flags and of fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise):
            yield from strings(node)
        elif isinstance(node, ast.Call):
            for keyword in node.keywords:
                yield from strings(keyword.value) if keyword.arg == "help" else ()
        elif isinstance(node, ast.ClassDef):
            for each in node.body[1:]:
                yield from strings(each) if isinstance(each, ast.Expr) else ()


def test_help_and_errors_use_them_too():
    paths = [*ROOT.glob("src/samestep/**/*.py"), *ROOT.glob("templates/*/task.py")]
    wrong = []
    for path in [*paths, ROOT / SOURCE / "train.py"]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        texts = [*shown(tree)]
        if path.parent.name in ("programs", "ask") and path.stem != "__init__":
            texts.append(ast.get_docstring(tree) or "")
        wrong += [line for text in texts for line in found(path.name, text)]
    assert not wrong


def test_public_names_have_docstrings():
    bare = []
    for name in samestep.contents():
        value = getattr(samestep, name)
        members = vars(value) if inspect.ismodule(value) else {name: value}
        for member, each in members.items():
            if getattr(each, "__module__", "").startswith("samestep") and member[0] != "_":
                if inspect.isclass(each) or inspect.isfunction(each):
                    doc = each.__doc__ or ""  # a dataclass without one gets its signature
                    bare += [member] if not doc or doc.startswith(f"{member}(") else []
    assert not bare


def test_the_version_is_one():
    number, _, ending = samestep.__version__.partition(".dev")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    heading, *lines = re.split(r"^## ", changes, flags=re.M)[1].splitlines()
    assert heading.split()[0] == number and len(lines) <= 80
    assert heading.endswith("(not released)") == bool(ending)
    workflow = (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")
    assert f"The tag v{number} is of the version {number}." in workflow
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert (f"Version {number} is not released yet" in readme) == bool(ending)


# Where make test-all installs nbclient.
ADDED = ROOT / ".venv" / "extra"
added = pytest.mark.skipif(not ADDED.exists(), reason="make test-all installs it")
LINES, LEARNED = cases("examples").values()


@pytest.mark.slow
def test_examples_are_listed_written_and_short(tmp_path):
    baked = bake(tmp_path, tracker="none")
    (wheel,) = baked.path.glob("vendor/*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "library")

    def example(*words):
        command = ["python", "-m", "samestep", "example", *words]
        return baked.run(*command, check=False, PYTHONPATH=str(tmp_path / "library"))

    names = [line.split()[0] for line in example().stdout.splitlines()]
    tasks = [path.parent.name for path in (ROOT / "templates").glob("*/task.py")]
    assert names == sorted([*tasks, *LINES])
    for name, number in LINES.items():
        text = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
        assert len(text.splitlines()) <= number
    example("plain_module")
    written = (baked.path / "plain_module.py").read_text(encoding="utf-8")
    assert written == (ROOT / "examples/plain_module.py").read_text(encoding="utf-8")
    again = example("plain_module")
    assert again.returncode == 2 and "plain_module.py is there already" in again.stderr
    assert "transformers" not in written and "import samestep" not in written


@pytest.mark.slow
def test_examples_of_plain_modules_learn(tmp_path):
    """What holds for each task is in test_tasks.py."""
    project = write_recipe(bake(tmp_path, pictures=False, tracker="none"), "example")
    for name, (flags, left) in LEARNED.items():
        shutil.copy(ROOT / "examples" / f"{name}.py", project.path / "task.py")
        project.train(1, *flags.split(), "--output_dir", tmp_path / name)
        scores = [line["eval_loss"] for line in lines(tmp_path / name, "eval_loss")]
        assert len(scores) == 3 and scores[-1] < left * lines(tmp_path / name, "loss")[0]["loss"]
        assert status(tmp_path / name)["state"] == "finished"
        assert "## Evaluation" in (tmp_path / name / "model" / "README.md").read_text()


# ---- The notebook --------------------------------------------------------------------------------


@added
@pytest.mark.slow
def test_the_notebook_trains_stops_continues_and_shows(tmp_path):
    """Without the cells that install, as all is here, and with a recipe of some seconds."""
    notebook = json.loads((ROOT / "examples" / "notebook.ipynb").read_text(encoding="utf-8"))
    cells = [c for c in notebook["cells"] if "install" not in c["metadata"].get("tags", ())]
    assert not any(cell.get("outputs") for cell in cells)
    changes = {'\\"..\\"': f"{str(ROOT)!r}", "default.yaml": "smoke.yaml --max_steps 100"}
    source = json.dumps(notebook | {"cells": cells})
    for old, new in changes.items():
        assert old in source
        source = source.replace(old, new)
    (tmp_path / "notebook.ipynb").write_text(source, encoding="utf-8")
    env = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"}
    env["PYTHONPATH"] = f"{ADDED}:{os.environ['PYTHONPATH']}"
    run = [sys.executable, ADDED / "bin" / "jupyter-execute", "--inplace", "notebook.ipynb"]
    done = subprocess.run(run, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cells = json.loads((tmp_path / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", ()) for output in outputs)
    printed = "".join("".join(output.get("text", ())) for output in outputs)
    assert "exit code 75\n" in printed and "step 100" in printed, printed
    assert "(100, " in "".join(outputs[-1]["data"]["text/plain"])


class EditorLoader(yaml.SafeLoader):
    """Reads 1e-3 as a number, as editors do, by version 1.2 of YAML."""


scientific = re.compile(r"[-+]?([0-9]*\.)?[0-9]+[eE][-+]?[0-9]+$")
EditorLoader.add_implicit_resolver("tag:yaml.org,2002:float", scientific, [*"-+.0123456789"])


def read(text):
    """A recipe as an editor sees it."""
    return yaml.load(text, EditorLoader)


@pytest.fixture(scope="module")
def schemas():
    """For each task what the fields give, and those that are flags alone."""
    found = {}
    for task in TASKS:
        with train_module(ROOT / "templates" / task / "task.py") as train:
            schema = json.loads(json.dumps(recipe_schema(train.Config)))
            found[task] = schema, config.fields_of(train.Config)
    return found


def test_the_program_writes_the_schema_of_the_project(schemas, projects):
    project = projects["causal_lm"]
    assert project.run("python", "-m", "samestep", "schema").stdout.startswith("configs/schema")
    written = (project.path / "configs" / "schema.json").read_text("utf-8")
    assert json.loads(written) == schemas["causal_lm"][0]


@pytest.mark.parametrize("task", TASKS)
def test_recipes_follow_the_schema_of_the_fields(schemas, projects, task):
    schema, fields = schemas[task]
    project = projects[task].path
    jsonschema.Draft202012Validator.check_schema(schema)
    recipes = sorted(project.glob("configs/train/*.yaml"))
    assert len(recipes) >= 2
    for path in recipes:
        text = path.read_text("utf-8")
        named = re.match(r"# yaml-language-server: \$schema=(\S+)\n", text)
        assert (path.parent / named[1]).resolve() == project / "configs" / "schema.json"
        jsonschema.validate(read(text), schema)
        assert {"max_steps", "tracker"} <= read(text).keys()
    own = schema["properties"]["task"]["properties"]
    described = {name: each for name, each in schema["properties"].items() if name != "task"}
    assert described["learning_rate"]["description"] == "Peak learning rate."
    assert all(each["description"] for each in [*described.values(), *own.values()])
    flags = {name for name, (_, field) in fields.items() if "one_command" in field.metadata}
    assert flags == {"accept_changes", "check", "eval_only", "json"}
    assert {*described, *(f"task.{name}" for name in own)} == fields.keys() - flags


def test_what_the_schema_refuses_train_py_refuses_too(schemas, tmp_path):
    schema, _ = schemas["causal_lm"]
    path = tmp_path / "mine.yaml"
    with train_module(ROOT / "templates" / "causal_lm" / "task.py") as train:
        for right in cases("schema"):
            jsonschema.validate(read(right), schema)
            path.write_text(right)
            config.parse_config(train.Config, ["--config", str(path)], "")
        for wrong, name in table("schema"):
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(read(wrong), schema)
            path.write_text(wrong)
            with refused() as error:
                config.parse_config(train.Config, ["--config", str(path)], "")
            assert re.search(rf"\b{name}\b", str(error.value)), error.value
