"""Writes the library as a wheel, with the standard library alone.

    python local_extensions/wheel.py FOLDER

The version ends with a part that names the content, such as 1.0.0+3f2a9c1d. Equal sources give an
equal file, and an index refuses such a version, so no other package can take its place. A release
for an index has no such part: python local_extensions/wheel.py FOLDER --release
"""

import argparse
import base64
import hashlib
import re
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = ROOT / "{{cookiecutter.project_slug}}" / "pyproject.toml"
INIT = "samestep/__init__.py"
NUMBER = re.compile(rb'^__version__ = "(.+)"$', re.M)
METADATA = """\
Metadata-Version: 2.4
Name: samestep
Version: {}
Summary: {}
Author: cookiecutter-accelerate authors
License-Expression: MIT
License-File: LICENSE
Classifier: Typing :: Typed
Description-Content-Type: text/markdown
{}

samestep trains PyTorch models with Hugging Face Accelerate. The samples and losses of a run are the
same on any number of processes, and after any interruption; with `exact`, the weights are bitwise
identical on devices of one kind.

Projects of the template cookiecutter-accelerate bring the library as a wheel, and import it in
`train.py` and `task.py`. The page `docs/library.md` of a project lists its subpackages.
`python -m samestep` lists its programs.
"""
WHEEL = b"Wheel-Version: 1.0\nGenerator: samestep\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def contents() -> dict[str, bytes]:
    """The library's files by their names in the wheel; the template's tasks are examples."""
    source = ROOT / "src"
    paths = {path.relative_to(source).as_posix(): path for path in source.rglob("*.py")}
    paths["samestep/py.typed"] = source / "samestep" / "py.typed"
    for path in (ROOT / "examples").glob("*.py"):
        paths[f"samestep/examples/{path.name}"] = path
    for path in (ROOT / "templates").glob("*/task.py"):
        paths[f"samestep/examples/{path.parent.name}.py"] = path
    return {name: paths[name].read_bytes() for name in sorted(paths)}


def metadata(files: dict[str, bytes], number: str) -> str:
    """What indexes and installers read of a version.

    Required is what the project of any task requires. What the project of one task, one tracker or
    DeepSpeed requires is an extra.
    """
    project = PROJECT.read_text(encoding="utf-8")
    python = re.search(r'^requires-python = "(.+)"$', project, re.M)[1]
    lines = [f"Requires-Python: {python}"]
    for requirement in re.findall(r'^    "([\w-]+>=[\w.]+)",$', project, re.M):
        lines.append(f"Requires-Dist: {requirement}")
    extras = re.findall(r'^    "(\w+)": (.+),$', project, re.M)  # of tasks and of trackers
    extras += re.findall(r"^(deepspeed) = (.+)$", project, re.M)
    for name, requirements in extras:
        extra = name.replace("_", "-")
        lines.append(f"Provides-Extra: {extra}")
        for requirement in re.findall(r'"(.+?)"', requirements):
            lines.append(f'Requires-Dist: {requirement}; extra == "{extra}"')
    template = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    urls = template.partition("\n[project.urls]\n")[2].partition("\n[")[0]
    for name, address in re.findall(r'^(\w+) = "(.+)"$', urls, re.M):
        lines.append(f"Project-URL: {name}, {address}")
    summary = files[INIT].decode().split('"""')[1].splitlines()[0]
    return METADATA.format(number, summary, "\n".join(lines))


def version(files: dict[str, bytes] | None = None) -> str:
    """The version of the sources: the library's own, and eight digits of their SHA-256."""
    files = files or contents()
    digest = hashlib.sha256(metadata(files, "").encode())
    for name, data in files.items():
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return f"{NUMBER.search(files[INIT])[1].decode()}+{digest.hexdigest()[:8]}"


def write(folder: Path, release: bool = False) -> Path:
    """Writes the wheel into a folder, and removes older ones; its path."""
    files = contents()
    number = version(files)
    if release:
        number = number.partition("+")[0]
    name = f"samestep-{number}"
    about = metadata(files, number).encode()
    files[INIT] = NUMBER.sub(f'__version__ = "{number}"'.encode(), files[INIT])
    files[f"{name}.dist-info/METADATA"] = about
    files[f"{name}.dist-info/WHEEL"] = WHEEL
    files[f"{name}.dist-info/licenses/LICENSE"] = (ROOT / "LICENSE").read_bytes()
    record = ""
    for path, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(data)}\n"
    files[f"{name}.dist-info/RECORD"] = f"{record}{name}.dist-info/RECORD,,\n".encode()
    folder.mkdir(exist_ok=True)
    for old in folder.glob("samestep-*.whl"):
        old.unlink()
    wheel = folder / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, data in files.items():  # each of 1980: equal sources give equal bytes
            archive.writestr(zipfile.ZipInfo(path), data, zipfile.ZIP_DEFLATED)
    return wheel


def main() -> None:
    """Writes the wheel that the command line asks for, and prints its path."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--release", action="store_true", help="a version that an index takes")
    given = parser.parse_args()
    print(write(given.folder, given.release))


if __name__ == "__main__":
    main()
