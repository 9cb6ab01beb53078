"""What the template needs beyond Jinja: checked answers, quoted text, a task's source as it is."""

import difflib
import json
import keyword
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import click
from cookiecutter.exceptions import FailedHookException
from jinja2.ext import Extension
from slugify import slugify

from local_extensions import wheel

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "{{cookiecutter.project_slug}}"
OWN = json.loads((ROOT / "cookiecutter.json").read_text(encoding="utf-8"))
QUESTIONS = [name for name in OWN if not name.startswith("_")]
MAX_LENGTH = 60
JINJA = re.compile(r"\{[{%#]")
# A distribution of one of these names would hide what the project needs.
NEEDED = (ROOT / FOLDER / "pyproject.toml").read_text(encoding="utf-8")
PACKAGES = [name.replace("-", "_") for name in re.findall(r'"([\w-]+)[>=]=', NEEDED)]
OWN_NAMES = [path.stem.lower() for path in (ROOT / FOLDER).iterdir()]
TAKEN = {*sys.stdlib_module_names, *keyword.kwlist, *PACKAGES, "pip", *OWN_NAMES}


def default_slug(name):
    """Return a valid project slug for any name: `My Training` gives `my_training`."""
    slug = slugify(str(name), separator="_", max_length=MAX_LENGTH - 8)
    if not slug:
        return "my_training"
    if not slug[0].isalpha():
        return f"project_{slug}"
    return f"{slug}_project" if is_taken(slug) else slug


def is_taken(slug):
    """Return whether a distribution of this name would hide or replace another."""
    return slug.replace("-", "_") in TAKEN


def check_answers(answers):
    """Refuse the first answer that no project can be made of, in one line."""
    command = click.get_current_context(silent=True)  # none under cruft
    params = command.params if command else {}
    if params.get("skip_if_file_exists"):
        refuse("Options", "-s", "does not keep an edited train.py", "Use `make update`.")
    for question in params.get("extra_context") or ():  # cookiecutter ignores unknown ones
        if question not in QUESTIONS:
            refuse("Answers", question, "is not a question", choose(question, QUESTIONS))
    for question in [name for name in QUESTIONS if name in answers]:
        answer = answers[question]
        if isinstance(OWN[question], str):
            check_text(question, answer)
        elif answer not in OWN[question]:
            refuse(question, answer, "is not a choice", choose(answer, OWN[question]))
    if "project_slug" in answers:
        check_slug(answers["project_slug"])
    return ""


def check_text(question, answer):
    """Refuse what cannot stand in a file name, TOML, YAML and Markdown alike."""
    if not isinstance(answer, str):
        refuse(question, answer, "is not text", "Write it in quotes.")
    if not answer.strip():
        refuse(question, answer, "holds no text", "Write some.")
    # Control characters, line breaks, marks of the writing direction; not the joiner of emoji.
    if not answer.replace("\u200d", "").isprintable():
        refuse(question, answer, "contains a character that does not show", "Write plain text.")
    longest = MAX_LENGTH + (len(" authors") if question == "author_name" else 0)
    if len(answer) > longest:
        refuse(question, answer, f"has {len(answer)} characters", f"Write at most {longest}.")


def check_slug(slug):
    """Refuse what cannot name a folder and a Python distribution."""
    advice = f"Write for example: {default_slug(slug)}"
    if not re.fullmatch(r"[a-z]([a-z0-9_-]*[a-z0-9])?", slug):
        problem = "is not a plain name (a-z, 0-9, _ and -; first a letter, last no _ or -)"
        refuse("project_slug", slug, problem, advice)
    if is_taken(slug):
        refuse("project_slug", slug, "is the name of a Python module, package or keyword", advice)


def choose(wrong, names):
    """Advise one of some names, first one that is near."""
    near = difflib.get_close_matches(str(wrong), names, n=1, cutoff=0.4)
    return f"Write {' or '.join(sorted(names, key=lambda name: name not in near))}."


class Refused(SystemExit, FailedHookException):
    """Cookiecutter prints a FailedHookException as one line, Python a SystemExit (for cruft)."""


def refuse(question, answer, problem, advice):
    """Stop with one line, before anything is written, that any standard output can show."""
    raise Refused(f"{question}: {ascii(answer)[:60]} {problem}. {advice}")


def quoted(text):
    """Quote text for TOML and YAML. Jinja's `tojson` would break emoji in TOML."""
    return json.dumps(text, ensure_ascii=False)


def project_record(answers):
    """Return what `make update` needs: the template's URL or null, its commit, the answers."""
    template = None
    # Of a template that was given as a folder, no path of this machine, and no other address.
    if answers.get("_repo_dir") != answers["_template"]:
        template = public_url(git("config", "--get", "remote.origin.url"))
    at_top = git("rev-parse", "--show-prefix") == ""  # no folder in somebody's repository
    commit = git("rev-parse", "--verify", "HEAD") if at_top else None
    answered = {name: answers[name] for name in QUESTIONS}
    record = {"template": template, "commit": commit, "answers": answered}
    return json.dumps(record, indent=4, ensure_ascii=False)


def git(*words):
    """Return what git prints about the template; None if it fails, or is missing."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        result = subprocess.run(["git", *words], cwd=ROOT, env=env, capture_output=True, text=True)
    except OSError:
        return None
    return None if result.returncode else result.stdout.strip()


def public_url(url):
    """Return a URL without its credentials; None for a path, also as file://."""
    if re.match(r"[\w.-]+@[\w.-]+:", url or ""):  # git@github.com:owner/name.git
        return url
    parts = urlsplit(url or "")
    if parts.scheme not in ("http", "https", "ssh", "git"):
        return None
    user, _, host = parts.netloc.rpartition("@")
    if parts.scheme == "ssh" and user:
        host = f"{user.partition(':')[0]}@{host}"
    return f"{parts.scheme}://{host}{parts.path}"


def task_source(name):
    """Return a task's Python as it is: a Jinja `include` would render the braces in it."""
    path = ROOT / "templates" / name / "task.py"
    return path.read_text(encoding="utf-8").removesuffix("\n")


class TemplateFilters(Extension):
    """The filters above, and a guard: cookiecutter renders given answers as Jinja."""

    def __init__(self, environment):
        super().__init__(environment)
        for function in (check_answers, default_slug, project_record, quoted, task_source):
            environment.filters[function.__name__] = function
        environment.globals["library_version"] = wheel.version()  # that is pinned
        # The hook finds there what writes the wheel; a path in hex digits runs no code.
        environment.globals["template_root"] = os.fsencode(ROOT).hex()
        # The unnamed templates that are the template's own, not somebody's answer.
        self.own = {text for text in OWN.values() if isinstance(text, str)}
        self.own |= {hook.read_text(encoding="utf-8") for hook in (ROOT / "hooks").glob("*.py")}
        # `cruft update` bakes the old template and the new one in one process and would keep
        # the old module for both (cruft issue 253): let the next bake import it afresh.
        sys.modules.pop(__name__, None)
        sys.modules.pop(wheel.__name__, None)

    def preprocess(self, source, name, filename=None):
        """Refuse Jinja in an answer before it runs; files have a name, answers have none."""
        if source == FOLDER:  # rendered once all answers are there, before the folder is made
            return "{{ cookiecutter | check_answers }}" + source
        if name is None and JINJA.search(source) and source not in self.own:
            refuse("An answer", source, "contains Jinja code", "Write it without {{, {% and {#.")
        return source
