"""Runs on several sources: the same on any number of processes, continued, evaluated by source."""

import json
import shutil

import pytest

from conftest import copy_until, lines
from same import check_same

FLAGS = ["--task.samples", 60, "--task.held_out", 11, "--task.dropout", 0.2]
# 60 rows to train on in three sources; 11 rows to evaluate on.
SOURCES = """
import task
from samestep.step.inputs import Source
def sources_of(dataset):
    if len(dataset) == 11:
        return [Source("a", 5, 1), Source("none", 0, 1), Source("b/c", 6, 1)]
    return [Source("a", 7, WEIGHT), Source("d", 13, 1), Source("b/c", 40, 5)]
views = task.views
def with_sources(cfg):
    found = views(cfg)
    for each in found:
        each.sources = sources_of(each)
    return found
task.views = with_sources
"""
BEFORE = SOURCES.replace("WEIGHT", "2")
ACCEPT = ["--accept_changes", "--lr_schedule", "constant", "--log_every", 1]


@pytest.fixture(scope="module")
def whole(quick, tmp_path_factory):
    """An uninterrupted run of one process."""
    output = tmp_path_factory.mktemp("mixture") / "whole"
    printed = quick("--output_dir", output, *FLAGS, before=BEFORE)
    # On the screen are the scores of each source.
    assert "eval_loss/b/c 1" in printed and "rows 11  " in printed
    assert "rows/a 5" in printed and "samples/a" not in printed
    return output


def test_metrics_tell_the_samples_and_the_loss_of_each_source(whole):
    for line in lines(whole, "loss"):
        samples = line["samples"]
        assert line["samples/a"] + line["samples/d"] + line["samples/b/c"] == samples
        assert abs(line["samples/a"] - samples * 2 / 8) < 1 and line["epoch"] == samples / 60
        assert abs(line["samples/b/c"] - samples * 5 / 8) < 1
    for line in lines(whole, "eval_loss"):
        assert (line["rows"], line["rows/a"], line["rows/b/c"]) == (11, 5, 6)
        assert line["eval_loss/a"] != line["eval_loss/b/c"] and "eval_loss/none" not in line
        assert min(line["eval_loss/a"], line["eval_loss/b/c"]) < line["eval_loss"]
        assert line["eval_loss"] < max(line["eval_loss/a"], line["eval_loss/b/c"])


def test_sources_are_continued_in_the_middle_of_a_pass(quick, whole, tmp_path):
    """Step 4 is sample 32: in the fifth pass over a."""
    output = copy_until(whole, 4, tmp_path / "run")
    quick("--output_dir", output, *FLAGS, before=BEFORE)
    check_same(whole, output)


def test_another_weight_or_source_is_another_result(quick, tmp_path):
    """Whether a field of the config says it or the code of task.py."""
    flags = ["--output_dir", tmp_path / "run", *FLAGS, "--max_steps"]
    quick(*flags, 4, before=BEFORE)
    printed = quick(*flags, 4, before=BEFORE.replace('"d"', '"e"'), codes=[2])
    assert printed.count("\n") == 1 and "data sources: a: weight 2, 7 rows; d: " in printed
    quick(*flags, 5, "--accept_changes", before=BEFORE.replace("7, 2", "7, 3"))
    (changed,), (*_, last) = (lines(tmp_path / "run", name) for name in ("changes", "loss"))
    before, _ = changed["changes"]["data sources"]
    assert before.startswith("a: weight 2") and last["samples/a"] in (10, 11)


@pytest.mark.slow
def test_the_mixture_goes_on_when_weights_change_twice(tiny, quick, tmp_path):
    """The same rows on another number of processes, and with another stop in between."""
    one, two = tmp_path / "one", tmp_path / "two"
    flags = [*FLAGS, *ACCEPT, "--output_dir"]
    quick(*flags, one, "--max_steps", 4, before=BEFORE)
    shutil.copytree(one, two)
    first, second = BEFORE.replace("7, 2", "7, 30"), BEFORE.replace("7, 2", "7, 1")
    said = "other weights of sources after 32 samples: each goes on after its last row\n"
    assert said in quick(*flags, one, "--max_steps", 8, before=first)
    quick(*flags, one, "--max_steps", 12, before=second)
    tiny.train(2, *flags, two, "--max_steps", 6, before=first)
    assert "other weights" not in tiny.train(2, *flags, two, "--max_steps", 8, before=first)
    tiny.train(2, *flags, two, "--max_steps", 12, before=second)
    found, names = lines(one, "loss"), ("samples/a", "samples/d", "samples/b/c")
    for mine, theirs in zip(found, lines(two, "loss"), strict=True):
        for key in ("samples", *names, "epoch", "batch_hash", "lr"):
            assert mine[key] == theirs[key]
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
    counts = [[found[step - 1][name] for name in names] for step in (4, 8, 10, 12)]
    assert counts[0] == [8, 4, 20] and [sum(each) for each in counts] == [32, 64, 80, 96]
    assert counts[1][0] == 8 + 27 and counts[3][0] - counts[2][0] in (2, 3)


@pytest.mark.slow
def test_the_loss_of_a_source_is_that_of_an_evaluation_of_it_alone(tiny, whole):
    """Also on several processes, of which some have no batch of a source."""
    flags = ["--output_dir", whole, *FLAGS, "--eval_only", "--exact", "true"]
    file, alone = whole / "evaluation" / "metrics.json", {}
    for name, part in (("a", "range(5)"), ("b/c", "range(5, 11)")):
        before = "import task, torch; old = task.views; part = torch.utils.data.Subset; "
        before += f"task.views = lambda cfg: (old(cfg)[0], part(old(cfg)[1], {part}))"
        tiny.train(1, *flags, "--accept_changes", before=before)
        alone[name] = json.loads(file.read_text())["eval_loss"]
    for processes in (1, 3):
        tiny.train(processes, *flags, before=BEFORE)
        line = json.loads(file.read_text())
        for name, loss in alone.items():
            assert line[f"eval_loss/{name}"] == pytest.approx(loss, rel=1e-14)
