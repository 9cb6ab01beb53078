"""Usual edits of a task, each as its owner would make it: tests/edits/NN.patch.

Each takes few lines and applies. The one whose rows depend on each other keeps the promises, as the
task of docs/from-trainer.md, with a collator of transformers; the tenth edit, of train.py, is in
test_cookbook.py.
"""

import itertools
import math
import re
import shutil

import datasets
import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaForCausalLM,
    T5ForConditionalGeneration,
)

from conftest import ROOT, SOURCE, bake, lines, load_module, read_weights, write_table
from refusals import cases
from samestep.step.seeds import seed_micro_batch
from small_models import new_model, word_tokenizer
from test_cookbook import apply
from test_tasks import BY_NAME, STEPS, check_two_processes_and_a_lost_half

EDITS = cases("edits")
SIX_STEPS = STEPS
STEPS = [*STEPS, "--micro_batch_size", 4, "--warmup_steps", 2]
STEPS += ["--task.data", "mine.jsonl", "--check_export", "false"]
WORDS = "a tall old man sold red apples and then ran home to his small house by the sea".split()


def read(name):
    """The patch of an edit."""
    return (ROOT / "tests" / "edits" / f"{name}.patch").read_text("utf-8")


def added_lines(patch):
    return sum(each.startswith("+") and not each.startswith("+++") for each in patch.split("\n"))


def test_a_teacher_is_not_saved_and_its_bytes_are_known(tmp_path):
    """The ninth edit."""
    base = bake(tmp_path, task="causal_lm", tracker="none")
    project = apply(base, read("09"), tmp_path / "project")
    texts = [" ".join(WORDS[i * k % 17] for k in range(1, 9 + i % 29)) for i in range(120)]
    write_table(project.path, [{"text": text} for text in texts], name="mine")
    teacher = new_model("Llama", vocab_size=300, attention_dropout=0.5)  # in eval mode it has none
    teacher.save_pretrained(project.path / "teacher")
    flags = [*STEPS, *BY_NAME["causal_lm"].flags(context_length=32)]
    whole = tmp_path / "whole"
    project.train(1, *flags, "--output_dir", whole)
    saved = LlamaForCausalLM.from_pretrained(whole / "model")
    assert not any("teacher" in key for key, _ in saved.named_parameters())
    last = lines(whole, "eval_loss")[-1]
    assert last["perplexity"] == pytest.approx(math.exp(last["eval_loss"]))
    assert last["eval_loss"] > 4 > last["divergence"] > 0
    changed = LlamaForCausalLM.from_pretrained(project.path / "teacher")
    changed.lm_head.weight.data[0, 0] += 1
    changed.save_pretrained(project.path / "teacher")
    shutil.rmtree(whole / "checkpoints" / "step-00000006")
    said = project.train(1, *flags, "--output_dir", whole, codes=[2])
    assert "was trained with other frozen weights" in said


PAIRS = [(WORDS[i % 17], WORDS[i * (1 + i % 2) % 17]) for i in range(80)]


# Keeps what the loop gets for a step.
KEEP = """
import torch
from samestep.step.loader import StepLoader
next_step = StepLoader.next_step
def kept(loader):
    micro_batches, facts = next_step(loader)
    torch.save([(each.number, each.batch) for each in micro_batches], "step.pt")
    return micro_batches, facts
StepLoader.next_step = kept
"""


def test_a_contrastive_loss_over_the_global_batch(tmp_path):
    """The eighth edit, by GradCache: any cut trains the same; one step is compared with autograd
    through the whole batch, under dropout."""
    base = bake(tmp_path, task="seq2seq", tracker="none")
    project = apply(base, read("08"), tmp_path / "project")
    rows = [{"source": f"the {a} is here {i}", "target": b} for i, (a, b) in enumerate(PAIRS)]
    write_table(project.path, rows, name="mine")
    flags = [*STEPS, "--task.vocab_size", 300, "--task.hidden_size", 16, "--task.num_layers", 1]
    check_two_processes_and_a_lost_half(project, tmp_path, *flags)
    output = tmp_path / "hand"
    flags += ["--micro_batch_size", 8, "--output_dir", output]
    still = ["--max_steps", 1, "--learning_rate", 0, "--task.dropout", 0.2]  # exports first weights
    project.train(1, *flags, *still, before=KEEP)
    ((number, batch),) = torch.load(project.path / "step.pt")
    model = T5ForConditionalGeneration.from_pretrained(output / "model").train()
    seed_micro_batch(0, 1, number)
    sources, targets = load_module("edited", project.path / "task.py").embed(model, batch).unbind(1)
    scores = sources @ targets.T / 0.05
    loss = (scores.logsumexp(1) - scores.diag()).mean()
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    (line,) = lines(output, "loss")
    assert line["loss"] == pytest.approx(loss.item(), rel=1e-5)
    norm = torch.nn.utils.get_total_norm(grads)
    assert line["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)

    with open(project.path / "task.py", "a") as file:  # negatives from the micro-batch alone
        file.write("\n\ndef loss_sum(model, batch):\n")
        file.write("    return row_losses(embed(model, batch)).sum()\n")
    said = project.train(1, *flags, "--output_dir", tmp_path / "naive", codes=[2])
    assert "task.loss_sum is " in said and "as the sum of each alone" in said


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_takes_few_lines_applies_and_is_shown_by_the_page_of_tasks(name):
    most, task = EDITS[name].values()
    assert added_lines(read(name)) <= most
    hunks = [hunk.rstrip("\n").split("\n")[1:] for hunk in read(name).split("\n@@")[1:]]
    files = [task, f"{SOURCE}/train.py"]
    sources = [(ROOT / file).read_text("utf-8") for file in files]
    for hunk in hunks:
        kept = itertools.takewhile(lambda line: not line.startswith("--- a/"), hunk)
        old = "\n".join(line[1:] for line in kept if line[:1] != "+")
        assert any(old in source for source in sources), old
    shown = ["\n".join(line for line in hunk if line[:1] in ("+", "-")) for hunk in hunks]
    page = (ROOT / SOURCE / "docs" / "task.md").read_text()
    assert "```diff\n" + "\n...\n".join(shown) + "\n```" in page


PAGE = (ROOT / "docs" / "from-trainer.md").read_text(encoding="utf-8")
TASK = "\n\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S))
REVIEW = "bad good it was not a film of the year and I saw no other".split()
SMALL_BERT = [*SIX_STEPS, "--micro_batch_size", 4, "--warmup_steps", 1, "--learning_rate", 1e-3]
SMALL_BERT += ["--task.model_name_or_path", "small"]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project with the task of the page, its reviews, and a small pretrained BERT in bfloat16."""
    baked = bake(tmp_path_factory.mktemp("trainer"), tracker="none", pictures=False)
    (baked.path / "task.py").write_text(TASK)
    (baked.path / "configs" / "train" / "default.yaml").write_text("tracker: none\n")
    vocabulary = ["[PAD]", "[UNK]", *dict.fromkeys(REVIEW)]
    marks = {"pad_token": "[PAD]", "unk_token": "[UNK]", "model_max_length": 12}
    word_tokenizer(vocabulary, **marks).save_pretrained(baked.path / "small")
    model = new_model("Bert", "ForSequenceClassification", vocab_size=len(vocabulary))
    model.to(torch.bfloat16).save_pretrained(baked.path / "small")
    rows = [[REVIEW[i * k % 17 % len(REVIEW)] for k in range(1, 4 + i % 9)] for i in range(90)]
    table = {"text": [" ".join(row) for row in rows], "label": [int("bad" in row) for row in rows]}
    datasets.Dataset.from_dict(table).save_to_disk(baked.path / "reviews")
    return baked


@pytest.mark.slow
def test_the_task_of_the_page_keeps_the_promises(project, tmp_path):
    printed = check_two_processes_and_a_lost_half(project, tmp_path, *SMALL_BERT)
    assert "its rows" not in printed
    assert not [*(project.path / "reviews").glob("cache*")]  # what map has kept is elsewhere
    weights = read_weights(tmp_path / "whole" / "checkpoints" / "step-00000006")
    assert {each.dtype for each in weights.values()} == {torch.float32}
    check_scores(project.path, tmp_path / "whole")


def check_scores(folder, output):
    """The scores of the last line are those of transformers alone on the exported model."""
    rows = datasets.load_from_disk(folder / "reviews").to_list()
    tokenizer = AutoTokenizer.from_pretrained(output / "model")
    model = AutoModelForSequenceClassification.from_pretrained(output / "model").eval()
    (data,) = folder.glob(".cache/data/*/rows/validation")
    held_out = datasets.load_from_disk(data)
    known = {tuple(tokenizer(row["text"], truncation=True)["input_ids"]) for row in rows}
    right, losses = [], []
    for row in held_out:
        assert tuple(row["input_ids"]) in known  # not augmented
        batch = {n: torch.tensor([row[n]]) for n in ("input_ids", "attention_mask", "labels")}
        found = model(**batch)
        losses.append(found.loss.item())
        right.append(int(found.logits.argmax()) == row["labels"])
    scores = lines(output, "eval_loss")[-1]
    assert scores["eval_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert scores["accuracy"] == pytest.approx(sum(right) / len(right))
