"""Questions to a run: every step is a function of a checkpoint, the data and the code.

A verb is a function of its name, in a module whose docstring is the text of --help; VERBS has the
arguments. Each reads a record, and may train again:

    recorded_run     what a folder says: settings, lines, checkpoints, history; without torch
    recorded_rows    its rows: ids(step), and backwards steps_of(row, data)
    start_again      the run's own program, as its processes were started

A record may be a stranger's: what it holds is checked where it is read, and printed in single
lines. It says what decides the result. What executes, writes or sends is said by flags or by the
recipe that lies here: start_again.words tells them apart.
"""

import argparse
import importlib
import os
import sys
from pathlib import Path
from typing import Any

from samestep.base.console import print_json, protect_output
from samestep.programs import make_parser


def positive(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 on")
    return int(text)


RUN = {"help": "folder of a run, such as runs/default"}
_PROCESSES = {"type": positive, "metavar": "P", "help": "default: as many as the run had"}
_MODULES = {"when": "rows"}  # verbs whose module has another name
# The arguments of each verb.
VERBS: dict[str, dict[str, Any]] = {
    "audit": {
        "receipt": {"type": Path, "help": "file that samestep receipt has written"},
        "--steps": {"default": ":", "metavar": "A:B", "help": "default: all"},
        "--run": {"type": Path, "help": "folder of the run, to resume at step A"},
        "--processes": _PROCESSES,
        "--anyway": {"action": "store_true", "help": "train in spite of differences"},
    },
    "diff": {"runs": {"nargs": 2, "metavar": "RUN", "help": "folders of two runs"}},
    "receipt": {
        "run": RUN,
        "--output": {"type": Path, "metavar": "FILE", "help": "default: RUN/receipt.json"},
    },
    "rehearse": {
        "--steps": {"type": positive, "default": 6, "metavar": "N", "help": "of each start: 6"},
        "--processes": {
            "type": positive,
            "nargs": "+",
            "default": [1, 2],
            "metavar": "P",
            "help": "numbers of processes to compare: 1 2",
        },
        "--from": {"dest": "run", "metavar": "RUN", "help": "begins at its newest checkpoint"},
        "--but": {"nargs": "+", "default": [], "metavar": "NAME", "help": "the loop may carry it"},
        "--timeout": {"type": positive, "default": 600, "metavar": "S", "help": "of a start: 600"},
        "--keep": {"metavar": "FOLDER", "help": "for all records and logs"},
    },
    "replay": {
        "run": RUN,
        "--step": {"type": positive, "metavar": "N", "help": "default: names steps to look at"},
        "--without": {"type": int, "nargs": "+", "metavar": "ROW", "help": "rows to leave out"},
        "--top": {"type": positive, "default": 8, "metavar": "K", "help": "rows to print: 8"},
        "--gradients": {"action": "store_true", "help": "the norm of each row's gradient, too"},
        "--processes": _PROCESSES,
    },
    "rows": {
        "run": RUN,
        "--step": {"type": positive, "metavar": "N", "help": "default: compares all lines"},
        "--verify": {"action": "store_true", "help": "compares all lines, also with --step"},
    },
    "when": {
        "run": RUN,
        "row": {"nargs": "+", "metavar": "ROW|TEXT", "help": "its number, text or place"},
    },
}


def main(verb: str) -> int:
    """Answers the question of the command; the exit code. Whatever a file holds that is wrong is
    one line, exit code 2: 1 would say that something differs.

    What is not known are flags of train.py, for `audit`, or of its task, for others; what stands
    after -- is a command.
    """
    module = importlib.import_module(f"samestep.ask.{_MODULES.get(verb, verb)}")
    parser = make_parser(verb, module.__doc__)
    for name, about in VERBS[verb].items():
        parser.add_argument(name, **about)
    parser.add_argument("--json", action="store_true", help="prints the answer as one JSON object")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    args, args.flags = parser.parse_known_args(words[:end])
    args.command, args.answer = words[end + 1 :], {}  # for --json
    others = [] if verb in ("audit", "rehearse", "replay") else args.command
    if verb == "receipt" or (verb != "audit" and not " ".join(args.flags).startswith("--task.")):
        others = args.flags + others
    if others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    protect_output()
    sys.stdin = open(os.devnull)  # no library may ask here whether code of a record may run
    try:
        code = getattr(module, verb)(args) or 0
    except Exception as error:
        kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
        print_json(2, error=f"{kind}{error}")
        parser.error(f"{kind}{error}")
    print_json(code, **args.answer)
    return code
