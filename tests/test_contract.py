"""What task.py gives wrongly is one line that names the function, before hours are spent."""

import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from conftest import ROOT, lines, train_module
from refusals import refused
from samestep.contract import contract
from samestep.processes import mesh
from samestep.step import inputs, monitor
from samestep.step.plan import StepPlan
from samestep.step.step import Step

ONE = mesh.Layout()  # of the processes: one alone

ONE_TENSOR, HALF = torch.ones(3), torch.ones((), dtype=torch.bfloat16)
SCALAR = "give the sum of the losses, a float32 of shape ()"
QUANTISED = torch.nn.Linear(1, 1)
QUANTISED.is_quantized = True
FROZEN, PART = torch.nn.Linear(1, 1).requires_grad_(False), torch.nn.Linear(1, 1)
PART.weight = torch.nn.Parameter(torch.ones(4, 12)[:, ::2])
GIVEN = [  # a check, what the function of task.py gives, and what is said
    ("metrics", {"loss": 1, "acc": ONE_TENSOR}, "'acc' is a tensor, float32, of shape (3,)"),
    ("metrics", {"loss": 1, "step": 3}, "a score cannot be called 'step'"),
    ("sums", {"loss": HALF}, "rounds no sums: call .float()"),
    ("sums", ONE_TENSOR, "eval_sums returns a tensor, float32, of shape (3,)"),
    ("loss", HALF, f"the loss is a tensor, bfloat16, of shape (); {SCALAR}"),
    ("loss", ONE_TENSOR, f"of shape (3,); {SCALAR}"),
    ("loss", torch.ones(()), "the loss has no gradient"),
    ("model", None, "task.build_model returns None, NoneType; give an nn.Module"),
    ("model", QUANTISED, "a quantized model, whose runs would not resume as they were"),
    ("model", FROZEN, "task.build_model returns a model without a weight that trains"),
    ("model", PART, "task.build_model: the weight weight is a part of another tensor, with gaps"),
    ("count", -1, "count returns -1, int"),
    ("batch", {"names": [0.5]}, "'names[0]' is 0.5, float; give a tensor on the CPU"),
    ("views", ([1], iter([1])), "give datasets with len() and [i]"),
    ("views", ([], [1]), "task.views returns no row to train on; give at least one"),
]
CHECKS = {name: getattr(inputs, f"check_{name}") for name in "sums loss count".split()}
CHECKS |= {"metrics": contract.check_metrics, "model": contract.check_model}
CHECKS["batch"] = inputs.plain_batch
CHECKS["views"] = lambda value: contract.read_views(SimpleNamespace(views=lambda: value), None)


def test_what_a_function_gives_wrongly_is_one_line():
    for check, value, said in GIVEN:
        with refused(said):
            CHECKS[check](value)


OWN = torch.Generator()  # what nobody seeds
CHANGING = {"y": torch.ones(4), "counted": torch.ones(4), "poison": 0.0}
CHECKED = [  # a name in task.py, what takes its place, and what is said
    ("views", None, "task.py has no function prepare_data or views"),
    ("metrics", None, "no function metrics; to write a whole task"),
    ("eval_outputs", lambda model, batch: {}, "is called as metrics(sums, outputs)"),
    ("metrics", lambda sums, outputs: {}, "is called as metrics(sums)"),
    ("build_model", lambda config: None, "build_model(config) is called as build_model(cfg, data)"),
    ("Numbers.sizes", lambda rows: [1, 2], "sizes() of task.views returns an array of shape"),
    ("check_config", lambda cfg: int(f"{cfg.width} wide"), "int() with base 10: '32 wide'"),
    ("TaskConfig", type("TaskConfig", (), {}), "is not a dataclass"),
    (
        "Numbers.__getitem__",
        lambda *_: CHANGING | {"x": torch.rand(8, generator=OWN)},
        "the same samples are another batch the second time",
    ),
    (  # those of the global generators are not seeded there
        "Numbers.__getitems__",
        lambda _, ids: [CHANGING | {"x": torch.rand(8)} for _ in ids],
        "what reads many rows at once (__getitems__) draws none",
    ),
    (  # one row alone stays the same
        "collate",
        lambda rows: {"x": torch.rand(len(rows), generator=OWN), "counted": torch.ones(len(rows))},
        "collate or augment draws anew",
    ),
    (
        "augment",
        lambda row, _: row | {"x": row["x"] + torch.rand(8)},
        "in augment, from its generator",
    ),
]


@pytest.mark.parametrize("name, value, said", CHECKED)
def test_what_the_check_finds(tmp_path, monkeypatch, name, value, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.yaml").touch()
    words = "train.py --config empty.yaml --check --output_dir run --warmup_steps 0".split()
    monkeypatch.setattr(sys, "argv", words)
    with train_module(ROOT / "tests" / "tasks" / "tiny.py") as train:
        owner = train.task.Numbers if "." in name else train.task
        monkeypatch.setattr(owner, name.rpartition(".")[2], value, raising=False)
        with refused(said):
            train.prepare()
    assert not (tmp_path / "run").exists()


RECORDED = """
import task, torch
own, given = task.collate, task.Numbers.__getitem__
task.Numbers.__getitem__ = lambda self, i: {
    **given(self, i), "kind": "validation" if self.first else "training"
}
task.augment = lambda row, generator: {**row, "kind": "augmented " + row["kind"]}
def collate(rows):
    print("collated", len(rows), *{row["kind"] for row in rows}, sep=",", flush=True)
    return own(rows)
task.collate = collate
"""


def test_collate_gets_augmented_rows_for_training_and_validation_rows_as_they_are(quick, tmp_path):
    printed = quick("--output_dir", tmp_path / "run", before=RECORDED)
    found = []
    for part in printed.partition("step 1/12")[::2]:
        batches = [line.split(",")[1:] for line in part.splitlines() if "collated," in line]
        assert all(len(each) == 2 for each in batches)  # of one kind
        found.append(Counter((kind, int(size)) for size, kind in batches))
    start, training = found
    assert {kind for kind, _ in start + training} == {"augmented training", "validation"}
    assert [start["augmented training", 37], start["validation", 11]] == [2, 2]  # compared
    assert start["augmented training", 2] > 4 < start["augmented training", 1]  # probes, and step 1


WARNED = [  # a loss_sum in bf16, and what is said
    ("a[0](a[1]['x']).sum()", "warning: task.loss_sum computes the loss in bfloat16"),
    ("a[0](a[1]['x']).float().sum()", ""),
]


@pytest.mark.parametrize("value, said", WARNED)
def test_a_rounded_loss_is_warned_of(quick, tmp_path, value, said):
    """Outside, accelerate has made the loss float32, and its rounding could not be seen."""
    flags = ["--output_dir", tmp_path, "--max_steps", 1, "--warmup_steps", 0]
    env = {"ACCELERATE_MIXED_PRECISION": "bf16"}
    before = f"import task; task.loss_sum = lambda *a: {value}"
    printed = quick(*flags, before=before, env=env)
    assert said in printed and ("warning: task." in printed) == bool(said)


def test_scores_are_floats_and_may_need_more_rows_than_the_first_batch(quick, tmp_path):
    """A tensor of one number, NumPy's numbers and whole ones are as good as floats."""
    before = "import numpy, task, torch; task.metrics = lambda sums: {'loss': torch.tensor(1.5), "
    before += "'seven': numpy.int64(7), 'yes': True, 'share': 1 / max(0, float(sums['rows']) - 2)}"
    quick("--micro_batch_size", 2, "--output_dir", tmp_path / "run", before=before)
    assert lines(tmp_path / "run", "eval_loss")[-1] == {
        "step": 12, "eval_loss": 1.5, "seven": 7.0, "yes": 1.0, "share": pytest.approx(1 / 9)
    }  # fmt: skip


def losses_of_steps(values, shares):
    """The mean loss of two steps as the last rank reads it, after the others have sent theirs."""
    sent = []
    add = lambda table: sent.append(table) or sum(sent)  # noqa: E731
    ranks = SimpleNamespace(sum_arrays=add, layout=ONE)
    for rank, share in enumerate(shares):
        first = sum(shares[:rank])
        plan = StepPlan(len(values), 1, shares, rank)
        watch = monitor.StepMonitor(SimpleNamespace(scaler=None), ranks, plan, 10)
        for number in (1, 2):
            step = Step(None, number, [], items=4, last=False)
            own = values[first : first + share]
            step.losses, step.norm = [torch.tensor(number * each) for each in own], torch.ones(())
            watch.add(step)
        found = watch.read()[0]["loss"]
    return found


def test_losses_are_added_in_the_order_of_the_micro_batches_whoever_computed_them():
    """In float64, where 2**60 + 1 is 2**60: another order gives another sum."""
    values = [1.0, 2.0**60, 1.0, -(2.0**60), 3.0]
    for shares in ((5,), (2, 3), (1, 1, 3), (4, 0, 1)):
        assert losses_of_steps(values, shares) == (3.0 + 6.0) / 8
    assert losses_of_steps(values[::-1], (2, 3)) == (1.0 + 2.0) / 8
