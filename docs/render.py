"""Renders the pages of a project of the default answers into docs/project/, and docs/api.md.

    PYTHONPATH=src python docs/render.py

The site and README.md link to them there. tests/test_docs.py compares them.
"""

import inspect
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
TEMPLATE = "{{cookiecutter.project_slug}}"
WRITTEN = f"<!-- Written by docs/render.py from {TEMPLATE}: edit it there. -->\n\n"
LINK = re.compile(r"\[([^\]\n]+)\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)")


def render(project: Path) -> dict[str, str]:
    """The text of each page of a project by its name here: all pages lie in one folder."""
    pages = {"README.md": project / "README.md"}
    pages |= {path.name: path for path in sorted(project.glob("docs/*.md"))}
    found = {}
    for name, page in pages.items():

        def moved(match: re.Match, page: Path = page) -> str:
            target = (page.parent / match[2]).resolve().relative_to(project.resolve())
            if target.suffix == ".md":
                shown = f"[{match[1]}]({target.name}{match[3] or ''})"
                return shown if target.name in pages else match[1]
            place = os.path.relpath(HERE.parent / TEMPLATE / target, HERE / "project")
            place = place.replace("{", "%7B").replace("}", "%7D")
            return f"[{match[1]}]({place})"

        found[name] = WRITTEN + LINK.sub(moved, page.read_text(encoding="utf-8"))
    title = found["README.md"].removeprefix(WRITTEN).partition("\n")[0]  # the project's name
    found["README.md"] = found["README.md"].replace(title, "# A generated project", 1)
    return found


def api() -> str:
    """The page of the names that `samestep` has, as it groups them."""
    import samestep

    lines = [
        "# API",
        "",
        "What `train.py`, `task.py` and a script of your own import, in the order in",
    ]
    lines += ["which they are needed: `from samestep import Training`.", ""]
    source = Path(samestep.__file__).read_text(encoding="utf-8").partition("if TYPE_CHECKING:")[2]
    names = samestep.contents()
    for row in source.partition("\n\n\n")[0].splitlines()[1:]:
        if row.startswith("    # "):
            lines += [f"## {row[6:]}", ""]
        elif row:
            name = row.split()[-1]
            value = getattr(samestep, name)
            place = names[name]
            if inspect.ismodule(value):
                lines += [f"### {name}", ""]
                lines += directive("module", value.__name__, hidden=names)
            elif inspect.isclass(value) or inspect.isfunction(value):
                kind = "class" if inspect.isclass(value) else "function"
                lines += [f"### {name}", ""]
                lines += directive(kind, f"{place}.{name}")
            else:
                lines += [f"`{name}` of `{place}`", ""]
    return "\n".join(lines)


def directive(kind: str, target: str, hidden: Iterable[str] = ()) -> list[str]:
    """What autodoc fills in; a name of the table of contents is described once."""
    members = ["   :no-index:"]  # a search finds pages before names
    members += ["   :members:"] if kind != "function" else []
    members += [f"   :exclude-members: {', '.join(hidden)}"] if hidden else []
    return ["```{eval-rst}", f".. auto{kind}:: {target}", *members, "```", ""]


def main() -> None:
    from cookiecutter.main import cookiecutter

    sys.dont_write_bytecode = True
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder, "template")
        leave = shutil.ignore_patterns(".git", ".venv", "demo", "runs", "__pycache__", ".*_cache")
        shutil.copytree(HERE.parent, template, ignore=leave)
        elsewhere = {"replay_dir": folder, "cookiecutters_dir": folder}
        project = Path(
            cookiecutter(str(template), no_input=True, output_dir=folder, default_config=elsewhere)
        )
        (HERE / "project").mkdir(exist_ok=True)
        for old in (HERE / "project").glob("*.md"):
            old.unlink()
        for name, text in render(project).items():
            (HERE / "project" / name).write_text(text, encoding="utf-8")
        (HERE / "api.md").write_text(api(), encoding="utf-8")


if __name__ == "__main__":
    main()
