"""Every branch for GPUs runs, on a CPU that is taken for a GPU: see pretend_gpu.py."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from conftest import bake, copy_until, edit, lines
from same import check_same, check_same_curve
from test_sharding import launcher_env

PRETEND = Path(__file__).with_name("pretend_gpu.py")


def rehearse(project, hardware, processes, *flags, program="train.py", codes=(0,)):
    """Runs a program with a YAML in so many processes, each with a GPU; what they printed."""
    config = str(project.path / "configs" / "accelerate" / f"{hardware}.yaml")
    env = launcher_env(config, processes, "") | {"ACCELERATE_USE_CPU": "False"}
    given = {"program": [str(PRETEND), *program.split()], "env": env, "timeout": 300}
    return project.train(processes, *flags, codes=codes, **given)


# Of three steps one writes a line; with a rate of 0.01 bf16 may have other norms after six steps.
SMALL = {"log_every": 3, "eval_every": 6, "save_every": 3, "keep_checkpoints": 0}
SMALL["learning_rate"] = 0.002


CLOSE = {"no": (1e-5, 1e-4), "bf16": (1e-2, 0.1), "fp16": (1e-2, 0.1), "fp8": (0.05, 0.5)}
no_torchao = pytest.mark.skipif(not find_spec("torchao"), reason="torchao is not installed")
SLOW_YAMLS = [("multi_gpu_fp16", 2), ("fsdp2_offload", 2), ("tensor_parallel", 2)]
SLOW_YAMLS = [pytest.param(*each, marks=pytest.mark.slow) for each in SLOW_YAMLS]
SLOW_YAMLS += [pytest.param("fp8", 1, marks=[pytest.mark.slow, no_torchao])]


@pytest.mark.parametrize(("hardware", "processes"), [("single_gpu_bf16", 1), *SLOW_YAMLS])
def test_a_yaml_trains_and_continues(small, alone, tmp_path, hardware, processes):
    """The losses of a CPU, and the same bytes after a kill."""
    flags = ["--deterministic", "true"]
    printed = rehearse(small, hardware, processes, *flags, "--output_dir", tmp_path / "whole")
    assert f"{processes} x cuda, " in printed
    yaml = (small.path / "configs" / "accelerate" / f"{hardware}.yaml").read_text()
    (precision,) = re.findall("^mixed_precision: (\\S+)", yaml, re.MULTILINE)
    check_same_curve(tmp_path / "whole", alone, *CLOSE[precision.strip("\"'")])
    half = copy_until(tmp_path / "whole", 3, tmp_path / "half")
    rehearse(small, hardware, processes, *flags, "--output_dir", half)
    check_same(tmp_path / "whole", half)


@pytest.mark.parametrize(
    "yaml, other", [("multi_node", "multi_gpu_bf16"), ("multi_node_fsdp2", "fsdp2")]
)
def test_processes_of_several_machines_are_told_what_those_of_one_are(small, yaml, other):
    """So what a YAML of one machine trains in a rehearsal, that of several does."""
    folder = small.path / "configs" / "accelerate"
    told, as_other = (launcher_env(str(folder / f"{n}.yaml"), 2, "") for n in (yaml, other))
    assert told == as_other and "ACCELERATE_MIXED_PRECISION" in told


# Several options in a run, and how close it is to a CPU.
TOGETHER = "--async_save true --save_every 6 --gradient_checkpointing true --tf32 true "
TOGETHER += "--num_workers 2 --task.loss_chunk 16 --profile_steps [2,3]"
OPTIONS = [
    (TOGETHER, CLOSE["no"]),
    ("--device_shares auto --micro_batch_size 1 --max_steps 12", None),
]


@pytest.mark.slow
@pytest.mark.parametrize("options, close", OPTIONS)
def test_options_train(small, alone, tmp_path, options, close):
    rehearse(small, "multi_gpu", 2, *options.split(), "--output_dir", tmp_path / "run")
    if close:
        check_same_curve(tmp_path / "run", alone, *close)
    else:
        assert lines(tmp_path / "run", "loss")[-1]["step"] == 12


EXACT = ["--exact", "true", "--micro_batch_size", 1, "--task.dropout", 0.1]


@pytest.mark.slow
@pytest.mark.parametrize("case", [("multi_gpu_bf16", 4), ("fsdp2", 2)])
def test_exact_has_the_bytes_of_one_gpu(small, run_once, tmp_path, case):
    one = run_once(rehearse, small, "single_gpu_bf16", 1, *EXACT)
    rehearse(small, *case, *EXACT, "--output_dir", tmp_path)
    check_same(one, tmp_path)


TASKS = ["text_classification", "causal_lm", "image_classification", "seq2seq", "preference"]


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_a_task_trains_and_exports_its_best_model(tmp_path, task):
    project = bake(tmp_path, pictures=False, task=task, tracker="none")
    flags = ["--config", "configs/train/smoke.yaml", "--output_dir", tmp_path / "run"]
    flags += ["--log_every", 2, "--eval_every", 2, "--save_every", 2, "--export", "best"]
    flags += ["--task.validation_fraction", 0.01, "--max_steps", 4]
    printed = rehearse(project, "single_gpu_bf16", 1, *flags)
    assert "the best evaluation was that of step" in printed


VERBS = [("check", "multi_gpu_bf16", 2), ("recommend", "single_gpu_bf16", 1)]
VERBS += [("smoke", "tensor_parallel", 2), ("bench", "multi_gpu_bf16", 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "hardware", "processes"), VERBS)
def test_a_verb_of_hardware_runs(small, verb, hardware, processes):
    flags = ["--config_file", f"configs/accelerate/{hardware}.yaml", "--seconds", 0.01]
    printed = rehearse(small, hardware, processes, *flags, program=f"-m samestep hardware {verb}")
    assert verb != "smoke" or " 0 failed" in printed
    assert "NVIDIA H100" in printed or verb in ("smoke", "bench")


def test_a_mistake_in_the_loop_is_seen(small, tmp_path):
    line = "lambda: model(task.loss_sum, batch)"
    wrong = line.replace("batch)", "{n: v.cpu() for n, v in batch.items()})")
    project = small.copied(tmp_path)
    edit(project.path / "train.py", line, wrong)
    flags = ["--output_dir", tmp_path / "run"]
    printed = rehearse(project, "single_gpu_bf16", 1, *flags, codes=[1, 2])
    assert "same device" in printed
