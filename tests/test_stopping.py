"""Signals and deaths, for real: what is saved, which exit code, who is left behind."""

import os
import random
import re
import signal
import time

import psutil
import pytest

from conftest import lines, newest, status, trained, wait_until
from refusals import cases
from same import check_same
from samestep.base import run_folder

# Steps of 25 ms without an end in sight, evaluated and saved now and then.
LONG = ["--max_steps", 100_000, "--eval_every", 10, "--task.row_seconds", 0.003]
WORKERS = ["--num_workers", 2, "--save_every", 0]


def family(run):
    """The launcher, the processes that it started, and theirs."""
    launcher = psutil.Process(run.pid)
    return [launcher, *launcher.children(recursive=True)]


def kill_all(run):
    """kill -9 of the launcher and all that it started, in whatever process group."""
    for process in family(run):
        process.kill()
    run.communicate()


def begin(project, launcher, hardware, output, *flags):
    """A run that has trained its third step, and its processes."""
    run = project.launch(launcher, hardware, *LONG, "--output_dir", output, *flags)
    wait_until(lambda: trained(output, 3), run)
    return run, family(run)


def end(run, processes):
    """Waits until all have ended; what was printed."""
    printed = run.communicate(timeout=300)[0]
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive, f"left behind: {alive}\n{printed}"
    return printed


SIGNALS = cases("signals")


def stop(tiny, output, launcher, hardware, name, whole_group):
    """Begins a run with worker processes, and stops it with a signal: a checkpoint no more than a
    step older than the last line, and code 75."""
    run, processes = begin(tiny, launcher, hardware, output, *WORKERS)
    (os.killpg if whole_group else os.kill)(run.pid, getattr(signal, name))
    printed = end(run, processes)
    assert status(output)["state"] == "stopped" and status(output)["exit_code"] == 75, printed
    last = lines(output, "loss")[-1]["step"]
    assert last - 1 <= int(newest(output).name[5:]) <= last
    assert "Traceback" not in printed or "SignalException" in printed  # torchelastic's
    if launcher == "samestep":
        said = printed.splitlines()[-1]
        assert re.fullmatch(r"stopped after step \d+; the same command continues the run", said)
        assert run.returncode == 75 and not re.search("Traceback|Error|torch|Signal", printed)


@pytest.mark.slow
@pytest.mark.parametrize("case", SIGNALS[:2], ids=lambda case: case[2])
def test_a_signal_saves_and_stops_every_process(tiny, tmp_path, case):
    stop(tiny, tmp_path / "run", *case)


def test_a_stopped_run_continues_to_the_same_bytes(tiny, tmp_path):
    """Stopped in the middle, by the launcher's death, and continued: like one that was not."""
    output, unbroken = tmp_path / "run", tmp_path / "unbroken"
    constant = ["--lr_schedule", "constant", "--task.dropout", 0.2]
    run, processes = begin(tiny, "accelerate", "cpu", output, *constant)
    for process in processes:
        process.suspend()
    soon = "from samestep.base import run_folder; run_folder.LOCK_WAIT = 5"
    refused = tiny.train(1, *LONG, *constant, "--output_dir", output, before=soon, codes=[2])
    for process in processes:
        process.resume()
    assert refused.count("\n") == 1
    assert f"is in use by process {status(output)['pid']} on " in refused
    run.kill()
    end(run, processes)
    step = lines(output, "loss")[-1]["step"]
    assert status(output)["exit_code"] == 75
    flags = [*LONG, *constant, "--max_steps", step + 4]
    tiny.train(1, "--output_dir", output, *flags, "--accept_changes")
    changes = {"max_steps": [100000, step + 4]}
    assert lines(output, "event") == [{"step": step, "event": "changed", "changes": changes}]
    tiny.train(1, "--output_dir", unbroken, *flags)
    check_same(unbroken, output)


def test_processes_that_lose_their_launcher_save_together(tiny, tmp_path):
    """torch's store dies with it: who is where cannot be said, and nobody needs it."""
    run, processes = begin(tiny, "accelerate", "cpu_multi", tmp_path)
    run.kill()
    end(run, processes)
    assert status(tmp_path)["exit_code"] == 75
    assert int(newest(tmp_path).name[5:]) == lines(tmp_path, "loss")[-1]["step"]


CHAIN = ["--max_steps", 80, "--save_every", 7, "--eval_every", 20, "--keep_checkpoints", 2]
CHAIN += ["--task.dropout", 0.2, "--num_workers", 1, "--task.row_seconds", 0.003]


@pytest.mark.slow
def test_two_random_kills_in_a_chain_change_no_bit(tiny, tmp_path):
    """kill -9 of everything, at moments that no two test runs share."""
    output, unbroken = tmp_path / "run", tmp_path / "unbroken"
    for _ in range(2):
        run = tiny.launch("accelerate", "cpu_multi", *CHAIN, "--output_dir", output)
        before = len(lines(output, "loss")) if (output / "metrics.jsonl").exists() else 0
        wait_until(lambda before=before: trained(output, before + 1), run)
        time.sleep(random.uniform(0, 1))
        kill_all(run)
    tiny.train(2, *CHAIN, "--output_dir", output)
    tiny.train(2, *CHAIN, "--output_dir", unbroken)
    check_same(unbroken, output)


def test_workers_do_not_hold_the_folder_of_a_run_that_was_killed(tiny, tmp_path, monkeypatch):
    """They live on for seconds; the next start does not wait for them."""
    (run,) = tiny.start(1, *LONG, "--num_workers", 2, "--output_dir", tmp_path)
    wait_until(lambda: trained(tmp_path, 3), run)
    workers = family(run)[1:]
    for worker in workers:
        worker.suspend()
    run.kill()
    run.wait()
    monkeypatch.setattr(run_folder, "LOCK_WAIT", 2)
    try:
        assert len(workers) >= 2 and all(worker.is_running() for worker in workers)
        run_folder.RunLock(tmp_path).file.close()
    finally:
        for worker in workers:
            worker.kill()


def test_a_signal_before_the_first_step_ends_the_run_at_once(tiny, tmp_path):
    """There is nothing to save; 75 says that another start will do."""
    flags = [*LONG, "--output_dir", tmp_path / "run", "--task.prepare_seconds", 30]
    run = tiny.launch("samestep", "cpu", *flags)
    assert run.stdout.readline() == "preparing\n"
    processes = family(run)
    os.kill(run.pid, signal.SIGINT)
    printed = end(run, processes)
    assert run.returncode == 75 and not (tmp_path / "run").exists()
    said = "train.py: stopped before the first step; the same command starts again\n"
    assert printed.endswith(said) and printed.count("train.py: ") == 1


IMPORTS = """
import os, sys, time
if "--check" not in sys.argv:
    open("rank-" + os.environ["RANK"], "w")
    time.sleep(100)
"""


def test_a_signal_while_several_processes_import_is_one_line(tiny, tmp_path):
    """torchelastic has handlers of its own. A train.py that handles no signal yet stands for one
    that imports."""
    project = tiny.copied(tmp_path)
    (project.path / "train.py").write_text(IMPORTS)
    run = project.launch("samestep", "cpu_multi")
    wait_until(lambda: len([*project.path.glob("rank-?")]) == 2, run)
    processes = family(run)
    os.kill(run.pid, signal.SIGUSR1)
    printed = end(run, processes)
    assert run.returncode == 75
    assert "stopped without saving" in printed and printed.count("\n") == 1


def test_a_second_ctrl_c_quits_at_once_and_a_doubled_one_does_not(project):
    """Nor does the first one after another signal: it may come in the middle of the save."""
    program = """
import os, signal, time
from samestep.launch import shutdown
stop = shutdown.StopRequest()
stop.training = True
os.kill(os.getpid(), signal.SIGTERM)
assert stop.requested()
time.sleep(1.1)
for _ in range(2):
    os.kill(os.getpid(), signal.SIGINT)
print("asked", flush=True)
time.sleep(1.1)
os.kill(os.getpid(), signal.SIGINT)
print("not reached", flush=True)
"""
    result = project.run("python", "-c", program, check=False)
    assert result.returncode == 130 and result.stdout == "asked\n"


def test_a_worker_that_a_pool_starts_while_the_process_leaves_ends(project):
    program = """
import os
from samestep.launch import shutdown
stop = shutdown.StopRequest()
stop.leaving = True
pid = os.fork()
if not pid:
    os._exit(9)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert project.run("python", "-c", program).stdout == "75\n"


PREPARING = """

def prepare_data(cfg, folder):
    import datasets

    def wait(row):
        open(f"at-{os.getpid()}", "w").close()
        while not os.path.exists("go"):
            time.sleep(0.1)
        return row

    rows = datasets.Dataset.from_dict({"row": range(8)})
    try:
        return datasets.DatasetDict(train=rows.map(wait, num_proc=2), validation=rows)
    finally:
        open("cleaned", "w").close()
"""


def test_a_signal_while_workers_prepare_leaves_none_behind(tiny, tmp_path):
    """Twice, to the whole group: one line, code 75, and what a kill -9 leaves: the next start waits
    for no lock, and removes the rest of the preparation, also where it prepares something else."""
    project = tiny.copied(tmp_path, PREPARING)
    flags = ["--output_dir", "run", "--max_steps", 2]
    (run,) = project.start(1, *flags)
    wait_until(lambda: len([*project.path.glob("at-*")]) == 2 or run.poll() is not None)
    processes = family(run)
    assert len(processes) >= 3
    for _ in range(2):
        os.killpg(run.pid, signal.SIGTERM)
    said = run.communicate(timeout=60)[1]
    alive = psutil.wait_procs(processes, timeout=10)[1]
    assert not alive and run.returncode == 75, said
    assert said.endswith("train.py: stopped before the first step; the same command starts again\n")
    assert said.count("train.py: ") == 1 and "Traceback" not in said
    assert not (project.path / "cleaned").exists()
    assert [*project.path.glob(".cache/*/*.partial")]
    (project.path / "go").touch()
    project.train(1, *flags, "--task.seed", 1)
    assert not [*project.path.glob(".cache/*/*.partial")]
