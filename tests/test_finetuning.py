"""The task causal_lm from pretrained weights: fine-tuning, LoRA, what is saved.

The pretrained weights are those of a model that the tests train first.
"""

import re
import shutil

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from conftest import (
    bake,
    checkpoint,
    kill_before,
    lines,
    manifest,
    newest,
    read_weights,
    write_recipe,
    write_table,
)
from same import check_same, check_same_curve, digests
from small_models import new_model
from test_tasks import chat

# They train a model first, and then its descendants.
pytestmark = pytest.mark.slow
CHATS = [chat(f"{i} + 1?", f"{i + 1}.") for i in range(400)]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project with a model in runs/base, whose recipe tunes it on chats."""
    baked = bake(tmp_path_factory.mktemp("finetuning"), pictures=False, tracker="none")
    write_table(baked.path, CHATS, name="chats")
    flags = ["--max_steps", 3, "--warmup_steps", 1, "--global_batch_size", 8]
    flags += ["--micro_batch_size", 4, "--output_dir", "runs/base"]
    flags += ["--task.data", "manual", "--task.num_layers", 2, "--task.hidden_size", 32]
    baked.train(1, *flags, "--task.num_heads", 2, "--task.vocab_size", 300)
    return write_recipe(baked, "finetuning")


@pytest.fixture(scope="module")
def tuned(project):
    """A run of the recipe, on one process."""
    said = "warning: learning_rate is 0.01, high for the pretrained weights of runs/base"
    assert said in project.train(1, "--output_dir", "runs/lora")
    return project.path / "runs" / "lora"


def test_lora_trains_adapters_alone_and_saves_no_more(project, tuned):
    base = load_file(project.path / "runs" / "base" / "model" / "model.safetensors")
    weights = read_weights(checkpoint(tuned, 6))
    assert weights and all("lora_" in name for name in weights)
    size = sum(values.numel() for values in base.values())
    assert sum(values.numel() for values in weights.values()) < size / 4
    adapters = load_file(tuned / "model" / "adapter_model.safetensors")
    assert sum(v.numel() for v in adapters.values()) == sum(v.numel() for v in weights.values())
    card = (tuned / "model" / "README.md").read_text()
    assert "library_name: peft" in card and "base_model: runs/base/model" in card


def test_lora_merged_is_lora(project, tuned, monkeypatch):
    """A finished run with adapters alone merges them: without model/ it exports again."""
    shutil.copytree(tuned, project.path / "runs" / "merged")
    shutil.rmtree(project.path / "runs" / "merged" / "model")
    project.train(1, "--output_dir", "runs/merged", "--task.merge_lora", "true")
    monkeypatch.chdir(project.path)  # by which the adapter finds its model
    logits = []
    for run in ("lora", "merged", "base"):
        model = AutoModelForCausalLM.from_pretrained(f"runs/{run}/model").eval()
        logits.append(model(torch.tensor([[7, 8, 9]])).logits)
    assert torch.allclose(logits[0], logits[1], atol=1e-5)
    assert not torch.allclose(logits[0], logits[2], atol=1e-3)
    assert not (project.path / "runs" / "merged" / "model" / "adapter_config.json").exists()


def test_weights_that_are_missing_are_not_made_up(project):
    """Those of the head; new ones would be trained without a word."""
    folder = shutil.copytree(project.path / "runs" / "base" / "model", project.path / "headless")
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    flags = ["--task.model_name_or_path", "headless", "--output_dir", "runs/refused"]
    printed = project.train(1, *flags, codes=[2])
    assert "for something else: it has no weights for lm_head.weight" in printed


def test_adapters_of_a_model_with_tied_weights_make_small_checkpoints(project):
    """The embedding has two names there."""
    folder = project.path / "runs" / "gpt2"
    shutil.copytree(project.path / "runs" / "base" / "model", folder)
    new_model("GPT2", "LMHeadModel", vocab_size=300, n_positions=64).save_pretrained(folder)
    flags = ["--task.model_name_or_path", "runs/gpt2", "--output_dir", "runs/gpt2-run"]
    project.train(2, *flags, "--max_steps", 3)
    output = project.path / "runs" / "gpt2-run"
    saved = read_weights(checkpoint(output, 3))
    assert saved and all("lora_" in name for name in saved)
    printed = project.train(1, *flags, "--task.merge_lora", "--max_steps", "4", "--accept_changes")
    assert "continuing from" in printed
    files = {path.name for path in (output / "model").iterdir()}
    assert "model.safetensors" in files and "adapter_config.json" not in files
    assert "pipeline_tag: text-generation" in (output / "model" / "README.md").read_text()


def few_chats(project, name, *flags, count=49, **options):
    """A run of the recipe finetune on few chats; what it prints, and its folder."""
    write_table(project.path, CHATS[:count], name=f"few-{count}")
    given = ["--config", "configs/train/finetune.yaml", "--task.data", f"few-{count}.jsonl"]
    given += ["--task.model_name_or_path", "runs/base/model", "--output_dir", f"runs/{name}"]
    given += ["--check_export", "false", "--save_every", "0", "--learning_rate", "1e-3"]
    printed = project.train(options.pop("processes", 1), *given, *flags, **options)
    return printed, project.path / "runs" / name


def test_few_chats_train(project):
    """Each is a sequence of its own. The chosen steps are in config.yaml and in the manifest, and
    those of a resume and of two processes; a flag leaves all as it is."""
    printed, whole = few_chats(project, "few")
    rows = int(re.search(r"(\d+) rows, (\d+) epochs of [\d.]+ steps of 4 rows", printed)[1])
    assert 40 <= rows < 49 and "warmup_steps 0.03: 3 of 69 steps" in printed
    chosen = yaml.safe_load((whole / "config.yaml").read_text())
    said = manifest(newest(whole))["config"]
    names = ("global_batch_size", "num_epochs", "min_steps")
    assert [chosen[name] for name in names] == [said[name] for name in names]
    assert chosen["global_batch_size"] == 4 and chosen["task"]["packing"] == "if_many"
    assert said["task"]["packing"] == "none" and manifest(newest(whole))["step"] >= 60
    steps = manifest(newest(whole))["step"]
    (first,) = lines(whole, "few_rows_loss")
    (last,) = lines(whole, "eval_loss")[-1:]
    assert last["eval_loss"] < first["few_rows_loss"] and "to learn more" not in printed
    few_chats(project, "killed", "--save_every", 20, before=kill_before(30), codes=[-9])
    again, killed = few_chats(project, "killed", "--save_every", 20)
    assert "continuing from" in again and "rows, " in again
    check_same(whole, killed)
    _, two = few_chats(project, "few-two", processes=2)
    check_same_curve(whole, two, rel=1e-4)
    printed, short = few_chats(project, "flagged", "--num_epochs", 1)
    assert f"the run has {-(-rows // 16)} steps; for one that trains give --num_epochs" in printed
    assert manifest(newest(short))["config"]["min_steps"] == 0 and steps > 9


def test_a_run_of_before_keeps_its_steps(project):
    """One whose config.yaml has no min_steps goes on with the steps that it had."""
    old = ("--min_steps", 0, "--warmup_steps", 20, "--save_every", 2)
    few_chats(project, "old", *old, before=kill_before(6), codes=[-9])
    file = project.path / "runs" / "old" / "config.yaml"
    file.write_text(file.read_text().replace("min_steps: 0\n", ""))
    printed, run = few_chats(project, "old", "--warmup_steps", 20)
    assert "continuing from" in printed and "epochs of" not in printed
    assert manifest(newest(run))["config"]["global_batch_size"] == 16
    _, whole = few_chats(project, "untouched", *old)
    assert digests(run) == digests(whole)


def test_a_rate_that_changes_nothing_is_said_at_the_end(project):
    printed, _ = few_chats(project, "low", "--learning_rate", "1e-7")
    said = "to learn more give --learning_rate 0.0002 --num_epochs"
    assert said in printed and "--output_dir runs/low-2" in printed
