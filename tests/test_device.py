"""How a device is told to compute, and what happens while it does.

Weights that train: their dtype, unless WEIGHTS is "as built", and decay; what is frozen.
"""

import contextlib
import json
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from conftest import bake, lines, write_table
from refusals import cases
from same import check_same_curve
from samestep.contract import dtypes
from samestep.launch import device
from samestep.step.model import TaskModule, build_empty, form_of
from small_models import new_model
from test_contract import train
from test_prepared import make_texts


@pytest.mark.slow
def test_a_compiled_model_has_the_losses_of_the_eager_one_for_texts_of_many_lengths(tmp_path):
    """Two graphs, one for any length, although the launcher exports USE_DYNAMIC=False."""
    project = bake(tmp_path, task="text_classification", tracker="none")
    rows = [{"text": f"row {i}" + " of words" * (i % 23), "label": "ab"[i % 2]} for i in range(400)]
    data = write_table(tmp_path, rows)
    flags = ["--config", "configs/train/smoke.yaml", "--task.dropout", 0, "--log_every", 1]
    flags += ["--task.data", data, "--task.vocab_size", 300]
    flags += ["--task.hidden_size", 32, "--max_steps", 8, "--eval_every", 4]
    printed = {}
    for name, compiled in (("eager", "false"), ("compiled", "true")):
        env = {"TORCH_LOGS": "recompiles", "ACCELERATE_DYNAMO_USE_DYNAMIC": "False"}
        output = ["--compile", compiled, "--output_dir", tmp_path / name]
        printed[name] = project.train(1, *flags, *output, timeout=600, **env)
    assert printed["compiled"].count("Recompiling function") == 1
    assert "limit" not in printed["compiled"] and "WON'T CONVERT" not in printed["compiled"]
    check_same_curve(tmp_path / "eager", tmp_path / "compiled", rel=1e-4)
    assert [len(lines(tmp_path / "eager", key)) for key in ("loss", "eval_loss")] == [8, 2]


@pytest.mark.parametrize("tf32", ["false", "true"])
def test_fp32_is_fp32_unless_the_recipe_says_otherwise(quick, tmp_path, tf32):
    """torch computes convolutions in TF32 unless it is told not to, and a task may set its own."""
    shown = "import torch; from accelerate import Accelerator; b = torch.backends; "
    shown += "torch.set_float32_matmul_precision('medium'); "
    shown += "b.cudnn.allow_tf32 = True; Accelerator.end_training = lambda _: print('allowed:', "
    shown += "b.cuda.matmul.allow_tf32, b.cudnn.allow_tf32, torch.get_float32_matmul_precision(), "
    shown += "b.cudnn.benchmark)"
    flags = ["--output_dir", tmp_path / "run", "--max_steps", 1, "--tf32", tf32]
    allowed = "True True high" if tf32 == "true" else "False False highest"
    assert f"allowed: {allowed} True" in quick(*flags, before=shown)


def test_repeated_blocks_are_compiled_once_and_keep_their_names(tiny):
    """With six blocks and lists within them; a model without repeated blocks is compiled whole."""
    program = """
import torch
from torch._dynamo.utils import counters
from samestep.launch import device
from accelerate.utils import compile_regions
from samestep.step.model import TaskModule, eager, is_compiled
whole = torch.nn.Module.compile
torch.nn.Module.compile = lambda module: whole(module, backend="eager")
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
    def forward(self, x):
        return x + self.parts[1](torch.relu(self.parts[0](x)))
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(6))
        self.head = torch.nn.Linear(4, 2)
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)
model, rows = Model(), torch.ones(3, 4, requires_grad=True)
names, expected = [*model.state_dict()], model(rows)
assert eager(model).__class__.__name__ == "nullcontext"
device.compile_blocks(model)
assert torch.equal(model(rows), expected) and [*model.state_dict()] == names
assert counters["stats"]["unique_graphs"] == 1, counters["stats"]
assert not torch._dynamo.config.optimize_ddp  # it would cut each block where DDP's buckets end
assert sum(m._compiled_call_impl is not None for m in model.modules()) == 6
with eager(model):
    model(torch.ones(7, 4))
assert counters["stats"]["unique_graphs"] == 1
plain = TaskModule(torch.nn.Linear(4, 4))
assert not is_compiled(plain) and is_compiled(compile_regions(Model()))
device.compile_blocks(plain)
plain(lambda model, batch: model(batch), rows)
assert plain._compiled_call_impl and counters["stats"]["unique_graphs"] == 2
"""
    tiny.run("python", "-c", program)


def test_workers_are_for_gpus_and_rows_that_are_augmented(monkeypatch):
    from samestep.base import workers
    from samestep.step.loader import count_workers

    cuda, cpu = (torch.device(kind) for kind in ("cuda", "cpu"))
    images, numbers = (type("Task", (), each) for each in ({"augment": 0}, {}))
    monkeypatch.setattr(workers.os, "sched_getaffinity", lambda _: range(16))
    found = [count_workers(None, *each) for each in ((images, cuda), (numbers, cuda))]
    assert found == [4, 0] and count_workers(None, images, cpu) == 0
    assert count_workers(0, images, cuda) == 0 and count_workers(7, numbers, cpu) == 7
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert count_workers(None, images, cuda) == 1
    monkeypatch.delattr(workers.os, "sched_getaffinity")  # as on macOS
    monkeypatch.setattr(workers.os, "cpu_count", lambda: 16)
    assert workers.cores_per_process() == 2


def test_batch_norm_is_synchronized_over_gpus_with_equal_shares():
    from samestep.processes import ranks
    from samestep.step.model import sync_batch_norms
    from samestep.step.plan import StepPlan

    gpu = SimpleNamespace(device=SimpleNamespace(type="cuda"), num_processes=2)
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    synchronized = sync_batch_norms(model, gpu, StepPlan(8, 2, (2, 2), 0), "equal")
    assert type(synchronized[0]).__name__ == "SyncBatchNorm"
    for shares, wanted in (((3, 1), "equal"), ((2, 2), "auto")):  # some would wait for ever
        with pytest.raises(ranks.UserError, match="BatchNorm needs equal shares"):
            sync_batch_norms(model, gpu, StepPlan(8, 2, shares, 0), wanted)


CASES = cases("environments")["devices"]


@pytest.mark.parametrize("case", CASES)
def test_the_devices_are_those_that_the_launcher_asks_for(monkeypatch, case):
    gpus, processes, variables, said = case.values()
    for name in ("CUDA_VISIBLE_DEVICES", "ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    several = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "RANK": 0}
    for name, text in ((several if processes > 1 else {}) | variables).items():
        monkeypatch.setenv(name, str(text))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: gpus)
    with pytest.raises(ValueError, match=said) if said else contextlib.nullcontext():
        device.check_devices()


HALF = torch.bfloat16
BUILD = """
def build_model(cfg, data):
    model = AutoModelForCausalLM.from_pretrained("half")
    {change}
    return model
"""
OWN = BUILD.format(change="assert model.dtype == torch.bfloat16")
FROZEN = BUILD.format(change="model.model.embed_tokens.requires_grad_(False)")
THREE_STEPS = ["--learning_rate", 1e-5, "--warmup_steps", 0, "--max_steps", 3, "--weight_decay", 0]


def make(**options):
    return new_model("Llama", vocab_size=384, max_position_embeddings=64, **options).to(HALF)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project with rows, and a model in bfloat16 that its task starts from."""
    project = make_texts(tmp_path_factory.mktemp("dtypes"))
    make().save_pretrained(project.path / "half")
    return project


def run_of(project, output, code):
    """The weights of an export, the dtype that its config names, and what was printed."""
    printed = train(project, output, code, flags=THREE_STEPS)
    config = json.loads((output / "model" / "config.json").read_text())
    return load_file(output / "model" / "model.safetensors"), config["dtype"], printed


def kept(project, after):
    """The share of the weights of the head that are what they were, bit for bit."""
    before = load_file(project.path / "half" / "model.safetensors")
    return float((before["lm_head.weight"] == after["lm_head.weight"]).float().mean())


def test_half_weights_of_a_file_train_and_are_exported_in_float32(project, tmp_path):
    after, dtype, printed = run_of(project, tmp_path, OWN)
    assert "12 weights in half precision are float32 now, since they train: model.embed" in printed
    assert "weights as built" not in printed
    assert dtype == "float32" and {each.dtype for each in after.values()} == {torch.float32}
    assert kept(project, after) < 0.01


def test_weights_as_built_keep_their_dtype_and_the_first_line_says_so(project, tmp_path):
    after, dtype, printed = run_of(project, tmp_path, f'{OWN}\n\nWEIGHTS = "as built"\n')
    assert "fp32, weights as built, distributed: NO" in printed
    assert "12 weights in half precision train as built: " in printed
    assert dtype == "bfloat16" and {each.dtype for each in after.values()} == {HALF}
    assert kept(project, after) > 0.8
    more = [*THREE_STEPS, "--max_steps", 4, "--accept_changes", "true"]
    printed = train(project, tmp_path, OWN, flags=more, codes=[2])
    assert "is torch.bfloat16 in the checkpoint and torch.float32 in the model" in printed
    printed = train(project, tmp_path / "x", OWN + '\n\nWEIGHTS = "bf16"\n', codes=[2])
    assert "task.WEIGHTS is 'bf16'; write \"as built\", or leave it out" in printed


def test_frozen_weights_keep_their_dtype_and_the_export_loads_unrounded(project, tmp_path):
    """The first weight is frozen: transformers names its dtype, and would round all others."""
    after, dtype, printed = run_of(project, tmp_path, FROZEN)
    assert "11 weights in half precision are float32 now" in printed
    halves = [name for name, values in after.items() if values.dtype == HALF]
    assert halves == ["model.embed_tokens.weight"] and dtype == "float32"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert all(torch.equal(loaded[name], values.float()) for name, values in after.items())


def test_tied_weights_buffers_and_models_without_values_are_converted_alike():
    def build():
        model = make(tie_word_embeddings=True)
        model.norm = torch.nn.BatchNorm1d(4, dtype=HALF)
        model.register_buffer("kernel", torch.ones(2, dtype=HALF))
        return model

    task = dtypes.building(build, None)
    with torch.device("meta"):
        empty = task()
    model = task()
    assert form_of(model) == form_of(empty)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tensors = [*model.parameters(), *model.buffers()]
    assert {each.dtype for each in tensors} == {torch.float32, torch.int64}
    assert model.config.dtype == torch.float32
    assert dtypes.building(build, dtypes.AS_BUILT)().dtype == HALF


def test_a_frozen_base_and_its_buffers_stay_beside_adapters():
    def build():
        base = make()
        base.register_buffer("kernel", torch.ones(2, dtype=HALF))
        return get_peft_model(base, LoraConfig(r=2, target_modules="all-linear"))

    model = dtypes.building(build, None)()
    for name, weight in model.named_parameters():
        assert weight.dtype == (torch.float32 if weight.requires_grad else HALF), name
    assert model.base_model.model.kernel.dtype == HALF
    assert dtypes.describe(model) == ""  # peft has made them so
    double = torch.nn.Linear(2, 2, dtype=torch.float64)
    assert dtypes.building(lambda: double, None)().weight.dtype == torch.float64


class Experts(torch.nn.Module):
    """Experts, and a weight of a state space model that is marked as mamba_ssm does it."""

    def __init__(self):
        super().__init__()
        self.experts = torch.nn.Parameter(torch.ones(2, 3, 4))
        self.experts_bias = torch.nn.Parameter(torch.ones(2, 4))
        self.A_log = torch.nn.Parameter(torch.ones(4, 4))
        self.A_log._no_weight_decay = True
        self.norm = torch.nn.LayerNorm(4)
        self.frozen = torch.nn.Parameter(torch.ones(4, 4), requires_grad=False)


def test_biases_vectors_and_marked_weights_have_no_decay():
    for model in (Experts(), build_empty(Experts)):  # on other processes than the main one
        names = {weight: name for name, weight in model.named_parameters()}
        decayed, others = ([names[each] for each in part] for part in dtypes.split_by_decay(model))
        assert decayed == ["experts"]
        assert others == ["experts_bias", "A_log", "norm.weight", "norm.bias"]


def test_modules_without_a_weight_that_trains_stay_in_eval_mode():
    student, teacher = (
        torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout()) for _ in range(2)
    )
    student.append(torch.nn.BatchNorm1d(2).requires_grad_(False))
    model = torch.nn.ModuleDict({"student": student, "teacher": teacher.requires_grad_(False)})
    module = TaskModule(model)
    for _ in range(2):
        assert module.train() is module
        modes = {name: each.training for name, each in model.named_modules()}
        still = {"teacher", "teacher.0", "teacher.1", "student.2"}
        assert {name for name, mode in modes.items() if not mode} == still
        module.eval()
        assert not any(each.training for each in module.modules())
