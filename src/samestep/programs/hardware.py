"""Tests this machine's devices, and says which YAML of configs/accelerate/ suits a model.

    python -m samestep hardware                                  check, bench and smoke, in a report
    python -m samestep hardware smoke --config_file configs/accelerate/fsdp2.yaml
    python -m samestep hardware recommend --config configs/train/default.yaml

check names what makes training wrong or impossible. bench measures the devices and what connects
them. smoke starts train.py on one device and on all, and compares what it logs. recommend says how
much memory the model of a recipe needs, and which YAML trains it here. Flags of train.py (--config,
--learning_rate, ...) may follow the verb. The figures go to runs/hardware/hardware.json.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

from samestep.base.console import IS_MAIN, one_line, print_on_main
from samestep.base.files import replace_text
from samestep.hardware import bench, check, devices, recommend, report, smoke
from samestep.hardware.project import read_project
from samestep.processes import shutdown
from samestep.processes.ranks import UserError, as_user_error
from samestep.programs import make_parser

VERBS = ("all", "check", "bench", "smoke", "recommend")
FOLDER = Path("runs/hardware")


@as_user_error()
def measure() -> int:
    """Runs the parts of the report that are asked for; the exit code."""
    parser = make_parser("hardware", __doc__)
    add = parser.add_argument
    about = "all, without a verb: check, bench and smoke in one report"
    add("verb", nargs="?", default="all", choices=VERBS, help=about)
    add("--config_file", type=Path, metavar="YAML", help="of configs/accelerate/, for smoke")
    add("--processes", type=int, metavar="N", help="devices to use (default: all)")
    add("--seconds", type=float, default=0.5, help="for each figure of bench (default: 0.5)")
    options, flags = parser.parse_known_args()
    if options.verb == "check" and flags:
        raise UserError(f"check takes no {one_line(flags[0])}; see samestep hardware --help")
    if not IS_MAIN:  # the first process of a launcher starts others itself
        return 0
    yaml = options.config_file or shutdown.launcher_yaml()
    if options.verb == "recommend":  # it looks for one
        yaml = None
    used = devices.choose(yaml, options.processes)
    project = None if options.verb == "check" else read_project(flags)
    FOLDER.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Callable] = {
        "check": lambda section: check.run(section, used),
        "bench": lambda section: bench.run(section, used, project, flags, options.seconds),
        "smoke": lambda section: smoke.run(section, used, project, FOLDER),
        "recommend": lambda section: recommend.run(section, used, project),
    }
    sections = {}
    for verb in VERBS[1:4] if options.verb == "all" else [options.verb]:
        section = sections[verb] = report.Section()
        try:
            parts[verb](section)
        except devices.Wrong as error:
            section.failures.append(str(error))
        report.show(verb, section)
    content = {verb: dataclasses.asdict(section) for verb, section in sections.items()}
    text = json.dumps(content, indent=1) + "\n"
    replace_text(FOLDER / "hardware.json", text)
    print_on_main(f"figures: {FOLDER / 'hardware.json'}")
    failed = any(section.failures for section in sections.values())
    baseline = FOLDER / "baseline.json"
    measured = sections.get("bench")
    if measured and measured.figures and baseline.exists():
        report.compare(measured, baseline)
    elif options.verb == "all" and not failed:
        replace_text(baseline, text)
        print_on_main(f"kept as the baseline, with which later calls compare: {baseline}")
    return int(failed)


def main() -> None:
    """Runs the program; does not return."""
    shutdown.run_alone(measure)
