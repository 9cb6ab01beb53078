"""Transforms and collators of others draw from the global generators, by the row and the batch."""

from conftest import lines
from same import check_same_curve

# The transform of a datasets.Dataset flips each row, by all three global generators.
FLIPPED = """

import random
import numpy as np
from datasets import Dataset

def flip(rows):
    heads = (random.random() < 0.5) + (np.random.rand() < 0.5) + (torch.rand(()).item() < 0.5)
    kept = {name: [*map(torch.tensor, rows[name])] for name in ("y", "counted")}
    return {**rows, **kept, "x": [torch.tensor(x) * (-1) ** int(heads) for x in rows["x"]]}

def views(cfg, plain=views):
    found = []
    for view in plain(cfg):
        rows = [view[i] for i in range(len(view))]
        rows = [{k: torch.as_tensor(v).tolist() for k, v in row.items()} for row in rows]
        found.append(Dataset.from_list(rows).with_transform(flip))
    return tuple(found)
"""
# A part of the labels is chosen, as by DataCollatorForLanguageModeling(mlm=True).
MASKED = """

def collate(rows, plain=collate):
    batch = plain(rows)
    batch["counted"] = torch.rand(batch["counted"].shape) < 0.5
    return batch
"""
MEAN = """

def loss_sum(model, batch, plain=loss_sum):
    return plain(model, batch) / max(count(batch), 1)
"""
DRAWS = "task.collate draws random numbers, by the micro-batch: micro_batch_size changes the result"


def test_a_transform_that_flips_rows_on_one_and_two_processes(tiny, tmp_path):
    """In one micro-batch of eight rows, and in two of four."""
    project = tiny.copied(tmp_path, FLIPPED)
    for processes in (1, 2):
        flags = ["--micro_batch_size", 8, "--max_steps", 14, "--output_dir"]  # three epochs
        project.train(processes, *flags, tmp_path / str(processes))
    check_same_curve(tmp_path / "1", tmp_path / "2")
    plain = tmp_path / "plain"
    tiny.train(1, *flags, plain)
    first, other = (lines(each, "loss")[0]["loss"] for each in (plain, tmp_path / "1"))
    assert abs(first - other) > 1e-3 * first


def test_a_collator_that_masks(tiny, tmp_path):
    """Its evaluations of the same weights are equal, as are runs on one and two processes."""
    project = tiny.copied(tmp_path, MASKED)
    flags = ["--learning_rate", 0, "--output_dir"]
    printed = project.train(1, *flags, tmp_path / "1")
    assert printed.count(DRAWS) == 1
    project.train(2, *flags, tmp_path / "2")
    check_same_curve(tmp_path / "1", tmp_path / "2")
    scores = [line["eval_loss"] for line in lines(tmp_path / "1", "eval_loss")]
    assert len(scores) == 3 and len({*scores}) == 1
    losses = [line["loss"] for line in lines(tmp_path / "1", "loss")]
    assert len({*losses}) == len(losses)


def test_a_mean_is_found_where_a_collator_draws(tiny, tmp_path):
    project = tiny.copied(tmp_path, MASKED + MEAN)
    printed = project.train(2, "--output_dir", tmp_path / "run", codes=[2])
    assert printed.count("as the sum of each alone") == 1, printed
    assert lines(tmp_path / "run", "loss") == []
