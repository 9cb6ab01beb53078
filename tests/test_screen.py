"""What people see in a log file; which model is evaluated and exported; which settings win."""

import json
import os
import re
import shutil
import sys
import termios
from types import SimpleNamespace

import pytest

from conftest import ROOT, lines, read_weights, reseal, status, train_module, trained, wait_until
from samestep.report import tracking

LONG = ["--max_steps", 100_000, "--eval_every", 0, "--save_every", 0, "--task.row_seconds", 0.003]


def test_in_a_log_file_each_line_is_shown_and_no_bar(quick, tmp_path):
    printed = quick("--output_dir", tmp_path / "run")
    found = [int(step) for step in re.findall(r"^step (\d+)/12  loss .* samples/s", printed, re.M)]
    left = re.findall(r"^step (\d+)/.* [\d,]+ samples/s  \d\d:\d\d left$", printed, re.M)
    assert [*map(int, left)] == found[1:-1]
    assert found == list(range(1, 13)) and "\r" not in printed and "%|" not in printed


@pytest.mark.parametrize("columns", [0, 80])
def test_a_terminal_without_columns_gets_lines(tmp_path, monkeypatch, capsys, columns):
    """As those of containers and jobs, where a bar is empty; others have the loss in the bar."""
    _, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, columns))
    accelerator = SimpleNamespace(log=lambda *_, **__: None)
    with open(terminal, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        config = {"tracker": "none", "output_dir": str(tmp_path)}
        log = tracking.Log(accelerator, config, 0, 9)
        log.write({"step": 1, "loss": 0.5, "lr": 0.1, "samples_per_second": 3})
        log.close()
    said = "" if columns else "step 1/9  loss 0.5  lr 0.1  3 samples/s\n"
    assert capsys.readouterr().out == said


@pytest.mark.slow
def test_a_killed_process_is_named_with_its_signal(tiny, tmp_path):
    import psutil

    output = tmp_path / "run"
    run = tiny.launch("samestep", "cpu_multi", *LONG, "--output_dir", output)
    wait_until(lambda: trained(output, 3), run)
    family = psutil.Process(run.pid).children(recursive=True)
    process = {p.environ().get("RANK"): p for p in family}["1"]
    process.kill()
    printed = run.communicate(timeout=300)[0]
    assert run.returncode == 1 and "Traceback" not in printed, printed
    said = f"samestep launch: process 1 (pid {process.pid}) was ended by SIGKILL"
    assert said in printed


# ---- Evaluation alone ----------------------------------------------------------------------------


def test_eval_only_takes_the_best_checkpoint_and_needs_no_settings_of_the_training(quick, tmp_path):
    output = tmp_path / "run"
    base = ["--output_dir", output, "--max_steps", 24, "--learning_rate", 0.05]
    often = [*base, "--save_every", 2, "--eval_every", 2, "--keep_checkpoints", 0]
    quick(*often)
    losses = {line["step"]: line["eval_loss"] for line in lines(output, "eval_loss")}
    best = min(losses, key=losses.get)
    assert best < 24
    found = output / "evaluation" / "metrics.json"
    checked = quick(*base, "--eval_only", "--check")
    assert f"evaluates {output}/checkpoints/step-00000024 on " in checked
    for flags, step in (
        ([*often, "--export", "best"], best),
        ([*often, "--micro_batch_size", 4, "--num_workers", 0], 24),
        ([*base, "--export", "best", "--resume", output / "checkpoints" / "step-00000004"], 4),
    ):
        printed = quick(*flags, "--eval_only")
        assert "continuing" not in printed
        assert f"evaluating {output}/checkpoints/step-{step:08d}" in printed
        scores = json.loads(found.read_text())
        assert scores["step"] == step and scores["eval_loss"] == pytest.approx(losses[step])
    said = quick(*base[:2], "--eval_only", "--task.held_out", 5, codes=[2])
    assert "task.held_out: 11 -> 5" in said and "learning_rate" not in said


# ---- Which model is exported ---------------------------------------------------------------------


def weights(output):
    """The exported weights, and those of each checkpoint, as lists of numbers."""
    import torch

    model = torch.load(output / "model" / "weights.pt")
    saved = {int(p.name[5:]): read_weights(p) for p in output.glob("*/step-*")}
    flat = {step: torch.cat([v.flatten() for v in each.values()]) for step, each in saved.items()}
    names = [*next(iter(saved.values()))]
    return torch.cat([model[name].flatten() for name in names]), flat


def test_the_best_model_is_that_of_the_smallest_eval_loss(quick, tmp_path):
    flags = ["--save_every", 5, "--eval_every", 2, "--keep_checkpoints", 1, "--max_steps", 24]
    flags += ["--learning_rate", 0.05]
    output = tmp_path / "best"
    printed = quick(*flags, "--export", "best", "--output_dir", output)
    losses = {line["step"]: line["eval_loss"] for line in lines(output, "eval_loss")}
    best = min(losses, key=losses.get)
    assert 1 < best < 24  # the case is one in which it matters
    assert f"the best evaluation was that of step {best}: {losses[best]:.5g}" in printed
    card = (output / "model" / "README.md").read_text()
    assert f"Trained for {best} steps (the best checkpoint in 24) of 8 samples" in card
    assert f"| eval_loss | {losses[best]:.5g} |" in card
    exported, saved = weights(output)
    assert {*saved} == {best, 24} and exported.equal(saved[best])
    last = tmp_path / "last"
    quick(*flags, "--output_dir", last)
    exported, saved_last = weights(last)
    assert exported.equal(saved_last[24]) and saved_last[24].equal(saved[24])
    assert losses == {line["step"]: line["eval_loss"] for line in lines(last, "eval_loss")}


def flip_a_bit(file):
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize("keep", [0, 1])
def test_a_best_model_that_is_lost_is_named_and_the_last_is_exported(quick, tmp_path, keep):
    """Damaged; or deleted, where one checkpoint was to keep, so that the last is the only one."""
    output = tmp_path / "run"
    flags = ["--export", "best", "--output_dir", output, "--learning_rate", 0.05]
    flags += ["--keep_checkpoints", keep, "--max_steps", 24, "--eval_every", 2]
    printed = quick(*flags)
    losses = {line["step"]: line["eval_loss"] for line in lines(output, "eval_loss")}
    best = min(losses, key=losses.get)
    assert best < 24 and "is gone" not in printed
    path = output / "checkpoints" / f"step-{best:08d}"
    if keep:
        shutil.rmtree(path)
    else:
        flip_a_bit(path / "rank-00000.safetensors")
    shutil.rmtree(output / "model")
    printed = quick(*flags)
    lost = f"the best evaluation was that of step {best}: {losses[best]:.5g}, and its checkpoint"
    assert printed.count(f"{lost} is gone (") == 1
    told = f"warning: {lost}" if keep else ": the last model is exported, not the best\n"
    assert told in printed  # at the start the bytes are not read
    exported, saved = weights(output)
    assert exported.equal(saved[24])
    assert "Trained for 24 steps of 8" in (output / "model" / "README.md").read_text()
    printed = quick(*flags, "--eval_only")
    assert printed.count(f"{lost} is gone (") == 1 and "): the newest is evaluated\n" in printed
    assert f"evaluating {output}/checkpoints/step-00000024\n" in printed
    found = json.loads((output / "evaluation" / "metrics.json").read_text())
    assert found["eval_loss"] == pytest.approx(losses[24])


def test_a_stopped_run_finds_its_best_model_again(quick, tmp_path):
    """The best evaluation is before the stop: the second start knows it from the checkpoints."""
    flags = ["--export", "best", "--save_every", 5, "--eval_every", 2, "--learning_rate", 0.05]
    flags += ["--keep_checkpoints", 1, "--lr_schedule", "constant", "--final_lr_fraction", 0.1]
    flags = [*flags[:-2], "--max_steps"]
    for name, stops in (("whole", [24]), ("parts", [9, 24])):
        for steps in stops:
            quick(*flags, steps, "--output_dir", tmp_path / name, "--accept_changes")
            reseal(max((tmp_path / name / "checkpoints").glob("step-*")))
    whole, parts = (weights(tmp_path / name) for name in ("whole", "parts"))
    assert whole[0].equal(parts[0]) and {*whole[1]} == {*parts[1]}


# Killed when the second evaluation begins, after its step was saved.
KILL = """
import os
from samestep.project.loading import EvalLoader
begun = []
def batches(self, *given, old=EvalLoader.batches):
    begun.append(1)
    if len(begun) == 2:
        os.kill(os.getpid(), 9)
    yield from old(self, *given)
EvalLoader.batches = batches
"""


@pytest.mark.parametrize("how", [[], ["--async_save"]])
def test_a_kill_between_a_save_and_its_scores_changes_nothing(quick, tmp_path, how):
    flags = ["--export", "best", "--save_every", 5, "--eval_every", 2, "--learning_rate", 0.05]
    flags += ["--keep_checkpoints", 1, "--max_steps", 12, *how]
    quick(*flags, "--output_dir", tmp_path / "whole")
    for _ in range(3):
        quick(*flags, "--output_dir", tmp_path / "parts", before=KILL, codes=[-9])
    quick(*flags, "--output_dir", tmp_path / "parts")
    whole, parts = (weights(tmp_path / name) for name in ("whole", "parts"))
    assert whole[0].equal(parts[0]) and {*whole[1]} == {*parts[1]}
    for step in whole[1]:
        name = f"checkpoints/step-{step:08d}/manifest.json"
        found = [json.loads((tmp_path / each / name).read_text()) for each in ("whole", "parts")]
        assert found[0]["best"] == found[1]["best"] and found[0]["best"][0] in whole[1]
        assert found[0]["eval_loss"] == found[1]["eval_loss"]


def test_losses_of_other_validation_data_do_not_count(quick, tmp_path):
    flags = ["--export", "best", "--learning_rate", 0.05, "--output_dir", tmp_path / "run"]
    quick(*flags, "--max_steps", 8)
    more = ["--task.held_out", 5, "--accept_changes"]
    quick(*flags, *more, "--max_steps", 16)
    losses = {line["step"]: line["eval_loss"] for line in lines(tmp_path / "run", "eval_loss")}
    of_these = {step: loss for step, loss in losses.items() if step > 8}
    exported, saved = weights(tmp_path / "run")
    assert exported.equal(saved[min(of_these, key=of_these.get)])
    assert min(losses.values()) < min(of_these.values())  # the case is one in which it matters


# The signal comes when an evaluation has read so many batches; the first one is a rehearsal.
STOP = """
import os, signal, task
old, read = task.eval_sums, [0]
def eval_sums(model, batch):
    read[0] += 1
    if read[0] == {}:
        os.kill(os.getpid(), signal.SIGTERM)
    return old(model, batch)
task.eval_sums = eval_sums
"""


def test_a_stop_in_the_best_evaluation_changes_nothing(quick, tmp_path):
    """That of step 2, of six batches: it is made up for, and its checkpoint counts."""
    flags = ["--export", "best", "--save_every", 5, "--eval_every", 2, "--learning_rate", 0.05]
    flags += ["--keep_checkpoints", 1, "--max_steps", 12]
    quick(*flags, "--output_dir", tmp_path / "whole")
    parts = ["--output_dir", tmp_path / "parts"]
    quick(*flags, *parts, codes=[75], before=STOP.format(5))
    assert status(tmp_path / "parts")["state"] == "stopped"
    # Stopped in the evaluation that is made up for: that goes on, not the training.
    quick(*flags, *parts, codes=[75], before=STOP.format(3))
    assert lines(tmp_path / "parts", "loss")[-1]["step"] == 2
    quick(*flags, *parts)
    whole, parts = (weights(tmp_path / name) for name in ("whole", "parts"))
    assert whole[0].equal(parts[0]) and {*whole[1]} == {*parts[1]} == {2, 12}
    found = [{line["step"]: line["eval_loss"] for line in lines(tmp_path / name, "eval_loss")}
             for name in ("whole", "parts")]  # fmt: skip
    assert found[0] == found[1] and min(found[0], key=found[0].get) == 2
    for name in ("whole", "parts"):
        manifest = tmp_path / name / "checkpoints" / "step-00000002" / "manifest.json"
        assert json.loads(manifest.read_text())["eval_loss"] == found[0][2]
        assert not [*manifest.parent.parent.glob(".*")]


# One of two processes is asked to stop when an evaluation begins.
STOP_ALL = """
import os, signal
from samestep.project.loading import EvalLoader
def batches(self, *given, old=EvalLoader.batches):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
    yield from old(self, *given)
EvalLoader.batches = batches
"""


def test_a_stop_in_the_last_evaluation_has_saved_what_it_evaluates(tiny, tmp_path):
    flags = ["--save_every", 0, "--eval_every", 0, "--max_steps", 6]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    tiny.train(2, *flags, "--output_dir", whole)
    for _ in range(2):  # also where the evaluation is made up for
        printed = tiny.train(2, *flags, "--output_dir", parts, before=STOP_ALL, codes=[75])
        assert printed.count("stopped after step 6; the same command continues the run") == 1
        assert lines(parts, "loss")[-1]["step"] == 6 and not lines(parts, "eval_loss")
        assert status(parts)["saved"] == 6 and not (parts / "model").exists()
    tiny.train(2, *flags, "--output_dir", parts)
    for name in ("loss", "eval_loss"):
        found = [[line[name] for line in lines(each, name)] for each in (whole, parts)]
        assert found[0] == found[1] != []
    exported, saved = weights(parts)
    assert exported.equal(saved[6]) and exported.equal(weights(whole)[0])


# ---- Settings ------------------------------------------------------------------------------------

LENGTHS = [  # recipe, flags, steps (37 samples in steps of 8)
    ("max_steps: 12", ["--num_epochs", 3], 14),
    ("max_steps: 0\nnum_epochs: 1", ["--max_steps", 3], 3),
    ("max_steps: 12", ["--max_steps", 0, "--num_epochs", 1], 5),
    ("seed: 1", ["--max_steps", 7], 7),
]


@pytest.mark.parametrize("recipe, flags, steps", LENGTHS)
def test_of_steps_and_epochs_the_one_that_was_asked_for_counts(
    monkeypatch, tmp_path, recipe, flags, steps
):
    (tmp_path / "mine.yaml").write_text(f"{recipe}\nglobal_batch_size: 8\nwarmup_steps: 50\n")
    words = ["--config", tmp_path / "mine.yaml", *flags, "--output_dir", tmp_path / "run"]
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, words)])
    with train_module(ROOT / "tests" / "tasks" / "tiny.py") as train:
        resume_point = train.prepare().resume_point
    assert resume_point.max_steps == steps
    rises = "the learning rate rises to the end: warmup_steps is 50, and the run has"
    assert resume_point.remarks == [f"{rises} {steps} steps"]
