"""Real runs: the hardware does not change the result, and a continued run is an unbroken one.

Each run is a few steps of the task with its own default data, by `accelerate launch`, by
`samestep rehearse`, or by itself.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import task
import train

PROJECT = Path(__file__).parent.parent
STEPS = ["--max_steps", "6", "--save_every", "3", "--eval_every", "3", "--log_every", "1"]
BATCH = ["--global_batch_size", "8", "--warmup_steps", "2", "--keep_checkpoints", "0"]
BATCH += ["--check_export", "false"]  # it takes seconds
# What it drops depends on the cut of a step.
NO_DROPOUT = ["--task.dropout", "0"] if hasattr(task.TaskConfig, "dropout") else []
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}

FILE = "rank-00000.safetensors"  # of the only process, in a checkpoint


def start(hardware: str, output: Path, *flags: str) -> subprocess.Popen:
    """Begins to train in `output` on what a YAML describes; "" is one CPU process, without one."""
    command = [sys.executable, "train.py"]
    if hardware:
        command = [Path(sys.executable).with_name("accelerate"), "launch", "--quiet"]
        command += ["--config_file", f"configs/accelerate/{hardware}.yaml", "train.py"]
    command += [*STEPS, *BATCH, *NO_DROPOUT, "--tracker", "none", "--output_dir", output, *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=PROJECT, env=ENV, **pipes)


def finish(run: subprocess.Popen) -> str:
    """What a run has printed when it is over."""
    printed = run.communicate()[0]
    if run.returncode:
        told = f"{' '.join(map(str, run.args))}\nended with {run.returncode}:\n"
        pytest.fail(told + printed, pytrace=False)
    return printed


def lines(output: Path, key: str) -> list[dict]:
    """The lines of metrics.jsonl that have this key."""
    text = (output / "metrics.jsonl").read_text(encoding="utf-8")
    return [line for line in map(json.loads, text.splitlines()) if key in line]


@pytest.fixture(scope="module")
def rehearsal():
    """`samestep rehearse`, which runs beside the first tests."""
    python = [sys.executable, "-m", "samestep"]
    command = [*python, "rehearse", "--json", "--steps", "4", "--processes", "1", "2", "--"]
    command += [*python, "launch", "--config_file", "configs/accelerate/cpu.yaml", "train.py"]
    command += [*STEPS, *BATCH, *NO_DROPOUT, "--micro_batch_size", "2", "--exact", "true"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, cwd=PROJECT, env=ENV, **pipes) as run:
        yield run
        run.terminate()


@pytest.fixture(scope="module")
def first(rehearsal, tmp_path_factory):
    """The folder of a run of one process, and why it failed if it did."""
    output = tmp_path_factory.mktemp("one") / "run"
    try:
        finish(start("cpu", output))
    except pytest.fail.Exception as failure:
        return output, [failure]
    return output, []


@pytest.fixture
def one(first):
    """A run of one process. If it failed, one test says why, and the others are skipped."""
    output, failures = first
    if len(failures) == 1:
        failures.append("told")
        raise failures[0]
    if failures:
        pytest.skip("the run of one process failed, as the first error says")
    return output


def test_a_run_leaves_what_the_readme_promises(one):
    assert json.loads((one / "status.json").read_text())["state"] == "finished"
    assert (one / "curves.png").stat().st_size > 10_000
    assert [p.name for p in sorted(one.glob("checkpoints/*"))] == ["step-00000003", "step-00000006"]
    assert [line["step"] for line in lines(one, "loss")] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines(one, "eval_loss")] == [3, 6]
    assert any((one / "model").iterdir())


def test_two_processes_train_the_same(one, tmp_path):
    """With two micro-batches each, in place of one for all."""
    finish(start("cpu_multi", tmp_path / "run", "--micro_batch_size", "2"))
    for key in ("loss", "eval_loss"):
        pairs = zip(lines(one, key), lines(tmp_path / "run", key), strict=True)
        for mine, theirs in pairs:
            assert mine[key] == pytest.approx(theirs[key], rel=1e-6)
            assert mine.get("batch_hash") == theirs.get("batch_hash")
            assert mine.get("lr") == theirs.get("lr")
            if key == "eval_loss":  # all scores; some are small differences, as margins are
                assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)


def test_a_run_whose_newest_checkpoint_is_damaged_ends_with_the_same_bytes(one, tmp_path):
    """What is evaluated and exported, too: an average of the weights, say, which nothing saved."""
    output = tmp_path / "run"
    shutil.copytree(one / "checkpoints", output / "checkpoints")
    last = output / "checkpoints" / "step-00000006"
    content = (last / FILE).read_bytes()
    (last / FILE).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    printed = finish(start("", output))
    assert f"continuing from {output / 'checkpoints' / 'step-00000003'}" in printed
    assert f"passed over: {last / FILE} is not the file" in printed
    for mine, theirs in zip(lines(one, "eval_loss")[1:], lines(output, "eval_loss"), strict=True):
        assert mine == theirs
    exported = [path.relative_to(one) for path in (one / "model").rglob("*") if path.is_file()]
    written = [path for path in exported if path.name != "README.md"]  # which names the folder
    for file in [Path("checkpoints") / "step-00000006" / FILE, *written]:
        assert (output / file).read_bytes() == (one / file).read_bytes(), file


def test_a_finished_run_is_left_alone(one):
    before = (one / "metrics.jsonl").read_bytes()
    assert "is finished" in finish(start("", one))
    assert (one / "metrics.jsonl").read_bytes() == before


@pytest.fixture(scope="module")
def rows(rehearsal):
    """Its rows: the first steps killed, stopped, cut otherwise."""
    found = json.loads(rehearsal.communicate()[0])
    assert "rows" in found, found.get("error")
    return found["rows"]


KINDS = ["after kill -9", "after SIGTERM", "other micro-batches", "2 processes"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_rehearsal_leaves_the_same(rows, kind):
    """To the bit, but for other micro-batches; `make rehearse` prints the whole table.

    It fails for an optimizer that keeps more than `state`, by weight, and `param_groups`, which is
    what a checkpoint has of it: write one class that keeps all of it there, as torch.optim does.
    """
    row = next(row for row in rows if row["run"].startswith(kind))
    assert row["good"], "\n".join([row["result"], *row["more"]])


def test_the_learning_rate_is_that_of_the_groups():
    """With 0 the optimizer changes nothing, else all. One inside it has groups of its own."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    optimizer = train.build_optimizer(model, train.Config())
    optimizer.load_state_dict(optimizer.state_dict())  # as accelerate does
    before = [p.detach().clone() for p in model.parameters()]
    for rate in (0.0, 0.1):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        same = [torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
        assert all(same) if rate == 0 else not any(same)


SCHEDULE = train.Config(max_steps=100, warmup_steps=10, learning_rate=1.0, final_lr_fraction=0.1)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_learning_rate_rises_to_its_peak_and_ends_at_its_share(schedule):
    cfg = dataclasses.replace(SCHEDULE, lr_schedule=schedule)
    rates = [train.lr_at(step, cfg, 100) for step in range(1, 102)]
    assert rates[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert max(rates) == 1.0
    part = dataclasses.replace(cfg, warmup_steps=0.1)  # of all steps
    assert [train.lr_at(step, part, 100) for step in range(1, 102)] == rates
    assert rates[100] == pytest.approx(1.0 if schedule == "constant" else 0.1)
    if schedule == "wsd":
        assert rates[79] == 1.0 and rates[90] == pytest.approx(0.55)
    if schedule == "cosine":
        assert rates[55] == pytest.approx(0.55)


def test_learning_rate_scales_with_the_global_batch():
    scaled = {"reference_batch_size": 8, "global_batch_size": 32, "warmup_steps": 0}
    for scaling, factor in (("none", 1), ("sqrt", 2), ("linear", 4)):
        cfg = dataclasses.replace(SCHEDULE, lr_scaling=scaling, **scaled)
        assert train.lr_at(1, cfg, 100) == pytest.approx(factor)
