"""Starts a program of a project as the processes of a run were started."""

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml

from samestep.base import launching

# Settings that leave no trace in the weights, with what they are where steps are trained again.
_QUIET = {"tracker": "none", "profile_steps": None, "async_save": False, "export": "last"}
_QUIET |= {"eval_every": 0, "keep_every": 0, "keep_checkpoints": 0, "check_export": False}


def write_recipe(settings: dict, folder: Path) -> str:
    """Writes a recipe that trains with these settings in folder/run; its path."""
    path = folder / "recipe.yaml"
    quiet = {name: value for name, value in _QUIET.items() if name in settings}
    settings = settings | quiet | {"output_dir": str(folder / "run")}
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return str(path)


def environments(variables: dict, hardware: dict, processes: int) -> list[dict[str, str]]:
    """The environment of each process that trains steps again, by the variables of a hardware.yaml
    and the hardware of a manifest: as many as there were, or so many."""
    processes = processes or hardware["processes"]
    env = launching.without_yaml(os.environ)
    env |= {n: text for n, text in variables.items() if n.startswith(launching.PREFIXES)}
    env["ACCELERATE_MIXED_PRECISION"] = hardware["precision"].replace("fp32", "no")
    env["OMP_NUM_THREADS"] = str(hardware["threads"])
    if "gpu" not in hardware:
        env["ACCELERATE_USE_CPU"] = "true"
    if processes == 1:
        return [env]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    env |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    return [env | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


@contextlib.contextmanager
def started(command: list[str], envs: list[dict], **streams: Any) -> Iterator[list]:
    """Starts a command once in each of these environments; in the end kills it, and what it has
    started."""
    processes = [subprocess.Popen(command, env=env, **streams) for env in envs]
    try:
        yield processes
    finally:
        for each in processes:
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(each.pid).children(recursive=True):
                    child.kill()
            each.kill()
            each.wait()


def start(command: list[str], envs: list[dict[str, str]]) -> int:
    """Runs a command once in each of these environments, silently; the exit code of the first that
    failed, or 0."""
    with started(command, envs, stdout=subprocess.DEVNULL) as processes:
        codes = [each.wait() for each in processes]
    return next((code for code in codes if code), 0)
