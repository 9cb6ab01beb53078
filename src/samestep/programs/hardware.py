"""Tests this machine's devices, and says which YAML of configs/accelerate/ suits a model.

    python -m samestep hardware                                  check, bench and smoke, in a report
    python -m samestep hardware smoke --config_file configs/accelerate/fsdp2.yaml
    python -m samestep hardware recommend --config configs/train/default.yaml
    python -m samestep hardware --compare runs/hardware/baseline.json

check names what makes training wrong or impossible. bench measures the devices and what connects
them. smoke starts train.py on one device and on all, and compares what it logs. recommend says how
much memory the model of a recipe needs, and which YAML trains it here. Flags of train.py (--config,
--learning_rate, ...) may follow. The figures go to hardware.json in the folder --report.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

import psutil

from samestep.base.console import IS_MAIN, one_line, print_on_main
from samestep.hardware import bench, check, devices, recommend, report, smoke
from samestep.hardware.project import read_project
from samestep.processes import shutdown
from samestep.processes.ranks import UserError, as_user_error
from samestep.programs import make_parser
from samestep.programs.launch import read_options

VERBS = ("all", "check", "bench", "smoke", "recommend")
ALL = ("check", "bench", "smoke")
LAUNCHED = {"WORLD_SIZE", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU"}  # by a launcher


def positive(text: str) -> float:
    """A type for argparse: a number above 0."""
    value = float(text)
    if not 0 < value <= 100_000:
        raise ValueError
    return value


def path(text: str) -> Path:
    """A type for argparse; a shell expands ~ at the beginning of a word alone."""
    return Path(os.path.expanduser(text))


def parse_arguments(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The arguments of samestep hardware, and the flags for train.py."""

    def refuse(problem: str) -> NoReturn:
        raise UserError(f"{problem}; see samestep hardware --help")

    parser = make_parser("hardware", __doc__)
    parser.error = refuse  # type: ignore[method-assign, assignment]
    add = parser.add_argument
    add("verb", choices=VERBS, help="all, without a verb: check, bench and smoke in one report")
    add("--report", type=path, default=Path("runs/hardware"), help="folder for the figures")
    add("--compare", type=path, metavar="OLD", help="exit with 1 if bench is slower than in OLD")
    add("--config_file", type=path, metavar="YAML", help="of configs/accelerate/: smoke trains so")
    add("--processes", type=int, metavar="N", help="devices to use (default: all GPUs)")
    precisions = ("no", "bf16", "fp16", "fp8")
    add("--mixed_precision", choices=precisions, help="in place of that of the YAML")
    add("--seconds", type=positive, help="for each figure of bench (default: 1, on a CPU 0.05)")
    if not words or words[0].startswith("-") and words[0] not in ("-h", "--help"):
        words = ["all", *words]
    options, flags = parser.parse_known_args(words)
    if options.processes is not None and options.processes < 1:
        refuse("--processes is a number from 1")
    return options, flags


@as_user_error()
def measure() -> int:
    """Runs the parts of the report that are asked for; the exit code."""
    options, flags = parse_arguments(sys.argv[1:])
    if not IS_MAIN:  # the first process of a launcher starts others itself
        return 0
    if LAUNCHED & os.environ.keys() and not options.config_file:
        words = psutil.Process(os.getppid()).cmdline()
        options.config_file = path(read_options(words).config_file or "")
        if not options.config_file.is_file():
            raise UserError("the launcher's YAML is not known; give --config_file here, too")
    report.prepare_folder(options.report)
    if options.compare:
        report.load(options.compare)
    used = devices.choose(options)
    if options.verb == "check" and flags:
        raise UserError(f"check takes no {one_line(flags[0])}; see samestep hardware --help")
    project = None if options.verb == "check" else read_project(flags)
    sections = []
    for verb in ALL if options.verb == "all" else [options.verb]:
        if verb == "check":
            section = check.run(used)
        elif verb == "bench":
            seconds = options.seconds or (0.05 if used.kind == "cpu" else 1.0)
            section = bench.run(used, project, flags, seconds, options.report)
        elif verb == "smoke":
            section = smoke.run(used, project, options.report)
        else:
            section = recommend.run(used, project)
        report.show(section)
        sections.append(section)
    return finish(options, sections)


def finish(options: argparse.Namespace, sections: list[report.Section]) -> int:
    """Saves the report and compares it; the exit code.

    The first report without a failure is kept as the baseline. What is slower than that is said; it
    counts as a failure only for --compare.
    """
    file, baseline = options.report / report.REPORT, options.report / report.BASELINE
    failed = any(section.failures for section in sections)
    report.save(sections, file)
    print_on_main(f"figures: {file}")
    if not any(section.verb == "bench" and section.figures for section in sections):
        return int(failed)
    new = report.load(file)
    if options.compare:
        return int(report.compare(new, report.load(options.compare)) > 0 or failed)
    if baseline.exists():
        try:
            report.compare(new, report.load(baseline))
        except ValueError as error:
            print_on_main(f"not compared with {baseline}, which you may remove: {one_line(error)}")
    elif options.verb == "all" and not failed:
        report.save(sections, baseline)
        print_on_main(f"kept as the baseline, with which later calls compare: {baseline}")
    return int(failed)


def main() -> None:
    """Runs the program; does not return."""
    shutdown.run_alone(measure)
