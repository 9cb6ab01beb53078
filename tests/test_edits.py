"""Usual edits of a task, each as its owner would make it: tests/edits/NN.patch.

Each takes few lines and applies. The one whose rows depend on each other keeps the promises. That
of docs/from-trainer.md has a collator of transformers; the tenth edit, of train.py, is in
test_cookbook.py.
"""

import itertools
import math
import shutil

import pytest
import torch
from transformers import LlamaForCausalLM, T5ForConditionalGeneration

from conftest import ROOT, SOURCE, bake, lines, load_module, write_table
from refusals import cases
from samestep.step.seeds import seed_micro_batch
from small_models import new_model
from test_cookbook import apply
from test_tasks import BY_NAME, STEPS, check_two_processes_and_a_lost_half

EDITS = cases("edits")
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
    assert "was trained with other pretrained weights" in said


PAIRS = [(WORDS[i % 17], WORDS[i * (1 + i % 2) % 17]) for i in range(80)]


# Keeps what the loop gets for a step.
KEEP = """
import torch, train
next_step = train.Training.next_step
def kept(training, number, last):
    step = next_step(training, number, last)
    torch.save([(each.number, each.batch) for each in step.micro_batches], "step.pt")
    return step
train.Training.next_step = kept
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
