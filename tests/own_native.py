"""A script of one's own whose model transformers shards while it is loaded.

own_native.py MODEL FOLDER FIELD SIZE: a field of DistributedConfig, for several processes.
"""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from samestep import Training

name, folder, field, size = sys.argv[1:]
accelerator = Accelerator()
set_seed(0)
options = {}
if accelerator.num_processes > 1:
    options["distributed_config"] = DistributedConfig(**{field: int(size)})
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, **options).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=False, foreach=False)
model, optimizer = accelerator.prepare(model, optimizer)
ids = torch.randint(0, 96, (64, 16), generator=torch.Generator().manual_seed(1))
rows = [{"input_ids": row, "labels": row} for row in ids]
training = Training(
    accelerator, model, optimizer, rows, folder=folder, seed=0, global_batch_size=8,
    micro_batch_size=2, count=lambda batch: batch["labels"][:, 1:].numel(),
)  # fmt: skip
for step in training.steps(4, save_every=2):
    for batch in step:
        with accelerator.accumulate(model):
            step.backward(lambda batch=batch: model(**batch).loss, mean=True)
    norm = step.clip(1.0)
    optimizer.step()
    print("NUMBERS", step.loss, float(norm), flush=True)
