"""The hardware does not change the result: numbers of runs that differ only in how they are cut.

Also where transforms and collators of others draw from the global generators.
"""

import re

import pytest

from conftest import before_calls, checkpoint, lines, reseal
from same import check_close, check_same_curve

DROPOUT = ["--task.dropout", 0.2]
WHOLE = DROPOUT  # one process, four micro-batches


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_in_place_of_accumulation(tiny, whole, tmp_path, processes):
    """(1, 4), (2, 2) and (4, 1) processes and micro-batches, dropout on, counted terms differing.

    Measured: losses of twelve steps to 1e-7 relative, final weights to 3e-8 absolute.
    """
    printed = tiny.train(processes, "--output_dir", tmp_path / "run", *DROPOUT)
    assert f"= {processes} x {4 // processes} x 2 (" in printed
    check_same_curve(whole, tmp_path / "run")
    assert len({line["batch_hash"] for line in lines(whole, "loss")}) == 12
    check_close(checkpoint(whole, 12), checkpoint(tmp_path / "run", 12), atol=3e-7)


SLOW = before_calls("task.loss_sum", "if os.environ['RANK'] == '1': time.sleep(0.03)")


def test_steps_that_are_assigned_at_the_start_have_the_samples_of_one_process(tiny, tmp_path):
    flags = ["--micro_batch_size", 1, "--max_steps", 8, "--output_dir"]
    tiny.train(1, *flags, tmp_path / "one")
    tiny.train(2, *flags, tmp_path / "two", "--device_shares", "auto", before=SLOW)
    (line,) = lines(tmp_path / "two", "shares")
    first, second = map(int, line["shares"].split(" + "))
    assert first + second == 8 and first > second
    check_same_curve(tmp_path / "one", tmp_path / "two")


def test_any_micro_batch_of_one_global_batch(tiny, tmp_path):
    """Without dropout, whose masks follow the micro-batches. Measured: 2e-7, and 6e-8."""
    for micro in (1, 8):
        tiny.train(1, "--output_dir", tmp_path / str(micro), "--micro_batch_size", micro)
        check_same_curve(tmp_path / "1", tmp_path / str(micro))
        ends = [checkpoint(tmp_path / name, 12) for name in ("1", str(micro))]
        check_close(*ends, atol=3e-7)


def test_evaluation_counts_each_sample_once_on_any_number_of_processes(tiny, tmp_path):
    """11 rows, which neither 2 nor 3 processes share equally, in batches of 2. Every second one
    has no items in the loss."""
    flags = ["--global_batch_size", 6, "--max_steps", 4, "--eval_every", 1, "--task.silent", 2]
    for processes in (1, 2, 3):
        tiny.train(processes, "--output_dir", tmp_path / str(processes), *flags)
        check_same_curve(tmp_path / "1", tmp_path / str(processes))
    assert [line["rows"] for line in lines(tmp_path / "3", "eval_loss")] == [11] * 4


def test_a_far_step_is_reached_without_reading_what_lies_before(tiny, tmp_path):
    """From step 10**6 on: the samples are those that the order gives, and nothing else is read."""
    output, flags = tmp_path / "run", ["--max_steps", 1_000_002, "--save_every", 0]
    tiny.train(1, "--output_dir", output, "--max_steps", 1, "--save_every", 1)
    old = checkpoint(output, 1)
    reseal(old.rename(old.with_name("step-01000000")), step=1_000_000, samples=8_000_000)
    program = """
import sys, task
read, original = [], task.Numbers.__getitem__
task.Numbers.__getitem__ = lambda self, i: (read.append((self.first, i)), original(self, i))[1]
import train
from samestep.step import order
trained = lambda: [i for first, i in read if first == 0][-16:]
train.shutdown.exit_process = lambda code: print(code, trained(), len(read))
sys.argv = ["train.py", *sys.argv[1:]]
train.shutdown.run(train.main, train.prepare)
print(order.sample_ids(range(8_000_000, 8_000_016), 37, 0).tolist())
"""
    flags += ["--output_dir", output, "--accept_changes"]
    printed = tiny.run("python", "-c", program, *flags).stdout.splitlines()
    code, read, number = re.fullmatch(r"(\d+) (\[.*\]) (\d+)", printed[-2]).groups()
    assert code == "0" and read == printed[-1]
    # Eight rows of each of two calls of views, fingerprints twice, two steps, one evaluation.
    assert int(number) < 4 * 8 + 2 * 37 + 2 * 11 + 16 + 11 + 2


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
