"""The devices to measure, and the Python programs that are started on them."""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
import yaml

from samestep.processes.ranks import UserError

CONFIGS = Path("configs/accelerate")
PREFIX: list[str] = []  # a program that runs the children; tests pretend in it that there is a GPU
OF_LAUNCHERS = re.compile(
    r"(ACCELERATE|FSDP|PARALLELISM_CONFIG|PET|TORCHELASTIC|LAUNCH|GROUP|ROLE|MASTER)_"
    r"|(LOCAL_)?(RANK|WORLD_SIZE)$|LAUNCHING$|EXIT_CODE_FILE$"
)
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
        return -1, f"nvidia-smi does not answer within {SMI_SECONDS} s"
    finally:
        program.kill()  # one that waits for a driver ends later: nobody waits for it
    text = re.sub(r"\x1b\[[0-9;]*m", "", printed.decode(errors="replace"))
    return program.returncode, text.partition("\n\n")[0].expandtabs().rstrip()


def choose(options: argparse.Namespace) -> Devices:
    """All devices of this machine, or those of --config_file and --processes."""
    values = {}
    if options.config_file:
        values = yaml.safe_load(options.config_file.read_text(encoding="utf-8")) or {}
    on_gpu = torch.accelerator.is_available() and not values.get("use_cpu")
    kind = torch.accelerator.current_accelerator().type if on_gpu else "cpu"  # type: ignore
    there = torch.accelerator.device_count() if on_gpu else min(os.cpu_count() or 1, 2)
    count = options.processes or int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    if values and not count:
        count = int(values.get("num_processes", 1)) // int(values.get("num_machines", 1))
    count = count or there
    if on_gpu and count > there:
        raise UserError(f"torch sees {there} GPUs; give --processes {there}, or fewer")
    precision, family = "no", "cpu"
    if kind == "cuda":
        # Such GPUs only emulate bf16. Asking torch would take memory of the first one.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        chosen = ["-i", visible] if visible else []
        _, printed = nvidia_smi(*chosen, "--query-gpu=compute_cap", "--format=csv")
        precision = "fp16" if re.search(r"^[1-7]\.", printed, re.MULTILINE) else "bf16"
        family = f"{'multi' if count > 1 else 'single'}_gpu_{precision}"
    elif kind == "mps":
        family = "mps"
    elif count > 1:
        family = "cpu_multi"
    precision = values.get("mixed_precision") or precision
    precision = options.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", precision)
    return Devices(kind, count, precision, options.config_file or CONFIGS / f"{family}.yaml")


def clean_environment() -> dict[str, str]:
    """This process's environment without what a launcher has told it."""
    return {name: text for name, text in os.environ.items() if not OF_LAUNCHERS.match(name)}


def run(*words: object, seconds: float) -> tuple[int | None, str]:
    """Runs Python with these words: the exit code, None after so many seconds, and the output.

    No process that it starts is left behind, however this function ends.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        command = [sys.executable, *map(str, words)]
        child = subprocess.Popen(command, env=clean_environment(), stdout=log, stderr=log)
        code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = child.wait(seconds)
        finally:
            if code is None:
                signal.setitimer(signal.ITIMER_REAL, 0)  # a signal to this process raises once
                end_with_children(child)
        log.seek(0)
        return code, log.read()


def end_with_children(child: subprocess.Popen) -> None:
    """Ends a process and all that it has started: workers of torchelastic have own sessions."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [*psutil.Process(child.pid).children(recursive=True), psutil.Process(child.pid)]
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.terminate()
        for each in psutil.wait_procs(family, PATIENCE)[1]:
            each.kill()
