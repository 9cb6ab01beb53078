"""Benchmarks compare the same work, and one runs to its end. No test looks at a time."""

import json
import subprocess
import sys

import pytest

from conftest import ROOT

# Of some it is only tested that they can be imported.
sys.path.append(str(ROOT / "benchmarks"))
import checklist  # noqa: E402, F401
import compare  # noqa: E402
import ddp  # noqa: E402, F401
import gpu  # noqa: E402, F401
import scaling  # noqa: E402
import steps  # noqa: E402, F401

PLAIN, BAKED = compare.PLAIN, compare.BAKED
PEERS = [PLAIN, BAKED]


@pytest.mark.slow
def test_peers_do_the_same_work_in_one_and_two_processes(tmp_path):
    """All did what the plain loop did, each step was timed, and a row shows each."""
    flags = ["--sizes", "small", "--rounds", 1, "--steps", 2, "--starts", 1, "--peers", *PEERS]
    command = [sys.executable, ROOT / "benchmarks" / "compare.py", "--output", tmp_path, *flags]
    result = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stdout + result.stderr
    (file,) = tmp_path.glob("*.json")
    report = json.loads(file.read_text())
    for processes in ("1", "2"):
        found = report["steps"][processes]["small"]
        assert list(found) == PEERS
        for peer in found.values():
            assert peer["tokens"] == 8 * 63  # the first of a sequence is not in the loss
            assert peer["gflop"] == pytest.approx(found[PLAIN]["gflop"], rel=0.01)
            losses = peer["losses"]
            assert len(losses) >= 20
            assert losses == pytest.approx(found[PLAIN]["losses"][: len(losses)], rel=1e-3)
            assert len(peer["seconds"]) == len(peer["cpu"]) == 1
            assert min(peer["seconds"]) > 0 < min(peer["cpu"])
        assert found[BAKED]["waits"] <= found[PLAIN]["waits"]
        assert result.stdout.count(f"| {processes} ") >= len(PEERS)
    assert set(report["starts"]) == {*PEERS, compare.LAUNCHED}
    assert (tmp_path / "cpu.png").stat().st_size


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


def test_scaling_compares_within_a_round():
    """The machine was half as fast in the second round, which changes no speed-up."""
    found = {"strong": {1: [10.0, 5.0], 2: [15.0, 7.5]}, "weak": {1: [10.0, 5.0], 2: [20.0, 10.0]}}
    rows = scaling.rows_of(found)
    found = [(row["speed-up"], row["efficiency"]) for row in rows]
    assert found == [(1, 1), (1.5, 0.75), (1, 1), (2, 1)]
