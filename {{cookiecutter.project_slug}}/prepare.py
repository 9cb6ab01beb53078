"""Prepares the data, and no more: on a machine without a GPU, before the training.

    python prepare.py
    python prepare.py --config configs/train/default.yaml --task.cache_dir /shared/cache
    make prepare RECIPE=default ARGS="--task.cache_dir /shared/cache"

It takes the recipe and the flags of train.py, and calls the same function of task.py. It makes no
run folder. Data that is there is only checked. After an interruption the same command goes on.

Exit codes: 0 the data is there; 2 the input is wrong; 75 stopped on request.
"""

import training.begin  # noqa: F401  # isort: skip
from pathlib import Path

import task
from train import Config
from training import contract, shutdown
from training.console import say
from training.startup import read_config


def main() -> None:
    """Prepares the data, and prints what is there in a line; raises ValueError for bad input."""
    contract.check_functions(task)
    cfg, _ = read_config(Config, __doc__)
    for name in ("check", "eval_only"):
        if getattr(cfg, name):
            raise ValueError(f"only train.py can do --{name}; leave it out")
    prepared = task.prepare_data(cfg.task)
    data = task.datasets(cfg.task, prepared)
    contract.check_datasets(data)
    where = f" in {prepared}" if isinstance(prepared, Path | str) else ""
    train_rows, eval_rows = map(len, data)
    say(f"prepared{where}: {train_rows:,} rows to train on, {eval_rows:,} to evaluate on")


if __name__ == "__main__":
    shutdown.run_alone(main)
