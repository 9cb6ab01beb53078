"""Compares the task `preference` with TRL's DPOTrainer: the same model, pairs, order and optimizer.

    python benchmarks/dpo_trl.py                  # in the template: a table, a .json; 15 minutes
    python benchmarks/dpo_trl.py --steps 10 --rounds 1

TRL is not among benchmarks/requirements.txt: `pip install --no-deps trl` is enough.

A baked project trains a small model first. From it the project and TRL each take some steps of 32
pairs in micro-batches of 8, in fp32, with sigmoid and with ipo. The project's micro-batches are
recorded, and TRL gets them in the same order. Their first ten losses, rewards and gradient norms
are compared; then the rounds are interleaved, and times are medians over the steps.
"""

import argparse
import json
import os
import resource
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

PAIRS, MICRO, RATE, COMPARED, LOSSES = 32, 8, 5e-5, 10, ("sigmoid", "ipo")
BASE = "--max_steps 60 --eval_every 0 --save_every 0 --output_dir runs/base --tracker none".split()


# ---- The two programs, each in a process of its own ----------------------------------------------


class Watch:
    """The time of each step of an optimizer, and the most memory that the process had."""

    def __init__(self):
        self.times: list[float] = []
        register_optimizer_step_post_hook(lambda *_: self.times.append(time.perf_counter()))

    def result(self) -> dict:
        steps = [b - a for a, b in zip(self.times[1:], self.times[2:], strict=False)]
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return {"step": median(steps), "megabytes": memory}


def run_ours(loss: str, steps: int, file: Path) -> None:
    """In a project: trains, and saves losses, norms, rewards and micro-batches."""
    sys.path.insert(0, os.getcwd())
    import task

    watch, batches, rewards, compute = Watch(), [], [], task.pair_losses

    def recorded(model, batch):
        found = compute(model, batch)
        if torch.is_grad_enabled():
            rewards.append(found[1].detach().mean(0).tolist())
            batches.append({name: values.clone() for name, values in batch.items()})
        return found

    task.pair_losses, output = recorded, file.with_suffix("")
    settings = {
        "max_steps": steps,
        "global_batch_size": PAIRS,
        "micro_batch_size": MICRO,
        "learning_rate": RATE,
        "lr_schedule": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "log_every": 1,
        "eval_every": 0,
        "save_every": 0,
        "tracker": "none",
        "output_dir": output,
        "task.model_name_or_path": "runs/base/model",
        "task.loss_type": loss,
        "task.rpo_alpha": 0.0,
    }
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    sys.argv = ["train.py", *flags]
    try:
        runpy.run_path("train.py", run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    found = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in found if "loss" in line]
    curves = {name: [line[name] for line in found] for name in ("loss", "grad_norm")}
    batches = batches[-steps * PAIRS // MICRO :]  # before the first step one is tried
    rewards = torch.tensor(rewards[-len(batches) :]).view(steps, -1, 2).mean(1).tolist()
    torch.save({**watch.result(), **curves, "rewards": rewards, "batches": batches}, file)


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


def run_trl(loss: str, steps: int, file: Path, batches: list[dict]) -> None:
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    class InOrder(DPOTrainer):
        def _get_train_sampler(self, *_):
            return SequentialSampler(self.train_dataset)

        def _prepare_dataset(self, dataset, *_):  # it has tokens
            return dataset

    watch = Watch()
    model, reference = (AutoModelForCausalLM.from_pretrained("runs/base/model") for _ in range(2))
    config = DPOConfig(
        output_dir=str(file.with_suffix("")),
        loss_type=[loss],
        beta=0.1,
        max_length=None,
        max_steps=steps,
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
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = InOrder(
        model,
        reference,
        config,
        train_dataset=Dataset.from_list([row for batch in batches for row in rows_of(batch)]),
        processing_class=AutoTokenizer.from_pretrained("runs/base/model"),
    )
    trainer.train()
    found = [line for line in trainer.state.log_history if "rewards/chosen" in line]
    curves = {name: [line[name] for line in found] for name in ("loss", "grad_norm")}
    rewards = [[line["rewards/chosen"], line["rewards/rejected"]] for line in found]
    torch.save({**watch.result(), **curves, "rewards": rewards}, file)


# ---- The comparison ------------------------------------------------------------------------------


def difference(ours: dict, theirs: dict, name: str) -> float:
    """The largest difference of the first steps, relative to the largest value."""
    own, other = (torch.tensor(each[name][:COMPARED]).double() for each in (ours, theirs))
    return float((own - other).abs().max() / other.abs().max())


def compare_programs(folder: Path, steps: int, rounds: int) -> dict:
    """For each loss the differences; and of both programs the medians over the rounds."""
    import compare

    project = compare.bake(folder, task="preference")

    def run(*arguments: object) -> None:
        command = [sys.executable, *map(str, arguments)]
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        env = compare.environment(PYTHONPATH=os.pathsep.join(paths), ACCELERATE_USE_CPU="true")
        subprocess.run(command, cwd=project, env=env, check=True, stdout=subprocess.DEVNULL)

    compare.say("a model to start from")
    run("train.py", *BASE)
    losses = {}
    for loss in LOSSES:
        found: dict[str, list[dict]] = {"ours": [], "trl": []}
        for number in range(rounds):
            compare.say(f"{loss}, round {number + 1} of {rounds}")
            for name in found:
                file = folder / f"{loss}-{name}-{number}.pt"
                run(__file__, "--as", name, "--loss", loss, "--steps", steps, "--file", file)
                found[name].append(torch.load(file))
        ours, theirs = (each[0] for each in found.values())
        names = ("loss", "rewards", "grad_norm")
        losses[loss] = {"differ": {name: difference(ours, theirs, name) for name in names}}
        tokens = sum(int((batch["labels"] >= 0).sum()) for batch in ours["batches"]) / steps
        for name, results in found.items():
            seconds = median(each["step"] for each in results)
            memory = median(each["megabytes"] for each in results)
            losses[loss][name] = {"tokens_per_second": tokens / seconds, "megabytes": memory}
        ratios = [b["step"] / a["step"] for a, b in zip(*found.values(), strict=True)]
        losses[loss]["ratio"] = [min(ratios), median(ratios), max(ratios)]
    return losses


def table(report: dict):
    from rich import box
    from rich.table import Table

    columns = ["loss", "difference of losses", "of rewards", "of gradient norms"]
    for name in ("project", "TRL"):
        columns += [f"{name}: answer tokens/s", "MB"]
    shown = Table(*columns, "TRL's time / the project's", box=box.MARKDOWN)
    for loss, found in report["losses"].items():
        row = [loss, *(f"{value:.1e}" for value in found["differ"].values())]
        for name in ("ours", "trl"):
            each = found[name]
            row += [f"{each['tokens_per_second']:,.0f}", f"{each['megabytes']:,.0f}"]
        low, middle, high = found["ratio"]
        shown.add_row(*row, f"{middle:.2f} ({low:.2f} to {high:.2f})")
    return shown


def describe(report: dict) -> str:
    import compare

    return f"{compare.markdown(table(report))}\n\n{compare.about(report)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--name", default="dpo", help="of the .json")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--docs", action="store_true", help="write the table into the page")
    for name in ("--as", "--loss", "--file"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if vars(asked)["as"] == "ours":
        run_ours(asked.loss, asked.steps, Path(asked.file))
    elif vars(asked)["as"] == "trl":
        file = Path(asked.file)
        batches = torch.load(str(file).replace("-trl-", "-ours-"))["batches"]
        run_trl(asked.loss, asked.steps, file, batches)
    else:
        import trl

        import compare

        report = {**compare.about_machine(), "load": [os.getloadavg()[0]]}
        report["versions"]["trl"] = trl.__version__
        with tempfile.TemporaryDirectory() as folder:
            report["losses"] = compare_programs(Path(folder), asked.steps, asked.rounds)
        compare.publish(report, describe, asked, "python benchmarks/dpo_trl.py")


if __name__ == "__main__":
    main()
