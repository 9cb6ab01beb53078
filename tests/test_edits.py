"""Usual edits of a task, each as its owner would make it: tests/edits/NN.patch.

Each takes few lines and applies. Six are trained, and keep the promises: one process and two train
the same, and a run that lost its last steps ends with the same bytes. The tenth, of train.py, is in
test_cookbook.py.
"""

import io
import itertools
import json
import math
import shutil
import subprocess

import numpy as np
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from transformers import LlamaConfig, LlamaForCausalLM, T5ForConditionalGeneration

from conftest import ROOT, SOURCE, BakedProject, bake, digest, lines
from samestep.core.batches import seed_micro_batch
from test_cookbook import task_of

# Lines that an edit may add.
LINES = {
    "01": 5,
    "02": 5,
    "03": 11,
    "04": 6,
    "05": 3,
    "06": 10,
    "07": 12,
    "08": 41,
    "09": 15,
    "11": 10,
}
FLAGS = {
    "01": ["--task.data", "mine.jsonl", "--task.rows", "text"],
    "03": ["--task.packing", "best_fit"],
}
SMALL = {"context_length": 32, "vocab_size": 300, "hidden_size": 16, "num_heads": 2}
STEPS = ["--max_steps", 4, "--save_every", 2, "--eval_every", 2, "--log_every", 1]
STEPS += ["--global_batch_size", 8, "--micro_batch_size", 4, "--warmup_steps", 2]
STEPS += ["--keep_checkpoints", 0, "--task.data", "mine.jsonl", "--check_export", "false"]
WORDS = "a tall old man sold red apples and then ran home to his small house by the sea".split()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A project of a language model, with rows and a teacher."""
    project = bake(tmp_path_factory.mktemp("edits"), task="causal_lm", tracker="none")
    rows = []
    for i in range(120):
        text = " ".join(WORDS[(i * k) % 17] for k in range(1, 9 + i % 29))
        rows.append({"title": f"{i}: ", "body": text, "text": text, "stars": i % 5})
    (project.path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    torch.manual_seed(0)
    size = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 32}
    size |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**size, attention_dropout=0.5)  # which a teacher in eval mode has not
    LlamaForCausalLM(config).save_pretrained(project.path / "teacher")
    return project


def read(name):
    """The patch of an edit."""
    return (ROOT / "tests" / "edits" / f"{name}.patch").read_text("utf-8")


def apply(base, name, folder):
    """A copy of the project after an edit."""
    shutil.copytree(base.path, folder)
    project = BakedProject(folder)
    env = project.env(GIT_CEILING_DIRECTORIES=str(folder.parent))
    command = ["git", "apply", "--whitespace=error", "-"]
    options = {"cwd": folder, "env": env, "capture_output": True, "text": True}
    result = subprocess.run(command, input=read(name), **options)
    assert result.returncode == 0, result.stderr
    return project


def added_lines(patch):
    return sum(each.startswith("+") and not each.startswith("+++") for each in patch.split("\n"))


@pytest.mark.parametrize("name", ["01", "03", "09"])
def test_an_edit_keeps_the_promises(base, tmp_path, name):
    project = apply(base, name, tmp_path / "project")
    flags = flags_of(FLAGS.get(name, []))
    said = check_promises(project, tmp_path, flags, resumed=name != "03")
    assert "no label is a token that ends texts" not in said
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "one" / "model")
    assert not any("teacher" in key for key, _ in saved.named_parameters())
    if name == "09":  # the teacher is not saved, but its bytes are known
        last = lines(tmp_path / "one", "eval_loss")[-1]
        assert last["perplexity"] == pytest.approx(math.exp(last["eval_loss"]))
        assert last["eval_loss"] > 4 > last["divergence"] > 0
        changed = LlamaForCausalLM.from_pretrained(project.path / "teacher")
        changed.lm_head.weight.data[0, 0] += 1
        changed.save_pretrained(project.path / "teacher")
        shutil.rmtree(tmp_path / "one" / "checkpoints" / "step-00000004")
        said = project.train(1, *flags_of(), "--output_dir", tmp_path / "one", codes=[2])
        assert "was trained with other pretrained weights" in said


def flags_of(more=()):
    small = [word for key, value in SMALL.items() for word in (f"--task.{key}", value)]
    return [*STEPS, *small, "--task.num_layers", 1, *more]


def check_promises(project, folder, flags, resumed):
    """One process and two train the same; without its last steps a run ends with the same bytes.

    Returns what one process printed.
    """
    said = project.train(1, *flags, "--output_dir", folder / "one")
    project.train(2, *flags, "--output_dir", folder / "two", "--micro_batch_size", 2)
    for key in ("loss", "eval_loss"):
        one, two = (lines(folder / run, key) for run in ("one", "two"))
        assert [each[key] for each in two] == pytest.approx([e[key] for e in one], rel=1e-5)
    if resumed:
        half, kept = folder / "half", "checkpoints/step-00000002"
        shutil.copytree(folder / "one" / kept, half / kept)
        assert "continuing from" in project.train(1, *flags, "--output_dir", half)
        last = "checkpoints/step-00000004"
        assert digest(half / last) == digest(folder / "one" / last)
        weights = "model/model.safetensors"
        assert (half / weights).read_bytes() == (folder / "one" / weights).read_bytes()
    return said


def write_images(folder):
    """A Parquet file with the bytes of images."""
    rows, random = [], np.random.default_rng(0)
    for i in range(60):
        file = io.BytesIO()
        pixels = random.integers(0, 120, (12, 12, 3)) + [120 if i % 3 == c else 0 for c in range(3)]
        Image.fromarray(pixels.astype(np.uint8)).save(file, "PNG")
        rows.append({"image": {"bytes": file.getvalue(), "path": None}, "label": "rgb"[i % 3]})
    (folder / "mine.jsonl").mkdir()
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(rows), folder / "mine.jsonl" / "rows.parquet"
    )
    return ["--task.image_size", 8, "--task.hidden_size", 32, "--task.num_layers", 1]


def write_table(folder):
    random = np.random.default_rng(0)
    lines = [
        "age,height,y",
        *(f"{a},{b},{a - b}" for a, b in random.normal(size=(100, 2)).round(3)),
    ]
    (folder / "mine.jsonl").write_text("\n".join(lines))
    return []


PAIRS = [(WORDS[i % 17], WORDS[i * (1 + i % 2) % 17]) for i in range(80)]
OTHER_TASKS = {"05": write_images, "07": write_table}
# Of those that edit another task than causal_lm.
TASKS = {
    "04": "templates/text_classification/task.py",
    "05": "templates/image_classification/task.py",
    "07": "examples/plain_module.py",
    "08": "templates/seq2seq/task.py",
    "11": "templates/text_classification/task.py",
}


@pytest.mark.parametrize("name", OTHER_TASKS)
def test_an_edit_of_another_task_keeps_the_promises(tmp_path, name):
    if name == "07":
        base = bake(tmp_path, task="causal_lm", tracker="none")
        shutil.copy(ROOT / "examples" / "plain_module.py", base.path / "task.py")
        recipe = base.path / "configs" / "train" / "default.yaml"
        recipe.write_text(recipe.read_text().partition("\ntask:")[0] + "\n")
    else:
        base = bake(tmp_path, task="image_classification", tracker="none")
    project = apply(base, name, tmp_path / "project")
    flags = [*STEPS, *OTHER_TASKS[name](project.path)]
    check_promises(project, tmp_path, flags, resumed=True)
    last = lines(tmp_path / "one", "eval_loss")[-1]
    if name == "07":
        assert last["eval_loss"] < lines(tmp_path / "one", "eval_loss")[0]["eval_loss"]


# Keeps what the loop gets for a step.
KEEP = """
import torch, train
next_step = train.TrainLoader.next_step
def kept(loader):
    found = next_step(loader)
    torch.save(found, "step.pt")
    return found
train.TrainLoader.next_step = kept
"""


def test_a_contrastive_loss_over_the_global_batch(tmp_path):
    """The eighth edit, by GradCache: any cut trains the same; one step is compared with autograd
    through the whole batch, under dropout."""
    base = bake(tmp_path, task="seq2seq", tracker="none")
    project = apply(base, "08", tmp_path / "project")
    rows = [{"source": f"the {a} is here {i}", "target": b} for i, (a, b) in enumerate(PAIRS)]
    (project.path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = [*STEPS, "--task.vocab_size", 300, "--task.hidden_size", 16, "--task.num_layers", 1]
    check_promises(project, tmp_path, flags, resumed=True)
    output = tmp_path / "hand"
    flags += ["--micro_batch_size", 8, "--output_dir", output]
    still = ["--max_steps", 1, "--learning_rate", 0, "--task.dropout", 0.2]  # exports first weights
    project.train(1, *flags, *still, before=KEEP)
    (((number, batch),), _) = torch.load(project.path / "step.pt")
    model = T5ForConditionalGeneration.from_pretrained(output / "model").train()
    seed_micro_batch(0, 1, number)
    sources, targets = task_of(project).embed(model, batch).unbind(1)
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


@pytest.mark.parametrize("name", LINES)
def test_an_edit_takes_few_lines_applies_and_is_shown_by_the_page_of_tasks(name):
    assert added_lines(read(name)) <= LINES[name]
    hunks = [hunk.rstrip("\n").split("\n")[1:] for hunk in read(name).split("\n@@")[1:]]
    files = [TASKS.get(name, "templates/causal_lm/task.py"), f"{SOURCE}/train.py"]
    sources = [(ROOT / file).read_text("utf-8") for file in files]
    for hunk in hunks:
        kept = itertools.takewhile(lambda line: not line.startswith("--- a/"), hunk)
        old = "\n".join(line[1:] for line in kept if line[:1] != "+")
        assert any(old in source for source in sources), old
    shown = ["\n".join(line for line in hunk if line[:1] in ("+", "-")) for hunk in hunks]
    page = (ROOT / SOURCE / "docs" / "task.md").read_text()
    assert "```diff\n" + "\n...\n".join(shown) + "\n```" in page
