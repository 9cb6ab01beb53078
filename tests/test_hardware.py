"""The YAMLs of configs/accelerate: what the launcher makes of each, and what is refused."""

import contextlib
import re
from types import SimpleNamespace

import pytest
import torch
import yaml
from accelerate.commands import launch
from accelerate.utils import launch as launching

from conftest import ROOT, SOURCE
from samestep.settings import accelerate_yaml
from samestep.settings import mesh as layout
from samestep.settings.run_config import DDPConfig
from samestep.start import startup

FOLDER = ROOT / SOURCE / "configs" / "accelerate"
SHIPPED = sorted(path.stem for path in FOLDER.glob("*.yaml"))
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
}
CP = FSDP2 | {"PARALLELISM_CONFIG_CP_COMM_STRATEGY": "allgather"}
ZERO2 = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}
ZERO3 = ZERO2 | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
OFFLOAD = "ACCELERATE_DEEPSPEED_OFFLOAD_{}_DEVICE"
HOST = {OFFLOAD.format(what): "cpu" for what in ("OPTIMIZER", "PARAM")}
# YAML: processes, precision, sizes of the axes, and what else the launcher tells the processes.
EXPECTED = {
    "context_parallel": (2, "bf16", {"cp": 2}, CP),
    "cpu": (1, None, {}, {"ACCELERATE_USE_CPU": "True"}),
    "cpu_multi": (2, None, {}, {"CUDA_VISIBLE_DEVICES": "-1,-1"}),
    "deepspeed_zero2": (2, "bf16", {}, ZERO2),
    "deepspeed_zero3": (2, "bf16", {}, ZERO3),
    "deepspeed_zero3_offload": (2, "bf16", {}, ZERO3 | HOST),
    "fp8": (1, "fp8", {}, {"ACCELERATE_FP8_BACKEND": "AO"}),
    "fsdp2": (2, "bf16", {}, FSDP2),
    "fsdp2_offload": (2, "bf16", {}, FSDP2 | {"FSDP_OFFLOAD_PARAMS": "true"}),
    "hsdp": (4, "bf16", {"dp_replicate": 2, "dp_shard": 2}, FSDP2),
    "mps": (1, "no", {}, {"ACCELERATE_USE_CPU": "False"}),
    "multi_gpu": (2, "no", {}, {}),
    "multi_gpu_bf16": (2, "bf16", {}, {}),
    "multi_gpu_fp16": (2, "fp16", {}, {}),
    "multi_node": (16, "bf16", {}, {}),
    "multi_node_fsdp2": (16, "bf16", {}, FSDP2),
    "single_gpu": (1, "no", {}, {}),
    "single_gpu_bf16": (1, "bf16", {}, {}),
    "single_gpu_fp16": (1, "fp16", {}, {}),
    "tensor_parallel": (2, "bf16", {"tp": 2}, {}),
}


@pytest.fixture
def machine(monkeypatch):
    """A machine with 8 Hopper GPUs and all libraries, as torch and accelerate would report them."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    monkeypatch.setattr(accelerate_yaml, "is_deepspeed_available", lambda: True)
    monkeypatch.setattr(launching, "is_fp8_available", lambda: True)
    return monkeypatch


def launched(path, *options):
    """The environment of the processes that accelerate's launcher starts for a YAML."""
    words = ["--config_file", str(path), "--num_cpu_threads_per_process", "1", *options, "train.py"]
    args = launch._validate_launch_command(launch.launch_command_parser().parse_args(words))[0]
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ""
        return launching.prepare_deepspeed_cmd_env(args)[1]
    if args.multi_gpu or args.use_fsdp:
        return launching.prepare_multi_gpu_env(args)
    return launching.prepare_simple_launcher_cmd_env(args)[1]


# ---- The YAMLs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHIPPED)
def test_check_and_launcher_agree_on_the_layout(machine, name):
    processes, precision, sizes, told = EXPECTED[name]
    told = told | ({"ACCELERATE_MIXED_PRECISION": precision} if precision else {})
    machine.setenv("LAUNCH_MAIN_PROCESS_IP", "10.0.0.1")
    checked = accelerate_yaml.read_hardware(FOLDER / f"{name}.yaml")
    assert checked.processes == processes
    assert {
        axis: getattr(checked, axis) for axis in layout.AXES if getattr(checked, axis) > 1
    } == sizes
    # Machine 1, since machine 0 would try the port.
    machines = ["--machine_rank", "1", "--main_process_ip", "10.0.0.1"]
    env = launched(FOLDER / f"{name}.yaml", *(machines if name.startswith("multi_node") else []))
    assert {key: env.get(key) for key in told} == told
    for key, value in env.items():
        machine.setenv(key, value)
    if processes > 1:
        machine.setenv("WORLD_SIZE", str(processes))
    assert layout.this_layout() == checked
    accelerate_yaml.check_launched(checked, FOLDER / f"{name}.yaml")
    # One place for each number: the recipe has these.
    assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS" not in env
    assert "ACCELERATE_GRADIENT_CLIPPING" not in env


@pytest.mark.parametrize("name", SHIPPED)
def test_each_key_is_explained_and_the_commands_name_the_file(name):
    lines = (FOLDER / f"{name}.yaml").read_text().splitlines()
    for above, line in zip(["", *lines], lines, strict=False):
        assert len(line) <= 112, line
        if line and not line.lstrip().startswith("#"):
            assert above.lstrip().startswith("# "), f"{line} has no comment"
    head = "\n".join(lines[: lines.index("")])
    assert f"--config_file configs/accelerate/{name}.yaml" in head
    assert f"make train HARDWARE={name}" in head or name.startswith("multi_node")
    named = re.findall(r"\b([a-z0-9_]+)\.yaml", "\n".join(lines))
    assert {*named} <= {*SHIPPED}


# ---- Refusals ------------------------------------------------------------------------------------


FSDP = "distributed_type: FSDP\nnum_processes: 4\nmixed_precision: bf16\n"
DDP = "distributed_type: MULTI_GPU\nnum_processes: 4\nmixed_precision: bf16\n"
ZERO = "distributed_type: DEEPSPEED\nnum_processes: 2\nmixed_precision: bf16\n"
FP8 = DDP.replace("bf16", "fp8")
SHARDED, ZERO2_KEYS = "fsdp_config: {fsdp_version: 2}\n", "deepspeed_config: {zero_stage: 2}\n"
V2 = FSDP + SHARDED
ONE = "distributed_type: 'NO'\nnum_processes: 1\n"
TWO = "num_machines: 2\nmain_process_ip: 10.0.0.1\n"


def sizes(**axes):
    keys = ", ".join(f"parallelism_config_{axis}_size: {size}" for axis, size in axes.items())
    return f"parallelism_config: {{{keys}}}\n"


def fsdp(key):
    return f"{FSDP}fsdp_config: {{fsdp_version: 2, {key}}}\n"


def zero(keys):
    return f"{ZERO}deepspeed_config: {{{keys}}}\n"


REFUSED = [  # a YAML, and what is said
    (FSDP, "train.py shards by FSDP 2 only; write fsdp_version: 2 in fsdp_config"),
    (V2.replace("bf16", "fp16"), "fp16 does not go with sharded weights; write bf16"),
    (ZERO.replace("bf16", "fp8"), "fp8 goes with DDP and FSDP alone; write bf16"),
    (DDP + sizes(dp_replicate=2, tp=2), "parallelism_config shards nothing without FSDP; use hsdp"),
    (DDP + sizes(dp_shard=4), "parallelism_config shards nothing without FSDP; use hsdp.yaml"),
    (ZERO + sizes(dp_shard=2), "parallelism_config shards nothing without FSDP; use hsdp.yaml"),
    (V2 + sizes(dp_shard=2, sp=2), "Ulysses brings a loader of its own"),
    (V2 + sizes(dp_replicate=2), "needs 2 processes (dp_replicate 2), and num_processes is 4"),
    (V2 + sizes(dp_shard="two"), "invalid literal for int() with base 10: 'two'"),
    (V2 + "parallelism_config: {tp_size: 2}", "did you mean parallelism_config_tp_size?"),
    (FP8 + "fp8_config: {x: 1}\n", "no key x; accelerate reads no such"),
    (FSDP + "fsdp_config: {fsdp_verion: 2}", "no key fsdp_verion; did you mean fsdp_version?"),
    (fsdp("fsdp_sharding_strategy: FULL_SHARD"), "remove fsdp_sharding_strategy; FSDP 2 does not"),
    (fsdp("activation_checkpointing: true"), "the recipe's field gradient_checkpointing decides"),
    (DDP + SHARDED, "fsdp_config has no effect here: write distributed_type: FSDP, or remove fs"),
    (ONE + SHARDED, "fsdp_config has no effect here: write distributed_type: FSDP, or remove fs"),
    (V2 + ZERO2_KEYS, "deepspeed_config has no effect here: write distributed_type: DEEPSPEED"),
    (ONE + sizes(tp=2), "parallelism_config has no effect here: write distributed_type: FSDP"),
    (DDP + "fp8_config: {backend: AO}\n", "fp8_config has no effect here: write mixed_precision"),
    (zero("gradient_accumulation_steps: 4"), "the recipe's field micro_batch_size decides"),
    (zero("deepspeed_config_file: ds.json"), "train.py fills in DeepSpeed's settings"),
    (zero("zero_stage: 2") + TWO, "write deepspeed_multinode_launcher: standard"),
    (V2 + "gpu_ids: '-1,-1'\n", "accelerate shards models on GPUs only"),
]


@pytest.mark.parametrize("text, said", REFUSED)
def test_refused_in_a_yaml(machine, tmp_path, text, said):
    path = tmp_path / "hardware.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        accelerate_yaml.read_hardware(path)
    line = str(error.value)
    assert line.startswith(f"{path}: ") and said in line and "\n" not in line


def test_libraries_and_gpus_that_are_missing(machine, tmp_path):
    def said(name):
        with pytest.raises(ValueError) as error:
            accelerate_yaml.read_hardware(FOLDER / f"{name}.yaml")
        return str(error.value)

    machine.setattr(accelerate_yaml, "is_deepspeed_available", lambda: False)
    for name in ("deepspeed_zero2", "deepspeed_zero3", "deepspeed_zero3_offload"):
        assert "run make setup EXTRAS=deepspeed (or pip install deepspeed), or use" in said(name)
    machine.setattr(torch.cuda, "is_available", lambda: False)
    assert "context parallelism needs CUDA's attention kernels" in said("context_parallel")


def test_numbers_of_the_launcher_are_those_of_the_layout(machine):
    """--num_processes 8 of the launcher overrides the YAML, but not its parallelism_config."""
    machine.setenv("LAUNCH_PROCESSES", "8")
    assert accelerate_yaml.read_hardware(FOLDER / "fsdp2.yaml").replicas == 8
    with pytest.raises(ValueError, match="hsdp.yaml: parallelism_config needs 4 processes"):
        accelerate_yaml.read_hardware(FOLDER / "hsdp.yaml")


@pytest.mark.parametrize(
    "kind, name, value, said",
    [
        ("DEEPSPEED", "GRADIENT_ACCUMULATION_STEPS", "2", "the recipe's field micro_batch_size"),
        ("DEEPSPEED", "DEEPSPEED_CONFIG_FILE", "ds.json", "unset ACCELERATE_DEEPSPEED_CONFIG_FIL"),
    ],
)
def test_refused_in_what_the_launcher_has_set(machine, kind, name, value, said):
    machine.setenv(f"ACCELERATE_USE_{kind}", "true")
    machine.setenv(f"ACCELERATE_{name}", value)
    with pytest.raises(ValueError, match=said):
        accelerate_yaml.check_launched(layout.this_layout(), None)


DEFAULTS = {"exact": False, "compile": False, "device_shares": "equal", "async_save": False}
DEFAULTS |= {"gradient_compression": "none", "ddp": DDPConfig()}
HSDP = {"dp_replicate": 2, "dp_shard": 2}
KINDS = {
    "DDP": ((), {}),
    "FSDP": (("FSDP",), {}),
    "HSDP": (("FSDP", "PARALLELISM_CONFIG"), HSDP),
    "DEEPSPEED": (("DEEPSPEED",), {}),
    "TP": (("PARALLELISM_CONFIG",), {"tp": 4}),
}


@pytest.mark.parametrize(
    "kind, fields, said",
    [
        ("FSDP", {"exact": True, "async_save": True}, ""),
        ("DDP", {"device_shares": "[2, 1]", "gradient_compression": "fp16"}, ""),
        ("DEEPSPEED", {"async_save": True}, "async_save does not go with DeepSpeed"),
        ("DEEPSPEED", {"exact": True}, "exact does not go with DeepSpeed"),
        ("DEEPSPEED", {"compile": True}, "compile does not go with DeepSpeed"),
        ("TP", {"exact": True}, "exact does not go with tensor"),
        ("FSDP", {"device_shares": "auto"}, "device_shares does not go with sharded"),
        ("FSDP", {"gradient_compression": "fp16"}, "gradient_compression does not go with sh"),
        ("FSDP", {"ddp": DDPConfig(bucket_cap_mb=1)}, "ddp does not go with sharded weights"),
        ("DDP", {"ddp": DDPConfig(bucket_cap_mb=1), "exact": True}, "ddp does not go with exact"),
        ("DDP", {"exact": True, "compile": True}, "exact does not go with compile"),
    ],
)
def test_fields_that_do_not_go_with_a_layout(kind, fields, said):
    shared = layout.layout_of(4, 0, *KINDS[kind])
    refused = pytest.raises(ValueError, match=f"^{said}")
    with refused if said else contextlib.nullcontext():
        startup.check_sharing(SimpleNamespace(**DEFAULTS | fields), shared)


@pytest.mark.parametrize(
    "row, said",
    [
        ({"input_ids": 64, "labels": 64}, ""),
        ({"input_ids": 64, "labels": 64, "position_ids": 64}, "packed by best_fit"),
        ({"input_ids": 62, "labels": 62}, "into 4 equal parts, and the first"),
        ({"input_ids": 64, "labels": 0}, "has 64 input_ids and 1 labels"),
        ({"pixels": 1}, "has 0 input_ids and 0 labels"),
    ],
)
def test_rows_that_context_parallelism_cannot_cut(row, said):
    rows = [{name: [0] * length if length else 1 for name, length in row.items()}]
    task = SimpleNamespace(check_shared_rows=lambda *_: None)
    with pytest.raises(ValueError, match=said) if said else contextlib.nullcontext():
        startup.check_rows(rows, SimpleNamespace(task=None), task, None, 4)


@pytest.mark.parametrize("name, said", [("fsdp2", ""), ("deepspeed_zero2", "DeepSpeed is not")])
def test_check_prints_one_line(tiny, tmp_path, name, said):
    """A whole `--check`, on a machine that shows 8 GPUs."""
    gpus = "import torch; torch.accelerator.device_count = lambda: 8"
    flags = ["--check", "--config_file", FOLDER / f"{name}.yaml", "--output_dir", tmp_path / "run"]
    ((code, printed, errors),) = tiny.forked([{"flags": flags, "before": gpus}])
    assert (code, errors.count("\n")) == ((2, 1) if said else (0, 0)), printed + errors
    assert said in errors


def test_a_section_without_effect_is_told_under_accelerates_own_launcher(tiny, tmp_path):
    """Nothing has checked the YAML before; it would train unsharded, without a word."""
    text = (FOLDER / "cpu.yaml").read_text() + SHARDED
    (tmp_path / "mine.yaml").write_text(text)
    launcher = ["accelerate", "launch", "--quiet", "--config_file", tmp_path / "mine.yaml"]
    result = tiny.run(*launcher, "train.py", "--output_dir", tmp_path / "run", check=False)
    assert result.returncode == 1 and result.stderr.count("\n") == 1, result.stderr
    assert f"train.py: {tmp_path}/mine.yaml: fsdp_config has no effect here" in result.stderr
    assert not (tmp_path / "run").exists()


def test_no_key_is_both_in_the_hardware_and_in_the_recipe(tiny):
    code = "from train import Config; from samestep.settings.config import fields_of; "
    code += "print(*fields_of(Config))"
    fields = {*tiny.run("python", "-c", code).stdout.split()}
    for name in SHIPPED:
        keys = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
        sections = [value for value in keys.values() if isinstance(value, dict)]
        assert not fields & {*keys, *(key for section in sections for key in section)}


# ---- hardware.yaml of a run ----------------------------------------------------------------------


def test_hardware_yaml_says_what_the_launcher_meant_and_a_continuation_what_changed(
    tiny, tmp_path, monkeypatch
):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "http://me:secret@proxy")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    output = tmp_path / "run"
    flags = ["--output_dir", output, "--save_every", 2, "--accept_changes"]
    assert "hardware: " not in tiny.train(1, *flags, "--max_steps", 2)
    first = yaml.safe_load((output / "hardware.yaml").read_text())
    assert (first["processes"], first["nodes"], first["precision"]) == (1, 1, "fp32")
    assert first["sharding"] == "none" and [*first["devices"].values()] == [1]
    assert first["environment"]["NCCL_SOCKET_IFNAME"] == "http://proxy"
    assert "secret" not in (output / "hardware.yaml").read_text()

    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    printed = tiny.train(2, *flags, "--max_steps", 4, env={"ACCELERATE_MIXED_PRECISION": "bf16"})
    (line,) = [line for line in printed.splitlines() if line.startswith("hardware: ")]
    assert line.startswith("hardware: processes 1 -> 2, ")
    assert "NCCL_SOCKET_IFNAME http://proxy -> eth0" in line and "secret" not in printed
    assert printed.count("fp32 -> bf16") == 1  # with what rounds otherwise
    second = yaml.safe_load((output / "hardware.yaml").read_text())
    assert (second["processes"], second["precision"]) == (2, "bf16")
    assert [*second["devices"].values()] == [2]

    env = {"ACCELERATE_MIXED_PRECISION": "bf16"}
    assert "hardware: " not in tiny.train(2, *flags, "--max_steps", 6, env=env)
    (output / "hardware.yaml").write_text("devices: [\n")  # a damaged one is no reason to stop
    assert "hardware: " not in tiny.train(2, *flags, "--max_steps", 8, env=env)
    assert yaml.safe_load((output / "hardware.yaml").read_text()) == second


# ---- docs/hardware.md ----------------------------------------------------------------------------


DOC = ROOT / SOURCE / "docs" / "hardware.md"


def test_all_yamls_are_in_the_tables():
    text = DOC.read_text().partition("\n## Memory")[0].partition("\n## The YAMLs")[2]
    rows = "".join(line for line in text.splitlines() if line.startswith("| `"))
    assert {*re.findall(r"`([a-z0-9_]+)`", rows)} >= {*SHIPPED}
