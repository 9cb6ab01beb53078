"""A run that lives in a mirror: what is uploaded, comes back, is passed over and is deleted there.

A folder, and a real S3 server on this machine, are the stores.
"""

import contextlib
import json
import logging
import os
import shutil
import socket
import threading
import time

import boto3
import fsspec
import pytest
from moto.server import ThreadedMotoServer

from conftest import (
    KILL,
    ROOT,
    SOURCE,
    TRAIN,
    BakedProject,
    before_calls,
    checkpoint,
    kill_before,
    lines,
    manifest,
    newest,
    preloader,
    reseal,
    status,
)
from refusals import check_line, table
from same import check_same, curve, exported_files
from samestep.base.errors import Failed, UserError
from samestep.processes.mesh import Layout
from samestep.processes.ranks import Ranks
from samestep.state import checkpoints, store
from samestep.state.mirror import Mirror
from samestep.training.resume import ResumePoint
from test_sharding import ON_CPU, launcher_env

OWN = ROOT / "tests" / "own_mirrored.py"
SECRET = "a-key-that-no-file-may-hold"


@contextlib.contextmanager
def serve():
    """The port of an S3 server with the bucket `runs`, and variables by which it is reached."""
    served = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    served.start()
    _, port = served.get_host_and_port()
    given = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": SECRET}
    given |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    os.environ |= given
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir("runs")
    yield port
    for name in given:
        del os.environ[name]
    served.stop()


@pytest.fixture(scope="session")
def server():
    with serve() as port:
        yield port


@pytest.fixture
def s3(server, tmp_path):
    return f"s3://runs/{tmp_path.name}/mine"


@pytest.fixture
def folder(tmp_path):
    return f"file://{tmp_path}/store"


@pytest.fixture(params=["folder", "s3"])
def url(request):
    return request.getfixturevalue(request.param)


# ---- The rules, without a model ------------------------------------------------------------------


def save(output, step, best=None, size=500):
    partial = output / "checkpoints" / f".step-{step:08d}.partial"
    checkpoints.make_partial_folder(partial)
    for rank in range(2):
        (partial / f"rank-{rank}").write_bytes(bytes([step, rank]) * size)
    given = {"step": step, "config": {"lr": 1}, "best": best}
    return checkpoints.commit(partial, given, checkpoints.hash_files(partial))


def start(url, output, resume="auto", keep=2, keep_every=0, check=None):
    """A mirror after a start; the step that it continues from, and what it says."""
    output.mkdir(exist_ok=True)
    found = Mirror(url, output, keep, keep_every)
    point = ResumePoint(remarks=found.ask(resume))
    point.find(output, resume, mirror=found, check=check)
    if not point.checkpoint:
        checkpoints.check_none_saved(output)
    step = point.saved.get("step", 0)
    found.join(Ranks(Layout()), step)
    return found, step, point.remarks


def put(found, step, **about):
    save(found.output, step, **about)
    (found.output / "status.json").write_text(json.dumps({"saved": step}))
    found.push(step)
    assert found.upload()


def steps_there(found):
    return [store.step_of(name) for name in found.store.complete()]


def test_the_newest_the_best_and_kept_ones_are_there_and_come_back(url, tmp_path):
    found, step, _ = start(url, tmp_path / "a", keep=1, keep_every=30)
    (tmp_path / "a" / "wandb_run_id").write_text("0a1b")
    for step in (10, 20, 30, 40, 50):
        put(found, step, best=[10, 1.0] if step > 10 else None)
    assert steps_there(found) == [50, 30, 10]
    assert found.take_notes()[-1]["mirrored_step"] == status(found.output)["mirrored_step"] == 50
    _, step, said = start(url, tmp_path / "b")
    assert step == 50 and len(said) == 2
    names = [path.name for path in checkpoints.list_checkpoints(tmp_path / "b" / "checkpoints")]
    assert names == ["step-00000050", "step-00000010"]
    assert status(tmp_path / "b") == {"saved": 50, "mirrored_step": 50}
    assert (tmp_path / "b" / "wandb_run_id").read_text() == "0a1b"


@pytest.mark.parametrize("damage", ["byte", "missing", "manifest", "other step"])
def test_a_damaged_one_is_passed_over_and_replaced(url, tmp_path, damage):
    found, *_ = start(url, tmp_path / "a")
    put(found, 10)
    put(found, 20)
    fs, place = found.store.fs, f"{found.store.root}/checkpoints/{next(iter(found.store.listed()))}"
    if damage == "byte":
        fs.pipe_file(f"{place}/rank-1", b"x" * 1000)
    elif damage == "missing":
        fs.rm_file(f"{place}/rank-1")
    elif damage == "manifest":
        fs.pipe_file(f"{place}/manifest.json", fs.cat_file(f"{place}/manifest.json")[:99])
    else:
        other = next(name for name in fs.find(place.rpartition("/")[0]) if "00010" in name)
        text = fs.cat_file(f"{other.rpartition('/')[0]}/manifest.json")
        fs.pipe_file(f"{place}/manifest.json", text)
    again, step, said = start(url, tmp_path / "b")
    assert step == 10 and said[0].startswith("passed over in the mirror: step-00000020-")
    put(again, 20)  # the very same bytes: what is damaged must not count as uploaded
    assert start(url, tmp_path / "c")[1] == 20


@pytest.mark.parametrize("newest", [20, 30])
def test_a_byte_that_is_wrong_here_comes_from_there(url, tmp_path, newest):
    """Or the one before, if the mirror has no newer one."""
    found, *_ = start(url, tmp_path / "a")
    put(found, 10)
    put(found, 20)
    if newest == 30:
        save(tmp_path / "a", 30)
        shutil.rmtree(checkpoint(tmp_path / "a", 20))
    broken = checkpoint(tmp_path / "a", newest) / "rank-0"
    broken.write_bytes(b"x" * broken.stat().st_size)
    _, step, said = start(url, tmp_path / "a")
    assert step == 20 and said[0].startswith("downloaded ")


def test_a_damaged_one_does_not_count_among_those_that_are_kept(url, tmp_path):
    found, *_ = start(url, tmp_path / "a")
    put(found, 10)
    put(found, 20)
    place = f"{found.store.root}/checkpoints/step-00000020-{found.store.word}"
    found.store.fs.pipe_file(f"{place}/rank-1", b"?")
    again, *_ = start(url, tmp_path / "b")
    put(again, 30)
    assert steps_there(start(url, tmp_path / "c")[0]) == [30, 10]


@pytest.mark.parametrize(
    ("place", "name", "number"),
    [
        (checkpoints, "read_manifest", 1),
        (checkpoints, "verify", 1),
        (store.Store, "download_files", 1),
        (Mirror, "download", 2),
    ],
)
def test_a_kill_during_the_download_loses_nothing(
    folder, tmp_path, monkeypatch, place, name, number
):
    found, *_ = start(folder, tmp_path / "a", keep=1)
    (tmp_path / "a" / "metrics.jsonl").write_text("lines")
    for step in (10, 20):
        put(found, step, best=[10, 1.0] if step > 10 else None)
    killed, calls = getattr(place, name), []

    def kill(*given):
        calls.append(given)
        if len(calls) == number:
            raise KeyboardInterrupt
        return killed(*given)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(place, name, kill)
        start(folder, tmp_path / "b")
    _, step, _ = start(folder, tmp_path / "b")
    assert step == 20 and checkpoint(tmp_path / "b", 10).exists()
    assert (tmp_path / "b" / "metrics.jsonl").read_text() == "lines"


def test_what_is_deleted_during_the_download_is_looked_for_anew(url, tmp_path, monkeypatch):
    found, *_ = start(url, tmp_path / "a", keep=1)
    put(found, 10)
    download = store.Store.download

    def late(*given):
        if not steps_there(found)[0] > 10:
            put(found, 20)  # the start before lives
        return download(*given)

    monkeypatch.setattr(store.Store, "download", late)
    assert start(url, tmp_path / "b")[1] == 20


def test_none_that_is_valid_is_an_error_and_so_are_checkpoints_that_are_gone(url, tmp_path):
    found, *_ = start(url, tmp_path / "a")
    put(found, 10)
    place = f"{found.store.root}/checkpoints"
    for path in found.store.fs.find(place):
        found.store.fs.pipe_file(path, b"?")
    with pytest.raises(UserError, match=r"no checkpoint in mirror .* is valid \(step-00000010-"):
        start(url, tmp_path / "b")
    found.store.fs.rm(place, recursive=True)
    with pytest.raises(ValueError, match="step 10 was saved"):
        start(url, tmp_path / "c")
    assert not [*(tmp_path / "b" / "checkpoints").iterdir()]


def test_settings_are_compared_before_tensors_come(url, tmp_path, monkeypatch):
    found, *_ = start(url, tmp_path / "a")
    put(found, 10)
    monkeypatch.setattr(checkpoints, "verify", lambda *_: 1 / 0)

    def check(place, manifest):
        raise ValueError(f"{place} was made with lr {manifest['config']['lr']}")

    with pytest.raises(UserError, match="/checkpoints/step-00000010-......? was made with lr 1"):
        start(url, tmp_path / "b", check=check)
    assert not [*(tmp_path / "b" / "checkpoints").iterdir()]


def test_a_file_that_would_lie_elsewhere_is_refused(url, tmp_path):
    found, *_ = start(url, tmp_path / "a")
    path = save(tmp_path / "a", 10)
    named = json.loads((path / "manifest.json").read_text())["files"]
    found.push(10)
    assert found.upload()
    for name in ("../../../evil", str(tmp_path / "evil")):
        reseal(path, files={**named, name: {"bytes": 1, "sha256": ""}})
        there = f"{found.store.root}/checkpoints/step-00000010-{found.store.word}/manifest.json"
        found.store.fs.pipe_file(there, (path / "manifest.json").read_bytes())
        with pytest.raises(UserError, match="outside it"):
            start(url, tmp_path / "b")
    assert not (tmp_path / "evil").exists()


def test_the_last_start_owns_it_and_the_first_ends(url, tmp_path, capsys):
    first, *_ = start(url, tmp_path / "a")
    put(first, 10)
    second, step, _ = start(url, tmp_path / "b")
    save(first.output, 20)
    first.push(20)
    assert step == 10 and not first.upload()
    with pytest.raises(UserError, match=f"belongs to process {os.getpid()} on .* ends at its next"):
        first.check()
    assert steps_there(second) == [10]
    put(second, 20)
    assert steps_there(second) == [20, 10]


def test_what_another_run_or_a_person_has_there_stays(url, tmp_path):
    found, *_ = start(url, tmp_path / "a")
    put(found, 10)
    (tmp_path / "b").mkdir()
    save(tmp_path / "b", 20)  # newer, and of another run

    def check(place, manifest):
        raise ValueError(f"{place} was made with lr {manifest['config']['lr']}")

    with pytest.raises(UserError, match="was made with lr 1"):
        start(url, tmp_path / "b", check=check)
    found.store.fs.rm(found.store.root, recursive=True)
    found.store.fs.pipe_file(f"{found.store.root}/model/weights.pt", b"hers")
    with pytest.raises(UserError, match="holds files of no run"):
        start(url, tmp_path / "c")


def test_a_folder_that_a_console_has_created_is_a_mirror(s3, tmp_path):
    """It is an object whose name ends with a slash."""
    name, client = s3.removeprefix("s3://runs/"), boto3.client("s3")
    for step in (10, 20):
        client.put_object(Bucket="runs", Key=f"{name}/", Body=b"")
        put(start(s3, tmp_path / f"{step}")[0], step)
    assert start(s3, tmp_path / "c")[1] == 20


def test_a_run_that_begins_anew_lies_beside_the_other(url, tmp_path):
    found, *_ = start(url, tmp_path / "a")
    put(found, 10)
    before = {path: found.store.fs.cat_file(path) for path in found.store.fs.find(found.store.root)}
    fresh, step, said = start(url, tmp_path / "b", resume="never")
    assert step == 0 and f"begins beside it, in {url}/{fresh.store.word}" in said[0]
    put(fresh, 5)
    again, step, _ = start(url, tmp_path / "c")
    assert step == 5 and again.store.home == fresh.store.word
    after = {path: found.store.fs.cat_file(path) for path in before}
    assert {p for p in before if before[p] != after[p]} == {f"{found.store.root}/owner.json"}


def test_a_failure_is_said_once_and_tried_after_each_save(url, tmp_path, monkeypatch, capsys):
    found, *_ = start(url, tmp_path / "a")
    put(found, 10)
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(found.store.fs, "put_file", lambda *_, **__: 1 / 0)
        for step in (20, 30):
            save(found.output, step)
            found.push(step)
            assert found.wait(30)
        assert not found.upload()
    printed = capsys.readouterr().out
    assert printed.count("lacks step 20: ZeroDivisionError") == 1 and "has step 10, and" in printed
    assert steps_there(found) == [10]
    put(found, 40)
    assert "has step 40 now" in capsys.readouterr().out and steps_there(found) == [40, 10]


def test_a_slow_net_skips_steps_and_what_is_uploaded_stays(folder, tmp_path, monkeypatch):
    found, *_ = start(folder, tmp_path / "a", keep=1)
    put_file, opened, begun = found.store.fs.put_file, threading.Event(), threading.Event()

    def slow(path, *given, **named):
        if "rank-1" in path:
            begun.set()
            assert opened.wait(30)
        put_file(path, *given, **named)

    monkeypatch.setattr(found.store.fs, "put_file", slow)
    for step in (10, 20, 30):
        path = save(found.output, step)
        held = found.push(step)
        checkpoints.prune(path, 1, None, held=held)
        assert begun.wait(30)
    names = [path.name for path in checkpoints.list_checkpoints(found.folder)]
    assert names == ["step-00000030", "step-00000010"]  # of 1 that is kept, and what is uploaded
    opened.set()
    assert found.upload() and steps_there(found) == [30]
    assert [each["mirrored_step"] for each in found.take_notes()] == [10, 30]


def test_what_a_stop_has_no_time_for_is_said(folder, tmp_path, monkeypatch, capsys):
    found, *_ = start(folder, tmp_path / "a")
    put(found, 10)
    opened = threading.Event()
    monkeypatch.setattr(found.store.fs, "put_file", lambda *_, **__: opened.wait(30))
    save(found.output, 20)
    found.push(20)
    assert not found.upload(0.1)
    words = f"has step 10, and step 20 is in {found.folder} alone: the time was over"
    assert words in capsys.readouterr().out
    opened.set()


def test_files_beside_the_checkpoints_are_copied_and_links_are_not(url, tmp_path):
    found, *_ = start(url, tmp_path / "a")
    (tmp_path / "a" / "model").mkdir()
    for name in ("metrics.jsonl", "model/weights-1", ".hidden", "lock"):
        (tmp_path / "a" / name).write_text("one")
    (tmp_path / "a" / "link").symlink_to(OWN)
    put(found, 10)
    root = found.store.root
    names = {path.removeprefix(f"{root}/") for path in found.store.fs.find(root)}
    names = {name for name in names if not name.startswith("checkpoints")}
    assert names == {"owner.json", "status.json", "metrics.jsonl", "model/weights-1"}


def test_a_folder_that_is_deleted_while_files_are_listed_is_passed_over(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    (tmp_path / "one").touch()
    scandir = os.scandir

    def scan(path):
        if str(path).endswith("gone"):
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan)
    assert store.list_files(tmp_path) == ["one"]


def test_a_mirror_in_the_folder_of_a_run_is_an_error(folder, tmp_path):
    for place in (tmp_path, tmp_path / "copy"):
        with pytest.raises(UserError, match="lies in .*, which is copied"):
            Mirror(f"file://{place}", tmp_path, 1).ask()
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "lock").touch()
    with pytest.raises(UserError, match="is the folder of a run"):
        Mirror(folder, tmp_path / "a", 1).ask()


def test_a_full_disk_is_no_damage_of_what_lies_there(folder, tmp_path, monkeypatch):
    found, *_ = start(folder, tmp_path / "a")
    put(found, 10)
    full = shutil.disk_usage(tmp_path)._replace(free=900)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    with pytest.raises(UserError, match="a checkpoint needs 0.0 MB, but only 0.0 MB are free"):
        start(folder, tmp_path / "b")


@pytest.mark.parametrize(("given", "line"), table("mirrors"))
def test_a_url_that_is_no_mirror(server, tmp_path, given, line):
    with pytest.raises(UserError) as error:
        Mirror(given.format(folder=tmp_path), tmp_path / "run", 1).ask()
    check_line(str(error.value), line.format(folder=tmp_path), "mirror ")
    assert "topsecret" not in str(error.value)


# ---- A net that fails ----------------------------------------------------------------------------

BUSY = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
BUSY = b"HTTP/1.1 503 Slow Down\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (
    len(BUSY),
    BUSY,
)


FAULTS = ["refused", "busy", "slow"]


class Net:
    """A way to the server, at `port`, which a `fault` may break: refused, busy, cut or slow."""

    def __init__(self, server):
        self.server, self.fault, self.entry = server, "", socket.create_server(("127.0.0.1", 0))
        self.port = self.entry.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            client, _ = self.entry.accept()
            server = socket.create_connection(("127.0.0.1", self.server))
            for given in ((client, server, True), (server, client, False)):
                threading.Thread(target=self.copy, args=given, daemon=True).start()

    def copy(self, source, target, is_upload):
        size = 0
        with contextlib.suppress(OSError):
            while (data := source.recv(65536)) and self.fault != "refused":
                size += len(data)
                if is_upload and self.fault == "busy":
                    source.sendall(BUSY)
                    break
                if is_upload and self.fault == "cut" and size > 200_000:
                    break
                if is_upload and self.fault == "slow":
                    time.sleep(len(data) / 1e6)
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    "fault", ["cut", *(pytest.param(name, marks=pytest.mark.slow) for name in FAULTS)]
)
def test_a_net_that_fails_loses_no_step(server, s3, tmp_path, monkeypatch, capsys, fault):
    net = Net(server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{net.port}")
    found, *_ = start(s3, tmp_path / "a")
    put(found, 10)
    net.fault = fault
    save(found.output, 20, size=500_000)
    found.push(20)
    assert found.wait(100)
    assert ("lacks step 20" in capsys.readouterr().out) == (fault != "slow")
    if fault == "refused":
        with pytest.raises(Failed, match="mirror s3://"):
            Mirror(s3, tmp_path / "b", 2).ask()
    net.fault = ""
    assert steps_there(found) == ([20, 10] if fault == "slow" else [10])
    put(found, 30, size=500_000)
    assert start(s3, tmp_path / "c")[1] == 30


# ---- Runs ----------------------------------------------------------------------------------------


RUN = "import runpy, sys\n{}\ndel sys.argv[0]\nrunpy.run_path(sys.argv[0], None, '__main__')"


def own(folder, processes, output, *flags, before="", codes=(0,)):
    """What a script of one's own printed."""
    command = ["-c", RUN.format(before), OWN, "--folder", output, *flags]
    ends = BakedProject(folder).ends(processes, program=command)
    printed = "".join(out + errors for _, out, errors in ends)
    assert {code for code, *_ in ends} <= {*codes}, printed
    return printed


def sha(printed):
    return next(line for line in printed.splitlines() if line.startswith("SHA"))


def kill_own(step):
    """Python that kills a script of one's own before a step."""
    return kill_before(step).replace("os.kill", "time.sleep(0.3); os.kill")


def test_a_killed_script_continues_without_its_disk_on_1_2_1_processes(s3, tmp_path):
    whole = own(tmp_path, 1, "whole")
    for number, (processes, step) in enumerate([(1, 8), (2, 14), (1, 20)]):
        words = f"{number}", "--mirror", s3, "--seconds", "0.02"
        own(tmp_path, processes, *words, before=kill_own(step), codes=(-9, 1))
        shutil.rmtree(tmp_path / f"{number}")
    printed = own(tmp_path, 2, "last", "--mirror", s3)
    assert "downloaded s3://" in printed and sha(printed) == sha(whole)
    fs, root = fsspec.url_to_fs(s3, skip_instance_cache=True)
    assert fs.cat_file(f"{root}/notes.txt").decode() in whole  # written after the loop
    assert json.loads(fs.cat_file(f"{root}/status.json"))["mirrored_step"] == 24
    found = [path for path in fs.find(root) if not path.endswith("safetensors")]
    files = [path for path in (tmp_path / "last").rglob("*") if path.is_file()]
    texts = [fs.cat_file(path) for path in found] + [path.read_bytes() for path in files]
    assert not [text for text in texts if SECRET.encode() in text] and SECRET not in printed


FLAGS = ["--save_every", 3, "--eval_every", 3, "--export", "best"]


def test_a_stopped_run_of_train_py_continues_on_an_empty_machine(tiny, folder, tmp_path):
    """On two processes; the best checkpoint comes back, and the model gets there at the end."""
    flags = [*FLAGS, "--exact", "true", "--micro_batch_size", 1]
    tiny.train(1, "--output_dir", tmp_path / "whole", *flags)
    action = "os.kill(os.getpid(), signal.SIGTERM)"
    words = ["--output_dir", tmp_path / "a", *flags, "--mirror", folder]
    printed = tiny.train(2, *words, before=kill_before(8, action), codes=(75,))
    assert "is in" not in printed and status(tmp_path / "a")["mirrored_step"] == 8
    lost = lines(tmp_path / "a", "loss")
    shutil.rmtree(tmp_path / "a")
    words[1] = tmp_path / "b"
    assert "downloaded file://" in tiny.train(1, *words)
    check_same(tmp_path / "whole", tmp_path / "b")
    assert lines(tmp_path / "b", "loss")[: len(lost)] == lost  # metrics.jsonl came, too
    assert exported_files(tmp_path / "store") == exported_files(tmp_path / "b") != {}
    mirrored = [line["mirrored_step"] for line in lines(tmp_path / "b", "mirrored_step")]
    assert mirrored == sorted(mirrored) and status(tmp_path / "b")["mirrored_step"] == 12
    assert "is finished" in tiny.train(1, *words)


def test_only_a_run_that_trains_writes_there(tiny, folder, tmp_path):
    words = ["--output_dir", tmp_path / "a", *FLAGS, "--max_steps", 6]
    tiny.train(1, *words)
    for flag in ("--check", "--eval_only"):
        printed = tiny.train(1, *words, "--mirror", folder, flag)
        assert f"what {folder} holds is not looked at" in printed
    recipe = tmp_path / "a" / "config.yaml"
    recipe.write_text(recipe.read_text().replace("mirror: ''", f"mirror: {folder}"))
    tiny.ask("replay", tmp_path / "a", "--step", 6)
    assert not (tmp_path / "store").exists()


def test_a_stop_waits_for_a_store_that_hangs_once(tiny, folder, tmp_path):
    """And no more than that: what is left is said once."""
    before = before_calls("samestep.state.store.Store.put", "time.sleep(99)")
    before += kill_before(4, "os.kill(os.getpid(), signal.SIGTERM)")
    words = ["--output_dir", tmp_path / "a", *FLAGS, "--mirror", folder, "--mirror_grace", 1]
    printed = tiny.train(1, *words, before=before, codes=(75,))
    assert printed.count("alone: the time was over") == 1


def test_a_finished_run_whose_mirror_has_another_owner_ends_with_2(tiny, folder, tmp_path):
    words = ["--output_dir", tmp_path / "a", *FLAGS, "--max_steps", 6, "--mirror", folder]
    other = f"open({str(tmp_path / 'store' / 'owner.json')!r}, 'w').write('{{\"word\": \"0\"}}')"
    taking = before_calls("samestep.end.ending.report", other)
    assert "belongs to process" in tiny.train(1, *words, before=taking, codes=(2,))


def test_a_store_that_does_not_take_the_end_ends_with_1_and_the_same_command_mends_it(
    tiny, folder, tmp_path
):
    words = ["--output_dir", tmp_path / "a", *FLAGS, "--max_steps", 6, "--mirror", folder]
    failing = before_calls(
        "samestep.state.store.Store.put",
        "if 'model/' in given[2]: raise OSError('the store is full')",
    )
    printed = tiny.train(1, *words, before=failing, codes=(1,))
    assert "not all files of" in printed and "the store is full" in printed
    assert status(tmp_path / "a")["exit_code"] == 1
    assert not (tmp_path / "store" / "model").exists()
    tiny.train(1, *words)
    assert (tmp_path / "store" / "model" / "weights.pt").exists()


def test_a_script_whose_last_step_does_not_arrive_ends_with_1_and_then_trains_no_more(
    folder, tmp_path
):
    words = "a", "--max_steps", 6, "--save_every", 6, "--mirror", folder
    failing = before_calls("samestep.state.store.Store.put", "raise OSError('the store is full')")
    printed = own(tmp_path, 2, *words, before=failing, codes=(1,))
    assert "step 6 is in" in printed and "the store is full" in printed and "SHA" not in printed
    assert status(tmp_path / "a")["exit_code"] == 1
    again = own(tmp_path, 1, *words, before=kill_own(1))
    assert sha(again) == sha(own(tmp_path, 1, "b", "--max_steps", 6))
    assert status(tmp_path / "a")["mirrored_step"] == 6


HURRY = "from samestep.state import consistency\nconsistency._FOLDER_SECONDS = 0\n"


def nodes(places, command, **env):
    """Two processes, each in a folder that the other does not see: their ends."""
    envs, run = BakedProject(places[0]).envs(2), []
    for place, given in zip(places, envs, strict=True):
        place.mkdir(exist_ok=True)
        run.append([str(place), given | env, [*map(str, command)], ""])
    served = preloader()
    served.stdin.write(json.dumps([run, 240]) + "\n")
    served.stdin.flush()
    return json.loads(served.stdout.readline())


def own_nodes(folder, *flags, before="", program=(OWN,), **env):
    """The same of a script of one's own."""
    places = [folder / f"node-{rank}" for rank in range(2)]
    command = ["-c", RUN.format(HURRY + before), *program, "--folder", "run", *flags]
    return nodes(places, command, **env)


def check_parts(folder):
    """Each node has what its process wrote."""
    for rank in range(2):
        files = {path.name for path in (folder / f"node-{rank}").rglob("rank-*")}
        assert files == {f"rank-0000{rank}.safetensors"}


def test_two_nodes_that_share_nothing_but_a_mirror_train_die_and_continue(folder, tmp_path):
    whole = own(tmp_path, 1, "whole", "--best")
    words = ["--mirror", folder, "--best"]
    ends = own_nodes(tmp_path, *words, before=kill_before(5))
    assert [code for code, *_ in ends] == [-9, -9], ends  # the mirror has none yet
    there = f"{tmp_path}/store/checkpoints/step-*0[69]-*/manifest.json"
    waits = f"import glob\n    while len(glob.glob({there!r})) < 2: time.sleep(0.01)\n    {KILL}"
    ends = own_nodes(tmp_path, *words, before=kill_before(11, f"\n    {waits}"))
    assert [code for code, *_ in ends] == [-9, -9], ends
    assert "parts of checkpoints that the mirror never had" in ends[0][1]
    check_parts(tmp_path)
    shutil.rmtree(tmp_path / "node-1")
    ends = own_nodes(tmp_path, *words)
    printed = "".join(out + errors for _, out, errors in ends)
    assert [code for code, *_ in ends] == [0, 0], printed
    assert "downloaded file://" in printed and "best is step 6" in printed
    assert sha(printed) == sha(whole)


def test_a_node_that_does_not_reach_the_store_holds_up_no_end(folder, tmp_path):
    before = "import os\nfrom samestep.state import mirror, store\nmirror._TURN = 1\n"
    before += "if os.environ['RANK'] == '1': store.Store.put = lambda *_: 1 / 0\n"
    ends = own_nodes(tmp_path, "--mirror", folder, before=before)
    printed = "".join(out + errors for _, out, errors in ends)
    assert [code for code, *_ in ends] == [1, 1], printed
    assert "alone: OSError: ZeroDivisionError" in printed


@pytest.mark.slow
def test_train_py_needs_no_disk_that_two_nodes_share(tiny, folder, tmp_path):
    flags = [*FLAGS, "--exact", "true", "--micro_batch_size", 1, "--output_dir", "run"]
    places = []
    for name in ("whole", "one", "two"):
        (tmp_path / name).mkdir()
        places.append(tiny.copied(tmp_path / name).path)
    BakedProject(places[0]).train(1, *flags)
    for step, lost, code in ((5, 0, 75), (9, 1, 75), (99, 0, 0)):
        before = HURRY + kill_before(step, "os.kill(os.getpid(), signal.SIGTERM)")
        ends = nodes(places[1:], ["-c", TRAIN, before, *flags, "--mirror", folder])
        assert [each for each, *_ in ends] == [code, code], ends
        if code:
            shutil.rmtree(places[1:][lost] / "run")
    whole, run = (place / "run" for place in places[:2])
    assert manifest(newest(run))["state"] == manifest(newest(whole))["state"] != ""
    assert exported_files(run) == exported_files(whole)
    assert curve(run) == curve(whole)
    assert "downloaded" in ends[0][1] and not (places[2] / "run" / "model").exists()


@pytest.mark.slow
def test_parts_of_weights_on_two_nodes_come_together(folder, tmp_path):
    """FSDP2: each node has a half of each weight; a stop, then one process."""
    whole = own(tmp_path, 1, "whole")
    yaml = ROOT / SOURCE / "configs" / "accelerate" / "fsdp2.yaml"
    env = launcher_env(str(yaml), 2, "no") | {"ACCELERATE_USE_CPU": "false"}
    words = ["--mirror", folder, "--fsdp"]
    given = {"program": (ON_CPU, OWN), **env}
    ends = own_nodes(tmp_path, *words, before=kill_before(10, "os.kill(os.getpid(), 15)"), **given)
    assert [code for code, *_ in ends] == [75, 75], ends
    check_parts(tmp_path)
    shutil.rmtree(tmp_path / "node-0")
    ends = own_nodes(tmp_path, *words, before=kill_before(14, "os.kill(os.getpid(), 15)"), **given)
    assert [code for code, *_ in ends] == [75, 75], ends
    printed = own(tmp_path, 1, "one", "--mirror", folder)
    assert "step-00000014-" in printed and sha(printed) == sha(whole)
