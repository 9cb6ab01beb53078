"""Trains what task.py describes on the hardware that an accelerate YAML describes.

    accelerate launch --config_file configs/accelerate/cpu.yaml train.py
    accelerate launch --config_file configs/accelerate/multi_gpu_bf16.yaml train.py
    accelerate launch --config_file configs/accelerate/cpu.yaml train.py \\
        --config configs/train/smoke.yaml --learning_rate 1e-3 --output_dir runs/mine
    torchrun --nproc-per-node 2 train.py
    python train.py --help

The YAML after --config_file owns the hardware: processes, devices, precision. The recipe after
--config owns the mathematics, and flags override it. The hardware never changes the result. The
samples of a step and its learning rate are functions of the step; random numbers, of the step and
the micro-batch. The gradient is that of the summed losses of the step, divided by its items in the
loss. So the loop has no state but the step: the same command resumes.
"""

import samestep.base.preflight  # noqa: F401  # isort: skip
import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from accelerate import Accelerator

import task

from samestep import (  # isort: skip
    NOTHING, ROUNDING, BatchSize, ClosedUnitInterval, DecayRate, Interval, NonNegativeFloat, Warmup,
    NonNegativeInt, PositiveInt, RunConfig, shutdown, RunStart, prepare_run, Ranks, Run, device,
    split_by_decay, Training, write_evaluation, finish,
)  # fmt: skip
from task import TaskConfig

# ---- Config --------------------------------------------------------------------------------------


@dataclass
class Config(RunConfig):
    """Fields of a recipe, each also a flag. RunConfig has those of folders, trackers and speed."""

    # Run
    seed: NonNegativeInt = 0
    """Seed of the weights, the sample order, dropout and noise."""

    # Length and batches
    max_steps: NonNegativeInt = 800
    """Optimizer steps to train; 0: num_epochs decides."""
    num_epochs: NonNegativeFloat = 0.0
    """Passes over the training data, in place of max_steps."""
    min_steps: NonNegativeInt = field(default=0, metadata=NOTHING)
    """With num_epochs: while the rows give fewer steps, global_batch_size is halved, down to 4, and
    passes are added, up to 10. 0: neither. A flag of num_epochs or global_batch_size: likewise."""
    global_batch_size: BatchSize = 32
    """Samples in an optimizer step, over all processes."""
    micro_batch_size: BatchSize | Literal["auto"] = field(default=32, metadata=ROUNDING)
    """Maximum of samples that a device takes at once; auto: as many as fit, fewer when memory runs
    out. The result stays the same to rounding, except for randomness in the model (dropout)."""

    # Optimizer
    learning_rate: NonNegativeFloat = 3e-3
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.1
    """AdamW's weight decay; vectors, names that end in bias, and _no_weight_decay have none."""
    beta1: DecayRate = 0.9
    """AdamW's decay rate of the first moment."""
    beta2: DecayRate = 0.99
    """AdamW's decay rate of the second moment."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Gradients are scaled down to this norm; 0: never."""

    # Learning rate schedule
    lr_schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Learning rate after the warm-up; wsd: constant, then a linear decay."""
    warmup_steps: Warmup = 50
    """Steps over which the learning rate rises from zero to its peak; below 1: a part of all steps,
    rounded up."""
    decay_fraction: ClosedUnitInterval = 0.2
    """wsd only: fraction of all steps, at the end, in which the learning rate decays."""
    final_lr_fraction: ClosedUnitInterval = 0.1
    """Final learning rate as a fraction of the peak."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the peak grows with global_batch_size / reference_batch_size."""
    reference_batch_size: BatchSize = 32
    """Global batch size for which learning_rate was chosen; read by lr_scaling."""

    # Evaluation and checkpoints
    eval_every: Interval = field(default=100, metadata=NOTHING)
    """Steps between evaluations, or epoch; the last step is always evaluated; 0: only the last."""
    save_every: Interval = field(default=200, metadata=NOTHING)
    """Steps between checkpoints, or epoch; the last step is always saved; 0: only the last."""
    export: Literal["last", "best"] = field(default="last", metadata=NOTHING)
    """Model to export at the end: the last, or the one with the smallest eval_loss of those that
    were saved. best also saves a checkpoint before each evaluation."""

    # Logging
    log_every: PositiveInt = field(default=10, metadata=NOTHING)
    """Steps between lines of metrics.jsonl; their loss is the mean over these steps."""

    # Speed, memory and determinism
    compile: bool = False
    """torch.compile: starts more slowly, runs faster; for GPUs. The repeated blocks of a model are
    compiled once. It changes the masks of dropout."""
    exact: bool = field(default=False, metadata=ROUNDING)
    """Bitwise identical on any number of processes, also if it changes during a run. Fixes
    micro_batch_size; a step needs a micro-batch for each process, and under FSDP as many for each.
    Implies deterministic."""
    gradient_checkpointing: bool = field(default=False, metadata=ROUNDING)
    """Recompute activations in the backward pass: less memory, about a third more time."""

    task: TaskConfig = field(default_factory=TaskConfig)
    """What is trained: see task.py."""


# ---- Optimizer and schedule ----------------------------------------------------------------------


def build_optimizer(model: torch.nn.Module, cfg: Config) -> torch.optim.Optimizer:
    """The optimizer: change it here. `lr` is a placeholder; each step sets it from lr_at.

    It keeps all in `state`, by weight. Adafactor and Rprop cannot update FSDP's DTensors.
    """
    decayed, others = split_by_decay(model)
    groups = [
        {"params": decayed, "weight_decay": cfg.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(cfg.beta1, cfg.beta2), fused=True)


def lr_at(step: int, cfg: Config, max_steps: int) -> float:
    """Learning rate of this step, counted from 1. Nothing of a schedule is ever stored."""
    ratio = cfg.global_batch_size / cfg.reference_batch_size
    peak = cfg.learning_rate * ratio ** {"none": 0, "sqrt": 0.5, "linear": 1}[cfg.lr_scaling]
    warmup = cfg.warmup_steps
    if warmup < 1:  # a part of all steps
        warmup = math.ceil(round(warmup * max_steps, 6))
    if step <= warmup:
        return peak * step / warmup
    decay_start = warmup
    if cfg.lr_schedule == "wsd":
        decay_start = max(decay_start, round(max_steps * (1 - cfg.decay_fraction)))
    decay_steps = max(max_steps - decay_start, 1)
    # The part of the decay that is left: from 1 down to 0.
    left = min(1 - (step - 1 - decay_start) / decay_steps, 1)
    if cfg.lr_schedule == "constant":
        left = 1
    elif cfg.lr_schedule == "cosine":
        left = (1 - math.cos(math.pi * left)) / 2
    return peak * (cfg.final_lr_fraction + (1 - cfg.final_lr_fraction) * left)


# ---- Evaluation ----------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(training: Training) -> dict[str, float]:
    """The scores of all rows of the validation split, each counted once."""
    run, model = training.run, training.exported
    evaluation = training.evaluation(run.validation)
    for batch in evaluation:  # as many on every rank, as FSDP needs it
        evaluation.add(lambda: model(run.task.eval_sums, batch))
        if hasattr(run.task, "eval_outputs"):
            evaluation.keep(lambda: model(run.task.eval_outputs, batch))
    return run.score(evaluation)


# ---- Training ------------------------------------------------------------------------------------


def main(start: RunStart, ranks: Ranks, stop: shutdown.StopRequest) -> int:
    """Trains, evaluates, saves and exports as the config says; the exit code. Raises UserError."""
    run = Run(start, ranks, stop)
    cfg, task = run.cfg, run.task
    if run.nothing_to_do:
        return run.print_summary()

    # Create the accelerator. Its devices, precision and sharding are those of the YAML.
    accelerator = Accelerator(
        log_with=None if cfg.tracker == "none" else cfg.tracker,
        project_dir=cfg.output_dir,
        **device.accelerator_options(cfg),
    )

    # Build the model and its optimizer, and prepare them.
    model = run.build_model(accelerator)
    optimizer = build_optimizer(model, cfg)
    with run.preparing(model, optimizer) as module:  # calls as model(task.loss_sum, batch)
        model, optimizer = accelerator.prepare(module, optimizer)
    training = Training(accelerator, model, optimizer, run.rows, **run.options)
    if cfg.eval_only:
        return write_evaluation(training, evaluate(training))

    # Resume from a checkpoint. A kill may have come before its evaluation.
    if training.lacks_scores(cfg.eval_every, run.max_steps):
        training.score(evaluate(training))

    # Train. A signal ends the loop between two steps: the step is saved, the exit code is 75.
    for step in training.steps(run.max_steps):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step.number, cfg, run.max_steps)
        for batch in step:  # on the device, seeded by the number of the micro-batch
            with accelerator.accumulate(model):
                step.backward(lambda: model(task.loss_sum, batch))
        step.clip(cfg.max_grad_norm)  # a step whose norm is not finite changes nothing
        optimizer.step()
        training.log(step)

        # Save, then evaluate: a stop loses nothing. The best model is one of those that were saved.
        to_evaluate = step.due(cfg.eval_every)
        if step.due(cfg.save_every) or (to_evaluate and cfg.export == "best"):
            training.save()
        if to_evaluate:
            training.score(evaluate(training))

    # Export the last model or the best.
    accelerator.wait_for_everyone()
    return finish(training, evaluate)


def prepare() -> RunStart:
    """What needs no model, before the processes meet: the config, the data, where to start."""
    return prepare_run(Config, task, __doc__)


if __name__ == "__main__":
    shutdown.run(main, prepare)
