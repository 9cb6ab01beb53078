"""Trials of train.py for samestep hardware tune: what they run on, and one trial from start to end.

This process computes nothing on a GPU and asks CUDA nothing, so that trials have all its memory.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from samestep.base.console import one_line
from samestep.processes.ranks import Failed, UserError
from samestep.settings import accelerate_yaml, config
from samestep.settings.mesh import Layout
from samestep.start import startup

WARM_UP = 5  # steps at least that are not measured
MARK = "HARDWARE_TRIAL"  # environment variable of all processes of a trial
FULL = "out of memory"
SURVEY = """import sys
from samestep.hardware import trials
trials.print_survey(sys.argv[1])"""


@dataclass
class Trial:
    """What a trial has shown: a speed, or a problem."""

    speed: float = 0.0  # loss terms per second, over all processes
    memory: float | None = None  # GB at most on a device, if train.py has measured it
    seconds: float = 0.0  # from the start to the first line of metrics, compilation included
    problem: str = ""
    code: int | None = None  # exit code, if it ended by itself


# ---- The hardware --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hardware:
    """What the trials run on."""

    file: Path  # the accelerate YAML
    precision: str  # its mixed_precision
    kind: str  # cuda, mps or cpu
    device: str  # its name
    capability: tuple[int, int] | None  # compute capability of the oldest GPU
    layout: Layout
    changes: dict[str, int]  # to the YAML: the number of processes, if nobody chose it


def print_survey(config_file: str) -> None:
    """Prints the fields of Hardware as JSON, or {"problem": line}; "": chooses as `make train`."""
    gpus, changes = torch.cuda.device_count(), {}
    oldest = min((torch.cuda.get_device_capability(i) for i in range(gpus)), default=None)
    if not config_file:
        precision = "bf16" if gpus and oldest >= (8, 0) else "fp16"
        name = f"{'multi' if gpus > 1 else 'single'}_gpu_{precision}" if gpus else "cpu"
        config_file = f"configs/accelerate/{name}.yaml"
        if gpus > 1:
            changes["num_processes"] = gpus
            os.environ["LAUNCH_PROCESSES"] = str(gpus)
    path, fields = Path(config_file), {}
    with contextlib.suppress(OSError, ValueError):  # read_hardware says what is wrong
        fields = config.plain_value(config.compose_yaml(config.read_small_file(path)))
    try:
        if isinstance(fields, dict) and fields.get("num_machines", 1) not in (0, 1):
            raise ValueError(f"{one_line(path)}: tune starts the processes of one machine only")
        layout = accelerate_yaml.read_hardware(path)
    except ValueError as error:
        print(json.dumps({"problem": str(error)}))
        return
    on_cpu = fields.get("use_cpu") or str(fields.get("gpu_ids")).startswith("-1")
    kind, device = "cpu", startup.versions()["cpu"]
    if not on_cpu and torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        names = {torch.cuda.get_device_name(i) for i in range(gpus)}
        device = ", ".join(sorted(names)) or kind
    found: dict[str, Any] = {"precision": str(fields.get("mixed_precision") or "no"), "kind": kind}
    found |= {"device": device, "capability": None if kind == "cpu" else oldest}
    found |= {"file": str(path), "changes": changes}
    print(json.dumps({**found, "layout": vars(layout)}))


def look_at_hardware(config_file: str) -> Hardware:
    """What this accelerate YAML starts on this machine; raises UserError if it cannot."""
    command = [sys.executable, "-c", SURVEY, config_file]
    child = subprocess.run(command, capture_output=True, text=True)
    if child.returncode:
        raise Failed(f"torch cannot look at the devices: {last_line(child.stderr)}")
    *remarks, answer = child.stdout.splitlines()
    for remark in remarks:
        print(remark)
    found = json.loads(answer)
    if "problem" in found:
        raise UserError(found["problem"])
    found["layout"]["kinds"] = tuple(found["layout"]["kinds"])
    found["capability"] = found["capability"] and tuple(found["capability"])
    return Hardware(Path(found.pop("file")), layout=Layout(**found.pop("layout")), **found)


# ---- A trial -------------------------------------------------------------------------------------


def environment(hardware: Hardware, folder: Path) -> dict[str, str]:
    """The environment of a trial: the threads that the Makefile gives to a run."""
    alone_on_cpu = hardware.kind == "cpu" and hardware.layout.processes == 1
    threads = min(os.cpu_count() or 1, 4) if alone_on_cpu else 1
    defaults = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(threads)}
    return {**defaults, **os.environ, MARK: str(folder)}


def run_program(words: list[str], hardware: Hardware, folder: Path) -> int:
    """Runs a program of the project to its end; its exit code. It speaks for itself on stderr."""
    env = environment(hardware, folder)
    env |= {f"LAUNCH_{n.removeprefix('num_').upper()}": str(v) for n, v in hardware.changes.items()}
    command = [sys.executable, *words]
    try:
        quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        return subprocess.run(command, env=env, start_new_session=True, **quiet).returncode
    finally:
        end_processes(str(folder))


def cut_lines(steps: int) -> tuple[int, int, int]:
    """(steps of a line, lines of the warm-up, lines to measure) for so many steps to measure.

    Each line waits for the device, so there are about five, and not one for each step.
    """
    every = max(1, steps // 5)
    return every, -(-WARM_UP // every), -(-steps // every)


def run_trial(folder: Path, hardware: Hardware, unit: str, steps: int, timeout: float) -> Trial:
    """Trains by hardware.yaml and recipe.yaml in this folder, for so many steps after the warm-up.

    The recipe's run folder is `folder`/run, and its lines are those of `cut_lines`. All processes
    are killed as soon as the lines are there: nothing of the run is kept.
    """
    _, warm_up, count = cut_lines(steps)
    command = [sys.executable, "-m", "samestep", "launch"]
    command += [
        "--config_file",
        f"{folder}/hardware.yaml",
        "train.py",
        "--config",
        f"{folder}/recipe.yaml",
    ]
    began, trial, found = time.monotonic(), Trial(), []
    with open(folder / "output", "wb") as output:
        try:
            launcher = subprocess.Popen(
                command,
                env=environment(hardware, folder),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # a Ctrl-C is for this program, which ends the trial
            )
            while len(found) < warm_up + count and trial.code is None:
                if time.monotonic() - began > timeout:
                    break
                time.sleep(0.1)
                trial.code = launcher.poll()
                found = read_lines(folder / "run" / "metrics.jsonl", f"{unit}_per_second")
                if found and not trial.seconds:
                    trial.seconds = time.monotonic() - began
        finally:
            end_processes(str(folder))
    measured = [each[f"{unit}_per_second"] for each in found[warm_up:]]
    peaks = [each["peak_memory_gb"] for each in found if each.get("peak_memory_gb")]
    trial.memory = max(peaks, default=None)
    text = (folder / "output").read_text(encoding="utf-8", errors="replace")
    if trial.code is not None and len(measured) < count:  # it ended by itself
        full = re.search("out of memory|memory is full|not enough memory|ALLOC_FAILED", text)
        trial.problem = FULL if full else last_line(text)
    elif not measured:
        trial.problem = f"{len(found)} of {warm_up + count} lines of metrics within {timeout} s"
    else:  # fewer lines than asked for, if the time was short
        trial.speed = median(measured)
    return trial


def read_lines(path: Path, key: str) -> list[dict]:
    """The complete lines of a metrics.jsonl that have a number of this name."""
    found = []
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):  # the last one is being written
                entries = json.loads(line)
                found += [entries] if key in entries else []
    return found


def last_line(text: str) -> str:
    """The line of an output that says what went wrong: ours, an exception's first, or the last."""
    lines = [line for line in text.splitlines() if line.strip()] or ["it said nothing"]
    own = [line for line in lines if line.startswith(("train.py:", "samestep launch:"))]
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Failed)\b", line)]
    return one_line((own or raised or lines)[-1].removeprefix("train.py:"), 200)


def end_processes(folder: str) -> None:
    """Kills the processes of trials in this folder, and waits until they free the device's memory.

    torchelastic gives each process a session of its own, and loaders have workers: what they have
    in common is a variable of their environment.
    """
    for _ in range(30):
        alive = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):  # ended, or of another user
                if f"{process.environ().get(MARK)}/".startswith(f"{folder}/"):
                    process.kill()
                    alive.append(process)
        if not alive:
            return
        psutil.wait_procs(alive, timeout=2)
    names = ", ".join(str(each.pid) for each in alive)
    raise Failed(f"process {names} of a trial does not end; end it, and start again")
