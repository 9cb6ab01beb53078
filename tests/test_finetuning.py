"""The task causal_lm from pretrained weights: fine-tuning, LoRA, what is saved and answered.

The pretrained weights are those of a model that the tests train first.
"""

import json
import shutil
import textwrap

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from conftest import bake, lines, read_weights
from test_exact import check_same
from test_tasks import check_two_processes_and_a_lost_half

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
        "base": {"data": "pydoc", **MODEL},
        "prompts": {"data": "prompts.jsonl", "rows": "prompt", **TUNE},
        "lora": {**chat, "lora_rank": 4, "lora_dropout": 0.1},
    }.items():
        recipe = yaml.safe_dump({**RECIPE, "task": fields})
        (baked.path / "configs" / "train" / f"{name}.yaml").write_text(recipe)
    baked.train(1, *recipe_of("base"))
    return baked


@pytest.fixture(scope="module")
def tuned(project):
    """The runs of both recipes, on one process."""
    for name in ("prompts", "lora"):
        project.train(1, *recipe_of(name))
    return {name: project.path / "runs" / name for name in ("prompts", "lora")}


def recipe_of(name):
    return ["--config", f"configs/train/{name}.yaml"]


def checkpoint(output, step):
    return output / "checkpoints" / f"step-{step:08d}"


@pytest.mark.parametrize("name", ["prompts", "lora"])
def test_two_processes_tune_as_one_does_and_a_lost_half_is_made_up_for(
    project, tuned, tmp_path, name
):
    # Dropout follows the micro-batch, and these are of the same size in both runs.
    check_two_processes_and_a_lost_half(project, tmp_path, *recipe_of(name), whole=tuned[name])


def test_exact_tunes_to_the_same_bytes_on_any_processes(project, tmp_path):
    """LoRA with its dropout, of chats in packed rows."""
    flags = [*recipe_of("lora"), "--exact", "true", "--micro_batch_size", "1", "--output_dir"]
    for processes in (1, 3):
        project.train(processes, *flags, tmp_path / str(processes))
    check_same(tmp_path / "1", tmp_path / "3")


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


def test_lora_merged_is_lora(project, tuned):
    """A finished run with adapters alone merges them: it exports again."""
    shutil.copytree(tuned["lora"], project.path / "runs" / "merged")
    flags = [*recipe_of("lora"), "--output_dir", "runs/merged", "--task.merge_lora", "true"]
    printed = project.train(1, *flags)
    assert "exports again: task.merge_lora: False -> True" in printed
    program = """
import sys, torch
from transformers import AutoModelForCausalLM
models = [AutoModelForCausalLM.from_pretrained(path).eval() for path in sys.argv[1:]]
a, b, c = [model(torch.tensor([[7, 8, 9]])).logits for model in models]
assert torch.allclose(a, b, atol=1e-5), (a - b).abs().max()
assert not torch.allclose(a, c, atol=1e-3)
"""
    folders = ["runs/lora/model", "runs/merged/model", "runs/base/model"]
    project.run("python", "-c", program, *folders)
    assert not (project.path / "runs" / "merged" / "model" / "adapter_config.json").exists()


# ---- What comes after training -------------------------------------------------------------------


def test_eval_only_says_what_the_last_evaluation_said_and_changes_nothing(project, tuned):
    output = tuned["prompts"]

    def contents():
        kept = [f for f in output.rglob("*") if f.parent.name != "evaluation" and f.name != "lock"]
        return {f: f.read_bytes() for f in kept if f.is_file()}

    before, last = contents(), lines(output, "eval_loss")[-1]
    for processes in (1, 2):
        printed = project.train(processes, *recipe_of("prompts"), "--eval_only")
        assert "evaluating runs/prompts/checkpoints/step-00000006\n" in printed
        values = next(line for line in printed.splitlines() if "eval_loss" in line).split()
        for name, value in zip(values[::2], values[1::2], strict=True):
            assert float(value) == pytest.approx(last[name], rel=1e-4)
        found = json.loads((output / "evaluation" / "metrics.json").read_text())
        assert found["step"] == 6 and found["eval_loss"] == pytest.approx(last["eval_loss"])
    assert contents() == before
    flags = [*recipe_of("prompts"), "--eval_only"]
    first = project.train(1, *flags, "--resume", checkpoint(output, 3))
    assert "step-00000003\neval_loss" in first, first


def test_the_card_says_what_the_model_is(tuned):
    card = (tuned["prompts"] / "model" / "README.md").read_text(encoding="utf-8")
    about = yaml.safe_load(card.split("---")[1])
    expected = {"license": "unknown", "library_name": "transformers"}
    expected |= {"pipeline_tag": "text-generation", "base_model": "runs/base/model"}
    found = about.pop("model-index")[0]
    last = lines(tuned["prompts"], "eval_loss")[-1]
    assert about == expected and f"| eval_loss | {last['eval_loss']:.5g} |" in card
    assert f"torch {torch.__version__}" in card and "data: prompts.jsonl" in card
    scores = {each["type"]: each["value"] for each in found["results"][0]["metrics"]}
    assert scores["eval_loss"] == last["eval_loss"] and found["name"] == "prompts"
    settings = card.partition("## Settings\n\n")[2].partition("\n##")[0]
    settings = yaml.safe_load(textwrap.dedent(settings))
    assert settings == yaml.safe_load((tuned["prompts"] / "config.yaml").read_text())


def test_a_folder_that_is_no_beginning_is_one_line(project, tuned):
    def remove_head(folder):
        weights = load_file(folder / "model.safetensors")
        del weights["lm_head.weight"]
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    changes = {
        "an adapter": (lambda f: None, "holds a LoRA adapter alone"),
        "no config": (lambda f: (f / "config.json").unlink(), "holds no model, since it has no "),
        "torn": (lambda f: (f / "model.safetensors").write_bytes(b"torn"), "cannot load runs/torn"),
        "no words": (lambda f: (f / "tokenizer.json").unlink(), "cannot load runs/no words"),
        "no head": (remove_head, "for something else: it has no weights for lm_head.weight"),
    }
    for name, (change, said) in changes.items():
        folder = project.path / "runs" / name
        run = "lora" if name == "an adapter" else "base"
        shutil.copytree(project.path / "runs" / run / "model", folder)
        change(folder)
        flags = ["--task.model_name_or_path", f"runs/{name}", "--output_dir", "runs/refused"]
        [(code, _, printed)] = project.ends(1, *recipe_of("prompts"), *flags)
        assert code == 2 and printed.count("\n") == 1 and said in printed, printed
        assert printed.startswith("train.py: task.model_name_or_path: ")


# ---- Other models, other data --------------------------------------------------------------------


def make_model(project, name, program):
    """A model folder made by a piece of code, with the tokenizer of runs/base."""
    folder = project.path / "runs" / name
    shutil.copytree(project.path / "runs" / "base" / "model", folder)
    (folder / "model.safetensors").unlink()
    before = "import sys, torch, transformers\nfrom transformers import *\ntorch.manual_seed(0)\n"
    project.run("python", "-c", f"{before}{program}.save_pretrained(sys.argv[1])", folder)
    return ["--task.model_name_or_path", f"runs/{name}", "--output_dir", f"runs/{name}-run"]


GPT2 = "GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=32, n_layer=1, n_head=2, n_positions=64))"
OPT = (
    "OPTForCausalLM(OPTConfig(vocab_size=300, hidden_size=32, num_hidden_layers=1, ffn_dim=32, "
    "num_attention_heads=2, max_position_embeddings=64, word_embed_proj_dim=32))"
)


def test_adapters_of_a_model_with_tied_weights_make_small_checkpoints(project):
    """The embedding has two names there; as gpt2's own classes do, predict knows its task."""
    flags = [*recipe_of("lora"), *make_model(project, "gpt2", GPT2), "--max_steps", "3"]
    project.train(2, *flags)
    output = project.path / "runs" / "gpt2-run"
    saved = read_weights(checkpoint(output, 3))
    assert saved and all("lora_" in name for name in saved)
    printed = project.train(1, *flags, "--task.merge_lora", "--max_steps", "4", "--accept_changes")
    assert "continuing from" in printed
    files = {path.name for path in (output / "model").iterdir()}
    assert "model.safetensors" in files and "adapter_config.json" not in files
    command = ["python", "-m", "samestep", "predict", "--model", "runs/gpt2-run/model"]
    assert "text" in json.loads(project.run(*command, "--json", "1 +").stdout)
    assert "pipeline_tag: text-generation" in (output / "model" / "README.md").read_text()


def test_a_model_that_cannot_keep_packed_texts_apart_is_refused(project):
    flags = [*recipe_of("prompts"), *make_model(project, "opt", OPT)]
    [(code, _, printed)] = project.ends(1, *flags)
    assert code == 2 and "models of the type opt cannot keep packed texts apart" in printed


def test_a_run_goes_on_with_more_data_and_its_own_vocabulary(project):
    rows = [{"text": f"{i} + {i} = {2 * i}"} for i in range(200)]
    for name, part in (("some", rows[:150]), ("more", rows)):
        (project.path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    flags = [*recipe_of("base"), "--output_dir", "runs/words", "--save_every", "2"]
    project.train(1, *flags, "--max_steps", "3", "--task.data", "some.jsonl")
    vocabulary = (project.path / "runs/words/model/tokenizer.json").read_bytes()
    more = [*flags, "--max_steps", "6", "--task.data", "more.jsonl"]
    [(code, _, printed)] = project.ends(1, *more)
    assert code == 2 and "--accept_changes to continue with the new ones" in printed
    assert "task.data: some.jsonl -> more.jsonl" in printed and "vocabulary: " not in printed
    printed = str(project.train(1, *more, "--accept_changes"))
    assert "continuing from runs/words/checkpoints/step-00000003" in printed
    assert "the run keeps its tokenizer.json" in printed
    shutil.rmtree(project.path / "runs/words/checkpoints/step-00000006")  # as if it was killed
    model = project.path / "runs/words/model/model.safetensors"
    trained = model.read_bytes()
    printed = str(project.train(1, *more))
    assert "continuing from runs/words/checkpoints/step-00000004" in printed
    assert (project.path / "runs/words/model/tokenizer.json").read_bytes() == vocabulary
    assert [line["step"] for line in lines(project.path / "runs/words", "loss")][-1] == 6
    assert model.read_bytes() == trained
    shutil.rmtree(project.path / "runs/words/identity")
    [(code, _, printed)] = project.ends(1, *more, "--accept_changes")
    assert code == 2 and "another vocabulary, so its weights" in printed
