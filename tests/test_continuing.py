"""What a continued run goes on with, what it refuses, and what it finds in its folder."""

import errno
import json
import math
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

from conftest import (
    KILL,
    TRAIN,
    all_files,
    before_calls,
    checkpoint,
    copy_until,
    digest,
    edit,
    eval_losses,
    kill_before,
    lines,
    manifest,
    read_weights,
    status,
)
from samestep.base import run_folder
from samestep.step import order
from samestep.training import log as log_of_run

# All fields of the schedule are read, so that each of them can show. Checkpoints at 4 and 8.
BASE = ["--max_steps", 8, "--lr_schedule", "wsd", "--decay_fraction", 0.9, "--lr_scaling", "sqrt"]
BASE += ["--reference_batch_size", 16, "--max_grad_norm", 0.5, "--weight_decay", 0.5]
WHOLE = BASE


@pytest.mark.parametrize("batch, steps", [(3, 26), (64, 3)])
def test_evaluations_and_checkpoints_at_the_end_of_each_epoch(quick, tmp_path, batch, steps):
    """At the first step that completes a pass, and at the last; a step may hold several passes."""
    flags = ["--eval_every", "epoch", "--save_every", "epoch", "--keep_checkpoints", 0]
    flags += ["--max_steps", steps, "--global_batch_size", batch, "--log_every", 1000]
    quick("--output_dir", tmp_path / "run", *flags)
    samples = manifest(checkpoint(tmp_path / "run", steps))["data"]["samples"]
    ends = {-(-n * samples // batch) for n in range(1, batch * steps // samples + 1)} | {steps}
    assert len(ends) > 2
    assert {line["step"] for line in lines(tmp_path / "run", "eval_loss")} == ends
    saved = {int(each.name[5:]) for each in (tmp_path / "run" / "checkpoints").glob("step-*")}
    assert saved == ends


@pytest.fixture
def half(whole, tmp_path):
    """The folder of that run as a kill after its first checkpoint leaves it."""
    return copy_until(whole, 4, tmp_path / "run")


# ---- Changed settings ----------------------------------------------------------------------------

OTHER = {"lr_schedule": "cosine", "lr_scaling": "linear", "num_epochs": 2, "seed": 5}
# Kernels of GPUs; torch.compile takes a minute.
NOT_SHOWN = {"deterministic", "compile"}


@pytest.mark.slow
def test_each_accepted_change_changes_something(quick, tiny, whole, tmp_path):
    """Every field of train.py that changes the result shows in the numbers."""
    program = "import json, train; from samestep.run import startup; "
    program += "print(json.dumps(startup.change_effects(train.Config())))"
    effects = json.loads(tiny.run("python", "-c", program).stdout)
    fields = {n for n, effect in effects.items() if effect == "result" and "." not in n}
    assert NOT_SHOWN < fields and len(fields) > 15
    config = yaml.safe_load((whole / "config.yaml").read_text())
    keys = ("step", "loss", "lr", "grad_norm", "eval_loss", "batch_hash")
    expected = [[line.get(key) for key in keys] for line in lines(whole, "step")]
    for name in sorted(fields - NOT_SHOWN):
        flags = dict(zip(BASE[::2], BASE[1::2], strict=True))
        flags[f"--{name}"] = OTHER.get(name, config[name] * 2 or 1)
        if name in ("beta1", "beta2", "final_lr_fraction", "decay_fraction"):
            flags[f"--{name}"] = config[name] / 2
        if name == "num_epochs":
            flags["--max_steps"] = 0
        if name == "lr_schedule":
            del flags["--decay_fraction"]  # which another does not read
        output = copy_until(whole, 4, tmp_path / name)
        words = [word for pair in flags.items() for word in pair]
        quick(*words, "--output_dir", output, "--accept_changes")
        assert name in lines(output, "event")[0]["changes"]
        found = [[line.get(key) for key in keys] for line in lines(output, "step")[2:]]
        assert found != expected[-len(found) :], f"{name} was accepted and changed nothing"


def test_another_global_batch_goes_on_with_the_next_sample(tiny, half, tmp_path):
    """32 samples were seen; steps of 6 go on from the 33rd, also through a second break, and two
    epochs of 37 samples end at the 74th."""
    flags = ["--output_dir", half, *BASE, "--max_steps", 0, "--num_epochs", 2]
    flags += ["--global_batch_size", 6]
    tiny.train(2, *flags, "--accept_changes", "--save_every", 2)
    samples = [line["samples"] for line in lines(half, "loss")]
    assert samples == list(range(38, 75, 6))
    ids = order.sample_ids(range(74), 37, 0)
    parts = [ids[end - 6 : end] for end in samples]
    expected = [f"{int(order.hash64(part).sum()) % 2**64:016x}" for part in parts]
    assert [line["batch_hash"] for line in lines(half, "loss")] == expected
    assert manifest(checkpoint(half, 11))["samples"] == 74
    # The second break: no change is left to accept.
    flags[1] = copy_until(half, 8, tmp_path / "again")
    tiny.train(2, *flags)
    assert [line["batch_hash"] for line in lines(flags[1], "loss")] == expected[4:]
    assert digest(checkpoint(flags[1], 11)) == digest(checkpoint(half, 11))


def test_flags_of_one_occasion_are_not_settings(quick, whole, half, tmp_path):
    """A recipe made from a run accepts nothing by itself."""
    flags = ["--output_dir", half, *BASE, "--learning_rate", 0.02]
    quick(*flags, "--accept_changes", "--resume", "auto")
    config = yaml.safe_load((half / "config.yaml").read_text())
    for saved in (config, manifest(checkpoint(half, 8))["config"]):
        assert not {"accept_changes", "check", "eval_only", "resume"} & {*saved}
        assert saved["learning_rate"] == 0.02
    again = copy_until(whole, 4, tmp_path / "again")
    flags = ["--config", half / "config.yaml", "--output_dir", again]
    assert "learning_rate: 0.01 -> 0.02" in quick(*flags, codes=[2])


def test_the_best_model_may_be_one_from_before_a_change_of_the_task(quick, whole, tmp_path):
    """Whose losses may mean other things."""
    flags = ["--output_dir", copy_until(whole, 4, tmp_path / "run"), *BASE, "--accept_changes"]
    printed = quick(*flags, "--task.dropout", 0.1, "--export", "best", "--check")
    assert "warning: the best evaluation may be one from before the change of task set" in printed


def test_code_that_has_changed_since_the_checkpoint_is_named(tiny, half, tmp_path):
    """By functions, and without a word about comments; nothing has to be accepted."""
    project = tiny.copied(tmp_path)
    task, train = project.path / "task.py", project.path / "train.py"
    flags = ["--output_dir", half, *BASE]
    edit(task, "def loss_sum(", "# A comment.\ndef loss_sum(")
    assert "changed since" not in project.train(1, *flags, "--check")
    edit(task, "# A comment.", "HALF = 0.5\n\n", "loss = losses", "loss = HALF * losses")
    edit(train, "peak = cfg.learning_rate", "peak = 2 * cfg.learning_rate")
    said = "code of task.HALF, task.loss_sum, train.lr_at"
    assert project.train(1, *flags).count(f"changed since the checkpoint: {said}\n") == 1
    (changes,) = [each["changes"] for each in lines(half, "event")]
    assert [*changes] == ["code task.HALF", "code task.loss_sum", "code train.lr_at"]
    assert all(before != now for before, now in changes.values())


# ---- Checkpoints that are gone -------------------------------------------------------------------


def test_a_run_whose_checkpoints_are_gone_does_not_start_again_by_itself(tiny, whole, output):
    flags = ["--output_dir", output, *BASE]
    tiny.train(1, *flags, before=kill_before(7), codes=[-9])
    shutil.rmtree(output / "checkpoints")
    before = (output / "metrics.jsonl").read_text()
    for processes, *each in ((2,), (1, "--check"), (1, "--eval_only"), (1, "--async_save")):
        printed = tiny.train(processes, *flags, *each, codes=[2])
        assert printed.count("status.json says that step 4 was saved; put") == 1
        assert "--resume never" in printed
    assert (output / "metrics.jsonl").read_text() == before
    tiny.train(1, *flags, "--resume", "never", before=kill_before(3), codes=[-9])
    tiny.train(1, *flags)  # killed before its first checkpoint
    after = (output / "metrics.jsonl").read_text()
    assert after.startswith(before)
    steps = [line["step"] for line in lines(output, "loss")]
    assert steps == [*range(1, 7), 1, 2, *range(1, 9)]
    assert digest(checkpoint(output, 8)) == digest(checkpoint(whole, 8))


@pytest.mark.parametrize("background", [[], ["--async_save"]])
def test_a_run_killed_in_its_first_save_starts_again(quick, whole, tmp_path, background):
    flags = ["--output_dir", tmp_path, *BASE]
    killed = before_calls("samestep.state.checkpoints.commit", KILL)
    quick(*flags, *background, before=killed, codes=[-9])
    assert len(lines(tmp_path, "loss")) >= 3
    quick(*flags)
    assert digest(checkpoint(tmp_path, 8)) == digest(checkpoint(whole, 8))


def test_a_run_that_began_elsewhere_and_lost_its_checkpoints_does_not_begin_again(quick, whole):
    output = whole.with_name("elsewhere")
    flags = ["--output_dir", output, *BASE, "--resume", checkpoint(whole, 4), "--save_every", 2]
    quick(*flags, before=kill_before(8), codes=[-9])
    shutil.rmtree(output / "checkpoints")
    assert "says that step 6 was saved" in quick(*flags, codes=[2])


def test_another_optimizer_of_the_code_is_a_changed_setting(tiny, half, tmp_path):
    project = tiny.copied(tmp_path)
    flags = ["--output_dir", half, *BASE]
    edit(project.path / "train.py", "betas=(cfg.beta1, cfg.beta2)", "betas=(0.8, cfg.beta2)")
    said = "optimizer group 0 betas: (0.9, 0.99) -> (0.8, 0.99)"
    assert said in project.train(1, *flags, codes=[2])
    assert said in project.train(1, *flags, "--accept_changes")


# ---- Finished runs -------------------------------------------------------------------------------


def test_a_second_start_of_a_run_that_ends_early_says_that_it_is_finished(quick, half):
    flags = ["--output_dir", half, *BASE, "--max_steps", 4, "--accept_changes"]
    quick(*flags)
    assert "is finished: 4 steps, and model/ is that of step 4; " in quick(*flags)
    left = "; no step is left for seed: 0 -> 3; max_steps: 8 -> 4; "
    before = digest(checkpoint(half, 4)), (half / "status.json").read_bytes()
    assert left in quick(*flags, "--seed", 3)
    assert before == (digest(checkpoint(half, 4)), (half / "status.json").read_bytes())


def test_a_finished_run_with_more_steps_is_exported_anew_though_it_was_killed_before(
    quick, whole, output
):
    """Its newest checkpoint is the last, and model/ is there: that of the fewer steps."""
    shutil.copytree(whole, output)
    flags = ["--output_dir", output, *BASE, "--max_steps", 12, "--accept_changes"]
    flags += ["--weight_decay", 0.3]
    killed = before_calls("samestep.end.ending.gather_model", KILL)
    quick(*flags, before=killed, codes=[-9])
    assert checkpoint(output, 12).exists()
    before = (output / "model" / "weights.pt").read_bytes()
    quick(*flags)
    assert (output / "model" / "weights.pt").read_bytes() != before
    assert (status(output)["exported"], status(output)["saved"]) == (12, 12)
    assert "is finished: 12 steps, and model/ is that of step 12; " in quick(*flags)


def test_a_finished_run_without_its_checkpoints_does_not_train_again(quick, whole, output):
    shutil.copytree(whole, output)
    shutil.rmtree(output / "checkpoints")
    before, base = all_files(output), ["--output_dir", output, *BASE]
    assert "is finished: its checkpoints are gone" in quick(*base)
    printed = quick(*base, "--seed", 3, codes=[2])
    assert "holds a finished run, whose checkpoints are gone" in printed
    assert "is finished" in quick(*base, "--log_every", 2)  # another result it is not
    assert before == all_files(output)
    (output / "status.json").unlink()  # nor where only the model is left
    assert "holds a finished run, whose checkpoints are gone" in quick(*base, codes=[2])
    model = (output / "model" / "weights.pt").read_bytes()
    assert model == before[output / "model" / "weights.pt"]
    # One that has lost its model alone exports it again.
    shutil.rmtree(output / "model")
    shutil.copytree(checkpoint(whole, 8), checkpoint(output, 8))
    quick(*base)
    assert (output / "model" / "weights.pt").read_bytes() == model
    assert status(output)["state"] == "finished"


def test_a_finished_run_without_its_model_exports_again_with_other_settings(quick, output):
    """The best of the checkpoints, then the last."""
    base = ["--output_dir", output, "--eval_every", 2, "--save_every", 2, "--max_steps", 24]
    base += ["--learning_rate", 0.05]
    quick(*base)

    best = eval_losses(output)[1]
    assert best < 24
    before = all_files(output)
    printed = quick(*base, "--export", "best")
    assert "is finished: 24 steps, and model/ is that of step 24; to export again delete" in printed
    assert before == all_files(output)
    for flags, step in ((["--export", "best"], best), ([], 24)):
        shutil.rmtree(output / "model")
        quick(*base, *flags)
        exported, saved = torch.load(output / "model/weights.pt"), checkpoint(output, step)
        torch.testing.assert_close({**exported}, read_weights(saved), rtol=0, atol=0)
        assert f"Trained for {step} steps" in (output / "model" / "README.md").read_text()
        assert status(output)["state"] == "finished" and status(output)["exported"] == step
        assert f"is finished: 24 steps, and model/ is that of step {step}; " in quick(*base, *flags)


def test_a_report_that_fails_or_is_killed_does_not_fail_the_run(quick, tmp_path):
    """Nor does a tracker that does not close. The next start does not export the model again."""
    closing = "import accelerate; accelerate.Accelerator.end_training = lambda _: 1 / 0"
    killed = before_calls("task.report", KILL)
    flags = ["--output_dir", tmp_path / "a", *BASE, "--task.fail_report"]
    printed = quick(*flags, before=closing)
    assert "no report: TypeError: no picture of this" in printed
    assert "the tracker was not closed: ZeroDivisionError: division by zero" in printed
    assert status(tmp_path / "a")["exit_code"] == 0
    flags = ["--output_dir", tmp_path / "b", *BASE]
    quick(*flags, before=killed, codes=[-9])
    assert status(tmp_path / "b")["state"] == "finished"
    assert (tmp_path / "b" / "model" / "weights.pt").exists()
    assert "is finished: 8 steps" in quick(*flags)


# ---- The run folder ------------------------------------------------------------------------------

VALUES = ["", "[" * 100_000, '{"state": 3, "pid": []}', "\xff"]
NAMES = ["status.json", "wandb_run_id", "metrics.jsonl", "config.yaml", "lock"]


@pytest.mark.slow
def test_any_content_of_the_files_of_a_run_is_lived_with(tiny, whole, tmp_path):
    for i, value in enumerate(VALUES):
        output = copy_until(whole, 4, tmp_path / str(i))
        for name in NAMES:
            (output / name).write_bytes(value.encode("latin-1"))
        tiny.train(1, *BASE, "--output_dir", output)
        assert digest(checkpoint(output, 8)) == digest(checkpoint(whole, 8))
        assert status(output)["state"] == "finished"
        assert [line["step"] for line in lines(output, "loss")] == [5, 6, 7, 8]


def test_what_lies_about_in_a_run_folder_hinders_nothing(tiny, whole, half):
    """Pipes, links and files in the places of newer checkpoints and of what is being written."""
    saved = half / "checkpoints"
    os.mkfifo(saved / "step-00000009")
    (saved / "step-00000008").symlink_to("nothing")  # the run saves this step
    (saved / "step-00000007").symlink_to("step-00000007")
    (saved / "step-00000006").mkdir()
    (saved / "step-99999999999").symlink_to("nothing")
    (saved / ".step-00000008.partial").write_text("a file")
    (saved / "step-00000004" / "._rank-00000.safetensors").write_bytes(b"of a Mac" * 99)
    for name in (".status.json.partial", ".model.partial", "curves.png"):
        (half / name).mkdir()
    (half / ".model.old").write_text("a file")
    drawing = type(tiny)(tiny.path, pictures=True)
    printed = drawing.train(1, "--output_dir", half, *BASE)
    assert printed.count("passed over: ") == 5 and "no picture: " in printed
    assert digest(checkpoint(half, 8)) == digest(checkpoint(whole, 8))


def test_a_mistake_leaves_no_folder_behind(quick, tmp_path):
    """Nor does a check; a folder that was there stays. Data is prepared last."""
    (tmp_path / "there").mkdir()
    fails = ["--task.fail_where", "prepare_data", "--task.fail_rank", 0]
    for name, mistake, said in (
        ("a/b/c", fails, "prepare_data"),
        ("there", fails, "prepare_data"),
        ("a/b/c", [*fails, "--resume", "none"], "resume: none has no manifest"),
        ("there", [*fails, "--eval_only"], "there is no checkpoint in "),
        ("a/b/c", ["--check"], "checked: "),
    ):
        printed = quick("--output_dir", tmp_path / name, *mistake, codes=[0, 2])
        assert said in printed and [p.name for p in tmp_path.rglob("*")] == ["there"]


def test_a_run_without_a_checkpoint_begins_again_and_says_so(quick, tmp_path):
    flags = ["--output_dir", tmp_path / "run", *BASE]
    quick(*flags, before=kill_before(3), codes=[-9])
    said = f"{tmp_path / 'run'} has no checkpoint yet: it begins again at step 1"
    assert said in quick(*flags) and said not in quick(*flags)


def test_a_run_folder_that_is_removed_ends_the_run_with_an_error(quick, output):
    remove = kill_before(3, "__import__('shutil').rmtree(given[0].lines.folder)")
    for every in (4, 0):  # in the middle, and at the end
        flags = ["--output_dir", output, *BASE, "--save_every", every, "--eval_every", 0]
        said = quick(*flags, before=remove, codes=[1])
        assert said.count("train.py: ") == 1 and "Traceback" not in said and not output.exists()
        assert f"train.py: {output}: the run folder was removed" in said


# ---- Output that cannot be written ---------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("where", ["> /dev/full 2>&1", "| head -1"])
def test_a_run_outlives_its_output(tiny, tmp_path, where):
    """Also `head -1` while the data is prepared, whose print finds nobody there."""
    slowly = before_calls("task.views", "print('preparing')\ntime.sleep(0.3)\nprint('prepared')")
    shell = f'python -c "$@" {where}; exit ${{PIPESTATUS[0]}}'
    flags = ["--output_dir", tmp_path / "run", *BASE]
    result = tiny.run("bash", "-c", shell, "bash", TRAIN, slowly, *flags)
    assert "Traceback" not in result.stderr
    assert status(tmp_path / "run")["state"] == "finished"


# Killed at step 215, with a checkpoint of step 200, which is evaluated again: 200, 210 and 220.
LINES_BEFORE = [
    {"step": 0, "started": {}},
    {"step": 200, "loss": 2.0},
    {"step": 200, "eval_loss": 2.5},
    {"step": 210, "loss": 1.9},
    {"step": 210, "save_seconds": 0.1},
    {"step": 213, "event": "skipped"},
]
LINES_AFTER = [{"step": 200, "started": {}}, {"step": 200, "eval_loss": 2.4}]
LINES_AFTER += [{"step": 210, "loss": 1.8}, {"step": 220, "loss": 1.7}]


def test_lines_of_steps_that_were_trained_again_do_not_count(tmp_path):
    background = {"step": 204, "committed_step": 200}
    text = "".join(json.dumps(line) + "\n" for line in [*LINES_BEFORE, background, *LINES_AFTER])
    (tmp_path / "metrics.jsonl").write_text(text)
    assert run_folder.read_metrics(tmp_path) == [*LINES_BEFORE[:2], background, *LINES_AFTER]


def test_the_status_names_what_a_person_would_be_told(tmp_path, monkeypatch):
    """With the step, and of each kind the newest: not a noisy loss, a short wait, a disk with
    room."""
    run_folder.write_status(tmp_path, "running")
    log = log_of_run.RunLog.__new__(log_of_run.RunLog)
    log.lines, log.highest, log.step = SimpleNamespace(folder=tmp_path, write=len), [], 0
    losses = [*np.linspace(4, 3, 20), 9.0, math.nan, 3.1, 3.2, 3.0, 3.3]
    for log.step, loss in enumerate(losses, 1):
        log.watch({"loss": loss, "peer_wait": 0.1, "slowest": 1})
    (told,) = status(tmp_path)["noticed"].items()
    assert told[0] == "spike" and told[1]["step"] == 21
    log.highest = []
    for log.step, loss in enumerate([0.01, 0.3, 0.02, 0.1] * 10, 100):
        log.watch({"loss": loss, "worst": {"step": 7, "loss": loss}})
    assert status(tmp_path)["noticed"]["spike"]["step"] == 21
    log.watch({"loss": 0.01, "peer_wait": 0.4, "slowest": 1})
    log.note(save_seconds=1.0)
    assert status(tmp_path)["noticed"].keys() == {"spike", "straggler"}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=-1))
    log.note(save_seconds=1.0)
    run_folder.write_status(tmp_path, "stopped")
    found = status(tmp_path)["noticed"]
    assert (found["disk"]["step"], found["straggler"]["step"]) == (139, 139)
    assert "process 1, 40% of" in found["straggler"]["what"] and "free" in found["disk"]["what"]


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
