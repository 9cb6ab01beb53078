"""What the template needs beyond Jinja: checked answers, quoted text, a task's source as it is.
wheel.py makes the wheel of the library."""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
from jinja2.ext import Extension
from slugify import slugify

from local_extensions import wheel

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "{{cookiecutter.project_slug}}"
OWN = json.loads((ROOT / "cookiecutter.json").read_text(encoding="utf-8"))
QUESTIONS = [name for name in OWN if not name.startswith("_")]
# A distribution of one of these names would replace what the project needs.
NEEDED = (ROOT / FOLDER / "pyproject.toml").read_text(encoding="utf-8").replace("-", "_")
TAKEN = {"pip", *sys.stdlib_module_names, *re.findall(r'"(\w+)[>=]=', NEEDED)}


def is_slug(slug):
    """Return whether a text can name a folder and a distribution that replaces no other."""
    hides = slug.replace("-", "_") in TAKEN
    return not hides and re.fullmatch(r"[a-z]([a-z0-9_-]{0,58}[a-z0-9])?", slug)


def default_slug(name):
    """Return a valid project slug for any name: `My Training` gives `my_training`."""
    slug = slugify(str(name), separator="_", max_length=50)
    return slug if is_slug(slug) else f"project_{slug}".strip("_")


def check_answers(answers):
    """Refuse the first answer that no project can be made of, in one line."""
    command = click.get_current_context(silent=True)  # none under cruft
    params = command.params if command else {}
    if params.get("skip_if_file_exists"):
        refuse("Options", "-s", "does not keep an edited train.py. Use `make update`")
    given = params.get("extra_context")  # under cruft a text; cookiecutter ignores unknown ones
    for question in given if isinstance(given, dict) else ():
        if question not in QUESTIONS:
            refuse("Answers", question, f"is none of {', '.join(QUESTIONS)}")
    for question in [name for name in QUESTIONS if name in answers]:
        answer, known = answers[question], OWN[question]
        if isinstance(known, list) and answer not in known:  # of a replay
            refuse(question, answer, f"is none of {', '.join(known)}")
        text = str(answer).replace("\u200d", "")  # the joiner of emoji may stand
        if not text.isprintable() or not 0 < len(text.strip()) <= 100:
            refuse(question, answer, "is no line of 1 to 100 printable characters")
        if question == "project_slug" and not is_slug(text):
            refuse(question, answer, f"names no project. Write for example {default_slug(text)}")
    return ""


def refuse(question, answer, problem):
    """Stop with one line, before anything is written, that any standard output can show."""
    sys.exit(f"{question}: {ascii(answer)[:60]} {problem}.")


def quoted(text):
    """Quote text for TOML and YAML. Jinja's `tojson` would break emoji in TOML."""
    return json.dumps(str(text), ensure_ascii=False)


def project_record(answers):
    """Return the file of `cruft update`: the template's URL or null, its commit, the answers."""
    # Without a commit an update fails; null would pass for the newest one.
    record = {"template": None, "commit": "unknown", "checkout": None, "directory": None}
    if answers.get("_repo_dir") != answers["_template"]:  # else a folder: no path of this machine
        record["template"] = public_url(git("config", "--get", "remote.origin.url"))
    if git("rev-parse", "--show-prefix") == "":  # else a folder in somebody's repository
        record["commit"] = git("rev-parse", "--verify", "HEAD") or record["commit"]
    record["context"] = {"cookiecutter": {name: answers[name] for name in QUESTIONS}}
    return json.dumps(record, indent=4, ensure_ascii=False)


def git(*words):
    """Return what git prints about the template; None if it fails, or is missing."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        options = {"cwd": ROOT, "env": env, "stderr": subprocess.DEVNULL, "text": True}
        return subprocess.check_output(["git", *words], **options).strip()


def public_url(url):
    """Return a URL without its credentials; None for a path, also as file://."""
    if not re.match(r"(https?|ssh|git)://|[\w.-]+@[\w.-]+:", url or ""):
        return None
    url = re.sub(r"^(https?|git)://[^/]*@", r"\1://", re.split("[?#]", url)[0])
    return re.sub(r"^(ssh://[^/:@]*):[^/]*@", r"\1@", url)


def task_source(name):
    """Return a task's Python as it is: a Jinja `include` would render the braces in it."""
    return (ROOT / "templates" / name / "task.py").read_text(encoding="utf-8").removesuffix("\n")


class TemplateFilters(Extension):
    """The filters above, and a guard: cookiecutter renders given answers as Jinja."""

    def __init__(self, environment):
        super().__init__(environment)
        for function in (check_answers, default_slug, project_record, quoted, task_source):
            environment.filters[function.__name__] = function
        environment.globals["library_version"] = wheel.version(wheel.contents())
        environment.globals["template_root"] = os.fsencode(ROOT).hex()  # hex digits run no code
        # The unnamed templates that are nobody's answer.
        self.own = {text for text in OWN.values() if isinstance(text, str)}
        self.own |= {hook.read_text(encoding="utf-8") for hook in (ROOT / "hooks").glob("*.py")}
        for name in (__name__, wheel.__name__):  # or cruft would bake two states with one of them
            sys.modules.pop(name, None)

    def preprocess(self, source, name, filename=None):
        """Refuse Jinja in an answer before it runs; files have a name, answers have none."""
        if source == FOLDER:  # rendered once all answers are there, before the folder is made
            return "{{ cookiecutter | check_answers }}" + source
        if name is None and re.search(r"\{[{%#]", source) and source not in self.own:
            refuse("An answer", source, "contains Jinja code. Write it without {{, {% and {#")
        return source
