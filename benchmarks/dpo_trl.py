"""Compares the task `preference` with TRL's DPOTrainer: the same model, pairs, order and optimizer.

    python benchmarks/dpo_trl.py                  # in the template: a table, a .json; 5 minutes

TRL is not among benchmarks/requirements.txt: `pip install --no-deps trl` is enough. A baked project
trains a small model. From it both take ten steps of 32 pairs in micro-batches of 8, in fp32; TRL
gets the project's micro-batches, in its order. Losses, rewards and gradient norms are compared.
"""

import argparse
import atexit
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import torch

import compare

PAIRS, MICRO, RATE, STEPS, LOSSES = 32, 8, 5e-5, 10, ("sigmoid", "ipo")
NONE = "--eval_every 0 --save_every 0 --tracker none".split()
BASE = ["--max_steps", "60", "--output_dir", "runs/base", *NONE]
OURS = f"--max_steps {STEPS} --global_batch_size {PAIRS} --micro_batch_size {MICRO} --log_every 1 "
OURS += f"--learning_rate {RATE} --lr_schedule constant --warmup_steps 0 --weight_decay 0 "
OURS += "--task.model_name_or_path runs/base/model --task.rpo_alpha 0"


def run_ours(loss: str, file: Path) -> None:
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

    task.pair_losses, output = recorded, file.with_suffix("")
    where = ["--task.loss_type", loss, "--output_dir", str(output)]
    sys.argv = ["train.py", *OURS.split(), *NONE, *where]

    @atexit.register  # train.py ends the process
    def save():
        lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        lines = [line for line in lines if "loss" in line]
        last = batches[-STEPS * PAIRS // MICRO :]  # before the first step one is tried
        means = torch.tensor(rewards[-len(last) :]).view(STEPS, -1, 2).mean(1).tolist()
        found = {name: [line[name] for line in lines] for name in ("loss", "grad_norm")}
        torch.save({**found, "rewards": means, "batches": last}, file)

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


def run_trl(loss: str, file: Path, batches: list[dict]) -> None:
    """In a project: DPOTrainer takes the same steps."""
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    class InOrder(DPOTrainer):
        def _get_train_sampler(self, *_):
            return SequentialSampler(self.train_dataset)

        def _prepare_dataset(self, dataset, *_):  # it has tokens
            return dataset

    model, reference = (AutoModelForCausalLM.from_pretrained("runs/base/model") for _ in range(2))
    config = DPOConfig(
        output_dir=str(file.with_suffix("")),
        loss_type=[loss],
        beta=0.1,
        max_length=None,
        max_steps=STEPS,
        per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=PAIRS // MICRO,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        adam_beta2=0.99,
        weight_decay=0.0,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        dataloader_pin_memory=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    rows = Dataset.from_list([row for batch in batches for row in rows_of(batch)])
    words = AutoTokenizer.from_pretrained("runs/base/model")
    trainer = InOrder(model, reference, config, train_dataset=rows, processing_class=words)
    trainer.train()
    lines = [line for line in trainer.state.log_history if "rewards/chosen" in line]
    found = {name: [line[name] for line in lines] for name in ("loss", "grad_norm")}
    rewards = [[line["rewards/chosen"], line["rewards/rejected"]] for line in lines]
    torch.save({**found, "rewards": rewards}, file)


def difference(ours: dict, theirs: dict, name: str) -> str:
    """The largest difference of a step, relative to the largest value."""
    own, other = (torch.tensor(each[name]).double() for each in (ours, theirs))
    return f"{float((own - other).abs().max() / other.abs().max()):.1e}"


def measure(asked: argparse.Namespace, folder: Path) -> dict:
    """For each loss the differences, each side in a process of its own."""
    project, rows = compare.bake(folder, task="preference"), []
    env = compare.environment()

    def run(*words: object) -> None:
        subprocess.run([sys.executable, *map(str, words)], cwd=project, env=env, check=True)

    run("train.py", *BASE)
    for loss in LOSSES:
        files = [folder / loss / name for name in ("ours.pt", "trl.pt")]
        files[0].parent.mkdir()
        for file in files:
            run(__file__, loss, file)
        both = [torch.load(file) for file in files]
        rows.append([loss, *(difference(*both, name) for name in ("loss", "rewards", "grad_norm"))])
    return {"rows": rows}


def describe(report: dict) -> str:
    columns = ["loss", "difference of losses", "of rewards", "of gradient norms"]
    return compare.markdown(columns, report["rows"])


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in LOSSES:  # a process of measure()
        loss, file = sys.argv[1], Path(sys.argv[2])
        if file.stem == "ours":
            run_ours(loss, file)
        else:
            run_trl(loss, file, torch.load(file.with_name("ours.pt"))["batches"])
    else:
        asked = compare.parser_of(__doc__, "dpo").parse_args()
        compare.publish(asked, "python benchmarks/dpo_trl.py", measure, describe)
