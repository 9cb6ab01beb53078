"""Lays the library's source beside train.py, where Python finds it first: it is yours to change.

    python -m samestep eject

Everything works as before. `cruft update` still brings new versions of the library, as wheels in
vendor/; your copy stays what it is. To go back, remove the folder samestep/.
"""

import shutil
from pathlib import Path

from samestep.base.console import one_line, protect_output
from samestep.base.files import remove
from samestep.programs import make_parser

SOURCE = Path(__file__).resolve().parents[1]


def main() -> None:
    """Runs the program; bad input is one line and exit code 2."""
    protect_output()
    parser = make_parser("eject", __doc__)
    parser.parse_args()
    target, partial = Path("samestep"), Path(".samestep.partial")
    if target.resolve() == SOURCE:
        parser.error("the library lies in samestep/ already, and is the one that runs")
    if target.exists():
        parser.error("samestep is there already; move it away")
    if not Path("train.py").is_file():
        parser.error(f"there is no train.py in {Path.cwd()}; start it in a project's folder")
    try:
        remove(partial)  # of an interrupted one
        shutil.copytree(SOURCE, partial, ignore=shutil.ignore_patterns("__pycache__"))
        partial.rename(target)
    except OSError as error:
        parser.error(f"cannot write samestep/: {one_line(error)}")
    files = len(list(target.rglob("*.py")))
    print(f"samestep/ has the library's {files} files, which run from now on; commit them")
