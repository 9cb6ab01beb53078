"""Checkpoints that are either whole or not there, and what else a run folder says of its run.

    runs/default/
      status.json                running, finished, stopped or failed
      checkpoints/
        step-00000100/           what accelerate saved, and manifest.json
        .step-00000200.partial/  being written, or left by a run that was killed; never read

A checkpoint is written into a hidden folder, flushed to the disk and renamed at last. Its manifest
lists the size and SHA-256 of every file; a folder whose manifest does not fit is not a checkpoint.
Paths and bytes only: no torch, no accelerate.
"""

import errno
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import socket
import time
from pathlib import Path

MANIFEST = "manifest.json"
# Settings that a continued run may change: the result does not depend on them.
HARMLESS = """output_dir resume accept_changes check config_file eval_only timeout micro_batch_size
    num_workers max_skipped_steps eval_every save_every keep_checkpoints log_every tracker project
    upload_code compile gradient_checkpointing task.cache_dir task.sample_prompt task.merge_lora
    task.attn_implementation task.channels_last task.trust_remote_code""".split()
PATIENCE = 40  # tenths of a second to wait for the lock of a run folder
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def partial_path(folder: Path, step: int) -> Path:
    """Where the files of a step are written until they count: the same path on every process."""
    return folder / f".step-{step:08d}.partial"


def check_room(folder: Path, size: float = 0, written: float = 0) -> None:
    """Raises ValueError unless the disk has room for a checkpoint, with a tenth to spare.

    Its size in bytes is that of the newest in the folder, or `size`; `written` have been already.
    """
    size = 1.1 * max([size, *map(size_of, committed(folder)[:1])]) - written
    place = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(place).free
    if free < size:
        raise ValueError(
            f"{folder}: a checkpoint needs {size / 1e6:,.1f} MB, and there are {free / 1e6:,.1f}; "
            "free some, or give another --output_dir; what was saved is kept"
        )


def begin(partial: Path) -> None:
    """Makes that folder, empty; called by one process alone, before any writes into it."""
    for left in partial.parent.glob(".step-*.partial"):  # by a run that was killed
        shutil.rmtree(left, ignore_errors=True)
    check_room(partial.parent)
    partial.mkdir(parents=True)


def write(partial: Path, function, *arguments) -> None:
    """Calls a function that writes into the folder; raises ValueError where the disk was full.

    Writers of weights say that in ways of their own, if at all.
    """
    try:
        function(*arguments)
    except Exception as error:
        number = re.search(r"os error (\d+)", str(error))  # as safetensors says it
        number = int(number[1]) if number else getattr(error, "errno", None)
        written = sum(p.stat().st_size for p in partial.rglob("*") if p.is_file())
        check_room(partial.parent, written + 1e6, written)
        if number in DISK_FULL:
            raise ValueError(
                f"{partial.parent}: {os.strerror(number)} after {written / 1e6:,.1f} MB of a "
                "checkpoint; free some space; what was saved is kept"
            ) from error
        raise


def vouch(partial: Path, share: int = 0, shares: int = 1) -> dict:
    """Brings files to the disk; their sizes and SHA-256 by their names, for the manifest.

    Each of several processes takes a share of the files, once all have been written.
    """
    files = {}
    for path in sorted(p for p in partial.rglob("*") if p.is_file())[share::shares]:
        flush(path)
        files[path.relative_to(partial).as_posix()] = describe(path)
    return files


def commit(partial: Path, manifest: dict, files: dict) -> Path:
    """Turns a folder that every process has finished writing into a checkpoint; returns its path.

    Called by one process alone, with what `vouch` has said of all its files. The order matters:
    contents reach the disk first, then the manifest that vouches for them, then the name under
    which the checkpoint is found.
    """
    found = {p.relative_to(partial).as_posix() for p in partial.rglob("*") if p.is_file()}
    if found != set(files):
        odd = sorted(found ^ set(files))[0]
        raise ValueError(f"{partial / odd} is not seen by every process: output_dir must be shared")
    with open(partial / MANIFEST, "w", encoding="utf-8") as file:
        json.dump({**manifest, "files": files}, file, indent=2)
    flush(partial / MANIFEST)
    for inner in [p for p in partial.rglob("*") if p.is_dir()] + [partial]:
        flush(inner)

    final = partial.parent / partial.name.removeprefix(".").removesuffix(".partial")
    if final.exists():  # not valid, or the run would have gone on from it: set aside, not deleted
        aside = 1
        while (target := final.with_name(f"{final.name}.broken-{aside}")).exists():
            aside += 1
        final.rename(target)
    partial.rename(final)
    flush(partial.parent)
    return final


def flush(path: Path) -> None:
    """Waits until a file's bytes, or a folder's entries, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def size_of(path: Path) -> int:
    """Bytes of a checkpoint's files."""
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


def describe(path: Path) -> dict:
    """A file's size in bytes and its SHA-256."""
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}


def read(path: Path) -> dict:
    """The manifest of a checkpoint whose every file is as it was saved.

    Raises ValueError, with the reason, for anything else: nothing in a folder is deserialised
    before its bytes are known to be those that were written.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files, step = manifest["files"].items(), manifest["step"]
        flat(manifest.get("config", {}))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{path} has no {MANIFEST}") from None
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise ValueError(f"{path / MANIFEST} cannot be read ({error})") from None
    if not isinstance(step, int):
        raise ValueError(f"{path / MANIFEST} names no step")
    for name, saved in files:
        if not (path / name).is_file():
            raise ValueError(f"{path / name} is missing")
        if describe(path / name) != saved:
            raise ValueError(f"{path / name} is not the file that was saved")
    return manifest


def committed(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first, whole or not."""
    found = [p for p in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", p.name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint."""
    return int(path.name.removeprefix("step-"))


def find(
    folder: Path, resume: str, named_first: bool = False
) -> tuple[Path | None, dict, list[str]]:
    """The checkpoint to go on from, its manifest, and why newer ones were passed over.

    Ways to start, tried in this order: the folder's newest valid checkpoint, the checkpoint that
    `resume` names, the beginning (None and an empty manifest); what is named comes first where no
    training follows. Raises ValueError where going on is not safe: nothing that was saved is ever
    silently left behind.
    """
    passed_over, named = [], resume not in ("auto", "never")
    for path in [] if named and named_first else committed(folder):
        if resume == "never":
            raise ValueError(
                f"{folder} holds checkpoints and resume is never; "
                "give --resume auto to go on from them, or another --output_dir to start afresh"
            )
        try:
            manifest = read(path)
        except ValueError as reason:
            passed_over.append(str(reason))
            continue
        if named and Path(resume).resolve() != path.resolve():
            passed_over.append(f"{resume}, as {folder} holds checkpoints of this run")
        return path, manifest, passed_over
    if passed_over:
        raise ValueError(
            f"no checkpoint in {folder} is valid ({passed_over[0]}); "
            "to start from the beginning give another --output_dir"
        )
    if not named:
        return None, {}, []
    try:
        return Path(resume), read(Path(resume)), []
    except ValueError as reason:
        raise ValueError(
            f"resume: {reason}; give auto, never or the folder of a checkpoint, "
            "such as runs/default/checkpoints/step-00000200"
        ) from None


def prune(newest: Path, keep: int) -> None:
    """Deletes all but the `keep` newest checkpoints (0: none) and the one with the best eval_loss.

    Called with the checkpoint that was just committed, which stays in any case. What has a higher
    step was passed over as broken when the run began, and is left for people to look at.
    """
    older = [p for p in committed(newest.parent) if step_of(p) <= step_of(newest)]
    scores = {p: score for p in older if (score := eval_loss(p)) is not None}
    best = min(scores, key=scores.get, default=newest)
    for path in older[keep:] if keep else []:
        if path == best:
            continue
        # Renamed first: a run that is killed here leaves no half-deleted folder under a real name.
        doomed = path.with_name(f".{path.name}.partial")
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)  # a reader on a network disk may keep a file


def eval_loss(path: Path) -> float | None:
    """The evaluation loss that a checkpoint's manifest names, if the step was evaluated."""
    try:
        loss = json.loads((path / MANIFEST).read_text(encoding="utf-8")).get("eval_loss")
        return float(loss) if loss is not None and math.isfinite(loss) else None
    except (OSError, ValueError, AttributeError, TypeError):
        return None


def flat(config: dict) -> dict:
    """A config without nesting: the task's fields are called task.FIELD, as their flags are."""
    own = {name: value for name, value in config.items() if name != "task"}
    return own | {f"task.{name}": value for name, value in config.get("task", {}).items()}


def fresh_folder(folder: Path) -> Path:
    """An empty folder beside this one, to be filled and then to take its place."""
    fresh = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    return fresh


def swap(fresh: Path, folder: Path) -> None:
    """Puts the fresh folder in the place of the other, of which nothing stays."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def compare(path: Path, manifest: dict, facts: dict) -> list[str]:
    """What differs from the config and the data of a checkpoint, as `name: before -> now`.

    Raises ValueError where such a change would change the result, and was not accepted.
    """
    before, after = [
        flat(each.get("config", {}))
        | {f"data {n}": fact for n, fact in each.get("data", {}).items()}
        for each in (manifest, facts)
    ]
    if manifest.get("identity", "") != facts.get("identity", ""):
        raise ValueError(
            f"{path} was made with another vocabulary or other classes, which its weights stand "
            "for: give the data that it was made with, or another --output_dir"
        )
    names = [name for name in {**before, **after} if name not in HARMLESS]
    pairs = [(name, before.get(name), after.get(name)) for name in names]
    changed = [f"{name}: {old} -> {new}" for name, old, new in pairs if old != new]
    if changed and not facts["config"]["accept_changes"]:
        raise ValueError(
            f"{path} was made with other settings ({'; '.join(changed)}): give those, or another "
            "--output_dir, or --accept_changes true to go on with the new ones"
        )
    return changed


def lock(output: Path, hold: bool = True):
    """Makes the run folder and, to `hold` it, keeps other runs out until the result is closed.

    The lock goes with its process, however that ends; one whose launcher was killed may still be
    saving, so this waits a little. Raises ValueError that says who holds it.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        file = open(output / "lock", "a", encoding="utf-8")
        os.register_at_fork(after_in_child=file.close)  # or worker processes would hold it too
    except OSError as error:
        raise ValueError(f"output_dir {output}: {error.strerror}; give another") from None
    if not hold:
        return file
    for _ in range(PATIENCE):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            time.sleep(0.1)
        except OSError as error:  # as some network disks say
            raise ValueError(f"{output}: no locks on this disk: {error.strerror}") from None
    holder = {"pid": "?", "host": "?", "since": "?", **read_status(output)}
    who = "process {pid} on {host}, since {since}".format_map(holder)
    raise ValueError(f"{output} is in use by {who}; wait for its end, or give another --output_dir")


def write_status(output: Path, state: str, **more) -> None:
    """Replaces status.json of a run folder: what its run is doing, or how it ended."""
    status = {"state": state, "pid": os.getpid(), "host": socket.gethostname()}
    status |= {"since": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **more}
    partial = output / ".status.json.partial"
    partial.write_text(json.dumps(status) + "\n", encoding="utf-8")
    partial.replace(output / "status.json")


def end_status(output: Path, state: str, reason: str, exit_code: int) -> None:
    """Writes how a run ended, unless the status is that of another run in the same folder."""
    if read_status(output).get("pid") == os.getpid():
        write_status(output, state, reason=reason, exit_code=exit_code)


def read_status(output: Path) -> dict:
    """What status.json of a run folder says; empty where there is none, or none that is whole."""
    try:
        return json.loads((output / "status.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
