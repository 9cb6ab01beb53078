"""Checks of the core: DDP's buckets after a start, and processes that are no longer alike."""

import contextlib
import copy
from types import SimpleNamespace

import pytest
import torch

from conftest import kill_after, lines
from same import check_same
from samestep.processes import alike
from samestep.processes.mesh import Layout


def facts_of(model):
    """What one of two processes gathers about its weights."""
    found = []
    ranks = SimpleNamespace(layout=Layout(2), gather=lambda facts: found.append(facts) or [facts])
    alike.check_alike(ranks, model, "")
    return found[0]


@pytest.mark.parametrize(
    ("kind", "factor", "refused"),
    [("", 1, False), ("", 1 + 1e-6, True), ("b", 1 + 1e-6, False), ("b", 1.01, True)],
)
def test_weights_of_two_kinds_of_devices_are_compared_by_their_sums(kind, factor, refused):
    model = torch.nn.Linear(3, 4)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(factor)
    own, *sums = facts_of(other)
    both = [facts_of(model), (kind or own, *sums)]
    ranks = SimpleNamespace(layout=Layout(2), gather=lambda _: both)
    expected = pytest.raises(ValueError, match="after step 3 process 1 has other weights")
    with expected if refused else contextlib.nullcontext():
        alike.check_alike(ranks, model, "after step 3")


WIDE = """

def build_model(cfg, build=build_model):
    model = build(cfg)
    layers = [torch.nn.Linear(cfg.width, cfg.width) for _ in range(6)]
    for place, layer in enumerate(layers):
        model.insert(2 + place, layer)
    return model
"""


def test_three_processes_resume_bit_for_bit(tiny, tmp_path):
    """DDP chooses its buckets before the first step of each start: 12 steps, against 5 and 7."""
    project = tiny.copied(tmp_path, WIDE)
    flags = ["--save_every", 5, "--eval_every", 0, "--output_dir"]
    project.train(3, *flags, tmp_path / "whole")
    first = kill_after(tmp_path / "run", 5)
    project.train(3, *flags, tmp_path / "run", before=first, codes=[-9, 1])
    project.train(3, *flags, tmp_path / "run")
    check_same(tmp_path / "whole", tmp_path / "run")


ASTRAY = """

def loss_sum(model, batch, compute=loss_sum):
    if RANK == 1 and model.training and len(batch["x"]) == SIZE:
        with torch.no_grad():
            model[0].bias.add_(1e-6)
    return compute(model, batch)
"""


def test_a_process_that_goes_astray_reaches_no_checkpoint(tiny, tmp_path):
    project = tiny.copied(tmp_path, ASTRAY.replace("SIZE", "2"))
    printed = project.train(2, "--output_dir", tmp_path / "run", codes=[2])
    assert "after the first step process 1 has other weights than process 0" in printed
    assert "Traceback" not in printed and len(lines(tmp_path / "run", "loss")) == 1
    assert not [*(tmp_path / "run").glob("checkpoints/step-*")]
