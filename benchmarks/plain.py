"""A plain Accelerate script, written as accelerate's examples are; figure.py compares it.

    accelerate launch --config_file CPU_YAML --num_processes 2 plain.py FOLDER [--split]

FOLDER has model/ and rows.pt, which figure.py writes; losses-2.json is written into it: the mean
loss of each step. Optimizer, schedule and rows, one epoch, are those of train.py. The batch size is
that of a process, as in accelerate's examples, so that two processes take half the steps. With
--split, into split-2.json, it is that of all processes (`split_batches=True`): what differs then is
rounding. Padded rows or dropout would change more.
"""

import json
import math
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

WARMUP = 10


def main(folder: str, split: bool) -> None:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=split))
    loader = DataLoader(torch.load(f"{folder}/rows.pt"), batch_size=8)  # they are shuffled
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/model")
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.99), fused=True)
    steps = len(loader) - WARMUP

    def schedule(step: int) -> float:
        if step < WARMUP:
            return (step + 1) / WARMUP
        return (1 + math.cos(math.pi * (step - WARMUP) / steps)) / 2

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    prepared = accelerator.prepare(model, optimizer, loader, scheduler)
    model, optimizer, loader, scheduler = prepared
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    if accelerator.is_main_process:
        name = "split" if split else "losses"
        with open(f"{folder}/{name}-{accelerator.num_processes}.json", "w") as file:
            json.dump(losses, file)
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main(sys.argv[1], "--split" in sys.argv)
