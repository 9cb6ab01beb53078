"""What lies at a mirror's URL: a copy of a run folder in a store that outlives the machine.

    s3://bucket/runs/mine/
      owner.json                          the start that writes here: the last one
      metrics.jsonl, config.yaml, ...     the files of the run folder
      checkpoints/step-00000400-5f0c9a/   the files of a checkpoint, then its manifest.json
      model/                              at the end
      5f0c9a/                             the same of a run that began anew, with --resume never

A store has neither locks nor renames. So a checkpoint without a manifest is none, and each start
has a word of its own in the names: none can change what another one has written. What is downloaded
is verified by its hashes, and becomes a checkpoint of the run folder in one step. This module needs
neither torch nor accelerate.
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from samestep.base import run_folder
from samestep.base.console import one_line, without_credentials
from samestep.base.errors import Failed, UserError, as_user_error, catch
from samestep.base.files import DISK_FULL, read_text, remove, replace_folder, replace_text
from samestep.state import checkpoints
from samestep.state.checkpoints import MANIFEST

OWNER = "owner.json"
_FOLDER = re.compile(r"(step-\d{8,})-([0-9a-f]{6})")
_PART = 16 << 20  # bytes; s3fs takes 10 parts of 50 MB at a time unless it is told otherwise
# Of each protocol the package, and options for fsspec.
_STORES: dict[str, tuple[str, dict[str, Any]]] = {
    # s3fs tries five times itself; with botocore's tries a dead store would be told after minutes.
    "s3": ("s3fs", {"max_concurrency": 4, "config_kwargs": {"retries": {"max_attempts": 1}}}),
    "gs": ("gcsfs", {}), "az": ("adlfs", {}), "hf": ("huggingface_hub", {}),
    "file": ("fsspec", {"auto_mkdir": True}),
}  # fmt: skip


def step_of(name: str) -> int:
    """Return the step of a folder of the store."""
    return int(_FOLDER.fullmatch(name)[1].removeprefix("step-"))


@contextlib.contextmanager
def reached(url: str) -> Iterator[None]:
    """Raise UserError for what is wrong with a URL, and Failed where its store does not answer: at
    a start either ends the run, for the store may have its checkpoints."""
    try:
        yield
    except (UserError, Failed):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            raise
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        text = f"mirror {url}: {kind}{one_line(error)}"
        if isinstance(error, ImportError):
            text += f"; pip install {_STORES[url.partition(':')[0]][0]}"
        wrong = (ValueError, ImportError, FileNotFoundError, PermissionError)
        is_wrong = isinstance(error, wrong) or getattr(error, "status_code", 0) in (401, 403, 404)
        raise (UserError if is_wrong else Failed)(text) from error


def _check_url(url: str) -> None:
    """Raise UserError for a URL that is no mirror's."""
    protocol, _, place = url.partition("://")
    shown, parent = one_line(url, 100), Path(place).parent
    if without_credentials(url) != url:
        raise UserError(
            f"mirror is {shown} with a password or a query, which a run would store; give them "
            "through the environment, as the package of the store takes them"
        )
    is_known = protocol in _STORES and "::" not in url and place.strip("/")
    if not is_known or (protocol == "hf" and not place.startswith("buckets/")):
        raise UserError(
            f"mirror is {shown}; give s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, "
            "az://CONTAINER/FOLDER, hf://buckets/OWNER/BUCKET/FOLDER or file:///FOLDER"
        )
    if protocol == "file" and Path(place, "lock").exists():
        raise UserError(f"mirror {shown} is the folder of a run; give another")
    if protocol == "file" and not parent.is_dir():  # its disk may not be mounted
        raise UserError(f"mirror {shown}: there is no folder {parent}; create it, or mount it")


class Store:
    """A mirror at `url`, for the start whose word is `word`: 6 hex digits.

    anew: whether a run begins here beside what is there. Raises UserError for a URL that is wrong,
    and Failed if the store does not answer.
    """

    def __init__(self, url: str, word: str, anew: bool = False):
        self.url, self.word = url.rstrip("/"), word
        self.sent: dict[str, tuple] = {}  # size and time of files that this start has uploaded
        self.manifests: dict[int, bytes] = {}  # of checkpoints that it has uploaded, by step
        self.damaged: set[str] = set()  # folders that it has passed over
        _check_url(url)
        self.protocol = url.partition(":")[0]
        with reached(url):
            import fsspec

            options = {"use_listings_cache": False, "skip_instance_cache": True}
            options |= _STORES[self.protocol][1]
            self.fs, self.top = fsspec.url_to_fs(self.url, **options)
            if loop := getattr(self.fs, "loop", None):  # the call raises what its tasks would print
                loop.set_exception_handler(lambda *_: None)
            owner = self.read_owner()
            self.home = str(owner.get("home", ""))  # the folder of the run of now
            if not re.fullmatch(r"([0-9a-f]{6})?", self.home):
                raise UserError(f"{self.url}/{OWNER} names {one_line(self.home, 60)} as a folder")
            folders = self.listed()  # a bucket that is not there raises FileNotFoundError
            names = [path.rpartition("/")[2] for path in self.fs.find(self.root)]
            holds_files = any(name and name[0] != "." for name in names)
            if anew and holds_files:
                self.home = word
            elif holds_files and not (owner or folders):
                raise UserError(f"mirror {self.url} holds files of no run; give an empty folder")

    @property
    def root(self) -> str:
        return f"{self.top}/{self.home}".rstrip("/")

    @property
    def shown(self) -> str:
        return f"{self.url}/{self.home}".rstrip("/")

    # ---- What is there

    def listed(self) -> dict[str, dict[str, int]]:
        """List the folders of checkpoints, the newest first: the bytes of each file by its name."""
        folders: dict[str, dict[str, int]] = {}
        self.fs.invalidate_cache()
        beginning = f"{self.root}/checkpoints/"
        for path, about in self.fs.find(beginning, detail=True).items():
            name, _, file = path.removeprefix(beginning).partition("/")
            if _FOLDER.fullmatch(name):
                folders.setdefault(name, {})[file] = about["size"]
        return dict(sorted(folders.items(), key=lambda each: step_of(each[0]), reverse=True))

    def complete(self) -> list[str]:
        """List those that have a manifest, and were not passed over."""
        folders = self.listed().items()
        return [n for n, files in folders if MANIFEST in files and n not in self.damaged]

    def find(self, step: int, manifest: bytes) -> str:
        """Return the folder in which this very checkpoint is there; empty without one."""
        for name in self.complete():
            if step_of(name) == step and self.read(f"checkpoints/{name}/{MANIFEST}") == manifest:
                return name
        return ""

    def lacks(self, name: str, files: dict[str, dict]) -> list[str]:
        """List those of a checkpoint's files that are not there with their sizes."""
        there = self.listed().get(name, {})
        return [file for file, about in files.items() if there.get(file) != about["bytes"]]

    def read(self, name: str) -> bytes | None:
        """Read a file of the run folder; None if it is not there."""
        try:
            return self.fs.cat_file(f"{self.root}/{name}")
        except FileNotFoundError:
            return None

    def read_owner(self) -> dict:
        """Read who writes here; empty if nobody has yet."""
        try:
            return dict(json.loads(self.fs.cat_file(f"{self.top}/{OWNER}")))
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError):
            raise UserError(f"{self.url}/{OWNER} is damaged: delete it") from None

    def check_owner(self) -> dict:
        """Return who writes here; raise UserError if it is another start than this one."""
        owner = self.read_owner()
        if owner.get("word", self.word) != self.word:
            found = {name: one_line(owner.get(name, "?"), 60) for name in ("pid", "host", "since")}
            raise UserError(
                "mirror {0} belongs to process {pid} on {host} since {since}: this run ends at its "
                "next save; stop one of them, or give another mirror".format(self.url, **found)
            )
        return owner

    def download(
        self, name: str, folder: Path, check: Callable | None = None, files: bool = False
    ) -> tuple[dict, str]:
        """Download a checkpoint into the folder of all; return its manifest, and why it is none.

        What lies in the folder already is not downloaded. check(place, manifest): is called before
        tensors come. files: whether those beside the folders come, too. Raises UserError for a file
        that would lie elsewhere.
        """
        partial, there = folder / f".{name}.partial", f"{self.root}/checkpoints/{name}"
        final = folder / name.rpartition("-")[0]
        checkpoints.make_partial_folder(partial)
        try:
            self.fs.get_file(f"{there}/{MANIFEST}", str(partial / MANIFEST))
            saved = checkpoints.read_manifest(partial)
            if saved["step"] != step_of(name):
                raise ValueError(f"its manifest names step {saved['step']}")
            if check:
                with as_user_error():
                    check(f"{self.shown}/checkpoints/{name}", saved)
            for file in saved["files"]:
                if not (partial / file).resolve().is_relative_to(partial.resolve()):
                    raise UserError(f"{self.shown}: {name} names {one_line(file, 60)}, outside it")
            size = sum(about["bytes"] for about in saved["files"].values())
            with as_user_error():
                checkpoints.check_disk_space(folder, size)
            for file, about in saved["files"].items():
                (partial / file).parent.mkdir(parents=True, exist_ok=True)
                if catch(checkpoints.describe_files, final, [file])[0] == {file: about}:
                    _link(final / file, partial / file)
                else:
                    self.fs.get_file(f"{there}/{file}", str(partial / file))
            checkpoints.verify(partial)
            if files:  # first: a kill may come between
                self.download_files(folder.parent)
            replace_folder(partial, final)
            return saved, ""
        except UserError:
            raise
        except (ValueError, FileNotFoundError) as error:  # of the manifest, and of the store
            self.damaged.add(name)
            reason = one_line(error).replace(f"{partial}/", "").replace(str(partial), "it")
            is_lost = isinstance(error, FileNotFoundError)
            return {}, f"{name}: {'a file is missing' if is_lost else reason}"
        finally:
            remove(partial)

    def download_files(self, output: Path) -> None:
        """Download the files beside the folders, such as the id of a W&B run, that the run folder
        lacks; metrics.jsonl and status.json belong to the newest checkpoint, and replace others."""
        for path in self.fs.find(self.root, maxdepth=1):
            name = path.removeprefix(f"{self.root}/")
            is_newer = name in ("metrics.jsonl", "status.json")
            if name in ("", "lock", OWNER) or name.startswith(".") or "/" in name:
                continue
            if is_newer or not (output / name).exists():
                self.fs.get_file(path, str(output / f".{name}.partial"))
                (output / f".{name}.partial").replace(output / name)

    # ---- What is written

    def write_owner(self, step: int) -> None:
        """Write that this start writes here, and the step that it uploads now."""
        owner = {"word": self.word, "home": self.home, "step": step}
        self.write(f"{self.top}/{OWNER}", json.dumps(owner | run_folder.describe_process()))

    def write(self, path: str, text: str) -> None:
        """Write a small file: readers see the old one or the new one."""
        if self.protocol == "file":
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            replace_text(Path(path), text)
        else:
            self.fs.pipe_file(path, text.encode())

    def put(self, path: Path, name: str) -> None:
        """Upload a file."""
        options: dict[str, Any] = {}
        if self.protocol == "s3":  # a file has at most 10,000 parts
            options = {"chunksize": max(_PART, path.stat().st_size // 9000)}
        self.fs.put_file(str(path), f"{self.root}/{name}", **options)

    def put_changed(self, output: Path, names: list[str]) -> None:
        """Upload files of the run folder `output`, unless this start has done so."""
        for name in names:
            about = (output / name).stat()
            if self.sent.get(name) != (about.st_size, about.st_mtime_ns):
                self.put(output / name, name)
                self.sent[name] = (about.st_size, about.st_mtime_ns)

    def put_parts(self, name: str, here: Path, goes_on: Callable[[], bool]) -> None:
        """Upload the files of a checkpoint that lie here, but for its manifest, as long as
        goes_on(): another node may have the rest."""
        for file in self.lacks(name, json.loads(read_text(here / MANIFEST))["files"]):
            if goes_on() and (here / file).exists():
                self.put(here / file, f"checkpoints/{name}/{file}")

    def put_manifest(self, step: int, name: str, manifest: bytes) -> None:
        """Turn the files of a folder into a checkpoint."""
        self.write(f"{self.root}/checkpoints/{name}/{MANIFEST}", manifest.decode())
        self.manifests[step] = manifest

    def prune(self, newest: int, keep: int, is_kept: Callable[[int], bool]) -> None:
        """Delete checkpoints up to the newest as checkpoints.prune does, and incomplete ones. Of a
        step that several starts have uploaded, that of this one stays."""
        folders = {name: files for name, files in self.listed().items() if step_of(name) <= newest}
        whole = [n for n in folders if MANIFEST in folders[n] and n not in self.damaged]
        chosen = {step_of(n): n for n in sorted(whole, key=lambda n: n.endswith(self.word))}
        among = sorted(chosen, reverse=True)[: keep or None]
        kept = {chosen[step] for step in chosen if step in among or is_kept(step)}
        for name in folders.keys() - kept:
            # A manifest first: what is left is no checkpoint.
            for file in sorted(folders[name], key=lambda file: file != MANIFEST):
                self.fs.rm_file(f"{self.root}/checkpoints/{name}/{file}")


def _link(path: Path, other: Path) -> None:
    """Give a file a second name; a copy where a disk has no links."""
    try:
        os.link(path, other)
    except OSError:
        shutil.copyfile(path, other)


def list_files(output: Path) -> list[str]:
    """List the files of a run folder that are copied, first those that lie in no folder of it. Left
    out are checkpoints and the status, which are copied otherwise, the lock, hidden files, links.
    """
    found = []
    for place, folders, names in os.walk(output):  # passes over what is deleted meanwhile
        left_out = ("checkpoints", "lock", "status.json") if Path(place) == output else ()
        folders[:] = [name for name in folders if name[0] != "." and name not in left_out]
        paths = [Path(place, name) for name in names if name[0] != "." and name not in left_out]
        files = [path for path in paths if path.is_file() and not path.is_symlink()]
        found += [str(path.relative_to(output)) for path in files]
    return sorted(found, key=lambda name: ("/" in name, name))
