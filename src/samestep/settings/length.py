"""How long a run on few rows is, and what to write for one that would train.

A run of too few steps, or at too low a rate, ends without an error, and has learned nothing.
"""

import math
from typing import Any

FEW_ROWS = 64  # held-out rows that are evaluated before the first step
_SMALLEST, _PASSES = 4, 10  # rows of a step, and passes, to which min_steps goes
_SHORT, _ENOUGH, _PART = 20, 100, 0.03  # steps of too short a run; those of an advised one, warm-up
_HARDLY, _SLOWLY = 0.05, 0.25  # parts of the held-out loss; the latter at a third of the rates here
# Peak learning rates for pretrained weights of up to so many parameters, and for preferences, which
# move a trained model: those of TRL's and transformers' examples; of the smallest those that
# benchmarks/small_data.py measures. Adapters take ten times as much.
_RATES = (
    (10**7, 2e-4, 5e-5),
    (10**8, 1e-4, 1e-5),
    (5 * 10**8, 5e-5, 5e-6),
    (3 * 10**9, 3e-5, 2e-6),
    (math.inf, 2e-5, 1e-6),
)


def warmup_of(cfg: Any, max_steps: int) -> int:
    """The steps of the warm-up, as lr_at of train.py counts them."""
    part = math.ceil(round(cfg.warmup_steps * max_steps, 6))
    return part if cfg.warmup_steps < 1 else cfg.warmup_steps


def samples_of(cfg: Any, rows: int) -> int:
    """The samples of a run of num_epochs: 1.1 x 100 is 110.00000000000001."""
    return math.ceil(round(cfg.num_epochs * rows, 6))


def choose_steps(cfg: Any, rows: int) -> list[str]:
    """Set the global batch and the passes of few rows, as min_steps says; a line if they change.

    While the run has fewer steps, the batch is halved, down to 4 rows, and then passes are added,
    up to 10. What it has chosen it leaves as it is.
    """
    given = (cfg.num_epochs, cfg.global_batch_size)
    while -(-samples_of(cfg, rows) // cfg.global_batch_size) < cfg.min_steps:
        if cfg.global_batch_size > _SMALLEST:
            cfg.global_batch_size = max(cfg.global_batch_size // 2, _SMALLEST)
        elif cfg.num_epochs < _PASSES:
            cfg.num_epochs = min(cfg.num_epochs + 1, float(_PASSES))
        else:
            break
    epochs, size = cfg.num_epochs, cfg.global_batch_size
    if (epochs, size) == given:
        return []
    return [
        f"{rows:,} rows, {epochs:g} epochs of {rows / size:.3g} steps of {size} rows: {given[0]:g} "
        f"epochs of steps of {given[1]} are fewer than min_steps {cfg.min_steps} (0 keeps them)"
    ]


def remarks_on_length(cfg: Any, rows: int, max_steps: int) -> list[str]:
    """The steps of a warm-up that is a part; and, of a run that is too short, what to write.

    `rows`: to train on; 0: a stream."""
    warmup, remarks = warmup_of(cfg, max_steps), []
    if 0 < cfg.warmup_steps < 1:
        remarks.append(f"warmup_steps {cfg.warmup_steps:g}: {warmup} of {max_steps:,} steps")
    problem = "few steps change little" if max_steps < _SHORT else ""
    if warmup >= max_steps and warmup > 1:
        problem = f"the learning rate rises to the end: warmup_steps is {cfg.warmup_steps}"
    if problem:
        advice = f"for one that trains give {_longer(cfg, rows, max_steps)}"
        remarks.append(f"{problem}, and the run has {max_steps} steps; {advice}")
    return remarks


def remarks_on_loss(
    cfg: Any, rows: int, steps: int, losses: tuple[float, float], parameters: int
) -> list[str]:
    """A line if the loss of held-out rows hardly fell, with the flags of a run that learns more.

    `losses`: before the first step and at the end. `parameters`: of the whole model."""
    before, after = losses
    _, rate, of_preferences = next(each for each in _RATES if parameters <= each[0])
    highest = 1e-3  # as config.remarks_on_rate has it
    if hasattr(cfg.task, "beta"):
        rate = of_preferences
    if getattr(cfg.task, "lora_rank", 0):
        rate, highest = 10 * rate, 5e-3
    least = _SLOWLY if cfg.learning_rate < rate / 3 else _HARDLY
    if not after >= before - least * abs(before):
        return []
    if rate <= cfg.learning_rate:  # it was not enough for this model
        rate = max(cfg.learning_rate, min(3 * cfg.learning_rate, highest))
    longer = "" if steps >= _ENOUGH else f"{_longer(cfg, rows, steps)} "
    return [
        f"the loss of held-out rows was {before:.4f} before the first step, and is {after:.4f}; to "
        f"learn more give --learning_rate {rate:g} {longer}--output_dir {cfg.output_dir}-2"
    ]


def _longer(cfg: Any, rows: int, steps: int) -> str:
    """The flags of a run of enough steps, of which few warm up."""
    flags = "" if 0 < cfg.warmup_steps <= _PART else f" --warmup_steps {_PART}"
    if not (cfg.num_epochs and rows):
        return f"--max_steps {max(steps, _ENOUGH)}{flags}"
    size = min(cfg.global_batch_size, _SMALLEST, rows)
    epochs = max(math.ceil(_ENOUGH * size / rows), math.ceil(cfg.num_epochs))
    return f"--num_epochs {epochs} --global_batch_size {size}{flags}"
