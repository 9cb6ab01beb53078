"""Writes the library as a wheel: python local_extensions/wheel.py FOLDER [--release]

The version ends with a part that names the content, such as 1.0.0+3f2a9c1d, which an index refuses:
no other package can take its place. Equal sources give an equal file. A release has no such part.
"""

import argparse
import base64
import hashlib
import re
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INIT = "samestep/__init__.py"
NUMBER = re.compile(rb'^__version__ = "(.+)"$', re.M)
METADATA = """\
Metadata-Version: 2.4
Name: samestep
Version: {}
Summary: The library under train.py and task.py of the template cookiecutter-accelerate.
License-Expression: MIT
License-File: LICENSE
Description-Content-Type: text/markdown
{}

`docs/library.md` of a project lists its subpackages, `python -m samestep` its programs.
"""
WHEEL = b"Wheel-Version: 1.0\nGenerator: samestep\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def contents() -> dict[str, bytes]:
    """The library's files by their names in the wheel; the template's tasks are examples."""
    source = ROOT / "src"
    files = [*source.rglob("*.py"), *source.rglob("*.jinja"), *source.rglob("py.typed")]
    paths = {path.relative_to(source).as_posix(): path for path in files}
    for path in (ROOT / "examples").glob("*.py"):
        paths[f"samestep/examples/{path.name}"] = path
    for path in (ROOT / "templates").glob("*/task.py"):
        paths[f"samestep/examples/{path.parent.name}.py"] = path
    return {name: paths[name].read_bytes() for name in sorted(paths)}


def metadata(number: str) -> str:
    """What installers read; what one task, one tracker, DeepSpeed or S3 requires is an extra."""
    project = (ROOT / "{{cookiecutter.project_slug}}" / "pyproject.toml").read_text("utf-8")
    lines = ["Requires-Python: " + re.search(r'^requires-python = "(.+)"$', project, re.M)[1]]
    for requirement in re.findall(r'^    "([\w-]+>=[\w.]+)",$', project, re.M):
        lines.append(f"Requires-Dist: {requirement}")
    extras = re.findall(r'^    "(\w+)": (.+),$', project, re.M)  # of tasks and of trackers
    for name, found in [*extras, *re.findall(r"^(deepspeed|s3) = (.+)$", project, re.M)]:
        extra = name.replace("_", "-")
        lines.append(f"Provides-Extra: {extra}")
        for requirement in re.findall(r'"(.+?)"', found):
            lines.append(f'Requires-Dist: {requirement}; extra == "{extra}"')
    return METADATA.format(number, "\n".join(lines))


def version(files: dict[str, bytes]) -> str:
    """The version of the sources: the library's own, and eight digits of their SHA-256."""
    digest = hashlib.sha256(metadata("").encode())
    for name, data in files.items():
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return f"{NUMBER.search(files[INIT])[1].decode()}+{digest.hexdigest()[:8]}"


def write(folder: Path, release: bool = False) -> Path:
    """Writes the wheel into a folder, and removes older ones; its path."""
    files = contents()
    number = version(files).partition("+")[0] if release else version(files)
    name = f"samestep-{number}"
    files[INIT] = NUMBER.sub(f'__version__ = "{number}"'.encode(), files[INIT])
    files[f"{name}.dist-info/METADATA"] = metadata(number).encode()
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--release", action="store_true", help="a version that an index takes")
    print(write(**vars(parser.parse_args())))
