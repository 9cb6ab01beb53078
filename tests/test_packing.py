"""packing.py: states of schedulers and other objects come back bit for bit, through JSON."""

import json
from collections import Counter, deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.optim.lr_scheduler as rates
import transformers
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from samestep.processes.mesh import Layout
from samestep.processes.ranks import Ranks
from samestep.state import optimizers, packing, tensor_files, weights

ONE = Ranks(Layout())


SCHEDULERS = {
    "LambdaLR": lambda o: rates.LambdaLR(o, lambda epoch: 0.95**epoch),
    "MultiStepLR": lambda o: rates.MultiStepLR(o, [3, 7, 7, 12], 0.5),
    "OneCycleLR": lambda o: rates.OneCycleLR(o, 0.1, total_steps=30),
    "SequentialLR": lambda o: rates.SequentialLR(
        o, [rates.LinearLR(o, 0.1, 1, 5), rates.CosineAnnealingLR(o, 20)], [5]
    ),
    "ChainedScheduler": lambda o: rates.ChainedScheduler(
        [rates.LinearLR(o, 0.1, 1, 5), rates.ExponentialLR(o, 0.95)], optimizer=o
    ),
    "ReduceLROnPlateau": lambda o: rates.ReduceLROnPlateau(o, patience=1),
    "SWALR": lambda o: SWALR(o, 0.01, 5),
    "cosine": lambda o: transformers.get_cosine_schedule_with_warmup(o, 4, 20),
}


def build(make, kind):
    """A model, its optimizer, a scheduler and an average of the weights, as a script has them."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    options = {"betas": (0.9, 0.99)} if kind is torch.optim.AdamW else {"momentum": 0.9}
    optimizer = kind(model.parameters(), lr=0.1, **options)
    scheduler = make(optimizer)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    accelerator = SimpleNamespace(
        scaler=None, deepspeed_plugin=None, is_main_process=True, device=None
    )
    accelerator._custom_objects, accelerator._schedulers = [average], [scheduler]
    accelerator.unwrap_model = lambda module, keep_torch_compile: module
    return weights.TrainingState(accelerator, model, optimizer, ONE, sets_lr=False)


def train(state, first, last):
    """Of each step: settings of the optimizer, weights and their average."""
    found = []
    for step in range(first, last):
        for p in state.module.parameters():
            p.grad = torch.full_like(p, 0.1 * (step + 1))
        state.optimizer.step()
        scheduler = state.accelerator._schedulers[0]
        if isinstance(scheduler, rates.ReduceLROnPlateau):
            scheduler.step(1.0 / (1 + step // 3))
        else:
            scheduler.step()
        average = state.accelerator._custom_objects[0]
        average.update_parameters(state.module)
        group = {n: v for n, v in state.optimizer.param_groups[0].items() if n != "params"}
        values = [p.tolist() for each in (state.module, average) for p in each.parameters()]
        found.append((repr(group), values))
    return found


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_scheduler_and_an_average_come_back_bit_for_bit(tmp_path, name, kind):
    """OneCycleLR changes AdamW's betas, which are a tuple."""
    make = SCHEDULERS[name]
    whole = train(build(make, kind), 0, 16)
    state = build(make, kind)
    assert train(state, 0, 9) == whole[:9]
    tensors, entries = state.collect(0)
    tensor_files.write_share(tensor_files.take_share(tensors, ONE), tmp_path)
    about = {"optimizer": optimizers.settings_as_text(state.settings), **entries}
    saved = json.loads(json.dumps(about | {"hardware": {"processes": 1}}))
    state = build(make, kind)
    state.load(tmp_path, saved, saved)
    assert train(state, 9, 16) == whole[9:]


def test_what_is_packed_is_what_comes_back():
    state = {
        "none": None, "flag": True, "text": "a\ud800", "big": 2**80, "tiny": -0.0, 3: (1.5, [2]),
        (1, "a"): {}, "counts": Counter([3, 7, 7]), "inf": float("-inf"), "numpy": np.float32(0.1),
        "weights": torch.arange(3.0), 1: torch.ones(2), "1": torch.zeros(2),
        "queue": deque([1, torch.ones(1)]), "set": {3, "a"}, "bytes": b"\xff", "complex": 1 - 2j,
        "array": np.arange(2.0), "generator": torch.Generator().manual_seed(7).get_state(),
    }  # fmt: skip
    packed, tensors = packing.pack(state, "x")
    assert {*tensors} == {*packing.tensor_names(packed)} == {
        "x.weights", "x.1", "x.1'", "x.queue.1", "x.array", "x.generator"
    }  # fmt: skip
    found = packing.unpack(json.loads(json.dumps(packed)), tensors)
    assert [repr(each) for each in found] == [repr(each) for each in state]
    state["numpy"] = state["numpy"].item()
    assert found.pop("set") == state.pop("set")  # of which the order differs between processes
    assert repr(found) == repr(state) and type(found["counts"]) is Counter


@pytest.mark.parametrize("value", [object(), np.array(["a"]), torch.float32])
def test_what_cannot_be_packed_is_named(value):
    with pytest.raises(ValueError, match=r"^registered.0.bag.0 is a \w+; a checkpoint holds"):
        packing.pack({"bag": [value]}, "registered.0")
