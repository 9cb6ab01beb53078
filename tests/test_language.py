"""What can be checked of the words: in pages, in --help, in errors; docstrings; the version."""

import ast
import inspect
import re

import samestep
from conftest import ROOT, SOURCE
from refusals import cases

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
