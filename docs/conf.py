"""The site: `make docs` builds it into .cache/site, with each page as Markdown beside it."""

import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))

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
ADDRESS = ""  # of the published site, once there is one


def write_markdown(app, error):
    """Each page as Markdown beside it, and llms.txt: their list, each with its first sentence."""
    if error:
        return
    lines = [f"# {project}", "", "> Train PyTorch models with Hugging Face Accelerate.", ""]
    for page in sorted(HERE.rglob("*.md")):
        name = page.relative_to(HERE)
        (Path(app.outdir) / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(page, Path(app.outdir) / name)
        text = page.read_text(encoding="utf-8")
        title = text.splitlines()[0].lstrip("# ")
        lines.append(f"- [{title}]({ADDRESS}{name.as_posix()})")
    (Path(app.outdir) / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def setup(app):
    app.connect("build-finished", write_markdown)
