"""A variational autoencoder of small vectors. Its noise is drawn by the row, or in the model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

LATENT = 3


@dataclass
class TaskConfig:
    noise: Literal["row", "model"] = "row"
    """Where noise is drawn."""


class Vectors(torch.utils.data.Dataset):
    """Rows {"x": (8,)}; those for validation have noise of their own, the same each time."""

    def __init__(self, seed: int, size: int, fixed: bool):
        self.seed, self.size, self.fixed = seed, size, fixed

    def __len__(self):
        return self.size

    def __getitem__(self, i: int) -> dict:
        generator = torch.Generator().manual_seed(1000 * self.seed + i)
        row = {"x": torch.randn(8, generator=generator)}
        return augment(row, generator) if self.fixed else row


def views() -> tuple:
    return Vectors(1, 37, False), Vectors(2, 11, True)


def augment(row: dict, generator: torch.Generator) -> dict:
    return {**row, "noise": torch.randn(LATENT, generator=generator)}


def collate(rows: list[dict]) -> dict:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def count(batch: dict) -> int:
    return len(batch["x"])


class Model(nn.Module):
    def __init__(self, noise: str):
        super().__init__()
        self.noise, self.encoder = noise, nn.Linear(8, 2 * LATENT)
        self.decoder = nn.Linear(LATENT, 8)

    def forward(self, x, noise):
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        noise = noise if self.noise == "row" else torch.randn_like(mean)
        again = self.decoder(mean + noise * (log_variance / 2).exp())
        divergence = (mean**2 + log_variance.exp() - log_variance - 1).sum() / 2
        return ((again - x) ** 2).sum() + divergence


def build_model(cfg: TaskConfig) -> nn.Module:
    return Model(cfg.noise)


def loss_sum(model: nn.Module, batch: dict) -> torch.Tensor:
    return model(batch["x"], batch["noise"])


def eval_sums(model: nn.Module, batch: dict) -> dict:
    return {"loss": loss_sum(model, batch), "rows": torch.tensor(len(batch["x"]))}


def metrics(sums: dict) -> dict:
    return {"loss": float(sums["loss"] / sums["rows"]), "rows": float(sums["rows"])}


def export(model: nn.Module, output: Path) -> None:
    torch.save(model.state_dict(), output / "weights.pt")
