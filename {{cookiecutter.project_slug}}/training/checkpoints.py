"""Checkpoints that are either whole or not there, and what else a run folder says of its run.

    runs/default/
      status.json                running, finished, stopped or failed
      checkpoints/
        step-00000100/           what accelerate saved, and manifest.json
        .step-00000200.partial/  being written, or left by a run that was killed; never read

A checkpoint is written into a hidden folder, flushed to the disk and renamed at last. Its manifest
has the step, the settings, the size and SHA-256 of every file, and a digest of its own; a folder
whose manifest does not fit is not a checkpoint. Paths and bytes only: no torch, no accelerate.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from training.run_folder import DISK_FULL, apply_umask, fsync, read_json_object, read_text, remove

MANIFEST = "manifest.json"
BLOCK = 64 << 20  # bytes that one thread of one process hashes at a time
FOLDER_NAME = re.compile(r"step-\d{8,}")


def partial_folder(folder: Path, step: int) -> Path:
    """Where the files of a step are written until they count: the same path on every process."""
    return folder / f".step-{step:08d}.partial"


def check_disk_space(folder: Path, size: float = 0, written: float = 0) -> None:
    """Raises ValueError unless the disk has room for a checkpoint, with a tenth to spare.

    Its size in bytes is that of the newest in the folder, or `size`; `written` have been already.
    """
    newest = [path for path in list_checkpoints(folder) if path.is_dir()][:1]
    size = 1.1 * max([size, *map(size_of, newest)]) - written
    place = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(place).free
    if free < size:
        raise ValueError(
            f"{folder}: a checkpoint needs {size / 1e6:,.1f} MB, and there are {free / 1e6:,.1f}; "
            "free some, or give another --output_dir; what was saved is kept"
        )


def make_partial_folder(partial: Path) -> None:
    """Makes that folder, empty; called by one process alone, before any writes into it."""
    for pattern in (".step-*.partial", ".step-*.trash"):  # of a run that was killed
        for left in partial.parent.glob(pattern):
            remove(left)
    check_disk_space(partial.parent)
    partial.mkdir(parents=True)


@contextlib.contextmanager
def report_full_disk(partial: Path) -> Iterator[None]:
    """Raises ValueError if its body, which writes into this folder, fails because the disk is full.

    The libraries that write weights say so in words of their own, or not at all.
    """
    try:
        yield
    except Exception as error:
        number = re.search(r"os error (\d+)", str(error))  # safetensors' words
        number = int(number[1]) if number else getattr(error, "errno", None)
        written = size_of(partial)
        check_disk_space(partial.parent, written + 1e6, written)
        disk = os.statvfs(partial.parent)
        if disk.f_files and not disk.f_ffree:  # torch only says that a file cannot be opened
            number = errno.ENOSPC
        if number in DISK_FULL:
            raise ValueError(
                f"{partial.parent}: {os.strerror(number)} after {written / 1e6:,.1f} MB of a "
                "checkpoint; free some space, or remove files; what was saved is kept"
            ) from error
        raise


def hash_files(partial: Path, share: int = 0, shares: int = 1) -> dict[tuple[str, int], str]:
    """Brings files to the disk; the SHA-256 of their blocks, by name and number, for the manifest.

    Each of several processes takes a share of the blocks, once all files have been written.
    """
    files = file_sizes(partial)
    for name in list(files)[share::shares]:
        apply_umask(partial / name)
        fsync(partial / name)
    return hash_blocks(partial, blocks_of(files)[share::shares])


def commit(partial: Path, manifest: dict, digests: dict[tuple[str, int], str]) -> Path:
    """Turns a folder that every process has finished writing into a checkpoint; returns its path.

    One process calls it, with the digests that `hash_files` gave for all files. The order matters:
    contents reach the disk first, then the manifest that names their digests, then the name under
    which the checkpoint is found.
    """
    files = file_sizes(partial)
    if odd := sorted({*blocks_of(files)} ^ {*digests}):
        name = partial / odd[0][0]
        raise ValueError(f"{name} is not seen by every process: output_dir must be shared")
    manifest = write_manifest(partial, {**manifest, "files": describe_files(files, digests)})
    for inner in [p for p in partial.rglob("*") if p.is_dir()] + [partial]:
        fsync(inner)

    final = partial.parent / partial.name.removeprefix(".").removesuffix(".partial")
    if final.exists():  # not valid, or the run would have gone on from it: set aside, not deleted
        aside = 1
        while (target := final.with_name(f"{final.name}.broken-{aside}")).exists():
            aside += 1
        final.rename(target)
    partial.rename(final)
    for folder in (final.parent, final.parent.parent):  # the first checkpoint's are new, too
        fsync(folder)
    remember_verified(final, manifest)
    return final


def write_manifest(folder: Path, manifest: dict) -> dict:
    """Puts a manifest in a folder, in place of any that is there; gives it, with its digest."""
    # As JSON gives it back: the digest is that of what will be read.
    manifest = json.loads(json.dumps(manifest))
    manifest["sha256"] = digest_of(manifest)
    # Beside the folder: a run that is killed here leaves no file in it that no manifest names.
    partial = folder.with_name(f".{folder.name.strip('.')}.{MANIFEST}.partial")
    partial.write_text(json.dumps(manifest, indent=2), encoding="utf-8")
    fsync(partial)
    partial.replace(folder / MANIFEST)
    return manifest


# ---- Manifests -----------------------------------------------------------------------------------


def size_of(path: Path) -> int:
    """Bytes of a checkpoint's files, as far as they can be seen."""
    try:
        return sum(file_sizes(path).values())
    except OSError:
        return 0


def file_sizes(folder: Path, left_out: str = MANIFEST) -> dict[str, int]:
    """Bytes of each file below a folder, by its path in it, in order of the paths.

    The manifest is left out, and so is what file managers and network disks hide there. A pipe, a
    device or a link to nothing has -1 bytes. Raises OSError where a folder cannot be read.
    """
    found = {}
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name == left_out or entry.name.startswith("."):
            continue
        if entry.is_dir():
            inner = file_sizes(folder / entry.name, left_out="")
            found |= {f"{entry.name}/{name}": size for name, size in inner.items()}
        else:
            found[entry.name] = entry.stat().st_size if entry.is_file() else -1
    return found


def blocks_of(files: dict[str, int]) -> list[tuple[str, int]]:
    """The blocks of files of these sizes, by name and number; an empty file has one."""
    return [(name, i) for name, size in files.items() for i in range(max(-(-size // BLOCK), 1))]


def hash_blocks(folder: Path, blocks: list[tuple[str, int]]) -> dict[tuple[str, int], str]:
    """SHA-256 of these blocks of files in a folder, as hex digits."""

    def hash_block(block: tuple[str, int]) -> str:
        name, number = block
        digest, left = hashlib.sha256(), BLOCK
        with open(folder / name, "rb") as file:
            file.seek(number * BLOCK)
            while left and (part := file.read(min(left, 1 << 20))):
                digest.update(part)
                left -= len(part)
        return digest.hexdigest()

    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    threads = max(1, min(8, (os.cpu_count() or 1) // local, len(blocks)))
    with ThreadPoolExecutor(threads) as pool:  # hashing lets other threads run
        return dict(zip(blocks, pool.map(hash_block, blocks), strict=True))


def describe_files(files: dict[str, int], digests: dict[tuple[str, int], str]) -> dict[str, dict]:
    """Size and SHA-256 of each file; of a file of several blocks, the SHA-256 of their digests."""
    blocks: dict[str, list[str]] = {}
    for name, number in blocks_of(files):
        blocks.setdefault(name, []).append(digests[name, number])
    return {
        name: {
            "bytes": files[name],
            "sha256": own[0]
            if len(own) == 1
            else hashlib.sha256("".join(own).encode()).hexdigest(),
        }
        for name, own in blocks.items()
    }


def digest_of(manifest: dict) -> str:
    """SHA-256 of a manifest's content, its own digest apart."""
    content = {name: value for name, value in manifest.items() if name != "sha256"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(path: Path) -> dict:
    """The manifest of a checkpoint; ValueError with the reason if it is not as it was written."""
    try:
        manifest = json.loads(read_text(path / MANIFEST))
        step, sealed = manifest["step"], manifest["sha256"] == digest_of(manifest)
        files = [
            (name, saved["bytes"], saved["sha256"]) for name, saved in manifest["files"].items()
        ]
        flatten(manifest.get("config", {}))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{path} has no {MANIFEST}") from None
    except Exception as error:  # whatever it holds, an older checkpoint may be valid
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(f"{path / MANIFEST} cannot be read ({reason})") from None
    if not sealed:
        raise ValueError(f"{path / MANIFEST} is not the file that was saved")
    if type(step) is not int or step < 0 or not files:
        raise ValueError(f"{path / MANIFEST} names no step, or no files")
    if FOLDER_NAME.fullmatch(path.name) and step_of(path) != step:
        raise ValueError(f"{path} is called by another step than its manifest names, {step}")
    return manifest


def verify(path: Path, hashed: bool = True) -> dict:
    """The manifest of a checkpoint whose every file is as it was saved, and no file more.

    Unless `hashed`, files of the right sizes are taken for right.

    Raises ValueError, with the reason, for anything else: nothing in a folder is deserialised
    before its bytes are known to be those that were written.
    """
    manifest = read_manifest(path)
    try:
        sizes, saved = file_sizes(path), manifest["files"]
        for name in sorted({*sizes} ^ {*saved}):
            problem = "is missing" if name in saved else f"is not named by its {MANIFEST}"
            raise ValueError(f"{path / name} {problem}")
        for name, size in sizes.items():
            if size != saved[name]["bytes"]:
                raise ValueError(f"{path / name} is not the file that was saved")
        if hashed and not is_verified(path, manifest):
            found = describe_files(sizes, hash_blocks(path, blocks_of(sizes)))
            for name in sizes:
                if found[name] != saved[name]:
                    raise ValueError(f"{path / name} is not the file that was saved")
            remember_verified(path, manifest)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}: {error.filename})") from None
    return manifest


def is_valid(path: Path, hashed: bool = True) -> bool:
    """Whether a checkpoint is as it was saved, as far as `verify` looks."""
    try:
        return bool(verify(path, hashed))
    except ValueError:
        return False


# Checkpoints whose bytes have been hashed, by path, with what would change if one byte did: none is
# read twice for that, not even by the run that launch.py starts after its check.
VERIFIED: dict[str, list] = {}
HANDED_OVER = "VERIFIED_FILE"  # environment: the file in which the check leaves VERIFIED


def signature(path: Path, manifest: dict) -> list:
    """The manifest's digest, and of every file its inode, size and times of change."""
    facts = [(name, os.stat(path / name)) for name in manifest["files"]]
    return [
        manifest["sha256"],
        *([name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns] for name, s in facts),
    ]


def is_verified(path: Path, manifest: dict) -> bool:
    """Whether its files have been hashed, by this process or by the check before it."""
    if not VERIFIED and HANDED_OVER in os.environ:
        VERIFIED.update(read_json_object(Path(os.environ[HANDED_OVER])))
    return VERIFIED.get(str(path.resolve())) == signature(path, manifest)


def remember_verified(path: Path, manifest: dict) -> None:
    """Notes that its files are those of the manifest."""
    VERIFIED[str(path.resolve())] = signature(path, manifest)


def hand_over_verified() -> None:
    """Leaves what has been hashed for the run that launch.py starts."""
    if HANDED_OVER in os.environ:
        Path(os.environ[HANDED_OVER]).write_text(json.dumps(VERIFIED), encoding="utf-8")


# ---- Checkpoints of a run ------------------------------------------------------------------------


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first, whole or not; raises ValueError if it is none."""
    try:
        found = [folder / name for name in os.listdir(folder) if FOLDER_NAME.fullmatch(name)]
    except FileNotFoundError:
        return []
    except OSError as error:  # it may hold checkpoints: no reason to start from the beginning
        raise ValueError(f"{folder} cannot be read: {error.strerror}") from None
    return sorted(found, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint."""
    return int(path.name.removeprefix("step-"))


def find_checkpoint(
    folder: Path, resume: str, named_first: bool = False
) -> tuple[Path | None, dict, list[str]]:
    """The checkpoint to go on from, its manifest, and why newer ones were passed over.

    Ways to start, tried in this order: the folder's newest valid checkpoint, the checkpoint that
    `resume` names, the beginning (None and an empty manifest); what is named comes first where no
    training follows. Raises ValueError where going on is not safe: nothing that was saved is ever
    silently left behind.
    """
    passed_over, named = [], resume not in ("auto", "never")
    for path in [] if named and named_first else list_checkpoints(folder):
        if resume == "never":
            raise ValueError(
                f"{folder} holds checkpoints and resume is never; "
                "give --resume auto to go on from them, or another --output_dir to start afresh"
            )
        try:
            manifest = verify(path)
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
        return Path(resume), verify(Path(resume)), []
    except ValueError as reason:
        raise ValueError(
            f"resume: {reason}; give auto, never or the folder of a checkpoint, "
            "such as runs/default/checkpoints/step-00000200"
        ) from None


def prune(newest: Path, keep: int) -> None:
    """Deletes checkpoints but the `keep` newest and the one with the best eval_loss; 0 keeps all.

    Called with the checkpoint that was just committed, which stays in any case. One that is broken
    takes the place of none, and is left for people to look at.
    """
    if not keep:
        return
    older = [p for p in list_checkpoints(newest.parent) if step_of(p) <= step_of(newest)]
    # The bytes of the best are hashed, once; of the others that would take too long.
    valid = [p for p in older if is_valid(p, hashed=False)]
    kept, broken = best_of(valid, read_manifest(newest))
    for path in [p for p in valid if p not in broken][keep:]:
        if path not in (kept, newest):
            remove(path)


def best_of(paths: list[Path], facts: dict) -> tuple[Path | None, list[Path]]:
    """The checkpoint with the smallest eval_loss, and those that had one but are broken.

    Only losses of the validation data that `facts` (of a manifest) name are compared. Of equal ones
    it is the oldest. None: no checkpoint has such a loss.
    """
    ranked = sorted((score, p) for p in paths if (score := eval_loss(p, facts)) is not None)
    broken = []
    for _, path in ranked:
        if is_valid(path):
            return path, broken
        broken.append(path)
    return None, broken


def find_best(folder: Path, facts: dict) -> tuple[Path | None, float]:
    """The checkpoint in a folder with the smallest eval_loss, and that loss; None and infinity.

    For `facts` see `best_of`.
    """
    path, _ = best_of([p for p in list_checkpoints(folder) if is_valid(p, hashed=False)], facts)
    return path, math.inf if path is None else eval_loss(path, facts)


def eval_loss(path: Path, facts: dict) -> float | None:
    """The loss in a checkpoint's manifest, if its step was evaluated, on the data of `facts`."""
    manifest = read_manifest(path)
    loss, data = manifest.get("eval_loss"), manifest.get("data", {}).get("validation")
    finite = isinstance(loss, float | int) and math.isfinite(loss)
    return loss if finite and data == facts.get("data", {}).get("validation") else None


def add_to_manifest(path: Path, facts: dict) -> None:
    """Adds facts to the manifest of a checkpoint, whose files stay as they are."""
    manifest = read_manifest(path)
    del manifest["sha256"]
    write_manifest(path, {**manifest, **facts})
    fsync(path)


def flatten(config: dict) -> dict:
    """A config without nesting: the task's fields are called task.FIELD, as their flags are."""
    own = {name: value for name, value in config.items() if name != "task"}
    return own | {f"task.{name}": value for name, value in config.get("task", {}).items()}


def result_settings(facts: dict, changes: dict) -> dict:
    """Of the facts in a manifest those that change the result: settings, and `data NAME`.

    `changes` says for a field what a change of it does: nothing, rounding, shape (of the weights)
    or result, which is that of other fields too.
    """
    config = flatten(facts.get("config", {}))
    found = {n: v for n, v in config.items() if changes.get(n) not in ("nothing", "rounding")}
    found |= {f"data {name}": fact for name, fact in facts.get("data", {}).items()}
    return json.loads(json.dumps(found))  # as a manifest gives it back


def check_settings(
    path: Path, manifest: dict, facts: dict, changes: dict, accept: bool
) -> list[str]:
    """What differs from the config and the data of a checkpoint, as `name: before -> now`.

    Raises ValueError where the result would be another and that was not accepted, and where the
    weights would not fit. For `changes` see `result_settings`.
    """
    if manifest.get("identity", "") != facts.get("identity", ""):
        raise ValueError(
            f"{path} was made with another vocabulary, other classes or another scale of numbers, "
            "which its weights stand for: give the data that it was made with, or another "
            "--output_dir"
        )
    before, after = result_settings(manifest, changes), result_settings(facts, changes)
    pairs = {name: (before.get(name), after.get(name)) for name in {**before, **after}}
    changed = {n: f"{n}: {old} -> {new}" for n, (old, new) in pairs.items() if old != new}
    both = before.keys() & after.keys()  # a field may be new in the code
    shapes = [name for name in changed if name in both and changes.get(name) == "shape"]
    if shapes:
        raise ValueError(
            f"{path} was made with other settings ({'; '.join(changed.values())}), and its weights "
            f"do not fit another {shapes[0]}: give those, or another --output_dir"
        )
    if changed and not accept:
        raise ValueError(
            f"{path} was made with other settings ({'; '.join(changed.values())}): give those, or "
            "another --output_dir, or --accept_changes to go on with the new ones"
        )
    return list(changed.values())
