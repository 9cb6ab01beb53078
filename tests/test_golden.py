"""The data and the first losses of each task are those of the files in tests/golden/."""

import copy
import functools
import json

import pytest

import golden
from conftest import bake

CASES = [
    pytest.param(name, case, marks=[pytest.mark.slow] if case == "demo" else [])
    for name, case in golden.CASES
]


@pytest.fixture(scope="module")
def projects(tmp_path_factory):
    """A function: the project of a task, and a folder for its runs."""

    @functools.cache
    def project(name):
        folder = tmp_path_factory.mktemp(name)
        return bake(folder, task=name, tracker="none"), folder

    return project


@pytest.mark.parametrize("name, case", CASES)
def test_examples_splits_and_losses_are_those_of_the_file(projects, name, case):
    """After a change that was meant: python tests/golden.py --write"""
    old = golden.stored(name)[case]
    if golden.is_for_another_python(old):
        pytest.skip(f"the file has the demo of Python {old['python']}")
    project, folder = projects(name)
    new = json.loads(json.dumps(golden.record(project, name, case, folder)))
    changed = golden.compare(name, case, old, new)
    assert not changed, "\n".join(changed)


def test_what_has_changed_is_named():
    old = golden.stored("causal_lm")["texts"]
    assert golden.compare("causal_lm", "texts", old, old) == []
    new = copy.deepcopy(old)
    new["train"]["last"]["targets"].insert(0, -100)
    new["losses"][1] *= 1.0001
    changed = golden.compare("causal_lm", "texts", old, new)
    assert [line.split(": old ")[0] for line in changed] == [
        "causal_lm, texts: loss of step 2",
        "causal_lm, texts: train: last: targets",
    ]
