"""Measures this machine, and says which YAML of configs/accelerate/ suits it.

    python hardware.py check
    python hardware.py recommend
    accelerate launch --config_file configs/accelerate/multi_gpu_bf16.yaml hardware.py check

check: versions, devices, precisions, disk.
bench: speed of devices, links, disk, loader and training step; a slow device and the ways out.
recommend: what the model needs; the YAML and the micro-batch size that suit it, as two files.
smoke: a few training steps, with checks that name the process that is wrong.
tune: short trials of train.py; writes the fastest precision, compilation and micro-batch size.

Flags of train.py (--config, --learning_rate, ...) may follow those of a verb. The figures go to
hardware.json in the folder --report, and those of bench also to hardware.png. With --compare OLD
the program says what got slower than in an older one, and exits with 1 past --threshold.
"""

import argparse
import sys
import traceback
from pathlib import Path

from accelerate import PartialState

import task
import train
from machine import bench, check, recommend, report, smoke, tune
from machine.project import Project, read_project
from machine.report import Section
from training import startup
from training.console import IS_MAIN, one_line, protect_output, say
from training.ranks import Ranks, UserError, as_user_error, catch
from training.shutdown import exit_code_for, exit_process

TIMEOUT = 600  # seconds that a process waits for the others
VERBS = {"check": check, "bench": bench, "recommend": recommend, "smoke": smoke, "tune": tune}


def parse_arguments(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The arguments of hardware.py, and the rest, which is for train.py."""
    about, _, rest = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="hardware.py",
        description=about,
        epilog=rest,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name, module in VERBS.items():
        verb = verbs.add_parser(name, help=module.__doc__.splitlines()[0], allow_abbrev=False)
        verb.add_argument("--report", type=Path, default=Path("runs/hardware"))
        verb.add_argument("--compare", type=Path, help="an older hardware.json")
        verb.add_argument("--threshold", type=report.threshold, default=0.1)
        module.add_arguments(verb)
    return parser.parse_known_args(words or ["check"])


def prepare() -> tuple[argparse.Namespace, Project | None, dict]:
    """All that needs no other process: arguments, the project's data, the older report."""
    options, flags = parse_arguments(sys.argv[1:])
    old = report.load(options.compare) if options.compare else {}
    if old:
        report.check_comparable(options.verb, {}, old)
    if IS_MAIN:
        report.prepare_folder(options.report)
    if options.verb == "tune":
        return options, tune.read_recipe(train.Config, task, flags), old
    if not VERBS[options.verb].NEEDS_PROJECT:
        if flags:
            raise UserError(f"{options.verb} takes no {one_line(flags[0])}; see --help")
        return options, None, old
    return options, read_project(train.Config, task, train.build_optimizer, flags), old


def draw_picture(content: dict, output: Path) -> Path | str:
    """Draws hardware.png. matplotlib takes a second to import: only bench needs it."""
    from machine import picture

    return picture.try_draw(content, output)


def finish(options: argparse.Namespace, section: Section, old: dict) -> int:
    """Prints, saves and compares what a verb has found; the exit code."""
    report.show(section)
    content = report.save(options.report, section)
    say(f"figures: {options.report / 'hardware.json'}")
    if section.verb == "bench":
        say(f"picture: {draw_picture(content, options.report / 'hardware.png')}")
    worse = []
    if old:
        changes, worse = report.compare(section, old, options.threshold)
        say("\n".join([f"compared with {options.compare}:", *changes]))
        say(f"{len(worse)} of {len(changes)} figures are more than {options.threshold:.0%} slower")
    return 1 if section.failures or worse else 0


def main() -> int:
    """Runs a verb on all processes; the exit code. Errors are one line."""
    ranks = None
    try:
        found, problem = catch(as_user_error()(prepare))
        if found and found[0].verb == "tune":  # starts processes itself, and leaves GPUs to them
            options, recipe, old = found
            with as_user_error():
                return finish(options, tune.run(options, recipe, old), old)
        ranks = Ranks(TIMEOUT)
        ranks.raise_everywhere(problem)
        options, project, old = found
        versions = startup.versions()
        device = versions.get("gpu", versions["cpu"])
        conditions = {"device": device, "processes": ranks.layout.processes}
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
        code, line = exit_code_for(error)
        if line and IS_MAIN:
            print(f"hardware.py: {one_line(line, 1000)}", file=sys.stderr)
        elif not line and not isinstance(error, SystemExit):
            traceback.print_exception(error)
        return code


if __name__ == "__main__":
    protect_output()
    exit_process(main())
