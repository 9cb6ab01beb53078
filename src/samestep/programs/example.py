"""Lists examples, whole task files above all, or writes one.

    python -m samestep example                  lists them
    python -m samestep example plain_module     writes plain_module.py into this folder
    python -m samestep example train_pipeline   writes train_pipeline.py, for a pipeline of stages

To train a task, move it to task.py, and remove the section `task:` of your recipe, whose fields
belong to the old task. Any task file works in any project.
"""

from pathlib import Path

from samestep.base.console import one_line, protect_output
from samestep.programs import make_parser

PROGRAMS = ("own_script", "train_pipeline")  # and no tasks
EXAMPLES = Path(__file__).parents[1] / "examples"


def main() -> None:
    """Runs the program; bad input is one line and exit code 2."""
    protect_output()
    parser = make_parser("example", __doc__)
    parser.add_argument("name", nargs="?", help="a name of the list")
    name = parser.parse_args().name
    files = {path.stem: path for path in sorted(EXAMPLES.glob("*.py"))}
    if not name:
        for each, path in files.items():
            about = path.read_text("utf-8").splitlines()[0].strip('" ')
            print(f"{each:24}{about}")
        return
    if name not in files:
        parser.error(f"there is no example {one_line(name, 60)}; give one of {', '.join(files)}")
    file = Path(files[name].name)
    try:
        with open(file, "xb") as new:
            new.write(files[name].read_bytes())
    except FileExistsError:
        parser.error(f"{file} is there already; move it away")
    except OSError as error:
        parser.error(f"cannot write {file}: {error.strerror}")
    more = f"To train it: mv {file} task.py, and remove `task:` from the recipe"
    print(f"{file} is written. {'It says how it is used' if name in PROGRAMS else more}")
