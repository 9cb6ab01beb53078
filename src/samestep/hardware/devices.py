"""The devices to test, the processes in which they are tested, and what is wrong with them."""

import contextlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from samestep.base.console import one_line
from samestep.base.errors import UserError
from samestep.launch import launched, launcher
from samestep.settings import config

PREFIX: list[str] = []  # a program that runs the children: tests pretend in one to have a GPU
_OF_LAUNCHERS = re.compile(
    r"(ACCELERATE|FSDP|PARALLELISM_CONFIG|PET|TORCHELASTIC|LAUNCH|GROUP|ROLE|MASTER)_"
    r"|(LOCAL_)?(RANK|WORLD_SIZE)$|LAUNCHING$|EXIT_CODE_FILE$"
)
MINUTES = 30  # of a program
_SMI_SECONDS = 30  # nvidia-smi hangs where a driver does
LOST = r".*(?:GPU is lost|fallen off|Unable to determine the device handle|Unknown Error).*"
_STATE = "--query-gpu=index,temperature.gpu,power.draw,power.limit,clocks.sm,clocks.max.sm"
ERRORS = "--query-gpu=index,ecc.errors.uncorrected.volatile.total,remapped_rows.pending"


class Wrong(Exception):
    """A test that failed."""


@dataclass
class Section:
    """A part of the report. `failures` make samestep hardware exit with 1."""

    facts: dict[str, str] = field(default_factory=dict)
    figures: dict[str, list[float]] = field(default_factory=dict)  # of each device, in this order
    lines: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def short(value: float) -> str:
    """A number with four digits, or all before the point: 0.1234, 12.34, 12,345."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


class Devices(NamedTuple):
    """What trains: so many processes, with a device each."""

    kind: str  # cuda, mps or cpu
    count: int
    precision: str  # accelerate's mixed_precision
    yaml: Path  # under which all of them train


def choose(config_file: Path | None, processes: int | None) -> Devices:
    """The devices of a YAML of accelerate and a number of processes. Without a YAML those that
    `make train` takes: all GPUs of NVIDIA and AMD, else the CPU, here for two processes."""
    count = processes or int(os.environ.get("LOCAL_WORLD_SIZE", 0))  # of a launcher
    on_cpu, precision = False, None
    if config_file:
        with config.naming(config_file):
            values = launcher.read_yaml(str(config_file))
            # cpu_multi.yaml hides GPUs by gpu_ids.
            on_cpu = values.use_cpu or str(values.gpu_ids).startswith("-1")
            precision = values.mixed_precision
            count = count or values.num_processes // values.num_machines
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = "cpu"
    if accelerator and not on_cpu and (config_file or accelerator.type == "cuda"):
        kind = accelerator.type
    if kind not in ("cpu", "cuda", "mps"):
        raise UserError(f"samestep hardware tests GPUs of NVIDIA, AMD and Apple, not {kind}")
    there = min(os.cpu_count() or 1, 2) if kind == "cpu" else torch.accelerator.device_count()
    count = count or there
    if kind != "cpu" and count > there:
        raise UserError(f"torch sees {there} GPUs; give --processes {there}, or fewer")
    usual, name = "no", "cpu" if count == 1 else "cpu_multi"
    if kind == "cuda":
        # Older ones only emulate bf16. Asking torch would take memory of the first one.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        query = ["--query-gpu=compute_cap", "--format=csv"]
        _, printed = nvidia_smi(*(["-i", visible] if visible else []), *query)
        usual = "fp16" if re.search(r"^[1-7]\.", printed, re.MULTILINE) else "bf16"
        name = f"{'multi' if count > 1 else 'single'}_gpu_{usual}"
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", precision or usual)
    return Devices(kind, count, precision, config_file or Path(f"configs/accelerate/{name}.yaml"))


def nvidia_smi(*words: str) -> tuple[int | None, str]:
    """The exit code of nvidia-smi (None: it hangs; 127: not installed), and what it prints."""
    try:
        return run(["nvidia-smi", *words], _SMI_SECONDS)
    except OSError:
        return 127, ""


def run(command: Sequence[object], seconds: float = 60 * MINUTES) -> tuple[int | None, str]:
    """Runs a program: its exit code (None: it hangs), and what it prints.

    It knows nothing of the launcher of this program, and no process of it is left behind.
    """
    env = {name: text for name, text in os.environ.items() if not _OF_LAUNCHERS.match(name)}
    code = None
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        child = psutil.Popen([*map(str, command)], env=env, stdout=log, stderr=log)
        try:
            with contextlib.suppress(psutil.TimeoutExpired):
                code = child.wait(seconds)
        finally:
            if child.is_running():
                # Workers of torchelastic have sessions of their own. None of them saves anything.
                for each in [child, *child.children(recursive=True)]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.kill()
        log.seek(0)
        return code, log.read().strip()


def ask(what: str, used: Devices, **given: Any) -> Any:
    """What a function of bench.py finds out, in a process for each device; raises Wrong."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", used.count]
    given = json.dumps({"kind": used.kind, **given})
    module = [*PREFIX, "-m", "samestep.hardware.bench", what, given]
    code, printed = run([sys.executable, *torchrun, *module])
    if code == 0:
        (line,) = re.findall(r'^{"answer": .*', printed, re.MULTILINE)
        return json.loads(line)["answer"]
    if code is None:
        raise Wrong(f"it hangs, for {MINUTES} minutes")
    errors = re.findall(r"^(?:\[rank\d+\]: )?[\w.]+(?:Error|Exception)\b.*", printed, re.MULTILINE)
    raise Wrong(one_line([printed.rpartition("\n")[2], *errors][-1], 200))


def check(section: Section, used: Devices) -> None:
    """What this machine is, and what is wrong with it."""
    _look_at_nvidia_smi(section)
    for rank, (name, free, problem) in enumerate(ask("look", used)):
        section.facts[f"device {rank}"] = name
        if problem:
            section.failures.append(f"device {rank}: {problem}")
        elif free < 0.9:
            section.lines.append(f"device {rank} has {free:.0%} of its memory free")


def _look_at_nvidia_smi(section: Section) -> None:
    """Adds what it says of GPUs that torch may not see, of their errors, and facts."""
    code, listed = nvidia_smi("-L")
    if code is None:
        listed = f"it does not answer within {_SMI_SECONDS} s"
    else:  # collect_env asks it again
        for module in ("torch.utils.collect_env", "accelerate.commands.env"):
            section.facts[module] = run([sys.executable, "-m", module])[1]
    there, seen = len(re.findall(r"^GPU \d", listed, re.M)), torch.accelerator.device_count()
    lost = re.findall(LOST, listed, re.IGNORECASE)
    if lost or code not in (0, 127):
        line = one_line([listed, *lost][-1], 200)
        section.failures.append(f"nvidia-smi: {line}; see docs/problems.md, a lost GPU")
    if there > seen and "CUDA_VISIBLE_DEVICES" not in os.environ:
        text = f"torch sees {seen} GPUs, and nvidia-smi lists {there}"
        if seen:
            section.lines.append(text)
        else:
            section.failures.append(f"{text}: {launched.without_gpu()}")
    if code != 0:
        return
    section.facts["nvidia-smi"] = nvidia_smi(_STATE, "--format=csv")[1]
    unknown, errors = nvidia_smi(ERRORS, "--format=csv,noheader")  # to old cards and drivers
    for line in errors.splitlines() if not unknown else ():
        index, uncorrected, pending = [word.strip() for word in line.split(",")]
        if uncorrected not in ("0", "[N/A]") or pending == "Yes":
            section.failures.append(
                f"GPU {index} has errors in its memory (ECC: {uncorrected} uncorrected; rows to be "
                f"replaced: {pending}), so numbers may be wrong: reset it, or take it out"
            )
