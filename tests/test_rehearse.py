"""`samestep rehearse` finds what a kill, a stop or another cut of the steps would change."""

import os
import re
import sys

import pytest

from conftest import ROOT, preloaded
from samestep import ask
from samestep.ask import rehearse

PROGRAM = ROOT / "tests" / "own_state.py"


def rehearsed(monkeypatch, capsys, words, *options):
    """The exit code and the table of a command of one process; its starts are forks."""

    def finish(command, envs, log, args):
        envs = [{**env, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"} for env in envs]
        ended = preloaded(ROOT, envs, words, 120)
        log.write_text("".join(printed + errors for _, printed, errors in ended))
        return max(abs(code) for code, *_ in ended)

    monkeypatch.setattr(rehearse, "finish", finish)
    monkeypatch.setattr(ask, "protect_output", lambda: None)
    monkeypatch.setattr(sys, "argv", ["samestep rehearse", *options, "--", "python", *words])
    try:
        code = ask.main("rehearse")
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr()
    return code, said.out + said.err.replace("... ", "")


# The exit code, what stands in the table, and rows that are all right.
FAULTS = {
    "ema": (
        1,
        r"NO after kill .*\n     in no checkpoint: this\.ema\.shadow\.0 is float32.*so .*\n"
        "     make it an attribute",
        "2 processes",
    ),
    "late_mean": (
        1,
        r"NO after kill -9 in step 4 .* loss of batch 0 .*\n     in no checkpoint: "
        r"this\.mean is 0\.0, uninterrupted \d",
        "2 processes",
    ),
    "stream": (1, r"in no checkpoint: this\.draw is generator", "2 processes"),
    "by_rank": (1, r"NO 2 processes .* loss of batch \d \(process 1\) is .*\n     .*rank", "kill"),
    "by_world": (1, r"NO 2 processes .* loss of batch 0 \(process 0\)", "kill"),
    "by_batch": (
        1,
        r"NO other micro-batches .* step 2: loss is .*\n     .*rows_depend",
        "2 processes",
    ),
    "new_rows": (1, r"NO the same again .* batch \d \(process 0\)", "as it is"),
    "curriculum": (1, r"NO after kill .* batch 0 \(process 0\) is ", "2 processes"),
    "still_weight": (0, "no step has changed 0.weight", "kill"),
    "experiment": (0, "after kill -9", "same again", "kill", "SIGTERM", "2 processes"),
    "rotary": (0, "after kill -9", "kill", "other micro-batches", "2 processes"),
    "notes": (0, "carried, without effect: this.cache.len", "kill"),
    "baseline": (2, "cannot be rehearsed: exit code 2: own_state.py: .* another the second time"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_has_its_row(kind, monkeypatch, capsys, tmp_path):
    code, said, *good = FAULTS[kind]
    ended, table = rehearsed(monkeypatch, capsys, [str(PROGRAM), kind, str(tmp_path / "run"), "9"])
    assert ended == code and re.search(said, table), table
    assert all(re.search(f"^ok .*{name}", table, re.M) for name in good), table
    assert not (tmp_path / "run").exists() and os.listdir(tmp_path) == []
