"""The files that a unit of the input leaves: they count once all of them are on the disk."""

import hashlib
import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from samestep.base.files import read_json_object, remove, replace_text
from samestep.data.cache import hash_file

FACTS = "rows.json"  # of a prepared folder: what its files hold


class UnitWriter:
    """The files of one unit. They count once `commit` has written their sizes and digests."""

    def __init__(self, folder: Path, number: int):
        self.folder, self.name = folder, f"{number:06}"
        self.files: dict[str, Any] = {}  # by their kind, each with its digest

    def append(self, kind: str, values: np.ndarray | bytes) -> int:
        """Adds values to the file UNIT.kind, and returns the bytes that it had before."""
        if kind not in self.files:
            path = self.folder / f"{self.name}.{kind}"
            path.unlink(missing_ok=True)  # another run may have mapped it
            self.files[kind] = open(path, "wb"), hashlib.sha256()
        data = values if isinstance(values, bytes) else np.ascontiguousarray(values)
        file, digest = self.files[kind]
        before = file.tell()
        file.write(data)
        digest.update(data)
        return before

    def commit(self, facts: dict) -> None:
        """Makes the files and these facts last. A crash before leaves nothing that counts."""
        files = {}
        for kind, (file, digest) in self.files.items():
            files[f"{self.name}.{kind}"] = [file.tell(), digest.hexdigest()]
            file.flush()
            os.fsync(file.fileno())
            file.close()
        text = json.dumps({**facts, "files": files})
        replace_text(self.folder / f"{self.name}.json", text)


def read_unit(folder: Path, number: int) -> dict:
    """The facts that `commit` has written; empty: the unit is not done."""
    return read_json_object(folder / f"{number:06}.json")


def is_done(folder: Path, number: int) -> bool:
    """Whether a unit has been committed, and its files still have these bytes."""
    files = read_unit(folder, number).get("files", {})
    return bool(files) and all(
        path.is_file() and [path.stat().st_size, hash_file(path)] == written
        for path, written in ((folder / name, each) for name, each in files.items())
    )


def map_file(path: Path, dtype: Any) -> np.ndarray:
    """The numbers of a file; an empty one cannot be mapped."""
    if not path.stat().st_size:
        return np.zeros(0, dtype)
    return np.asarray(np.memmap(path, dtype, "r"))


map_some = lru_cache(1000)(map_file)  # each keeps a file open, and train.py may open 4,096


def finish_folder(folder: Path, done: list[dict], facts: dict, content: list) -> dict[str, Any]:
    """Writes the facts that the units have in common and removes the notes of the first pass.

    Returns the facts for the index of the prepared folder. `content`, as JSON, is the identity of
    the rows.
    """
    (folder / FACTS).write_text(json.dumps(facts), encoding="utf-8")
    for scanned in [*folder.glob("scan-*"), *folder.glob(".*.trash")]:
        remove(scanned)
    written = {name: value for each in done for name, value in each["files"].items()}
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return {"content": digest, "hashed": written}


def read_facts(folder: Path) -> dict:
    """What the files of a prepared folder hold."""
    return json.loads((folder / FACTS).read_text(encoding="utf-8"))
