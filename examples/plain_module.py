"""A whole task around a plain nn.Module: a small network learns the sine of a number.

Make it your task.py and change it. samestep.contract.contract says what each function gets and
returns.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_model
from torch import nn
from torch.utils.data import Dataset


@dataclass
class TaskConfig:
    samples: int = 1000
    """Points to train on."""
    hidden_size: int = 64
    """Width of the network."""


class Points(Dataset):
    """Rows {"x": (1,), "y": (1,)} of a tensor of shape (N, 2)."""

    def __init__(self, points: torch.Tensor):
        self.points = points

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, i: int) -> dict:
        return {"x": self.points[i, :1], "y": self.points[i, 1:]}


def views(cfg: TaskConfig) -> tuple[Points, Points]:
    """Rows to train and to evaluate on. They must not change between runs."""
    if cfg.samples < 1:
        raise ValueError(f"task.samples is {cfg.samples}; give at least 1")
    generator = torch.Generator().manual_seed(0)
    x = 6 * torch.rand(100 + cfg.samples, 1, generator=generator) - 3
    points = torch.cat([x, x.sin()], dim=1)
    return Points(points[100:]), Points(points[:100])


def collate(rows: list[dict]) -> dict:
    return {name: torch.stack([row[name] for row in rows]) for name in ("x", "y")}


def count(batch: dict) -> int:
    return len(batch["y"])  # one item in the loss for each row


def build_model(cfg: TaskConfig) -> nn.Module:
    return nn.Sequential(nn.Linear(1, cfg.hidden_size), nn.Tanh(), nn.Linear(cfg.hidden_size, 1))


def loss_sum(model: nn.Module, batch: dict) -> torch.Tensor:
    return ((model(batch["x"]) - batch["y"]) ** 2).sum()


def eval_sums(model: nn.Module, batch: dict) -> dict:
    return {"loss": loss_sum(model, batch), "rows": torch.tensor(len(batch["y"]))}


def metrics(sums: dict) -> dict:
    return {"loss": float(sums["loss"] / sums["rows"])}


def export(model: nn.Module, output: Path) -> None:
    save_model(model, str(output / "model.safetensors"))
