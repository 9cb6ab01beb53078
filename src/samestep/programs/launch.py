"""Launches train.py as `accelerate launch` would, and exits with the exit code of the run.

    python -m samestep launch --config_file configs/accelerate/cpu.yaml train.py --max_steps 9

It takes the arguments of `accelerate launch` (see its --help). One process: this process becomes
train.py, with the environment that accelerate would give it. Several:
- accelerate's launcher starts the processes, and its report, dozens of lines for a Ctrl-C, is
  hidden, unless it alone knows the reason. A mistake is the one line of the main process. Where
  PET_NNODES is a range, the input is checked before this machine joins the others.
- The exit code is that of the processes, where accelerate and torchelastic exit with 1. Under
  --max_restarts exit code 2 ends the run, where torchelastic would start again.

Exit codes: 0 finished; 2 the input is wrong, do not retry; 75 stopped on request, and anything else
a crash: the same command resumes the run.
"""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from samestep.base import launching
from samestep.base.launching import STOPPED
from samestep.base.signals import SIGNALS
from samestep.programs import make_parser


def main() -> NoReturn:
    """Becomes the program, or launches it and exits once all processes have ended."""
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
    command = [sys.executable, *program]
    if {"--help", "-h"} & {*program}:
        os.execv(sys.executable, command)
    words = [*words[:start], "--", *program]  # the last option lacks its value: this tells argparse
    report = io.StringIO()  # what the launcher prints itself; processes that it starts print here
    try:
        with contextlib.redirect_stderr(report):
            from samestep.launch import launcher

            arguments, env = launcher.read(words)
            launcher.check_machines(arguments)
    except ValueError as error:
        parser.error(str(error))
    if launcher.starts_one(arguments):
        os.execve(sys.executable, command, env)
    if "--check" in program:  # one process checks
        os.execv(sys.executable, command)
    os.environ["LAUNCHING"] = "1"  # the words and the YAML were checked here
    # In an elastic run a machine that joins with wrong input would end the run of the others.
    if ":" in os.environ.get("PET_NNODES", ""):
        all_machines = {"LOCAL_WORLD_SIZE": str(arguments.num_processes)}  # see most_processes
        if code := subprocess.call([*command, "--check"], env=os.environ | all_machines):
            sys.exit(code)
    _launch_several(launcher.parse(words), report)


def _stop_refused(code_file: Path, refused: threading.Event) -> None:
    """Stops all after exit code 2: torchelastic would restart what ends in the same error."""
    with contextlib.suppress(FileNotFoundError):  # the run has ended
        while code_file.read_text() != "2":
            time.sleep(0.2)
        refused.set()
        os.kill(os.getpid(), signal.SIGTERM)


def _launch_several(arguments: Any, report: io.StringIO) -> NoReturn:
    """Launches the processes, and exits with the exit code of the run."""
    from accelerate.commands.launch import launch_command

    stopped, refused = False, threading.Event()
    with tempfile.NamedTemporaryFile() as file:
        os.environ["EXIT_CODE_FILE"], code_file = file.name, Path(file.name)
        # torchelastic passes these on to the processes, which save and stop. nohup ignores SIGHUP.
        heard = [each.name for each in SIGNALS if signal.getsignal(each) != signal.SIG_IGN]
        os.environ.setdefault("PET_SIGNALS_TO_HANDLE", ",".join([*heard, "SIGQUIT"]))
        # With the c10d rendezvous, launchers that restart would disagree about a shared store.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        if arguments.max_restarts:
            given = (code_file, refused)
            threading.Thread(target=_stop_refused, args=given, daemon=True).start()
        code = 0
        try:
            with contextlib.redirect_stderr(report):
                launch_command(arguments)
        except BaseException as error:  # of torchelastic, for a process that failed or for a signal
            code = 1
            stopped = type(error).__name__ in ("SignalException", "KeyboardInterrupt")
            report.write(traceback.format_exc())
        written = "2" if refused.is_set() else code_file.read_text()
    if written not in ("0", "2", str(STOPPED)) and not stopped:
        whole = "" if written else report.getvalue()
        sys.stderr.write(_describe(report.getvalue()) or whole)
    if written:
        code = int(written)
    elif stopped:  # no process could answer it
        advice = "the same command continues from the newest checkpoint, if there is one"
        print(f"samestep launch: stopped without saving; {advice}", file=sys.stderr)
        code = STOPPED
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread of torchelastic that is in its store while Python ends would abort this process.
    os._exit(code)


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
