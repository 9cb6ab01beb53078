"""Measures this machine, and says which YAML of configs/accelerate/ suits it.

    python -m samestep hardware                                  check, bench and smoke on all GPUs
    python -m samestep hardware recommend --config configs/train/default.yaml
    python -m samestep hardware precision --config configs/train/default.yaml
    accelerate launch --config_file configs/accelerate/multi_gpu.yaml -m samestep hardware smoke
    python -m samestep hardware --compare runs/hardware/baseline.json

Without a verb it starts a process for each GPU, or two on a CPU, and runs all phases in them; under
a launcher, in its processes. check, bench and smoke alone measure the processes of the launcher;
recommend and precision are started with python. Flags of train.py (--config, --learning_rate, ...)
may follow, except for check. The figures go to hardware.json in the folder --report.
"""

import argparse
import functools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate import PartialState
from torch.distributed.elastic.utils.distributed import get_free_port

from samestep.base.console import IS_MAIN, one_line, print_on_main
from samestep.hardware import bench, check, precision, recommend, report, smoke
from samestep.hardware.project import Project, read_project
from samestep.processes import meeting, shutdown
from samestep.processes.device import PROCESSES
from samestep.processes.ranks import Ranks, UserError, as_user_error, catch
from samestep.start import startup

TIMEOUT = 600  # seconds that a process waits for the others
PATIENCE = 20  # seconds in which processes end after a signal
ALL = ["check", "bench", "smoke"]  # the phases of a call without a verb
VERBS = {"check": check, "bench": bench, "smoke": smoke}
ALONE = {"recommend": recommend, "precision": precision}  # they see to the devices themselves
LAUNCHED = {"WORLD_SIZE", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU"}  # by a launcher


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line for all processes."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def number(text: str, kind: type = float, most: int = 100_000) -> float:
    """A type for argparse: numbers above 0."""
    value, problem = catch(kind, text)
    if problem or not 0 < value <= most:
        wanted = f"a {'whole ' * (kind is int)}number above 0, up to {most:,}"
        raise argparse.ArgumentTypeError(f"expected {wanted}; got {one_line(repr(text), 60)}")
    return value


def path(text: str) -> Path:
    """A type for argparse; a shell expands ~ at the beginning of a word alone."""
    return Path(os.path.expanduser(text))


whole, share = functools.partial(number, kind=int), functools.partial(number, most=1)
# Of each flag: the verbs that read it, its default, and what argparse wants.
FLAGS: dict[str, tuple[list[str], Any, dict]] = {
    "processes": (["all"], None, {"type": whole, "metavar": "N",
        "help": "processes to start, without a launcher (default: one for each GPU, or 2)"}),
    "seconds": (["all", "bench"], None, {"type": number,
        "help": "for each figure of bench (default: 1; with all phases on a CPU 0.05)"}),
    "devices": (["recommend"], None, {"type": whole, "metavar": "N",
        "help": "GPUs in a machine, in place of all"}),
    "device_memory": (["recommend"], None, {"type": number, "metavar": "GB",
        "help": "plan for GPUs that are not here"}),
    "machines": (["recommend"], 1, {"type": whole, "metavar": "M",
        "help": "machines with as many GPUs each"}),
    "steps": (["precision"], 100, {"type": whole, "metavar": "N",
        "help": "to train (default: 100)"}),
    "mixed": (["precision"], "bf16", {"choices": ("bf16", "fp16", "fp8"),
        "help": "instead of fp32"}),
}  # fmt: skip


def parse_arguments(words: list[str]) -> argparse.Namespace:
    """The arguments of samestep hardware; `flags`: the rest, which is for train.py."""
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser("samestep hardware", None, __doc__, formatter_class=form, allow_abbrev=False)
    verbs = ["all", *VERBS, *ALONE]
    parser.add_argument("verb", choices=verbs, help="all: check, bench and smoke in one report")
    add = parser.add_argument
    add("--report", type=path, default=Path("runs/hardware"), help="folder for the figures")
    add("--compare", type=path, metavar="OLD", help="name what is slower than in OLD, a .json")
    slower = "with --compare: exit with 1 if more than this share slower (default: 0.1)"
    add("--threshold", type=share, metavar="SHARE", default=0.1, help=slower)
    for name, (readers, _, how) in FLAGS.items():
        of = " and ".join(readers)
        parser.add_argument(f"--{name}", **{**how, "help": f"{of}: {how['help']}"})
    if not words or words[0].startswith("-") and words[0] not in ("-h", "--help"):
        words = ["all", *words]
    options, flags = parser.parse_known_args(words)
    for name, (readers, default, _) in FLAGS.items():
        if getattr(options, name) is None:
            setattr(options, name, default)
        elif options.verb not in readers:
            raise UserError(f"{options.verb} does not read --{name}; leave it out")
    return argparse.Namespace(**vars(options), flags=flags)


def prepare() -> tuple[argparse.Namespace, Project | None, dict, dict]:
    """All that needs no other process: arguments, the project's data, what is measured, and the
    older report."""
    options = parse_arguments(sys.argv[1:])
    options.phases = ALL if options.verb == "all" else [options.verb]
    baseline = options.report / report.BASELINE
    options.baseline = None if options.compare or options.verb != "all" else baseline
    older = baseline if options.baseline and baseline.exists() else options.compare
    old, problem = catch(report.load, older) if older else ({}, None)
    if problem and options.compare:
        raise problem
    if IS_MAIN:
        report.prepare_folder(options.report)
    project = None
    if options.verb in ALONE and PROCESSES > 1:
        raise UserError(f"start it with `python -m samestep hardware {options.verb}`: one process")
    if options.verb == "recommend":
        recommend.check(options)
    if options.verb in ("all", "bench", "smoke", "recommend"):
        project = read_project(options.flags)
    elif options.verb == "check" and options.flags:
        raise UserError(f"check takes no {one_line(options.flags[0])}; see --help")
    versions = startup.versions()
    conditions = {"device": versions.get("gpu", versions["cpu"]), "processes": PROCESSES}
    if project:
        format = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").replace("no", "fp32")
        recipe = one_line(" ".join([str(project.recipe), *project.flags]))
        conditions |= {"recipe": recipe, "precision": format}
    if old:
        _, problem = catch(report.check_comparable, options.phases, conditions, old)
    if problem and options.compare:
        raise problem
    if problem:
        print_on_main(f"not compared with {older}, which you may remove: {one_line(problem)}")
        old = {}
    return options, project, conditions, old


def measure() -> int:
    """Runs a verb on all processes; the exit code."""
    if (code := start_processes()) is not None:
        return code
    found, problem = catch(as_user_error()(prepare))
    ranks = Ranks(TIMEOUT, meeting.join())
    try:
        ranks.raise_everywhere(problem)
        options, project, conditions, old = found
        sections = []
        for verb in options.phases:
            module = (VERBS | ALONE)[verb]
            sections.append(module.run(options, project, ranks, PartialState().device))
            sections[-1].conditions = conditions
        code = 0
        with ranks.fail_together(), as_user_error():
            if IS_MAIN:
                code = report.finish(sections, options, old)
        return ranks.from_main(code)
    except RuntimeError as error:
        raise ranks.name_missing(error) from error


def start_processes() -> int | None:
    """Starts this program in a process for each GPU, or in two on a CPU, as a launcher would; the
    exit code. None: this process is enough."""
    options = None if LAUNCHED & os.environ.keys() else parse_arguments(sys.argv[1:])
    if not options or options.verb != "all":
        return None
    gpus, cores = torch.accelerator.device_count(), os.cpu_count() or 1
    count = options.processes or gpus or min(cores, 2)
    if 0 < gpus < count:
        raise UserError(f"torch sees {gpus} GPUs; give --processes {gpus}, or fewer")
    # Such GPUs only emulate bf16. Asking torch would take memory of the first one.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = ["-i", visible] if visible else []
    printed = check.nvidia_smi(*chosen, "--query-gpu=compute_cap", "--format=csv")
    old = re.search(r"^[1-7]\.", printed, re.MULTILINE)
    precision = ("fp16" if old else "bf16") if torch.cuda.is_available() else "no"
    os.environ["ACCELERATE_MIXED_PRECISION"] = precision
    os.environ["ACCELERATE_USE_CPU"] = str(not gpus)
    print_on_main(f"measuring in {count} process{'es' * (count > 1)}, mixed_precision {precision}")
    if count == 1:
        return None
    env = {**os.environ, "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port())}
    env.setdefault("OMP_NUM_THREADS", str(max(cores // count, 1)))
    command = [sys.executable, "-m", "samestep", "hardware", *sys.argv[1:]]
    ranks = ({"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count))
    started = [subprocess.Popen(command, env=env | rank) for rank in ranks]
    try:
        return max(abs(each.wait()) for each in started)  # below 0: ended by a signal
    finally:  # after a signal to this process alone
        signal.setitimer(signal.ITIMER_REAL, 0)  # the signal raises no more
        for each in started:
            each.terminate()
        until = time.monotonic() + PATIENCE
        for each in started:
            catch(each.wait, max(until - time.monotonic(), 0))
            each.kill()


def main() -> None:
    """Runs the program in this process; does not return."""
    shutdown.run_alone(measure)
