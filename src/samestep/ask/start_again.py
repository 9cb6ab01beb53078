"""Trains steps again, as a record says, by the program that lies here.

A record (a receipt, the folder of a run) may come from a stranger. It says what decides the result.
What executes, writes or sends is said here, by flags or by the recipe of this folder: see `words`
for settings, `environments` for variables.
"""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml

from samestep.ask.recorded_run import HARDWARE, check, tell
from samestep.base import launching, run_folder
from samestep.base.console import one_line
from samestep.base.errors import UserError
from samestep.base.files import read_text
from samestep.settings import config

# Settings that leave no trace in the weights, with what they are where steps are trained again.
_QUIET = {"tracker": "none", "upload_code": False, "profile_steps": None, "check_export": False}
_QUIET |= {"eval_every": 0, "export": "last", "max_skipped_steps": 0}
_QUIET |= {"async_save": False, "keep_every": 0, "keep_checkpoints": 0}
# Variables on which rounding depends. Others, such as the path of a file, are none of a record's.
_VARIABLES = re.compile(
    r"ACCELERATE_(DOWNCAST_BF16|DYNAMO_\w+|FP8_\w+|USE_FSDP|USE_PARALLELISM_CONFIG)"
    r"|FSDP_(ACTIVATION_CHECKPOINTING|AUTO_WRAP_POLICY|BACKWARD_PREFETCH|CPU_RAM_EFFICIENT_LOADING"
    r"|FORWARD_PREFETCH|MIN_NUM_PARAMS|OFFLOAD_PARAMS|RESHARD_AFTER_FORWARD|STATE_DICT_TYPE"
    r"|SYNC_MODULE_STATES|TRANSFORMER_CLS_TO_WRAP|USE_ORIG_PARAMS|VERSION)"
    r"|PARALLELISM_CONFIG_DP_(REPLICATE|SHARD)_SIZE"
)
_WORDS = re.compile(r"[\w.,-]{0,200}", re.ASCII)
_PRECISIONS = {"fp32": "no", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}
_MOST = 64  # processes that a record starts; more only a flag


def is_received(name: str, field: Any) -> bool:
    """Whether a record may give this field. What executes, writes or sends changes nothing of the
    result: metadata=NOTHING; other metadata says `received`."""
    decides = field.metadata.get("changes") != "nothing" or name in ("save_every", "device_shares")
    return field.metadata.get("received", decides)


def words(settings: dict, folder: Path, flags: list[str]) -> list[str]:
    """The words by which train.py, or what reads its data, takes the settings of a record.

    Of a field that a record may not give, but does, the value of the recipe here counts. Raises
    ValueError for names that are no fields, and for values of another type.
    """
    from samestep.run import startup  # torch: 4 s

    fields, here = config.fields_of(startup.find_project()[0].Config), Path(config.RECIPE)
    with config.naming("the settings of the record"):
        found = config.read_values(settings, fields)
    with config.naming(here):
        own = config.read_values(config.read_yaml(read_text(here)), fields) if here.exists() else {}
    for name, (_, field) in fields.items():
        if not is_received(name, field) and found.pop(name, None) != field.default and name in own:
            found[name] = own[name]
    found |= {name: value for name, value in _QUIET.items() if name in fields}
    found["output_dir"] = str(folder / "run")
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(found), encoding="utf-8")
    return ["--config", str(recipe), *flags]


def environments(variables: dict, hardware: dict, processes: int) -> list[dict[str, str]]:
    """The environment of each process that trains steps again, by the variables of a hardware.yaml
    and the hardware of a manifest: as many as there were, or so many."""
    check(HARDWARE, hardware, "the hardware of the record")
    if not processes and hardware["processes"] > _MOST:
        raise UserError(f"it has trained on {hardware['processes']} processes; give --processes")
    if hardware["precision"] not in _PRECISIONS:
        raise UserError(f"a precision of {one_line(hardware['precision'], 60)} is not known")
    processes = processes or hardware["processes"]
    env = launching.without_yaml(os.environ)
    for name, text in variables.items():
        if _VARIABLES.fullmatch(name):
            if not _WORDS.fullmatch(text):
                raise UserError(f"the environment of the record: {name} is {one_line(text, 60)}")
            env[name] = text
    env["ACCELERATE_MIXED_PRECISION"] = _PRECISIONS[hardware["precision"]]
    env["OMP_NUM_THREADS"] = str(hardware["threads"])
    if "gpu" not in hardware:
        env["ACCELERATE_USE_CPU"] = "true"
    if processes == 1 and "ACCELERATE_USE_FSDP" not in env:  # which needs a place to shard at all
        return [env]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    env |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    return [env | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


@contextlib.contextmanager
def started(
    command: list[str], envs: list[dict], log: Path, folder: Path | None = None
) -> Iterator[list[subprocess.Popen]]:
    """Starts a command once in each of these environments, without a terminal; in the end kills it,
    and what it has started."""
    with open(log, "w") as file:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
        envs = [env | {launching.NO_MIRROR: "1"} for env in envs]
        processes = [subprocess.Popen(command, env=env, cwd=folder, **streams) for env in envs]
    try:
        yield processes
    finally:
        for each in processes:
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(each.pid).children(recursive=True):
                    child.kill()
            each.kill()
            each.wait()


def finished(command: list[str], envs: list[dict], log: Path, seconds: float | None = None) -> int:
    """Waits for a command in each of these environments; the exit code, or 124: no end in time."""
    with started(command, envs, log) as processes:
        try:
            return max(abs(each.wait(seconds)) for each in processes)
        except subprocess.TimeoutExpired:
            return 124


def last_line(log: Path) -> str:
    """The last line that was printed."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line]
    return one_line((lines or ["nothing was printed"])[-1])


def answered(question: dict, trained: dict, args: Namespace) -> dict[str, Any]:
    """What training.replay answers where the program of the run, or the command that is given,
    trains again; see RecordedRun.replayed."""
    envs = environments(trained["environment"], trained["hardware"], args.processes)
    with tempfile.TemporaryDirectory(prefix="replay-") as scratch:
        folder, command = Path(scratch), args.command
        (folder / "question.json").write_text(json.dumps(question))
        if not command:
            command = [sys.executable, "train.py", *words(trained["settings"], folder, args.flags)]
            command += ["--resume", question["checkpoint"], "--accept_changes"]  # data are compared
        asked = {"SAMESTEP_REPLAY": scratch, "WANDB_MODE": "disabled"}
        tell(f"trains again, from step {question['begin'] + 1} to {question['last']}")
        finished(command, [env | asked for env in envs], folder / "log")
        if not (folder / "answer.json").exists():
            reason = last_line(folder / "log")
            raise UserError(f"the run ended before step {question['last']}: {reason}")
        found = json.loads((folder / "answer.json").read_text())
        lines = run_folder.read_metrics(folder / "run")
        return found | {"lines": [each for each in lines if "loss" in each]}
