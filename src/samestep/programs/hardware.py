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
import atexit
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from accelerate import PartialState

from samestep.base.console import IS_MAIN, one_line, protect_output, say
from samestep.hardware import bench, check, recommend, report, smoke
from samestep.hardware.project import UNREAD, Project, read_project
from samestep.processes import meeting
from samestep.processes.ranks import Failed, Ranks, UserError, as_user_error, catch
from samestep.processes.shutdown import exit_code_for, exit_process, is_speaker, kill_workers
from samestep.start import startup

TIMEOUT = 600  # seconds that a process waits for the others
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
VERBS = {"check": check, "bench": bench, "recommend": recommend, "smoke": smoke}


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line."""

    def error(self, message: str) -> None:
        raise UserError(f"{message}; see {self.prog} --help")


def path(text: str) -> Path:
    """A path on the command line; the shell replaces no ~ after an equals sign."""
    return Path(os.path.expanduser(text))


def parse_arguments(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The arguments of samestep hardware, and the rest, which is for train.py."""
    about, commands, rest = __doc__.split("\n\n", 2)
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser("samestep hardware", commands.strip(), about, rest, formatter_class=form)
    parser.allow_abbrev = False
    options = {"title": "verbs", "dest": "verb", "metavar": "VERB", "prog": "samestep hardware"}
    verbs = parser.add_subparsers(**options, required=True)
    for name, module in VERBS.items():
        about = module.__doc__.splitlines()[0]
        verb = verbs.add_parser(name, help=about, description=about, allow_abbrev=False)
        add = verb.add_argument
        add("--report", type=path, default=Path("runs/hardware"), help="folder for the figures")
        add("--compare", type=path, metavar="OLD", help="name what is slower than in OLD, a .json")
        slower = "with --compare: exit with 1 if more than this share slower (default: 0.1)"
        add("--threshold", type=report.number(float, 1), metavar="SHARE", help=slower)
        module.add_arguments(verb)
    if not words or words[0].startswith("-") and words[0] not in ("-h", "--help"):
        words = ["check", *words]
    return parser.parse_known_args(words)


def prepare() -> tuple[argparse.Namespace, Project | None, dict]:
    """All that needs no other process: arguments, the project's data, the older report."""
    options, flags = parse_arguments(sys.argv[1:])
    if options.threshold is not None and not options.compare:
        raise UserError(
            "--threshold is read with --compare; give the older report, or leave it out"
        )
    old = report.load(options.compare) if options.compare else {}
    if old:
        report.check_comparable(options.verb, {}, old)
    if IS_MAIN:
        report.prepare_folder(options.report)
    if options.verb == "check":
        if flags:
            raise UserError(f"check takes no {one_line(flags[0])}; see --help")
        return options, None, old
    if options.verb == "recommend":
        recommend.check(options)
        return options, read_project(flags), old  # it writes all fields into its recipe
    return options, read_project(flags, UNREAD), old


def finish(options: argparse.Namespace, section: report.Section, old: dict) -> int:
    """Prints, saves and compares what a verb has found; the exit code."""
    report.show(section)
    report.save(options.report, section)
    say(f"figures: {options.report / 'hardware.json'}")
    worse = []
    if old:
        limit = options.threshold or 0.1
        changes, worse = report.compare(section, old, limit)
        say("\n".join([f"compared with {options.compare}:", *changes]))
        slower = f"more than {limit:.0%} slower, or missing"
        say(f"{len(worse)} of {len(changes)} figures are {slower}")
    return 1 if section.failures or worse else 0


def run() -> int:
    """Runs a verb on all processes; the exit code. Errors are one line."""
    ranks = None
    try:
        found, problem = catch(as_user_error()(prepare))
        ranks = Ranks(TIMEOUT, meeting.join())
        ranks.raise_everywhere(problem)
        options, project, old = found
        versions = startup.versions()
        device = versions.get("gpu", versions["cpu"])
        conditions = {"device": device, "processes": ranks.layout.processes}
        if project:
            precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").replace("no", "fp32")
            recipe = one_line(" ".join([str(project.recipe), *project.flags]))
            conditions |= {"recipe": recipe, "precision": precision}
        with ranks.fail_together(), as_user_error():
            if old and IS_MAIN:
                report.check_comparable(options.verb, conditions, old)
        section = VERBS[options.verb].run(options, project, ranks, PartialState().device)
        section.conditions, code = conditions, 0
        with ranks.fail_together(), as_user_error():
            if IS_MAIN:
                code = finish(options, section, old)
        return ranks.from_main(code)
    except BaseException as error:
        error = ranks.name_missing(error) if ranks else error
        if isinstance(error, KeyboardInterrupt):
            error = SystemExit("stopped by a signal")
        code, line = exit_code_for(error)
        line = str(error) if isinstance(error, Failed) else line  # there is no checkpoint
        if line and is_speaker(error):
            print(f"samestep hardware: {one_line(line, 1000)}", file=sys.stderr)
        elif not line and not isinstance(error, SystemExit):
            traceback.print_exception(error)
        return code


def stop(*_: Any) -> None:
    """Ends what runs at the first signal, so that it removes its files; ignores the others."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> NoReturn:
    """Runs the program in this process; does not return."""
    protect_output()
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN or number != signal.SIGHUP:  # nohup
            signal.signal(number, stop)
    atexit.register(kill_workers)  # last in, first out: before multiprocessing waits for them
    exit_process(run())
