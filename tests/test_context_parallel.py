"""Processes that share rows train as one process does. What the kernels of CUDA do is not shown."""

import pytest

from conftest import bake
from test_sharding import agree, train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A project with a small language model, and a YAML for two replicas of two processes."""
    baked = bake(tmp_path_factory.mktemp("context"), tracker="none")
    (baked.path / "configs" / "train" / "default.yaml").write_text(
        "max_steps: 4\nglobal_batch_size: 8\nmicro_batch_size: 2\nwarmup_steps: 1\n"
        "eval_every: 2\nsave_every: 0\nlog_every: 1\nlearning_rate: 0.01\n"
        "task:\n  hidden_size: 32\n  num_layers: 2\n  num_heads: 4\n  context_length: 32\n"
    )
    config = baked.path / "configs" / "accelerate"
    text = (config / "context_parallel.yaml").read_text()
    two, four = "parallelism_config_dp_shard_size: 1", "parallelism_config_dp_shard_size: 2"
    assert two in text
    (config / "context_parallel_2x2.yaml").write_text(text.replace(two, four))
    return baked


@pytest.fixture(scope="module")
def alone(small, tmp_path_factory):
    """A run of one process."""
    output = tmp_path_factory.mktemp("alone") / "run"
    train(small, "cpu", 1, "--output_dir", output)
    return output


@pytest.mark.parametrize("case", [("context_parallel", 2), ("context_parallel_2x2", 4)])
def test_losses_norms_and_evaluations_are_those_of_one_process(small, alone, tmp_path, case):
    """Micro-batches of two rows, so that a replica has two or four of them in a step."""
    train(small, *case, "--output_dir", tmp_path / "run")
    agree(tmp_path / "run", alone, loss=1e-6, norm=1e-6)


