"""DeepSpeed's ZeRO-2 and ZeRO-3 train as one process does, on the CPU: see sharded_on_cpu.py."""

import pytest
import torch
from accelerate.utils import is_deepspeed_available
from safetensors.torch import load_file

import test_sharding
from conftest import lines, load_task, newest
from same import check_same_curve
from test_sharding import CONSTANT, both, train

SMALL: dict = {}  # four micro-batches a step
WEIGHTS = "model.safetensors"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not is_deepspeed_available(), reason="DeepSpeed is not installed: pip install deepspeed"
    ),
]


@pytest.mark.parametrize("kind", ["deepspeed_zero2", "deepspeed_zero3_offload"])
def test_zero_has_the_losses_of_one_process(small, alone, tmp_path, kind):
    """Two micro-batches on each of two processes; clipping, two evaluations, the fp32 export."""
    train(small, kind, 2, "--output_dir", tmp_path / "run")
    check_same_curve(tmp_path / "run", alone)
    whole, exported = (load_file(each / "model" / WEIGHTS) for each in (alone, tmp_path / "run"))
    torch.testing.assert_close(exported, whole, rtol=1e-3, atol=2e-4)


def test_bf16_under_zero_is_that_of_autocast(small, tmp_path):
    """DeepSpeed would cast the weights, also the exported ones."""
    check_same_curve(
        *both(small, tmp_path, "deepspeed_zero3", precision="bf16"), rel=1e-3, norm=0.05
    )
    weights = load_file(tmp_path / "deepspeed_zero3" / "model" / WEIGHTS)
    assert {values.dtype for values in weights.values()} == {torch.float32}


def test_a_step_that_is_not_finite_is_skipped_by_all(tiny, tmp_path):
    """DeepSpeed skips it by itself: where one process would, and with the same numbers after."""
    flags = ["--task.poisoned", "20"]
    outputs = both(tiny, tmp_path, "deepspeed_zero3", *flags, precision="bf16")
    check_same_curve(*outputs, rel=0.05, norm=0.05)
    first, second = ([line["step"] for line in lines(each, "event")] for each in outputs)
    assert first == second != []


@pytest.mark.parametrize("kind", ["deepspeed_zero2", "deepspeed_zero3"])
def test_a_killed_run_continues_with_new_settings(tiny, tmp_path, kind):
    """The samples and losses are those of one process, which nobody has killed."""
    output, reference = tmp_path / "run", tmp_path / "reference"
    flags = ["--task.samples", "100", *CONSTANT, "--output_dir"]
    train(tiny, "cpu", 1, "--max_steps", "4", *flags, reference)
    # A sample of step 8, which is read while step 7 computes.
    (sample,) = load_task("samestep.step.order").sample_ids([56], 100, 0)
    kill = ["--task.signal_at", str(sample)]
    train(tiny, kind, 2, *kill, "--max_steps", "8", *flags, output, codes=(-9, 1, 75))
    assert [path.name for path in output.glob("checkpoints/step-*")] == ["step-00000004"]
    # Another weight decay takes the place of the saved one.
    decay = ["--weight_decay", "5", "--accept_changes", "--max_steps", "8"]
    train(tiny, "cpu", 1, *decay, *flags, reference)
    assert "continuing from" in train(tiny, kind, 2, *decay, *flags, output)
    check_same_curve(output, reference)


def test_checkpoints_of_other_layouts_are_refused(tiny, tmp_path):
    flags = ["--output_dir", tmp_path / "run", "--max_steps"]
    train(tiny, "deepspeed_zero2", 2, *flags, "4")
    refused = [("deepspeed_zero2", 4, "set num_processes to 2")]
    refused += [("cpu", 1, "is of DeepSpeed with zero_stage 2")]
    for hardware, processes, said in refused:
        more = [*flags, "8", "--accept_changes"]
        assert said in train(tiny, hardware, processes, *more, codes=(2,))


def test_adapters_are_merged_after_they_were_sharded(small, alone, tmp_path):
    """A checkpoint holds none of the frozen weights, and the run resumes from it."""
    kind = "deepspeed_zero3"
    test_sharding.check_adapters(small, alone, tmp_path, kind, rtol=1e-3, atol=2e-4)
    saved = newest(tmp_path / kind)
    size = sum(file.stat().st_size for file in saved.rglob("*model_states.pt"))
    assert size < (alone / "model" / "model.safetensors").stat().st_size
