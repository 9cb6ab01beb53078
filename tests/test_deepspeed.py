"""DeepSpeed's ZeRO-2 and ZeRO-3 train as one process does, on the CPU: see sharded_on_cpu.py."""

import math

import pytest
import torch
from accelerate.utils import is_deepspeed_available
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

import test_sharding
from conftest import lines, load_task
from test_exact import with_task
from test_sharding import CONSTANT, SPOIL, agree, both, losses, make_small, train

alone = test_sharding.alone  # a fixture: a run of one process

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not is_deepspeed_available(), reason="DeepSpeed is not installed: pip install deepspeed"
    ),
]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Four micro-batches a step."""
    return make_small(tmp_path_factory.mktemp("small"))


def check_exports(output, reference):
    """from_pretrained loads the same fp32 weights, to rounding, that the other run has exported."""
    one, other = (LlamaForCausalLM.from_pretrained(each / "model") for each in (reference, output))
    expected = dict(one.named_parameters())
    for name, values in other.named_parameters():
        assert values.dtype == torch.float32
        torch.testing.assert_close(values, expected[name], rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("kind", ["deepspeed_zero2", "deepspeed_zero3_offload"])
def test_zero_has_the_losses_of_one_process(small, alone, tmp_path, kind):
    """Two micro-batches on each of two processes; clipping, two evaluations, the export."""
    train(small, kind, 2, "--output_dir", tmp_path / "run")
    agree(tmp_path / "run", alone)
    check_exports(tmp_path / "run", alone)


def test_bf16_under_zero_is_that_of_autocast(small, tmp_path):
    """DeepSpeed would cast the weights, also the exported ones."""
    agree(*both(small, tmp_path, "deepspeed_zero3", precision="bf16"), loss=1e-3, norm=0.05)
    weights = load_file(tmp_path / "deepspeed_zero3" / "model" / "model.safetensors")
    assert {values.dtype for values in weights.values()} == {torch.float32}


def test_a_step_that_is_not_finite_is_skipped_by_all(small, tmp_path):
    """The second process has NaN losses in its third step, which changes no weight."""
    kind = "deepspeed_zero3"
    # Under DDP two backward passes try the task before the first step.
    third = '((5, 6) if "ACCELERATE_USE_DEEPSPEED" in os.environ else (7, 8))'
    project, numbers = with_task(small, tmp_path, SPOIL.replace("range(9, 13)", third)), {}
    for hardware in ("cpu_multi", kind):
        output = tmp_path / hardware
        train(project, hardware, 2, "--output_dir", output, precision="bf16")
        events = {line["step"]: line["event"] for line in lines(output, "event")}
        assert events == {3: "skipped"}
        numbers[hardware] = losses(output)
    for step, expected in numbers["cpu_multi"].items():
        if step != 3:
            assert numbers[kind][step] == pytest.approx(expected, rel=0.05), step
            assert math.isfinite(expected[1])


@pytest.mark.parametrize("kind", ["deepspeed_zero2", "deepspeed_zero3"])
def test_a_killed_run_continues_with_new_settings(tiny, tmp_path, kind):
    """The samples and losses are those of one process, which nobody has killed."""
    output, reference = tmp_path / "run", tmp_path / "reference"
    flags = ["--task.samples", "100", *CONSTANT, "--output_dir"]
    train(tiny, "cpu", 1, "--max_steps", "4", *flags, reference)
    # A sample of step 8, which is read while step 7 computes.
    (sample,) = load_task("samestep.core.order").sample_ids([56], 100, 0)
    kill = ["--task.signal_at", str(sample)]
    train(tiny, kind, 2, *kill, "--max_steps", "8", *flags, output, codes=(-9, 1, 75))
    found = sorted(path.name for path in (output / "checkpoints").glob("step-*"))
    assert found == ["step-00000004"]
    # Another weight decay takes the place of the saved one.
    decay = ["--weight_decay", "5", "--accept_changes", "--max_steps", "8"]
    train(tiny, "cpu", 1, *decay, *flags, reference)
    assert "continuing from" in train(tiny, kind, 2, *decay, *flags, output)
    agree(output, reference)


def test_checkpoints_of_other_layouts_are_refused(tiny, tmp_path):
    """Each in one line, before a step is taken."""
    flags = ["--output_dir", tmp_path / "run", "--max_steps"]
    train(tiny, "deepspeed_zero2", 2, *flags, "4")
    for hardware, processes, problem in (
        ("deepspeed_zero2", 4, "set num_processes to 2"),
        ("cpu", 1, "is of DeepSpeed with zero_stage 2"),
    ):
        text = train(tiny, hardware, processes, *flags, "8", "--accept_changes", codes=(2,))
        assert problem in text and "Traceback" not in text


def test_adapters_are_merged_after_they_were_sharded(small, alone, tmp_path):
    """LoRA; a checkpoint holds none of the frozen weights, and the run continues from it."""
    kind = "deepspeed_zero3"
    flags = ["--task.model_name_or_path", alone / "model", "--task.lora_rank", "4", *CONSTANT]
    flags += ["--task.merge_lora", "true", "--accept_changes", "--max_steps"]
    for steps in ("2", "4"):
        outputs = both(small, tmp_path, kind, *flags, steps)
    agree(*outputs)
    other, one = (load_file(output / "model" / "model.safetensors") for output in outputs)
    assert one.keys() == other.keys()
    for name, values in one.items():
        torch.testing.assert_close(other[name], values, rtol=1e-3, atol=2e-4)
    saved = max((tmp_path / kind / "checkpoints").glob("step-*"))
    size = sum(file.stat().st_size for file in saved.rglob("*model_states.pt"))
    assert size < (alone / "model" / "model.safetensors").stat().st_size
