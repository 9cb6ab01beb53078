"""`hardware recommend`: what a model needs, the decision, and the files that it writes."""

import contextlib
import dataclasses
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import yaml

from conftest import ROOT, SOURCE, bake, load_task
from samestep.checkpoint import weights
from samestep.hardware import ladder, memory, simulate
from samestep.hardware import recommend as verb
from samestep.models import next_token

GB = 10**9
CARDS = (24, 80, 141)
INF = float("inf")


def llama(layers, width, mlp, keys, vocabulary, tied, **options):
    from transformers import AutoModelForCausalLM, LlamaConfig

    heads = options.pop("heads", width // 64)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys * heads // width,
        tie_word_embeddings=tied,
        **options,
    )
    return AutoModelForCausalLM.from_config(config)


# ---- Estimates -----------------------------------------------------------------------------------

# Parameters; the largest unit; bytes whole in bf16 and fp32, and sharded over 8 GPUs in bf16. All
# by hand: 7B and 70B are as their model cards say, 0.5B lacks the biases of Qwen.
KNOWN = {
    "0.5B": (494_005_120, 136_135_552, 8_892_092_160, 7_904_081_920, 2_349_365_760),
    "7B": (6_738_415_616, 262_148_096, 121_291_481_088, 107_814_649_856, 16_098_312_192),
    "70B": (70_553_706_496, 2_101_354_496, 1_269_966_716_928, 1_128_859_303_936, 162_120_957_952),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_models_need_what_was_computed_by_hand(name):
    shape = memory.MODELS[name]
    with torch.device("meta"):
        sizes = simulate.count_parameters(llama(*dataclasses.astuple(shape)))
    parameters, unit, bf16, fp32, parts = KNOWN[name]
    assert dataclasses.astuple(sizes) == (parameters, parameters, unit, unit)
    assert (memory.whole(sizes), memory.whole(sizes, "fp32")) == (bf16, fp32)
    assert memory.sharded(sizes, 8) == parts


def test_frozen_weights_have_no_gradients_and_no_moments():
    sizes = memory.Sizes(parameters=1_010, trained=10, unit=100, unit_trained=1)
    assert memory.whole(sizes) == 6 * 1_000 + 18 * 10
    assert memory.whole(sizes, checkpointing=True) == 4 * 1_000 + 2 * 99 + 18 * 10
    working = {c: ladder.Working(0, 0, c) for c in (False, True)}
    fits = decide(sizes, working, gpus(1, 4_400 / 0.92 / GB), samples=1)
    assert (fits.rung.yaml, fits.checkpointing, fits.need) == ("single_gpu_bf16", True, 4_378)
    assert memory.sharded(sizes, 10) == (4 * 1_010 + 12 * 10) / 10 + 4 * 100 + 6
    assert memory.zero2(sizes, 2) == 6 * 1_010 + 8 * 10


def step_of(fake, checkpointing, precision="bf16", **options):
    """(bytes, FLOPs) of a step of a small Llama with rows of 1024 tokens, simulated or real."""
    shape = {"layers": 4, "width": 256, "mlp": 704, "keys": 256, "vocabulary": 2048, "tied": False}
    ids = torch.zeros(1, 1024, dtype=torch.long)
    project = SimpleNamespace(task=SimpleNamespace(loss_sum=next_token.loss_sum))
    with simulate.no_numbers() if fake else contextlib.nullcontext() as mode:
        with simulate.Assumed() if fake else contextlib.nullcontext():
            model = llama(**shape, **options).train()
            next_token.prepare(model, 1024, 1024, 0)
        assert model.loss_plan.is_split
        if checkpointing:
            weights.enable_gradient_checkpointing(model)
        ids = mode.from_tensor(ids) if fake else ids
        found = simulate.run_step(project, model, {"input_ids": ids, "labels": ids}, precision)
    return found, memory.Model(**shape)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_simulated_step_holds_what_a_real_one_holds(checkpointing):
    (found, flops), shape = step_of(True, checkpointing)
    assert (found, flops) == step_of(False, checkpointing)[0]
    logits = memory.logits(shape, 1024, 1024)
    states = memory.activations(shape, 1024, checkpointing)
    if not checkpointing:
        assert found == pytest.approx(states + logits, rel=0.1)
        matrices = shape.parameters - shape.vocabulary * shape.width
        attention = 3.5 * 4 * 1024**2 * 256 * 4  # forward 1, backward 2.5
        assert flops == pytest.approx(6 * matrices * 1024 + attention, rel=1e-6)
        return
    # Logits are gone before a layer is computed again: the sum of both is an upper bound.
    layer = memory.layer_activations(shape, 1024)
    assert states - layer + max(layer, logits) < found < states + logits


def test_the_bytes_are_those_that_autograd_saves():
    shape = {"layers": 3, "width": 128, "mlp": 352, "keys": 128, "vocabulary": 256, "tied": False}
    model, saved = llama(**shape, heads=2).train(), {}

    def keep(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def loss_sum(model, batch):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            return next_token.loss_sum(model, batch)

    ids = torch.zeros(4, 256, dtype=torch.long)
    project = SimpleNamespace(task=SimpleNamespace(loss_sum=loss_sum))
    found, _ = simulate.run_step(project, model, {"input_ids": ids, "labels": ids}, "fp32")
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    total = sum(size for place, size in saved.items() if place not in own)
    passing = 2 * 4 * 1024 * 256  # gradients of the log-softmax and of the logits
    assert found == pytest.approx(total + passing, rel=0.001)


# ---- The decision --------------------------------------------------------------------------------

# Of docs/hardware.md: the smallest number of GPUs, for a row of 4096 tokens.
SMALLEST = {
    "0.5B": ("1 GPU, checkpointing", "1 GPU", "1 GPU"),
    "1B": ("FSDP2 on 2, checkpointing", "1 GPU", "1 GPU"),
    "7B": ("FSDP2 on 8, checkpointing", "FSDP2 on 2, checkpointing", "1 GPU, checkpointing"),
    "70B": ("none of these", "FSDP2 on 32, checkpointing", "FSDP2 on 16, checkpointing"),
}


def working_of(shape, tokens=4096):
    """Of samples of so many tokens."""
    end = memory.logits(shape, tokens, 4096)
    both = (False, True)
    return {c: ladder.Working(0, memory.activations(shape, tokens, c) + end) for c in both}


def decide(sizes, working, hardware, **step):
    step = {"samples": 64, "largest": 64, **step}
    return ladder.choose(ladder.rungs(sizes, hardware), working, hardware, ladder.Step(**step))


def gpus(count, card, **options):
    return ladder.Hardware("cuda", "H100", count, card * GB, host=256 * GB, **options)


@pytest.mark.parametrize("name", SMALLEST)
def test_decisions_agree_with_the_table_of_the_docs(name):
    shape, expected = memory.MODELS[name], []
    for card in CARDS:
        found = "none of these"
        for count in (1, *memory.COUNTS):
            hardware = dataclasses.replace(gpus(count, card), host=0)  # no offload
            choice = decide(shape.sizes, working_of(shape), hardware, largest=1)
            if choice:
                found = "1 GPU" if count == 1 else f"FSDP2 on {count}"
                found += ", checkpointing" * choice.checkpointing
                assert choice.need <= 0.92 * card * GB
                break
        expected.append(found)
    assert tuple(expected) == SMALLEST[name]
    row = f"| {name} | {' | '.join(expected)} |"
    assert row in (ROOT / SOURCE / "docs" / "hardware.md").read_text()


CPU = ladder.Hardware("cpu", "CPU", 1, 64 * GB, 64 * GB)
MAC = ladder.Hardware("mps", "Apple GPU", 1, 48 * GB, 64 * GB)
T4 = {"card": 16, "bf16": False}
# Model, hardware: YAML, its precision, checkpointing, micro-batch of a step of 64 samples.
LADDER = {
    "CPU": ("0.5B", CPU, ("cpu", "fp32", False, 2)),
    "a Mac": ("0.5B", MAC, ("mps", "fp32", False, 2)),
    "one T4": ("tiny", gpus(1, **T4), ("single_gpu_fp16", "fp16", False, 64)),
    "eight T4": ("tiny", gpus(8, **T4), ("multi_gpu_fp16", "fp16", False, 8)),
    "T4 in parts": ("1B", gpus(8, **T4), ("fsdp2", "fp32", False, 1)),
    "one GPU": ("0.5B", gpus(1, 80), ("single_gpu_bf16", "bf16", False, 4)),
    "one small GPU": ("0.5B", gpus(1, 24), ("single_gpu_bf16", "bf16", True, 1)),
    "eight GPUs": ("0.5B", gpus(8, 80), ("multi_gpu_bf16", "bf16", False, 4)),
    "eight GPUs in parts": ("7B", gpus(8, 80), ("fsdp2", "bf16", False, 1)),
    "host": ("7B", gpus(1, 24), ("fsdp2_offload", "bf16", True, 4)),
    "two machines": ("0.5B", gpus(8, 80, machines=2), ("multi_node", "bf16", False, 4)),
    "copies": ("7B", gpus(8, 80, machines=2), ("hsdp", "bf16", False, 1)),
    "parts": ("70B", gpus(8, 141, machines=2), ("multi_node_fsdp2", "bf16", True, 2)),
    "nothing": ("70B", gpus(8, 80), None),
}
TINY = memory.Model(2, 64, 256, 64, 1024, True)


@pytest.mark.parametrize("case", LADDER)
def test_the_ladder(case):
    name, hardware, expected = LADDER[case]
    shape = memory.MODELS.get(name, TINY)
    working = working_of(shape, 4096 if hardware.bf16 else 1024)
    choice = decide(shape.sizes, working, hardware)
    if not expected:
        assert choice is None
        return
    found = (choice.rung.yaml, choice.rung.precision, choice.checkpointing)
    assert (*found, choice.plan.micro_batch_size) == expected
    assert choice.need <= 0.92 * hardware.memory and choice.rung.host <= 0.92 * hardware.host
    assert choice.plan.samples == 64


def test_two_micro_batches_under_ddp_need_room_for_their_sum():
    sizes = memory.Sizes(10**9, 10**9, 10**8, 10**8)
    working = {False: ladder.Working(0, GB)}
    fits = decide(sizes, working, gpus(2, 20 / 0.92), samples=4)  # 18 GB, and 2 samples
    assert (fits.need, fits.plan.micro_batch_size) == (20 * GB, 2)
    fits = decide(sizes, working, gpus(2, 23.1 / 0.92), samples=16)  # 22 GB, and 1 sample
    assert (fits.need, fits.plan.micro_batch_size) == (23 * GB, 1)
    fits = decide(sizes, working, gpus(2, 22.9 / 0.92), samples=16)
    assert fits.rung.yaml == "fsdp2"


def test_a_step_that_devices_cannot_divide():
    sizes, working = memory.Sizes(10**9, 10**9, 10**8, 10**8), {False: ladder.Working(0, 0)}
    assert ladder.busy(gpus(8, 80), 4).devices == 4
    assert ladder.busy(gpus(8, 80, machines=2), 4).devices == 2
    assert decide(sizes, working, gpus(3, 80), samples=8).rung.yaml == "multi_gpu_bf16"
    assert decide(sizes, working, gpus(3, 15), samples=8) is None  # FSDP's share equally
    exact = {"samples": 8, "largest": 4, "exact": True}
    assert decide(sizes, {False: ladder.Working(0, GB)}, gpus(2, 24), **exact).need == 22 * GB
    assert decide(sizes, {False: ladder.Working(0, 2 * GB)}, gpus(1, 24), **exact) is None


@pytest.mark.parametrize("card, count", [(80, 32), (141, 16), (24, 0)])
def test_where_nothing_fits_it_says_what_would(card, count):
    shape = memory.MODELS["70B"]
    assert ladder.least_gpus(shape.sizes, working_of(shape), gpus(8, card)) == count


FLAGS = {
    "--devices: expected a whole number above 0, up to 100,000; got '2.5'": ["--devices", "2.5"],
    "--machines: expected a whole number above 0, up to 100,000; got '0'": ["--machines", "0"],
    "--device_memory: expected a number above 0, up to 100,000; got 'nan'": ["--device_memory=nan"],
    "--device_memory: expected a number above 0, up to 100,000; got '1e99'": [
        "--device_memory=1e99"
    ],
    "torch sees no GPU on this machine; to plan for others, give --device_mem": ["--devices=2"],
    "torch sees no GPU on this machine; to plan": ["--machines", "2"],
    "recommended.yaml is not a file that samestep hardware wrote": ["--device_memory", "24"],
}


@pytest.fixture(scope="module")
def hardware():
    """The program, in a folder that looks like that of a project."""
    from samestep.programs import hardware

    return hardware


@pytest.mark.parametrize("line", FLAGS)
def test_hardware_that_is_not_there_is_named_before_data_is_prepared(
    line, hardware, monkeypatch, tmp_path
):
    own = tmp_path / "configs" / "accelerate" / "recommended.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("mine: 1\n" if "recommended" in line else "# Written by samestep hardware\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hardware, "read_project", lambda *_: pytest.fail("data is prepared"))
    monkeypatch.setattr(sys, "argv", ["samestep hardware", "recommend", *FLAGS[line]])
    with pytest.raises(ValueError, match=re.escape(line)):
        hardware.prepare()


@pytest.mark.parametrize("measured, fixed", [(20 * GB, 0), (30 * GB, 11 * GB), ("full", 61 * GB)])
def test_an_estimate_that_is_wrong_gives_way_to_the_measurement(monkeypatch, measured, fixed):
    sizes = memory.Sizes(10**9, 10**9, 10**8, 10**8)

    def measure(project, hardware, choice, device):
        if measured == "full":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return measured

    monkeypatch.setattr(verb, "measure", measure)
    section = load_task("samestep.hardware.report").Section("recommend")
    study = simulate.Study(sizes, {False: ladder.Working(0, GB)}, 1.0)  # 18 GB, and 1 GB a sample
    one, device = ladder.Step(1, 1), torch.device("cuda")
    found = verb.compare_with_a_step(section, study, None, gpus(2, 80), one, device)
    assert found == {False: ladder.Working(fixed, GB)}
    assert bool(section.lines) == bool(fixed)
    section = load_task("samestep.hardware.report").Section("recommend")
    found = verb.compare_with_a_step(section, study, None, gpus(2, 10), one, device)
    assert found == study.working and "not measured" in str(section.facts)


# ---- The files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("machines", [1, 2])
def test_yamls_are_those_that_are_shipped_with_other_numbers(monkeypatch, machines):
    monkeypatch.chdir(ROOT / SOURCE)
    sizes = memory.MODELS["7B"].sizes
    for hardware in (gpus(4, 80, machines=machines), gpus(1, 80), gpus(4, **T4), CPU, MAC):
        for rung in ladder.rungs(sizes, hardware):
            shipped = yaml.safe_load((verb.SHIPPED / f"{rung.yaml}.yaml").read_text())
            values = verb.hardware_values(rung, hardware)
            assert values["num_processes"] == rung.processes
            assert values["num_machines"] == hardware.machines
            assert values["mixed_precision"].replace("no", "fp32") == rung.precision
            if rung.yaml == "hsdp":
                assert [*values["parallelism_config"].values()] == [machines, 4]
            assert values.keys() - shipped.keys() <= {"main_process_port"}
            changed = {name for name in shipped if values[name] != shipped[name]}
            numbers = {"num_processes", "num_machines", "mixed_precision", "main_process_port"}
            assert changed <= numbers | {"parallelism_config"}


# ---- The verb ------------------------------------------------------------------------------------


def recommend(project, *flags, check=True, **options):
    return project.run(
        "python", "-m", "samestep", "hardware", "recommend", *flags, check=check, **options
    )


def refused(project, *flags, **options):
    """The line for an error of the user."""
    result = recommend(project, *flags, check=False, **options)
    lines = [line for line in result.stderr.splitlines() if line.startswith("samestep hardware: ")]
    assert (result.returncode, result.stderr.count("\n"), len(lines)) == (2, 1, 1), result.stderr
    return lines[0]


def written(project):
    names = ("configs/accelerate/recommended.yaml", "configs/train/recommended.yaml")
    return [(project.path / name).read_text() for name in names]


def train_check(project, **env):
    files = ["--config", "configs/train/recommended.yaml"]
    files += ["--config_file", "configs/accelerate/recommended.yaml"]
    return project.run("python", "train.py", "--check", *files, **env).stdout


@pytest.mark.slow
@pytest.mark.parametrize("task", ["causal_lm", "image_classification"])
def test_recommend_on_a_cpu(tmp_path, task):
    project = bake(tmp_path, task=task, tracker="none")
    out = recommend(project).stdout
    assert "not simulated" not in out and "not measured: that takes a GPU that is here" in out
    assert "So: the CPU, fp32, without gradient checkpointing" in out
    files = written(project)
    for text in files:
        first, _, rest = text.partition("\n")
        assert re.match(
            r"# Written by samestep hardware recommend on [\d-]{10} for 1 x CPU:", first
        )
        assert yaml.safe_load(rest)
    assert yaml.safe_load(files[1])["micro_batch_size"] == 32
    assert "checked: runs/recommended starts from the beginning" in train_check(project)

    # Again, from its own recipe, and with a flag.
    recommend(project, "--config", "configs/train/recommended.yaml")
    assert [*map(yaml.safe_load, written(project))] == [*map(yaml.safe_load, files)]
    recommend(project, "--num_epochs", "2", "--task.dropout", "0.1", "--micro_batch_size", "8")
    recipe = yaml.safe_load(written(project)[1])
    assert (recipe["micro_batch_size"], recipe["max_steps"], recipe["num_epochs"]) == (8, 0, 2)
    assert recipe["task"]["dropout"] == 0.1
    train_check(project)

    # GPUs that are not here, and too small for a step at once.
    out = recommend(project, "--device_memory", "0.02", "--devices", "2", "--machines", "2").stdout
    assert (
        "Next: python -m samestep launch --config_file configs/accelerate/recommended.yaml" in out
    )
    assert "--machine_rank R --main_process_ip 10.0.0.1" in out
    assert all(name in out for name in ("DDP, bf16", "FSDP2 on 4 GPUs of 2 machines"))
    values = yaml.safe_load(written(project)[0])
    assert (values["num_processes"], values["num_machines"]) == (4, 2)
    before = written(project)
    result = recommend(project, "--device_memory", "0.00001", check=False)
    assert (result.returncode, written(project)) == (1, before)
    assert "So nothing fits. No number of such GPUs would do" in result.stdout


@pytest.mark.slow
def test_recommend_keeps_files_that_it_has_not_written(tmp_path):
    project = bake(tmp_path, task="causal_lm", tracker="none")
    assert "there is no folder runs/none" in refused(
        project, "--task.model_name_or_path", "runs/none"
    )
    recipe = project.path / "configs/train/recommended.yaml"
    recipe.write_text("max_steps: 5\n")
    line = "configs/train/recommended.yaml is not a file that samestep hardware wrote, and stays"
    assert line in refused(project)
    assert recipe.read_text() == "max_steps: 5\n"
    assert not (project.path / "configs/accelerate/recommended.yaml").exists()
    (project.path / "configs/train").rename(tmp_path / "train")
    (project.path / "configs/train").touch()
    line = refused(project, "--config", tmp_path / "train" / "default.yaml")
    assert "configs/train" in line


@pytest.mark.slow
def test_recommend_for_adapters_and_for_several_processes(tmp_path):
    project = bake(tmp_path, task="causal_lm", tracker="none")
    smoke = ["--config", "configs/train/smoke.yaml", "--output_dir", "runs/default"]
    project.run("python", "train.py", *smoke)
    out = recommend(project, "--config", "configs/train/lora.yaml").stdout
    assert "963,456 parameters, and trains 61,440 of them" in out and "not simulated" not in out
    # Of a pretrained model, only the config is read.
    for file in (project.path / "runs/default/model").glob("*.safetensors"):
        file.unlink()
    same = recommend(project, "--config", "configs/train/lora.yaml").stdout
    assert same == out[out.index("recommend") :]
    (project.path / "runs/default/model/config.json").unlink()
    assert "holds no model, since it has no config.json" in refused(
        project, "--config", "configs/train/lora.yaml"
    )

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-m", "samestep", "hardware", "recommend"]
    runs = [subprocess.Popen(command, cwd=project.path, env=e, **pipes) for e in project.envs(2)]
    ended = [run.communicate(timeout=120) for run in runs]
    assert [run.returncode for run in runs] == [2, 2], ended
    lines = "".join(errors for _, errors in ended).splitlines()
    assert len(lines) == 1 and "start it with `python -m samestep hardware recommend`" in lines[0]


@pytest.mark.slow
def test_a_model_that_looks_at_numbers_is_computed(tmp_path):
    project = bake(tmp_path, tracker="none")
    (project.path / "task.py").write_text(
        (ROOT / "templates" / "examples" / "plain_module.py")
        .read_text()
        .replace("return ((model(batch", "assert batch['x'].sum() < 1e9\n    return ((model(batch")
    )
    (project.path / "configs/train/default.yaml").write_text("micro_batch_size: 8\n")
    out = recommend(project).stdout
    assert "not simulated, since" in out and "computed on the CPU with 1 and 2 samples" in out
    assert "The model has 193 parameters, and trains all of them" in out
    train_check(project)
