"""The task causal_lm from pretrained weights: fine-tuning, LoRA, what is saved and answered.

The pretrained weights are those of a model that the tests train first.
"""

import json
import shutil

import pytest
import torch
import yaml
from safetensors.torch import load_file

from conftest import bake, digest, lines, read_weights, status
from test_exact import check_same

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
    {
        "messages": [
            {"role": "user", "content": f"{i} + 1?"},
            {"role": "assistant", "content": f"{i + 1}."},
        ]
    }
    for i in range(400)
]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project with a model in runs/base, and recipes to tune it on prompts and on chats."""
    baked = bake(tmp_path_factory.mktemp("finetuning"), tracker="none")
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


def losses(output):
    return [line["loss"] for line in lines(output, "loss")]


def checkpoint(output, step):
    return output / "checkpoints" / f"step-{step:08d}"


@pytest.mark.parametrize("name", ["prompts", "lora"])
def test_two_processes_tune_as_one_does(project, tuned, name):
    # Dropout follows the micro-batch, and these are of the same size in both runs.
    project.train(2, *recipe_of(name), "--output_dir", f"runs/{name}-2")
    output = project.path / "runs" / f"{name}-2"
    assert losses(output) == pytest.approx(losses(tuned[name]), rel=1e-6)
    for key in ("batch_hash", "eval_loss"):
        mine, theirs = ([line[key] for line in lines(o, key)] for o in (output, tuned[name]))
        assert mine == (theirs if key == "batch_hash" else pytest.approx(theirs, rel=1e-6))


@pytest.mark.parametrize("name", ["prompts", "lora"])
def test_exact_tunes_to_the_same_bytes_on_any_processes(project, tmp_path, name):
    """Packed rows; LoRA with its dropout, of chats."""
    flags = [*recipe_of(name), "--exact", "true", "--micro_batch_size", "1", "--output_dir"]
    for processes in (1, 2, 3):
        project.train(processes, *flags, tmp_path / str(processes))
    check_same(*(tmp_path / str(processes) for processes in (1, 2, 3)))


@pytest.mark.parametrize("name", ["prompts", "lora"])
def test_a_continued_run_ends_with_the_same_bytes(project, tuned, name):
    output = project.path / "runs" / f"{name}-continued"
    shutil.copytree(checkpoint(tuned[name], 3), checkpoint(output, 3))
    printed = project.train(1, *recipe_of(name), "--output_dir", output)
    assert "continuing from" in printed
    assert digest(checkpoint(output, 6)) == digest(checkpoint(tuned[name], 6))


def test_continued_pretraining_begins_where_the_model_ended(project):
    flags = ["--task.model_name_or_path", "runs/base/model", "--output_dir", "runs/more"]
    project.train(1, *recipe_of("base"), *flags, "--max_steps", "3")
    before, after = losses(project.path / "runs" / "base"), losses(project.path / "runs" / "more")
    assert after[0] < before[0] - 0.5 and after[0] == pytest.approx(before[-1], abs=0.3)


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
    program = (
        "import sys, torch\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "ids = tokenizer('7 + 1?', return_tensors='pt').input_ids\n"
        "models = [AutoModelForCausalLM.from_pretrained(path).eval() for path in sys.argv[1:]]\n"
        "a, b, c = [model(ids).logits for model in models]\n"
        "assert torch.allclose(a, b, atol=1e-5), (a - b).abs().max()\n"
        "assert not torch.allclose(a, c, atol=1e-3)\n"
    )
    folders = ["runs/lora/model", "runs/merged/model", "runs/base/model"]
    project.run("python", "-c", program, *folders)
    assert not (project.path / "runs" / "merged" / "model" / "adapter_config.json").exists()


def test_adapters_do_not_go_on_from_other_weights(project, tuned):
    """The folder holds another model now: a checkpoint of adapters does not fit it any more."""
    model = project.path / "runs" / "base" / "model"
    kept = model.with_name("kept")
    shutil.copytree(model, kept)
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][3] += 0.5
    try:
        from safetensors.torch import save_file

        save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
        output = project.path / "runs" / "lora-other"
        shutil.copytree(checkpoint(tuned["lora"], 3), checkpoint(output, 3))
        flags = [*recipe_of("lora"), "--output_dir", output]
        printed = project.train(1, *flags, codes=(2,))
        assert "was trained with other pretrained weights" in printed.splitlines()[-1]
    finally:
        shutil.rmtree(model)
        kept.rename(model)


def test_gradient_checkpointing_changes_no_loss(project, tuned):
    flags = ["--output_dir", "runs/gc", "--gradient_checkpointing", "true", "--max_steps", "3"]
    project.train(1, *recipe_of("lora"), *flags)
    assert losses(project.path / "runs" / "gc") == pytest.approx(
        losses(tuned["lora"])[:3], rel=1e-6
    )


def test_eager_attention_changes_no_loss(project, tuned):
    flags = ["--output_dir", "runs/eager", "--task.attn_implementation", "eager"]
    project.train(1, *recipe_of("prompts"), *flags, "--max_steps", "3")
    mine = losses(project.path / "runs" / "eager")
    assert mine == pytest.approx(losses(tuned["prompts"])[:3], rel=1e-5)


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
    first = project.train(
        1, *recipe_of("prompts"), "--eval_only", "--resume", checkpoint(output, 3)
    )
    assert "step-00000003\neval_loss" in first, first
    printed = project.train(
        1, *recipe_of("prompts"), "--eval_only", "--output_dir", "runs/none", codes=(2,)
    )
    assert "there is no checkpoint in runs/none/checkpoints; train first" in printed


def test_a_run_that_died_before_its_export_evaluates_and_exports(project, tuned):
    """Only its last checkpoint is left; a lower max_steps then changes nothing but that."""
    for steps in ("6", "4"):
        output = project.path / "runs" / f"died-{steps}"
        shutil.copytree(checkpoint(tuned["prompts"], 6), checkpoint(output, 6))
        flags = ["--output_dir", output, "--max_steps", steps, "--accept_changes"]
        project.train(1, *recipe_of("prompts"), *flags)
        card = (output / "model" / "README.md").read_text()
        assert "Trained for 6 steps" in card
        assert (
            f"| eval_loss | {lines(tuned['prompts'], 'eval_loss')[-1]['eval_loss']:.5g} |" in card
        )
        assert status(output)["state"] == "finished"


def test_the_card_says_what_the_model_is(tuned):
    folder = tuned["prompts"] / "model"
    card = (folder / "README.md").read_text(encoding="utf-8")
    about = yaml.safe_load(card.split("---")[1])
    assert about == {
        "library_name": "transformers", "pipeline_tag": "text-generation",
        "base_model": "runs/base/model",
    }  # fmt: skip
    last = lines(tuned["prompts"], "eval_loss")[-1]
    assert f"| eval_loss | {last['eval_loss']:.5g} |" in card
    assert f"torch {torch.__version__}" in card and "data: prompts.jsonl" in card
    settings = yaml.safe_load(card.split("```yaml")[1].split("```")[0])
    assert settings == yaml.safe_load((tuned["prompts"] / "config.yaml").read_text())


@pytest.mark.slow
def test_predict_answers_from_arguments_a_file_and_standard_input(project, tuned, tmp_path):
    def predict(*flags, text=None, code=0):
        import subprocess

        result = subprocess.run(
            ["python", "-m", "samestep", "predict", *map(str, flags)],
            cwd=project.path, env=project.env(),
            input=text, capture_output=True, text=True,
        )  # fmt: skip
        assert result.returncode == code, result.stderr
        return result.stdout if code == 0 else result.stderr

    flags = ["--model", "runs/prompts/model", "--json", "--tokens", "5"]
    (tmp_path / "in.txt").write_text("1 + 1 = \n2 + 1 = \n")
    answers = predict(*flags, "1 + 1 = ", "2 + 1 = ")
    assert [json.loads(line)["input"] for line in answers.splitlines()] == ["1 + 1 = ", "2 + 1 = "]
    assert all(isinstance(json.loads(line)["text"], str) for line in answers.splitlines())
    assert predict(*flags, "--file", tmp_path / "in.txt") == answers
    assert predict(*flags, text=(tmp_path / "in.txt").read_text()) == answers
    chat = predict("--model", "runs/lora/model", "--chat", "--json", "7 + 1?")
    assert json.loads(chat)["input"] == "7 + 1?"
    assert "python -m samestep predict photo.jpg" in predict("--help")
    for wrong, said in [
        (["--model", "runs/none/model", "x"], "there is no model in runs/none/model; train first"),
        (["--model", "configs", "x"], "configs holds no model of transformers"),
        (
            ["--model", "runs/prompts/model", "--chat", "x"],
            "has no chat template; leave out --chat",
        ),
        (["--model", "runs/prompts/model", "x", "--file", "y"], "give inputs or --file, not both"),
        (["--model", "runs/prompts/model", "--file", "none.txt"], "cannot read none.txt"),
        (["--model", "runs/prompts/model", "--tokens", "0", "x"], "--tokens is 0; give a number"),
    ]:
        printed = predict(*wrong, code=2)
        assert said in printed and printed.count("\n") == 1
    assert "there is no input" in predict("--model", "runs/prompts/model", text="", code=2)


BAD_MODELS = [
    ({"config.json": None}, "holds no model, since it has no config.json"),
    ({"config.json": "{"}, "cannot load runs/bad"),
    ({"model.safetensors": None}, "cannot load runs/bad"),
    ({"model.safetensors": b"torn"}, "cannot load runs/bad"),
    ({"tokenizer.json": None}, "cannot load runs/bad"),
]


@pytest.mark.parametrize("changes, said", BAD_MODELS)
def test_a_bad_model_folder_is_one_line(project, changes, said):
    bad = project.path / "runs" / "bad"
    shutil.rmtree(bad, ignore_errors=True)
    shutil.copytree(project.path / "runs" / "base" / "model", bad)
    for name, content in changes.items():
        (bad / name).unlink()
        if content is not None:
            (bad / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    flags = ["--task.model_name_or_path", "runs/bad", "--output_dir", "runs/refused"]
    [(code, _, printed)] = project.forked([{"flags": [*recipe_of("prompts"), *flags]}])
    assert code == 2 and printed.count("\n") == 1
    assert printed.startswith("train.py: task.model_name_or_path: ") and said in printed


def test_an_adapter_or_another_kind_of_model_is_no_beginning(project, tuned):
    def refused(folder):
        flags = ["--task.model_name_or_path", folder, "--output_dir", "runs/refused"]
        [(code, _, printed)] = project.forked([{"flags": [*recipe_of("prompts"), *flags]}])
        assert code == 2 and printed.count("\n") == 1
        return printed

    assert "holds a LoRA adapter alone" in refused("runs/lora/model")
    other = project.path / "runs" / "other"
    shutil.copytree(project.path / "runs" / "base" / "model", other)
    weights = load_file(other / "model.safetensors")
    from safetensors.torch import save_file

    del weights["lm_head.weight"]
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    assert "is for something else: it has no weights for lm_head.weight" in refused("runs/other")


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
    answer = project.run(
        "python", "-m", "samestep", "predict", "--model", "runs/gpt2-run/model", "--json", "1 +"
    )
    assert "text" in json.loads(answer.stdout)
    assert "pipeline_tag: text-generation" in (output / "model" / "README.md").read_text()


def test_a_model_that_cannot_keep_packed_texts_apart_is_refused(project):
    flags = [*recipe_of("prompts"), *make_model(project, "opt", OPT)]
    [(code, _, printed)] = project.forked([{"flags": flags}])
    assert code == 2 and "models of the type opt cannot keep packed texts apart" in printed


def test_other_data_would_change_the_vocabulary_and_is_refused(project):
    """Its weights stand for tokens that would be others; no accepted change makes up for it."""
    rows = [{"text": f"{i} + {i} = {2 * i}"} for i in range(200)]
    for name, part in (("some", rows[:150]), ("more", rows)):
        (project.path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    flags = [*recipe_of("base"), "--output_dir", "runs/words", "--max_steps", "3"]
    project.train(1, *flags, "--task.data", "some.jsonl")
    cases = [{"flags": [*flags, "--task.data", "more.jsonl", "--accept_changes"]}]
    [(code, _, printed)] = project.forked(cases)
    assert code == 2 and printed.count("\n") == 1
    assert "was made with another vocabulary, other classes" in printed
    assert "numbers (task.data: some.jsonl -> more.jsonl), so its weights" in printed
    assert "--task.model_name_or_path runs/words/model" in printed


def test_other_validation_rows_are_noticed(project, tuned):
    (project.path / "held.jsonl").write_text("\n".join(map(json.dumps, PROMPTS[:50])))
    flags = [*recipe_of("prompts"), "--task.validation_data", "held.jsonl", "--eval_only"]
    [(code, _, printed)] = project.forked([{"flags": flags}])
    assert code == 2 and "data validation: " in printed and "--accept_changes" in printed
    assert "eval_loss" in project.train(1, *flags, "--accept_changes")
    drawn = tuned["prompts"] / "evaluation"
    assert drawn.is_dir()


def test_the_digest_of_frozen_weights_is_the_same_for_any_number_of_threads(project):
    program = (
        "import sys, torch\nfrom samestep.checkpoint import weights\n"
        "torch.set_num_threads(int(sys.argv[1]))\n"
        "generator = torch.Generator().manual_seed(0)\n"
        "model = torch.nn.Linear(4096, 2048)\n"
        "model.weight.data = torch.randn(2048, 4096, generator=generator)\n"
        "model.bias.data.zero_()\n"
        "model.weight.requires_grad_(False)\n"
        "if sys.argv[2:]:\n    model.weight.data[5, 7] += 1e-6\n"
        "print([*weights.trained_weights(model)], weights.frozen_digest(model))\n"
    )
    one, two, other = (
        project.run("python", "-c", program, *words).stdout for words in ("1", "2", "1x")
    )
    assert one == two != other and one.startswith("['bias'] ")


def test_the_run_folder_says_that_it_is_finished(tuned):
    assert status(tuned["lora"])["state"] == "finished"
