"""accelerate launch, after a check of its input, and with the exit code of the run itself.

    python launch.py --config_file configs/accelerate/cpu.yaml train.py --learning_rate 1e-3

takes the arguments of `accelerate launch` and does four things more. Recipe, flags, YAML, data and
run folder are checked first, in one plain process, so that a mistake is one line. Signals reach the
processes that train, which save and stop. The launcher's own report, dozens of lines for a Ctrl-C,
is shown only where the processes could not say how they ended. And it ends with their exit code, of
which accelerate and torchelastic make 1: 0 finished, 75 stopped on request, 2 wrong input, which
no scheduler should try again, anything else a crash, which one should.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP]
STOPPED = 75  # exit code of train.py: stopped on request, start it again to continue
# The launcher, whose own messages go to a file; those of the processes that it starts do not.
LAUNCHER = """
import sys
sys.stderr = open(sys.argv.pop(1), "w", buffering=1)
from accelerate.commands.launch import main
main()
"""


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The launcher's arguments, and the program's with its own."""
    for i, word in enumerate(arguments):
        if word.endswith(".py"):
            return arguments[:i], arguments[i:]
    sys.exit(f"launch.py: name a program, such as train.py\n{__doc__.splitlines()[2].strip()}")


def check(launcher: list[str], program: list[str], asked: list[int], env: dict) -> int:
    """Exit code of the program's own check, told what the launcher would tell its processes."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config_file", default="")
    for name in ("num_processes", "num_machines"):
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}")
    known, _ = parser.parse_known_args(launcher)
    command = [sys.executable, *program]
    given = [word.partition("=")[0] for word in program]
    command += ["--check"] if "--check" not in given else []
    if known.config_file and "--config_file" not in given:
        command += ["--config_file", known.config_file]
    told = {"LAUNCH_PROCESSES": known.num_processes, "LAUNCH_MACHINES": known.num_machines}
    told = {name: value for name, value in told.items() if value is not None}
    checking = subprocess.Popen(command, env={**env, **told}, preexec_fn=deaf)
    told_it = False
    while checking.poll() is None:
        time.sleep(0.05)
        if asked and not told_it:
            checking.terminate()
            told_it = True
    return STOPPED if asked else checking.returncode


def trainers(launcher: subprocess.Popen, program: list[str]) -> list[psutil.Process]:
    """The processes that train: those that the launcher has started with the program."""
    try:
        children = psutil.Process(launcher.pid).children()
        return [child for child in children if program[0] in child.cmdline()]
    except psutil.Error:
        return []


def stop(launcher: subprocess.Popen, training: list[psutil.Process]) -> None:
    """Asks the processes that train to save and stop.

    torchelastic, which runs several of them, passes it on. With one there is only accelerate, which
    would die and leave it behind.
    """
    try:
        alone = [process for process in training if "LOCAL_RANK" not in process.environ()]
        for target in alone or [launcher]:
            target.send_signal(signal.SIGTERM)
    except psutil.Error:  # it has just ended
        pass


def main() -> int:
    """Checks, launches, and waits until all have ended; the exit code."""
    launcher, program = split(sys.argv[1:])
    asked: list[int] = []
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as SIGHUP is under nohup
            signal.signal(number, lambda n, _: asked.append(n))
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "exit_code")
        env = {
            # For torchelastic. Not SIGINT: the processes that it starts ignore it, as this launcher
            # does, until they can save.
            "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGQUIT,SIGUSR1",
            **os.environ,
            "VERIFIED_FILE": str(Path(folder, "verified")),  # checkpoints that the check has read
        }
        code = check(launcher, program, asked, env)
        if code or {"--check", "--help", "-h"} & {*program}:  # nothing is to be launched
            return code
        report = Path(folder, "report")
        command = [sys.executable, "-c", LAUNCHER, str(report), *launcher, *program]
        env["EXIT_CODE_FILE"] = str(told)
        run = subprocess.Popen(command, env=env, preexec_fn=deaf)
        training, stopping = [], False
        while run.poll() is None:
            training = trainers(run, program) or training
            if asked and training and not stopping:
                stop(run, training)
                stopping = True
            time.sleep(0.2)
        psutil.wait_procs(training)  # a signal to all may end the launcher while they save
        code = told.read_text() if told.exists() else ""  # empty: the disk was full
        found = report.read_text(errors="replace") if report.exists() else ""
        if code not in ("0", "2", str(STOPPED)) and not asked:
            sys.stderr.write(killed(found) or ("" if code else found))
        elif asked and not code:
            about = "the same command continues from the newest checkpoint, if there is one"
            print(f"launch.py: stopped without saving; {about}", file=sys.stderr)
        return int(code) if code else STOPPED if asked else run.returncode


def killed(report: str) -> str:
    """A line for each process that a signal has ended, by the launcher's report."""
    died = {}
    for number in re.findall(r"died with <Signals\.\w+: (\d+)>", report):  # of accelerate: one
        died["the process that trained"] = int(number)
    several = r"rank +: (\d+) .*\s+exitcode +: -(\d+) \(pid: (\d+)\)"  # of torchelastic
    for rank, number, pid in re.findall(several, report):
        died[f"process {rank} (pid {pid})"] = int(number)
    lines = []
    for who, number in died.items():
        often = ", as the kernel does when the memory is full" * (number == signal.SIGKILL)
        lines.append(f"launch.py: {who} was ended by {signal.Signals(number).name}{often}\n")
    return "".join(lines)


def deaf() -> None:
    """For the launcher, which would answer a terminal's Ctrl-C with a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main())
