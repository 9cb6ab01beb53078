"""The project that samestep hardware measures: its recipe, task and data, without a run folder."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from samestep.checkpoint.weights import enable_gradient_checkpointing
from samestep.processes.ranks import UserError
from samestep.settings import config, contract
from samestep.settings.mesh import Layout
from samestep.start import startup
from samestep.step import batches
from samestep.step.batches import Batch, SampleDataset, StepPlan


@dataclass
class Project:
    """What a verb needs to build and run the project's own model on its own data."""

    cfg: Any  # train.Config
    recipe: Path
    flags: list[str]  # of train.py, as they were given
    task: contract.Task
    build_optimizer: Callable[[torch.nn.Module, Any], torch.optim.Optimizer]
    layout: Layout
    plan: StepPlan  # of a step on the processes that run now
    prepared: Any  # what task.prepare_data returned
    rows: SampleDataset  # of training

    def build_model(self, checkpointing: bool = False) -> torch.nn.Module:
        """The task's model, to be trained; the seed gives all processes the same one."""
        batches.seed_everything(self.cfg.seed)
        model = contract.check_model(self.task.build_model(self.cfg.task, self.prepared))
        if checkpointing:
            enable_gradient_checkpointing(model)
        return model.train()

    def batch(self, positions: Iterable[int]) -> Batch:
        """The training micro-batch of the samples at these positions of the run."""
        return batches.make_collate(self.task)(self.rows.__getitems__([*positions]))[0]


def read_project(flags: list[str]) -> Project:
    """Reads the recipe and flags of train.py, and prepares the data. Raises ValueError.

    Call it before the processes meet, since preparing data may take longer than their timeout.
    """
    train, task = startup.find_project()
    contract.check_functions(task)
    usage = "python -m samestep hardware VERB FLAGS"
    cfg, recipe, given, _ = config.parse_config(train.Config, flags, usage)
    saved = {each.name: each.metadata.get("saved", True) for each in dataclasses.fields(cfg)}
    for name in given:
        if not saved.get(name, True):
            raise UserError(f"only train.py can do --{name}; leave it out")
    layout = startup.read_layout(cfg)
    startup.check_sharing(cfg, layout)
    plan = plan_of(cfg, layout)
    prepared = task.prepare_data(cfg.task)
    data = task.datasets(cfg.task, prepared)
    contract.check_datasets(data)
    rows = SampleDataset(data[0], task, cfg.seed)
    build = train.build_optimizer
    return Project(cfg, recipe, flags, task, build, layout, plan, prepared, rows)


def plan_of(cfg: Any, layout: Layout) -> StepPlan:
    """The cut of this config's step on the processes that run now."""
    return batches.plan_step(
        cfg.global_batch_size,
        cfg.micro_batch_size,
        layout.replicas,
        cfg.exact,
        # One process, such as that of recommend, says nothing about the shares of a launch.
        cfg.device_shares if layout.processes > 1 else "equal",
        layout.replica,
        layout.in_step,
    )
