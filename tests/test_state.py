"""What a checkpoint holds, and that all of it comes back: on its own, without a run."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

from conftest import read_checkpoint, read_weights
from samestep.processes import mesh
from samestep.processes.ranks import Ranks
from samestep.state import optimizers, tensor_files, weights
from samestep.step.model import TaskModule

ONE = Ranks(mesh.Layout())  # the ranks of a run of one process


class Odd(torch.nn.Module):
    """All kinds of tensors that a model may have."""

    def __init__(self, seed, frozen=0.5):
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        whole = torch.randn(12, generator=draw)
        self.embedding, self.head = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight  # tied
        self.scale = torch.nn.Parameter(torch.randn((), generator=draw))
        self.nothing = torch.nn.Parameter(torch.zeros(0, 3))
        self.turned = torch.nn.Parameter(torch.randn(3, 4, generator=draw).t())
        self.bf16 = torch.nn.Parameter(torch.randn(7, generator=draw).bfloat16())
        self.base = torch.nn.Parameter(torch.full((3,), frozen, dtype=torch.complex64), False)
        self.register_buffer("first", whole[:6])  # three views of one storage
        self.register_buffer("second", whole[6:])
        self.register_buffer("same", whole[:6].view(2, 3))
        self.register_buffer("table", torch.randint(9, (2, 2), generator=draw))
        self.register_buffer("flags", torch.rand(5, generator=draw) < 0.5)
        self.register_buffer("wide", torch.randn(3, generator=draw, dtype=torch.float64))
        self.register_buffer("waves", torch.randn(3, generator=draw, dtype=torch.complex64))
        self.register_buffer("mask", torch.full((2,), -torch.inf))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


class Counting(torch.optim.SGD):
    """Its state has numbers, None, a tensor of another shape and type, and fp32 of bf16 weights,
    which torch would round."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["tries"] = group.get("tries", 0) + 1
            for p in group["params"]:
                state = self.state[p]
                state["count"], state["share"] = state.get("count", 0) + 1, 1 / 3
                state["last"], state["flag"] = None, True
                state["places"] = torch.arange(4, dtype=torch.int16)
                state["mean"] = state.get("mean", torch.zeros(p.shape)) + 1 / 3


KINDS = [Counting, torch.optim.AdamW]


def state_of(model, optimizer):
    module = TaskModule(model)
    accelerator = SimpleNamespace(
        scaler=None, deepspeed_plugin=None, is_main_process=True, device=None
    )
    accelerator._custom_objects, accelerator._schedulers = [], []
    accelerator.unwrap_model = lambda module, keep_torch_compile: module
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=0.1)
    settings = optimizers.optimizer_settings(optimizer)
    return weights.TrainingState(accelerator, module, optimizer, ONE, settings)


def train(state, steps):
    for step in range(steps):
        for group in state.optimizer.param_groups:
            for p in group["params"]:
                if p.dim() or step:  # `scale` has no gradient at first
                    p.grad = torch.full_like(p, 0.1 * (step + 1))
        state.optimizer.step()
        state.optimizer.zero_grad()


def manifest_of(state):
    manifest = {"optimizer": optimizers.settings_as_text(state.settings)}
    manifest["frozen_weights"] = weights.frozen_digest(state.module.model)
    manifest |= {"hardware": {"processes": 1}, **state.collect(0)[1]}
    return json.loads(json.dumps(manifest))


def save(state, folder):
    folder.mkdir(exist_ok=True)
    tensor_files.write_share(tensor_files.take_share(state.collect(0)[0], ONE), folder)
    return manifest_of(state)


def plain(value):
    """A state as something that can be compared bit by bit."""
    if torch.is_tensor(value):
        value = value.detach()
        values = value.contiguous().flatten().view(torch.uint8).tolist() if value.dim() else value
        return str(value.dtype), [*value.shape], values if value.dim() else value.item()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items() if each is not None}
    return [plain(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("optimizer", KINDS)
def test_all_that_training_needs_comes_back_bit_by_bit(tmp_path, optimizer):
    old = state_of(Odd(0), optimizer)
    train(old, 2)
    manifest = save(old, tmp_path)
    model = Odd(1)
    draws, scratch = torch.get_rng_state(), model.scratch.fill_(7)
    new = state_of(model, optimizer)
    new.load(tmp_path, manifest, manifest)
    assert torch.equal(torch.get_rng_state(), draws) and scratch.tolist() == [7, 7]
    assert plain(new.module.state_dict()) == plain(old.module.state_dict())
    for state in (old, new):
        train(state, 2)
    assert plain(new.optimizer.state_dict()) == plain(old.optimizer.state_dict())
    assert plain(new.module.state_dict()) == plain(old.module.state_dict())
    again = tmp_path / "again"
    save(old, again), save(new, tmp_path / "new")
    name = "rank-00000.safetensors"
    assert (again / name).read_bytes() == (tmp_path / "new" / name).read_bytes()
    assert "model.scratch" not in new.collect(0)[0]
    scratch.add_(1)  # no state_dict has it
    manifest = save(new, tmp_path / "changed")
    other = state_of(Odd(2), optimizer)
    other.load(tmp_path / "changed", manifest, manifest)
    assert torch.equal(other.module.model.scratch, scratch)


def test_settings_that_the_optimizer_has_restored_are_those_of_now(tmp_path):
    """Those that were not changed stay as restored: some optimizers keep a state among them."""

    def build(**settings):
        kind = lambda groups, lr: torch.optim.AdamW(groups, lr, **settings)  # noqa: E731
        return state_of(torch.nn.Linear(2, 1), kind)

    old = build(betas=(0.9, 0.99), weight_decay=0.1)
    restored = {"state_of_its_own": 7, "eps": 0.1, "lr": 3.0, "tensor": torch.tensor([2.0, 0.1])}
    old.optimizer.param_groups[0].update(restored)
    manifest = save(old, tmp_path)
    new = build(betas=(0.5, 0.99), weight_decay=0.2)
    new.load(tmp_path, manifest, manifest)
    group = new.optimizer.param_groups[0]
    assert group["betas"] == (0.5, 0.99) and group["weight_decay"] == 0.2
    assert group["state_of_its_own"] == 7 and group["eps"] == 0.1 and group["lr"] == 0.1
    assert torch.equal(group["tensor"], restored["tensor"])
    new = build(eps=0.3, weight_decay=0.1)
    new.load(tmp_path, manifest, manifest)
    assert new.optimizer.param_groups[0]["eps"] == 0.3  # changed in the code since then
    with pytest.raises(ValueError, match="and build_optimizer gives 'SGD'"):
        state_of(torch.nn.Linear(2, 1), torch.optim.SGD).load(tmp_path, manifest, manifest)


class Merged(torch.optim.SGD):
    """Its `state` is made anew each time, and keeps nothing that is loaded."""

    @property
    def state(self):
        return {}

    @state.setter
    def state(self, state):
        pass


def test_a_loaded_state_that_is_not_kept_is_refused(tmp_path):
    old, new = state_of(Odd(0), torch.optim.AdamW), state_of(Odd(1), Merged)
    train(old, 3)
    save(old, tmp_path)
    with pytest.raises(weights.UserError, match="Merged does not keep the state of a checkpoint"):
        new.load_moments(tensor_files.TensorReader(tmp_path))


def test_a_checkpoint_is_a_file_of_tensors_under_the_names_of_the_task(tmp_path):
    state = state_of(Odd(0), torch.optim.AdamW)
    train(state, 1)
    save(state, tmp_path)
    (file,) = tmp_path.iterdir()
    with safe_open(file, "pt") as opened:
        assert {*opened.metadata()} == {"DCP_SHARDING_INFO"}
    # Tied weights once, frozen ones not at all.
    assert {*read_weights(tmp_path)} == {*Odd(0).state_dict()} - {"base", "head.weight"}
    others = {n.rpartition(".")[0] for n in read_checkpoint(tmp_path) if not n.startswith("model.")}
    trained = [n for n, p in Odd(0).named_parameters() if p.requires_grad and n != "scale"]
    assert others == {f"state.{name}" for name in trained}


def test_a_mask_of_infinities_may_be_saved_and_a_buffer_with_nan_not():
    state = state_of(Odd(0), torch.optim.AdamW)
    train(state, 2)
    state.check_finite(state.collect(0)[0])
    model = state.module.model
    moments = state.optimizer.state[model.scale]["exp_avg"]
    cases = [(moments, torch.inf, "exp_avg of scale"), (model.mask, torch.nan, "mask")]
    for values, wrong, name in [*cases, (model.scale.data, torch.inf, "scale")]:
        kept = values.clone()
        values.fill_(wrong)
        with pytest.raises(ValueError, match=f"^{name} is not finite"):
            state.check_finite(state.collect(0)[0])
        values.copy_(kept)


def test_what_does_not_fit_is_named_in_one_line(tmp_path):
    manifest = save(state_of(Odd(0), torch.optim.AdamW), tmp_path)
    wider, thawed = Odd(0), Odd(0)
    wider.bf16 = torch.nn.Parameter(torch.zeros(8))
    thawed.base.requires_grad_(True)
    cases = [
        (Odd(0, frozen=0.5 + 1j), None, "was trained with other frozen weights"),
        (wider, None, "bf16 is (7,) in the checkpoint and (8,) in the model"),
        (thawed, manifest, "base is missing in the checkpoint and (3,) in the model"),
    ]
    for model, now, said in cases:
        state = state_of(model, torch.optim.AdamW)
        before = plain(state.module.state_dict())
        with pytest.raises(ValueError, match=re.escape(said)):
            state.load(tmp_path, manifest, now or manifest_of(state))
        assert plain(state.module.state_dict()) == before


def test_the_scaler_and_registered_objects_come_back(tmp_path):
    def prepared(scale):
        state = state_of(Odd(0), torch.optim.AdamW)
        state.accelerator.scaler = scale and torch.amp.GradScaler("cpu", init_scale=scale)
        state.accelerator._custom_objects = [torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(3)]
        return state

    old, new, fp32 = prepared(2.0**15), prepared(1.0), prepared(None)
    manifest = save(old, tmp_path)
    new.load(tmp_path, manifest, manifest)
    assert new.accelerator.scaler.state_dict() == old.accelerator.scaler.state_dict()
    for mine, theirs in zip(*(s.accelerator._custom_objects for s in (new, old)), strict=True):
        assert plain(mine.state_dict()) == plain(theirs.state_dict())
    new.accelerator._custom_objects.append(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="program of registered.0, registered.1, registered.2"):
        new.load(tmp_path, manifest, manifest)
    manifest = save(fp32, tmp_path / "fp32")
    with pytest.raises(ValueError, match="was not trained in fp16"):
        old.load(tmp_path / "fp32", manifest, manifest)
