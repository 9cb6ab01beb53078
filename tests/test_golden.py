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

    def said(change):
        new = copy.deepcopy(old)
        change(new)
        return "\n".join(golden.compare("causal_lm", "texts", old, new))

    def shift(new):
        new["train"]["last"]["targets"].insert(0, -100)

    def swap(new):
        listed = new["validation"]["documents_listed"].split()
        new["validation"] |= {"documents_listed": " ".join(["ffffff", *listed[1:]])}
        new["validation"]["documents_sha256"] = "other"

    def order(new):
        new["train"]["examples_sha256"] = "other"

    def lose(new):
        new["losses"][1] *= 1.0001

    last, documents = old["train"]["examples"] - 1, old["validation"]["documents"]
    assert f"train example {last} (last): targets: old [" in said(shift)
    assert f"1 documents of {documents} are gone, 1 were added" in said(swap)
    assert "train: other examples, or in another order" in said(order)
    assert said(lose).startswith("causal_lm, texts: loss of step 2: old ")
    assert said(lambda new: new["losses"].pop()).endswith("new nan")
