"""Rows are independent, and labels are no copies: what the checks at the start find."""

import re
import shutil

import pytest

from conftest import ROOT, copy_until, lines
from refusals import cases
from test_prepared import make_texts


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
WRONG = cases("wrong_tasks")["probes"]


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_task_ends_before_the_first_step(project, tmp_path, name):
    """One that takes the mean on two processes."""
    said, flags, code = WRONG[name].values()
    printed = train(project, tmp_path / "run", code, 1 + (name == "mean"), [2], flags)
    assert len(re.findall(said, printed)) == 1, printed


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
