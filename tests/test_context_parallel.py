"""Processes that share rows train as one process does. What the kernels of CUDA do is not shown."""

import types

import pytest
import torch

import test_sharding
from conftest import load_task
from samestep.checkpoint import weights
from samestep.processes import ranks
from samestep.settings import mesh as layout
from samestep.settings.run_config import DDPConfig
from samestep.start import startup
from samestep.step import sharding
from test_sharding import agree, curve, make_small, train

alone = test_sharding.alone  # a fixture: a run of one process


SHARED = layout.layout_of(2, 1, ("FSDP", "PARALLELISM_CONFIG"), {"cp": 2})


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A project with a small language model, and a YAML for two replicas of two processes."""
    fields = {"max_steps": 4, "eval_every": 2, "save_every": 2, "learning_rate": 0.001}
    baked = make_small(tmp_path_factory.mktemp("small"), **fields)
    config = baked.path / "configs" / "accelerate"
    text = (config / "context_parallel.yaml").read_text()
    two, four = "parallelism_config_dp_shard_size: 1", "parallelism_config_dp_shard_size: 2"
    assert two in text
    (config / "context_parallel_2x2.yaml").write_text(text.replace(two, four))
    return baked


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [("context_parallel", 2), ("context_parallel_2x2", 4, "--gradient_checkpointing=true")]
)
def test_losses_norms_and_evaluations_are_those_of_one_process(small, alone, tmp_path, case):
    """A replica has two or four micro-batches in a step. One process continues the run."""
    train(small, *case, "--output_dir", tmp_path / "run")
    agree(tmp_path / "run", alone, norm=1e-6)
    first, shared = (curve(output) for output in (alone, tmp_path / "run"))
    for step in (2, 4):
        for name in ("unigram_loss", "bits_per_byte"):  # from columns with one number a row
            assert shared[step][name] == pytest.approx(first[step][name], rel=1e-6)
    if case[1] == 2:
        saved = tmp_path / "run" / "checkpoints" / "step-00000002"
        train(small, "cpu", 1, "--resume", saved, "--output_dir", tmp_path / "continued")
        last = curve(tmp_path / "continued")[4]
        assert last["batch_hash"] == first[4]["batch_hash"]
        for name in ("loss", "eval_loss"):
            assert last[name] == pytest.approx(first[4][name], rel=1e-6)


# ---- What is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field, value, said",
    [
        ("rows", "chat", "task.rows is 'chat' but must be text under context parallelism: rows pa"),
        ("packing", "best_fit", "must be stream under context parallelism"),
        ("dropout", 0.1, "task.dropout is 0.1 but must be 0 under context parallelism"),
        ("lora_dropout", 0.1, "task.lora_dropout is 0.1 but must be 0 under context parallelism"),
        ("attn_implementation", "eager", "must be sdpa under context parallelism"),
    ],
)
def test_settings_under_which_rows_cannot_be_shared(field, value, said, tmp_path):
    task = load_task("causal_lm")
    task.check_shared_rows(task.TaskConfig(rows="text"), tmp_path)
    with pytest.raises(ValueError, match=said):
        task.check_shared_rows(task.TaskConfig(**{"rows": "text", field: value}), tmp_path)


@pytest.mark.parametrize("name", ["text_classification", "seq2seq", "image_classification"])
def test_other_tasks_are_refused(name, tmp_path):
    with pytest.raises(ValueError, match="task.py has no function check_shared_rows"):
        startup.check_rows([{}], types.SimpleNamespace(task=None), load_task(name), tmp_path, 4)


def test_compile_and_exact_are_refused():
    off = {"exact": False, "compile": False, "device_shares": "equal"}
    for field in ("exact", "compile"):
        off |= {"gradient_compression": "none", "ddp": DDPConfig()}
        cfg = types.SimpleNamespace(**off | {field: True})
        with pytest.raises(ValueError, match=f"^{field} does not go with .*context paralleli"):
            startup.check_sharing(cfg, SHARED)


def llama(attention="sdpa", **fields):
    """A model of one layer."""
    from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

    kind = MistralConfig if "sliding_window" in fields else LlamaConfig
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = kind(vocab_size=32, intermediate_size=16, num_key_value_heads=2, **sizes, **fields)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def test_models_that_would_be_trained_wrongly_are_refused():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    cases = [
        (llama("eager"), "LlamaForCausalLM computes attention by eager; it needs sdpa"),
        (llama(attention_dropout=0.1), "LlamaForCausalLM has dropout"),
        (torch.nn.Sequential(torch.nn.Dropout(0.1)), "Sequential has dropout"),
        (llama(rope_parameters=rope), "the rotary embedding of LlamaForCausalLM depends"),
    ]
    sharding.check_model_shares_rows(llama(), SHARED)
    for model, said in cases:
        sharding.check_model_shares_rows(model, layout.Layout(2))
        with pytest.raises(ranks.UserError, match=f"^context parallelism: {said}"):
            sharding.check_model_shares_rows(model, SHARED)


def test_accelerate_refuses_sliding_windows():
    """It reads them from the config of the module that train.py prepares."""
    from accelerate.big_modeling import _attach_context_parallel_hooks

    _attach_context_parallel_hooks(weights.TaskModule(llama()))
    with pytest.raises(ValueError, match="does not support attention layers of type"):
        _attach_context_parallel_hooks(weights.TaskModule(llama(sliding_window=4)))
