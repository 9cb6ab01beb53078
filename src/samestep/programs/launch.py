"""Checks the input, runs `accelerate launch`, and exits with the exit code of the run.

    python -m samestep launch --config_file configs/accelerate/cpu.yaml train.py --max_steps 9

It takes the arguments of `accelerate launch` (see its --help), and does five things more:
- One plain process checks recipe, flags, YAML, data and run folder, so that a mistake is one line.
- It forwards signals to the training processes, which save and stop.
- It hides the launcher's report, dozens of lines for a Ctrl-C, unless it alone knows the reason.
- It exits with the code of the training processes, where accelerate and torchelastic exit with 1.
- Under --max_restarts it ends after exit code 2, where torchelastic would start again.

Exit codes: 0 finished; 2 the input is wrong, do not retry; 75 stopped on request, and anything else
a crash: the same command continues.
"""

import argparse
import contextlib
import functools
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
from typing import Any

import psutil
import yaml

from samestep.base import launching
from samestep.base.console import one_line
from samestep.base.launching import STOPPED

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP]
MISTAKES = (ValueError, TypeError, AttributeError, ImportError, AssertionError)
# A preexec_fn: the check is stopped by this process alone.
IGNORE_CTRL_C = functools.partial(signal.signal, signal.SIGINT, signal.SIG_IGN)


def read_options(words: list[str]) -> argparse.Namespace:
    """The launcher's options that matter here; None for those that are not given."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = lambda problem: parser.exit(2, f"samestep launch: {problem}\n")
    for name in ("config_file", "num_processes", "max_restarts"):
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}")
    return parser.parse_known_args(words)[0]


def elastic_variables(known: argparse.Namespace) -> dict[str, str]:
    """What tells the check of an elastic run how many processes a machine has: an environment
    variable, see launched.most_processes."""
    if ":" not in os.environ.get("PET_NNODES", ""):
        return {}
    count = known.num_processes
    with contextlib.suppress(OSError, LookupError, ValueError, TypeError, yaml.YAMLError):
        if count is None:
            text = Path(known.config_file).read_text(encoding="utf-8")
            count = yaml.safe_load(text)["num_processes"]
    return {"LOCAL_WORLD_SIZE": str(count)} if count else {}


def start_check(program: list[str], env: dict) -> subprocess.Popen:
    """Starts the program with --check, by itself: it knows nothing of other processes."""
    given = {word.partition("=")[0] for word in program}
    command = [sys.executable, *program]
    command += ["--check"] if "--check" not in given else []
    return subprocess.Popen(command, env=os.environ | env, preexec_fn=IGNORE_CTRL_C)


class Signals:
    """Passes a signal on to the processes that train, which save and stop."""

    def __init__(self, program: str):
        self.program, self.received, self.refused = program, False, False
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self.handle)

    def handle(self, *_: Any) -> None:
        if not self.received:
            self.received = True
            threading.Thread(target=self.stop, daemon=True).start()

    def stop(self) -> None:
        """Asks the check, or all that train, to stop; they may be about to start."""
        while True:
            # torchelastic runs several processes, and has a handler that stops them. A single one
            # gets the signal itself.
            if signal.getsignal(signal.SIGTERM) != self.handle:
                os.kill(os.getpid(), signal.SIGTERM)
                return
            with contextlib.suppress(psutil.Error):  # one has just ended
                children = psutil.Process().children()
                if found := [each for each in children if self.program in each.cmdline()]:
                    found[0].terminate()
                    return
            time.sleep(0.1)

    def stop_refused(self, code_file: Path) -> None:
        """Stops all after exit code 2: torchelastic would restart what ends in the same error."""
        while read(code_file) != "2":
            time.sleep(0.2)
        self.refused = True
        self.stop()


def read(file: Path) -> str:
    """The text of a file; empty if it is not there."""
    return file.read_text(errors="replace") if file.exists() else ""


def main() -> int:
    """Checks, launches, and waits until all processes have ended; returns the exit code."""
    words = sys.argv[1:]
    start = next((i for i, word in enumerate(words) if word.endswith(".py")), len(words))
    options, program = words[:start], words[start:]
    if not program and {"--help", "-h"} & {*words}:
        print(__doc__ or "samestep launch OPTIONS_OF_ACCELERATE train.py FLAGS")
        return 0
    if not program:
        print("samestep launch: name a program, such as train.py; see --help", file=sys.stderr)
        return 2
    known, signals = read_options(options), Signals(program[0])
    if {launching.EXPORTED, launching.FAILED} & {*os.environ}:  # the YAML of this command counts
        clean = launching.without_yaml(os.environ)
        os.environ.clear()
        os.environ.update(clean)
    if {"--help", "-h"} & {*program}:
        return start_check(program, {}).wait()
    only = "--check" in program
    if not only:
        os.environ["LAUNCHING"] = "1"  # the run prints what the check would
    check = start_check(program, {} if only else elastic_variables(known))
    report = io.StringIO()  # what the launcher prints itself; processes that it starts print here
    try:
        with contextlib.redirect_stderr(report):
            # The imports of the launcher take as long as those of the check.
            from accelerate.commands.launch import launch_command

            from samestep.project import launcher

            launcher.check_machines(launcher.read(words)[0])
            arguments = launcher.parse(words)
    except ValueError as error:
        check.kill()
        print(f"samestep launch: {error}", file=sys.stderr)
        return 2
    code = check.wait()
    if signals.received and code < 0:  # before it could say so itself
        again = "stopped before it began; the same command starts again"
        print(f"samestep launch: {again}", file=sys.stderr)
    if code or only or signals.received:
        return STOPPED if signals.received else code
    with tempfile.TemporaryDirectory() as folder:
        code_file = Path(folder, "exit_code")
        os.environ["EXIT_CODE_FILE"] = str(code_file)
        # torchelastic must not forward SIGINT: `signals` does it.
        os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGQUIT,SIGUSR1")
        # With the c10d rendezvous, launchers that restart would disagree about a shared store.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        if known.max_restarts:
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
            if isinstance(error, MISTAKES) and not code_file.exists():  # no process has started
                print(f"samestep launch: {one_line(error, 500)}", file=sys.stderr)
                return 2
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
    """Why a run has ended, in lines, if the launcher's report has a reason that is known."""
    killed = {}
    # accelerate reports a single process, torchelastic several.
    if found := re.search(r"died with <Signals\.\w+: (\d+)>", report):
        killed["the process that trained"] = int(found[1])
    pattern = r"rank +: (\d+) .*\s+exitcode +: -(\d+) \(pid: (\d+)\)"
    for rank, number, pid in re.findall(pattern, report):
        killed[f"process {rank} (pid {pid})"] = int(number)
    lines = []
    for process, number in killed.items():
        line = f"{process} was ended by {signal.Signals(number).name}"
        if number == signal.SIGKILL:
            line += ", as the kernel does when the memory is full"
        lines.append(line)
    if not lines and (found := re.search(r"Dist(?:Network|Store)Error: (.+)", report)):
        lines = [
            f"the launchers of the machines did not meet: {found[1].strip()} Start all of them "
            "with one main_process_ip and main_process_port, and open that port on machine 0"
        ]
    return "".join(f"samestep launch: {line}\n" for line in lines)
