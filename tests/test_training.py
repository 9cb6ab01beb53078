"""Runs of a baked project, for real: what they leave, how they go on, what the trackers got; and
samestep plot, without training.
"""

import functools
import json
import math
import shlex
import subprocess
from types import SimpleNamespace

import pytest
import torch

from conftest import BakedProject, kill_before, lines, read_weights
from refusals import check_ended, table
from samestep.report import curves, tracking

FLAGS = ["--max_steps", 12, "--save_every", 6, "--eval_every", 6, "--log_every", 1]
FLAGS += ["--global_batch_size", 8, "--micro_batch_size", 4, "--warmup_steps", 4]
FLAGS += ["--keep_checkpoints", 0, "--learning_rate", 3e-3, "--task.data", "docs"]
FLAGS += ["--task.num_layers", 2, "--task.hidden_size", 64, "--task.context_length", 64]


def test_a_run_leaves_its_config_metrics_checkpoints_model_curves_and_status(project, output):
    printed = project.train(1, *FLAGS, "--output_dir", output, "--tracker", "none")
    assert {p.name for p in output.iterdir()} >= {
        "config.yaml", "hardware.yaml", "metrics.jsonl", "checkpoints", "model", "curves.png",
        "status.json",
    }  # fmt: skip
    assert json.loads((output / "status.json").read_text())["exit_code"] == 0
    training = lines(output, "loss")
    assert [line["step"] for line in training] == list(range(1, 13))
    assert [line["samples"] for line in training] == list(range(8, 104, 8))
    assert training[-1]["loss"] < training[0]["loss"]
    assert set(training[0]) == {
        "step", "samples", "epoch", "loss", "lr", "grad_norm", "tokens_per_second", "data_wait",
        "compute", "peak_memory_gb", "batch_hash", "computed_tokens_per_second", "items",
    }  # fmt: skip
    assert [line["step"] for line in lines(output, "eval_loss")] == [6, 12]
    names = [p.name for p in sorted((output / "checkpoints").iterdir())]
    assert names == ["step-00000006", "step-00000012"]
    assert "1 x cpu, fp32" in printed and "parameters" in printed
    assert "sample: " in printed and str(output / "curves.png") in printed


SCHEDULE = """
import json, sys, train
fields = {"learning_rate": 2.0, "warmup_steps": 4, "final_lr_fraction": 0.1, "decay_fraction": 0.5}
for given in json.loads(sys.argv[1]):
    cfg = train.Config(**{**fields, **given})
    print(json.dumps([train.lr_at(step, cfg, 20) for step in range(1, 21)]))
"""


def test_the_learning_rate_warms_up_and_decays_as_its_schedule_says(project):
    """Step 1 has a fourth of the peak, step 4 all of it; the decay would be through at step 21."""
    cases = [{"lr_schedule": name} for name in ("constant", "linear", "cosine", "wsd")]
    cases.append({"global_batch_size": 64, "reference_batch_size": 16, "lr_scaling": "sqrt"})
    cases.append({"lr_schedule": "linear", "warmup_steps": 0.17})  # of 20 steps, rounded up
    printed = project.run("python", "-c", SCHEDULE, json.dumps(cases)).stdout
    constant, linear, cosine, wsd, scaled, part = map(json.loads, printed.splitlines())
    left = [(21 - step) / 16 for step in range(5, 21)]
    for rates in (constant, linear, cosine, wsd):
        assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert constant[4:] == [2.0] * 16
    assert linear[4:] == pytest.approx([2 * (0.1 + 0.9 * each) for each in left])
    half = [(1 - math.cos(math.pi * each)) / 2 for each in left]
    assert cosine[4:] == pytest.approx([2 * (0.1 + 0.9 * each) for each in half])
    late = [min((21 - step) / 10, 1) for step in range(5, 21)]
    assert wsd[4:] == pytest.approx([2 * (0.1 + 0.9 * each) for each in late])
    assert scaled == pytest.approx([2 * each for each in cosine]) and part == linear


PLAIN = """
import math, task, torch
from samestep.step.order import sample_ids
cfg = task.TaskConfig()
torch.manual_seed(0)
model, (rows, _) = task.build_model(cfg), task.views(cfg)
optimizer = torch.optim.AdamW(
    [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.5},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ],
    betas=(0.9, 0.99),
)
for step in range(1, 13):
    ids = sample_ids(range(8 * step - 8, 8 * step), 37, 0).tolist()
    batch = task.collate([rows[i] for i in ids])
    lr = 0.01 * min(step / 2, 0.55 + 0.45 * math.cos(math.pi * max(step - 3, 0) / 10))
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.zero_grad()
    loss = task.loss_sum(model, batch) / task.count(batch)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    print(lr, loss.item(), norm.item())
torch.save(model.state_dict(), "plain.pt")
"""


def test_a_run_is_a_plain_loop_of_torch(tiny, tmp_path):
    """Its learning rates, losses, clipped gradients and weights; by four micro-batches a step."""
    flags = ["--max_grad_norm", 0.5, "--weight_decay", 0.5, "--output_dir", tmp_path / "run"]
    tiny.train(1, *flags)
    printed = tiny.run("python", "-c", PLAIN).stdout.splitlines()
    assert len(printed) == 12
    for line, plain in zip(lines(tmp_path / "run", "lr"), printed, strict=True):
        mine = [line["lr"], line["loss"], line["grad_norm"]]
        assert mine == pytest.approx([*map(float, plain.split())], rel=1e-5)
    plain = torch.load(tiny.path / "plain.pt")
    saved = read_weights(tmp_path / "run/checkpoints/step-00000012")
    torch.testing.assert_close(saved, {**plain}, rtol=1e-5, atol=1e-6)


EVALUATED = """
import sys, task, torch
cfg = task.TaskConfig(dropout=0.5)
model, rows = task.build_model(cfg).eval(), task.views(cfg)[1]
model.load_state_dict(torch.load(sys.argv[1]))
batch = task.collate([rows[i] for i in range(len(rows))])
print(task.metrics(task.eval_sums(model, batch))["loss"])
"""


def test_an_evaluation_is_without_dropout(tiny, tmp_path):
    tiny.train(1, "--max_steps", 2, "--task.dropout", 0.5, "--output_dir", tmp_path / "run")
    plain = tiny.run("python", "-c", EVALUATED, tmp_path / "run/model/weights.pt").stdout
    logged = lines(tmp_path / "run", "eval_loss")[-1]["eval_loss"]
    assert logged == pytest.approx(float(plain), rel=1e-6)


def logged_by_wandb(project, folder):
    """The lines that W&B's file in a folder holds."""
    records = project.run("wandb", "leet", "inspect", "--json", folder, check=False).stdout
    records = [json.loads(record) for record in records.splitlines()]
    return [record["history"]["item"] for record in records if record["type"] == "history"]


@pytest.mark.slow
def test_wandb_gets_again_what_kills_have_lost(tiny, tmp_path):
    """Two kills, and a start of two processes; then all folders are uploaded. No code is."""
    output = tmp_path / "a run"
    flags = ["--output_dir", output, "--tracker", "wandb"]
    env = {"HOME": str(tmp_path)}
    tiny.train(1, *flags, before=kill_before(7), codes=[-9], env=env)
    tiny.train(1, *flags, before=kill_before(10), codes=[-9], env=env)
    printed = tiny.train(2, *flags, env=env)
    assert f"continuing from {output}/checkpoints/step-00000008" in printed
    folders = sorted(output.glob("wandb/offline-run-*"))
    starts = [logged_by_wandb(tiny, folder) for folder in folders]
    assert len(starts) == 3  # one of two processes
    for key in ("loss", "eval_loss", "save_seconds"):
        values = {(line["step"], line[key]) for start in starts for line in start if key in line}
        assert values == {(line["step"], line[key]) for line in lines(output, key)}
    files = [path.name for folder in folders for path in folder.rglob("*")]
    assert not [name for name in files if name.endswith((".patch", ".py"))]
    assert len({folder.name.rpartition("-")[2] for folder in folders}) == 1  # of one run there
    # The command that is printed uploads each folder by itself, the oldest first.
    (tmp_path / "wandb").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "wandb").chmod(0o755)
    command = printed.split("with a key, `")[1].split("` uploads it")[0]
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    said = subprocess.run(["sh", "-c", command], env=env, capture_output=True, text=True).stdout
    assert said.splitlines() == [word for each in folders for word in ("sync", str(each))]


def test_an_online_run_gets_what_the_server_does_not_have(tmp_path):
    """From its last step on, and no step that comes again after the resume."""
    known = [{"step": step, "loss": step / 7} for step in range(1, 5)]
    lost = [{"step": 5, "loss": 5 / 7}, {"step": 5, "eval_loss": 0.1}, {"step": 6, "loss": None}]
    started = {"step": 5, "started": {}}
    text = "\n".join(map(json.dumps, [*known, started, *lost, {"step": 7, "loss": 0.2}]))
    (tmp_path / "metrics.jsonl").write_text(text)
    sent, run = [], SimpleNamespace(offline=False, summary={"step": 5})
    log = SimpleNamespace(
        get_tracker=lambda *_, **__: run,
        log=lambda v, step: sent.append(v),
        trackers=[SimpleNamespace(name="wandb")],
    )
    tracking.Log(log, tmp_path, 6, 9, shows_lines=True).close()
    assert sent == lost


@pytest.mark.slow
def test_other_trackers_get_the_same_losses(tiny, tmp_path):
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    output, store = tmp_path / "my runs" / "run", {"TRACKIO_DIR": str(tmp_path / "trackio")}
    printed = tiny.train(1, "--output_dir", output, "--tracker", "tensorboard")
    (folder,) = shlex.split(printed.split("tensorboard --logdir ")[1].split("`")[0])
    events = EventMultiplexer().AddRunsFromDirectory(folder)
    events.Reload()
    assert [*events.Runs()] == ["run"]  # called as its folder is, and one entry
    (config,) = events.Tensors("run", "config/text_summary")
    assert b"learning_rate: 0.01" in config.tensor_proto.string_val[0]
    expected = [line["loss"] for line in lines(output, "loss")]
    assert [event.value for event in events.Scalars("run", "loss")] == pytest.approx(expected)
    again = tmp_path / "again" / "run"
    tiny.train(1, "--output_dir", again, "--tracker", "trackio", env=store)
    command = "trackio get metric --project accelerate --run run --metric loss --json".split()
    values = json.loads(tiny.run(*command, **store).stdout)["values"]
    assert [value["value"] for value in values] == pytest.approx(expected)


@pytest.mark.slow
def test_a_run_goes_on_offline_when_wandb_cannot_be_reached(tiny, tmp_path):
    """An outage, in place of which wandb.init raises what it raises after its time-out."""
    before = """
import wandb
def unreachable(start=wandb.init, **options):
    if options["mode"] == "online":
        raise wandb.errors.CommError("Timed out\\nwhile retrying")
    return start(**options)
wandb.init, wandb.login = unreachable, lambda **_: True
"""
    flags = ["--tracker", "wandb", "--max_steps", 2, "--output_dir", tmp_path / "run"]
    printed = tiny.train(1, *flags, before=before, env={"HOME": str(tmp_path)})
    assert "W&B: Timed out while retrying\n" in printed and "W&B is offline" in printed
    assert len(list(tmp_path.glob("run/wandb/offline-run-*"))) == 1


def test_what_wandb_refuses_is_told_in_its_words_before_the_first_step(quick, tmp_path):
    flags = ["--tracker", "wandb", "--output_dir", tmp_path / "run"]
    printed = quick(*flags, env={"WANDB_API_KEY": "short"}, codes=[2])
    assert printed.splitlines()[-1].startswith("train.py: W&B: "), printed
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_the_projects_own_tests_pass(project):
    assert "passed" in project.run("python", "-m", "pytest", "-q").stdout


def training(step, loss, **more):
    return {"step": step, "loss": loss, "lr": 1e-3, "tokens_per_second": 2e4, **more}


def curve(last=2.0, steps=60):
    """A falling training loss, and evaluations that end with the loss `last`."""
    lines = [training(step, 3 - step / steps) for step in range(1, steps + 1)]
    return lines + [{"step": steps // 2, "eval_loss": 2.5}, {"step": steps, "eval_loss": last}]


def write(run, lines):
    """Makes a run folder; a line is an object or, to be written as it is, a text."""
    run.mkdir(parents=True)
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (run / "metrics.jsonl").write_text("\n".join(texts), errors="surrogateescape")
    return run


def test_the_last_line_of_a_step_counts_and_torn_lines_do_not(tmp_path):
    lines = [
        {"note": "started"},
        training(10, 3.0),
        training(20, 2.5),
        {"step": 20, "eval_loss": 2.6},
        training(30, 2.0),
        training(20, 2.4),  # killed and resumed: 20 again, and then its evaluation
        {"step": 20, "eval_loss": 2.7},
        training(30, 1.9),
        *("", "[]", "\x00\x00", '{"step": 20, "lo'),
    ]
    train, evals = curves.read_metrics(write(tmp_path / "a", lines))
    assert {step: row["loss"] for step, row in train.items()} == {10: 3.0, 20: 2.4, 30: 1.9}
    assert {step: row["eval_loss"] for step, row in evals.items()} == {20: 2.7}


def test_the_curves_are_those_of_the_lines(tmp_path, monkeypatch):
    """Panels of the loss, the learning rate, the rate, and of four scores at most; none twice."""
    figures = []
    monkeypatch.setattr(curves, "save_figure", lambda figure, path: figures.append(figure))
    lines = curve(last=2.0)
    lines[-1] |= {"unigram_loss": 2.8, **{f"score_{name}": 1 for name in "abcdef"}}
    curves.draw([write(tmp_path / "a", lines)], tmp_path / "a.png")
    panels = figures[0].axes
    scores = [f"score {name}" for name in "abcd"]
    assert [each.get_ylabel() for each in panels] == ["loss", "lr", "tokens / s", *scores]
    drawn = panels[0].get_lines()
    assert [line.get_label() for line in drawn] == ["a", "a, validation", "a, unigram loss"]
    assert [*drawn[0].get_ydata()] == [line["loss"] for line in lines[:60]]
    assert [*drawn[1].get_ydata()] == [2.5, 2.0]


@pytest.mark.filterwarnings("error")
def test_odd_data_are_drawn(tmp_path):
    odd = [2.0, math.nan, math.inf, None, "x", *[None] * 50]
    lines = [training(i, x) for i, x in enumerate(odd)]
    lines += [{"step": 60, "eval_loss": math.nan, "$\\frac_{\ud800\u4e2d\n_baseline": 1.5}]
    run = write(tmp_path / "_a$\\b$c", lines)
    curves.draw([run, write(tmp_path / "b", curve())], tmp_path / "both.png")


def test_the_path_is_printed_or_one_line_says_what_is_wrong(tmp_path):
    project = BakedProject(tmp_path, pictures=True)
    plot = functools.partial(project.run, "python", "-m", "samestep", "plot", check=False)
    for name in "ab":
        write(tmp_path / "runs" / name, curve())
    write(tmp_path / "runs" / "started", [{"note": "no step yet"}])
    for runs, figure in ((["runs/a"], "runs/a/curves.png"), (["runs/a", "runs/b"], "curves.png")):
        result = plot(*runs)
        assert (result.returncode, result.stdout, result.stderr) == (0, figure + "\n", "")
        assert (tmp_path / figure).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    for words, said in table("plot"):
        check_ended(plot(*words.split()), said, "samestep plot: ")
