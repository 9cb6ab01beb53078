"""The programs of samestep: python -m samestep COMMAND, with --help for each.

launch     trains: becomes train.py, or starts accelerate launch
env        lines for a shell, by which any launcher starts what an accelerate YAML means
prepare    prepares the data, and no more
predict    answers from a trained model
plot       draws the curves of a run, or compares runs
rows       the rows that a step of a run has trained on
when       the steps that have trained on a row
rehearse   kills, stops and cuts a command in other ways: is each step the same?
replay     computes a step of a run again: its rows, its layers, it without some rows
diff       the first step in which two runs differ, and the cause
receipt    writes the receipt of a run, by which anybody can audit it
audit      trains a part of a run again, and compares the states to the last bit
hardware   tests this machine: check, bench and smoke; recommend says which YAML
example    lists whole task files, or writes one
eject      copies the library's source beside train.py, to be changed
schema     writes configs/schema.json, by which editors complete and check recipes
"""

import samestep.base.preflight  # noqa: F401  # isort: skip
import importlib
import sys
from pathlib import Path

from samestep import ask

PROGRAMS = [path.stem for path in Path(__file__).parent.glob("programs/[a-z]*.py")]
VERBS = sorted([*PROGRAMS, *ask.VERBS])


def main() -> int | None:
    """Runs a verb; the exit code."""
    verb = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if verb in ("-h", "--help"):
        print((__doc__ or "\n".join(VERBS)).strip())  # PYTHONOPTIMIZE=2 strips docstrings
        return 0
    if verb not in VERBS:
        sys.stderr.write(f"samestep: {verb!r} is not a command; give one of {', '.join(VERBS)}\n")
        return 2
    sys.argv[:2] = [f"samestep {verb}"]
    if verb in ask.VERBS:
        return ask.main(verb)
    return importlib.import_module(f"samestep.programs.{verb}").main()


if __name__ == "__main__":
    sys.exit(main())
