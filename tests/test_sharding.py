"""Models that are sharded over processes train as whole ones do, and exact gives the same bytes."""

import functools
import hashlib
import json
import os
from pathlib import Path

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from safetensors import safe_open

from conftest import bake, latest, lines, preloaded

ON_CPU = Path(__file__).with_name("sharded_on_cpu.py")
TIMES = ("data_wait", "save_seconds")
OURS = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")


@functools.cache
def launcher_env(config, processes, precision):
    """What accelerate's launcher tells the processes about a YAML."""
    numbers = ["--num_processes", str(processes), "--mixed_precision", precision]
    before = dict(os.environ)
    try:
        arguments = ["--config_file", config, *numbers, "train.py"]
        arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(arguments))
        env = prepare_multi_gpu_env(arguments)
    finally:
        os.environ.clear()
        os.environ.update(before)
    return {name: value for name, value in env.items() if name.startswith(OURS)}


def train(project, hardware, processes, *flags, precision="no", codes=(0,), timeout=240):
    """Trains with a YAML in so many processes; what they printed.

    cpu and cpu_multi run train.py as it is; other YAMLs shard the model, on the CPU.
    """
    if hardware in ("cpu", "cpu_multi"):
        env = {"ACCELERATE_MIXED_PRECISION": precision}
        program = ["train.py"]
    else:
        config = str(project.path / "configs" / "accelerate" / f"{hardware}.yaml")
        env, program = launcher_env(config, processes, precision), [str(ON_CPU), "train.py"]
    envs = [{**each, **env} for each in project.envs(processes)]
    ended = preloaded(project.path, envs, [*program, *latest(flags)], timeout)
    return project.ended((hardware, *flags), codes, *zip(*ended, strict=True))


def curve(output):
    """The numbers of metrics.jsonl: {step: {name: number}}, of each step the last."""
    found = {}
    for line in lines(output, "step"):
        kept = {k: v for k, v in line.items() if k not in TIMES and not k.endswith("_per_second")}
        found.setdefault(line["step"], {}).update(kept)
    return found


def agree(output, reference, loss=1e-6, norm=1e-5):
    """Checks that two runs took the same samples, with the same losses to rounding."""
    one, other = curve(reference), curve(output)
    assert one.keys() == other.keys()
    for step, line in one.items():
        assert line["batch_hash"] == other[step]["batch_hash"]
        for name, number in line.items():
            if name in ("loss", "eval_loss", "grad_norm"):
                limit = norm if name == "grad_norm" else loss
                assert other[step][name] == pytest.approx(number, rel=limit), (step, name)


def model_digest(output):
    """SHA-256 of the exported weights."""
    return hashlib.sha256((output / "model" / "model.safetensors").read_bytes()).hexdigest()


def check_same(*outputs):
    """All runs ended with the same bytes, after the same losses and norms."""
    first, *others = ((model_digest(output), json.dumps(curve(output))) for output in outputs)
    for output, other in zip(outputs[1:], others, strict=True):
        assert other == first, output


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A project with a small language model: two layers, eight micro-batches a step."""
    baked = bake(tmp_path_factory.mktemp("sharding"), tracker="none")
    (baked.path / "configs" / "train" / "default.yaml").write_text(
        "max_steps: 6\nglobal_batch_size: 8\nmicro_batch_size: 1\nwarmup_steps: 1\n"
        "eval_every: 3\nsave_every: 0\nlog_every: 1\nlearning_rate: 0.01\n"
        "task:\n  hidden_size: 32\n  num_layers: 2\n  num_heads: 4\n  context_length: 32\n"
    )
    return baked


@pytest.fixture(scope="module")
def alone(small, tmp_path_factory):
    """A run of one process."""
    output = tmp_path_factory.mktemp("alone") / "run"
    train(small, "cpu", 1, "--output_dir", output)
    return output


# ---- The same numbers ----------------------------------------------------------------------------


def test_fsdp2_has_the_losses_of_one_process(small, alone, tmp_path):
    """Four rounds of two micro-batches; evaluation, and an export that was sharded before."""
    train(small, "fsdp2", 2, "--output_dir", tmp_path / "run")
    agree(tmp_path / "run", alone)
    assert (tmp_path / "run" / "curves.png").exists()


def test_exact_fsdp2_has_the_bytes_of_one_process(small, tmp_path):
    """Ordinary runs differ in their last digits, so another order of sums would show."""
    cases = [("cpu", 1), ("fsdp2", 2)]
    outputs = [tmp_path / hardware for hardware, _ in cases]
    for (hardware, processes), output in zip(cases, outputs, strict=True):
        flags = ["--exact", "true", "--task.dropout", "0.1", "--output_dir", output]
        train(small, hardware, processes, *flags)
    check_same(*outputs)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_exact_has_one_digest_for_all_layouts(small, tmp_path, precision):
    """FSDP2 on two and four processes, HSDP as 2 x 2 and 4 x 2 copies, DDP, one process."""
    config = small.path / "configs" / "accelerate"
    wide = (config / "hsdp.yaml").read_text().replace("replicate_size: 2", "replicate_size: 4")
    (config / "hsdp_wide.yaml").write_text(wide)
    cases = [("cpu", 1), ("cpu_multi", 3), ("fsdp2", 2), ("fsdp2", 4), ("hsdp", 4)]
    cases += [("hsdp_wide", 8)]
    outputs = [tmp_path / f"{hardware}{processes}" for hardware, processes in cases]
    for (hardware, processes), output in zip(cases, outputs, strict=True):
        flags = ["--exact", "true", "--task.dropout", "0.1", "--output_dir", output]
        train(small, hardware, processes, *flags, precision=precision)
    check_same(*outputs)


VARIANTS = {
    "recomputed": ["--gradient_checkpointing", "true"],
    "packed": ["--task.packing", "best_fit"],
    "chunked": ["--task.loss_chunk", "16"],
    "larger": ["--micro_batch_size", "4"],
    "compiled": ["--compile", "true"],
    "unclipped": ["--max_grad_norm", "0"],
}


@pytest.mark.slow
@pytest.mark.parametrize("hardware", ["fsdp2", "tensor_parallel"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_have_the_losses_of_one_process(small, tmp_path, hardware, variant):
    flags = ["--max_steps", "3", *VARIANTS[variant], "--output_dir"]
    one, other = tmp_path / "one", tmp_path / "other"
    train(small, "cpu", 1, *flags, one)
    if (hardware, variant) == ("tensor_parallel", "compiled"):
        text = train(small, hardware, 2, *flags, other, codes=(2,))
        assert "compile" in text
        return
    train(small, hardware, 2, *flags, other)
    agree(other, one)


@pytest.mark.slow
@pytest.mark.parametrize("case", [("fsdp2", 4), ("hsdp", 4), ("tensor_parallel", 2)])
def test_other_layouts_have_the_losses_of_one_process(small, alone, tmp_path, case):
    train(small, *case, "--output_dir", tmp_path / "run")
    agree(tmp_path / "run", alone)


@pytest.mark.slow
def test_bf16_under_fsdp2_is_that_of_autocast(small, tmp_path):
    """Weights, moments and sums of gradients are fp32: the difference to DDP is that of bf16."""
    for hardware, processes in (("cpu", 1), ("fsdp2", 2)):
        train(small, hardware, processes, "--output_dir", tmp_path / hardware, precision="bf16")
    agree(tmp_path / "fsdp2", tmp_path / "cpu", loss=1e-3, norm=0.05)
    saved = max((tmp_path / "fsdp2" / "checkpoints").glob("step-*"))
    for file in saved.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"F32"}
