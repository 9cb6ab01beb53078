"""What the template needs beyond Jinja: checked answers, quoted text, a task's source as it is."""

import json
import keyword
import re
import sys
import unicodedata
from pathlib import Path

from cookiecutter.exceptions import FailedHookException
from jinja2.ext import Extension
from slugify import slugify

ROOT = Path(__file__).resolve().parent
LONGEST = {"project_name": 60, "project_slug": 60, "author_name": 100}
JINJA = re.compile(r"\{[{%#]")
# A folder or distribution of one of these names would hide or replace what the project imports.
TAKEN = {
    *sys.stdlib_module_names,
    *keyword.kwlist,
    *"""accelerate checkpoints command_line confusion data_order datasets deepspeed docstring_parser
    evaluate health huggingface_hub jsonargparse launch matplotlib model_card numpy pandas peft
    pil pillow pip plot predict pretrained process psutil pyarrow pytest pyyaml ruff safetensors
    scikit_learn scipy setuptools sklearn sources start task tensorboard test tests tokenizers torch
    torchaudio torchvision tqdm tracking train trackio transformers wandb wheel yaml""".split(),
}


def default_slug(name):
    """Return a valid project slug for any name: `My Training` gives `my_training`."""
    slug = slugify(name, separator="_", max_length=LONGEST["project_slug"] - len("project_"))
    if not slug:
        return "my_training"
    if not slug[0].isalpha():
        return f"project_{slug}"
    return f"{slug}_project" if slug in TAKEN else slug


def check_answers(answers):
    """Refuse the first answer that no project can be made of, in one line."""
    for question, answer in answers.items():
        if not question.startswith("_"):
            check_text(question, answer)
        if question == "project_slug":
            check_slug(answer)
    return ""


def check_text(question, answer):
    """Refuse what cannot stand in a file name, TOML, YAML and Markdown alike."""
    if not isinstance(answer, str) or not answer.strip():
        refuse(question, answer, "holds no text", "Write some.")
    for character in answer:
        # Control characters, halves of surrogate pairs, line and paragraph separators.
        if unicodedata.category(character) in {"Cc", "Cs", "Zl", "Zp"}:
            problem = f"contains the character U+{ord(character):04X}"
            refuse(question, answer, problem, "Write one line of plain text.")
    if JINJA.search(answer):
        refuse(question, answer, "contains Jinja code", "Write it without {{, {% and {#.")
    longest = LONGEST.get(question, 100)
    if len(answer) > longest:
        refuse(question, answer, f"has {len(answer)} characters", f"Write at most {longest}.")


def check_slug(slug):
    """Refuse what cannot name a folder and a Python distribution."""
    advice = f"Write for example: {default_slug(slug)}"
    if not re.fullmatch(r"[a-z]([a-z0-9_-]*[a-z0-9])?", slug):
        problem = "is not a plain name (a-z, 0-9, _ and -; first a letter, last no _ or -)"
        refuse("project_slug", slug, problem, advice)
    if slug.replace("-", "_") in TAKEN:
        refuse("project_slug", slug, "is the name of a Python module or keyword", advice)


def refuse(question, answer, problem, advice):
    """Stop cookiecutter with one line, before it has written anything."""
    shown = repr(answer) if len(str(answer)) <= 60 else f"{str(answer)[:50]!r}..."
    raise FailedHookException(f"{question}: {shown} {problem}. {advice}")


def quoted(text):
    """Quote text for TOML and YAML. Jinja's `tojson` would break emoji in TOML."""
    return json.dumps(text, ensure_ascii=False)


def task_source(name):
    """Return a task's Python as it is: a Jinja `include` would render the braces in it."""
    path = ROOT / "templates" / "tasks" / f"{name}.py"
    return path.read_text(encoding="utf-8").removesuffix("\n")


def own_templates():
    """Yield the unnamed templates that are the template's own, not somebody's answer."""
    questions = json.loads((ROOT / "cookiecutter.json").read_text(encoding="utf-8"))
    yield from (text for text in questions.values() if isinstance(text, str))
    yield from (hook.read_text(encoding="utf-8") for hook in (ROOT / "hooks").glob("*.py"))
    yield "{{cookiecutter.project_slug}}"


class TemplateFilters(Extension):
    """The filters above, and a guard: cookiecutter renders given answers as Jinja."""

    def __init__(self, environment):
        super().__init__(environment)
        for function in (check_answers, default_slug, quoted, task_source):
            environment.filters[function.__name__] = function
        self.own_templates = set(own_templates())
        # `cruft update` bakes the old template and the new one in one process and would keep
        # the old module for both (cruft issue 253): let the next bake import it afresh.
        sys.modules.pop(__name__, None)

    def preprocess(self, source, name, filename=None):
        """Refuse Jinja in an answer before it runs; files have a name, answers have none."""
        if name is None and JINJA.search(source) and source not in self.own_templates:
            refuse("An answer", source, "contains Jinja code", "Write it without {{, {% and {#.")
        return source
