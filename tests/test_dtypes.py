"""Weights that train: their dtype, unless WEIGHTS is "as built", and decay; what is frozen."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from samestep.contract import dtypes
from samestep.step.model import TaskModule, build_empty, form_of
from small_models import new_model
from test_prepared import make_texts
from test_probes import train

HALF = torch.bfloat16
BUILD = """
def build_model(cfg, data):
    model = AutoModelForCausalLM.from_pretrained("half")
    {change}
    return model
"""
OWN = BUILD.format(change="assert model.dtype == torch.bfloat16")
FROZEN = BUILD.format(change="model.model.embed_tokens.requires_grad_(False)")
FLAGS = ["--learning_rate", 1e-5, "--warmup_steps", 0, "--max_steps", 3, "--weight_decay", 0]


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
    printed = train(project, output, code, flags=FLAGS)
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
    more = [*FLAGS, "--max_steps", 4, "--accept_changes", "true"]
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
