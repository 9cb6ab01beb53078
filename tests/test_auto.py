"""micro_batch_size auto: memory that runs out ends no run, and changes no result."""

import json
import re

import pytest

from conftest import ROOT, digest, newest, status
from test_core import FSDP2, script, words_of

SCRIPT, SHARDED = ROOT / "tests" / "own_auto.py", ROOT / "tests" / "sharded_on_cpu.py"
AGAIN = "ran out of memory, and is computed again"
BLOCKS = FSDP2 | {"FSDP_TRANSFORMER_CLS_TO_WRAP": "Block"}


def run(folder, processes, size, plan=(), *words, **env):
    """Exit code, stdout and stderr of each process of own_auto.py."""
    program = [SHARDED, SCRIPT] if env else [SCRIPT]
    given = (folder, size, json.dumps(dict(plan)), *words)
    return script(processes, *given, program=program, seconds=60, **env)


def numbers(printed):
    """Losses, norms and scores by step, as one process has printed them."""
    found = re.findall(r"^(LOSS|EVAL) (\d+) (\S+) ?(\S*)$", printed, re.M)
    return {(kind, int(step)): [float(v) for v in values if v] for kind, step, *values in found}


def check_same(ended, expected, count=15):
    for _, printed, _ in ended:
        values = numbers(printed)
        assert len(values) == count
        for key, value in values.items():
            assert value == pytest.approx(expected[key], rel=1e-6), key
        assert "False" not in printed  # storages of what failed


@pytest.fixture(scope="module")
def fixed(tmp_path_factory):
    """What four rows at once give on one process."""
    return numbers(words_of(run(tmp_path_factory.mktemp("fixed"), 1, 4)))


FAULTS = [[1, 4, "forward"], [0, 5, "middle"], [1, 6, "backward"], [1, 4, "eval"], [0, 8, "eval"]]
FAULTS += [[0, 7, "backward"], [1, 7, "forward"]]  # both
ALONE = [[0, 4, "forward"], [0, 5, "middle"], [0, 6, "backward"], [0, 8, "eval"]]
LIMITED = {
    "one process": (1, {"limits": [60]}, 4, 0),
    "one process, faults": (1, {"limits": [110], "faults": ALONE}, 8, 3),
    "one process, later": (1, {"limits": [200], "later": {"3": [100], "6": [30]}}, 16, 5),
    "in backward": (1, {"limits": [60], "at": "backward", "later": {"6": [15]}}, 4, 3),
    "other limits": (2, {"limits": [60, 30]}, 2, 0),
    "faults": (2, {"limits": [96, 96], "faults": FAULTS}, 8, 4),
    "other limits later": (2, {"limits": [60, 96], "later": {"6": [60, 24]}}, 4, 2),
}


@pytest.mark.parametrize("name", LIMITED)
def test_the_result_is_that_of_a_fixed_size(fixed, tmp_path, name):
    """Wherever memory runs out: the losses, norms and scores, and nothing of it stays in memory."""
    processes, plan, size, again = LIMITED[name]
    ended = run(tmp_path, processes, "auto", plan)
    printed = words_of(ended)
    check_same(ended, fixed)
    assert f"micro_batch_size auto: {size} rows of [12] fit" in printed
    assert printed.count(AGAIN) == again, printed
    if "faults" in plan:
        assert "FREE True" in printed


def test_in_bf16_a_step_that_is_computed_again_is_the_same(tmp_path):
    """To the bit as it was, and to bf16's rounding in smaller micro-batches."""
    bf16 = {"ACCELERATE_MIXED_PRECISION": "bf16"}
    plan = {"limits": [60, 60], "faults": FAULTS, "later": {"9": [30, 60]}}
    found = []
    for name, size, given in (("fixed", 4, {}), ("auto", "auto", plan)):
        ended = script(2, tmp_path / name, size, json.dumps(given), program=[SCRIPT], **bf16)
        found.append((words_of(ended), [numbers(printed) for _, printed, _ in ended]))
    (_, (expected, _)), (printed, both) = found
    assert "bf16" in printed and printed.count(AGAIN) == 6, printed
    for values in both:
        for (kind, step), value in expected.items():
            rel = 0 if kind == "LOSS" and step < 9 else 2**-8
            assert values[kind, step] == pytest.approx(value, rel=rel, abs=0), (kind, step)


def test_what_no_larger_batch_explains_is_computed_once_as_it_was(tmp_path):
    """Another program's minute on the device does not cut."""
    faults = [[0, 3, "forward"], [0, 7, "backward"], [0, 11, "middle"]]
    printed = words_of(run(tmp_path, 1, "auto", {"limits": [60], "faults": faults}))
    assert printed.count(f"{AGAIN}: as it was") == printed.count(AGAIN) == 3
    assert status(tmp_path)["micro_batch_size"] == 4


@pytest.mark.parametrize("processes", [1, 2])
def test_killed_and_resumed_it_has_the_same_bits(tmp_path, processes):
    """Before the first save the size that was found is found again, after one that of then."""
    plan = {"limits": [60, 60], "faults": [[0, 4, "forward"]], "later": {"9": [30, 40]}}
    words = {1: ["buffer", "state"], 2: ["buffer"]}[processes]  # what forward passes change
    words_of(run(tmp_path / "whole", processes, "auto", plan, *words))
    for number, step in enumerate([3, 9, 0]):
        ended = run(tmp_path / "killed", processes, "auto", plan | {"kill": step}, *words)
        printed = "".join(text for _, text, _ in ended)
        assert {code for code, *_ in ended} == ({-9} if step else {0}), ended
        assert ("] fit, whose passes" in printed) == (number == 0)
        assert ("as before, 16 samples" in printed) == (number > 0)
    assert digest(newest(tmp_path / "killed")) == digest(newest(tmp_path / "whole"))
    for name, size in {"05": 4, "12": 2}.items():
        path = tmp_path / "killed" / "checkpoints" / f"step-000000{name}" / "manifest.json"
        assert json.loads(path.read_text())["hardware"]["micro_batch_size"] == size


def test_memory_that_shrank_between_two_starts_is_searched_anew(fixed, tmp_path):
    plan = {"limits": [60, 60], "kill": 9}
    ended = run(tmp_path, 2, "auto", plan)
    assert {code for code, *_ in ended} == {-9}, ended
    ended = run(tmp_path, 2, "auto", {"limits": [60, 20]})
    assert "as before, 16 samples" in words_of(ended)
    assert "1 rows of [12] fit" in words_of(ended)
    check_same(ended, {key: fixed[key] for key in fixed if key[1] > 5}, 9)


@pytest.mark.parametrize("processes", [1, 2])
def test_nothing_of_a_failed_attempt_lives_on(tmp_path, processes):
    """What forward passes change, in buffers, counters and queues, is as without it."""
    words = {1: ["buffer", "state"], 2: ["buffer"]}[processes]
    faults = [[0, 4, "backward"], [processes - 1, 7, "middle"], [0, 9, "forward"]]
    plan = {"limits": [60, 60]}
    words_of(run(tmp_path / "whole", processes, "auto", plan, *words))
    ended = run(tmp_path / "failed", processes, "auto", plan | {"faults": faults}, *words)
    assert words_of(ended).count(AGAIN) == 3
    assert digest(newest(tmp_path / "failed")) == digest(newest(tmp_path / "whole"))


ROW = "row 57 alone does not fit into the memory of the device"
ENDS = {
    "a row, in the search": (1, "auto", {"limits": [10]}, [], 2, f"before the first step: {ROW}"),
    "of one process": (2, "auto", {"limits": [60, 10]}, [], 2, f": before the first step: {ROW}"),
    "a row, in a step": (1, "auto", {"limits": [60], "later": {"3": [11]}}, [], 2, "step 3: row"),
    "of two": (2, "auto", {"limits": [60, 60], "later": {"3": [60, 11]}}, [], 2, "step 3: row"),
    "in an evaluation": (
        2,
        "auto",
        {"eval": [200, 11]},
        [],
        2,
        "the evaluation after step 4: row",
    ),
    "the optimizer": (1, "auto", {"faults": [[0, 3, "optimizer"]]}, [], 1, "the memory is full"),
    "a plain loss": (1, "auto", {"limits": [60]}, ["plain"], 1, "step.backward got a loss"),
    "a number": (1, 8, {"limits": [60]}, [], 1, "give --micro_batch_size auto"),
    "exact": (1, "auto", {}, ["exact"], 2, "micro_batch_size auto cannot be combined with exact"),
    "static_graph": (2, "auto", {}, ["static"], 2, "cannot be combined with static_graph"),
    "a stream": (1, "auto", {}, ["stream"], 2, "cannot be combined with a stream"),
    "SyncBatchNorm": (1, "auto", {}, ["synced"], 2, "cannot be combined with SyncBatchNorm"),
    "too much to copy": (1, "auto", {}, ["large"], 2, "forward passes change 120 MB"),
    "another word": (1, "most", {}, [], 2, "micro_batch_size is 'most'; give a whole number"),
}


@pytest.mark.parametrize("name", ENDS)
def test_what_it_cannot_do_is_one_line(tmp_path, name):
    processes, size, plan, words, code, line = ENDS[name]
    ended = run(tmp_path, processes, size, plan, *words)
    assert {found for found, *_ in ended} == {code}, ended
    assert line in "".join(printed + errors for _, printed, errors in ended), ended


def test_fsdp_is_searched_at_the_start(fixed, tmp_path):
    """Lone errors in the search, in a block or in its backward pass, end no process, and leave no
    gradient; one in the run ends it, and the next start takes half."""
    for at, limits, size in (("middle", [110, 30], 2), ("backward", [60, 110], 4)):
        ended = run(tmp_path / at, 2, "auto", {"limits": limits, "at": at}, **BLOCKS)
        assert f"{size} rows of [12] fit" in words_of(ended)
        check_same(ended, fixed)
    folder, plan = tmp_path / "run", {"limits": [60, 60]}
    ended = run(folder, 2, "auto", plan | {"faults": [[1, 7, "backward"]]}, **BLOCKS)
    assert {code for code, *_ in ended} == {1}, ended
    assert "step 7 ran out of memory with micro-batches of 4 rows; the next" in ended[1][2]
    assert status(folder)["micro_batch_size"] == 2
    ended = run(folder, 2, "auto", plan, **BLOCKS)
    assert "as before, 16 samples = 2 x 4 x 2" in words_of(ended)
    check_same(ended, {key: fixed[key] for key in fixed if key[1] > 5}, 9)
