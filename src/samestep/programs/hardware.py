"""Tests this machine's devices, and says which YAML of configs/accelerate/ suits a model.

    python -m samestep hardware                                  check, bench and smoke, in a report
    python -m samestep hardware smoke --config_file configs/accelerate/fsdp2.yaml
    python -m samestep hardware recommend --config configs/train/default.yaml

check names what makes training wrong or impossible. bench measures the devices and what connects
them. smoke starts train.py on one device and on all, and compares what it logs. recommend says how
much memory the model of a recipe needs, and which YAML trains it here. Flags of train.py (--config,
--learning_rate, ...) may follow the subcommand. The figures go to runs/hardware/hardware.json.
"""

import dataclasses
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from samestep.base.console import escaped, is_main, one_line, print_json, print_on_main
from samestep.base.errors import UserError, as_user_error
from samestep.base.files import read_json_object, replace_text
from samestep.hardware import bench, devices, recommend, smoke
from samestep.hardware.devices import Section, short
from samestep.hardware.project import read_project
from samestep.launch import launcher, shutdown
from samestep.programs import make_parser

VERBS = ("all", "check", "bench", "smoke", "recommend")
FOLDER = Path("runs/hardware")
LONG = 30  # lines of a fact that is in hardware.json alone


@as_user_error()
def measure() -> int:
    """Runs the parts of the report that are asked for; the exit code."""
    parser = make_parser("hardware", __doc__)
    add = parser.add_argument
    add("verb", nargs="?", default="all", choices=VERBS, help="all: check, bench and smoke")
    add("--config_file", type=Path, metavar="YAML", help="of configs/accelerate/, for smoke")
    add("--processes", type=int, metavar="N", help="devices to use (default: all)")
    add("--seconds", type=float, default=0.5, help="for each figure of bench (default: 0.5)")
    add("--json", action="store_true", help="prints the report as one JSON object")
    options, flags = parser.parse_known_args()
    if options.verb == "check" and flags:
        raise UserError(f"check takes no {one_line(flags[0])}; see samestep hardware --help")
    if options.processes is not None and options.processes < 1:
        raise UserError(f"--processes is {options.processes}; give 1 or more")
    if not is_main():  # the first process of a launcher starts others itself
        return 0
    words = shutdown.LAUNCHER_WORDS
    found = launcher.find_yaml(launcher.parse(words)) if words else ""
    yaml = options.config_file or (Path(found) if found else None)
    used = devices.choose(None if options.verb == "recommend" else yaml, options.processes)
    project = None if options.verb == "check" else read_project(flags)
    FOLDER.mkdir(parents=True, exist_ok=True)
    parts = {
        "check": lambda section: devices.check(section, used),
        "bench": lambda section: bench.run(section, used, project, flags, options.seconds),
        "smoke": lambda section: smoke.run(section, used, project, FOLDER),
        "recommend": lambda section: recommend.run(section, used, project, flags),
    }
    report, sections = FOLDER / "hardware.json", {}  # of each verb the newest figures
    print_on_main(f"figures go to {report}")
    for verb in VERBS[1:4] if options.verb == "all" else [options.verb]:
        section = sections[verb] = Section()
        try:
            parts[verb](section)
        except devices.Wrong as error:
            section.failures.append(str(error))
        show(verb, section)
    content = {verb: dataclasses.asdict(section) for verb, section in sections.items()}
    text = json.dumps(read_json_object(report) | content, indent=1)
    replace_text(report, text + "\n")
    code = int(any(section.failures for section in sections.values()))
    print_json(code, **content)
    return code


def show(verb: str, section: Section) -> None:
    """Prints facts, figures and advice."""
    table = Table(title=verb, show_header=False)
    for name, text in section.facts.items():
        if text.count("\n") < LONG:
            table.add_row(escaped(name), escaped(text, kept="\n"))
    for name, values in section.figures.items():
        table.add_row(name, "  ".join(map(short, values)))
    Console(highlight=False, markup=False, emoji=False).print(table)
    for line in [*section.lines, *(f"failed: {line}" for line in section.failures)]:
        print_on_main(escaped(line))


def main() -> None:
    """Runs the program; does not return."""
    shutdown.run_alone(measure)
