"""The page on sweeps: its loop compares runs, its program stops the trial that lags behind."""

import os
import re
import subprocess
import sys

import pytest

from conftest import ROOT, SOURCE, bake, status

ADDED = ROOT / ".venv" / "extra"


PAGE = (ROOT / SOURCE / "docs" / "sweeps.md").read_text(encoding="utf-8")


def block(language):
    (code,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)
    return code


@pytest.mark.slow
def test_a_loop_compares_learning_rates(tmp_path):
    project = bake(tmp_path / "project", tracker="none")
    (project.path / ".venv").symlink_to(sys.prefix)
    project.run("bash", "-c", block("sh"))
    for rate in ("1e-3", "3e-3", "1e-2"):
        assert status(project.path / "runs" / f"lr-{rate}")["state"] == "finished"
    assert (project.path / "curves.png").stat().st_size > 10_000


@pytest.mark.slow
def test_a_sweep_stops_the_trial_that_lags_behind(tmp_path):
    if not ADDED.exists():
        pytest.skip("make test-all installs optuna")
    project = bake(tmp_path / "project", tracker="none")
    program = block("python")
    known = 'study.enqueue_trial({"learning_rate": 3e-3})'
    changes = {"default.yaml": "smoke.yaml --max_steps 200", "n_trials=20": "n_trials=2"}
    for old, new in {**changes, known: f"{known}\n{known.replace('3e-3', '1e-5')}"}.items():
        assert old in program
        program = program.replace(old, new)
    (project.path / "sweep.py").write_text(program, encoding="utf-8")
    env = project.env() | {"PYTHONPATH": f"{ADDED}:{os.environ['PYTHONPATH']}"}
    done = subprocess.run(
        [sys.executable, "sweep.py"], cwd=project.path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    best, pruned = (status(project.path / "runs" / "sweep" / trial) for trial in "01")
    assert (best["state"], best["exit_code"]) == ("finished", 0)
    assert (pruned["state"], pruned["exit_code"]) == ("stopped", 75)
    assert done.stdout.splitlines()[-1].endswith("runs/sweep/0")
