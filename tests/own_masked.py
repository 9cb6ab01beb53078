"""Masked language modelling in a script of one's own: own_masked.py WORDS FOLDER STEPS.

Its collator draws, and its average of the weights and its scheduler are registered. WORDS are the
variations, joined by commas.
"""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
)

from samestep import Training

words, folder, steps = sys.argv[1].split(","), sys.argv[2], int(sys.argv[3])
accelerator = Accelerator()
set_seed(1)
names = ["[PAD]", "[MASK]", *(f"w{i}" for i in range(30))]
inner = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="w0"))
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=inner, pad_token="[PAD]", mask_token="[MASK]", unk_token="w0"
)
texts = [[2 + (i * 7 + j * j) % 30 for j in range(6 + i % 9)] for i in range(61)]
rows = Dataset.from_dict({"input_ids": texts})
if "stream" in words:
    rows = rows.to_iterable_dataset()
size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
model = BertForMaskedLM(BertConfig(vocab_size=len(names), intermediate_size=32, **size))
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=20)
model, optimizer = accelerator.prepare(model, optimizer)
accelerator.register_for_checkpointing(average, scheduler)


def count(batch):
    return int((batch["labels"] != -100).sum())


training = Training(
    accelerator, model, optimizer, rows, folder=folder, seed=1, global_batch_size=8,
    micro_batch_size=2, collate=DataCollatorForLanguageModeling(tokenizer), count=count,
    exact=True, num_workers=2 if "workers" in words else 0,
)  # fmt: skip
for step in training.steps(steps, save_every=2):
    for batch in step:
        with accelerator.accumulate(model):
            step.backward(model(**batch).loss, mean="sum" not in words)
    step.clip(1.0)
    optimizer.step()
    scheduler.step()
    average.update_parameters(accelerator.unwrap_model(model))
    accelerator.print("loss", repr(step.loss), step.items, optimizer.param_groups[0]["lr"])
