"""accelerate launch, after a check of its input, and with the exit code of the run itself.

    python launch.py --config_file configs/accelerate/cpu.yaml train.py --learning_rate 1e-3

takes the arguments of `accelerate launch` and does three things more. Recipe, flags, YAML, data and
run folder are checked first, in one plain process, so that a mistake is one line and no report of a
launcher. Signals reach the processes that train, which save and stop. And it ends with their exit
code, of which accelerate and torchelastic make 1: 0 finished, 75 stopped after saving, 2 wrong
input, which no scheduler should try again, anything else a crash, which one should.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP]


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The launcher's arguments, and the program's with its own."""
    for i, word in enumerate(arguments):
        if word.endswith(".py"):
            return arguments[:i], arguments[i:]
    sys.exit(f"launch.py: name a program, such as train.py\n{__doc__.splitlines()[2].strip()}")


def check(launcher: list[str], program: list[str]) -> int:
    """Exit code of the program's own check, told what the launcher would tell its processes."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config_file", default="")
    parser.add_argument("--num_processes", "--num-processes", default="")
    known, _ = parser.parse_known_args(launcher)
    command = [sys.executable, *program, "--check"]
    command += ["--config_file", known.config_file] if known.config_file else []
    env = {**os.environ, "NUM_PROCESSES": known.num_processes}  # the launcher's flag goes first
    return subprocess.run(command, env=env).returncode


def trainers(launcher: subprocess.Popen) -> list[psutil.Process]:
    """The processes that train: those that the launcher has started."""
    try:
        return psutil.Process(launcher.pid).children()
    except psutil.Error:
        return []


def forward(launcher: subprocess.Popen, number: int) -> None:
    """Sends a signal to the processes that train.

    torchelastic, which runs several of them, passes it on. With one there is only accelerate, which
    would die and leave it behind.
    """
    try:
        alone = [child for child in trainers(launcher) if "LOCAL_RANK" not in child.environ()]
        for target in alone or [launcher]:
            target.send_signal(number)
    except psutil.Error:  # it has just ended
        pass


def main() -> int:
    """Checks, launches, and waits until all have ended; the exit code."""
    launcher, program = split(sys.argv[1:])
    if code := check(launcher, program):
        return code
    heard = [n for n in SIGNALS if signal.getsignal(n) != signal.SIG_IGN]  # not SIGHUP under nohup
    names = ",".join(n.name for n in heard)
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "exit_code")
        env = {"PET_SIGNALS_TO_HANDLE": names, **os.environ, "EXIT_CODE_FILE": str(told)}
        command = [sys.executable, "-m", "accelerate.commands.launch", "--quiet"]
        # A terminal's Ctrl-C is for the processes that train: accelerate would print a traceback.
        run = subprocess.Popen([*command, *launcher, *program], env=env, preexec_fn=deaf)
        for number in heard:
            signal.signal(number, lambda n, _: forward(run, n))
        started = []
        while not started and run.poll() is None:
            time.sleep(0.2)
            started = trainers(run)
        code = run.wait()
        psutil.wait_procs(started)  # a signal to all may end the launcher while they save
        return int(told.read_text()) if told.exists() else code


def deaf() -> None:
    """For the launcher; what trains hears the signal nevertheless."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main())
