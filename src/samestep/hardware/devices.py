"""The devices to measure, and the programs that are started on them."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import yaml

from samestep.base.console import one_line
from samestep.processes.ranks import UserError

PREFIX: list[str] = []  # a program that runs the children: tests pretend in one to have a GPU
OF_LAUNCHERS = re.compile(
    r"(ACCELERATE|FSDP|PARALLELISM_CONFIG|PET|TORCHELASTIC|LAUNCH|GROUP|ROLE|MASTER)_"
    r"|(LOCAL_)?(RANK|WORLD_SIZE)$|LAUNCHING$|EXIT_CODE_FILE$"
)
MINUTES = 30  # of a program
PATIENCE = 20  # seconds in which processes end after a signal
SMI_SECONDS = 30  # nvidia-smi hangs where a driver does


class Devices(NamedTuple):
    """What trains: so many processes, with a device each."""

    kind: str  # cuda, mps or cpu
    count: int
    precision: str  # accelerate's mixed_precision
    yaml: Path  # under which all of them train

    def name(self, number: int) -> str:
        """The name by which torch knows a device."""
        return f"cuda:{number}" if self.kind == "cuda" else self.kind


def choose(config_file: Path | None, processes: int | None) -> Devices:
    """The devices of a YAML of accelerate and a number of processes; without them all GPUs."""
    values = yaml.safe_load(config_file.read_text(encoding="utf-8")) if config_file else {}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = accelerator.type if accelerator and not values.get("use_cpu") else "cpu"
    there = min(os.cpu_count() or 1, 2) if kind == "cpu" else torch.accelerator.device_count()
    count = processes or int(os.environ.get("LOCAL_WORLD_SIZE", 0))  # of a launcher
    if values and not count:
        count = int(values.get("num_processes", 1)) // int(values.get("num_machines", 1))
    count = count or there
    if kind != "cpu" and count > there:
        raise UserError(f"torch sees {there} GPUs; give --processes {there}, or fewer")
    precision, name = "no", {"mps": "mps", "cpu": "cpu" if count == 1 else "cpu_multi"}.get(kind)
    if kind == "cuda":
        # Older ones only emulate bf16. Asking torch would take memory of the first one.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        query = ["--query-gpu=compute_cap", "--format=csv"]
        _, printed = nvidia_smi(*(["-i", visible] if visible else []), *query)
        precision = "fp16" if re.search(r"^[1-7]\.", printed, re.MULTILINE) else "bf16"
        name = f"{'multi' if count > 1 else 'single'}_gpu_{precision}"
    precision = values.get("mixed_precision") or precision
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", precision)
    return Devices(kind, count, precision, config_file or Path(f"configs/accelerate/{name}.yaml"))


def nvidia_smi(*words: str) -> tuple[int, str]:
    """The exit code of nvidia-smi and what it prints; 127: it is not installed, -1: it hangs."""
    pipe = subprocess.PIPE
    try:
        program = subprocess.Popen(["nvidia-smi", *words], stdout=pipe, stderr=subprocess.STDOUT)
    except OSError:
        return 127, "nvidia-smi is not installed"
    try:
        printed, _ = program.communicate(timeout=SMI_SECONDS)
    except subprocess.TimeoutExpired:
        program.kill()  # it may wait for a driver: nobody waits for it
        return -1, f"nvidia-smi does not answer within {SMI_SECONDS} s"
    text = re.sub(r"\x1b\[[0-9;]*m", "", printed.decode(errors="replace"))
    return program.returncode, text.partition("\n\n")[0].expandtabs().rstrip()


def run(*commands: Sequence[object]) -> list[tuple[int | None, str]]:
    """Runs Python with each of these words, all at once: exit codes (None: it hangs), and output.

    They know nothing of the launcher of this program, and no process of them is left behind.
    """
    env = {name: text for name, text in os.environ.items() if not OF_LAUNCHERS.match(name)}
    until = time.monotonic() + 60 * MINUTES
    logs = [tempfile.TemporaryFile("w+", errors="replace") for _ in commands]
    children: list[subprocess.Popen] = []
    try:
        for words, log in zip(commands, logs, strict=True):
            command = [sys.executable, *map(str, words)]
            children.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(until - time.monotonic(), 0))
        codes = [child.poll() for child in children]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # a signal to this process raises once
        for child in children:
            if child.poll() is None:
                end_with_children(psutil.Process(child.pid))
    for log in logs:
        log.seek(0)
    return [(code, log.read()) for code, log in zip(codes, logs, strict=True)]


def end_with_children(process: psutil.Process) -> None:
    """Ends a process and all that it started: workers of torchelastic have their own sessions."""
    family = [*process.children(recursive=True), process]
    for each in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.terminate()
    for each in psutil.wait_procs(family, PATIENCE)[1]:
        each.kill()


def ask(what: str, *given: dict, launcher: Sequence[object] = ()) -> list[tuple[Any, str]]:
    """What a function of child.py finds out for each of these arguments, in a process of its own,
    and why it does not."""
    module = [*launcher, *PREFIX, "-m", "samestep.hardware.child", what]
    answers: list[tuple[Any, str]] = []
    for code, printed in run(*([*module, json.dumps(each)] for each in given)):
        last = (printed.strip().splitlines() or ["it prints nothing"])[-1]
        if code == 0:
            answers.append((json.loads(last), ""))
        elif code is None:
            answers.append((None, f"it hangs, for {MINUTES} minutes"))
        else:
            answers.append((None, one_line(last, 200)))
    return answers
