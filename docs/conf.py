"""The site: `make docs` builds it into .cache/site, with each page as Markdown beside it."""

import contextlib
import functools
import inspect
import re
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT / "src"))

project = "cookiecutter-accelerate"
copyright = "cookiecutter-accelerate authors"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = "cookiecutter-accelerate"
html_copy_source = False
exclude_patterns = ["requirements.txt"]
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
add_module_names = False
maximum_signature_line_length = 80
html_static_path = ["site.css"]
html_css_files = ["site.css"]
pygments_style = "github-light"
pygments_dark_style = "github-dark"
ADDRESS = ""  # of the published site, once there is one

FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
# A line of a docstring about an argument: `name: text`, `name(batch): text`, `name   text`.
ARGUMENT = re.compile(r"(\w+)(\([^)]*\))?(?::| {2,}) *(?=\S)")


def describe(page: Path) -> tuple[str, str]:
    """The title of a page, and its first sentence."""
    text = page.read_text(encoding="utf-8")
    if included := re.search(r"^```\{include\} (\S+)$", text, re.M):
        text = (page.parent / included[1]).read_text(encoding="utf-8")
    _, title, rest = re.split(r"^# +(.+)$", text, maxsplit=1, flags=re.M)
    parts = re.split(r"\n\s*\n", FENCE.sub("", rest))
    prose = (part.strip() for part in parts)
    first = next((p for p in prose if p and p[0] not in "#|!<*-1"), "")
    sentence = re.split(r"(?<=[.?])\s", " ".join(first.split()), maxsplit=1)[0]
    return title, re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", sentence).rstrip(":")


def write_markdown(app, error):
    """Each page as Markdown beside it, and llms.txt: their list, each with its first sentence."""
    if error:
        return
    pages = sorted(HERE.rglob("*.md"), key=lambda page: (page.name != "index.md", page))
    _, about = describe(pages[0])
    lines = [f"# {project}", "", f"> {about}", ""]
    for page in pages:
        name = page.relative_to(HERE)
        (Path(app.outdir) / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(page, Path(app.outdir) / name)
        title, sentence = describe(page)
        lines.append(f"- [{title}]({ADDRESS}{name.as_posix()}): {sentence}".removesuffix(": "))
    (Path(app.outdir) / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


@functools.cache
def uses() -> str:
    """What users read and edit: pages, train.py, task files and examples."""
    paths = [*HERE.rglob("*.md"), *ROOT.glob("examples/*.py"), *ROOT.glob("templates/*/task.py")]
    paths += ROOT.glob("*slug*/train.py")
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


def skip(app, what, name, obj, skipped, options):
    """Whether a function is left out: no page, no example and no task calls it."""
    if skipped or not inspect.isroutine(obj):
        return skipped
    module = obj.__module__.rpartition(".")[2]
    called = rf"\b{module}\.{name}\b" if what == "module" else rf"\.{name}\b"
    return not re.search(called, uses())


def format_docstring(app, what, name, obj, options, lines):
    """Arguments become a list, indented lines a literal block, and `x` a literal."""
    known = {*getattr(obj, "__annotations__", {})}
    with contextlib.suppress(TypeError, ValueError):  # no function, or one of C
        known |= {*inspect.signature(obj).parameters}
    found, is_list, is_code = [], False, False
    for line in lines:
        line = line if is_code else re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", line)
        match = ARGUMENT.match(line)
        if not line:
            is_list = is_code = False
        elif not found or not found[-1]:  # a paragraph begins
            is_list = bool(match and match[1] in known)
            is_code = line.startswith("    ")
            found += ["::", ""] if is_code else []
        if is_list and match and match[1] in known:
            line = f"- ``{match[1]}{match[2] or ''}``: {line[match.end() :]}"
        elif is_list:
            line = f"  {line.strip()}"
        found.append(line)
    lines[:] = found


def setup(app):
    app.connect("autodoc-skip-member", skip)
    app.connect("autodoc-process-docstring", format_docstring)
    app.connect("build-finished", write_markdown)
