"""Benchmarks compare the same work, and one runs to its end. No test looks at a time."""

import json
import re
import subprocess
import sys

import pytest

from conftest import ROOT

# Of some it is only tested that they can be imported.
sys.path.append(str(ROOT / "benchmarks"))
import compare  # noqa: E402
import gpu  # noqa: E402
import scale  # noqa: E402, F401
import scaling  # noqa: E402, F401

PEERS = PLAIN, BAKED = ["plain loop", "baked project"]


def run(program, *words):
    """What a benchmark printed, and the report that it wrote."""
    command = [sys.executable, ROOT / "benchmarks" / program, *words]
    result = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=3600)
    assert result.returncode == 0, result.stdout + result.stderr
    (file,) = words[-1].glob("*.json")
    return result, json.loads(file.read_text())


@pytest.mark.slow
def test_peers_do_the_same_work_in_one_and_two_processes(tmp_path):
    """All did what the plain loop did, each step was timed, and a row shows each."""
    flags = ["--sizes", "small", "--rounds", 1, "--steps", 2, "--peers", *PEERS]
    result, report = run("compare.py", *flags, "--output", tmp_path)
    for processes in ("1", "2"):
        found = report["steps"][processes]["small"]
        assert list(found) == PEERS
        for peer in found.values():
            assert peer["tokens"] == 8 * 63  # the first of a sequence is not in the loss
            assert peer["gflop"] == pytest.approx(found[PLAIN]["gflop"], rel=0.01)
            losses = peer["losses"]
            assert len(losses) >= 20
            assert losses == pytest.approx(found[PLAIN]["losses"][: len(losses)], rel=1e-3)
            assert len(peer["seconds"]) == 1 and peer["seconds"][0] > 0
    assert all(f"\n| {peer} |" in result.stdout for peer in PEERS)


@pytest.mark.parametrize(
    "change",
    [{"tokens": 511}, {"gflop": 1.1}, {"losses": [7.0, 6.5, 6.01]}, {"losses": [7.0]}],
    ids=["tokens", "flops", "losses", "steps"],
)
def test_other_work_ends_the_comparison(change):
    same = {"tokens": 512, "gflop": 1.0, "losses": [7.0, 6.5, 6.0]}
    compare.check_same_work({PLAIN: dict(same), BAKED: dict(same)}, 3)
    with pytest.raises(SystemExit, match=f"{BAKED} does not do the work"):
        compare.check_same_work({PLAIN: dict(same), BAKED: same | change}, 3)


CHECKED = ["exact, bf16", "kills, bf16", gpu.GOAL]


@pytest.mark.slow
def test_checks_of_a_gpu_run_on_a_cpu(tmp_path):
    """Processes that share a device have the bytes of one, killed ones too; then a speed."""
    flags = ["--device", "cpu", "--minutes", 60, "--rows", *CHECKED]
    rows = run("gpu.py", *flags, "--output", tmp_path)[1]["rows"]
    assert list(rows) == CHECKED
    assert {row["result"] for row in rows.values()} == {"passed"}
    for name in CHECKED[:2]:
        one, other = re.findall(r"\b[0-9a-f]{12}\b", rows[name]["note"])
        assert one == other
    assert rows[gpu.GOAL]["figure"] > 0
