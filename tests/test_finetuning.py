"""The task causal_lm from pretrained weights: fine-tuning, LoRA, what is saved.

The pretrained weights are those of a model that the tests train first.
"""

import json
import shutil

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from conftest import bake, checkpoint, read_weights

# They train a model first, and then its descendants.
pytestmark = pytest.mark.slow
RECIPE = {
    "max_steps": 6, "global_batch_size": 8, "micro_batch_size": 4, "warmup_steps": 2,
    "eval_every": 3, "save_every": 3, "keep_checkpoints": 0, "log_every": 1, "learning_rate": 0.01,
}  # fmt: skip
MODEL = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 300}
TUNE = {"model_name_or_path": "runs/base/model", "context_length": 128}
PROMPTS = [{"prompt": f"{i} + 1 = ", "completion": str(i + 1)} for i in range(400)]
CHATS = [
    [{"role": "user", "content": f"{i} + 1?"}, {"role": "assistant", "content": f"{i + 1}."}]
    for i in range(400)
]
CHATS = [{"messages": messages} for messages in CHATS]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project with a model in runs/base, and recipes to tune it on prompts and on chats."""
    baked = bake(tmp_path_factory.mktemp("finetuning"), pictures=False, tracker="none")
    for name, rows in (("prompts", PROMPTS), ("chats", CHATS)):
        (baked.path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    chat = {"data": "chats.jsonl", **TUNE}  # its column says what the rows are
    for name, fields in {
        "base": {"data": "manual", **MODEL},
        "prompts": {"data": "prompts.jsonl", "rows": "prompt", **TUNE},
        "lora": {**chat, "lora_rank": 4, "lora_dropout": 0.1},
    }.items():
        recipe = yaml.safe_dump({**RECIPE, "task": fields})
        (baked.path / "configs" / "train" / f"{name}.yaml").write_text(recipe)
    baked.train(1, *recipe_of("base"), "--max_steps", 3, "--eval_every", 0, "--save_every", 0)
    return baked


@pytest.fixture(scope="module")
def tuned(project):
    """The runs of both recipes, on one process."""
    for name in ("prompts", "lora"):
        said = "warning: learning_rate is 0.01, high for the pretrained weights of runs/base"
        assert said in project.train(1, *recipe_of(name))
    return {name: project.path / "runs" / name for name in ("prompts", "lora")}


def recipe_of(name):
    return ["--config", f"configs/train/{name}.yaml"]


def test_lora_trains_adapters_alone_and_saves_no_more(project, tuned):
    base = load_file(project.path / "runs" / "base" / "model" / "model.safetensors")
    weights = read_weights(checkpoint(tuned["lora"], 6))
    assert weights and all("lora_" in name for name in weights)
    size = sum(values.numel() for values in base.values())
    assert sum(values.numel() for values in weights.values()) < size / 4
    adapters = load_file(tuned["lora"] / "model" / "adapter_model.safetensors")
    assert sum(v.numel() for v in adapters.values()) == sum(v.numel() for v in weights.values())
    card = (tuned["lora"] / "model" / "README.md").read_text()
    assert "library_name: peft" in card and "base_model: runs/base/model" in card


def test_lora_merged_is_lora(project, tuned, monkeypatch):
    """A finished run with adapters alone merges them: without model/ it exports again."""
    shutil.copytree(tuned["lora"], project.path / "runs" / "merged")
    shutil.rmtree(project.path / "runs" / "merged" / "model")
    flags = [*recipe_of("lora"), "--output_dir", "runs/merged", "--task.merge_lora", "true"]
    project.train(1, *flags)
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
    flags = [*recipe_of("prompts"), "--task.model_name_or_path", "headless"]
    printed = project.train(1, *flags, "--output_dir", "runs/refused", codes=[2])
    assert "for something else: it has no weights for lm_head.weight" in printed


def test_adapters_of_a_model_with_tied_weights_make_small_checkpoints(project):
    """The embedding has two names there."""
    folder = project.path / "runs" / "gpt2"
    shutil.copytree(project.path / "runs" / "base" / "model", folder)
    config = GPT2Config(vocab_size=300, n_embd=32, n_layer=1, n_head=2, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(folder)
    flags = ["--task.model_name_or_path", "runs/gpt2", "--output_dir", "runs/gpt2-run"]
    flags += [*recipe_of("lora"), "--max_steps", "3"]
    project.train(2, *flags)
    output = project.path / "runs" / "gpt2-run"
    saved = read_weights(checkpoint(output, 3))
    assert saved and all("lora_" in name for name in saved)
    printed = project.train(1, *flags, "--task.merge_lora", "--max_steps", "4", "--accept_changes")
    assert "continuing from" in printed
    files = {path.name for path in (output / "model").iterdir()}
    assert "model.safetensors" in files and "adapter_config.json" not in files
    assert "pipeline_tag: text-generation" in (output / "model" / "README.md").read_text()
