"""Processes that share rows train as one process does. What the kernels of CUDA do is not shown."""

import pytest

from conftest import load_task
from same import check_same_curve, curve
from samestep.processes import mesh as layout
from samestep.processes import ranks
from samestep.step import context_parallel
from small_models import new_model
from test_sharding import train

SHARED = layout.layout_of(2, 1, ("FSDP", "PARALLELISM_CONFIG"), {"cp": 2})


SMALL = {"max_steps": 4, "eval_every": 2, "save_every": 2, "learning_rate": 0.001}


@pytest.fixture(scope="module")
def small(small):
    """With a YAML for two replicas of two processes."""
    config = small.path / "configs" / "accelerate"
    text = (config / "context_parallel.yaml").read_text()
    two, four = "parallelism_config_dp_shard_size: 1", "parallelism_config_dp_shard_size: 2"
    assert two in text
    (config / "context_parallel_2x2.yaml").write_text(text.replace(two, four))
    return small


@pytest.mark.slow
def test_losses_norms_and_evaluations_are_those_of_one_process(small, alone, tmp_path):
    """Two replicas of two processes, with two micro-batches each. One process continues the run."""
    flags = ["--gradient_checkpointing=true", "--output_dir", tmp_path / "run"]
    train(small, "context_parallel_2x2", 4, *flags)
    check_same_curve(tmp_path / "run", alone, norm=1e-6)
    first, shared = (curve(output) for output in (alone, tmp_path / "run"))
    for name in ("unigram_loss", "bits_per_byte"):  # from columns with one number a row
        assert shared[4][name] == pytest.approx(first[4][name], rel=1e-6)
    saved = tmp_path / "run" / "checkpoints" / "step-00000002"
    train(small, "cpu", 1, "--resume", saved, "--output_dir", tmp_path / "continued")
    last = curve(tmp_path / "continued")[4]
    assert last["batch_hash"] == first[4]["batch_hash"]
    for name in ("loss", "eval_loss"):
        assert last[name] == pytest.approx(first[4][name], rel=1e-6)


SHIFTS_PARTS = """

from samestep.models import next_token


def loss_sum(model, batch):
    labels = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    logits = model(input_ids=batch["input_ids"], position_ids=batch.get("position_ids")).logits
    return next_token.cross_entropy(logits.flatten(0, 1), labels.flatten())
"""


@pytest.mark.slow
def test_a_loss_that_is_no_sum_over_the_parts_of_a_sequence_is_refused(small, tmp_path):
    """It shifts the labels of each part by itself."""
    project, flags = small.copied(tmp_path, SHIFTS_PARTS), ["--output_dir", tmp_path / "run"]
    printed = train(project, "context_parallel", 2, *flags, codes=(2,))
    assert "train.py: context parallelism: task.loss_sum is " in printed, printed
    assert "for a sequence, and" in printed


# ---- What is refused -----------------------------------------------------------------------------


def test_models_that_would_be_trained_wrongly_are_refused():
    task = load_task("causal_lm")
    for field, value in (("rows", "chat"), ("dropout", 0.1)):
        with pytest.raises(ValueError, match=f"task.{field} is {value!r} but must be .* under con"):
            task.check_context_parallel(task.TaskConfig(**{"rows": "text", field: value}))

    def llama(attention="sdpa", **fields):
        return new_model("Llama", vocab_size=32, **fields, attn_implementation=attention)

    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    mixture = llama()
    mixture.config.output_router_logits = True
    context_parallel.check_model_shares_rows(llama(), SHARED)
    for model, said in (
        (llama("eager"), "LlamaForCausalLM computes attention by eager; it needs sdpa"),
        (llama(attention_dropout=0.1), "LlamaForCausalLM has dropout"),
        (llama(rope_parameters=rope), "the rotary embedding of LlamaForCausalLM depends"),
        (mixture, "the router's loss of LlamaForCausalLM .* needs whole rows; use fsdp2"),
    ):
        context_parallel.check_model_shares_rows(model, layout.Layout(2))
        with pytest.raises(ranks.UserError, match=f"^context parallelism: {said}"):
            context_parallel.check_model_shares_rows(model, SHARED)
