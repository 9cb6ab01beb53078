"""Signals and deaths, for real: what is saved, which exit code, who is left behind."""

import json
import os
import signal
import subprocess
import time

import psutil
import pytest

from conftest import lines
from test_training import FLAGS, digests, train

LONG = ["--max_steps", 100_000, "--warmup_steps", 4, "--log_every", 1, "--eval_every", 5]
WORKERS = ["--num_workers", 2, "--save_every", 0]


def start(project, hardware, output, *flags):
    """A run in a process group of its own, that has trained its third step."""
    command = ["accelerate", "launch", "--quiet", "--config_file"]
    command += [f"configs/accelerate/{hardware}.yaml", "train.py", *FLAGS, *LONG, *flags]
    command = [str(word) for word in [*command, "--output_dir", output]]
    signals = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"  # what the project's Makefile exports
    run = subprocess.Popen(
        command,
        cwd=project.path,
        env=project.env(PET_SIGNALS_TO_HANDLE=signals),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while not (output / "metrics.jsonl").exists() or len(lines(output, "loss")) < 3:
        assert run.poll() is None, run.stdout.read()
        assert time.monotonic() < deadline, "no third step within two minutes"
        time.sleep(0.05)
    return run, family(run)


def family(run):
    """The launcher, the processes that it started, and theirs."""
    launcher = psutil.Process(run.pid)
    return [launcher, *launcher.children(recursive=True)]


def end(run, processes):
    """Waits until all have ended; what was printed."""
    printed = run.communicate(timeout=90)[0]
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert not alive, f"left behind: {alive}\n{printed}"
    return printed


def status(output):
    return json.loads((output / "status.json").read_text())


def check_stopped(output, printed):
    """A checkpoint no more than a step older than the last line, and code 75."""
    assert status(output)["state"] == "stopped" and status(output)["exit_code"] == 75, printed
    last = lines(output, "loss")[-1]["step"]
    saved = max(int(p.name.removeprefix("step-")) for p in output.glob("checkpoints/step-*"))
    assert last - 1 <= saved <= last


@pytest.mark.parametrize(
    "hardware, name, whole_group",
    [
        ("cpu", "SIGTERM", False),
        ("cpu", "SIGINT", True),
        ("cpu", "SIGUSR1", False),
        ("cpu_multi", "SIGTERM", True),
        ("cpu_multi", "SIGUSR1", False),
        ("cpu_multi", "SIGINT", True),
    ],
)
def test_a_signal_saves_and_stops_every_process(project, tmp_path, hardware, name, whole_group):
    output = tmp_path / "run"
    run, processes = start(project, hardware, output, *WORKERS)
    (os.killpg if whole_group else os.kill)(run.pid, getattr(signal, name))
    check_stopped(output, end(run, processes))


def test_a_stopped_run_continues_to_the_same_bytes(project, tmp_path):
    """Stopped in the middle, by the launcher's death, and continued: like one that was not."""
    output, unbroken = tmp_path / "run", tmp_path / "unbroken"
    constant = ["--lr_schedule", "constant"]
    run, processes = start(project, "cpu", output, *constant)
    second = ["python", "train.py", *FLAGS, *LONG, *constant, "--output_dir", output]
    refused = project.run(*second, check=False)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert f"is in use by process {status(output)['pid']} on " in refused.stderr
    run.kill()
    end(run, processes)
    step = lines(output, "loss")[-1]["step"]
    assert status(output)["exit_code"] == 75
    flags = [*LONG, *constant, "--max_steps", step + 4]
    printed = train(project, "cpu", output, *flags, "--accept_changes", "true").stdout
    changes = f"max_steps: 100000 -> {step + 4}"
    assert f"event changed  changes {changes}\n" in printed
    assert lines(output, "event") == [{"step": step, "event": "changed", "changes": changes}]
    train(project, "cpu", unbroken, *flags)
    assert status(output)["state"] == "finished"
    name = f"checkpoints/step-{step + 4:08d}"
    hashes = {line["step"]: line["batch_hash"] for line in lines(output, "loss")}
    assert hashes == {line["step"]: line["batch_hash"] for line in lines(unbroken, "loss")}
    assert digests(output / name) == digests(unbroken / name)


def test_a_second_ctrl_c_quits_at_once_and_a_doubled_one_does_not(project):
    program = """
import os, signal, sys, time, process
stop = process.StopRequest()
stop.training = True
assert not stop.asked()
for _ in range(2):
    os.kill(os.getpid(), signal.SIGINT)
assert stop.asked()
print("asked", flush=True)
time.sleep(1.1)
os.kill(os.getpid(), signal.SIGINT)
print("not reached", flush=True)
"""
    result = project.run("python", "-c", program, check=False)
    assert result.returncode == 130 and result.stdout == "asked\n"


def test_killing_one_rank_ends_the_others(project, tmp_path):
    output = tmp_path / "run"
    run, processes = start(project, "cpu_multi", output)
    rank = next(p for p in processes if p.environ().get("RANK") == "1")
    rank.kill()
    printed = end(run, processes)
    assert run.returncode == 1 and "SIGKILL" in printed


def test_only_the_launcher_of_accelerate_is_missed_when_it_dies(project):
    """A shell whose command line merely names accelerate may go: think of `nohup ... &`."""
    program = "import process; print(process.LAUNCHER)"
    shell = f"python -c '{program}'; : accelerate launch"
    assert project.run("sh", "-c", shell, "accelerate notes").stdout == "None\n"
