"""`hardware recommend`: what a model needs, the decision, and the files that it writes."""

import contextlib
import re
import sys
from types import SimpleNamespace

import pytest
import torch
import yaml

from conftest import ROOT, SOURCE, bake
from samestep.checkpoint import weights
from samestep.hardware import recommend, simulate
from samestep.hardware.recommend import Hardware, Sizes, Step, Working
from samestep.hardware.report import Section
from samestep.models import next_token
from samestep.programs import hardware as program

GB = 10**9
DOC = (ROOT / SOURCE / "docs" / "hardware.md").read_text()
# Layers, width, width of the MLP, width of keys, vocabulary, tied embeddings; by their model cards
# the parameters (without biases and norms) and the largest unit.
MODELS = {
    "0.5B": (24, 896, 4864, 128, 151_936, True, 494_005_120 - 43_904, 136_134_656),
    "1B": (16, 2048, 8192, 512, 128_256, True, 1_235_814_400 - 67_584, 262_668_288),
    "7B": (32, 4096, 11008, 4096, 32_000, False, 6_738_415_616 - 266_240, 262_144_000),
    "70B": (80, 8192, 28672, 1024, 128_256, False, 70_553_706_496 - 1_318_912, 2_101_346_304),
}


def llama(layers, width, mlp, keys, vocabulary, tied, heads=0):
    from transformers import AutoModelForCausalLM, LlamaConfig

    heads = heads or width // 64
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys * heads // width,
        tie_word_embeddings=tied,
    )
    return AutoModelForCausalLM.from_config(config)


def sizes_of(name):
    *_, parameters, unit = MODELS[name]
    return Sizes(parameters, parameters, unit, unit)


def activations(name, tokens, checkpointing):
    """Bytes, by the formula of docs/hardware.md."""
    layers, width, mlp, *_ = MODELS[name]
    one = tokens * (30 * width + 8 * mlp)
    return 2 * layers * tokens * width + one if checkpointing else layers * one


def study_of(name, tokens=4096):
    """What samples of so many tokens need, with the logits of 4096 at a time."""
    end = 12 * min(tokens, 4096) * MODELS[name][4]
    return {c: Working(0, activations(name, tokens, c) + end) for c in (False, True)}


# ---- Estimates -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_the_sizes_of_known_models_and_the_tables_of_the_docs(name):
    layers, width, *_, unit = MODELS[name]
    with torch.device("meta"):
        counted = recommend.count_parameters(llama(*MODELS[name][:6]))
    sizes = sizes_of(name)
    assert counted.parameters == sizes.parameters + (2 * layers + 1) * width  # its norms
    assert 0 <= counted.unit - unit <= 2 * width
    end = study_of(name)[True].of(1)
    held = [sizes.whole() + end, *(sizes.sharded(n) + end for n in (2, 8, 32))]
    held += [sizes.gathered() + end, sizes.states]
    numbers = [f"{each / GB:,.0f}" if each >= 100 * GB else f"{each / GB:.1f}" for each in held]
    whole, *parts = numbers
    row = rf"\| {name} \| .*\| {whole} \| [\d.]+ \| {' . '.join(parts)} \|\n"
    assert re.search(row.replace(" . ", r" \| "), DOC), numbers


def test_frozen_weights_have_no_gradients_and_no_moments():
    sizes = Sizes(parameters=1_010, trained=10, unit=100, unit_trained=1)
    assert sizes.whole() == 6 * 1_000 + 18 * 10
    assert sizes.whole("fp32") == 4 * 1_000 + 16 * 10
    assert sizes.whole(checkpointing=True) == 4 * 1_000 + 2 * 99 + 18 * 10
    assert sizes.sharded(10) == (4 * 1_010 + 12 * 10) / 10 + 4 * 100 + 6
    fits = decide(sizes, dict.fromkeys((False, True), Working(0, 0)), gpus(1, 4_400 / 0.92 / GB))
    assert (fits.rung.yaml, fits.checkpointing, fits.need) == ("single_gpu_bf16", True, 4_378)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_simulated_step_holds_what_a_real_one_holds(checkpointing):
    """Rows of 1024 tokens of a small Llama."""

    def held(fake):
        task, ids = SimpleNamespace(loss_sum=next_token.loss_sum), torch.zeros(1, 1024).long()
        with simulate.no_numbers() if fake else contextlib.nullcontext() as mode:
            with simulate.Assumed() if fake else contextlib.nullcontext():
                model = llama(4, 256, 704, 256, 2048, False).train()
                next_token.prepare(model, 1024, 1024, 0)
            if checkpointing:
                weights.enable_gradient_checkpointing(model)
            ids = mode.from_tensor(ids) if fake else ids
            return simulate.bytes_of_step(task, model, {"input_ids": ids, "labels": ids}, "bf16")

    assert held(True) == held(False)
    layer, logits = 1024 * (30 * 256 + 8 * 704), 12 * 1024 * 2048
    if not checkpointing:
        assert held(True) == pytest.approx(4 * layer + logits, rel=0.1)
        return
    # Logits are gone before a layer is computed again: the sum of both is an upper bound.
    inputs = 2 * 4 * 1024 * 256
    assert inputs + max(layer, logits) < held(True) < inputs + layer + logits


# ---- The decision --------------------------------------------------------------------------------


def decide(sizes, study, hardware, samples=1, largest=64, **step):
    for rung in recommend.rungs(sizes, hardware):
        with contextlib.suppress(ValueError):  # its processes cannot divide the step
            choice, fits = recommend.fit(rung, study, hardware, Step(samples, largest, **step))
            if fits:
                return choice
    return None


def gpus(count, card, **options):
    return Hardware("cuda", "H100", count, card * GB, **{"host": 256 * GB, **options})


@pytest.mark.parametrize("name", MODELS)
def test_decisions_agree_with_the_table_of_the_docs(name):
    expected = []
    for card in (24, 80, 141):
        found = "none of these"
        for count in (1, 2, 4, 8, 16, 32, 64):
            hardware = gpus(count, card, host=0)  # no offload
            choice = decide(sizes_of(name), study_of(name), hardware, samples=64, largest=1)
            if choice:
                found = "1 GPU" if count == 1 else f"FSDP2 on {count}"
                found += ", checkpointing" if choice.checkpointing else ""
                break
        expected.append(found)
    assert f"| {name} | {' | '.join(expected)} |" in DOC


CPU = Hardware("cpu", "CPU", 1, 64 * GB, 64 * GB)
T4 = {"card": 16, "bf16": False}
# Model, tokens, hardware: YAML, its precision, checkpointing, micro-batch of a step of 64 samples.
LADDER = [
    ("0.5B", 4096, CPU, ("cpu", "fp32", False, 2)),
    ("0.5B", 64, gpus(8, **T4), ("multi_gpu_fp16", "fp16", False, 8)),
    ("1B", 1024, gpus(8, **T4), ("fsdp2", "fp32", False, 1)),
    ("0.5B", 4096, gpus(1, 80), ("single_gpu_bf16", "bf16", False, 4)),
    ("0.5B", 4096, gpus(1, 24), ("single_gpu_bf16", "bf16", True, 1)),
    ("7B", 4096, gpus(8, 80), ("fsdp2", "bf16", False, 1)),
    ("7B", 4096, gpus(1, 24), ("fsdp2_offload", "bf16", True, 4)),
    ("0.5B", 4096, gpus(8, 80, machines=2), ("multi_node", "bf16", False, 4)),
    ("7B", 4096, gpus(8, 80, machines=2), ("hsdp", "bf16", False, 1)),
    ("70B", 4096, gpus(8, 141, machines=2), ("multi_node_fsdp2", "bf16", True, 2)),
    ("70B", 4096, gpus(8, 80), None),
]


@pytest.mark.parametrize("name, tokens, hardware, expected", LADDER)
def test_the_ladder_and_its_yamls(monkeypatch, name, tokens, hardware, expected):
    choice = decide(sizes_of(name), study_of(name, tokens), hardware, samples=64)
    if not expected:
        assert choice is None
        return
    rung = choice.rung
    found = (rung.yaml, rung.precision, choice.checkpointing, choice.plan.micro_batch_size)
    assert found == expected and choice.plan.samples == 64
    assert choice.need <= 0.92 * hardware.memory and rung.host <= 0.92 * hardware.host
    # Its YAML is that which is shipped, with other numbers.
    monkeypatch.chdir(ROOT / SOURCE)
    shipped = yaml.safe_load((recommend.SHIPPED / f"{rung.yaml}.yaml").read_text())
    values = recommend.hardware_values(rung, hardware)
    assert (values["num_processes"], values["num_machines"]) == (rung.processes, hardware.machines)
    assert values["mixed_precision"].replace("no", "fp32") == rung.precision
    numbers = {"num_processes", "num_machines", "mixed_precision", "main_process_port"}
    changed = {key for key in values if values[key] != shipped.get(key)}
    assert changed <= numbers | {"parallelism_config"}
    if rung.yaml == "hsdp":
        assert [*values["parallelism_config"].values()] == [2, 8]


# GB that a sample needs; GPUs, GB of each; the step: GB on a device, and its micro-batch, or none.
# The model has 10^9 parameters: 18 GB, and 22 where DDP holds the sum of two micro-batches.
STEPS = [
    (1, 2, 20 / 0.92, {"samples": 4}, ("multi_gpu_bf16", 20, 2)),
    (1, 2, 22.9 / 0.92, {"samples": 16}, ("fsdp2", 17, 8)),
    (0, 3, 15, {"samples": 8}, None),  # FSDP's devices share equally
    (1, 2, 24, {"samples": 8, "largest": 4, "exact": True}, ("multi_gpu_bf16", 22, 4)),
]


@pytest.mark.parametrize("sample, count, card, step, expected", STEPS)
def test_the_micro_batches_that_fit(sample, count, card, step, expected):
    sizes, study = Sizes(10**9, 10**9, 10**8, 10**8), {False: Working(0, sample * GB)}
    fits = decide(sizes, study, gpus(count, card), **step)
    assert expected == (fits and (fits.rung.yaml, fits.need / GB, fits.plan.micro_batch_size))


@pytest.mark.parametrize(
    "flags, line",
    [
        (
            "--devices 2.5",
            "--devices: expected a whole number above 0, up to 100,000; got '2.5'",
        ),
        ("--devices=2", "torch sees no GPU on this machine; to plan for others, give --device_mem"),
        ("--device_memory 24", "recommended.yaml is not a file that samestep hardware wrote"),
    ],
)
def test_hardware_that_is_not_there_is_named_before_data_is_prepared(
    flags, line, monkeypatch, tmp_path
):
    own = tmp_path / "configs" / "accelerate" / "recommended.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("mine: 1\n" if "is not a file" in line else "# Written by samestep hardware\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(program, "read_project", lambda *_: pytest.fail("data is prepared"))
    monkeypatch.setattr(sys, "argv", ["samestep hardware", "recommend", *flags.split()])
    with pytest.raises(ValueError, match=re.escape(line)):
        program.prepare()


def test_an_estimate_gives_way_to_the_measurement():
    section, study = Section("recommend"), {False: Working(1, GB), True: Working(2, 0)}
    found = recommend.correct(section, study, need=20 * GB, measured=25 * GB, samples=4)
    assert found == {False: Working(1 + 5 * GB, GB), True: Working(2 + 5 * GB, 0)}
    (text,) = section.facts.values()
    assert text.startswith("20.0 GB and 25.0 GB with micro-batches of 4: 0.80")
    assert [each.value for each in section.figures] == [20, 25]


# ---- The verb ------------------------------------------------------------------------------------


def run(project, *flags, code=0):
    """What it prints; of an error of the user the line."""
    result = project.run("python", "-m", "samestep", "hardware", "recommend", *flags, check=False)
    assert result.returncode == code, result.stderr
    assert code != 2 or result.stderr.count("\n") == 1
    return result.stderr if code == 2 else result.stdout


def written(project):
    names = ("configs/accelerate/recommended.yaml", "configs/train/recommended.yaml")
    return [yaml.safe_load((project.path / name).read_text()) for name in names]


def train_check(project):
    files = ["--config", "configs/train/recommended.yaml"]
    files += ["--config_file", "configs/accelerate/recommended.yaml"]
    return project.run("python", "train.py", "--check", *files).stdout


@pytest.mark.slow
@pytest.mark.parametrize("task", ["causal_lm", "image_classification"])
def test_recommend_on_a_cpu(tmp_path, task):
    project = bake(tmp_path, task=task, tracker="none")
    out = run(project)
    assert "not simulated" not in out and "not measured: that takes a GPU that is here" in out
    assert "So: the CPU, fp32, without gradient checkpointing" in out
    before = written(project)
    assert before[1]["micro_batch_size"] == 32
    assert "checked: runs/recommended starts from the beginning" in train_check(project)

    # Again, from its own recipe, and with a flag.
    run(project, "--config", "configs/train/recommended.yaml")
    assert written(project) == before
    run(project, "--num_epochs", "2", "--task.dropout", "0.1", "--micro_batch_size", "8")
    recipe = written(project)[1]
    assert (recipe["micro_batch_size"], recipe["max_steps"], recipe["num_epochs"]) == (8, 0, 2)
    assert recipe["task"]["dropout"] == 0.1
    train_check(project)

    # GPUs that are not here, and too small for a step at once.
    out = run(project, "--device_memory", "0.02", "--devices", "2", "--machines", "2")
    assert "--config_file configs/accelerate/recommended.yaml --machine_rank R --main_pro" in out
    assert all(name in out for name in ("DDP, bf16", "FSDP2 on 4 GPUs of 2 machines"))
    before = written(project)
    assert (before[0]["num_processes"], before[0]["num_machines"]) == (4, 2)
    out = run(project, "--device_memory", "0.00001", code=1)
    assert "So nothing fits. Plan for more GPUs with --devices, or for larger ones" in out
    assert written(project) == before


@pytest.mark.slow
def test_recommend_reads_only_the_config_of_a_pretrained_model(tmp_path):
    project = bake(tmp_path, task="causal_lm", tracker="none")
    assert "there is no folder runs/no" in run(project, "--task.model_name_or_path=runs/no", code=2)
    smoke = ["--config", "configs/train/smoke.yaml", "--output_dir", "runs/default"]
    project.run("python", "train.py", *smoke)
    for file in (project.path / "runs/default/model").glob("*.safetensors"):
        file.unlink()
    out = run(project, "--config", "configs/train/lora.yaml")
    assert "963,456, of which 61,440 are trained" in out and "not simulated" not in out


@pytest.mark.slow
def test_a_model_that_looks_at_numbers_is_computed(tmp_path):
    project = bake(tmp_path, tracker="none")
    code = (ROOT / "templates" / "examples" / "plain_module.py").read_text()
    line = "return ((model(batch"
    look = f"assert batch['x'].sum() < 1e9\n    {line}"
    (project.path / "task.py").write_text(code.replace(line, look))
    (project.path / "configs/train/default.yaml").write_text("micro_batch_size: 8\n")
    out = run(project)
    assert "not simulated, since" in out and "computed on the CPU with 1 and 2 samples" in out
    assert "193, of which 193 are trained" in out
