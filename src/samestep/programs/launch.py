"""Checks the input, runs `accelerate launch`, and exits with the exit code of the run.

    python -m samestep launch --config_file configs/accelerate/cpu.yaml train.py --max_steps 9

It takes the arguments of `accelerate launch`, and does five things more:
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
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import yaml

from samestep.base import begin

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP]
PLACE = ("num_machines", "machine_rank", "main_process_port", "main_process_ip")
STOPPED = 75  # exit code of train.py: stopped on request; the same command continues
# A preexec_fn: on a terminal's Ctrl-C the launcher would print a traceback.
IGNORE_CTRL_C = functools.partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
# Runs the launcher with its own stderr in a file. The processes that it starts keep the terminal's.
# Its imports take as long as those of the check; it waits for a byte to say that all is well, and
# ends without one. A wrong argument ends it before.
LAUNCHER = """
import os, sys
sys.stderr = open(sys.argv.pop(1), "w", buffering=1)
go = int(sys.argv.pop(1))
from accelerate.commands.launch import launch_command, launch_command_parser
arguments = launch_command_parser().parse_args()
if os.read(go, 1):
    launch_command(arguments)
"""


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


def run_check(
    known: argparse.Namespace,
    program: list[str],
    signals: list[int],
    env: dict,
    run: subprocess.Popen | None = None,
) -> int:
    """Runs the program with --check; its exit code, or STOPPED after a signal.

    Ends it at once if the process `run`, which waits for it, has failed. What the launcher would
    tell the program of the machines is passed on, since it is not there to do it.
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
    check = subprocess.Popen(command, env=env, preexec_fn=IGNORE_CTRL_C)
    terminated = False
    while check.poll() is None:
        time.sleep(0.05)
        if (signals or (run and run.poll())) and not terminated:
            (check.terminate if signals else check.kill)()
            terminated = True
    if signals and check.returncode < 0:  # before it could say so itself
        print(f"samestep launch: {begin.BEFORE}", file=sys.stderr)
    return STOPPED if signals else check.returncode


def read(file: Path) -> str:
    """The text of a file; empty if it is not there."""
    return file.read_text(errors="replace") if file.exists() else ""


def wait_for_end(
    run: subprocess.Popen, program: list[str], code_file: Path, signals: list[int], restarts: bool
) -> str:
    """Waits until all processes have ended, and asks them to save and stop after a signal.

    Returns the exit code that train.py has written; empty if it was killed, or the disk is full.
    """

    training: list[psutil.Process] = []
    stopping, refused = False, False
    while run.poll() is None:
        with contextlib.suppress(psutil.Error):  # one has just ended
            children = psutil.Process(run.pid).children()
            training = [each for each in children if program[0] in each.cmdline()] or training
        # torchelastic would restart the processes after an error that will come again.
        refused = refused or (restarts and read(code_file) == "2")
        if (signals or refused) and training and not stopping:
            # torchelastic runs several processes, and forwards the signal; they may have ended, and
            # be about to be restarted. A single one gets the signal itself: accelerate would die of
            # it and leave the process behind.
            target: psutil.Process | subprocess.Popen = run
            with contextlib.suppress(psutil.Error):
                target = run if "LOCAL_RANK" in training[0].environ() else training[0]
            with contextlib.suppress(psutil.Error):
                target.send_signal(signal.SIGTERM)
            stopping = True
        time.sleep(0.2)
    psutil.wait_procs(training)  # a signal to the group may end the launcher while they save
    return "2" if refused else read(code_file)


def main() -> int:
    """Checks, launches, and waits until all processes have ended; returns the exit code."""
    words = sys.argv[1:]
    start = next((i for i, word in enumerate(words) if word.endswith(".py")), len(words))
    launcher, program = words[:start], words[start:]
    if not program:
        print("samestep launch: name a program, such as train.py; see --help", file=sys.stderr)
        return 2
    known = read_options(launcher)
    signals: list[int] = []  # received so far
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, lambda n, _: signals.append(n))
    with tempfile.TemporaryDirectory() as folder:
        code_file, report_file = Path(folder, "exit_code"), Path(folder, "report")
        env = {
            # torchelastic must not forward SIGINT: training processes ignore it until they can
            # save, as the launcher does.
            "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGQUIT,SIGUSR1",
            # With the c10d rendezvous, launchers that restart would disagree about a shared store.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            **os.environ,
        }
        if {"--help", "-h"} & {*program}:  # nothing to launch
            return run_check(known, program, signals, env)
        only = "--check" in program
        meeting = {} if only else find_meeting(known)
        if not only:
            env["LAUNCHING"] = "1"  # the run prints what the check would
        waits, go = os.pipe()
        run = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(report_file), str(waits), *launcher, *program],
            env={**env, "EXIT_CODE_FILE": str(code_file)},
            preexec_fn=IGNORE_CTRL_C,
            pass_fds=[waits],
        )
        code = run_check(known, program, signals, {**env, **meeting}, run)
        if code and not run.poll():
            run.kill()
            run.wait()
            return code
        os.close(go) if only else os.write(go, b"1")
        ended = wait_for_end(run, program, code_file, signals, bool(known.max_restarts))
        report = read(report_file)
        if ended not in ("0", "2", str(STOPPED)) and not signals:
            sys.stderr.write(describe(report) or ("" if ended else report))
        elif signals and not ended:
            advice = "the same command continues from the newest checkpoint, if there is one"
            print(f"samestep launch: stopped without saving; {advice}", file=sys.stderr)
        return int(ended) if ended else STOPPED if signals else run.returncode


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
        cause = ", as the kernel does when the memory is full" * (number == signal.SIGKILL)
        lines.append(f"{process} was ended by {signal.Signals(number).name}{cause}")
    if found := re.search(r"^usage:.* error: (.+)", report, re.DOTALL):  # of its arguments
        lines = [f"{found[1].strip()}; see accelerate launch --help"]
    elif not lines and (found := re.search(r"Dist(?:Network|Store)Error: (.+)", report)):
        lines = [
            f"the launchers of the machines did not meet: {found[1].strip()} Start all of them "
            "with one main_process_ip and main_process_port, and open that port on machine 0"
        ]
    return "".join(f"samestep launch: {line}\n" for line in lines)
