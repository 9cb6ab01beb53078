"""Writes configs/schema.json, by which editors complete and check recipes.

    python -m samestep schema

The first line of a recipe names the file. Write it anew after an edit of the fields in train.py or
task.py. Visual Studio Code reads it with the extension YAML of Red Hat, other editors with
yaml-language-server.
"""

import json
from pathlib import Path

from samestep.processes import shutdown
from samestep.programs import make_parser
from samestep.settings.config import recipe_schema
from samestep.start.startup import find_project

PATH = Path("configs/schema.json")


def write() -> None:
    """Writes the schema of this folder's train.py and task.py, and prints its place."""
    make_parser("schema", __doc__).parse_args()
    train, _ = find_project()
    text = json.dumps(recipe_schema(train.Config), indent=2, ensure_ascii=False, default=str)
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(text + "\n", encoding="utf-8")
    print(f"{PATH}: the fields of recipes")


def main() -> None:
    """Runs the program; bad input is one line and exit code 2."""
    shutdown.run_alone(write)
