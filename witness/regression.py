"""The lines y = a x + b on which accelerate and transformers test themselves, fitted by Training.

It prints the final a and b, in hexadecimal: each bit counts.
"""

import argparse
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.test_utils.scripts import test_script
from accelerate.test_utils.training import RegressionModel
from accelerate.utils import set_seed
from transformers import Trainer, TrainingArguments, get_linear_schedule_with_warmup

from samestep import Training
from samestep.step.samples import SampleDataset


class NoisyLine(torch.nn.Module):
    """The line of transformers' tests: `noise` adds a number from each of three generators."""

    def __init__(self, noise: bool):
        super().__init__()
        self.a = torch.nn.Parameter(torch.tensor(0.0))
        self.b = torch.nn.Parameter(torch.tensor(2.0))
        self.noise = noise

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        """Return the line at x; with y, as Trainer gives it, a dict with the mean loss."""
        line = self.a * x + self.b
        if self.noise:
            line = line + 0.05 * (torch.randn(()) + np.random.rand() + random.random())
        return line if y is None else {"loss": torch.nn.functional.mse_loss(line, y)}


def noisy_rows() -> list[dict]:
    """Return the 128 rows of transformers' tests."""
    np.random.seed(42)
    x = np.random.normal(size=128).astype(np.float32)
    y = 2 * x + 3 + np.random.normal(scale=0.1, size=128)
    return [{"x": each, "y": value} for each, value in zip(x, y.astype(np.float32), strict=True)]


def baseline(batch: int, seedable: bool) -> tuple[torch.nn.Module, list[dict]]:
    """Return the model that accelerate's own plain loop fits, in batches of so many rows, and its
    rows in the order of its three passes."""
    generator = torch.Generator()
    data, model = test_script.mock_training(4 * batch, batch, generator, seedable)
    set_seed(42)
    generator.manual_seed(42)
    loader = test_script.generate_baseline_dataloader(data, generator, batch, seedable)
    batches = [each for _ in range(3) for each in loader]
    return model, [
        {"x": x, "y": y} for each in batches for x, y in zip(each["x"], each["y"], strict=True)
    ]


def in_order(rows: list[dict], seed: int) -> list[dict]:
    """Return the rows, placed so that Training takes them in their order."""
    placed = list(rows)
    for row, place in zip(rows, SampleDataset(rows, seed=seed).ids(range(len(rows))), strict=True):
        placed[place] = row
    return placed


def run_trainer(folder: str) -> torch.nn.Module:
    """Train the noisy line with HF Trainer, as the skipped test does; resume if there is a
    checkpoint."""
    given = {"save_steps": 5, "learning_rate": 0.1, "report_to": [], "use_cpu": True}
    trainer = Trainer(
        NoisyLine(noise=True), TrainingArguments(folder, **given, disable_tqdm=True),
        train_dataset=noisy_rows(),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=any(Path(folder).glob("checkpoint-*")))
    return trainer.model


def run_training(args: argparse.Namespace) -> torch.nn.Module:
    """Train a line with Training; compare it with accelerate's, if that is asked."""
    accelerator = Accelerator(mixed_precision="bf16" if args.bf16 else "no")
    expected = scheduler = None
    if args.sampler:
        expected, rows = baseline(args.batch, args.sampler == "seedable")
        rows, steps = in_order(rows, seed=42), 12
        model = RegressionModel()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        rows, steps = noisy_rows(), 48
        model = NoisyLine(args.noise)
        model.a.requires_grad_(not args.frozen)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.1, weight_decay=0)
        scheduler = accelerator.prepare(get_linear_schedule_with_warmup(optimizer, 0, steps))
    model, optimizer = accelerator.prepare(model, optimizer)
    training = Training(
        accelerator, model, optimizer, rows, folder=args.folder, seed=42, keep_checkpoints=0,
        global_batch_size=args.batch, micro_batch_size=args.micro_batch, exact=args.exact,
    )  # fmt: skip
    for step in training.steps(steps, save_every=args.save_every):
        for batch in step:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss
                step.backward(lambda: loss(model(batch["x"]), batch["y"]), mean=True)
        step.clip(0 if args.sampler else 1.0)
        optimizer.step()
        if scheduler:
            scheduler.step()
    model = accelerator.unwrap_model(model)
    if expected:
        tolerance = {"atol": test_script.ATOL, "rtol": test_script.RTOL}
        torch.testing.assert_close(model.a, expected.a, **tolerance)
        torch.testing.assert_close(model.b, expected.b, **tolerance)
        same = model.a.equal(expected.a) and model.b.equal(expected.b)
        accelerator.print(f"baseline: {'same bits' if same else 'within 1e-6'}")
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--sampler", choices=["plain", "seedable"])  # of accelerate's baseline
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--micro_batch", type=int, default=8)
    parser.add_argument("--save_every", type=int, default=5)
    parser.add_argument("--trainer", action="store_true")  # HF Trainer in place of Training
    parser.add_argument("--noise", action="store_true")
    parser.add_argument("--frozen", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--exact", action="store_true")
    args = parser.parse_args()
    model = run_trainer(args.folder) if args.trainer else run_training(args)
    if PartialState().is_main_process:
        print(f"weights: {model.a.item().hex()} {model.b.item().hex()}")


if __name__ == "__main__":
    main()
