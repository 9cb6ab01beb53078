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
import dataclasses
import json
import os
import sys
from pathlib import Path

import psutil

from samestep.base.console import IS_MAIN, one_line, print_on_main
from samestep.base.files import replace_text
from samestep.hardware import bench, check, devices, recommend, report, smoke
from samestep.hardware.project import read_project
from samestep.processes import shutdown
from samestep.processes.ranks import UserError, as_user_error
from samestep.programs import make_parser
from samestep.programs.launch import read_options

VERBS = ("all", "check", "bench", "smoke", "recommend")
LAUNCHED = {"WORLD_SIZE", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU"}  # by a launcher


def parse_arguments(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The arguments of samestep hardware, and the flags for train.py."""
    if not words or words[0].startswith("-") and words[0] not in ("-h", "--help"):
        words = ["all", *words]
    parser = make_parser("hardware", __doc__)
    add = parser.add_argument
    add("verb", choices=VERBS, help="all, without a verb: check, bench and smoke in one report")
    add("--report", type=Path, default=Path("runs/hardware"), help="folder for the figures")
    add("--compare", type=Path, metavar="OLD", help="exit with 1 if bench is slower than in OLD")
    add("--config_file", type=Path, metavar="YAML", help="of configs/accelerate/, for smoke")
    add("--processes", type=int, metavar="N", help="devices to use (default: all)")
    add("--seconds", type=float, default=0.5, help="for each figure of bench (default: 0.5)")
    return parser.parse_known_args(words)


@as_user_error()
def measure() -> int:
    """Runs the parts of the report that are asked for; the exit code."""
    options, flags = parse_arguments(sys.argv[1:])
    if options.verb == "check" and flags:
        raise UserError(f"check takes no {one_line(flags[0])}; see samestep hardware --help")
    if not IS_MAIN:  # the first process of a launcher starts others itself
        return 0
    if LAUNCHED & os.environ.keys() and not options.config_file:
        yaml = read_options(psutil.Process(os.getppid()).cmdline()).config_file
        if not yaml:
            raise UserError("the launcher's YAML is not known; give --config_file here, too")
        options.config_file = Path(yaml)
    options.report.mkdir(parents=True, exist_ok=True)
    file, baseline = options.report / "hardware.json", options.report / "baseline.json"
    if file.exists() and '"format"' not in file.read_text(errors="replace")[:20]:
        raise UserError(f"{one_line(file, 100)} is not of samestep hardware; rename it")
    chosen = None if options.verb == "recommend" else options.config_file  # it looks for one
    used = devices.choose(chosen, options.processes)
    project = None if options.verb == "check" else read_project(flags)
    sections = []
    for verb in VERBS[1:4] if options.verb == "all" else [options.verb]:
        if verb == "check":
            section = check.run(used)
        elif verb == "bench":
            section = bench.run(used, project, flags, options.seconds)
        elif verb == "smoke":
            section = smoke.run(used, project, options.report)
        else:
            section = recommend.run(used, project)
        report.show(section)
        sections.append(section)
    found = {section.verb: dataclasses.asdict(section) for section in sections}
    content = json.dumps({"format": 2, **found}, indent=1) + "\n"
    replace_text(file, content)
    print_on_main(f"figures: {file}")
    failed = any(section.failures for section in sections)
    measured = [section for section in sections if section.verb == "bench" and section.figures]
    if measured and options.compare:
        failed |= report.compare(measured[0], options.compare) > 0
    elif measured and baseline.exists():
        try:
            report.compare(measured[0], baseline)
        except ValueError as error:
            print_on_main(f"not compared with {baseline}, which you may remove: {one_line(error)}")
    elif options.verb == "all" and not failed:
        replace_text(baseline, content)
        print_on_main(f"kept as the baseline, with which later calls compare: {baseline}")
    return int(failed)


def main() -> None:
    """Runs the program; does not return."""
    shutdown.run_alone(measure)
