"""Questions to a run: every step is a function of a checkpoint, the data and the code.

A verb is a module with `answer(args)`; VERBS has the arguments. They share:

    record.Record   what a folder says: settings, lines, checkpoints, history; without torch
    data.RunData    its rows: ids(step), and backwards steps_of(row, data)
    again.started   the run's own program, as its processes were started

rows and when compute the order of the rows, diff and receipt compare what runs were made of, replay
and audit train again.
"""

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

from samestep.base.console import protect_output
from samestep.programs import make_parser


def positive(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 on")
    return int(text)


RUN = {"help": "folder of a run, such as runs/default"}
_PROCESSES = {"type": positive, "metavar": "P", "help": "default: as many as the run had"}
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
    """Answers the question of the command; the exit code. Bad input is one line, exit code 2.

    What `audit` does not know are flags of train.py, and what stands after -- is a command.
    """
    module = importlib.import_module(f"samestep.ask.{verb}")
    parser = make_parser(verb, module.__doc__)
    for name, about in VERBS[verb].items():
        parser.add_argument(name, **about)
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    args, args.flags = parser.parse_known_args(words[:end])
    args.command = words[end + 1 :]
    known = args.command if verb in ("audit", "replay") else []
    if verb != "audit" and (others := args.flags + [*args.command[len(known) :]]):
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    protect_output()
    try:
        return module.answer(args) or 0
    except (ValueError, OSError) as error:
        parser.error(str(error))
