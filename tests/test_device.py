"""How a device is told to compute, and what happens while it does."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from conftest import bake, lines, write_table
from refusals import cases
from same import check_same_curve
from samestep.launch import device


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
