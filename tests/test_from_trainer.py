"""The page docs/from-trainer.md: its blocks are a task, which keeps the promises."""

import re

import datasets
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from conftest import ROOT, bake, lines, read_weights
from small_models import new_model, word_tokenizer
from test_tasks import check_two_processes_and_a_lost_half

PAGE = (ROOT / "docs" / "from-trainer.md").read_text(encoding="utf-8")
TASK = "\n\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S))
WORDS = "bad good it was not a film of the year and I saw no other".split()
FLAGS = ["--max_steps", 6, "--save_every", 3, "--eval_every", 3, "--log_every", 1]
FLAGS += ["--global_batch_size", 8, "--micro_batch_size", 4, "--warmup_steps", 1]
FLAGS += ["--keep_checkpoints", 0, "--learning_rate", 1e-3, "--task.model_name_or_path", "small"]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project with the task of the page, its reviews, and a small pretrained BERT in bfloat16."""
    baked = bake(tmp_path_factory.mktemp("trainer"), tracker="none", pictures=False)
    (baked.path / "task.py").write_text(TASK)
    (baked.path / "configs" / "train" / "default.yaml").write_text("tracker: none\n")
    vocabulary = ["[PAD]", "[UNK]", *dict.fromkeys(WORDS)]
    marks = {"pad_token": "[PAD]", "unk_token": "[UNK]", "model_max_length": 12}
    word_tokenizer(vocabulary, **marks).save_pretrained(baked.path / "small")
    model = new_model("Bert", "ForSequenceClassification", vocab_size=len(vocabulary))
    model.to(torch.bfloat16).save_pretrained(baked.path / "small")
    rows = [[WORDS[i * k % 17 % len(WORDS)] for k in range(1, 4 + i % 9)] for i in range(90)]
    table = {"text": [" ".join(row) for row in rows], "label": [int("bad" in row) for row in rows]}
    datasets.Dataset.from_dict(table).save_to_disk(baked.path / "reviews")
    return baked


@pytest.mark.slow
def test_the_task_of_the_page_keeps_the_promises(project, tmp_path):
    printed = check_two_processes_and_a_lost_half(project, tmp_path, *FLAGS)
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
