"""A plain Accelerate script, written as accelerate's examples are; figure.py compares it.

    accelerate launch --config_file CPU_YAML --num_processes 2 plain.py FOLDER

FOLDER has model/ and rows.pt, which figure.py writes; losses-2.json is written into it: the mean
loss of each step. The batch size is that of a process, so that two processes take half the steps.
"""

import json
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup


def main(folder: str) -> None:
    set_seed(0)
    accelerator = Accelerator()
    loader = DataLoader(torch.load(f"{folder}/rows.pt"), batch_size=8, shuffle=True)
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/model")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 10, len(loader))
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
        with open(f"{folder}/losses-{accelerator.num_processes}.json", "w") as file:
            json.dump(losses, file)
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main(sys.argv[1])
