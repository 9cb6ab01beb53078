"""Models that are sharded over processes train as whole ones do, and exact gives the same bytes."""

import functools
import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from conftest import BakedProject, bake, latest, lines, preloaded

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
