"""Launches train.py as `accelerate launch` would, and exits with the exit code of the run.

    python -m samestep launch --config_file configs/accelerate/cpu.yaml train.py --max_steps 9

It takes the arguments of `accelerate launch` (see its --help). One process: this process becomes
train.py, with the environment that accelerate would give it. Several:
- One plain process validates recipe, flags, data and run folder, so that a mistake is one line.
- Then accelerate's launcher starts the processes, and its report, dozens of lines for a Ctrl-C, is
  hidden, unless it alone knows the reason.
- The exit code is that of the processes, where accelerate and torchelastic exit with 1. Under
  --max_restarts exit code 2 ends the run, where torchelastic would start again.

Exit codes: 0 finished; 2 the input is wrong, do not retry; 75 stopped on request, and anything else
a crash: the same command resumes the run.
"""

import argparse
import contextlib
import functools
import io
import multiprocessing
import os
import re
import runpy
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from samestep.base import launching
from samestep.base.launching import STOPPED
from samestep.base.signals import SIGNALS


def main() -> int | None:
    """Launches the program, and returns the exit code once all processes have ended."""
    words = sys.argv[1:]
    start = next((i for i, word in enumerate(words) if word.endswith(".py")), len(words))
    program = words[start:]
    if not program and {"--help", "-h"} & {*words}:
        print(__doc__ or "samestep launch OPTIONS_OF_ACCELERATE train.py FLAGS")
        return 0
    if not program:
        return fail("name a program, such as train.py; see --help")
    if not Path(program[0]).is_file():
        return fail(f"{program[0]}: No such file")
    if {launching.EXPORTED, launching.FAILED} & {*os.environ}:  # the YAML of this command counts
        clean = launching.without_yaml(os.environ)
        os.environ.clear()
        os.environ.update(clean)
    if {"--help", "-h"} & {*program}:
        become(program)
        return None
    words = [*words[:start], "--", *program]  # the last option lacks its value: this tells argparse
    threads = os.environ.get("OMP_NUM_THREADS")
    report = io.StringIO()  # what the launcher prints itself; processes that it starts print here
    try:
        with contextlib.redirect_stderr(report):
            from samestep.project import launcher

            arguments, env = launcher.read(words)
            launcher.check_machines(arguments)
    except ValueError as error:
        return fail(str(error))
    if launcher.starts_one(arguments):
        if env["OMP_NUM_THREADS"] != threads:  # torch has read it when it was imported
            os.execve(sys.executable, [sys.executable, *program], env)
        os.environ.update(env)
        become(program)
        return None
    if "--check" in program:
        become(program)
        return None
    return _launch_several(program, arguments, launcher.parse(words), report)


def fail(problem: str) -> int:
    """Prints a line about wrong input; its exit code."""
    print(f"samestep launch: {problem}", file=sys.stderr)
    return 2


def become(program: list[str]) -> None:
    """Runs the program in this process, as `python PROGRAM` would."""
    sys.argv = program
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(program[0]).resolve().parent)
    runpy.run_path(program[0], run_name="__main__")


def check(program: list[str], env: dict[str, str]) -> None:
    """Runs the program with --check, in a process of its own: it knows of no other processes."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    os.environ.update(env)
    become([*program, "--check"])


class Signals:
    """Passes a signal on: to the check, or to the processes that train, which save and stop."""

    def __init__(self, check: Any):
        self.check, self.received, self.refused = check, False, False
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self.handle)

    def handle(self, *_: Any) -> None:
        if not self.received:
            self.received = True
            self.check.terminate()
            threading.Thread(target=self.stop, daemon=True).start()

    def stop(self) -> None:
        """Asks torchelastic to stop all processes, once it has its handler, which does that."""
        while signal.getsignal(signal.SIGTERM) == self.handle:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)

    def stop_refused(self, code_file: Path) -> None:
        """Stops all after exit code 2: torchelastic would restart what ends in the same error."""
        while read(code_file) != "2":
            time.sleep(0.2)
        self.refused = True
        self.stop()


def read(file: Path) -> str:
    """The text of a file; empty if it is not there."""
    return file.read_text(errors="replace") if file.exists() else ""


def _launch_several(
    program: list[str], read_arguments: argparse.Namespace, arguments: Any, report: io.StringIO
) -> int:
    """Validates the input, and launches the processes; returns the exit code of the run."""
    from accelerate.commands.launch import launch_command

    os.environ["LAUNCHING"] = "1"  # the run prints what the check would
    env = {}
    if ":" in os.environ.get("PET_NNODES", ""):  # elastic, see launched.most_processes
        env["LOCAL_WORLD_SIZE"] = str(read_arguments.num_processes)
    # A fork has imported torch already.
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    checking = context.Process(target=check, args=(program, env))
    checking.start()
    signals = Signals(checking)
    checking.join()
    if signals.received and checking.exitcode != STOPPED:  # before it could say so itself
        again = "stopped before it began; the same command starts again"
        print(f"samestep launch: {again}", file=sys.stderr)
    if signals.received:
        return STOPPED
    if checking.exitcode:
        return checking.exitcode
    with tempfile.TemporaryDirectory() as folder:
        code_file = Path(folder, "exit_code")
        os.environ["EXIT_CODE_FILE"] = str(code_file)
        # torchelastic must not forward SIGINT: `signals` does it.
        os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGQUIT,SIGUSR1")
        # With the c10d rendezvous, launchers that restart would disagree about a shared store.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        if arguments.max_restarts:
            refused = functools.partial(signals.stop_refused, code_file)
            threading.Thread(target=refused, daemon=True).start()
        code = 0
        try:
            with contextlib.redirect_stderr(report):
                launch_command(arguments)
        except BaseException as error:  # of torchelastic, for a process that failed or for a signal
            code = 1
            signals.received |= type(error).__name__ == "SignalException"  # its own handler had it
            report.write(traceback.format_exc())
        ended = "2" if signals.refused else read(code_file)
    if ended not in ("0", "2", str(STOPPED)) and not signals.received:
        sys.stderr.write(describe(report.getvalue()) or ("" if ended else report.getvalue()))
    elif signals.received and not ended:
        advice = "the same command continues from the newest checkpoint, if there is one"
        print(f"samestep launch: stopped without saving; {advice}", file=sys.stderr)
    if ended:
        code = int(ended)
    elif signals.received:
        code = STOPPED
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread of torchelastic that is in its store while Python ends would abort this process.
    os._exit(code)


def describe(report: str) -> str:
    """Why a run has ended, in lines, if torchelastic's report has a reason that is known."""
    lines = []
    pattern = r"rank +: (\d+) .*\s+exitcode +: -(\d+) \(pid: (\d+)\)"
    for rank, number, pid in re.findall(pattern, report):
        line = f"process {rank} (pid {pid}) was ended by {signal.Signals(int(number)).name}"
        if int(number) == signal.SIGKILL:
            line += ", as the kernel does when the memory is full"
        lines.append(line)
    if not lines and (found := re.search(r"Dist(?:Network|Store)Error: (.+)", report)):
        lines = [
            f"the launchers of the machines did not meet: {found[1].strip()} Start all of them "
            "with one main_process_ip and main_process_port, and open that port on machine 0"
        ]
    return "".join(f"samestep launch: {line}\n" for line in lines)
