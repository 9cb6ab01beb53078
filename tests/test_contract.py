"""What task.py gives wrongly is one line that names the function, before hours are spent: also
where rows depend on each other, or labels are copies. What --check shows.
"""

import re
import shutil
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from conftest import ROOT, before_calls, copy_until, lines, train_module
from refusals import cases, refused
from samestep.base import garbage
from samestep.contract import contract
from samestep.prepared import preview
from samestep.processes import mesh
from samestep.step import inputs, monitor, samples
from samestep.step.plan import StepPlan
from samestep.step.step import Step
from small_models import word_tokenizer
from test_prepared import make_texts

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
CHECKS["batch"] = samples.plain_batch
CHECKS["views"] = lambda value: contract.read_views(SimpleNamespace(views=lambda: value), None)


def test_what_a_function_gives_wrongly_is_one_line():
    for check, value, said in GIVEN:
        with refused(said):
            CHECKS[check](value)


OWN = torch.Generator()  # what nobody seeds
SEEDED = lambda: torch.Generator().manual_seed(0)  # noqa: E731


def kept(rows, name, make):
    """What a dataset keeps by this name, made when it is asked for first."""
    found = rows.__dict__.setdefault("kept", {})
    return found[name] if name in found else found.setdefault(name, make())


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
    (
        "Numbers.__getitem__",
        lambda rows, _: CHANGING | {"x": torch.rand(8, generator=kept(rows, "own", SEEDED))},
        "has a generator of its own",
    ),
    (
        "Numbers.__getitem__",
        lambda rows, i: kept(rows, i, lambda: CHANGING | {"x": torch.rand(8)}),
        "keeps what it drew, or has",
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


@pytest.mark.parametrize("chosen", [garbage.SELDOM, 5000])
def test_garbage_is_collected_as_usual_or_as_task_py_says(quick, tmp_path, chosen):
    """From the moment at which the model is built."""
    show, place = "import gc; print('collects after', gc.get_threshold()[0])", "task.loss_sum"
    build = f"import gc; gc.set_threshold(gc.get_threshold()[0] // {garbage.SELDOM} * {chosen})"
    before = before_calls("task.build_model", build) + before_calls(place, show)
    printed = quick("--output_dir", tmp_path, "--max_steps", 1, "--warmup_steps", 0, before=before)
    wanted = garbage.USUAL[0] if chosen == garbage.SELDOM else chosen
    assert {*re.findall(r"collects after (\d+)", printed)} == {str(wanted)}


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
            watch.steps.append(step)
        found = watch.read()[0]["loss"]
    return found


def test_losses_are_added_in_the_order_of_the_micro_batches_whoever_computed_them():
    """In float64, where 2**60 + 1 is 2**60: another order gives another sum."""
    values = [1.0, 2.0**60, 1.0, -(2.0**60), 3.0]
    for shares in ((5,), (2, 3), (1, 1, 3), (4, 0, 1)):
        assert losses_of_steps(values, shares) == (3.0 + 6.0) / 8
    assert losses_of_steps(values[::-1], (2, 3)) == (1.0 + 2.0) / 8


def test_a_check_shows_a_row_and_a_batch_but_not_where_a_launcher_asks(quick, tmp_path):
    flags = ["--output_dir", tmp_path / "run", "--check", "--max_steps", 20]
    *shown, last = quick(*flags).splitlines()
    assert shown[0].startswith("row ") and "  x: float32 (8, 8)" in shown
    assert "a batch of 8 rows:" in shown
    assert shown[-1] == "  17 items in the loss; a run prints the loss per item"
    assert last.startswith("checked: ")
    assert quick(*flags, env={"LAUNCHING": "1"}).splitlines() == [last]


def test_tokens_are_decoded_and_all_fits_a_screen(tmp_path):
    word_tokenizer(["<unk>", "red", "apples"]).save_pretrained(tmp_path)
    row = {"input_ids": [1, 2, 1], "labels": [-100, 2, -100], "uneven": [[1], [1, 2]]}
    row |= {"text": "long\x1b " * 100, "half": torch.zeros(2, dtype=torch.bfloat16)}
    row |= {f"more_{i}": i for i in range(9)}
    samples = [(7, row), (9, row)]
    task = SimpleNamespace(
        UNIT="target_tokens",
        collate=lambda rows: {
            f"n{i}": torch.zeros(len(rows), 5, dtype=torch.int32) for i in range(9)
        },
        count=lambda batch: 1234,
    )
    shown = preview.describe_samples(samples, task, SimpleNamespace(folder=tmp_path))
    assert shown[:3] == [
        "row 9 to train on:",
        "  input_ids: int64 (3,) 'red apples red'",
        "  labels: int64 (3,) 'apples'",
    ]
    assert "  and 8 more" in shown and "  n5: int32 (2, 5)" in shown and "\x1b" not in str(shown)
    assert shown[-1].startswith("  1,234 target tokens in the loss; ")
    assert len(shown) < 24 and max(map(len, shown)) <= 122


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project whose task is tests/tasks/texts.py; its data is prepared once."""
    return make_texts(tmp_path_factory.mktemp("probes"))


LOSS = """

import torch

def logits_of(model, batch):
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    return model(**inputs, use_cache=False).logits.float()

def loss_of(logits, batch, **options):
    labels = batch["labels"][:, 1:].flatten()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels, **options)
"""


def train(project, output, code, processes=1, codes=(0,), flags=(), **options):
    """What a run of one step prints, with this code at the end of task.py."""
    task = project.path / "task.py"
    shutil.copy(ROOT / "tests" / "tasks" / "texts.py", task)
    with open(task, "a") as file:
        file.write(f"{LOSS}\n\n{code}")
    flags = ("--output_dir", output, "--max_steps", 1, *flags)
    return project.train(processes, *flags, codes=codes, **options)


MEAN = "def loss_sum(model, batch):\n    return loss_of(logits_of(model, batch), batch)\n"
NOISE = """
def loss_sum(model, batch):
    logits = logits_of(model, batch)
    return loss_of(logits + torch.randn_like(logits), batch, reduction='sum')
"""
DEPENDENT = "together, but"
WRONG = cases("wrong_tasks")


@pytest.mark.parametrize("name", WRONG["probes"])
def test_a_wrong_task_ends_before_the_first_step(project, tmp_path, name):
    """One that takes the mean on two processes."""
    said, flags, code = WRONG["probes"][name].values()
    printed = train(project, tmp_path / "run", code, 1 + (name == "mean"), [2], flags)
    assert len(re.findall(said, printed)) == 1, printed


@pytest.mark.parametrize("name", WRONG["tiny"])
def test_a_wrong_task_reaches_no_checkpoint(tiny, tmp_path, output, name):
    said, flags, steps, code = WRONG["tiny"][name].values()
    project = tiny.copied(tmp_path, code)
    printed = project.train(2, "--output_dir", output, *flags.split(), codes=[2])
    assert printed.count(said) == 1 and len(lines(output, "loss")) == steps
    assert not [*output.glob("checkpoints/step-*")]


def test_a_token_that_ends_texts_and_never_has_a_label_is_said(project, tmp_path):
    """The pad token of this task ends texts, so that its collator gives no end a label."""
    ending = (
        "def collate(rows, data):\n"
        "    tokenizer = AutoTokenizer.from_pretrained(data.folder)\n"
        "    end = tokenizer.eos_token_id\n"
        "    rows = [{'input_ids': [*row['input_ids'], end]} for row in rows]\n"
        "    {own}\n"
        "    return DataCollatorForLanguageModeling(tokenizer, mlm=False)(rows)\n"
    )
    known = (
        "built = build_model\n\n"
        "def build_model(cfg, data):\n    model = built(cfg, data)\n"
        "    model.generation_config.eos_token_id = [1000, 0]\n    return model\n\n\n"
    )
    said = "no label is a token that ends texts (eos_token_id 0, 1000)"
    for folder, own, times in [("a", "pass", 1), ("b", "tokenizer.pad_token = 'e'", 0)]:
        printed = train(project, tmp_path / folder, known + ending.replace("{own}", own), 2)
        assert printed.count(said) == times


def test_noise_is_said_once(project, tmp_path):
    printed = train(project, tmp_path, NOISE, 2)
    assert printed.count("task.loss_sum draws random numbers without a row's generator") == 1


def test_intent_is_said_once_and_the_loss_per_item_also_there(project, tmp_path):
    """New weights give the logarithm of the number of tokens; a mean as a sum shows as a part."""
    found = []
    for folder, code in [("a", ""), ("b", f"{MEAN}\n\nrows_depend = True\n")]:
        printed = train(project, tmp_path / folder, code, 2)
        depend = "rows_depend: it is not checked that rows are independent"
        assert printed.count(depend) == (folder == "b")
        ((loss, more),) = re.findall(r"loss per item ([\d.]+) \(4 rows\)(.*)", printed)
        assert bool(more) == (folder == "b")
        found.append(float(loss))
    assert found[0] == pytest.approx(lines(tmp_path / "a", "loss")[0]["loss"], rel=0.05)
    assert found[1] < found[0] / 4


def test_a_run_that_resumes_is_warned_and_not_ended(project, tmp_path):
    """A model that is near its reference has small differences of large sums, which round."""
    flags = ["--max_steps", 2, "--save_every", 1]
    train(project, tmp_path / "run", "", flags=flags)
    half = copy_until(tmp_path / "run", 1, tmp_path / "half")
    told = "from samestep.base import run_folder as r; write = r.write_status; "
    told += "r.write_status = lambda o, *s, **k: [print('state', *s), write(o, *s, **k)]"
    printed = train(project, half, MEAN, flags=flags, before=told)
    assert "state running" in printed and "state finished" in printed
    assert re.search(f"warning: task.loss_sum is .* {DEPENDENT}", printed), printed


def test_under_autocast_it_is_a_warning(project, tmp_path):
    bf16 = {"ACCELERATE_MIXED_PRECISION": "bf16"}
    printed = train(project, tmp_path / "a", MEAN, env=bf16)
    assert re.search(f"warning: task.loss_sum is .* {DEPENDENT}", printed)
    printed = train(project, tmp_path / "b", "", env=bf16)
    assert DEPENDENT not in printed and "warning: task" not in printed, printed
