"""train_pipeline.py: stages of a model train as the whole does, and runs move there and back."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import GraniteConfig, GraniteForCausalLM, LlamaConfig, LlamaForCausalLM

from conftest import ROOT, copy_until, load_module, load_task, train_module
from refusals import cases, table
from same import check_same, check_same_curve
from samestep.models import next_token
from samestep.processes import mesh
from test_sharding import train

EXAMPLE = ROOT / "examples" / "train_pipeline.py"


def pipe(project, processes, *flags, codes=(0,)):
    """What train_pipeline.py prints in so many processes."""
    given = {"program": ["train_pipeline.py"], "env": {"ACCELERATE_MIXED_PRECISION": "no"}}
    return project.train(processes, *flags, codes=codes, timeout=500, **given)


# Eight micro-batches a step, whose gradient is clipped.
SMALL = {"micro_batch_size": 1, "learning_rate": 0.002, "max_grad_norm": 0.7}


@pytest.fixture(scope="module")
def small(small):
    shutil.copy(EXAMPLE, small.path)
    return small


@pytest.mark.slow
def test_two_stages_have_the_numbers_of_train_and_resume_to_the_same_bytes(small, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    flags = ["--save_every", "3", "--keep_checkpoints", "0"]
    train(small, "cpu", 1, *flags, "--output_dir", one)
    text = pipe(small, 2, *flags, "--output_dir", two)
    assert "8 samples = 1 x 8 x 1 (groups of 2 processes x micro-batches x samples)" in text
    check_same_curve(two, one, norm=1e-6)
    exported = [load_file(run / "model" / "model.safetensors") for run in (one, two)]
    torch.testing.assert_close(exported[1], exported[0], rtol=1e-4, atol=1e-6)
    half = copy_until(two, 3, tmp_path / "half")
    assert "continuing from" in pipe(small, 2, *flags, "--output_dir", half)
    check_same(two, half)


@pytest.mark.slow
@pytest.mark.parametrize("own, flags", cases("pipelines"))
def test_other_pipelines_have_the_losses_of_train(small, tmp_path, own, flags):
    """Two stages of two parts each; and two pipelines, packed and recomputed."""
    flags = [*flags.split(), "--task.num_layers", "4", "--max_steps", "3", "--output_dir"]
    pipe(small, 4, *own.split(), *flags, tmp_path / "four")
    train(small, "cpu", 1, *flags, tmp_path / "one")
    check_same_curve(tmp_path / "four", tmp_path / "one", norm=1e-6)


@pytest.mark.slow
def test_settings_that_do_not_fit_are_one_line(small):
    for (processes, flags), said in table("pipelines"):
        assert said in pipe(small, processes, *flags.split(), codes=[2])
    with pytest.raises(ValueError, match="2 stages need a YAML that shards nothing"):
        mesh.layout_of(4, 0, ("FSDP",), {"stages": 2})


def test_models_that_stages_do_not_make_up_are_refused():
    task, ids = load_task("causal_lm"), torch.arange(40, 80)[None]
    batch = {"input_ids": ids, "labels": ids.roll(-1)}
    batch |= {"unigram_loss": torch.ones(1), "bytes": torch.ones(1)}
    shape = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}

    def check(model):
        next_token.prepare(model, 4096)
        return stages.check_cut(model, 2, task.eval_sums, batch)

    with train_module(ROOT / "templates" / "causal_lm" / "task.py"):
        stages = load_module("train_pipeline", EXAMPLE)
    good = LlamaForCausalLM(LlamaConfig(**shape))
    assert check(good).keys() == {"unigram_loss", "bytes", "loss", "tokens"}
    parts = [stages.cut(good, stage, 2) for stage in range(2)]
    names = [{*part.state_dict()} for part in parts]
    assert names[0] | names[1] == good.state_dict().keys() and not names[0] & names[1]
    assert stages.missing(good, parts[0]).keys() == names[1]
    # Granite's decoder scales what it gets, be it the embedding or not.
    granite = GraniteConfig(**shape, tie_word_embeddings=False, embedding_multiplier=12.0)
    for model, words in (
        (LlamaForCausalLM(LlamaConfig(**shape, attention_dropout=0.1)), "has dropout"),
        (LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True)), "would share lm_head"),
        (GraniteForCausalLM(granite), "other states"),
    ):
        with pytest.raises(ValueError, match=words):
            check(model)
