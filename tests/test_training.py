"""Runs of a baked project, for real: what they leave, how they go on, what the trackers got."""

import hashlib
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch

from conftest import digest, latest, lines, make_tiny

STEPS = ["--max_steps", 12, "--save_every", 6, "--eval_every", 6, "--log_every", 1]
SMALL = ["--global_batch_size", 8, "--micro_batch_size", 4, "--warmup_steps", 4, "--seed", 3]
SMALL += ["--learning_rate", 3e-3]
SHAPE = ["--task.num_layers", 2, "--task.hidden_size", 64, "--task.dropout", 0.1]
FLAGS = [*STEPS, *SMALL, *SHAPE, "--keep_checkpoints", 0]


def train(project, hardware, output, *flags, check=True, **env):
    """One run of `accelerate launch`, with small settings that `flags` override."""
    launcher = ["accelerate", "launch", "--config_file", f"configs/accelerate/{hardware}.yaml"]
    command = [*launcher, "train.py", *latest([*FLAGS, "--output_dir", output, *flags])]
    return project.run(*command, check=check, **env)


@pytest.fixture(scope="module")
def one(project, tmp_path_factory):
    """A run of one process, tracked by W&B; its folder, and what was printed."""
    output = tmp_path_factory.mktemp("one") / "run"
    return output, train(project, "cpu", output, "--tracker", "wandb", HOME=output.parent)


@pytest.fixture(scope="module")
def two(project, tmp_path_factory):
    """The same run with two processes, tracked by W&B."""
    output = tmp_path_factory.mktemp("two") / "run"
    return output, train(project, "cpu_multi", output, "--tracker", "wandb", HOME=output.parent)


def test_a_run_leaves_its_config_metrics_checkpoints_model_curves_and_status(one):
    output, printed = one
    assert {p.name for p in output.iterdir()} >= {
        "config.yaml", "metrics.jsonl", "checkpoints", "model", "curves.png", "status.json",
    }  # fmt: skip
    assert json.loads((output / "status.json").read_text())["exit_code"] == 0
    training = lines(output, "loss")
    assert [line["step"] for line in training] == list(range(1, 13))
    assert [line["samples"] for line in training] == list(range(8, 104, 8))
    assert training[-1]["loss"] < training[0]["loss"]
    assert set(training[0]) == {
        "step", "samples", "epoch", "loss", "lr", "grad_norm", "tokens_per_second", "data_wait",
        "compute", "peak_memory_gb", "batch_hash",
    }  # fmt: skip
    assert [line["step"] for line in lines(output, "eval_loss")] == [6, 12]
    names = [p.name for p in sorted((output / "checkpoints").iterdir())]
    assert names == ["step-00000006", "step-00000012"]
    assert "1 x cpu, fp32" in printed.stdout and "parameters" in printed.stdout
    assert "sample: " in printed.stdout and str(output / "curves.png") in printed.stdout


SCHEDULE = """
import json, sys, train
fields = {"learning_rate": 2.0, "warmup_steps": 4, "final_lr_fraction": 0.1, "decay_fraction": 0.5}
for given in json.loads(sys.argv[1]):
    cfg = train.Config(**fields, **given)
    print(json.dumps([train.lr_at(step, cfg, 20) for step in range(1, 21)]))
"""


def test_the_learning_rate_warms_up_and_decays_as_its_schedule_says(project):
    """Step 1 has a fourth of the peak, step 4 all of it; the decay would be through at step 21."""
    cases = [{"lr_schedule": name} for name in ("constant", "linear", "cosine", "wsd")]
    cases.append({"global_batch_size": 64, "reference_batch_size": 16, "lr_scaling": "sqrt"})
    printed = project.run("python", "-c", SCHEDULE, json.dumps(cases)).stdout
    constant, linear, cosine, wsd, scaled = map(json.loads, printed.splitlines())
    left = [(21 - step) / 16 for step in range(5, 21)]
    for rates in (constant, linear, cosine, wsd):
        assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert constant[4:] == [2.0] * 16
    assert linear[4:] == pytest.approx([2 * (0.1 + 0.9 * each) for each in left])
    half = [(1 - math.cos(math.pi * each)) / 2 for each in left]
    assert cosine[4:] == pytest.approx([2 * (0.1 + 0.9 * each) for each in half])
    late = [min((21 - step) / 10, 1) for step in range(5, 21)]
    assert wsd[4:] == pytest.approx([2 * (0.1 + 0.9 * each) for each in late])
    assert scaled == pytest.approx([2 * each for each in cosine])


def test_manifests_vouch_for_every_file(one):
    for checkpoint in (one[0] / "checkpoints").iterdir():
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        assert manifest["step"] == int(checkpoint.name.removeprefix("step-"))
        assert manifest["config"]["seed"] == 3 and manifest["config"]["task"]["num_layers"] == 2
        found = {p.name for p in checkpoint.iterdir()} - {"manifest.json"}
        assert found == set(manifest["files"])
        for name, facts in manifest["files"].items():
            content = (checkpoint / name).read_bytes()
            assert facts["bytes"] == len(content)
            assert facts["sha256"] == hashlib.sha256(content).hexdigest()


def test_two_processes_see_the_same_samples_and_reach_the_same_losses(one, two):
    """Dropout is on, and the micro-batches are cut alike, so the masks are the same too."""
    assert "2 x cpu" in two[1].stdout and "8 samples = 2 x 1 x 4 (" in two[1].stdout
    pairs = list(zip(lines(one[0], "loss"), lines(two[0], "loss"), strict=True))
    for mine, theirs in pairs:
        for key in ("step", "samples", "epoch", "lr", "batch_hash"):
            assert mine[key] == theirs[key]
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
    assert len({line["batch_hash"] for line, _ in pairs}) == 12
    for mine, theirs in zip(lines(one[0], "eval_loss"), lines(two[0], "eval_loss"), strict=True):
        assert mine["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=1e-6)


def test_two_processes_write_each_line_once_and_print_once(two):
    output, printed = two
    assert [line["step"] for line in lines(output, "loss")] == list(range(1, 13))
    assert printed.stdout.count("2 x cpu") == 1 and printed.stdout.count("sample: ") == 1
    assert len(list(output.glob("wandb/offline-run-*"))) == 1


@pytest.mark.parametrize("run", ["one", pytest.param("two", marks=pytest.mark.slow)])
def test_offline_wandb_holds_what_metrics_jsonl_holds(project, run, request):
    output, printed = request.getfixturevalue(run)
    folder = next(output.glob("wandb/offline-run-*"))
    assert f"wandb sync {folder}" in printed.stdout
    records = project.run("wandb", "leet", "inspect", "--json", folder).stdout
    records = [json.loads(record) for record in records.splitlines()]
    logged = [record["history"]["item"] for record in records if record["type"] == "history"]
    for key in ("loss", "eval_loss", "grad_norm"):
        values = {line["step"]: line[key] for line in logged if key in line}
        expected = {line["step"]: line[key] for line in lines(output, key)}
        assert values == pytest.approx(expected, rel=1e-12)
    assert [line["sample"] for line in logged if "sample" in line][0] in printed.stdout
    config = next(record["config"]["update"] for record in records if record["type"] == "config")
    assert config["seed"] == 3 and config["task.num_layers"] == 2
    environment = [record["environment"] for record in records if record["type"] == "environment"]
    assert not any("git" in facts for facts in environment)  # nor a diff among the files:
    assert not list(folder.rglob("*.patch")) and not list(folder.rglob("*.py"))


@pytest.mark.slow
def test_a_continued_run_is_bit_identical_and_the_same_run_in_wandb(project, one, tmp_path):
    output = tmp_path / "run"
    first = one[0] / "checkpoints" / "step-00000006"
    shutil.copytree(first, output / "checkpoints" / first.name)
    shutil.copy(one[0] / "wandb_run_id", output)
    # What a kill leaves: half a line, and a checkpoint that was being written.
    (output / "metrics.jsonl").write_text('{"step": 6, "loss": 1.0}\n{"step": 7, "lo')
    (output / "checkpoints" / ".step-00000012.partial").mkdir()
    printed = train(project, "cpu", output, "--tracker", "wandb", HOME=tmp_path).stdout
    assert f"continuing from {output / 'checkpoints' / first.name}" in printed

    text = (output / "metrics.jsonl").read_text().splitlines()
    continued = [json.loads(line) for line in text[2:]]
    continued = [line for line in continued if "loss" in line]
    for mine, theirs in zip(lines(one[0], "loss")[6:], continued, strict=True):
        for key in ("step", "samples", "loss", "lr", "grad_norm", "batch_hash"):
            assert mine[key] == theirs[key]
    last = Path("checkpoints") / "step-00000012"
    assert digest(output / last) == digest(one[0] / last)
    assert not list((output / "checkpoints").glob(".*"))
    run_id = (one[0] / "wandb_run_id").read_text()
    assert next(output.glob("wandb/offline-run-*")).name.endswith(f"-{run_id}")


@pytest.mark.slow
def test_another_number_of_processes_goes_on_along_the_same_curve(project, one, two, tmp_path):
    for source, hardware in ((two, "cpu"), (one, "cpu_multi")):
        output = tmp_path / hardware
        first = source[0] / "checkpoints" / "step-00000006"
        shutil.copytree(first, output / "checkpoints" / first.name)
        train(project, hardware, output)
        for mine, theirs in zip(lines(one[0], "loss")[6:], lines(output, "loss"), strict=True):
            assert mine["batch_hash"] == theirs["batch_hash"]
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


@pytest.mark.slow
def test_another_cut_goes_on_along_the_same_curve(project, one, tmp_path):
    """From a step that the new accumulation does not divide; without dropout, that masks follow."""
    flags = ["--task.dropout", 0, "--save_every", 3, "--eval_every", 0]
    train(project, "cpu", tmp_path / "whole", *flags, "--micro_batch_size", 8)
    expected = lines(tmp_path / "whole", "loss")[3:]
    for hardware, micro in (("cpu", 4), ("cpu", 1), ("cpu_multi", 2)):
        output = tmp_path / f"{hardware}-{micro}"
        first = tmp_path / "whole" / "checkpoints" / "step-00000003"
        shutil.copytree(first, output / "checkpoints" / first.name)
        train(project, hardware, output, *flags, "--micro_batch_size", micro)
        for mine, theirs in zip(expected, lines(output, "loss"), strict=True):
            assert mine["batch_hash"] == theirs["batch_hash"]
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)


@pytest.mark.slow
def test_a_broken_checkpoint_is_passed_over_by_name_and_kept(project, one, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(one[0] / "checkpoints", output / "checkpoints")
    broken = output / "checkpoints" / "step-00000012" / "rank-00000.safetensors"
    broken.write_bytes(broken.read_bytes()[:-1])
    printed = train(project, "cpu", output).stdout
    assert f"passed over: {broken}" in printed and "step-00000006" in printed
    last = Path("checkpoints") / "step-00000012"
    assert digest(output / last) == digest(one[0] / last)
    kept = output / "checkpoints" / "step-00000012.broken-1" / broken.name
    assert kept.stat().st_size == (one[0] / last / broken.name).stat().st_size - 1


@pytest.mark.slow
def test_a_finished_run_says_so_and_a_checkpoint_is_never_overwritten(project, one):
    output = one[0]
    before = {p: p.stat().st_mtime_ns for p in output.rglob("*") if p.is_file()}
    result = train(project, "cpu", output)
    assert "is finished" in result.stdout and "--output_dir" in result.stdout
    refused = project.run(
        "python", "train.py", *FLAGS, "--output_dir", output, "--resume", "never", check=False
    )
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert "holds checkpoints" in refused.stderr
    changed = ["--learning_rate", 9, "--task.hidden_size", 32, "--log_every", 3]
    refused = project.run(
        "python", "train.py", *latest([*FLAGS, "--output_dir", output, *changed]), check=False
    )
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert "learning_rate: 0.003 -> 9.0; task.hidden_size: 64 -> 32)" in refused.stderr
    assert before == {p: p.stat().st_mtime_ns for p in output.rglob("*") if p.is_file()}


def test_the_exported_model_loads_with_from_pretrained_and_has_the_loss_that_was_logged(
    project, one
):
    program = """
import sys, torch, task
from transformers import AutoModelForCausalLM, AutoTokenizer
cfg = task.TaskConfig(num_layers=2, hidden_size=64, dropout=0.1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
text = 'The "with" statement\\n'
assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
_, data = task.datasets(cfg, task.prepare_data(cfg))
batch = task.collate([data[i] for i in range(len(data))])
print(task.metrics(task.eval_sums(model, batch))["loss"])
"""
    printed = project.run("python", "-c", program, one[0] / "model").stdout
    logged = lines(one[0], "eval_loss")[-1]["eval_loss"]
    assert float(printed.splitlines()[-1]) == pytest.approx(logged, rel=1e-5)


@pytest.mark.slow
def test_the_resolved_config_is_a_recipe_that_gives_the_same_run(project, one, tmp_path):
    config = one[0] / "config.yaml"
    flags = ["--output_dir", tmp_path / "again", "--max_steps", 2, "--tracker", "none"]
    project.run("python", "train.py", "--config", config, *flags)
    mine, theirs = lines(one[0], "loss")[0], lines(tmp_path / "again", "loss")[0]
    assert mine["loss"] == theirs["loss"] and mine["batch_hash"] == theirs["batch_hash"]


@pytest.mark.slow
def test_tensorboard_gets_the_same_losses(project, tmp_path):
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    output = tmp_path / "run"
    printed = train(project, "cpu", output, "--tracker", "tensorboard", "--max_steps", 4).stdout
    folder = printed.split("tensorboard --logdir ")[1].split("`")[0]
    events = EventMultiplexer().AddRunsFromDirectory(folder)
    events.Reload()
    assert [*events.Runs()] == ["run"]  # called as its folder is, and one entry
    logged = {event.step: event.value for event in events.Scalars("run", "loss")}
    (config,) = events.Tensors("run", "config/text_summary")
    assert b"learning_rate: 0.003" in config.tensor_proto.string_val[0]
    assert logged == pytest.approx({line["step"]: line["loss"] for line in lines(output, "loss")})


@pytest.mark.slow
def test_trackio_gets_the_same_losses(project, tmp_path):
    output, store = tmp_path / "run", {"TRACKIO_DIR": str(tmp_path / "trackio")}
    train(project, "cpu", output, "--tracker", "trackio", "--max_steps", 4, **store)
    command = "trackio get metric --project my_training --run run --metric loss --json".split()
    values = json.loads(project.run(*command, **store).stdout)["values"]
    logged = [value["value"] for value in values]
    assert logged == pytest.approx([line["loss"] for line in lines(output, "loss")])


@pytest.mark.slow
def test_num_epochs_and_workers(project, one, tmp_path):
    """Half an epoch of steps, and worker processes that change no digit."""
    flags = ["--num_workers", 2, "--eval_every", 0, "--save_every", 0]
    train(project, "cpu", tmp_path / "workers", *flags, "--max_steps", 4)
    pairs = list(zip(lines(one[0], "loss")[:4], lines(tmp_path / "workers", "loss"), strict=True))
    for mine, theirs in pairs:
        assert mine["batch_hash"] == theirs["batch_hash"]
    assert [mine["loss"] for mine, _ in pairs[:4]] == [theirs["loss"] for _, theirs in pairs]
    flags = ["--max_steps", 0, "--num_epochs", 0.01, "--warmup_steps", 0]
    train(project, "cpu", tmp_path / "epochs", *flags)
    steps = [line["step"] for line in lines(tmp_path / "epochs", "loss")]
    last = lines(tmp_path / "epochs", "loss")[-1]
    assert 0.01 <= last["epoch"] < 0.01 + last["epoch"] / len(steps)


@pytest.mark.slow
def test_a_run_goes_on_offline_when_wandb_cannot_be_reached(project, tmp_path):
    """An outage, in place of which wandb.init raises what it raises after its time-out."""
    program = """
import sys, wandb
start = wandb.init
def unreachable(**options):
    if options["mode"] == "online":
        raise wandb.errors.CommError("Timed out\\nwhile retrying")
    return start(**options)
wandb.init, wandb.login = unreachable, lambda **_: True
sys.argv = ["train.py", *sys.argv[1:]]
import train
train.shutdown.run(train.main, train.prepare)
"""
    flags = latest([*FLAGS, "--tracker", "wandb", "--max_steps", 2])
    flags += ["--output_dir", tmp_path / "run"]
    printed = project.run("python", "-c", program, *flags, HOME=tmp_path).stdout
    assert "W&B: Timed out while retrying\n" in printed and "W&B is offline" in printed
    assert len(list(tmp_path.glob("run/wandb/offline-run-*"))) == 1


def test_a_wrong_wandb_key_is_answered_in_one_line(project, tmp_path):
    flags = [*FLAGS, "--tracker", "wandb", "--output_dir", tmp_path / "run"]
    result = project.run("python", "train.py", *flags, check=False, WANDB_API_KEY="short")
    assert result.returncode == 2
    assert result.stderr.startswith("train.py: W&B: ") and result.stderr.count("\n") == 1
    assert not (tmp_path / "run" / "status.json").exists()  # no run began


@pytest.mark.slow
def test_the_projects_own_tests_pass(project):
    assert "passed" in project.run("python", "-m", "pytest", "-q").stdout


@pytest.mark.slow
def test_one_cause_is_one_error_of_the_projects_own_tests(tmp_path):
    project = make_tiny(tmp_path)
    task = project.path / "task.py"
    task.write_text(task.read_text() + "\n\ndef build_model(*_):\n    raise OSError('boom')\n")
    # -rN: where CI is set, pytest's summary repeats the whole error.
    command = ["python", "-m", "pytest", "-q", "-rN", "tests/test_training.py"]
    told = project.run(*command, check=False).stdout
    # One warning more of a pytest that runs in a fork of a process with modules.
    assert re.search("6 skipped, (1 warning, )?1 error in", told)
    assert told.count("OSError: boom") == 1
    assert "CalledProcessError" not in told


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
@pytest.mark.slow
@pytest.mark.parametrize("hardware", ["single_gpu_bf16", "multi_gpu"])
def test_a_yaml_for_gpus_is_refused_where_there_is_none(project, tmp_path, hardware):
    result = train(project, hardware, tmp_path / "run", check=False, CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 1  # the launcher's, of every code but 0
    said = "train.py: the launcher was told to use a GPU, but there is none: torch "
    assert result.stderr.count(said) == 1 and "use cpu.yaml" in result.stderr
