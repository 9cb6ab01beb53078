"""What people read: the pages of the template and of its projects.

They are short, their links lead somewhere, and each command on them is checked: its target, verb,
files and flags exist. Slow tests run those of README.md, and some of docs/, that this machine can.
"""

import ast
import functools
import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import zipfile

import pytest
from accelerate.commands.launch import launch_command_parser
from PIL import Image

from conftest import ROOT, SOURCE, BakedProject, bake, status, train_module
from samestep.project import config

QUESTIONS = json.loads((ROOT / "cookiecutter.json").read_text(encoding="utf-8"))
TASKS = QUESTIONS["task"]
FENCE = re.compile(r"^```([\w{}-]*)\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"(?<!!)\[[^\]\n]+\]\(([^)\s]+)\)")
PYTHON = ("python", "python3", ".venv/bin/python", ".venv/bench/bin/python")
# Programs of others, and of the system: the files that they name are checked, and no flags.
OTHERS = {
    *"$EDITOR .venv/bin/pip .venv/bin/ruff cd cookiecutter cp cruft docker git grep hf".split(),
    *"kill kubectl mv nc nvidia-smi pip pkill py-spy rm sbatch sky source tail tensorboard".split(),
    *"head tar torchrun touch trackio transformers uv vllm wandb lm_eval".split(),
    *".venv/bin/cookiecutter cat ckpt-chaos".split(),
}
# Of docker, pip and train_pipeline.py, and a field that a recipe of the cookbook adds.
PREPARE_FLAGS = ("--verify", "--prune")  # of the program; those of train.py follow
OTHER_FLAGS = {"--help", "--config", "--ipc", "--shm-size", "--no-deps", "--patience", "--stages"}


def pages(folder):
    """The pages of a folder by their names: README.md and its like, and docs/."""
    found = sorted([*folder.glob("*.md"), *folder.glob("docs/*.md")])
    return {str(page.relative_to(folder)): page for page in found if page.name != "CHANGELOG.md"}


def prose(page):
    """A page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def scripts(page):
    """The commands of a page: its fenced blocks of bash, or without a language."""
    found = FENCE.findall(page.read_text("utf-8"))
    return [code for language, code in found if language in ("", "bash")]


def comments(folder):
    """The commands in the comments of a project's YAMLs and jobs, as scripts."""
    for path in sorted([*folder.glob("configs/*/*.yaml"), *folder.glob("cluster/*")]):
        text = path.read_text(encoding="utf-8").replace("\\\n# ", "")
        yield from re.findall(r"^# +((?:make|accelerate|python|kubectl|sky) .*)", text, flags=re.M)


def commands(script):
    """The simple commands of a script, as lists of words. Python in <<'END' has to parse."""
    found, rows = [], script.replace("\\\n", " ").splitlines()
    while rows:
        row = rows.pop(0)
        while row.count('"') % 2:  # a quoted text of several lines
            row += " " + rows.pop(0).strip()
        lexer = shlex.shlex(row, posix=True, punctuation_chars="&|;<>")
        lexer.whitespace_split, lexer.commenters = True, "#"
        words = [*lexer]
        if "<<" in words:
            end = rows.index(words[words.index("<<") + 1])
            ast.parse("\n".join(rows[:end]))
            rows = rows[end + 1 :]
        for ends, group in itertools.groupby(words, lambda word: word in ("&&", "||", ";")):
            settings = re.compile(r"\w+=|export$|taskset$|-c$|[\d-]+$")
            group = [*itertools.dropwhile(settings.match, group)]
            found += [group] if group and not ends else []
    return found


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


# ---- Pages ---------------------------------------------------------------------------------------


def test_first_pages_are_short_and_that_of_the_template_shows_the_loop(baked):
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(page.split()) <= 1300
    (shown,) = [code for language, code in FENCE.findall(page) if language == "python"]
    train = (ROOT / SOURCE / "train.py").read_text(encoding="utf-8")
    middle, loop = shown.split("\n\n", 1)  # compute_step, and what calls it
    assert textwrap.indent(middle, 4 * " ") in train and textwrap.indent(loop, 8 * " ") in train
    assert shown.count("\n") <= 20
    for project in baked.values():
        assert (project.path / "README.md").read_text(encoding="utf-8").count("\n") <= 150


def anchors(page):
    """The headings of a page, as GitHub names them in addresses."""
    found = re.findall(r"^#+ (.+)$", prose(page), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("place", [*TASKS, "template"])
def test_links_lead_to_pages_and_headings(baked, place):
    folder = ROOT if place == "template" else baked[place].path
    all_pages, reached = pages(folder), set()
    for name, page in all_pages.items():
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


# ---- Commands, as they stand there ---------------------------------------------------------------


@functools.cache
def fields_of(task):
    """The flags of train.py with this task."""
    with train_module(ROOT / "templates" / task / "task.py") as train:
        return config.fields_of(train.Config)


def split_launch(words):
    """Checks the words of a launcher; gives those that it launches, from train.py or -m on."""
    places = [i for i, word in enumerate(words) if word in ("train.py", "-m", "...")]
    own, rest = (words[: places[0]], words[places[0] :]) if places else (words, [])
    own = ["0" if word == "R" else word for word in own]  # the page says: for R its own number
    assert not launch_command_parser().parse_known_args([*own, "x.py"])[1], words
    return rest


class Checker:
    """Checks commands against projects or the template, and collects flags of train.py."""

    known = {}  # the flags of the library's programs

    def __init__(self, project, *folders):
        self.project, self.folders, self.given = project, [project.path, *folders], []

    def flags_of(self, *words):
        """The flags that --help of a program of the library names."""
        if words not in self.known:
            printed = self.project.run("python", "-m", *words, "--help").stdout
            self.known[words] = {*re.findall(r"--[\w-]+", printed)}
        return self.known[words]

    def check(self, words):
        """Raises AssertionError for a command with a target, a verb, a file or a flag too many."""
        program, *rest = words
        for word in rest:
            made = word.endswith("/X.yaml")
            if re.match(r"(benchmarks|cluster|configs|vendor)/", word) and not made:
                assert any([*folder.glob(word)] for folder in self.folders), words
        if program == "make":
            self.make(rest)
        elif words[:2] == ["accelerate", "launch"]:
            self.launched(split_launch(rest[1:]))
        elif program == "eval":  # of what a program prints
            self.check(shlex.split(rest[0].removeprefix("$(").removesuffix(")")))
        elif program == "torchrun" and "train.py" in rest:
            self.given.append(rest[rest.index("train.py") + 1 :])
        elif program in PYTHON and rest[0] == "train.py":
            self.given.append(rest[1:])
        elif program in PYTHON and rest[0] == "-m" and rest[1].partition(".")[0] == "samestep":
            self.launched(rest)
        elif program in PYTHON and rest[0] == "-c":
            ast.parse(rest[1])
        elif program in PYTHON:
            of_file = rest[0] == "-" or rest[0].startswith(("benchmarks/", "tests/"))
            assert of_file or rest[1] in ("pip", "venv", "llama_cpp.server"), words
        else:
            assert program in OTHERS, f"{program} of {words} is not in OTHERS"

    def make(self, words):
        """make says itself what it would do, or that there is no such target, YAML or recipe."""
        words = [word for word in words if not word.startswith("VENV=/path")]
        command = ["make", "--dry-run", *words]
        result = subprocess.run(command, cwd=self.project.path, capture_output=True, text=True)
        template = re.findall("^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), flags=re.M)
        assert result.returncode == 0 or {*words} & {*template}, (words, result.stderr)
        for command in commands(result.stdout) if "ARGS" in str(words) else ():
            if command[0] in PYTHON and command[2] == "samestep":
                self.launched(command[1:])

    def launched(self, words):
        """What a launcher starts: train.py, or a module of the library."""
        if words[:3] == ["-m", "samestep", "launch"]:
            words = split_launch(words[3:])
        if words and words[0] == "train.py":
            self.given.append(words[1:])
        elif words and words[0] == "-m":
            verbs = [*itertools.takewhile(lambda word: word[:2] != "--", words[1:])]
            found = {word.partition("=")[0] for word in words if word[:2] == "--"}
            if verbs[1:2] == ["prepare"]:
                self.given.append([each for each in words[3:] if each not in PREPARE_FLAGS])
            elif verbs[1:2] == ["hardware"]:  # flags of train.py follow its own
                self.given += [[flag] for flag in found - self.flags_of(*verbs[:2]) - OTHER_FLAGS]
            else:
                assert found <= self.flags_of(*verbs[:2]) | OTHER_FLAGS, words


def sentences(page, checker):
    """Checks the code inside of sentences: commands, and flags that stand there by themselves."""
    known = [checker.flags_of("samestep", verb) for verb in ("predict", "plot", "hardware")]
    known += [OTHER_FLAGS]
    known += [each.option_strings for each in launch_command_parser()._actions]
    for text in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(page)):
        if text.startswith(("make ", "accelerate launch ", *(f"{name} " for name in PYTHON))):
            for words in commands(text):
                checker.check(words)
        elif text.startswith("--"):
            if {*re.findall(r"(?<!\S)--[\w.-]+", text)} - set().union(*known):
                checker.given.append(shlex.split(text))


@pytest.mark.parametrize("place", [*TASKS, "template"])
def test_commands_name_what_is_there(baked, place):
    """README.md and docs/data.md of a project are for its task, its other pages for all tasks."""
    task = place if place in TASKS else TASKS[0]
    project, own, given = baked[task], fields_of(task), 0
    every = set().union(*map(fields_of, TASKS))
    folder = ROOT if place == "template" else project.path
    for name, page in pages(folder).items():
        of_task = place != "template" and name in ("README.md", "AGENTS.md", "docs/data.md")
        if not of_task and place in TASKS[1:]:
            continue  # the same page, checked with the first task
        checker = Checker(project, folder)
        found = [*scripts(page), *(comments(folder) if name == "README.md" else ())]
        for language, code in FENCE.findall(page.read_text("utf-8")):
            if language == "python":
                ast.parse(textwrap.dedent(code), filename=name)
        for words in itertools.chain(*map(commands, found)):
            checker.check(words)
        sentences(page, checker)
        for words in checker.given:
            words = re.sub(r"(^|\0)(--[^\0=]+)=", r"\1\2\0", "\0".join(words)).split("\0")
            words = [word for word in words if word not in ("", "...", "--help")]
            for flag in ("--config", "--config_file"):
                if flag in words:
                    del words[words.index(flag) : words.index(flag) + 2]
            flags = {word[2:] for word in words if word[:2] == "--"}
            assert flags <= (own.keys() if of_task else every), (name, words)
            if len(words) > len(flags) and flags <= own.keys():  # values too
                config.convert_all(config.read_flags(words, own), own)
                given += 1
    assert given


# ---- Commands, run -------------------------------------------------------------------------------


# Run by no test here: they install, take minutes, or need GPUs, machines, services and data.
LEFT_OUT = "make (setup|test|demo|torture|bench|gpu|train$)|"
LEFT_OUT += "hardware bench|hardware$|runs/fp32|"
LEFT_OUT += (
    r"llama_cpp|OWNER/NAME|Qwen/|distilbert/|google|-m (venv|pip) |path/to|\.(csv|jpg|jsonl)\b"
)
SYSTEM = {"source", "git", "mv", "rm", "$EDITOR", ".venv/bin/ruff"}
REMOVE_TASK = "sed -i /^task:/,$d"
# Trainings of pages below docs/: their flags are checked above, and what they do has other tests.
TRAINING = "make train|launch"
SMOKE = ["--config", "configs/train/smoke.yaml", "--output_dir", "runs/default"]


def can_run(words, left_out):
    """Whether a command needs this machine alone, and seconds."""
    text = " ".join(words)
    yamls = re.findall(r"(?:configs/accelerate/|HARDWARE=)(\w+)", text)
    if words[0] in OTHERS - SYSTEM or re.search(left_out, text):
        return False
    return all(name.startswith("cpu") for name in yamls)


@pytest.fixture(scope="module")
def shell(tmp_path_factory, baked):
    """Runs a script in a project, as its reader would after `source .venv/bin/activate`."""
    folder = tmp_path_factory.mktemp("shell")
    (wheel,) = baked[TASKS[0]].path.glob("vendor/*.whl")  # which has the examples too
    zipfile.ZipFile(wheel).extractall(folder / "library")
    variables = {"EDITOR": REMOVE_TASK, "PYTHONPATH": str(folder / "library")}
    for who in ("AUTHOR", "COMMITTER"):
        variables |= {f"GIT_{who}_NAME": "Test", f"GIT_{who}_EMAIL": "test@example.org"}
    return lambda project, script: project.run("bash", "-ec", script, **variables)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, baked):
    """A project with two runs."""
    path = tmp_path_factory.mktemp("trained") / "project"
    made = BakedProject(shutil.copytree(baked[TASKS[0]].path, path, symlinks=True))
    made.train(1, *SMOKE)
    shutil.copytree(path / "runs" / "default", path / "runs" / "mine")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", ["README", "concepts", "offline", "tracking"])
def test_commands_run(tmp_path, trained, shell, name):
    """Each block of a page in a fresh copy of a project that has a run."""
    left_out, page = LEFT_OUT, trained / f"{name}.md"
    if name != "README":
        left_out, page = f"{LEFT_OUT}|{TRAINING}", trained / "docs" / f"{name}.md"
    if not page.exists():
        page = ROOT / "docs" / f"{name}.md"
    ran = 0
    for number, script in enumerate(scripts(page)):
        rows = script.replace("\\\n", " ").splitlines()
        if "<<" in script or any(row.count('"') % 2 for row in rows):
            rows = [script]
        rows = [row for row in rows if all(can_run(words, left_out) for words in commands(row))]
        if any(map(commands, rows)):
            folder = shutil.copytree(trained, tmp_path / str(number), symlinks=True)
            shell(BakedProject(folder), "\n".join(rows))
            ran += 1
    assert ran


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_the_first_command_tunes_a_model_on_the_rows_beside_it(tmp_path, baked, task):
    """With a folder in the place of the Hub's name, and each row in sixty versions."""
    project = BakedProject(shutil.copytree(baked[task].path, tmp_path / "project", symlinks=True))
    length = {"text_classification": 512, "preference": 1024}.get(task)  # those of the recipe
    longer = ["--task.max_length", length] if length else []
    project.train(1, *SMOKE, *longer)
    first = (project.path / "README.md").read_text(encoding="utf-8").split("## Start")[0]
    (project.path / "photos").mkdir()
    for i in range(60):
        Image.new("RGB", (40, 40), (i, 0, 0)).save(project.path / "photos" / f"{i}.jpg")
    blocks = FENCE.findall(first)
    listed = [words for language, code in blocks if language == "bash" for words in commands(code)]
    (words,) = [words for words in listed if "--task.data" in str(words)]
    given = dict(word.split("=", 1) for word in words if "=" in word)
    flags = shlex.split(given["ARGS"])
    flags[flags.index("--task.model_name_or_path") + 1] = "runs/default/model"
    data = flags[flags.index("--task.data") + 1]
    rows = dict(blocks)["json"].splitlines() * 60
    rows = [re.sub(r'(?<=[.?])(?=")', f" {i}", row) for i, row in enumerate(rows[:60])]
    rows = [re.sub(r"photos/\d", f"photos/{i}", row) for i, row in enumerate(rows)]
    (project.path / data).write_text("\n".join(rows))
    recipe = f"configs/train/{given.get('RECIPE', 'default')}.yaml"
    small = ["--max_steps", 2, "--global_batch_size", 4, "--micro_batch_size", 4]
    project.train(1, "--config", recipe, *flags, *small)
    assert status(project.path / "runs" / "tuned")["state"] == "finished"
