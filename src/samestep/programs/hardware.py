"""Measures this machine, and says which YAML of configs/accelerate/ suits it.

    python -m samestep hardware
    python -m samestep hardware recommend --config configs/train/default.yaml
    accelerate launch --config_file configs/accelerate/multi_gpu.yaml -m samestep hardware smoke
    python -m samestep hardware bench --compare baseline.json

Without a verb it checks. check, bench and smoke measure the processes that the launcher starts;
recommend is started with python. Flags of train.py (--config, --learning_rate, ...) may follow
those of a verb, except for check. The figures go to hardware.json in the folder --report.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

from accelerate import PartialState

from samestep.base.console import IS_MAIN, one_line
from samestep.hardware import bench, check, recommend, report, smoke
from samestep.hardware.project import UNREAD, Project, read_project
from samestep.processes import meeting, shutdown
from samestep.processes.device import PROCESSES
from samestep.processes.ranks import Ranks, UserError, as_user_error, catch
from samestep.start import startup

TIMEOUT = 600  # seconds that a process waits for the others
VERBS = {"check": check, "bench": bench, "recommend": recommend, "smoke": smoke}


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line for all processes."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def path(text: str) -> Path:
    """A path on the command line; the shell replaces no ~ after an equals sign."""
    return Path(os.path.expanduser(text))


def parse_arguments(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The arguments of samestep hardware, and the rest, which is for train.py."""
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser("samestep hardware", description=__doc__, formatter_class=form)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", prog=parser.prog, required=True)
    for name, module in VERBS.items():
        about = module.__doc__.splitlines()[0]
        verb = verbs.add_parser(name, help=about, description=about, allow_abbrev=False)
        add = verb.add_argument
        add("--report", type=path, default=Path("runs/hardware"), help="folder for the figures")
        add("--compare", type=path, metavar="OLD", help="name what is slower than in OLD, a .json")
        slower = "with --compare: exit with 1 if more than this share slower (default: 0.1)"
        share = report.number(float, 1)
        add("--threshold", type=share, metavar="SHARE", default=0.1, help=slower)
        if module in (bench, recommend):  # the others have no flags of their own
            module.add_arguments(verb)
    if not words or words[0].startswith("-") and words[0] not in ("-h", "--help"):
        words = ["check", *words]
    return parser.parse_known_args(words)


def prepare() -> tuple[argparse.Namespace, Project | None, dict, dict]:
    """All that needs no other process: arguments, the project's data, what is measured, and the
    older report."""
    options, flags = parse_arguments(sys.argv[1:])
    old = report.load(options.compare) if options.compare else {}
    if IS_MAIN:
        report.prepare_folder(options.report)
    project = None
    if options.verb == "recommend":
        recommend.check(options)
        project = read_project(flags)  # it writes all fields into its recipe
    elif options.verb != "check":
        project = read_project(flags, UNREAD)
    elif flags:
        raise UserError(f"check takes no {one_line(flags[0])}; see --help")
    versions = startup.versions()
    conditions = {"device": versions.get("gpu", versions["cpu"]), "processes": PROCESSES}
    if project:
        precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").replace("no", "fp32")
        recipe = one_line(" ".join([str(project.recipe), *project.flags]))
        conditions |= {"recipe": recipe, "precision": precision}
    if old:
        report.check_comparable(options.verb, conditions, old)
    return options, project, conditions, old


def measure() -> int:
    """Runs a verb on all processes; the exit code."""
    found, problem = catch(as_user_error()(prepare))
    ranks = Ranks(TIMEOUT, meeting.join())
    try:
        ranks.raise_everywhere(problem)
        options, project, conditions, old = found
        section = VERBS[options.verb].run(options, project, ranks, PartialState().device)
        section.conditions, code = conditions, 0
        with ranks.fail_together(), as_user_error():
            if IS_MAIN:
                code = report.finish(section, options, old)
        return ranks.from_main(code)
    except RuntimeError as error:
        raise ranks.name_missing(error) from error


def main() -> None:
    """Runs the program in this process; does not return."""
    shutdown.run_alone(measure)
