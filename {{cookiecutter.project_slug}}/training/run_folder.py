"""The folder of a run: who may write into it, what state its run is in, files that replace others.

Paths and bytes only: no torch, no accelerate.
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import stat
import time
from pathlib import Path

UMASK = os.umask(0o022)  # reading it takes setting it
os.umask(UMASK)
LOCK_WAIT = 40  # tenths of a second to wait for the lock of a run folder, ten times that if its
# holder is on another machine: a network disk takes a while to notice that one has died
REMOVED = "the run folder was removed while the run was writing to it"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What the system says of a path that is wrong, and will say again; other errors may pass.
PERMANENT_ERRORS = {
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST),
    *(errno.ELOOP, errno.ENAMETOOLONG, errno.EROFS, errno.EINVAL, errno.ENXIO, errno.EMFILE),
    *DISK_FULL,
}


# ---- Files ---------------------------------------------------------------------------------------


def apply_umask(path: Path) -> None:
    """Gives a file the rights of any new one; safetensors makes those that only its owner reads."""
    with contextlib.suppress(OSError):  # some network disks have no rights
        path.chmod(path.stat().st_mode | 0o666 & ~UMASK)


def fsync(path: Path) -> None:
    """Waits until a file's bytes, or a folder's entries, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Frees a name: deletes what is called so, of a folder as much as a network disk lets go."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    # Renamed first: a run that is killed here leaves no half-deleted folder under a real name.
    doomed = path.with_name(f".{path.name.strip('.')}-{time.time_ns()}.trash")
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def read_text(path: Path) -> str:
    """The text of a file of a run; ValueError for what is none: a pipe would be waited for."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path} is no regular file")
    return path.read_text(encoding="utf-8")


def make_fresh_folder(folder: Path) -> Path:
    """An empty folder beside this one, to be filled and then to take its place."""
    fresh = folder.with_name(f".{folder.name}.partial")
    remove(fresh)
    fresh.mkdir()
    return fresh


def replace_folder(fresh: Path, folder: Path) -> None:
    """Puts the fresh folder in the place of the other, of which nothing stays.

    Its files are on the disk before that: no power cut leaves a folder of empty ones.
    """
    for path in [*fresh.rglob("*"), fresh]:
        if path.is_file():
            apply_umask(path)
        fsync(path)
    old = folder.with_name(f".{folder.name}.old")
    remove(old)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    fsync(folder.parent)
    remove(old)


# ---- Lock and status -----------------------------------------------------------------------------


class RunLock:
    """A run folder, made if need be, kept from other runs until this process ends.

    The lock goes with its process, however that ends; one whose launcher was killed may still be
    saving, so a start waits a little. Raises ValueError that says who holds it, or what is in the
    way. A check does not `hold` it: on other machines the processes of the same run may.
    """

    def __init__(self, output: Path, hold: bool = True):
        self.output, self.path, self.made = output, output / "lock", []
        self.file = self.found = None
        try:
            self.made = [p for p in (self.path, output, *output.parents) if not p.exists()]
            output.mkdir(parents=True, exist_ok=True)
            check_file_types(output)
            self.open()
        except OSError as error:
            self.release()
            if error.errno not in PERMANENT_ERRORS:
                raise
            raise ValueError(f"output_dir {output}: {error.strerror}; give another") from None
        if hold:
            self.acquire()

    def open(self) -> None:
        self.file = open(self.path, "a", encoding="utf-8")
        os.register_at_fork(after_in_child=self.file.close)  # or worker processes would hold it too

    def acquire(self) -> None:
        waited = 0
        while waited < (
            LOCK_WAIT if self.holder()["host"] == socket.gethostname() else 10 * LOCK_WAIT
        ):
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self.is_there():
                    self.found = os.fstat(self.file.fileno())
                    self.file.truncate(0)
                    self.file.write(json.dumps(this_process()))
                    self.file.flush()
                    return
                self.file.close()  # whoever held it has removed it at last
                self.output.mkdir(parents=True, exist_ok=True)
                self.open()
            except BlockingIOError:
                waited += 1
                time.sleep(0.1)
            except OSError as error:
                if error.errno not in (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK):
                    raise
                reason = error.strerror
                raise ValueError(f"{self.output}: no locks on this disk: {reason}") from None
        raise ValueError(
            "{0} is in use by process {pid} on {host}, since {since}: there, `tail -f "
            "{0}/metrics.jsonl` shows what it does, and `kill {pid}` saves and stops it; or give "
            "another --output_dir".format(self.output, **self.holder())
        )

    def holder(self) -> dict:
        """Who holds the lock, as it says itself."""
        here = {"pid": "?", "host": socket.gethostname(), "since": "?"}
        return here | {n: v for n, v in read_json_object(self.path).items() if n in here}

    def check_folder(self) -> None:
        """Raises FileNotFoundError if the run folder was removed, or replaced by another."""
        if not self.is_there():
            raise FileNotFoundError(errno.ENOENT, REMOVED, str(self.output))

    def is_there(self) -> bool:
        """Whether the run folder is still the one that was locked."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self.file.fileno()))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Removes what was made here, as long as nothing else is in it."""
        with contextlib.suppress(OSError):  # another run has it, or has just begun there
            if self.file:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not self.is_there():
                    return
            if self.found:  # a start that changes nothing leaves no trace
                os.utime(self.path, ns=(self.found.st_atime_ns, self.found.st_mtime_ns))
            for path in self.made:
                if path == self.path and os.listdir(self.output) == [path.name]:
                    path.unlink()
                elif path.is_dir() and not os.listdir(path):
                    path.rmdir()


FILES = ("config.yaml", "metrics.jsonl", "status.json", "wandb_run_id", "lock")
FOLDERS = ("checkpoints", "model", "evaluation")


def check_file_types(output: Path) -> None:
    """Raises ValueError for a file of a run that is none: a pipe would be waited for, for ever."""
    for name, kind, right in (
        *((name, "file", stat.S_ISREG) for name in FILES),
        *((name, "folder", stat.S_ISDIR) for name in FOLDERS),
    ):
        path = output / name
        if path.is_symlink() and not path.exists():  # to a disk that is not there, perhaps
            raise ValueError(f"{path} is a link to nothing: mend it, or give another --output_dir")
        if path.exists() and not right(path.stat().st_mode):
            raise ValueError(f"{path} is no {kind}: move it away, or give another --output_dir")


def this_process() -> dict:
    """Who writes: this process, its machine, and now."""
    since = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": since}


def read_json_object(path: Path) -> dict:
    """A JSON object in a file; empty where there is none, or none that is whole."""
    try:
        found = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def write_status(output: Path, state: str, **more) -> None:
    """Replaces status.json of a run folder: what its run is doing, or how it ended."""
    partial = output / ".status.json.partial"
    remove(partial)
    partial.write_text(
        json.dumps({"state": state, **this_process(), **more}) + "\n", encoding="utf-8"
    )
    fsync(partial)
    partial.replace(output / "status.json")
    fsync(output)


def write_final_status(output: Path, state: str, reason: str, exit_code: int) -> bool:
    """Writes how a run ended; False if another of its processes has done so.

    The status of another run in the same folder stays as it is.
    """
    status, me = read_status(output), [os.getpid(), socket.gethostname()]
    main = [status.get("pid"), status.get("host")]
    # Another process than the main one may write it, and leaves word of whose status it was.
    if main == me or (status.get("state") == "running" and os.environ.get("RANK", "0") != "0"):
        write_status(output, state, reason=reason, exit_code=exit_code, main=main)
    return main == me or status.get("main") != me


def read_status(output: Path) -> dict:
    """What status.json of a run folder says; empty where there is none, or none that is whole."""
    return read_json_object(output / "status.json")
