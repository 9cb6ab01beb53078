"""Models that are sharded over processes train as whole ones do, and exact gives the same bytes."""

import functools
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from conftest import (
    BakedProject,
    bake,
    checkpoint,
    copy_until,
    eval_losses,
    lines,
    read_weights,
    status,
    with_ddp,
)
from same import check_same, check_same_curve, curve
from samestep.launch import launcher
from small_models import new_model
from test_core import script
from test_exact import BATCH_NORM

SMALL = {"micro_batch_size": 1, "learning_rate": 0.002}  # eight micro-batches a step
ON_CPU = Path(__file__).with_name("sharded_on_cpu.py")
OURS = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")


@functools.cache
def launcher_env(config, processes, precision):
    """What accelerate tells the processes about a YAML; precision "": that of the YAML."""
    words = ["--config_file", config, "--num_processes", str(processes)]
    words += ["--mixed_precision", precision] * bool(precision)
    _, env = launcher.read([*words, "train.py"])
    if "ACCELERATE_USE_DEEPSPEED" in env:
        env["ACCELERATE_USE_CPU"] = "False"
    return {name: value for name, value in env.items() if name.startswith(OURS)}


def train(project, hardware, processes, *flags, precision="no", codes=(0,)):
    """Trains with a YAML in so many processes; what they printed.

    cpu and cpu_multi run train.py as it is; other YAMLs shard the model, on the CPU.
    """
    given = {"env": {"ACCELERATE_MIXED_PRECISION": precision}, "timeout": 500, "codes": codes}
    if hardware not in ("cpu", "cpu_multi"):
        config = str(project.path / "configs" / "accelerate" / f"{hardware}.yaml")
        given["env"] = launcher_env(config, processes, precision)
        given["program"] = [str(ON_CPU), "train.py"]
    return project.train(processes, *flags, **given)


def both(project, folder, hardware, *flags, precision="no"):
    """The folders of a run of two processes, and of one of a single process."""
    for name, processes in (("cpu", 1), (hardware, 2)):
        flags_of_run = [*flags, "--output_dir", folder / name]
        train(project, name, processes, *flags_of_run, precision=precision)
    return folder / hardware, folder / "cpu"


# ---- The same numbers ----------------------------------------------------------------------------


LAYOUTS = [("fsdp2", 2)]
LAYOUTS += [
    pytest.param(each, marks=pytest.mark.slow) for each in [("hsdp", 4), ("tensor_parallel", 2)]
]


@pytest.mark.parametrize("case", LAYOUTS)
def test_other_layouts_have_the_losses_of_one_process(small, alone, tmp_path, case):
    """Eight micro-batches a step; evaluation, and an export that was sharded before."""
    drawing = BakedProject(small.path, pictures=True)
    train(drawing, *case, "--output_dir", tmp_path / "run")
    check_same_curve(tmp_path / "run", alone)
    assert (tmp_path / "run" / "curves.png").exists()


WITH_EXACT = {"no": [("fsdp2", 3), ("hsdp_odd", 6)], "bf16": [("fsdp2", 2)]}
# torch's fused kernel for CPUs rounds the last values of a tensor, those that fill no vector, in
# another way: in parts of 11, 11 and 10 of 32 values they are others than in a whole tensor.
NOT_FUSED = """

class AdamW(torch.optim.AdamW):
    def __init__(self, *given, fused, **more):
        super().__init__(*given, fused=False, **more)

torch.optim.AdamW = AdamW
"""


@pytest.mark.slow
@pytest.mark.parametrize("precision", WITH_EXACT)
def test_exact_has_one_digest_for_all_layouts(small, tmp_path, precision):
    """That of one process, also in parts of unequal size and as 2 x 3 copies."""
    config = small.path / "configs" / "accelerate"
    odd = (config / "hsdp.yaml").read_text().replace("dp_shard_size: 2", "dp_shard_size: 3")
    (config / "hsdp_odd.yaml").write_text(odd)
    small, outputs = small.copied(tmp_path, NOT_FUSED), []
    for hardware, processes in [("cpu", 1), *WITH_EXACT[precision]]:
        outputs.append(tmp_path / hardware)
        flags = ["--exact", "true", "--task.dropout", "0.1", "--global_batch_size", "24"]
        flags += ["--max_steps", "2", "--output_dir", outputs[-1]]
        train(small, hardware, processes, *flags, precision=precision)
    check_same(*outputs)


# Traced and differentiated as for inductor, whose C++ compiles for minutes.
GRAPHS = """

compile_module = torch.nn.Module.compile
torch.nn.Module.compile = lambda module: compile_module(module, backend="aot_eager")
"""
CHUNKED = ["--gradient_checkpointing", "true", "--task.packing", "best_fit", "--max_steps", "3"]
CHUNKED += ["--task.loss_chunk", "16", "--micro_batch_size", "4"]
CASES = [
    ("fsdp2", CHUNKED, []),
    ("tensor_parallel", CHUNKED, []),
    ("fsdp2", ["--max_steps", "3", "--max_grad_norm", "0"], ["--compile", "true"]),
]


@pytest.mark.slow
@pytest.mark.parametrize("hardware, flags, own", CASES)
def test_recomputed_chunked_and_compiled_losses_are_those_of_one_process(
    small, run_once, tmp_path, hardware, flags, own
):
    project = small.copied(tmp_path, GRAPHS)
    train(project, hardware, 2, *flags, *own, "--output_dir", tmp_path / "run")
    check_same_curve(tmp_path / "run", run_once(train, small, "cpu", 1, *flags))


# ---- One run on several layouts ------------------------------------------------------------------


CONSTANT = ["--lr_schedule", "constant"]  # the learning rate does not depend on max_steps
STATIONS = {
    "false": [("fsdp2", 2), ("tensor_parallel", 2), ("cpu", 1)],
    "true": [("cpu_multi", 2), ("fsdp2", 4), ("hsdp", 4), ("cpu", 1)],
}


@pytest.mark.slow
@pytest.mark.parametrize("exact", STATIONS)
def test_a_run_moves_between_all_layouts(small, tmp_path, exact):
    """After each two steps. The same samples, and losses to rounding; exact: the same bytes.

    The checkpoint in which a part of the run ends is that of a longer run which was stopped there.
    """
    flags = ["--exact", exact, *CONSTANT, "--eval_every", "2"]
    moved, one = tmp_path / "moved", tmp_path / "one"
    for i, (hardware, processes) in enumerate(STATIONS[exact]):
        steps = ["--max_steps", str(2 * (i + 1)), "--accept_changes", "--output_dir", moved]
        text = train(small, hardware, processes, *flags, *steps)
        assert ("continuing from" in text) == (i > 0)
    steps = ["--max_steps", str(2 * len(STATIONS[exact])), "--output_dir", one]
    train(small, "cpu", 1, *flags, *steps)
    if exact == "true":
        check_same(one, moved)
    else:
        check_same_curve(moved, one, 2e-6, 2e-5)


# ---- What may go wrong ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("exact", ["false", "true"])
def test_a_step_that_is_not_finite_is_skipped_by_all(tiny, tmp_path, exact):
    """The steps that one process skips, which go by none of the weights."""
    flags = ["--task.poisoned", "20", "--exact", exact]
    outputs = both(tiny, tmp_path, "fsdp2", *flags)
    check_same_curve(*outputs)
    first, second = ([line["step"] for line in lines(each, "event")] for each in outputs)
    assert first == second != []


def check_adapters(small, alone, folder, hardware, rtol, atol):
    """LoRA on pretrained weights, in two runs: only the first process loads them, and merges."""
    flags = ["--task.model_name_or_path", alone / "model", "--task.lora_rank", "4", *CONSTANT]
    flags += ["--task.merge_lora", "true", "--accept_changes", "--max_steps"]
    for steps in ("2", "4"):
        outputs = both(small, folder, hardware, *flags, steps)
    check_same_curve(*outputs)
    other, one = (load_file(output / "model" / "model.safetensors") for output in outputs)
    torch.testing.assert_close(other, one, rtol=rtol, atol=atol)


@pytest.mark.slow
def test_adapters_are_merged_after_they_were_sharded(small, alone, tmp_path):
    check_adapters(small, alone, tmp_path, "fsdp2", rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_tied_embeddings_stay_tied(small, alone, tmp_path):
    tied = LlamaForCausalLM.from_pretrained(alone / "model", tie_word_embeddings=True)
    tied.tie_weights()
    folder = shutil.copytree(alone / "model", tmp_path / "tied")
    tied.save_pretrained(folder)
    check_same(
        *both(small, tmp_path, "fsdp2", "--task.model_name_or_path", folder, "--exact", "true")
    )
    saved = load_file(tmp_path / "fsdp2" / "model" / "model.safetensors")
    assert "model.embed_tokens.weight" in saved and "lm_head.weight" not in saved


BUFFERS = """

def build_model(cfg, build=build_model):
    model = build(cfg)
    model.register_buffer("seen", torch.zeros(3))
    model.register_buffer("places", torch.arange(4))
    model.register_buffer("mask", torch.ones(2, dtype=torch.bool), persistent=False)
    return model

def loss_sum(model, batch, compute=loss_sum):
    if model.training:
        model.seen += batch["x"].sum() + 1
    return compute(model, batch) * (1 + 1e-3 * model.seen.mean().sin())
"""


@pytest.mark.slow
def test_buffers_that_training_changes_are_those_of_the_main_process(tiny, tmp_path):
    """So a resumed run has the same bytes. Saved in the background, exported from the best."""
    project, whole, half = tiny.copied(tmp_path, BUFFERS), tmp_path / "whole", tmp_path / "half"
    flags = ["--eval_every", "3", "--save_every", "3", "--async_save", "true", "--export", "best"]
    printed = train(project, "fsdp2", 2, *flags, "--output_dir", whole)
    train(project, "fsdp2", 2, *flags, "--output_dir", copy_until(whole, 6, half))
    check_same(whole, half, exports=False)  # where the best checkpoint is not
    step = eval_losses(whole)[1]
    assert step < 12 and f"the best evaluation was that of step {step}" in printed
    exported = torch.load(whole / "model" / "weights.pt")
    torch.testing.assert_close(exported, read_weights(checkpoint(whole, step)), rtol=0, atol=0)


def test_evaluations_without_broadcast_buffers_have_those_of_the_checkpoint(tiny, tmp_path):
    project, run = tiny.copied(tmp_path, BATCH_NORM), tmp_path / "run"
    project = with_ddp(project, tmp_path / "ddp", "broadcast_buffers=False")
    flags = ["--eval_every", 3, "--output_dir", run]
    assert "deprecated" not in train(project, "cpu_multi", 2, *flags)
    train(project, "cpu", 1, *flags, "--eval_only", "true")
    evaluated = json.loads((run / "evaluation" / "metrics.json").read_text())["eval_loss"]
    assert lines(run, "eval_loss")[-1]["eval_loss"] == pytest.approx(evaluated, rel=1e-6)


REPORT = """

def report(model, sums, output):
    time.sleep(7)
    kinds = {(type(p).__name__, p.requires_grad) for p in model.parameters()}
    return {"reported by": f"{torch.get_num_threads()} threads, {kinds}"}
"""


@pytest.mark.slow
def test_a_report_takes_longer_than_the_timeout_and_all_cores(tiny, tmp_path):
    """Cores only where a whole model may not fit into a GPU. The other process leaves before."""
    project, output = tiny.copied(tmp_path, REPORT), tmp_path / "run"
    text = train(project, "fsdp2", 2, "--timeout", 5, "--max_steps", 2, "--output_dir", output)
    threads = len(os.sched_getaffinity(0))
    assert f"reported by: {threads} threads, {{('Parameter', True)}}\n" in text
    assert status(output)["state"] == "finished"


@pytest.mark.slow
def test_exact_decoders_that_share_the_output_of_an_encoder(tmp_path):
    """Each block uses it twice, as keys and as values: FSDP adds these gradients in the block."""
    project = bake(tmp_path / "baked", pictures=False, task="seq2seq", tracker="none")
    flags = ["--task.hidden_size", "64", "--task.num_layers", "2", "--task.num_heads", "4"]
    flags += ["--global_batch_size", "4", "--micro_batch_size", "1", "--max_steps", "3"]
    flags += ["--warmup_steps", "1", "--eval_every", "0", "--log_every", "1", "--exact", "true"]
    flags += ["--task.validation_fraction", "0.001"]
    check_same(*both(project, tmp_path, "fsdp2", *flags))


FP16 = "comm_hook=__import__('accelerate').DDPCommunicationHookType.FP16"


def test_gradients_are_sent_in_half_the_bytes(small, alone, tmp_path):
    """To the rounding of fp16, which shows."""
    train(with_ddp(small, tmp_path, FP16), "cpu_multi", 2, "--output_dir", tmp_path / "run")
    check_same_curve(tmp_path / "run", alone, rel=1e-3, norm=1e-2)
    assert curve(tmp_path / "run")[6]["grad_norm"] != curve(alone)[6]["grad_norm"]


# ---- Models that transformers shards while it loads them -----------------------------------------

NATIVE = Path(__file__).with_name("own_native.py")
NO_WRAP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "NO_WRAP"}
NO_WRAP |= {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "false"}


def test_a_model_that_transformers_has_sharded_trains_as_a_whole_one(tmp_path):
    new_model("Llama", vocab_size=96).save_pretrained(tmp_path / "model")
    given = (tmp_path / "model", tmp_path / "one", "fsdp_size", 2)
    ends = [script(1, *given, program=(NATIVE,))]
    given = (tmp_path / "model", tmp_path / "two", "fsdp_size", 2)
    ends.append(script(2, *given, program=(ON_CPU, NATIVE), **NO_WRAP))
    numbers = []
    for (code, printed, errors), *_ in ends:
        assert code == 0, errors
        words = [line.split() for line in printed.splitlines()]
        numbers += [[float(word) for each in words if each[0] == "NUMBERS" for word in each[1:]]]
    assert numbers[1] == pytest.approx(numbers[0], rel=1e-5) and len(numbers[0]) == 8
