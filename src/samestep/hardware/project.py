"""The project that is measured: its recipe, task and data, without a run folder."""

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import send_to_device

from samestep.base.files import read_json_object
from samestep.contract import contract
from samestep.launch.device import allow_tf32, compile_blocks
from samestep.prepared.run_data import read_data
from samestep.run import startup
from samestep.settings import config
from samestep.step import seeds
from samestep.step.inputs import check_loss
from samestep.step.model import enable_gradient_checkpointing
from samestep.step.plan import number_of
from samestep.step.samples import SampleDataset, collate

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Project(NamedTuple):
    """What builds and runs the project's own model on its own data."""

    cfg: Any  # train.Config
    recipe: Path
    task: Any  # see contract.bind
    data: Any  # what task.prepare_data returned
    views: tuple[Any, Any]  # to train and to evaluate on
    rows: SampleDataset  # of training
    found: int = 0  # the micro_batch_size that auto found in the run of this recipe

    def build_model(self, device: torch.device) -> torch.nn.Module:
        """The task's model, to be trained; under "meta" without memory."""
        seeds.seed_everything(self.cfg.seed)
        with torch.device("meta") if device.type == "meta" else contextlib.nullcontext():
            model = contract.check_model(self.task.build_model())
        model = model.to(device).train()
        if self.cfg.gradient_checkpointing:
            enable_gradient_checkpointing(model)
        if self.cfg.compile and device.type != "meta":
            compile_blocks(model)
        allow_tf32(self.cfg.tf32)
        return model

    def batch(self, positions: Iterable[int]) -> dict:
        """The training micro-batch of the samples at these positions of the run."""
        return collate(self.task, self.rows.__getitems__([*positions])).batch

    def add_gradients(
        self, model: torch.nn.Module, batch: dict, precision: str, scale: int = 1
    ) -> torch.Tensor:
        """The summed loss of a micro-batch; adds its gradients to those of the weights."""
        device = next(model.parameters()).device
        batch = send_to_device(batch, device)
        with torch.autocast(device.type, AUTOCAST.get(precision), enabled=precision in AUTOCAST):
            loss = self.task.loss_sum(model, batch)
        check_loss(loss)
        (loss.float() * scale).backward()
        return loss.detach()


def read_project(flags: list[str], about: str | None = None) -> Project:
    """Reads the recipe and flags of train.py, and prepares the data. Raises ValueError."""
    train, task = startup.find_project()
    cfg, recipe = config.parse_config(train.Config, flags, about)
    folder = Path(cfg.output_dir or f"runs/{recipe.stem}")
    found = read_json_object(folder / "status.json").get("micro_batch_size", 0)
    if cfg.micro_batch_size == "auto":
        cfg.micro_batch_size = found or number_of("auto", cfg.global_batch_size)
    for name in ("check", "eval_only"):
        if getattr(cfg, name):
            raise ValueError(f"only train.py can do --{name}; leave it out")
    data, bound, views, _ = read_data(cfg, task)
    rows = SampleDataset(views[0], bound, cfg.seed)
    return Project(cfg, recipe, bound, data, views, rows, found)
