"""The project that is measured: its recipe, task and data, without a run folder."""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from samestep.checkpoint.weights import enable_gradient_checkpointing
from samestep.processes.ranks import UserError
from samestep.settings import config, contract
from samestep.start import startup
from samestep.step import batches
from samestep.step.batches import Batch, SampleDataset


@dataclasses.dataclass
class Project:
    """What builds and runs the project's own model on its own data."""

    cfg: Any  # train.Config
    recipe: Path
    task: contract.Task
    build_optimizer: Callable[[torch.nn.Module, Any], torch.optim.Optimizer]
    prepared: Any  # what task.prepare_data returned
    rows: SampleDataset  # of training

    def build_model(self, checkpointing: bool = False) -> torch.nn.Module:
        """The task's model, to be trained; the seed gives all processes the same one."""
        batches.seed_draws(self.cfg.seed)
        model = contract.check_model(self.task.build_model(self.cfg.task, self.prepared))
        if checkpointing:
            enable_gradient_checkpointing(model)
        return model.train()

    def batch(self, positions: Iterable[int]) -> Batch:
        """The training micro-batch of the samples at these positions of the run."""
        return batches.make_collate(self.task)(self.rows.__getitems__([*positions]))[0]


def read_project(flags: list[str]) -> Project:
    """Reads the recipe and flags of train.py, and prepares the data. Raises ValueError."""
    train, task = startup.find_project()
    contract.check_functions(task)
    usage = "python -m samestep hardware VERB FLAGS"
    cfg, recipe, given, _ = config.parse_config(train.Config, flags, usage)
    saved = {each.name: each.metadata.get("saved", True) for each in dataclasses.fields(cfg)}
    for name in given:
        if not saved.get(name, True):
            raise UserError(f"only train.py can do --{name}; leave it out")
    prepared = task.prepare_data(cfg.task)
    data = task.datasets(cfg.task, prepared)
    contract.check_datasets(data)
    rows = SampleDataset(data[0], task, cfg.seed)
    return Project(cfg, recipe, task, train.build_optimizer, prepared, rows)
