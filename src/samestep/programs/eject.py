"""Copies the library's source beside train.py, where Python finds it first: it is yours to change.

    python -m samestep eject

`make update` still brings new versions of the library, as wheels in vendor/; your copy stays what
it is. To go back, remove the folder samestep/.
"""

import shutil
from pathlib import Path

from samestep.base.console import protect_output
from samestep.base.files import remove
from samestep.programs import make_parser

SOURCE = Path(__file__).resolve().parents[1]
_PARTIAL = Path(".samestep.partial")  # Python would import a copy that is cut short


def main() -> None:
    """Runs the program; bad input is one line and exit code 2."""
    protect_output()
    parser = make_parser("eject", __doc__)
    parser.parse_args()
    if not Path("train.py").is_file():
        parser.error(f"there is no train.py in {Path.cwd()}; start it in a project's folder")
    if Path("samestep").exists():
        parser.error("samestep/ is there already; move it away")
    try:
        remove(_PARTIAL)
        shutil.copytree(SOURCE, _PARTIAL, ignore=shutil.ignore_patterns("__pycache__"))
        _PARTIAL.rename("samestep")
    except OSError as error:
        parser.error(f"cannot write samestep/: {error}")
    print("samestep/ has the library's files, which run from now on; commit them")
