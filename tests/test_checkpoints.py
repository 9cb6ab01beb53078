"""checkpoints.py on its own: crashes at each step of a commit, damage of every kind, pruning."""

import contextlib
import functools
import hashlib
import os
import shutil

import pytest

from conftest import reseal
from samestep.base import files
from samestep.state import checkpoints

FILES = {"model.safetensors": b"weights" * 999, "optimizer.bin": b"moments", "inner/rng.pkl": b"4"}


class Crash(BaseException):
    """The power fails here."""


def write(folder, step, **facts):
    """A partial checkpoint, as all ranks leave it."""
    partial = folder / f".step-{step:08d}.partial"
    checkpoints.make_partial_folder(partial)
    for name, content in FILES.items():
        (partial / name).parent.mkdir(exist_ok=True)
        (partial / name).write_bytes(content + str(step).encode())
    return partial, {"step": step, **facts}


def save(folder, step, keep=0, best=None, keep_every=0, **facts):
    """A committed checkpoint."""
    partial, manifest = write(folder, step, **facts)
    path = checkpoints.commit(partial, manifest, checkpoints.hash_files(partial))
    checkpoints.prune(path, keep, best, keep_every)
    return path


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def crash_at(limit, owners, action):
    """Does something until the call with this number of these functions; the number of calls."""
    calls = []

    def counted(function):
        def call(*arguments, **keywords):
            if len(calls) == limit:
                raise Crash
            calls.append(function.__name__)
            return function(*arguments, **keywords)

        return call

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Crash):
        for owner, name in owners:
            patch.setattr(owner, name, counted(getattr(owner, name)))
        action()
    return len(calls)


COMMIT = [(os, "fsync"), (os, "rmdir"), (os, "unlink"), (checkpoints.Path, "rename")]
COMMIT += [(checkpoints.json, "dumps"), (checkpoints, "describe_files")]


def crash_at_each_call(folder):
    """The number of calls to the disk in a commit, at each of which a crash has lost nothing."""
    for limit in range(200):
        path = folder / str(limit)
        save(path, 1)
        save(path, 2)
        calls = crash_at(limit, COMMIT, functools.partial(save, path, 3, keep=1))
        found, manifest, passed_over = checkpoints.find_checkpoint(path, "auto")
        assert manifest["step"] in (2, 3) and passed_over == []
        # The next run starts the same step again, and nothing of the crash is in its way.
        if manifest["step"] == 2:
            assert save(path, 3, keep=1) == path / "step-00000003"
        assert checkpoints.find_checkpoint(path, "auto")[1]["step"] == 3
        if calls < limit:
            return limit - 1
    raise AssertionError("more calls than expected")


def test_a_crash_at_any_call_to_the_disk_leaves_a_valid_checkpoint(tmp_path):
    assert crash_at_each_call(tmp_path) > 15


def at(name, change):
    """Changes the bytes of a file."""
    return lambda path: (path / name).write_bytes(change((path / name).read_bytes()))


RNG, MANIFEST = "inner/rng.pkl", checkpoints.MANIFEST


DAMAGES = {
    "an empty file": at(RNG, lambda _: b""),
    "a longer file": at(RNG, lambda content: content + b"\0"),
    "one bit of a file": at(RNG, lambda content: bytes([content[0] ^ 1]) + content[1:]),
    "no file": lambda path: (path / RNG).unlink(),
    "the file of another": lambda p: shutil.copy(p.parent / "step-00000001" / RNG, p / RNG),
    "a file more": lambda p: (p / "scheduler.bin").write_bytes(b""),
    "a link to nothing": lambda p: (p / "link").symlink_to("nothing"),
    "a file in the place of the checkpoint": lambda p: (shutil.rmtree(p), p.write_bytes(b"")),
    "no manifest": lambda path: (path / MANIFEST).unlink(),
    "half a manifest": at(MANIFEST, lambda content: content[: len(content) // 2]),
    "a manifest that is a list": at(MANIFEST, lambda _: b"[]"),
    "a manifest that is a pipe": lambda p: ((p / MANIFEST).unlink(), os.mkfifo(p / MANIFEST)),
    "the manifest of another": lambda p: shutil.copy(p.parent / "step-00000001" / MANIFEST, p),
    "another step": at(MANIFEST, lambda content: content.replace(b'"step": 2', b'"step": 3')),
    "the name of another step": lambda p: reseal(p, step=3),
    "a step that is a text": lambda p: reseal(p, step="2"),
    "a config that is a list": lambda p: reseal(p, config=[1]),
    "fewer files": lambda p: reseal(p, files=dict([*checkpoints.verify(p)["files"].items()][:2])),
    "no files": lambda p: reseal(p, files={}),
    "a file outside": lambda p: reseal(p, files={"../x": {"bytes": 0, "sha256": ""}}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_named_and_kept(tmp_path, damage):
    save(tmp_path, 1)
    broken = save(tmp_path, 2)
    DAMAGES[damage](broken)
    before = sorted(str(p) for p in broken.rglob("*"))
    found, manifest, passed_over = checkpoints.find_checkpoint(tmp_path, "auto")
    assert manifest["step"] == 1 and found.name == "step-00000001"
    assert len(passed_over) == 1 and str(broken) in passed_over[0] and "\n" not in passed_over[0]
    assert before == sorted(str(p) for p in broken.rglob("*"))


def test_each_bit_of_a_manifest_counts(tmp_path):
    """One bit flipped anywhere: the manifest is refused, or says the very same."""
    path = save(tmp_path, 2, samples=56, config={"seed": 3, "task": {"data": "a"}}, eval_loss=2.5)
    content, manifest = (path / "manifest.json").read_bytes(), checkpoints.verify(path)
    refused = 0
    for bit in range(8 * len(content)):
        spoilt = bytearray(content)
        spoilt[bit // 8] ^= 1 << bit % 8
        (path / "manifest.json").write_bytes(spoilt)
        try:
            assert checkpoints.verify(path) == manifest
        except ValueError as error:
            assert str(path) in str(error)
            refused += 1
    assert refused > 0.8 * 8 * len(content)  # the rest is white space


@pytest.mark.parametrize("block, shares", [(4, 3), (1000, 2)])
def test_files_dealt_to_any_number_of_processes_vouch_for_the_same(
    tmp_path, monkeypatch, block, shares
):
    """A file of several blocks has the digest of their digests."""
    monkeypatch.setattr(checkpoints, "BLOCK", block)
    (partial, manifest), found = write(tmp_path, 3), {}
    (partial / "empty").write_bytes(b"")
    for share in range(shares):
        part = checkpoints.hash_files(partial, checkpoints.list_files(partial)[share::shares])
        assert not {*part} & {*found}
        found |= part
    for name, about in found.items():
        content = (partial / name).read_bytes()
        blocks = [content[i : i + block] for i in range(0, max(len(content), 1), block)]
        digests = [hashlib.sha256(each).hexdigest() for each in blocks]
        joined = hashlib.sha256("".join(digests).encode()).hexdigest()
        assert about["bytes"] == len(content)
        assert about["sha256"] == (joined if len(digests) > 1 else digests[0])
    with pytest.raises(ValueError, match="empty is not visible to every process"):
        checkpoints.commit(partial, manifest, {n: f for n, f in found.items() if n != "empty"})
    path = checkpoints.commit(partial, manifest, found)
    assert checkpoints.verify(path)["files"] == found
    at("model.safetensors", lambda content: content[:5000] + b"X" + content[5001:])(path)
    with pytest.raises(ValueError, match="model.safetensors is not the file"):
        checkpoints.verify(path)


def test_a_folder_of_checkpoints_that_cannot_be_read_is_no_empty_one(tmp_path):
    """Else the run would start from the beginning."""
    folder = tmp_path / "checkpoints"
    folder.write_text("a file")
    with pytest.raises(ValueError, match="checkpoints cannot be read: Not a directory"):
        checkpoints.find_checkpoint(folder, "auto")


def test_pruning_keeps_the_newest_and_the_best(tmp_path):
    for step, best in ((1, None), (2, 1), (3, 2), (4, 2), (5, 2)):
        save(tmp_path, step, 2, best)
    assert names(tmp_path) == ["step-00000002", "step-00000004", "step-00000005"]
    save(tmp_path, 6, keep=0)
    assert len(names(tmp_path)) == 4


def test_checkpoints_of_each_so_many_steps_stay_for_good(tmp_path):
    for step in range(2, 24, 2):
        save(tmp_path, step, 1, best=14, keep_every=6)
    assert names(tmp_path) == [f"step-{step:08d}" for step in (6, 12, 14, 18, 22)]


def test_a_broken_checkpoint_takes_the_place_of_none(tmp_path):
    """It is none of those to keep, and is left for people to look at."""
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "step-00000002" / "optimizer.bin").write_bytes(b"short")
    (tmp_path / "step-00000003" / "manifest.json").write_text("[]")
    save(tmp_path, 4, 1, best=1)
    assert names(tmp_path) == [f"step-0000000{i}" for i in (1, 2, 3, 4)]
    save(tmp_path, 5, 1, best=1)
    assert names(tmp_path) == [f"step-0000000{i}" for i in (1, 2, 3, 5)]


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: path.symlink_to(path.name)])
def test_what_has_the_name_of_a_checkpoint_is_replaced_when_that_is_saved(tmp_path, make):
    make(tmp_path / "step-00000003")
    path = save(tmp_path, 3)
    (path / "optimizer.bin").unlink()  # a broken one
    save(tmp_path, 3)
    assert names(tmp_path) == ["step-00000003"]
    assert checkpoints.find_checkpoint(tmp_path, "auto")[1]["step"] == 3


def test_scores_are_added_to_a_manifest_in_one_step(tmp_path):
    """A kill at any call to the disk leaves the manifest with them, or without."""
    path = save(tmp_path, 3, best=None)
    before, after = checkpoints.verify(path), []
    disk = [(os, "fsync"), (checkpoints.Path, "replace"), (os, "open")]
    for limit in range(20):
        scores = {"eval_loss": limit, "best": [3, limit]}
        crash_at(limit, disk, functools.partial(checkpoints.add_to_manifest, tmp_path, 3, scores))
        found = checkpoints.verify(path)
        after.append(found.get("eval_loss"))
        if found["sha256"] != before["sha256"]:
            assert found["best"] == [3, found["eval_loss"]] and found["files"] == before["files"]
    assert after[0] is None and after[-1] == 19
    save(tmp_path, 4)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]  # nothing of the kills is left
    with pytest.raises(ValueError, match="step-00000005 has no manifest"):
        checkpoints.add_to_manifest(tmp_path, 5, {"eval_loss": 1.0})


def test_ways_to_start(tmp_path):
    own, other = tmp_path / "own", tmp_path / "other"
    assert checkpoints.find_checkpoint(own, "auto") == (None, {}, [])
    given = save(other, 5, samples=40)
    found, manifest, passed_over = checkpoints.find_checkpoint(other, "auto")
    assert found == given and manifest["samples"] == 40 and passed_over == []
    assert checkpoints.find_checkpoint(own, str(given))[1]["step"] == 5
    with pytest.raises(ValueError, match="has no manifest.json"):
        checkpoints.find_checkpoint(own, str(other))
    save(own, 7)  # the run's own newest goes before the one that it once started from
    assert checkpoints.find_checkpoint(own, str(given))[1]["step"] == 7
    with pytest.raises(ValueError, match="holds checkpoints and resume is never"):
        checkpoints.find_checkpoint(own, "never")
    (own / "step-00000007" / "optimizer.bin").unlink()  # and it does not start from zero
    with pytest.raises(ValueError, match="no checkpoint in .* is valid .*optimizer.bin is missing"):
        checkpoints.find_checkpoint(own, "auto")


def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    done, partial = [], write(tmp_path / "run" / "checkpoints", 3)[0]

    def noted(owner, name):
        function = getattr(owner, name)
        call = lambda *given: (done.append((name, *given)), function(*given))[1]  # noqa: E731
        monkeypatch.setattr(owner, name, call)

    noted(checkpoints, "fsync"), noted(files, "fsync"), noted(checkpoints, "replace_text")
    described = checkpoints.hash_files(partial)
    assert {*done} == {("fsync", partial / name) for name in FILES}  # each process its own
    noted(checkpoints.Path, "rename")
    final = checkpoints.commit(partial, {"step": 3}, described)
    place = done.index(("rename", partial, final))
    flushed = [path for name, path, *_ in done[:place] if name == "fsync"]
    for path in [*FILES, "inner", "manifest.json", ""]:
        assert partial / path in flushed
    written = [i for i, each in enumerate(done) if each[0] == "replace_text"]
    assert len(written) == 1 and written[0] > len(FILES) - 1  # after the contents
    assert [each[1] for each in done[place + 1 :]] == [final.parent, final.parent.parent]


def test_a_replaced_file_is_on_the_disk_before_and_after_it_has_its_name(tmp_path, monkeypatch):
    flushed, file = [], tmp_path / "status.json"
    note = lambda path: flushed.append((path, [*tmp_path.iterdir()]))  # noqa: E731
    monkeypatch.setattr(files, "fsync", note)
    files.replace_text(file, "new")
    partial = tmp_path / ".status.json.partial"
    assert flushed == [(partial, [partial]), (tmp_path, [file])] and file.read_text() == "new"


def test_a_checkpoint_of_a_later_step_neither_counts_nor_goes(tmp_path):
    """It is broken, or its disk failed for a moment: the run began before it, and will replace
    it. The one that was just committed stays."""
    save(tmp_path, 50, 1)
    save(tmp_path, 200)
    (save(tmp_path, 300) / "optimizer.bin").unlink()
    assert checkpoints.find_checkpoint(tmp_path, "auto")[1]["step"] == 200
    save(tmp_path, 150, keep=1, best=50)
    assert names(tmp_path) == [f"step-{step:08d}" for step in (50, 150, 200, 300)]


def test_the_best_checkpoint_is_verified_or_named(tmp_path):
    path = save(tmp_path, 2)
    found = checkpoints.find_best(tmp_path, [2, 0.5])
    assert found == (path, checkpoints.verify(path), "")
    assert checkpoints.find_best(tmp_path, None)[0] is None
    file = path / "optimizer.bin"
    file.write_bytes(b"M" + file.read_bytes()[1:])
    lost = "the best evaluation was that of step 2: 0.5, and its checkpoint is gone "
    lost += f"({file} is not the file that was saved)"
    assert checkpoints.find_best(tmp_path, [2, 0.5]) == (None, {}, lost)
    assert checkpoints.find_best(tmp_path, [2, 0.5], hashed=False)[0] == path
