"""The JSON schema, by which editors complete and check recipes: it knows what train.py knows."""

import json
import re

import jsonschema
import pytest
import yaml

from conftest import ROOT, train_module
from refusals import cases, refused, table
from samestep.programs.schema import recipe_schema
from samestep.settings import config

TASKS = [path.parent.name for path in sorted((ROOT / "templates").glob("*/task.py"))]


class EditorLoader(yaml.SafeLoader):
    """Reads 1e-3 as a number, as editors do, by version 1.2 of YAML."""


scientific = re.compile(r"[-+]?([0-9]*\.)?[0-9]+[eE][-+]?[0-9]+$")
EditorLoader.add_implicit_resolver("tag:yaml.org,2002:float", scientific, [*"-+.0123456789"])


def read(text):
    """A recipe as an editor sees it."""
    return yaml.load(text, EditorLoader)


@pytest.fixture(scope="module")
def schemas():
    """For each task what the fields give, and those that are flags alone."""
    found = {}
    for task in TASKS:
        with train_module(ROOT / "templates" / task / "task.py") as train:
            schema = json.loads(json.dumps(recipe_schema(train.Config)))
            found[task] = schema, config.fields_of(train.Config)
    return found


def test_the_program_writes_the_schema_of_the_project(schemas, projects):
    project = projects["causal_lm"]
    assert project.run("python", "-m", "samestep", "schema").stdout.startswith("configs/schema")
    written = (project.path / "configs" / "schema.json").read_text("utf-8")
    assert json.loads(written) == schemas["causal_lm"][0]


@pytest.mark.parametrize("task", TASKS)
def test_recipes_follow_the_schema_of_the_fields(schemas, projects, task):
    schema, fields = schemas[task]
    project = projects[task].path
    jsonschema.Draft202012Validator.check_schema(schema)
    recipes = sorted(project.glob("configs/train/*.yaml"))
    assert len(recipes) >= 2
    for path in recipes:
        text = path.read_text("utf-8")
        named = re.match(r"# yaml-language-server: \$schema=(\S+)\n", text)
        assert (path.parent / named[1]).resolve() == project / "configs" / "schema.json"
        jsonschema.validate(read(text), schema)
        assert {"max_steps", "tracker"} <= read(text).keys()
    own = schema["properties"]["task"]["properties"]
    described = {name: each for name, each in schema["properties"].items() if name != "task"}
    assert described["learning_rate"]["description"] == "Peak learning rate."
    assert all(each["description"] for each in [*described.values(), *own.values()])
    flags = {name for name, (_, field) in fields.items() if "one_command" in field.metadata}
    assert flags == {"accept_changes", "check", "eval_only"}
    assert {*described, *(f"task.{name}" for name in own)} == fields.keys() - flags


def test_what_the_schema_refuses_train_py_refuses_too(schemas, tmp_path):
    schema, _ = schemas["causal_lm"]
    path = tmp_path / "mine.yaml"
    with train_module(ROOT / "templates" / "causal_lm" / "task.py") as train:
        for right in cases("schema"):
            jsonschema.validate(read(right), schema)
            path.write_text(right)
            config.parse_config(train.Config, ["--config", str(path)], "")
        for wrong, name in table("schema"):
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(read(wrong), schema)
            path.write_text(wrong)
            with refused() as error:
                config.parse_config(train.Config, ["--config", str(path)], "")
            assert re.search(rf"\b{name}\b", str(error.value)), error.value
