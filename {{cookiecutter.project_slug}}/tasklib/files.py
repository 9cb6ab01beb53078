"""Files that must survive a power cut, and errors of the operating system that will come again."""

import errno
import json
import os
import shutil
import time
from pathlib import Path

# The path is wrong, or the disk is full. Other errors may pass.
PERMANENT_ERRORS = {
    getattr(errno, name)
    for name in """ENOENT EACCES EPERM ENOTDIR EISDIR EEXIST ELOOP ENAMETOOLONG EROFS EINVAL ENXIO
        EMFILE ENOSPC EDQUOT EFBIG""".split()
}


def flush(path: Path) -> None:
    """Waits until a file's bytes, or a folder's entries, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Deletes a file or a folder. Its name is free at once, even if a network disk keeps files."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    doomed = path.with_name(f".{path.name.strip('.')}-{time.time_ns()}.trash")
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def read_json_object(path: Path) -> dict:
    """The JSON object in a file; empty if there is none, or if it is damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
