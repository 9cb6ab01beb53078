"""What people see in a log file; which model is evaluated and exported; which settings win."""

import itertools
import json
import os
import re
import shutil
import sys
import termios
from types import SimpleNamespace

import psutil
import pytest
import torch

from conftest import (
    KILL,
    ROOT,
    before_calls,
    checkpoint,
    eval_losses,
    lines,
    read_weights,
    status,
    train_module,
    trained,
    wait_until,
)
from refusals import cases
from samestep.base import run_folder
from samestep.report import tracking
from samestep.state.checkpoints import read_manifest

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
    accelerator = SimpleNamespace(log=lambda *_, **__: None, trackers=[])
    with open(terminal, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        log = tracking.Log(accelerator, tmp_path, 0, 9, shows_lines=True)
        log.write({"step": 1, "loss": 0.5, "lr": 0.1, "samples_per_second": 3})
        log.close()
    said = "" if columns else "step 1/9  loss 0.5  lr 0.1  3 samples/s\n"
    assert capsys.readouterr().out == said


@pytest.mark.slow
def test_a_killed_process_is_named_with_its_signal(tiny, output):
    run = tiny.launch("samestep", "cpu_multi", *LONG, "--output_dir", output)
    wait_until(lambda: trained(output, 3), run)
    family = psutil.Process(run.pid).children(recursive=True)
    process = {p.environ().get("RANK"): p for p in family}["1"]
    process.kill()
    printed = run.communicate(timeout=300)[0]
    assert run.returncode == 1 and "Traceback" not in printed, printed
    said = f"samestep launch: process 1 (pid {process.pid}) was ended by SIGKILL"
    assert said in printed


BEST = ["--export", "best", "--eval_every", 2, "--learning_rate", 0.05]
TWELVE = [*BEST, "--save_every", 5, "--keep_checkpoints", 1, "--max_steps", 12]


@pytest.fixture(scope="module")
def twelve(quick, tmp_path_factory):
    """A run whose best evaluation is that of step 2."""
    output = tmp_path_factory.mktemp("twelve") / "run"
    quick(*TWELVE, "--output_dir", output)
    return output


def weights(output):
    """The exported weights, and those of each checkpoint, as lists of numbers."""
    model = torch.load(output / "model" / "weights.pt")
    saved = {int(p.name[5:]): read_weights(p) for p in output.glob("*/step-*")}
    flat = {step: torch.cat([v.flatten() for v in each.values()]) for step, each in saved.items()}
    names = [*next(iter(saved.values()))]
    return torch.cat([model[name].flatten() for name in names]), flat


def check_evaluated(output, printed, step, loss):
    """A run of --eval_only has evaluated this step, and its loss is that of the training."""
    assert f"evaluating {checkpoint(output, step)}\n" in printed and "continuing" not in printed
    scores = json.loads((output / "evaluation" / "metrics.json").read_text())
    assert scores["step"] == step and scores["eval_loss"] == pytest.approx(loss)


def check_same_best(whole, parts):
    """The same model, and the same checkpoints with the same scores."""
    one, two = weights(whole), weights(parts)
    assert one[0].equal(two[0]) and {*one[1]} == {*two[1]}
    for step in one[1]:
        found = [read_manifest(checkpoint(output, step)) for output in (whole, parts)]
        assert found[0]["best"] == found[1]["best"] and found[0]["best"][0] in one[1]
        assert found[0]["eval_loss"] == found[1]["eval_loss"]


def test_eval_only_takes_the_best_checkpoint_and_needs_no_settings_of_the_training(quick, output):
    base = ["--output_dir", output, "--max_steps", 24, "--learning_rate", 0.05]
    often = [*base, "--save_every", 2, "--eval_every", 2, "--keep_checkpoints", 0]
    quick(*often)
    losses, best = eval_losses(output)
    assert best < 24
    assert f"evaluates {checkpoint(output, 24)} on " in quick(*base, "--eval_only", "--check")
    for flags, step in (
        ([*often, "--export", "best"], best),
        ([*often, "--micro_batch_size", 4, "--num_workers", 0], 24),
        ([*base, "--export", "best", "--resume", checkpoint(output, 4)], 4),
    ):
        check_evaluated(output, quick(*flags, "--eval_only"), step, losses[step])
    said = quick(*base[:2], "--eval_only", "--task.held_out", 5, codes=[2])
    assert "task.held_out: 11 -> 5" in said and "learning_rate" not in said


def test_the_best_model_is_that_of_the_smallest_eval_loss(quick, tmp_path):
    flags = ["--save_every", 5, "--eval_every", 2, "--keep_checkpoints", 1, "--max_steps", 24]
    flags += ["--learning_rate", 0.05, "--output_dir"]
    output, last = tmp_path / "best", tmp_path / "last"
    printed = quick("--export", "best", *flags, output)
    losses, best = eval_losses(output)
    assert 1 < best < 24  # the case is one in which it matters
    assert f"the best evaluation was that of step {best}: {losses[best]:.5g}" in printed
    card = (output / "model" / "README.md").read_text()
    assert f"Trained for {best} steps (the best checkpoint in 24) of 8 samples" in card
    assert f"| eval_loss | {losses[best]:.5g} |" in card
    exported, saved = weights(output)
    assert {*saved} == {best, 24} and exported.equal(saved[best])
    quick(*flags, last)
    exported, saved_last = weights(last)
    assert exported.equal(saved_last[24]) and saved_last[24].equal(saved[24])
    assert losses == eval_losses(last)[0]


@pytest.mark.parametrize("keep", [0, 1])
def test_a_best_model_that_is_lost_is_named_and_the_last_is_exported(quick, output, keep):
    """Damaged; or deleted, where one checkpoint was to keep, so that the last is the only one."""
    flags = [*BEST, "--output_dir", output, "--keep_checkpoints", keep, "--max_steps", 24]
    printed = quick(*flags)
    losses, best = eval_losses(output)
    assert best < 24 and "is gone" not in printed
    file = checkpoint(output, best) / "rank-00000.safetensors"
    if keep:
        shutil.rmtree(file.parent)
    else:
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
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
    check_evaluated(output, printed, 24, losses[24])


# Ended by a signal when an evaluation begins, after its step was saved.
BATCHES = "samestep.step.evaluation.Evaluation.__iter__"
KILLED = before_calls(BATCHES, f"if number == 2: {KILL}")
# Of two processes one is asked to stop.
ASKED = "if os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGTERM)"
STOP_ALL = before_calls(BATCHES, ASKED)


@pytest.mark.parametrize("how", [[], ["--async_save"]])
def test_a_kill_between_a_save_and_its_scores_changes_nothing(quick, twelve, tmp_path, how):
    for _ in range(3):
        quick(*TWELVE, *how, "--output_dir", tmp_path, before=KILLED, codes=[-9])
    quick(*TWELVE, *how, "--output_dir", tmp_path)
    check_same_best(twelve, tmp_path)


# Kills the run before, or after, the second call of what is named.
AT = """
import os, signal
from samestep import Training
from samestep.step.step import Step
def kill_at(owner, name, after):
    old, calls = getattr(owner, name), []
    def function(*given, **named):
        calls.append(1)
        if len(calls) == 2 and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        found = old(*given, **named)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return found
    setattr(owner, name, function)
"""
QUICK = [("Training.log", False), ("Training.save", True), ("Training.score", False)]
LINES_OF_BODY = (
    "Step.clip",
    "Training.log",
    "Training.save",
    "Training.evaluation",
    "Training.score",
)


def logged(output):
    """What the run has logged of losses and scores, without times."""
    read = run_folder.read_metrics(output)
    names = ("step", "loss", "grad_norm", "lr", "items", "batch_hash", "samples", "eval_loss")
    kept = [line for line in read if {"loss", "eval_loss"} & line.keys()]
    return [{name: line[name] for name in names if name in line} for line in kept]


@pytest.mark.parametrize(
    "moment, after",
    [
        pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow)
        for each in itertools.product(LINES_OF_BODY, (False, True))
    ],
)
def test_a_kill_at_any_line_of_the_loop_leaves_no_trace(quick, twelve, tmp_path, moment, after):
    """The same lines of metrics.jsonl, the same best, and the same export."""
    owner, name = moment.split(".")
    kill = f"{AT}kill_at({owner}, {name!r}, {after})"
    quick(*TWELVE, "--output_dir", tmp_path, before=kill, codes=[-9])
    quick(*TWELVE, "--output_dir", tmp_path)
    check_same_best(twelve, tmp_path)
    assert logged(tmp_path) == logged(twelve)


def test_losses_of_other_validation_data_do_not_count(quick, tmp_path):
    flags = ["--export", "best", "--learning_rate", 0.05, "--output_dir", tmp_path]
    quick(*flags, "--max_steps", 8)
    quick(*flags, "--task.held_out", 5, "--accept_changes", "--max_steps", 16)
    losses, smallest = eval_losses(tmp_path)
    of_these = {step: loss for step, loss in losses.items() if step > 8}
    exported, saved = weights(tmp_path)
    assert exported.equal(saved[min(of_these, key=of_these.get)])
    assert smallest not in of_these  # the case is one in which it matters


def stop_at(batch):
    """A signal comes when an evaluation has read so many batches; the first one is a rehearsal."""
    asked = f"if number == {batch}: os.kill(os.getpid(), signal.SIGTERM)"
    return before_calls("task.eval_sums", asked)


def test_a_stop_in_the_best_evaluation_changes_nothing(quick, twelve, tmp_path):
    """That of step 2, of six batches: it is made up for, and its checkpoint counts."""
    flags = [*TWELVE, "--output_dir", tmp_path]
    quick(*flags, codes=[75], before=stop_at(5))
    assert status(tmp_path)["state"] == "stopped"
    # Stopped in the evaluation that is made up for: that goes on, not the training.
    quick(*flags, codes=[75], before=stop_at(3))
    assert lines(tmp_path, "loss")[-1]["step"] == 2
    quick(*flags)
    check_same_best(twelve, tmp_path)
    assert eval_losses(tmp_path) == eval_losses(twelve) and eval_losses(twelve)[1] == 2
    assert {*weights(tmp_path)[1]} == {2, 12}
    assert not [*tmp_path.glob("checkpoints/.*")]


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


LENGTHS = cases("lengths")


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
    (remark,) = resume_point.remarks
    assert remark.startswith(f"{rises} {steps} steps; for one that trains give --")
