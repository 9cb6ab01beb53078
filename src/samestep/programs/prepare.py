"""Prepares the data, and no more: on a machine without a GPU, before the training.

    python -m samestep prepare
    python -m samestep prepare --config configs/train/default.yaml --task.cache_dir /shared/cache
    make prepare RECIPE=default ARGS="--task.cache_dir /shared/cache"

It takes the recipe and the flags of train.py, and calls the same function of task.py. It makes no
run folder. Data that is there is only checked. After an interruption the same command goes on.

Exit codes: 0 the data is there; 2 the input is wrong; 75 stopped on request.
"""

from pathlib import Path

from samestep.base.console import print_on_main
from samestep.processes import shutdown
from samestep.settings import contract
from samestep.start.startup import find_project, read_config


def prepare() -> None:
    """Prepares the data, and prints what is there in a line; raises ValueError for bad input."""
    train, task = find_project()
    contract.check_functions(task)
    cfg = read_config(train.Config, __doc__)
    for name in ("check", "eval_only"):
        if getattr(cfg, name):
            raise ValueError(f"only train.py can do --{name}; leave it out")
    prepared = task.prepare_data(cfg.task)
    data = task.datasets(cfg.task, prepared)
    contract.check_datasets(data)
    where = f" in {prepared}" if isinstance(prepared, Path | str) else ""
    train_rows, eval_rows = map(len, data)
    print_on_main(f"prepared{where}: {train_rows:,} rows to train on, {eval_rows:,} to evaluate on")


def main() -> None:
    """Runs the program: one line for bad input, and the exit codes above."""
    shutdown.run_alone(prepare)
