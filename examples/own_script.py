"""A script of your own around samestep's Training: which of two words comes more often?

    accelerate launch --cpu own_script.py --folder runs/words      on one process or several

Kill it at any time: the same command continues.
"""

import argparse
import random

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

from samestep import Training


def make_rows(count, seed):
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        words = [draw.choice([5, 6, draw.randint(7, 39)]) for _ in range(draw.randint(6, 20))]
        rows.append({"input_ids": [1, *words, 2], "labels": int(words.count(5) > words.count(6))})
    return rows


def collate(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    ids = [row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows]
    input_ids = torch.tensor(ids)
    labels = torch.tensor([row["labels"] for row in rows])
    return {"input_ids": input_ids, "attention_mask": (input_ids > 0).long(), "labels": labels}


def eval_sums(model, batch):
    return {"right": (model(**batch).logits.argmax(dim=-1) == batch["labels"]).sum()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--max_steps", type=int, default=60)
    parser.add_argument("--micro_batch_size", type=int, default=8)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--folder", default="runs/words")
    args = parser.parse_args()
    accelerator = Accelerator()

    set_seed(42)
    config = BertConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=32,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    rows, eval_rows = make_rows(320, seed=1), make_rows(101, seed=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = get_linear_schedule_with_warmup(optimizer, 10, args.max_steps)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)  # no dataloader
    training = Training(
        accelerator, model, optimizer, rows, folder=args.folder, seed=42, global_batch_size=16,
        micro_batch_size=args.micro_batch_size, collate=collate, exact=args.exact,
        settings={"lr": args.lr, "max_steps": args.max_steps},
    )  # fmt: skip

    for step in training.steps(args.max_steps, save_every=10):
        for batch in step:
            with accelerator.accumulate(model):
                step.backward(lambda: model(**batch).loss, mean=True)  # over the batch's rows
        step.clip(1.0)
        optimizer.step()
        scheduler.step()
        accelerator.print(f"{step.number} loss {step.loss:.4f}", flush=True)
        if step.number % 20 == 0:
            right = training.evaluate(eval_rows, eval_sums)["right"].item()
            accelerator.print(f"step {step.number}: accuracy {right / len(eval_rows):.4f}")
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(f"{args.folder}/model", state_dict=state)


if __name__ == "__main__":
    main()
