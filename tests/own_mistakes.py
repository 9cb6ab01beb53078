"""A script of one's own with one mistake: own_mistakes.py MISTAKE FOLDER [STEPS]."""

import ast
import json
import os
import signal
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import TensorDataset

from samestep import Training
from samestep.state.weights import TrainingState

mistake, folder = sys.argv[1:3]
exact = mistake in ("frozen", "unequal_frozen")
accelerator = Accelerator(gradient_accumulation_steps=4 if mistake == "accumulation" else 1)
rank = accelerator.process_index
set_seed(0, device_specific=mistake == "weights_differ")
x = torch.randn(41, 4, generator=torch.Generator().manual_seed(0))
rows = TensorDataset(x, x.sum(1, keepdim=True) + (rank if mistake == "targets_differ" else 0))
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
if mistake == "half":
    model.to(torch.bfloat16)
if "frozen" in mistake:
    model[0].requires_grad_(False)
    if mistake == "unequal_frozen":
        model[0].weight.data.mul_(1.5)
kind = torch.optim.LBFGS if mistake == "lbfgs" else torch.optim.AdamW
trained = model[1] if mistake == "head_alone" else model
rate = 2e-2 if mistake == "other_rate" else 1e-2
optimizer = kind([p for p in trained.parameters() if p.requires_grad], lr=rate)
scheduler = None
if mistake in ("scheduler", "scheduler_inside", "kept_rate", "other_rate"):
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    if mistake != "scheduler":
        accelerator.register_for_checkpointing(scheduler)
if mistake != "unprepared":
    model, optimizer = accelerator.prepare(model, optimizer)
part = accelerator.unwrap_model(model)[0]
part.train(mistake != "evaluate")  # as a teacher, or a BatchNorm whose statistics stay
if mistake == "compiled":
    model = torch.compile(model)
own = torch.Generator().manual_seed(0)
if mistake == "odd_state":
    bag = SimpleNamespace(state_dict=lambda: {"bag": object()}, load_state_dict=print)
    accelerator.register_for_checkpointing(bag)


def collate(batch):
    x, y = (torch.stack(each) for each in zip(*batch, strict=True))
    if mistake == "collate_draws":
        x = x + 0.1 * torch.randn_like(x)
    if mistake == "collate_own_generator":
        x = x + 0.1 * torch.randn(x.shape, generator=own)
    if mistake == "collate_texts":
        return {"x": x, "y": y, "names": ["a"] * len(x)}
    return x, y


given = {"settings": {"lr": 2e-2 if mistake == "settings" else 1e-2, "task": "sst2"}}
given |= {"folder": folder, "collate": collate, "exact": exact, "micro_batch_size": 2}
given["seed"] = rank if mistake == "seed_differs" else 0
given["global_batch_size"] = 4 if mistake == "small_steps" else 8
given["accept_changes"] = mistake in ("small_steps", "accept_changes")
if mistake == "count":
    given["count"] = lambda batch: 3
if "=" in mistake:
    given[mistake.partition("=")[0]] = ast.literal_eval(mistake.partition("=")[2])
training = Training(accelerator, model, optimizer, rows, **given)
if mistake == "warm_up":
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 4)
    accelerator.register_for_checkpointing(scheduler)
if mistake == "full_disk" and Path(folder, "checkpoints").exists():
    load, TrainingState.load = TrainingState.load, None
    with suppress(TypeError):
        training.resume()
    TrainingState.load = load
    assert training.resume() == 4
if mistake == "late_scheduler":
    training.resume()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
for step in training.steps(int(sys.argv[3]) if len(sys.argv) > 3 else 4, save_every=2):
    assert part.training == (mistake != "evaluate") and model.training
    for micro_batch in step.micro_batches:
        accelerator.print("ids", *micro_batch.ids)
    for batch in step:
        if mistake == "zero_grad_inside":
            optimizer.zero_grad()
        if mistake == "scheduler_inside":
            scheduler.step()
        if mistake == "head_alone" and training.gradients and not step.losses:
            assert part.weight.grad is None
        x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
        net = accelerator.unwrap_model(model) if mistake == "inner_model" else model
        reduction = {"mean": "mean", "count": "mean", "vector": "none"}.get(mistake, "sum")
        x, y = x.to(part.weight.dtype), y.to(part.weight.dtype)
        loss = F.mse_loss(net(x), y, reduction=reduction).float()
        if mistake == "always_nan" or (mistake == "nan" and step.number == 3):
            loss = loss * float("nan")
        if mistake == "nan_gradient":
            loss = loss + (part.weight * 0).square().sqrt().sum()
        gathered = nullcontext() if mistake == "accumulate" else accelerator.accumulate(model)
        with gathered:
            if mistake != "no_backward":
                step.backward(loss, mean=mistake == "count")
            if mistake == "two_backwards":
                step.backward(F.mse_loss(model(x), y))
        if mistake == "step_inside":
            optimizer.step()
        if mistake == "break_inside" and step.number == 2:
            break
        if mistake.startswith("SIG") and step.number == 3 and rank == accelerator.num_processes - 1:
            os.kill(os.getpid(), getattr(signal, mistake))
        if mistake == "exception" and step.number == 3 and rank == 0:
            raise KeyError("a bug of the script")
    if mistake != "no_clip":
        step.clip(1.0)
    before = [p.detach().clone() for p in model.parameters()]
    if mistake != "no_step":
        optimizer.step()
    if mistake == "nan" and step.number == 3:
        assert step.loss != step.loss
        assert all(map(torch.equal, before, model.parameters()))
    if mistake == "main_alone" and step.number == 3 and rank == 0:
        next(model.parameters()).data.add_(1)
    if mistake == "full_disk" and step.number == 3:
        write, training.saver.write = training.saver.write, None
        with suppress(TypeError):
            training.save()
        training.saver.write = write
        training.save()
        assert Path(folder, "checkpoints/step-00000003").exists()
    if mistake == "two_steps":
        optimizer.step()
    if scheduler:
        scheduler.step()
    if mistake != "no_zero_grad":
        optimizer.zero_grad()
    if "break" in mistake and step.number == 3:
        if mistake == "save_and_break":
            training.save()
        break


def eval_sums(model, batch):
    x, _ = batch
    return {"rows": torch.tensor(len(x)), "errors": (model(x) - 1).square().sum()}


if mistake == "evaluate":
    sums = training.evaluate(rows, eval_sums)
    accelerator.print("rows", sums["rows"].item(), "errors", sums["errors"].item())
    assert model.training and not part.training
if mistake == "again":
    for step in training.steps(6):
        assert json.loads(Path(folder, "status.json").read_text())["state"] == "running"
        for x, y in step:
            with accelerator.accumulate(model):
                step.backward(F.mse_loss(model(x), y, reduction="sum"))
        step.clip(1.0)
        optimizer.step()
accelerator.print("weights", [p.double().sum().item() for p in model.parameters()])
