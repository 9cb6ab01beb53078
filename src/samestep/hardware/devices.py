"""The devices to test, and the processes in which they are tested."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
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


class Wrong(Exception):
    """A test that failed."""


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
    return program.returncode, printed.decode(errors="replace").strip()


def run_python(words: Sequence[object]) -> tuple[int | None, str]:
    """Runs Python with these words: its exit code (None: it hangs), and what it prints.

    It knows nothing of the launcher of this program, and no process of it is left behind.
    """
    env = {name: text for name, text in os.environ.items() if not OF_LAUNCHERS.match(name)}
    command = [sys.executable, *map(str, words)]
    code = None
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        child = psutil.Popen(command, env=env, stdout=log, stderr=log)
        try:
            with contextlib.suppress(psutil.TimeoutExpired):
                code = child.wait(60 * MINUTES)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)  # a signal to this process raises once
            if child.is_running():
                # Workers of torchelastic have sessions of their own.
                family = [*child.children(recursive=True), child]
                for each in family:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.terminate()
                for each in psutil.wait_procs(family, PATIENCE)[1]:
                    each.kill()
        log.seek(0)
        return code, log.read()


def ask(what: str, launcher: Sequence[object] = (), **given: Any) -> Any:
    """What a function of child.py finds out, in a process of its own; raises Wrong."""
    module = [*launcher, *PREFIX, "-m", "samestep.hardware.child", what, json.dumps(given)]
    code, printed = run_python(module)
    if code == 0:
        (line,) = re.findall(r'^{"answer": .*', printed, re.MULTILINE)
        return json.loads(line)["answer"]
    if code is None:
        raise Wrong(f"it hangs, for {MINUTES} minutes")
    errors = re.findall(r"^(?:\[rank\d+\]: )?[\w.]+(?:Error|Exception)\b.*", printed, re.MULTILINE)
    last = printed.strip().rpartition("\n")[2]
    raise Wrong(one_line([last, *errors][-1], 200))
