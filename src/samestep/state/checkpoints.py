"""Checkpoints: written completely or not at all, verified before they are loaded, pruned.

    runs/default/checkpoints/
      step-00000100/           a file of tensors from each process, and manifest.json
      .step-00000200.partial/  being written, or left behind by a killed run; never read

A checkpoint is written into a hidden folder, flushed to the disk, and renamed last. Its manifest
holds the step, the settings, the size and SHA-256 of every file, and its own digest. A folder that
does not match its manifest is not a checkpoint. This module needs neither torch nor accelerate.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from samestep.base import console
from samestep.base.errors import catch
from samestep.base.files import (
    DISK_FULL,
    fsync,
    read_json_object,
    read_text,
    remove,
    replace_folder,
    replace_text,
)
from samestep.base.workers import cores_per_process

MANIFEST = "manifest.json"
BLOCK = 64 << 20  # bytes that a thread hashes at a time
_FOLDER_NAME = re.compile(r"step-\d{8,}")


def checkpoint_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


# ---- Writing -------------------------------------------------------------------------------------


def check_disk_space(folder: Path, size: float = 0) -> None:
    """Raise ValueError unless the disk has room for another checkpoint, plus 10%.

    The expected size is `size` bytes, or that of the newest checkpoint if it is larger.
    """
    newest = [path for path in list_checkpoints(folder) if path.is_dir()][:1]
    needed = 1.1 * max([size, *map(total_size, newest)])
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise ValueError(
            f"{folder}: a checkpoint needs {needed / 1e6:,.1f} MB, but only {free / 1e6:,.1f} MB "
            "are free; free some space, or give another folder; saved checkpoints are kept"
        )


@contextlib.contextmanager
def writing(folder: Path, step: int, ranks: Any) -> Iterator[Path]:
    """Give the partial folder of a step to all processes, which write into it. The body ends with
    `commit`; the first of a node removes what is no checkpoint then, which frees its space."""
    partial, is_first = folder / f".step-{step:08d}.partial", ranks.place_in_node[0] == 0
    try:
        with ranks.fail_together():
            if is_first:
                make_partial_folder(partial)
        yield partial
    finally:
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)


def make_partial_folder(partial: Path) -> None:
    """Create the partial folder. The main process calls it before any process writes into it."""
    for pattern in (".step-*.partial", ".step-*.old", ".step-*.trash"):
        for leftover in partial.parent.glob(pattern):  # of a killed run
            remove(leftover)
    check_disk_space(partial.parent)
    partial.mkdir(parents=True)


@contextlib.contextmanager
def report_full_disk(partial: Path, what: str = "a checkpoint") -> Iterator[None]:
    """Raise ValueError if the body, which writes into this folder, fails because the disk is full.

    Each library that writes weights reports a full disk in its own words, or not at all.
    """
    try:
        yield
    except Exception as error:
        match = re.search(r"os error (\d+)", str(error))  # safetensors
        number = int(match[1]) if match else getattr(error, "errno", None)
        written = total_size(partial)
        if shutil.disk_usage(partial.parent).free < 1e6 + written / 10:
            number = errno.ENOSPC
        if number not in DISK_FULL:
            raise
        raise ValueError(
            f"{partial.parent}: {os.strerror(number)} after {written / 1e6:,.1f} MB of {what}; "
            "free some space, or remove files; saved checkpoints are kept"
        ) from error


@contextlib.contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Replace a folder by the one that the body fills; if the body fails, the old one stays."""
    fresh = folder.with_name(f".{folder.name}.partial")
    remove(fresh)
    fresh.mkdir()
    try:
        with report_full_disk(fresh, f"the {folder.name}"):
            yield fresh
            replace_folder(fresh, folder)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def hash_files(partial: Path, names: list[str] | None = None) -> dict[str, dict]:
    """Flush files to the disk, without names all; return their sizes and SHA-256, as
    `describe_files` does."""
    names = list_files(partial) if names is None else names
    for name in names:
        fsync(partial / name)
    return describe_files(partial, names)


def list_files(folder: Path) -> list[str]:
    """List the files of a checkpoint, in the same order on each process that sees them."""
    return [*_file_sizes(folder)]


def commit(
    partial: Path, manifest: dict, files: dict[str, dict], here: dict[str, dict] | None = None
) -> Path:
    """Turn a completely written folder into a checkpoint; return its path.

    The main process calls it with what `hash_files` of all processes have returned. `here`: of
    those that see this folder, where nodes share none: the first of each calls it. The order
    matters: the contents reach the disk first, then the manifest that holds their digests, then the
    final name. What has that name is replaced: it is broken, or the run would have resumed from it.
    """
    if unseen := sorted({*_file_sizes(partial)} ^ {*(files if here is None else here)}):
        raise ValueError(
            f"{partial / unseen[0]} is not visible to every process; the run folder must be "
            "shared, or have a mirror"
        )
    _write_manifest(partial, {**manifest, "files": dict(sorted(files.items()))})
    final = checkpoint_folder(partial.parent, manifest["step"])
    if catch(verify, final)[0]:
        raise ValueError(f"{final} is a valid checkpoint of another start; give another folder")
    replace_folder(partial, final)
    fsync(final.parent.parent)  # where the first checkpoint has created the folder of all
    return final


def _write_manifest(folder: Path, manifest: dict) -> None:
    """Write or replace the manifest of a folder, with its digest."""
    manifest = json.loads(json.dumps(manifest))  # as it will be read: tuples become lists
    manifest["sha256"] = digest_of(manifest)
    # The temporary file lies beside the folder: a file that no manifest names would break it.
    partial = folder.with_name(f".{folder.name.strip('.')}.{MANIFEST}.partial")
    replace_text(folder / MANIFEST, json.dumps(manifest, indent=2), partial)


def add_to_manifest(folder: Path, step: int, entries: dict) -> None:
    """Add entries to the manifest of a checkpoint; raise ValueError if it is not there."""
    path = checkpoint_folder(folder, step)
    _write_manifest(path, read_manifest(path) | entries)


# ---- Verifying -----------------------------------------------------------------------------------


def total_size(path: Path) -> int:
    """Return the bytes of a checkpoint's files; 0 if they cannot be listed."""
    try:
        return sum(_file_sizes(path).values())
    except OSError:
        return 0


def _file_sizes(folder: Path, left_out: str = MANIFEST) -> dict[str, int]:
    """Return the bytes of each file below a folder, by relative path, sorted.

    The manifest is left out, and so are hidden files: file managers and network disks create them.
    Pipes, devices and broken links have -1 bytes. Raises OSError if a folder cannot be read.
    """
    sizes = {}
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name == left_out or entry.name.startswith("."):
            continue
        if entry.is_dir():
            inner = _file_sizes(folder / entry.name, left_out="")
            sizes |= {f"{entry.name}/{name}": size for name, size in inner.items()}
        else:
            sizes[entry.name] = entry.stat().st_size if entry.is_file() else -1
    return sizes


def hashing_threads() -> ThreadPoolExecutor:
    """Make threads for this process's share of the cores: hashlib releases the GIL."""
    return ThreadPoolExecutor(min(8, cores_per_process()))


def read_bytes(path: Path, start: int, size: int) -> Iterator[bytes]:
    """Yield the bytes of a file from `start` on, at most `size`, a MB at a time."""
    with open(path, "rb") as file:
        file.seek(start)
        while size and (part := file.read(min(size, 1 << 20))):
            size -= len(part)
            yield part


def _hash_block(path: Path, start: int) -> str:
    digest = hashlib.sha256()
    for part in read_bytes(path, start, BLOCK):
        digest.update(part)
    return digest.hexdigest()


def describe_files(folder: Path, names: list[str]) -> dict[str, dict]:
    """Return `bytes` and `sha256` of files; for several blocks that of their hex digests."""
    described = {}
    with hashing_threads() as pool:
        for name in names:
            path = folder / name
            size = path.stat().st_size
            blocks = [pool.submit(_hash_block, path, i) for i in range(0, max(size, 1), BLOCK)]
            first, *rest = (block.result() for block in blocks)
            joined = hashlib.sha256("".join([first, *rest]).encode()).hexdigest()
            described[name] = {"bytes": size, "sha256": joined if rest else first}
    return described


def digest_of(manifest: dict) -> str:
    """Return the SHA-256 of a manifest, without its own entry "sha256"."""
    content = {name: value for name, value in manifest.items() if name != "sha256"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(path: Path) -> dict:
    """Read a checkpoint's manifest; raise ValueError if it is missing, damaged or incomplete."""
    try:
        manifest = json.loads(read_text(path / MANIFEST))
        step, intact = manifest["step"], manifest["sha256"] == digest_of(manifest)
        files = [(saved["bytes"], saved["sha256"]) for saved in manifest["files"].values()]
        flatten(manifest.get("config", {}))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{path} has no {MANIFEST}") from None
    except Exception as error:  # any content is possible, and an older checkpoint may be valid
        reason = console.one_line(f"{type(error).__name__}: {error}", 200)
        raise ValueError(f"{path / MANIFEST} cannot be read ({reason})") from None
    if not intact or type(step) is not int or step < 0 or not files:
        raise ValueError(f"{path / MANIFEST} is not the file that was saved")
    if _FOLDER_NAME.fullmatch(path.name) and step_of(path) != step:
        raise ValueError(f"{path} was renamed: its manifest names step {step}")
    return manifest


def changed_file(path: Path, saved: dict[str, dict], names: list[str]) -> str:
    """Return why the first of these files is not the saved one; "" without any."""
    try:
        current = describe_files(path, names)
    except OSError as error:
        return f"{path} cannot be read ({error.strerror}: {error.filename})"
    changed = [name for name in names if current[name] != saved[name]]
    return f"{path / changed[0]} is not the file that was saved" if changed else ""


def verify_together(path: Path, saved: dict[str, dict], ranks: Any) -> str:
    """Return on all processes why a file is not the saved one, "" without any. Each process that
    sees the main one's folder hashes its share of the files; all call it."""
    number, count = ranks.place_in_node
    is_seen = not ranks.nodes[ranks.layout.rank]
    reason = changed_file(path, saved, sorted(saved)[number::count] if is_seen else [])
    if not any(ranks.sum_over_ranks(bool(reason))):
        return ""
    return min(filter(None, ranks.gather(reason)))


def verify(path: Path, hashed: bool = True, whole: bool = True) -> dict:
    """Return the manifest of a checkpoint if its files are the saved ones, and no others.

    Raises ValueError with the reason otherwise. Call it before anything in the folder is
    deserialised. Without `hashed` only the sizes of files are compared; without `whole` other nodes
    may have some of them.
    """
    manifest = read_manifest(path)
    saved = manifest["files"]
    try:
        sizes = _file_sizes(path)
        for name in sorted({*sizes} ^ {*saved} if whole else {*sizes} - {*saved}):
            problem = "is missing" if name in saved else f"is not named by its {MANIFEST}"
            raise ValueError(f"{path / name} {problem}")
        changed = [name for name in sizes if sizes[name] != saved[name]["bytes"]]
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}: {error.filename})") from None
    if changed:
        raise ValueError(f"{path / changed[0]} is not the file that was saved")
    if hashed and (reason := changed_file(path, saved, [*sizes])):
        raise ValueError(reason)
    return manifest


# ---- Checkpoints of a run ------------------------------------------------------------------------


def list_checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints in a folder, valid or not, newest first.

    Raises ValueError if it cannot be read: checkpoints may be there, so no run must begin anew.
    """
    try:
        paths = [folder / name for name in os.listdir(folder) if _FOLDER_NAME.fullmatch(name)]
    except FileNotFoundError as error:
        if folder.is_symlink():  # the disk is not mounted
            raise ValueError(f"{folder} is a broken link; repair it") from error
        return []
    except OSError as error:
        raise ValueError(f"{folder} cannot be read: {error.strerror}") from None
    return sorted(paths, key=step_of, reverse=True)


def find_checkpoint(
    folder: Path, resume: str, named_first: bool = False, hashed: bool = True,
    broken: dict[Path, str] | None = None,
) -> tuple[Path | None, dict, list[str]]:  # fmt: skip
    """Find the checkpoint to resume from, its manifest, and why others were passed over.

    It tries the newest valid checkpoint in the folder, then the path that `resume` names, then the
    beginning (None, with an empty manifest). With `named_first`, for evaluation only, the named
    path comes first. Without `hashed` only the sizes of files are compared. broken: why others are
    known to be no checkpoints. Raises ValueError if checkpoints exist but none can be used: a run
    must not silently start from the beginning.
    """

    def check(path: Path) -> dict:
        if broken and path in broken:
            raise ValueError(broken[path])
        return verify(path, hashed)

    passed_over, named = [], resume not in ("auto", "never")
    for path in [] if named and named_first else list_checkpoints(folder):
        if resume == "never":
            raise ValueError(
                f"{folder} holds checkpoints and resume is never; give --resume auto to resume "
                "from them, or another folder to start afresh"
            )
        try:
            manifest = check(path)
        except ValueError as reason:
            passed_over.append(str(reason))
            continue
        if named and Path(resume).resolve() != path.resolve():
            passed_over.append(f"{resume}, since {folder} holds checkpoints of this run")
        return path, manifest, passed_over
    if passed_over:
        raise ValueError(
            f"no checkpoint in {folder} is valid ({passed_over[0]}); "
            "to start from the beginning give another folder"
        )
    if not named:
        return None, {}, []
    try:
        return Path(resume), check(Path(resume)), []
    except ValueError as reason:
        raise ValueError(
            f"resume: {reason}; give auto, never or the folder of a checkpoint, "
            "such as runs/default/checkpoints/step-00000200"
        ) from None


def are_parts(folder: Path) -> bool:
    """Return whether all checkpoints in a folder lack only what other nodes have written."""
    found = [catch(verify, path, False, False)[0] for path in list_checkpoints(folder)]
    return all(manifest and "folders" in manifest for manifest in found)


def check_none_saved(output: Path, remedy: str = "give another folder") -> None:
    """Raise ValueError if the run in this folder has saved a step, by its status.

    Call it where no checkpoint was found. `remedy`: how to start from the beginning.
    """
    if saved := read_json_object(output / "status.json").get("saved"):
        raise ValueError(
            f"{output / 'checkpoints'} has no checkpoint, and status.json says that step "
            f"{console.one_line(saved, 20)} was saved; put its folder back, or to start from the "
            f"beginning {remedy}"
        )


def prune(
    newest: Path, keep: int, best: int | None, keep_every: int = 0, held: int | None = None,
    whole: bool = True,
) -> None:  # fmt: skip
    """Delete all checkpoints but the `keep` newest, that of step `best`, and those whose step is a
    multiple of `keep_every`; keep 0 keeps all. held: a step that is being uploaded, and stays.
    whole: see `verify`.

    `newest` is the checkpoint just committed. Those of later steps stay, and so do broken ones,
    which do not count among the newest. Only the sizes of files are compared.
    """
    if not keep:
        return
    older = [path for path in list_checkpoints(newest.parent) if step_of(path) <= step_of(newest)]
    intact = [path for path in older if catch(verify, path, False, whole)[0]]
    for path in intact[keep:]:
        step = step_of(path)
        if step not in (best, held) and not (keep_every and step % keep_every == 0):
            remove(path)


def find_best(
    folder: Path, best: list | None, hashed: bool = True
) -> tuple[Path | None, dict, str]:
    """Find the checkpoint of the best evaluation and its manifest, or why there is none.

    `best`: the step of that evaluation and its eval_loss.
    """
    if not best:
        return None, {}, "no checkpoint has a finite eval_loss"
    step, loss = best
    path = checkpoint_folder(folder, step)
    try:
        return path, verify(path, hashed), ""
    except ValueError as reason:
        lost = f"the best evaluation was that of step {step}: {loss:.5g}, and its checkpoint"
        return None, {}, f"{lost} is gone ({reason})"


# ---- Settings of a checkpoint and of now ---------------------------------------------------------


def flatten(config: dict) -> dict:
    """Return a config without nesting. Fields of the task are called task.FIELD, as flags are."""
    if not isinstance(config.get("task"), dict):  # a script may call any setting so
        return config
    flat = {name: value for name, value in config.items() if name != "task"}
    return flat | {f"task.{name}": value for name, value in config["task"].items()}


def result_settings(manifest: dict, effects: dict) -> dict:
    """Return the entries of a manifest that determine the result: settings, and `data NAME`.

    `effects` maps fields to the effect of a change: nothing, rounding, or else it counts.
    """
    settings = flatten(manifest.get("config", {})).items()
    free = ("nothing", "rounding")
    chosen = {name: value for name, value in settings if effects.get(name) not in free}
    return chosen | {f"data {name}": value for name, value in manifest.get("data", {}).items()}


def differences(before: dict, after: dict) -> dict[str, list]:
    """Return the values before and now of each entry that differs, in JSON, too: NaN is no other
    than NaN."""
    pairs = {name: [before.get(name), after.get(name)] for name in {**before, **after}}
    pairs = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    texts = {n: [json.dumps(value, default=repr) for value in pair] for n, pair in pairs.items()}
    return {name: pair for name, pair in pairs.items() if texts[name][0] != texts[name][1]}


def as_lines(changes: dict[str, list]) -> list[str]:
    """Write `name: before -> now` of each of these differences; of a SHA-256 the first digits."""
    lines = [f"{name}: {before} -> {now}" for name, (before, now) in changes.items()]
    return [re.sub(r"\b([0-9a-f]{12})[0-9a-f]{52}\b", r"\1", line) for line in lines]


def check_settings(
    path: Path, saved: dict, current: dict, effects: dict, accept: bool, defaults: dict
) -> dict[str, list]:
    """Compare a checkpoint's manifest with the current one; return the differences.

    path: of the checkpoint. effects: see `result_settings`. accept: whether the result may change.
    defaults: of fields; a field that is new in the code changes nothing where it has its default.

    Raises ValueError if the result would change and may not, or the weights mean something else.
    """
    remedy = "give the old settings, or another folder"
    if saved.get("identity", "") != current.get("identity", ""):
        kind = "another vocabulary"
        if "vocabulary" not in current["config"].get("task", {}):
            kind += ", other classes or another scale of numbers"
        raise ValueError(
            f"{path} was made with {kind}, so its weights mean something else; give the same data, "
            "or another folder"
        )
    before, after = result_settings(saved, effects), result_settings(current, effects)
    new = {n for n in after if n not in before and n in defaults and after[n] == defaults[n]}
    changed = differences(before, {n: value for n, value in after.items() if n not in new})
    reason = f"{path} was made with other settings ({'; '.join(as_lines(changed))})"
    same_data = saved.get("prepared") == current.get("prepared", "") != ""
    if changed and {*changed} <= {"data fingerprint", "data validation"} and same_data:
        reason = f"task.views gives other rows of the same data than at an earlier start: {reason}"
    elif any(name.startswith("data ") for name in changed):
        rows = [f"{each.get('data', {}).get('samples', 0):,}" for each in (saved, current)]
        counted = " -> ".join(rows) if rows[0] != rows[1] else f"{rows[0]} other"
        reason = f"the data changed: {counted} rows; {reason}"
    if "lanes" in saved and {"seed", "data fingerprint"} & {*changed}:
        raise ValueError(f"{reason}, and a stream resumes over the same shards alone; {remedy}")
    if changed and not accept:
        raise ValueError(f"{reason}; {remedy}, or accept_changes to resume with the new ones")
    return changed
