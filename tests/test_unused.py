"""Weights without a gradient: trained as one process trains them, or refused in one line."""

import pytest
import torch

from conftest import lines, read_weights, with_ddp, write_table
from same import check_same_curve
from test_sharding import train

TASK = """

plain_build_model, plain_loss_sum = build_model, loss_sum


def build_model(cfg, data):
    model = plain_build_model(cfg, data)
    model.extra = torch.nn.Parameter(torch.ones(4, 4))
    return model


def loss_sum(model, batch):
    loss = plain_loss_sum(model, batch)
    return loss + (USE) if model.training else loss
"""
USES = {
    "never": "0",
    "some rows": "(model.extra.square().sum() if int(batch['input_ids'].sum()) % 3 == 0 else 0)",
    "other rows": "(model.extra.square().sum() if int(batch['input_ids'].sum()) % 3 else 0)",
    "nine rows in ten": "(model.extra.sum() if int(batch['input_ids'].sum()) % 10 != 4 else 0)",
}
WORDS = "a weight that no row of this step has used gets no gradient and stays as it was".split()
TASK_OF_SMALL = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "context_length": 32}
SMALL = {"save_every": 2, "task": {**TASK_OF_SMALL, "data": "rows.jsonl"}}


@pytest.fixture(scope="module")
def small(small):
    """Trained on rows of its own, so that the same micro-batches take the branch on any Python."""
    rows = [[WORDS[(i * i + i * n + n * n) % len(WORDS)] for n in range(20)] for i in range(200)]
    write_table(small.path, [{"text": " ".join(row)} for row in rows])
    return small


def extra(output):
    return read_weights(output / "checkpoints" / "step-00000006")["extra"]


CASES = [
    ("some rows", "cpu_multi"),
    pytest.param("never", "fsdp2 exact", marks=pytest.mark.slow),
    pytest.param("some rows", "cpu_multi exact", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("use", "hardware"), CASES)
def test_two_processes_train_it_as_one_does(small, tmp_path, use, hardware):
    """Without a gradient AdamW changes nothing, not by its weight decay either."""
    project = small.copied(tmp_path, TASK.replace("USE", USES[use]))
    hardware, _, exact = hardware.partition(" ")
    flags = ["--exact", "true" if exact else "false", "--find_unused_parameters", "true"]
    flags += ["--output_dir"]
    train(project, "cpu", 1, *flags, tmp_path / "one")
    train(project, hardware, 2, *flags, tmp_path / "two")
    check_same_curve(tmp_path / "two", tmp_path / "one", rel=2e-6, norm=1e-5)
    one, two = extra(tmp_path / "one"), extra(tmp_path / "two")
    assert torch.allclose(one, two, rtol=1e-5)
    assert torch.equal(one, torch.ones(4, 4)) == (use != "some rows")


NAMED = "extra had no gradient, and on several processes DDP waits"
ENDED = ["never", "nine rows in ten", pytest.param("other rows", marks=pytest.mark.slow)]


@pytest.mark.parametrize("use", ENDED)
def test_ddp_ends_before_the_weights_change(small, tmp_path, use):
    """By default: before the first step, if the rows of the probe do not use it."""
    project = small.copied(tmp_path, TASK.replace("USE", USES[use]))
    if use == "other rows":
        project = with_ddp(project, tmp_path / "ddp", "static_graph=True")
    flags = ["--save_every", 1, "--output_dir", tmp_path / "run", "--micro_batch_size", 4]
    printed = train(project, "cpu_multi", 2, *flags, codes=[1, 2])
    assert NAMED in printed, printed
    assert "find_unused_parameters to true" in printed
    assert not (tmp_path / "run" / "model").exists()
    done = [*(tmp_path / "run").glob("checkpoints/step-*")]
    assert bool(done) == (use != "never")


def test_one_process_remarks_it(small, tmp_path):
    project = small.copied(tmp_path, TASK.replace("USE", USES["never"]))
    printed = train(project, "cpu", 1, "--output_dir", tmp_path / "run")
    assert printed.count(NAMED) == 1 and len(lines(tmp_path / "run", "loss")) == 6


def test_fsdp_refuses_a_branch_in_the_first_step(small, tmp_path):
    project = small.copied(tmp_path, TASK.replace("USE", USES["some rows"]))
    printed = train(project, "fsdp2", 2, "--output_dir", tmp_path / "run", codes=[2])
    assert "extra" in printed and not lines(tmp_path / "run", "loss")
    assert not (tmp_path / "run" / "model").exists()
    assert not [*(tmp_path / "run").glob("checkpoints/step-*")]
