"""The YAMLs of configs/accelerate, and `samestep hardware`, which tests the devices."""

import contextlib
import importlib.metadata
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from accelerate.commands import launch
from accelerate.utils import launch as launching

from conftest import ROOT, SOURCE, checkpoint, edit, manifest
from refusals import cases, refused, table
from samestep.hardware import bench, devices, recommend
from samestep.hardware.recommend import Sizes
from samestep.launch import device, launched, launcher
from samestep.processes import mesh as layout
from samestep.run import startup

FOLDER = ROOT / SOURCE / "configs" / "accelerate"
SHIPPED = sorted(path.stem for path in FOLDER.glob("*.yaml"))
DOC = ROOT / SOURCE / "docs" / "hardware.md"


@pytest.fixture
def machine(monkeypatch):
    """A machine with 8 Hopper GPUs and all libraries, as torch and accelerate would report them."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr(launching, "is_fp8_available", lambda: True)
    return monkeypatch


def launched_env(path):
    """The environment of the processes that accelerate's launcher starts for a YAML."""
    words = ["--config_file", str(path), "--num_cpu_threads_per_process", "1"]
    if path.stem.startswith("multi_node"):  # node 1, since node 0 would try the port
        words += ["--machine_rank", "1", "--main_process_ip", "10.0.0.1"]
    words.append("train.py")
    args = launch._validate_launch_command(launch.launch_command_parser().parse_args(words))[0]
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ""
        return launching.prepare_deepspeed_cmd_env(args)[1]
    if args.multi_gpu or args.use_fsdp:
        return launching.prepare_multi_gpu_env(args)
    return launching.prepare_simple_launcher_cmd_env(args)[1]


# ---- The YAMLs -----------------------------------------------------------------------------------


def set_up(machine, processes, env):
    """Makes this process one of so many that a launcher has started with this environment."""
    for key, value in env.items():
        machine.setenv(key, value)
    if processes > 1:
        machine.setenv("WORLD_SIZE", str(processes))
        machine.setenv("RANK", "0")


@pytest.mark.parametrize("name", SHIPPED)
def test_the_layout_follows_from_what_the_launcher_has_set(machine, name):
    path = FOLDER / f"{name}.yaml"
    keys = yaml.safe_load(path.read_text())
    axes = keys.get("parallelism_config", {})
    sizes = {axis: axes.get(f"parallelism_config_{axis}_size", 1) for axis in layout.AXES}
    env = launched_env(path)
    assert env["ACCELERATE_MIXED_PRECISION"] == keys["mixed_precision"]
    set_up(machine, keys["num_processes"], env)
    found = launched.this_layout()
    assert found.processes == keys["num_processes"]
    assert {axis: getattr(found, axis) for axis in layout.AXES} == sizes
    launched.check_launched(found)
    launched.check_words(["--config_file", str(path), "train.py"])
    # One place for each number: the recipe has these.
    assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS" not in env
    assert "ACCELERATE_GRADIENT_CLIPPING" not in env


def test_the_page_has_a_row_for_each_yaml():
    table = DOC.read_text().partition("\n## Memory")[0].partition("\n## The YAMLs")[2]
    rows = "".join(line for line in table.splitlines() if line.startswith("| `"))
    assert {*re.findall(r"`([a-z0-9_]+)`", rows)} >= {*SHIPPED}


# ---- Refusals ------------------------------------------------------------------------------------


DDP = "distributed_type: MULTI_GPU\nnum_processes: 4\nmixed_precision: bf16\n"
SHARDED = "fsdp_config: {fsdp_version: 2}\n"


@pytest.mark.parametrize("text, said", table("hardware"))
def test_refused_in_a_yaml(machine, tmp_path, text, said):
    """Before a launch, or in the launched processes."""
    path = tmp_path / "hardware.yaml"
    path.write_text(text)
    with refused(said):
        start(machine, path)


def start(machine, path, *options):
    """What samestep launch checks, and then each process that it starts."""
    arguments, env = launcher.read(["--config_file", str(path), *options, "train.py"])
    launcher.check_machines(arguments)
    set_up(machine, arguments.num_processes, env)
    launched.check_launched(launched.this_layout())
    device.check_combinations(SimpleNamespace(**DEFAULTS), launched.this_layout())
    return launched.this_layout()


def test_numbers_of_the_launcher_are_those_of_the_layout(machine):
    """--num_processes 8 of the launcher overrides the YAML, but not its parallelism_config."""
    assert start(machine, FOLDER / "fsdp2.yaml", "--num_processes", "8").replicas == 8
    with pytest.raises(ValueError, match="parallelism_config needs 4 processes"):
        start(machine, FOLDER / "hsdp.yaml", "--num_processes", "8")


DEFAULTS = {"exact": False, "compile": False, "device_shares": "equal", "async_save": False}
DEFAULTS |= {"check": False, "micro_batch_size": 8}


@pytest.mark.parametrize("given, said", table("layouts"))
def test_fields_that_do_not_go_with_a_layout(given, said):
    fields = {name: given[name] for name in DEFAULTS.keys() & given.keys()}
    shared = layout.layout_of(4, 0, given.get("shards", ()), given.get("axes", {}))
    with contextlib.nullcontext() if "allowed" in said else refused(begin=said):
        device.check_combinations(SimpleNamespace(**DEFAULTS | fields), shared)


def test_rows_that_context_parallelism_cannot_cut():
    task = SimpleNamespace(check_context_parallel=lambda: None)
    right = {"input_ids": [0] * 64, "labels": [0] * 64}
    startup.check_parts([right], task, 4)
    said = "into 4 equal parts, and the first has 64 input_ids"
    for row, wrong in (
        (right | {"position_ids": [0] * 64}, task),
        (right | {"labels": [0]}, task),
        (right, SimpleNamespace()),
        (right, SimpleNamespace(**vars(task), eval_outputs=id)),
    ):
        with pytest.raises(ValueError, match=said):
            startup.check_parts([row], wrong, 4)


GIVEN = """
from accelerate.commands.config import config_args
from samestep.launch import shutdown
config_args.default_config_file = {default!r}
shutdown.LAUNCHER_WORDS = [*{words!r}, "train.py"]
"""
CPU = (FOLDER / "cpu.yaml").read_text()


def test_the_yaml_of_accelerates_own_launcher_is_looked_at(tiny, tmp_path):
    """Nothing has checked it before: it would train unsharded, or alone, without a word. Without
    --config_file it is that of `accelerate config`."""
    path, output = tmp_path / "mine.yaml", tmp_path / "run"
    for words, default, text, said in (
        (["--config_file", str(path)], "", CPU + SHARDED, "fsdp_config has no effect here"),
        ([], str(path), DDP, "accelerate starts 1 process for this distributed_type, not 4; see "),
    ):
        path.write_text(text)
        before = GIVEN.format(words=words, default=default)
        printed = tiny.train(1, "--output_dir", output, before=before, codes=[2])
        assert said in printed and printed.count("\n") == 1
        assert not output.exists()


# ---- hardware.yaml of a run ----------------------------------------------------------------------


def test_hardware_yaml_says_what_was_launched_and_then_what_changed(tiny, output, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "http://me:secret@proxy")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    flags = ["--output_dir", output, "--save_every", 2, "--accept_changes"]
    assert "a version changed" not in tiny.train(1, *flags, "--max_steps", 2)
    first = yaml.safe_load((output / "hardware.yaml").read_text())
    assert (first["processes"], first["nodes"], first["precision"]) == (1, 1, "fp32")
    assert first["sharding"] == "none" and [*first["devices"].values()] == [1]
    assert first["environment"]["NCCL_SOCKET_IFNAME"] == "http://proxy"
    assert "secret" not in (output / "hardware.yaml").read_text()

    saved = manifest(checkpoint(output, 2))
    assert first == saved["hardware"] | {"environment": first["environment"]}
    assert first["torch"] == importlib.metadata.version("torch")

    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    printed = tiny.train(2, *flags, "--max_steps", 4, env={"ACCELERATE_MIXED_PRECISION": "bf16"})
    (line,) = [line for line in printed.splitlines() if "a version changed" in line]
    assert "rounding may differ: processes: 1 -> 2; " in line and "devices: {" in line
    assert "precision: fp32 -> bf16" in line and printed.count("fp32 -> bf16") == 1
    assert "torch: " not in line and "secret" not in printed
    second = yaml.safe_load((output / "hardware.yaml").read_text())
    assert (second["processes"], second["precision"]) == (2, "bf16")
    assert [*second["devices"].values()] == [2]


# ---- recommend -----------------------------------------------------------------------------------


def test_frozen_weights_have_no_gradients_and_no_moments():
    sizes = Sizes(parameters=1_010, trained=10, unit=100)
    assert sizes.on_gpu(1) == 6 * 1_000 + 18 * 10
    assert sizes.on_gpu(1, "no") == 4 * 1_000 + 16 * 10
    assert sizes.on_gpu(1, checkpointing=True) == 4 * 1_000 + 2 * 100 + 18 * 10
    assert sizes.on_gpu(10) == (4 * 1_010 + 12 * 10) / 10 + 4 * 100 + 6 * 10


def test_the_largest_unit_is_a_block_or_what_lies_in_no_block():
    parts = [torch.nn.Bilinear(2, 2, 2), torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)]
    model = torch.nn.Sequential(*parts)
    model[1].requires_grad_(False)
    for blocks, largest in ((["Bilinear"], 76), (["Linear"], 40), (None, 86)):
        model._no_split_modules = blocks
        assert recommend.count_parameters(model) == (86, 46, largest)


# ---- Programs that samestep hardware starts ------------------------------------------------------

GPU = devices.Devices("cuda", 2, "bf16", Path("configs/accelerate/multi_gpu_bf16.yaml"))


def sees(monkeypatch, kind):
    """Lets torch see one device of this kind."""
    device = torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: device)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)


@pytest.mark.parametrize("visible, precision", [("1", "bf16"), ("0", "fp16"), (None, "fp16")])
def test_the_precision_is_that_of_the_visible_gpus(monkeypatch, visible, precision):
    """Of a T4 and an A100."""
    cards = {"0": "7.5", "1": "8.0"}

    def query(*words):
        chosen = [cards[words[1]]] if words[0] == "-i" else [*cards.values()]
        return 0, "\n".join(["compute_cap", *chosen])

    monkeypatch.setattr(devices, "nvidia_smi", query)
    sees(monkeypatch, "cuda")
    monkeypatch.setattr(os, "environ", {"CUDA_VISIBLE_DEVICES": visible} if visible else {})
    yaml_of = Path(f"configs/accelerate/single_gpu_{precision}.yaml")
    assert devices.choose(None, None) == ("cuda", 1, precision, yaml_of)
    with pytest.raises(ValueError, match="torch sees 1 GPUs; give --processes 1"):
        devices.choose(None, 2)
    assert devices.choose(FOLDER / "cpu.yaml", None)[:3] == ("cpu", 1, "no")
    assert devices.choose(FOLDER / "cpu_multi.yaml", None)[:3] == ("cpu", 2, "no")


def test_another_gpu_is_tested_where_a_yaml_names_it(monkeypatch):
    """Without a YAML the CPU trains, as by `make train`."""
    sees(monkeypatch, "mps")
    cpu_multi = Path("configs/accelerate/cpu_multi.yaml")
    assert devices.choose(None, 2) == ("cpu", 2, "no", cpu_multi)
    assert devices.choose(FOLDER / "mps.yaml", None)[:3] == ("mps", 1, "no")


# ---- check ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases("devices"))
def test_what_makes_training_wrong_is_a_failure(monkeypatch, case):
    printed, seen, problem, said = case.values()
    smi = {"-L": (0, "GPU 0: NVIDIA H100\nGPU 1: NVIDIA H100")} | printed
    smi[devices.ERRORS] = smi.get("errors", (1, ""))
    answers = [("H100", 1.0, ""), ("H100", 1.0, problem)]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: seen)
    monkeypatch.setattr(devices, "nvidia_smi", lambda word, *_: smi.get(word, (1, "")))
    monkeypatch.setattr(devices, "ask", lambda *_: answers[: seen or 1])
    monkeypatch.setattr(devices, "run", lambda words: (0, ""))
    section = devices.Section()
    devices.check(section, GPU if seen else devices.Devices("cpu", 1, "no", GPU.yaml))
    assert len(section.failures) == (said is not None)
    assert all(line.startswith(said) for line in section.failures)


def test_wrong_products_are_named(monkeypatch):
    cpu = torch.device("cpu")
    assert bench.wrong_products(cpu) == ""
    monkeypatch.setitem(bench.TOLERANCE, "fp32", 1e-12)
    wrong = bench.wrong_products(cpu)
    assert wrong.startswith("the error of a product in fp32 is ") and ";" not in wrong
    nan = torch.full((64, 64), float("nan"))
    monkeypatch.setattr(torch, "randn", lambda *_, **__: nan)
    assert bench.wrong_products(cpu).count("the error of a product") == 3


def test_a_slow_device_is_named_with_what_to_do():
    (line,) = bench.advise(["H200"] * 4, "x", [100, 100, 81, 70])
    assert line.startswith("slow device: 3 (H200) is 30% behind the fastest in x; measure again, ")


# ---- For real ------------------------------------------------------------------------------------


def hardware(project, *words, code=0, **env):
    """What `samestep hardware` prints, in a line."""
    command = ["python", "-m", "samestep", "hardware", *words]
    result = project.run(*command, check=False, **env)
    assert result.returncode == code, result.stdout + result.stderr
    return " ".join((result.stdout + result.stderr).split())


@pytest.mark.slow
def test_one_command_checks_measures_and_compares(tiny, tmp_path):
    project = tiny.copied(tmp_path)
    printed = hardware(project, "--seconds", 0.01)
    assert "2 comparisons passed, 0 failed" in printed
    found = json.loads((project.path / "runs" / "hardware" / "hardware.json").read_text())
    assert [*found] == ["check", "bench", "smoke"]
    assert found["check"]["facts"]["device 1"] == "cpu"
    hardware(project, "recommend")  # leaves what the others found
    report = json.loads((project.path / "runs" / "hardware" / "hardware.json").read_text())
    assert [*report] == [*found, "recommend"] and report["bench"] == found["bench"]
    assert report["recommend"]["facts"]["devices"].startswith("2 x cpu, ")  # of one memory
    figures = found["bench"]["figures"]
    assert {"training step, samples/s", "all-reduce, 1024 KiB, GB/s"} < {*figures}
    assert all(len(each) == 2 and 0 < min(each) and max(each) < 1e6 for each in figures.values())


BATCHES, PARTS = "        for batch in step:", "        step.micro_batches"
OTHER = f"{PARTS}[0] = step.micro_batches[run.ranks.layout.rank]\n{BATCHES}"
LESS = f"{PARTS} = step.micro_batches[int(run.ranks.layout.rank == 1) :]\n{BATCHES}"
FAULTS = [(OTHER, "1: loss on 2 x cpu is "), (LESS, "on 2 x cpu ended: ")]  # and what is said
CLIP = "        step.clip(cfg"


@pytest.mark.slow
@pytest.mark.parametrize("fault, said", FAULTS)
def test_smoke_names_what_is_wrong(tiny, tmp_path, fault, said):
    """A wrong micro-batch, and a share that is left out."""
    project = tiny.copied(tmp_path)
    edit(project.path / "train.py", BATCHES, fault)
    with open(project.path / "configs" / "train" / "default.yaml", "a") as file:
        file.write("timeout: 5\n")  # where a share is left out, the other process waits
    printed = hardware(project, "smoke", code=1)
    assert "failed: " in printed and said in printed, printed
    left = [path.name for path in (project.path / "runs" / "hardware").iterdir()]
    assert left == ["hardware.json"]


@pytest.mark.slow
def test_smoke_under_a_launcher_that_shards(tiny, tmp_path):
    """A doubled gradient is named. Only the first process works; it starts train.py by its YAML."""
    project = tiny.copied(tmp_path)
    doubled = "        [p.grad.mul_(2) for p in model.parameters()]\n"
    edit(project.path / "train.py", CLIP, f"{doubled}{CLIP}")
    launch = ["accelerate", "launch", "--quiet", "--config_file", "configs/accelerate/fsdp2.yaml"]
    launch += ["--num_processes", "2", "--mixed_precision", "no", ROOT / "tests/sharded_on_cpu.py"]
    result = project.run(*launch, "-m", "samestep", "hardware", "smoke", check=False)
    assert result.returncode == 1, result.stdout + result.stderr
    assert result.stdout.count("configs/accelerate/fsdp2.yaml") == 1
    assert "failed: step 1: grad_norm" in result.stdout
