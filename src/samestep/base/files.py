"""Files that replace older ones in one step, and survive a power cut."""

import contextlib
import errno
import json
import os
import shutil
import stat
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # matplotlib takes 1 s to import
    from matplotlib.figure import Figure

UMASK = os.umask(0o022)  # it can only be read by setting it
os.umask(UMASK)
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_WRONG_PATH = (
    FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError,
)  # fmt: skip


def comes_again(error: OSError) -> bool:
    """Whether the path is wrong, or the disk is full; all other errors may pass."""
    return isinstance(error, _WRONG_PATH) or error.errno in DISK_FULL


def fsync(path: Path) -> None:
    """Flushes a file's bytes, or a folder's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Deletes a file, a link or a folder, if it is there.

    A folder is renamed first: a kill leaves no half-deleted folder under its real name, and files
    that a network disk does not delete do not keep the name.
    """
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    trash = path
    if path.suffix != ".trash":
        trash = path.with_name(f".{path.name.strip('.')}-{time.time_ns()}.trash")
        path.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def read_text(path: Path) -> str:
    """The text of a regular file; raises ValueError for a pipe, which would block."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path} is not a regular file")
    return path.read_text(encoding="utf-8")


def read_json_object(path: Path) -> dict:
    """The JSON object in a file; empty if the file is missing, incomplete or something else."""
    try:
        value = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Names this file in errors of the body: a write that fails, on a full disk, names none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def replace_text(path: Path, text: str, partial: Path | None = None) -> None:
    """Writes or replaces a file. Readers, also after a power cut, see the old or the new text.

    `partial` is the temporary file, on the same disk; by default it lies beside the file.
    """
    partial = partial or path.with_name(f".{path.name}.partial")
    remove(partial)
    with named(path):
        partial.write_text(text, encoding="utf-8")
        fsync(partial)
    partial.replace(path)
    fsync(path.parent)


def replace_folder(fresh: Path, folder: Path) -> None:
    """Replaces a folder, or what else has its name, by the fresh one.

    The files are flushed first, so that a power cut leaves no folder of empty files. They get the
    permissions of new files: safetensors creates files for the owner alone.
    """
    for path in [*fresh.rglob("*"), fresh]:
        if path.is_file():
            with contextlib.suppress(OSError):  # some network disks have no permissions
                path.chmod(path.stat().st_mode | 0o666 & ~UMASK)
        fsync(path)
    old = folder.with_name(f".{folder.name}.old")
    remove(old)
    if os.path.lexists(folder):  # a link to nothing, too
        folder.rename(old)
    fresh.rename(folder)
    fsync(folder.parent)
    remove(old)


def save_figure(figure: "Figure", output: Path) -> Path:
    """Writes a figure. Readers see the old one or the new one, never half of it."""
    partial = output.with_name(f".{output.name}.{os.getpid()}.partial")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # a name in letters that the font lacks
            figure.savefig(partial, format=output.suffix[1:] or "png")
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)
    return output
