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
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import yaml

from samestep.base import preflight
from samestep.base.console import one_line

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP]
PLACE = ("num_machines", "machine_rank", "main_process_port", "main_process_ip")
STOPPED = 75  # exit code of train.py: stopped on request; the same command continues
# A preexec_fn: the check is stopped by this process alone.
IGNORE_CTRL_C = functools.partial(signal.signal, signal.SIGINT, signal.SIG_IGN)


def read_options(launcher: list[str]) -> argparse.Namespace:
    """The launcher's options that matter here; None for those that are not given."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("config_file", "rdzv_backend", "num_processes", "max_restarts", *PLACE):
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}")
    return parser.parse_known_args(launcher)[0]


def find_meeting(known: argparse.Namespace) -> dict[str, str]:
    """Where the checks of several machines wait for each other: an environment variable of theirs.

    Empty for one machine, and under c10d, where machines may come at any time.
    """
    with contextlib.suppress(OSError, ValueError, TypeError, yaml.YAMLError):  # the check says it
        text = Path(known.config_file).read_text(encoding="utf-8") if known.config_file else "{}"
        place = dict(yaml.safe_load(text))
        place |= {name: value for name, value in vars(known).items() if value is not None}
        machines, rank = int(place.get("num_machines", 1)), int(place.get("machine_rank", 0))
        host, port = place.get("main_process_ip"), int(place.get("main_process_port") or 29500)
        static = known.rdzv_backend in (None, "static")
        if static and machines > 1 and 0 <= rank < machines and host:
            return {"LAUNCH_MEETING": f"{rank} {machines} {host} {port}"}
    return {}


def start_check(known: argparse.Namespace, program: list[str], env: dict) -> subprocess.Popen:
    """Starts the program with --check.

    What the launcher would tell the program of the machines is passed on, since it is not there to
    do it.
    """
    given = {word.partition("=")[0] for word in program}
    command = [sys.executable, *program]
    command += ["--check"] if "--check" not in given else []
    if known.config_file and "--config_file" not in given:
        command += ["--config_file", known.config_file]
    passed = {
        "LAUNCH_PROCESSES": known.num_processes,
        "LAUNCH_MACHINES": known.num_machines,
        "LAUNCH_MACHINE_RANK": known.machine_rank,
        "LAUNCH_MAIN_PROCESS_IP": known.main_process_ip,
    }
    env = env | {name: value for name, value in passed.items() if value is not None}
    return subprocess.Popen(command, env=os.environ | env, preexec_fn=IGNORE_CTRL_C)


class Signals:
    """Passes a signal on to the processes that train, which save and stop."""

    def __init__(self, program: str):
        self.program, self.received = program, False
        self.agent: Any = None  # of torchelastic
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self.handle)

    def handle(self, *_: Any) -> None:
        if not self.received:
            self.received = True
            threading.Thread(target=self.stop, daemon=True).start()

    def stop(self) -> None:
        """Asks the check, or all that train, to stop: torchelastic may be about to start them."""
        asked: set[int] = set()
        began = time.monotonic()
        while asked or time.monotonic() < began + 10:
            with contextlib.suppress(psutil.Error):  # one has just ended
                for each in psutil.Process().children():
                    if self.program in each.cmdline() and each.pid not in asked:
                        asked.add(each.pid)
                        each.terminate()
            time.sleep(0.1)
        preflight.leave(STOPPED, "samestep launch", preflight.BEFORE)  # others have not come

    def end_restarts(self) -> None:
        """Keeps torchelastic from starting again what was stopped or ends in the same error.

        It ends as for a signal. After an error launchers of other machines, which may go on without
        this one, would find the rendezvous closed.
        """
        from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
        from torch.distributed.elastic.multiprocessing.api import SignalException

        monitor = LocalElasticAgent._monitor_workers

        def monitor_workers(agent: Any, *arguments: Any) -> Any:
            self.agent, result = agent, monitor(agent, *arguments)
            codes = {each.exitcode for each in result.failures.values()}
            if codes and (self.received or 2 in codes):
                raise SignalException("not to be restarted", signal.SIGTERM)
            return result

        LocalElasticAgent._monitor_workers = monitor_workers  # type: ignore[method-assign]

    def exit_codes(self) -> dict[str, int]:
        """Those of the processes that torchelastic has started last."""
        context = getattr(self.agent, "_pcontext", None)
        started = getattr(context, "subprocess_handlers", {})
        return {f"process {rank}": each.proc.wait() for rank, each in started.items()}


def train(arguments: argparse.Namespace, signals: Signals) -> dict[str, int]:
    """Runs the launcher; the exit codes of processes that failed on this machine."""
    from accelerate.commands.launch import launch_command
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    arguments.quiet = False  # it would hide the exit code
    os.environ["PET_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # `Signals` passes on the others
    # With the c10d rendezvous, launchers that restart would disagree about a shared store.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    logging.disable()  # dozens of lines for a Ctrl-C
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            launch_command(arguments)
    except subprocess.CalledProcessError as error:
        return {"the process that trained": error.returncode}
    except ChildFailedError as error:
        failed = sorted(error.failures.items())
        return {f"process {rank} (pid {each.pid})": each.exitcode for rank, each in failed}
    except Exception:  # a signal, or the rendezvous is gone: it has stopped what it had started
        if codes := signals.exit_codes():
            return codes
        raise
    return {}


def say(line: object) -> None:
    print(f"samestep launch: {line}", file=sys.stderr)


def main() -> int:
    """Checks, launches, and waits until all processes have ended; returns the exit code."""
    words = sys.argv[1:]
    start = next((i for i, word in enumerate(words) if word.endswith(".py")), len(words))
    launcher, program = words[:start], words[start:]
    if not program and {"--help", "-h"} & {*words}:
        print(__doc__)
        return 0
    if not program:
        say("name a program, such as train.py; see --help")
        return 2
    known, signals = read_options(launcher), Signals(program[0])
    if {"--help", "-h"} & {*program}:
        return start_check(known, program, {}).wait()
    only = "--check" in program
    if not only:
        os.environ["LAUNCHING"] = "1"  # the run prints what the check would
    check = start_check(known, program, {} if only else find_meeting(known))
    # The imports of the launcher take as long as those of the check.
    from accelerate.commands.launch import launch_command_parser
    from torch.distributed import DistError

    parser = launch_command_parser()
    parser.error = lambda problem: parser.exit(
        2, f"samestep launch: {problem}; see accelerate launch --help\n"
    )
    try:
        arguments = parser.parse_args(words)
    except SystemExit:  # a wrong one
        check.kill()
        return 2
    code = check.wait()
    if signals.received and code < 0:  # before it could say so itself
        say(preflight.BEFORE)
    if code or only or signals.received:
        return STOPPED if signals.received else code
    signals.end_restarts()
    try:
        codes = train(arguments, signals)
    except Exception as error:  # of accelerate and torch, before any process has trained
        cause = error.__cause__ or error
        problem = f"{type(cause).__name__}: {one_line(cause)}"
        if isinstance(cause, DistError):
            problem = (
                f"the launchers of the machines did not meet: {one_line(cause)} Start all of them "
                "with one main_process_ip and main_process_port, and open that port on machine 0"
            )
        say(problem)
        return 1
    code = next(iter(codes.values()), 0)
    for known in (STOPPED, 2):
        if known in codes.values():
            code = known
    if code in (STOPPED, 2):
        return code
    if signals.received and code < 0:
        advice = "the same command continues from the newest checkpoint, if there is one"
        say(f"stopped without saving; {advice}")
        return STOPPED
    for process, number in codes.items():
        if number < 0:
            cause = ", as the kernel does when the memory is full" if number == -9 else ""
            say(f"{process} was ended by {signal.Signals(-number).name}{cause}")
    return code if code >= 0 else 1
