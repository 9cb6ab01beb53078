"""Takes ten steps of DPO in a baked project: with its task `preference`, or with TRL's DPOTrainer.

python dpo.py ours|trl LOSS FOLDER     run.py starts both, and compares what they leave in FOLDER

The pretrained model, pairs, order and optimizer are the same: 32 pairs a step in micro-batches of
8, in fp32. TRL gets the project's micro-batches, in its order.
"""

import atexit
import json
import os
import runpy
import sys
from pathlib import Path

import torch

PAIRS, MICRO, STEPS, RATE = 32, 8, 10, 5e-5
OURS = (
    f"--max_steps {STEPS} --global_batch_size {PAIRS} --micro_batch_size {MICRO} --log_every 1 "
    f"--learning_rate {RATE} --lr_schedule constant --warmup_steps 0 --weight_decay 0 "
    "--task.model_name_or_path runs/base/model --task.rpo_alpha 0 --eval_every 0 --save_every 0"
)


def run_ours(loss: str, folder: Path) -> None:
    """In a project: trains, and saves losses, norms, rewards and micro-batches."""
    sys.path.insert(0, os.getcwd())
    import task

    batches, rewards, compute = [], [], task.pair_losses

    def recorded(model, batch):
        found = compute(model, batch)
        if torch.is_grad_enabled():
            rewards.append(found[1].detach().mean(0).tolist())
            batches.append({name: values.clone() for name, values in batch.items()})
        return found

    @atexit.register  # train.py ends the process
    def save():
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        lines = [line for line in lines if "loss" in line]
        last = batches[-STEPS * PAIRS // MICRO :]  # before the first step one is tried
        means = torch.tensor(rewards[-len(last) :]).view(STEPS, -1, 2).mean(1).tolist()
        found = {name: [line[name] for line in lines] for name in ("loss", "grad_norm")}
        torch.save({**found, "rewards": means, "batches": last}, folder / "ours.pt")

    task.pair_losses = recorded
    sys.argv = ["train.py", *OURS.split(), "--task.loss_type", loss, "--output_dir", str(folder)]
    runpy.run_path("train.py", run_name="__main__")


def rows_of(batch: dict) -> list[dict]:
    """The pairs of a micro-batch as TRL wants them."""
    rows = []
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        row = {}
        for i, name in enumerate(("chosen_ids", "rejected_ids")):
            (counted,) = (labels[i] >= 0).nonzero(as_tuple=True)
            first, last = int(counted[0]), int(counted[-1])
            row[name] = labels[i, first : last + 1].tolist()
            prompt = ids[i, :first].tolist()
            assert row.setdefault("prompt_ids", prompt) == prompt, "answers of two prompts"
        rows.append(row)
    return rows


def run_trl(loss: str, folder: Path) -> None:
    """In a project: DPOTrainer takes the same steps."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    class Trainer(DPOTrainer):
        def _prepare_dataset(self, dataset, *_):  # it has tokens
            return dataset

    config = DPOConfig(
        output_dir=str(folder / "trl"),
        loss_type=[loss],
        max_steps=STEPS,
        per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=PAIRS // MICRO,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        adam_beta2=0.99,
        bf16=False,
        logging_steps=1,
        report_to="none",
    )
    batches = torch.load(folder / "ours.pt")["batches"]
    rows = Dataset.from_list([row for batch in batches for row in rows_of(batch)])
    trainer = Trainer("runs/base/model", args=config, train_dataset=rows)
    trainer.train()
    lines = [line for line in trainer.state.log_history if "rewards/chosen" in line]
    found = {name: [line[name] for line in lines] for name in ("loss", "grad_norm")}
    rewards = [[line["rewards/chosen"], line["rewards/rejected"]] for line in lines]
    torch.save({**found, "rewards": rewards}, folder / "trl.pt")


SIDES = {"ours": run_ours, "trl": run_trl}

if __name__ == "__main__":
    side, loss, folder = sys.argv[1:]
    SIDES[side](loss, Path(folder))
