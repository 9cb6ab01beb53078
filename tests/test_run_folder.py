"""run_folder.py on its own: lines of lost steps, status on a full disk, what a start leaves."""

import errno
import json
import os

import pytest

from conftest import status
from samestep.base import run_folder

# Killed at step 215, with a checkpoint of step 200, which is evaluated again: 200, 210 and 220.
KILLED = [
    {"step": 0, "started": {}},
    {"step": 200, "loss": 2.0},
    {"step": 200, "eval_loss": 2.5},
    {"step": 210, "loss": 1.9},
    {"step": 210, "save_seconds": 0.1},
    {"step": 213, "event": "skipped"},
]
RESUMED = [{"step": 200, "started": {}}, {"step": 200, "eval_loss": 2.4}]
RESUMED += [{"step": 210, "loss": 1.8}, {"step": 220, "loss": 1.7}]


def test_lines_of_steps_that_were_trained_again_do_not_count(tmp_path):
    background = {"step": 204, "committed_step": 200}
    text = "".join(json.dumps(line) + "\n" for line in [*KILLED, background, *RESUMED])
    (tmp_path / "metrics.jsonl").write_text(text)
    assert run_folder.read_metrics(tmp_path) == [*KILLED[:2], background, *RESUMED]


def test_a_status_keeps_what_was_saved_and_fits_a_full_disk(tmp_path, monkeypatch):
    """A full disk has room for it in place of the old one; the first one is told as what it is."""

    def full(path, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(run_folder, "replace_text", full)
        run_folder.write_status(tmp_path, "running")
    run_folder.write_status(tmp_path, "running", saved=200)
    assert run_folder.write_final_status(tmp_path, "failed", "a reason " * 20, 1)
    assert status(tmp_path)["saved"] == 200 and status(tmp_path)["state"] == "failed"
    monkeypatch.setattr(run_folder, "replace_text", full)
    run_folder.write_status(tmp_path, "running", saved=0)
    assert status(tmp_path)["saved"] == 0 and "reason" not in status(tmp_path)
