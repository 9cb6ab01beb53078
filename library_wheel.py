"""Writes the library as a wheel, with the standard library alone: python library_wheel.py FOLDER

The version ends with a part that names the content, such as 1.0.0+3f2a9c1d. Equal sources give an
equal file, and an index refuses such a version, so no other package can take its place.
"""

import base64
import hashlib
import re
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
METADATA = """\
Metadata-Version: 2.1
Name: samestep
Version: {}
Requires-Python: >=3.11
"""
WHEEL = b"Wheel-Version: 1.0\nGenerator: samestep\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def contents() -> dict[str, bytes]:
    """The library's files by their names in the wheel; the template's tasks are examples."""
    source = ROOT / "src"
    paths = {path.relative_to(source).as_posix(): path for path in source.rglob("*.py")}
    for folder in ("tasks", "examples"):
        for path in (ROOT / "templates" / folder).glob("*.py"):
            paths[f"samestep/examples/{path.name}"] = path
    return {name: paths[name].read_bytes() for name in sorted(paths)}


def version(files: dict[str, bytes] | None = None) -> str:
    """The version of the sources: the library's own, and eight digits of their SHA-256."""
    files = files or contents()
    number = re.search(rb'^__version__ = "(.+)"$', files["samestep/__init__.py"], re.M)[1].decode()
    digest = hashlib.sha256()
    for name, data in files.items():
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return f"{number}+{digest.hexdigest()[:8]}"


def write(folder: Path) -> Path:
    """Writes the wheel into a folder, and removes older ones; its path."""
    files = contents()
    number = version(files)
    name = f"samestep-{number}"
    files[f"{name}.dist-info/METADATA"] = METADATA.format(number).encode()
    files[f"{name}.dist-info/WHEEL"] = WHEEL
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
    print(write(Path(sys.argv[1])))
