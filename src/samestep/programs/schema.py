"""Writes configs/schema.json, by which editors complete and check recipes.

    python -m samestep schema

The first line of a recipe names the file. Write it anew after an edit of the fields in train.py or
task.py. Visual Studio Code reads it with the extension YAML of Red Hat, other editors with
yaml-language-server.
"""

import functools
import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic.errors import PydanticUserError
from pydantic_core import to_jsonable_python

from samestep.launch import shutdown
from samestep.programs import make_parser
from samestep.run.startup import find_project
from samestep.settings.config import field_notes, fields_of

PATH = Path("configs/schema.json")


def recipe_schema(config_class: Any) -> dict[str, Any]:
    """The JSON schema of recipes, by which editors complete and check them."""
    notes = field_notes(config_class)
    defaults = config_class()
    schema: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": {}}
    for name, (kind, field) in fields_of(config_class).items():
        try:
            own = TypeAdapter(kind).json_schema()
        except PydanticUserError:  # it can only be set in the code
            continue
        if "one_command" in field.metadata:
            continue
        own["description"] = notes.get(name, "")
        default = functools.reduce(getattr, name.split("."), defaults)
        own["default"] = to_jsonable_python(default, fallback=str)
        if "$defs" in own:  # of types with fields of their own
            schema.setdefault("$defs", {}).update(own.pop("$defs"))
        *sections, last = name.split(".")
        place = schema["properties"]
        for each in sections:
            empty = {"type": ["object", "null"], "additionalProperties": False, "properties": {}}
            place = place.setdefault(each, empty)["properties"]
        place[last] = own
    return schema


def write() -> None:
    """Writes the schema of this folder's train.py and task.py, and prints its place."""
    make_parser("schema", __doc__).parse_args()
    train, _ = find_project()
    text = json.dumps(recipe_schema(train.Config), indent=2, ensure_ascii=False)
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(text + "\n", encoding="utf-8")
    print(f"{PATH}: the fields of recipes")


def main() -> None:
    """Runs the program; bad input is one line and exit code 2."""
    shutdown.run_alone(write)
