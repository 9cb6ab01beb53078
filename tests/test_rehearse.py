"""`samestep rehearse` finds what a kill, a stop or another cut of the steps would change."""

import json
import os
import re
import sys
from argparse import Namespace

import pytest

from conftest import ROOT, preloaded
from samestep import ask
from samestep.ask import rehearse
from samestep.base.errors import UserError
from test_core import script, words_of

PROGRAM = ROOT / "tests" / "own_state.py"


def rehearsed(monkeypatch, capsys, words, *options, folder=ROOT):
    """The exit code and the table of a command of one process; its starts are forks."""

    def finished(command, envs, log, seconds):
        envs = [{**env, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"} for env in envs]
        ended = preloaded(folder, envs, words, 120)
        log.write_text("".join(printed + errors for _, printed, errors in ended))
        return max(abs(code) for code, *_ in ended)

    monkeypatch.setattr(rehearse.start_again, "finished", finished)
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


def test_a_rehearsal_begins_at_a_checkpoint_and_is_read_by_programs(monkeypatch, capfd, tmp_path):
    """Of a copy: the run stays as it is."""
    words_of(script(1, "notes", tmp_path / "run", 4, program=[PROGRAM]))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    words = [str(PROGRAM), "stream", str(tmp_path / "run"), "20"]
    options = ["--from", str(tmp_path / "run"), "--but", "this.draw", "--json", "--processes", "1"]
    code, said = rehearsed(monkeypatch, capfd, words, *options)
    rows = json.loads(said[said.index("{") : said.rindex("}") + 1])["rows"]
    assert code == 1 and [row["good"] for row in rows] == [True, True, False, False, True]
    assert rows[2]["run"] == "after kill -9 in step 8"
    assert "in no checkpoint" not in str(rows)
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}


def test_a_project_is_rehearsed(project, monkeypatch, capsys):
    """train.py, whose own folder is not written."""
    words = ["train.py", "--config", "configs/train/smoke.yaml"]
    code, table = rehearsed(monkeypatch, capsys, words, folder=project.path)
    assert code == 0 and len(re.findall("^ok ", table, re.M)) == 6, table
    assert not (project.path / "runs" / "smoke").exists()


def test_a_command_is_given():
    with pytest.raises(UserError, match="give your command after --"):
        rehearse.rehearse(Namespace(command=[]))
