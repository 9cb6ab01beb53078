"""Machines that come and go during a run: torchelastic's c10d rendezvous, a launcher for each.

Every launcher here plays a machine with one process. The rendezvous lies in the process of the
tests, as it would on a machine that stays.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import threading

import psutil
import pytest
import torch.distributed as dist
from torch.distributed.elastic.utils.distributed import get_free_port

from conftest import checkpoint, lines, newest, status, wait_until
from refusals import cases
from same import check_same
from samestep.base import errors, run_folder
from samestep.launch import rendezvous

# Steps of 0.1 s with four processes, 0.15 s with three, without an end in sight.
FLAGS = ["--max_steps", 100_000, "--lr_schedule", "constant", "--eval_every", 0, "--save_every", 5]
FLAGS += ["--micro_batch_size", 1, "--task.dropout", 0.2, "--task.row_seconds", 0.05]
# Machines that are gone, and those that are late, are given up after so many seconds.
SOON = "keep_alive_interval=1,keep_alive_max_attempt=4,last_call_timeout=3"


class Machines:
    """The launchers of a run, each with one process, and the folder of the run."""

    def __init__(self, project, output, count, *flags):
        self.project, self.output, self.flags = project, output, [*flags, "--output_dir", output]
        self.endpoint = ("127.0.0.1", get_free_port())
        self.rendezvous = dist.TCPStore(*self.endpoint, is_master=True, wait_for_workers=False)
        self.count, self.launchers = count, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for machine, run in enumerate(self.launchers):
            with contextlib.suppress(psutil.NoSuchProcess):
                self.kill(machine)
            run.communicate()

    def start(self, number):
        """Starts so many more."""
        launcher = "samestep --num_processes 1 --rdzv_backend c10d --max_restarts 20 --rdzv_conf "
        env = {"PET_NNODES": self.count, "PET_RDZV_ID": "test"}
        env["PET_RDZV_ENDPOINT"] = "{}:{}".format(*self.endpoint)
        for _ in range(number):
            run = self.project.launch(launcher + SOON, "cpu_multi", *self.flags, **env)
            self.launchers.append(run)

    def saved(self, processes, after=0):
        """Whether so many processes have saved a step after that one."""
        found = [json.loads(f.read_text()) for f in self.output.glob("checkpoints/step-*/man*")]
        newest = max(found, key=lambda each: each["step"], default={"step": 0})
        return newest["step"] > after and newest["hardware"]["processes"] == processes

    def wait(self, condition):
        """Waits until this is so, while the newest launcher lives."""
        wait_until(condition, self.launchers[-1], seconds=180)

    def last_step(self):
        return max(line["step"] for line in lines(self.output, "loss"))

    def kill(self, machine, workers_only=False):
        """kill -9 of a launcher and all that it has started, or only of its training process."""
        launcher = psutil.Process(self.launchers[machine].pid)
        for process in [launcher, *launcher.children(recursive=True)]:
            if not workers_only or "TORCHELASTIC_RUN_ID" in process.environ():
                process.kill()

    def end(self):
        """Waits for the launchers that are left; their exit codes, and what all have printed."""
        printed = [run.communicate(timeout=120)[0] for run in self.launchers]
        return [run.returncode for run in self.launchers], "".join(printed)


@pytest.mark.slow
def test_of_three_machines_one_is_lost_one_loses_its_process_and_another_comes(tiny, tmp_path):
    """Each launcher has counted another number of restarts. Samples, losses and bytes are those of
    one run."""
    output, unbroken, flags = tmp_path / "run", tmp_path / "unbroken", [*FLAGS, "--exact", "true"]
    with Machines(tiny, output, "2:3", *flags) as three:
        three.start(3)
        three.wait(lambda: three.saved(3))
        for machine, workers_only in ((0, False), (1, True)):
            three.kill(machine, workers_only)
            lost = three.last_step()
            three.wait(lambda lost=lost: three.saved(2, after=lost))
        three.start(1)
        three.wait(lambda: three.saved(3, after=lost))
        for run in three.launchers[1:]:
            run.send_signal(signal.SIGTERM)
        codes, printed = three.end()
    assert codes == [-signal.SIGKILL, 75, 75, 75], printed
    assert "Traceback" not in printed
    # To let the third in, the others were stopped after a step, and continued from it.
    stopped = [int(n) for n in re.findall(r"stopped after step (\d+);", printed)][:-1]
    assert any(step > lost for step in stopped)
    for step in stopped:
        assert f"continuing from {checkpoint(output, step)}" in printed
    flags += ["--max_steps", int(newest(output).name[5:]), "--task.row_seconds", 0]
    tiny.train(1, *flags, "--output_dir", unbroken)
    check_same(unbroken, output)


@pytest.mark.slow
def test_without_the_rendezvous_all_save_and_stop(tiny, tmp_path):
    with Machines(tiny, tmp_path / "run", "1:2", *FLAGS) as two:
        two.start(2)
        two.wait(lambda: two.saved(2))
        del two.rendezvous
        codes, printed = two.end()
    assert codes == [75, 75], printed
    assert int(newest(two.output).name[5:]) == two.last_step()
    assert status(two.output)["state"] == "stopped"


@pytest.mark.slow
def test_launch_py_does_not_restart_what_the_user_must_correct(tiny, tmp_path):
    poison = ["--task.poisoned", 1, "--task.samples", 2, "--max_skipped_steps", 2]
    flags = [*poison, "--output_dir", tmp_path / "run"]
    run = tiny.launch("samestep --max_restarts 5", "cpu_multi", *flags)
    printed = run.communicate(timeout=120)[0]
    assert run.returncode == 2 and printed.count("train.py: ") == 1, printed


ELASTIC = {"RANK": "1", "WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "id"}
ELASTIC |= {"TORCHELASTIC_MAX_RESTARTS": "3", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize("restarts, machines, shared, expected", cases("meetings"))
def test_where_restarted_processes_meet(monkeypatch, restarts, machines, shared, expected):
    """In a new store; or, where the launcher keeps its store, under another prefix in that."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"MASTER_PORT": store.port, "TORCHELASTIC_RESTART_COUNT": restarts}
    env |= {"GROUP_WORLD_SIZE": machines, "TORCHELASTIC_USE_AGENT_STORE": shared}
    for name, value in (ELASTIC | env).items():
        monkeypatch.setenv(name, str(value))
    if expected is None:
        with pytest.raises(errors.UserError, match="export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
            rendezvous.restart_store()
    elif place := rendezvous.restart_store():
        place.set("mine", "")
        assert store.check([f"{expected}/mine"])
    else:
        assert not expected


@pytest.mark.parametrize(
    "nodes, expected", [("2:4", ""), ("2:5", "10 processes; give at least 10, or start at most 8")]
)
def test_the_processes_of_all_machines_are_counted(quick, tmp_path, nodes, expected):
    """So that a machine too many does not come, and end the run of the others: the check of
    samestep launch knows it, and so does each process, here the only one that is left."""
    told = {"PET_NNODES": nodes, "LOCAL_WORLD_SIZE": "2"}
    left = ELASTIC | {"RANK": "0", "WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1", **told}
    left |= {"LOCAL_RANK": "0", "MASTER_PORT": "0"}
    flags = ["--output_dir", tmp_path, "--max_steps", 2, "--warmup_steps", 0]
    flags += ["--micro_batch_size", 1, "--exact", "true"]
    for env, more, said in ((told, ["--check"], "checked: "), (left, [], "step 2/2")):
        printed = quick(*flags, *more, codes=[2 if expected else 0], env=env)
        assert (expected or said) in printed and (not expected or printed.count("\n") == 1)


def test_the_lock_of_a_lost_machine_is_waited_for(tmp_path, monkeypatch):
    """A network disk lets go of it late. Only here it is a lock of this machine."""
    held, slept = run_folder.RunLock(tmp_path / "run"), []
    run_folder.RunLock.held.clear()  # as if by another process
    held.path.write_text(json.dumps({"pid": 1, "host": "gone", "since": "?"}))
    monkeypatch.setattr(run_folder, "LOCK_WAIT", 1)
    monkeypatch.setattr(run_folder.time, "sleep", slept.append)
    with pytest.raises(ValueError, match="is in use by process 1 on gone"):
        run_folder.RunLock(tmp_path / "run")
    assert slept == [0.1] * 30


def test_a_lock_whose_folder_is_removed_is_made_anew(tmp_path):
    """While another start waits for it."""
    held = run_folder.RunLock(tmp_path / "run")
    run_folder.RunLock.held.clear()
    leave = threading.Timer(0.5, lambda: (shutil.rmtree(tmp_path / "run"), held.file.close()))
    leave.start()
    lock = run_folder.RunLock(tmp_path / "run")
    leave.join()
    assert lock.is_intact() and lock.holder()["pid"] == os.getpid()


def test_a_run_of_the_same_process_takes_the_folder_over(tmp_path):
    """As a cell of a notebook that runs again; the run before it saves no more."""
    first = run_folder.RunLock(tmp_path / "run")
    second = run_folder.RunLock(tmp_path / "run")
    second.check_folder()
    with pytest.raises(ValueError, match="was taken over by another run of this process"):
        first.check_folder()
