"""The benchmarks run to their end, and compare the same work. No test looks at a time."""

import importlib.util
import json
import os
import subprocess
import sys
import time

import psutil
import pytest
import torch
import torch._inductor.config

from conftest import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import checklist  # noqa: E402
import clock  # noqa: E402
import compare  # noqa: E402
import ddp  # noqa: E402
import gpu  # noqa: E402
import scaling  # noqa: E402
import steps  # noqa: E402
import work  # noqa: E402

PLAIN, BAKED = compare.PLAIN, compare.BAKED
PEERS = [name for name in compare.PEERS if name != "Lightning"]
if importlib.util.find_spec("lightning"):  # `make bench` installs it in an environment of its own
    PEERS.append("Lightning")


def run(program, output, *arguments):
    """What a program of benchmarks/ writes: the content of its .json."""
    command = [sys.executable, ROOT / "benchmarks" / program, "--output", output, *arguments]
    result = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stdout + result.stderr
    (file,) = output.glob("*.json")
    assert str(file.stem) in result.stdout
    return json.loads(file.read_text()), result.stdout


@pytest.mark.slow
def test_all_peers_do_the_same_work_in_one_and_two_processes(tmp_path):
    """All did what the plain loop did, each step was timed, and a row shows each."""
    flags = ["--sizes", "small", "--rounds", 1, "--steps", 2, "--starts", 1, "--peers", *PEERS]
    report, printed = run("compare.py", tmp_path, *flags)
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
        assert printed.count(f"| {processes} ") >= len(PEERS)
    assert set(report["starts"]) == {*PEERS, compare.LAUNCHED}
    assert (tmp_path / "cpu.png").stat().st_size


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("torchvision"), reason="torchvision is missing")
def test_all_loaders_give_batches_of_images(tmp_path):
    flags = ["--images", 40, "--rounds", 1, "--batches", 1, "--workers", 0, 1]
    report, printed = run("images.py", tmp_path, *flags)
    for rates in report["rates"].values():
        assert len(rates) == 4
        assert all(len(each["rate"]) == 1 and min(each["rate"]) > 0 for each in rates.values())
    assert printed.count("| project, ") == printed.count("| ImageFolder, ") == 2


@pytest.mark.slow
def test_all_ways_prepare_text_and_a_batch_is_read_anywhere(tmp_path):
    flags = ["--megabytes", 1, "--rounds", 1, "--batches", 2]
    report, printed = run("scale.py", tmp_path, *flags)
    for ways in report["prepare"].values():
        assert len(ways) == 4
        assert all(run["cpu"] > 0 and run["peak"] > 0 for (run,) in ways.values())
    assert len(report["order"]["rows"]) == len(report["order"]["positions"]) == 4
    assert printed.count("| 1 ") == 4
    assert (tmp_path / "scale.png").stat().st_size


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


def test_what_the_counter_counts():
    weight = torch.nn.Parameter(torch.ones(4, 8))
    counter = clock.Counter()
    with clock.CopyCounter(counter), counter:
        host = torch.ones(2, 4)
        assert host.sum().item() == 8 and host.tolist()
        assert counter.waits == 0
        logits = host @ weight
        assert counter.flops == 2 * 2 * 4 * 8
        labels = torch.tensor([1, -100])
        torch.nn.functional.cross_entropy(logits, labels).backward()
        assert counter.flops == 2 * (2 * 2 * 4 * 8)  # the gradient of the weight alone
        assert counter.losses == [(pytest.approx(2.0794, rel=1e-4), 1)]
        assert counter.waits == 0
        weight.grad.sum().item()
        logits.detach().tolist()
        if weight.grad.norm() > 0:
            torch.zeros((), device="cpu").item()
    assert counter.waits == 4


@pytest.mark.slow
def test_shares_are_measured_on_the_same_bytes(tmp_path):
    short = ["--sizes", "--memory", 1, "--machines", "1, 2 x slower", "--exact", "true"]
    short += ["--settled", 10, "--rounds", 1, "--steps", 1]
    report, printed = run("steps.py", tmp_path, *short)
    assert float(report["tables"]["memory"][0]["`exact` adds"]) > 0
    exact = report["tables"]["shares"]
    assert [row["`device_shares`"] for row in exact] == ["equal", "auto", "list"]
    assert {row["`exact`"] for row in exact} == {"true"}
    assert len({row["SHA-256"] for row in exact}) == 1
    for row in exact[1:]:
        dealt = [*map(int, row["micro-batches"].split(" + "))]
        assert sum(dealt) == steps.SIZES["work"].batch and len(dealt) == 2
    assert printed.count("| 1, 2 x slower ") == 3


def test_the_formula_of_the_flops_counts_the_weights_of_the_model():
    with torch.device("meta"):
        model = work.build_model(gpu.LARGE)
    embeddings = model.get_input_embeddings().weight.numel()
    weights = sum(p.numel() for p in model.parameters())
    attention = 12 * 18 * 2048 * 2048
    assert weights == pytest.approx(1.08e9, rel=0.01)
    assert gpu.flops_a_token(gpu.LARGE) == 6 * (weights - embeddings) + attention
    assert gpu.flops_a_token(gpu.LARGE) == pytest.approx(7.10e9, rel=1e-3)
    assert gpu.flops_a_token(gpu.LARGE) - gpu.flops_a_token(gpu.LARGE, 6) == attention / 2


# One row of the sweep for each program and change; `make gpu` runs them all. On a CPU the rows of
# other precisions do the same.
SWEEP = ["loop, eager", "Trainer, eager", "all three", "exact"]


@pytest.mark.slow
def test_rows_of_the_sweep_run_on_a_cpu(tmp_path):
    with torch._inductor.config.patch(max_autotune=False):
        gpu.max_autotune()
        assert torch._inductor.config.max_autotune
    words = ["--device", "cpu", "--steps", 2, "--rows", *SWEEP]
    report, _ = run("gpu.py", tmp_path, *words)
    asked = [row.name for row in gpu.ROWS if any(word in row.name for word in SWEEP)]
    assert [*report["rows"]] == asked and len(asked) >= len(SWEEP)
    for found in report["rows"].values():
        assert "failed" not in found, found
        assert min(found["tokens_per_second"]) > 0
        assert found["kinds"]["matmul"] > 0
        assert sum(found["kinds"].values()) < found["profiled_seconds"]


def test_a_check_that_fails_or_hangs_ends_no_other(tmp_path, monkeypatch, capsys):
    """The table, the figures that are kept, what is marked, and the exit codes."""
    figures = {"tokens/s": 100.0, "s": 1.0, "GB": 1.0}
    sleep = ["sleep", f"98.{os.getpid()}"]

    def project(here):
        here.project = tmp_path
        yield checklist.Row("project", "passed")

    def measure(here):
        for unit, figure in figures.items():
            yield here.row(f"in {unit}", figure, unit, "[note]", too_slow=True)

    def fail(here):
        yield here.row("before", 1.0, "s")
        raise KeyError("c")

    def hang(here):
        here.deadline = time.monotonic() + 0.5
        code = f"import subprocess; subprocess.run({sleep})"
        yield checklist.Row("hang", "failed", here.run("-c", code)[1])

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["checklist.py", "--output", str(tmp_path), *words])
        return checklist.main()

    if not torch.cuda.is_available():
        assert run() == 2
        assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # it is set, too
    checks = {each.__name__: (1, each) for each in (project, fail, hang, measure)}
    monkeypatch.setattr(checklist, "CHECKS", checks)
    assert run("--device", "cpu", "--rows", "measure") == 0
    figures |= {"tokens/s": 80.0, "s": 0.5, "GB": 2.0}
    assert run("--device", "cpu") == 1
    (file,) = tmp_path.glob("gpu-*.json")
    rows = json.loads(file.read_text())["rows"]
    assert {name: row["verdict"] for name, row in rows.items() if row["verdict"]} == {
        "fail": "FAILED", "hang": "FAILED", "in tokens/s": "-20% WORSE", "in s": "+100%"
    }  # fmt: skip
    assert rows["in GB"]["stored"] == 1.0 and rows["before"]["figure"] == 1.0
    assert rows["fail"]["note"] == "KeyError: 'c'" and rows["hang"]["note"] == "it took too long"
    assert sleep not in [p.info["cmdline"] for p in psutil.process_iter(["cmdline"])]
    assert "| passed: [note]" in capsys.readouterr().out
    on_gpu = checklist.Place("cuda", tmp_path).row("a", 1.0, "s", too_slow=True, too_high=False)
    assert (on_gpu.verdict, on_gpu.note) == ("FAILED", "too slow")


@pytest.mark.slow
def test_the_checklist_runs_on_a_cpu(tmp_path):
    words = ["check", "tests", "goal", "async_save", "recommend", "precision"]
    report, printed = run("checklist.py", tmp_path, "--device", "cpu", "--rows", *words)
    rows = report["rows"]
    assert {row["result"] for row in rows.values()} == {"passed", "skipped"}
    for name in ("async_save, wait", [*checklist.FIRST][0]):
        assert rows[name]["figure"] > 0
    assert "| no_step_waits_for_the_gpu[seq2seq-true] " in printed
    assert all(name in rows for name in ("check", "recommend", "causal_lm, bf16"))


@pytest.mark.slow
def test_the_settings_of_ddp(tmp_path):
    names = [ddp.DEFAULT, "static_graph: true"]
    words = ["--sizes", "small", "--rounds", 1, "--steps", 2, "--settings", *names]
    report, printed = run("ddp.py", tmp_path, *words)
    assert [row["setting"] for row in report["rows"]] == names
    assert printed.count("| small ") == len(names)


def test_scaling_compares_within_a_round(tmp_path):
    """The machine was half as fast in the second round, which changes no speed-up."""
    found = {"strong": {1: [10.0, 5.0], 2: [15.0, 7.5]}, "weak": {1: [10.0, 5.0], 2: [20.0, 10.0]}}
    rows = scaling.rows_of(found)
    assert [(row["speed-up"], row["efficiency"]) for row in rows] == [
        (1, 1),
        (1.5, 0.75),
        (1, 1),
        (2, 1),
    ]
    scaling.draw(rows, tmp_path / "scaling.png", "")
    assert (tmp_path / "scaling.png").stat().st_size > 10_000
