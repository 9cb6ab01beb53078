"""What only a GPU can show: precisions, compiled models, GPUs instead of processes, same bytes."""

import os
import subprocess
import sys

import pytest
import torch

from conftest import GPUS, bake, checkpoint, copy_until, lines, read_weights
from same import check_same, check_same_curve
from samestep.state import checkpoints
from test_stopping import kill_all

# Prints the first number of the compute capability of each GPU that torch can use.
ASK = """
from torch import cuda
for i in range(cuda.device_count()):
    print(cuda.get_device_capability(i)[0])
"""


def ask():
    """What ASK prints, in a process that sees the GPUs: conftest.py hides them from this one."""
    if not (GPUS and torch.version.cuda):
        return []
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": GPUS}
    found = subprocess.check_output([sys.executable, "-c", ASK], env=env, text=True)
    return [int(number) for number in found.split()]


GENERATIONS = ask()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not GENERATIONS, reason="torch sees no NVIDIA GPU"),
]
two_gpus = pytest.mark.skipif(len(GENERATIONS) < 2, reason="fewer than two NVIDIA GPUs")
bf16 = pytest.mark.skipif(min(GENERATIONS, default=8) < 8, reason="a GPU without bf16")
# A language model, which other than the tiny task can recompute its activations.
MODEL = ["--max_steps", 6, "--global_batch_size", 8, "--micro_batch_size", 4, "--log_every", 1]
MODEL += ["--task.num_layers", 2, "--task.hidden_size", 64, "--tracker", "none"]


def train(project, hardware, output, *flags):
    """A run of `accelerate launch` that sees the GPUs; its folder."""
    flags = [*flags, "--output_dir", output]
    run = project.launch("accelerate", hardware, *flags, CUDA_VISIBLE_DEVICES=GPUS)
    try:
        printed = run.communicate(timeout=300)[0]
    except subprocess.TimeoutExpired:
        kill_all(run)  # it would stay on the GPU
        raise
    assert run.returncode == 0, printed
    device = "cpu" if hardware == "cpu" else "cuda"
    assert f" x {device}, " in printed or "is finished" in printed
    return output


@pytest.fixture(scope="module")
def one(tiny, tmp_path_factory):
    """A run of one GPU in fp32."""
    return train(tiny, "single_gpu", tmp_path_factory.mktemp("gpu") / "run")


def check_continues(project, hardware, folder, *flags):
    """A run that goes on from step 4 ends as one that was not broken; the folders of both."""
    whole = train(project, hardware, folder / "whole", *flags)
    half = train(project, hardware, copy_until(whole, 4, folder / "half"), *flags)
    check_same(whole, half)
    return whole, half


WAYS = [
    pytest.param("cpu", 1e-4),
    pytest.param("single_gpu --compile true", 1e-4),
    pytest.param("multi_gpu_bf16", 0.02, marks=[two_gpus, bf16]),
]


@pytest.mark.parametrize("way, rel", WAYS)
def test_other_hardware_trains_what_a_gpu_in_fp32_trains(tiny, one, tmp_path, way, rel):
    hardware, *flags = way.split()
    check_same_curve(one, train(tiny, hardware, tmp_path / "run", *flags), rel=rel, norm=100)


@two_gpus
@pytest.mark.parametrize("precision", ["", pytest.param("_bf16", marks=bf16)])
def test_exact_has_the_same_bytes_on_one_gpu_and_on_two(project, tmp_path, precision):
    """With dropout, in unequal shares, and continued by one."""
    flags = [*MODEL, "--exact", "true", "--micro_batch_size", 1, "--task.dropout", 0.1]
    flags += ["--save_every", 3, "--keep_checkpoints", 0, "--eval_every", 3]
    one = train(project, f"single_gpu{precision}", tmp_path / "one", *flags)
    shares = ["--device_shares", "[7, 1]"]
    two = train(project, f"multi_gpu{precision}", tmp_path / "two", *flags, *shares)
    half = copy_until(two, 3, tmp_path / "half")
    train(project, f"single_gpu{precision}", half, *flags)
    check_same(one, two, half)


@two_gpus
@pytest.mark.parametrize("precision", ["no", pytest.param("bf16", marks=bf16)])
def test_two_gpus_that_share_rows_train_what_one_trains(project, tmp_path, precision):
    """Context parallelism through torch's memory-efficient kernel, and through FlashAttention."""
    config = project.path / "configs" / "accelerate"
    text = (config / "context_parallel.yaml").read_text()
    assert "mixed_precision: bf16" in text
    text = text.replace("mixed_precision: bf16", f'mixed_precision: "{precision}"')
    (config / "shared_rows.yaml").write_text(text)
    flags, single = [*MODEL, "--task.context_length", 256], {"no": "", "bf16": "_bf16"}[precision]
    one = train(project, f"single_gpu{single}", tmp_path / "one", *flags)
    two = train(project, "shared_rows", tmp_path / "two", *flags)
    check_same_curve(one, two, rel={"no": 1e-4, "bf16": 1e-2}[precision], norm=100)


def test_fp16_keeps_its_scaler_and_continues_bit_by_bit(tiny, tmp_path):
    whole, half = check_continues(tiny, "single_gpu_fp16", tmp_path, "--deterministic", "true")
    early, mine, theirs = [
        checkpoints.read_manifest(folder)["others"]["scaler"]
        for folder in (checkpoint(whole, 4), checkpoint(whole, 12), checkpoint(half, 12))
    ]
    assert early != mine == theirs  # it counts steps, so it would show where it is not restored


@pytest.mark.parametrize("hardware", ["single_gpu", "single_gpu_fp16"])
def test_a_step_with_nan_changes_nothing_on_the_device(tiny, tmp_path, hardware):
    """The optimizer's kernel reads found_inf there; in fp16 the scaler has its own say."""
    flags = ["--save_every", 1, "--task.poisoned", 20, "--task.poison", "nan"]
    output = train(tiny, hardware, tmp_path / "run", *flags)
    skipped = {line["step"] for line in lines(output, "event") if line["event"] == "skipped"}
    assert skipped
    for line in lines(output, "loss"):
        step = line["step"]
        assert (line["loss"] is None) == (step in skipped)
        if step > 1:
            before, after = [read_weights(checkpoint(output, each)) for each in (step - 1, step)]
            same = all(torch.equal(before[name], after[name]) for name in before)
            # fp16 also skips steps whose gradients are too large for its scale, without a word.
            assert same == (step in skipped) or (same and hardware == "single_gpu_fp16")
            assert all(tensor.isfinite().all() for tensor in after.values())


@bf16
def test_packed_rows_have_the_losses_of_a_cpu(tmp_path):
    project = bake(tmp_path, task="causal_lm", tracker="none")
    flags = ["--config", "configs/train/smoke.yaml", "--max_steps", 8, "--eval_every", 0]
    flags += ["--task.data", "docstrings", "--task.rows", "prompt", "--task.context_length", 256]
    flags += ["--log_every", 1]
    cpu, gpu = (["--output_dir", tmp_path / name] for name in ("cpu", "gpu"))
    env = {"CUDA_VISIBLE_DEVICES": GPUS, "ACCELERATE_MIXED_PRECISION": "bf16"}
    project.run("python", "train.py", *flags, *gpu, **env)
    project.run("python", "train.py", *flags, *cpu, ACCELERATE_USE_CPU="true")
    check_same_curve(tmp_path / "cpu", tmp_path / "gpu", rel=0.02, norm=100)


@bf16
@pytest.mark.parametrize("task", ["causal_lm", "seq2seq"])
def test_attention_in_bf16_continues_bit_by_bit(tmp_path, task):
    """The kernels of FlashAttention, of masks, and of the loss in chunks are deterministic."""
    project = bake(tmp_path, task=task, tracker="none")
    flags = ["--config", "configs/train/smoke.yaml", "--max_steps", 8, "--save_every", 4]
    flags += ["--deterministic", "true", "--keep_checkpoints", 0]
    if task == "causal_lm":
        flags += ["--task.data", "docstrings", "--task.rows", "prompt"]
    check_continues(project, "single_gpu_bf16", tmp_path, *flags)
