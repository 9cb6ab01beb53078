"""A script of one's own that logs, saves and scores: test_core.py kills and stops it."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed

from samestep import Training

folder, moment, *words = sys.argv[1:]
accelerator = Accelerator()
set_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
x = torch.randn(40, 4)
rows = [(x[i], x[i].sum().sin()[None]) for i in range(40)]
optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
model, optimizer = accelerator.prepare(model, optimizer)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
accelerator.register_for_checkpointing(scheduler)
training = Training(
    accelerator, model, optimizer, rows[:30], folder=folder, seed=3, global_batch_size=8,
    micro_batch_size=2, keep_checkpoints=1, async_save="async" in words, log_every=2,
)  # fmt: skip
begun = []


def end_at(place):
    """Ends the last process, once, at a place of the body in a step."""
    if not moment:
        return
    name, *asked = moment.split()
    is_last = accelerator.process_index == accelerator.num_processes - 1
    here = [place, str(step.number)] == asked
    if here and is_last and not Path(folder, "ended").exists():
        Path(folder, "ended").touch()
        os.kill(os.getpid(), getattr(signal, name))


def eval_sums(model, batch):
    if training.current:
        end_at("evaluate")
    return {"loss": F.mse_loss(model(batch[0]), batch[1], reduction="sum")}


def scores():
    return {"eval_loss": float(training.evaluate(rows[30:], eval_sums)["loss"]) / 10}


step = None
if training.lacks_scores(2, 9):
    training.score(scores())
for step in training.steps(9):
    for x, y in step:
        with accelerator.accumulate(model):
            step.backward(lambda: F.mse_loss(model(x), y, reduction="sum"))
    step.clip(1.0)
    optimizer.step()
    end_at("log")
    training.log(step, half=step.number / 2)
    if step.due(2) and "late" in words:  # the rate changes after the evaluation
        training.score(scores())
    scheduler.step()
    if step.due(2):
        end_at("save")
        training.save()
        if "late" not in words:
            training.score(scores())
        end_at("score")
best = training.load_best()
weights = [p.double().sum().item() for p in model.parameters()]
accelerator.print("best", best, weights)
