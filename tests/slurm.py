"""A Slurm of two nodes on this machine, for tests: munged, slurmctld, two slurmd, no cgroups.

Each node has two CPUs, and pretends to have a GPU. Everything runs as the user who starts it, and
lies in one folder.
"""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
ADVICE = "apt-get install munge slurmctld slurmd slurm-client"

HERE = Path(__file__).parent


class Slurm:
    """A running Slurm, and its commands."""

    def __init__(self, folder):
        self.folder = folder
        self.env = {"SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command, cwd=None, **env):
        """What a command of Slurm prints."""
        env = os.environ | self.env | env
        given = {"cwd": cwd, "env": env, "check": True, "capture_output": True, "text": True}
        return subprocess.run([*map(str, command)], **given).stdout.strip()

    def job(self, number):
        """The fields of a job."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)


def free_ports(number):
    """Ports that nobody uses now."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


@contextlib.contextmanager
def started(folder):
    """A Slurm in this folder; skips the test if there can be none."""
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    missing = [name for name in PROGRAMS if not shutil.which(name, path=path)]
    if missing:
        pytest.skip(f"no {', '.join(missing)}: {ADVICE}")
    (folder / "state").mkdir(parents=True)
    folder.chmod(0o755)
    config = (HERE / "slurm.conf").read_text()
    place = {"host": os.uname().nodename, "folder": folder, "user": getpass.getuser()}
    (folder / "slurm.conf").write_text(config.format(ports=free_ports(3), **place))
    shutil.copy(HERE / "slurm_gres.conf", folder / "gres.conf")
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    slurm, daemons = Slurm(folder), []
    env = os.environ | slurm.env | {"PATH": path}
    munge = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket"]
    for kind in ("key", "pid", "log", "seed"):
        munge.append(f"--{kind}-file={folder}/munge.{kind}")
    commands = [munge, ["slurmctld", "-D"], ["slurmd", "-D", "-N", "n1"]]
    commands.append(["slurmd", "-D", "-N", "n2"])
    try:
        for command in commands:
            streams = dict.fromkeys(("stdin", "stdout"), subprocess.DEVNULL)
            streams["stderr"] = open(folder / f"{command[0]}{len(daemons)}.err", "w")
            daemons.append(subprocess.Popen(command, env=env, cwd=folder, **streams))
            if command[0] == "munged":
                wait_for((folder / "munge.socket").exists, folder)
        wait_for(lambda: ready(slurm), folder)
        yield slurm
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait()


def ready(slurm):
    """Whether both nodes wait for jobs."""
    with contextlib.suppress(subprocess.CalledProcessError):
        return slurm.run("sinfo", "--noheader", "--format=%t %D") == "idle 2"
    return False


def wait_for(condition, folder, seconds=60):
    """Waits for a part of Slurm; skips the test with the last words of the logs."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            logs = [*sorted(folder.glob("*.log")), *sorted(folder.glob("*.err"))]
            ends = [f"{log.name}: {log.read_text()[-200:].strip()}" for log in logs]
            pytest.skip(f"Slurm does not start: {'; '.join(ends)}")
        time.sleep(0.2)
