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

import contextlib
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
from samestep.programs import make_parser


def main() -> int:
    """Launches the program, and returns the exit code once all processes have ended."""
    words = sys.argv[1:]
    start = next((i for i, word in enumerate(words) if word.endswith(".py")), len(words))
    program = words[start:]
    parser = make_parser("launch", __doc__)
    parser.usage = "samestep launch OPTIONS_OF_ACCELERATE_LAUNCH train.py FLAGS"
    if not program:
        parser.parse_known_args(words)  # prints the help if one of them asks for it
        parser.error("name a program, such as train.py; see --help")
    if not Path(program[0]).is_file():
        parser.error(f"{program[0]}: No such file")
    if {launching.EXPORTED, launching.FAILED} & {*os.environ}:  # the YAML of this command counts
        clean = launching.without_yaml(os.environ)
        os.environ.clear()
        os.environ.update(clean)
    if {"--help", "-h"} & {*program}:
        return _become(program)
    words = [*words[:start], "--", *program]  # the last option lacks its value: this tells argparse
    threads = os.environ.get("OMP_NUM_THREADS")
    report = io.StringIO()  # what the launcher prints itself; processes that it starts print here
    try:
        with contextlib.redirect_stderr(report):
            from samestep.launch import launcher

            arguments, env = launcher.read(words)
            launcher.check_machines(arguments)
    except ValueError as error:
        parser.error(str(error))
    if launcher.starts_one(arguments):
        if env["OMP_NUM_THREADS"] != threads:  # torch has read it when it was imported
            os.execve(sys.executable, [sys.executable, *program], env)
        os.environ.update(env)
    elif "--check" not in program:
        if ":" in os.environ.get("PET_NNODES", ""):  # elastic, see launched.most_processes
            os.environ["LOCAL_WORLD_SIZE"] = str(arguments.num_processes)
        return _launch_several(program, launcher.parse(words), report)
    return _become(program)


def _become(program: list[str]) -> int:
    """Runs the program in this process, as `python PROGRAM` would; 0 unless it exits itself."""
    sys.argv = program
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(program[0]).resolve().parent)
    runpy.run_path(program[0], run_name="__main__")
    return 0


def _check(program: list[str]) -> None:
    """Runs the program with --check, in a process of its own: it knows of no other processes."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    _become([*program, "--check"])


class _Signals:
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
        with contextlib.suppress(FileNotFoundError):  # the run has ended
            while code_file.read_text() != "2":
                time.sleep(0.2)
            self.refused = True
            self.stop()


def _launch_several(program: list[str], arguments: Any, report: io.StringIO) -> int:
    """Validates the input, and launches the processes; returns the exit code of the run."""
    from accelerate.commands.launch import launch_command

    os.environ["LAUNCHING"] = "1"  # the run prints what the check would
    # A fork has imported torch already.
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    checking = context.Process(target=_check, args=(program,))
    checking.start()
    signals = _Signals(checking)
    checking.join()
    if signals.received:
        return STOPPED if checking.exitcode == STOPPED else _say_stopped()
    if checking.exitcode:
        return checking.exitcode
    with tempfile.NamedTemporaryFile() as file:
        os.environ["EXIT_CODE_FILE"], code_file = file.name, Path(file.name)
        # torchelastic must not forward SIGINT: `signals` does it.
        os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGQUIT,SIGUSR1")
        # With the c10d rendezvous, launchers that restart would disagree about a shared store.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        if arguments.max_restarts:
            threading.Thread(target=signals.stop_refused, args=(code_file,), daemon=True).start()
        code = 0
        try:
            with contextlib.redirect_stderr(report):
                launch_command(arguments)
        except BaseException as error:  # of torchelastic, for a process that failed or for a signal
            code = 1
            signals.received |= type(error).__name__ == "SignalException"  # its own handler had it
            report.write(traceback.format_exc())
        written = "2" if signals.refused else code_file.read_text()
    if written not in ("0", "2", str(STOPPED)) and not signals.received:
        whole = "" if written else report.getvalue()
        sys.stderr.write(_describe(report.getvalue()) or whole)
    if written:
        code = int(written)
    elif signals.received:
        code = _say_stopped()
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread of torchelastic that is in its store while Python ends would abort this process.
    os._exit(code)


def _say_stopped() -> int:
    """Prints what a signal has ended that no process could answer; the exit code."""
    advice = "the same command continues from the newest checkpoint, if there is one"
    print(f"samestep launch: stopped without saving; {advice}", file=sys.stderr)
    return STOPPED


def _describe(report: str) -> str:
    """Why a run has ended, in a line, if torchelastic's report has a reason that is known."""
    killed = re.findall(r"rank +: (\d+) .*\s+exitcode +: -(\d+) \(pid: (\d+)\)", report)
    met = re.search(r"Dist(?:Network|Store)Error: (.+)", report)
    line = ""
    if killed:  # the first failure is the last one in the report
        rank, number, pid = killed[-1]
        line = f"process {rank} (pid {pid}) was ended by {signal.Signals(int(number)).name}"
        if int(number) == signal.SIGKILL:
            line += ", as the kernel does when the memory is full"
    elif met:
        line = (
            f"the launchers of the machines did not meet: {met[1].strip()} Start all of them with "
            "one main_process_ip and main_process_port, and open that port on machine 0"
        )
    return line and f"samestep launch: {line}\n"
