"""The programs of the library, by their verbs: `python -m samestep launch` calls `launch.main()`.

The docstring of a module is the text of --help; `main` returns the exit code, and wrong words are a
line and code 2. Verbs that ask a run are in `ask`; `hardware` measures what its verb here prints.
"""

import argparse

from samestep.base.console import one_line


def make_parser(verb: str, about: str | None) -> argparse.ArgumentParser:
    """A parser for `samestep COMMAND`, whose errors are one line and exit code 2."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        f"samestep {verb}", description=about, formatter_class=form, allow_abbrev=False
    )
    parser.error = lambda problem: parser.exit(2, f"samestep {verb}: {one_line(problem)}\n")
    return parser
