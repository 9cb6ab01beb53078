"""The folder of a run: lock, status.json, metrics.jsonl. Needs neither torch nor accelerate."""

import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any, ClassVar

from samestep.base.files import comes_again, read_json_object, replace_text

# Tenths of a second to wait for the lock of a run folder. For a holder on another machine it is 30
# times that: NFS keeps the locks of one that is lost for 90 seconds.
LOCK_WAIT = 40
_NO_LOCKS = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK)  # of a disk that has no file locks
REMOVED = "the run folder was removed while the run was writing to it"


class RunLock:
    """Creates a run folder if it is missing, and locks it until this process ends, however it ends.

    A process whose launcher was killed may still be saving, so a start waits for the lock a little.
    Raises ValueError that names the holder, or what is wrong with the folder. Another run of this
    process in the folder, as of a cell of a notebook that runs again, takes it over.
    """

    held: ClassVar[dict[Path, "RunLock"]] = {}  # by folder, in this process

    def __init__(self, output: Path):
        self.output, self.path = output, output / "lock"
        if before := RunLock.held.pop(output.resolve(), None):
            before.file.close()
        try:
            self.open_file()
            self.acquire()
        except OSError as error:
            if not comes_again(error) and error.errno not in _NO_LOCKS:
                raise
            raise ValueError(f"output_dir {output}: {error.strerror}; give another") from None
        RunLock.held[output.resolve()] = self

    def open_file(self) -> None:
        self.output.mkdir(parents=True, exist_ok=True)
        self.file = open(self.path, "a", encoding="utf-8")
        os.register_at_fork(after_in_child=self.file.close)  # workers must not hold the lock

    def acquire(self) -> None:
        waited, here = 0, socket.gethostname()
        while waited < LOCK_WAIT * (1 if self.holder()["host"] == here else 30):
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waited += 1
                time.sleep(0.1)
                continue
            if self.is_intact():
                self.file.truncate(0)
                self.file.write(json.dumps(describe_process()))
                self.file.flush()
                return
            self.file.close()  # somebody has removed the folder
            self.open_file()
        raise ValueError(
            "{0} is in use by process {pid} on {host}, since {since}; on that machine `tail -f "
            "{0}/metrics.jsonl` shows its progress, and `kill {pid}` saves and stops it; or give "
            "another folder".format(self.output, **self.holder())
        )

    def holder(self) -> dict:
        """The holder of the lock, as it describes itself in the file: pid, host, since."""
        here = {"pid": "?", "host": socket.gethostname(), "since": "?"}
        return here | {n: v for n, v in read_json_object(self.path).items() if n in here}

    def check_folder(self) -> None:
        """Raises FileNotFoundError if the run folder was removed or replaced."""
        if self.file.closed:
            raise ValueError(f"{self.output} was taken over by another run of this process")
        if not self.is_intact():
            raise FileNotFoundError(errno.ENOENT, REMOVED, str(self.output))

    def is_intact(self) -> bool:
        """Whether the run folder is still the one that was opened."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self.file.fileno()))
        except FileNotFoundError:
            return False


def describe_process() -> dict:
    """This process: its pid, its host, and the time as since."""
    since = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": since}


def write_status(output: Path, state: str | None = None, **more: Any) -> None:
    """Replaces status.json: the state of the run, this process, and more entries.

    The state, `saved` and `mirrored_step`, the steps of the newest checkpoint here and there, stay
    unless they are given; so does what `notice` has written, and a micro_batch_size that was found.
    """
    path = output / "status.json"
    before = read_json_object(path)
    kept = {"state": state or before.get("state"), "saved": before.get("saved", 0)}
    kept["noticed"] = before.get("noticed", {})
    for name in ("mirrored_step", "micro_batch_size"):
        if name in before:
            kept[name] = before[name]
    text = json.dumps({**kept, **describe_process(), **more}) + "\n"
    try:
        replace_text(path, text)
    except OSError:
        if not path.exists():
            raise
        with open(path, "r+", encoding="utf-8") as file:  # a full disk has room in place of the old
            file.write(text)
            file.truncate()


def notice(output: Path, kind: str, step: int, text: str) -> None:
    """Notes in status.json what a person would be told; of each kind the newest, with its step."""
    noticed = read_json_object(output / "status.json").get("noticed", {})
    write_status(output, noticed={**noticed, kind: {"step": step, "what": text}})


def write_final_status(output: Path, state: str, reason: str, exit_code: int) -> bool:
    """Writes how a run ended; returns False if another of its processes has done so.

    The status of another run in the same folder is kept.
    """
    status, me = read_json_object(output / "status.json"), [os.getpid(), socket.gethostname()]
    main = [status.get("pid"), status.get("host")]
    # If another process than the main one writes it, `main` names the main one.
    if main == me or (status.get("state") == "running" and os.environ.get("RANK", "0") != "0"):
        write_status(output, state, reason=reason, exit_code=exit_code, main=main)
    return main == me or status.get("main") != me


def read_metrics(output: Path) -> list[dict]:
    """The lines of metrics.jsonl, without those of steps that a resumed run has trained again.

    A line `started` names the step where a start has begun: earlier lines of later steps do not
    count. Of the losses and the scores of a step the last count. Lines that are incomplete, or have
    no step, are left out. Empty if the file is missing.
    """
    file = output / "metrics.jsonl"
    lines: dict[tuple, dict] = {}
    texts = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    for number, text in enumerate(texts.split("\n")):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):  # killed, or still writing
            continue
        if not isinstance(line, dict) or type(line.get("step")) is not int:
            continue
        if "started" in line:
            # What was saved in the background is noted some steps later.
            step_of = {key: each.get("committed_step", each["step"]) for key, each in lines.items()}
            lines = {key: lines[key] for key, step in step_of.items() if step <= line["step"]}
        kind = next((name for name in ("loss", "eval_loss") if name in line), number)
        lines.pop((line["step"], kind), None)
        lines[line["step"], kind] = line
    return [*lines.values()]
