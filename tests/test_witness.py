"""A program of others, ckpt-chaos, kills train.py at its file events, resumes it, and compares."""

import os
import re
import sys

import pytest

from conftest import ROOT, make_tiny

ADDED = ROOT / ".venv" / "extra"

# Modes: a kill before an event; with half of a file written; SIGTERM, then a kill; and a kill that
# takes what no fsync has flushed.
CHAOS = ["-m", "ckpt_chaos", "run", "--modes", "before,torn,term,unsynced", "--ckpt-ignore-size"]
CHAOS += ["--checkpoint-glob", "{out}/checkpoints/step-*"]
CHAOS += ["--step-regex", r"(?:continuing from \S*step-0*|is finished: \D*)(\d+)"]
CHAOS += ["--result-file", "{out}/model/model.safetensors"]
CHAOS += ["--fail-on", "HARD_FAIL,SILENT_DIVERGENCE,LOST_WORK,CONTROL_FAIL"]
TRAIN = ["train.py", "--config", "configs/train/default.yaml", "--max_steps", 8]


@pytest.mark.slow
@pytest.mark.skipif(not (ADDED / "ckpt_chaos").exists(), reason="make test-all installs it")
@pytest.mark.parametrize("ranks, crash_rank, points", [(1, 0, 4), (2, 1, 2)])
def test_a_run_survives_kills_at_file_events(tmp_path, ranks, crash_rank, points):
    """No point loses work, fails or ends with other bytes; docs/benchmarks.md has a longer run."""
    tiny = make_tiny(tmp_path)
    options = ["--ranks", ranks, "--crash-rank", crash_rank, "--max-points", points]
    result = tiny.run(
        *(sys.executable, *CHAOS, *options, "--work", tmp_path / "chaos", "--"),
        *(sys.executable, *TRAIN, "--output_dir", "{out}"),
        ACCELERATE_USE_CPU="true",
        PYTHONPATH=f"{ADDED}:{os.environ['PYTHONPATH']}",
        CKPT_CHAOS_CRASH_RANK=str(crash_rank),  # ckpt-chaos 0.1.8 kills rank 0 alone, or none
    )
    events = re.search(rf"(\d+) file events -> {points} crash points", result.stdout)
    assert int(events[1]) >= (40 if crash_rank == 0 else 2), result.stdout
    assert not re.findall(r"\[before\].*DID NOT CRASH", result.stdout), result.stdout
    verdicts = dict(re.findall(r"^([A-Z_]+): (\d+)$", result.stdout, flags=re.M))
    assert verdicts == {"PASS": str(points + 1)}, result.stdout  # one run is not killed
