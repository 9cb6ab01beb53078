"""A whole task of diffusion: a small network learns to draw digits, those inside scikit-learn.

Make it your task.py, and put your own images in place of Digits. Noise and time belong to the row,
so the hardware does not change the result. samples.png shows eight drawings of each digit. The
network predicts v, as in Salimans and Ho, "Progressive Distillation", ICLR 2022.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from safetensors.torch import save_model
from sklearn.datasets import load_digits
from torch import nn


@dataclass
class TaskConfig:
    width: int = 64
    """Channels of the network, a multiple of 8."""


class Digits(torch.utils.data.Dataset):
    """Rows {"image": (1, 8, 8), from -1 to 1; "label": ()}; `noisy`: with noise, for validation."""

    def __init__(self, part: slice, noisy: bool):
        digits, self.noisy = load_digits(), noisy
        self.images = torch.tensor(digits.images[part] / 8 - 1, dtype=torch.float32)
        self.labels = torch.tensor(digits.target[part])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict:
        row = {"image": self.images[i : i + 1], "label": self.labels[i]}
        return augment(row, torch.Generator().manual_seed(i)) if self.noisy else row


def views() -> tuple[Digits, Digits]:
    return Digits(slice(197, None), False), Digits(slice(197), True)


def augment(row: dict, generator: torch.Generator) -> dict:
    """Draws time and noise; the generator belongs to the row and the epoch."""
    time, noise = torch.rand(1, generator=generator), torch.randn(1, 8, 8, generator=generator)
    return {**row, "time": time[0], "noise": noise}


collate = torch.utils.data.default_collate


def count(batch: dict) -> int:
    return len(batch["image"])  # one item in the loss for each image


class Network(nn.Module):
    """v, (B, 1, 8, 8), from noisy images of this shape, times (B,), 1: noise alone, and labels."""

    def __init__(self, width: int):
        super().__init__()
        self.label, self.enter = nn.Embedding(10, width), nn.Conv2d(1, width, 3, padding=1)
        self.about, self.leave = nn.Linear(width + 16, width), nn.Conv2d(width, 1, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
            for _ in range(8)
        )

    def forward(self, x: torch.Tensor, time: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        waves = (math.pi * time[:, None] * torch.arange(16, device=time.device)).cos()
        x, about = self.enter(x), self.about(torch.cat([waves, self.label(label)], 1))
        for first, second in zip(self.blocks[::2], self.blocks[1::2], strict=True):
            x = x + second(first(x) + about[..., None, None])
        return self.leave(x)


def build_model(cfg: TaskConfig) -> nn.Module:
    return Network(cfg.width)


def loss_sum(model: nn.Module, batch: dict) -> torch.Tensor:
    angle = batch["time"][:, None, None, None] * math.pi / 2
    noisy = angle.cos() * batch["image"] + angle.sin() * batch["noise"]
    v = angle.cos() * batch["noise"] - angle.sin() * batch["image"]
    return ((model(noisy, batch["time"], batch["label"]).float() - v) ** 2).mean((1, 2, 3)).sum()


def eval_sums(model: nn.Module, batch: dict) -> dict:
    return {"loss": loss_sum(model, batch), "images": torch.tensor(count(batch))}


def metrics(sums: dict) -> dict:
    return {"loss": float(sums["loss"] / sums["images"])}


@torch.no_grad()
def draw(model: nn.Module, labels: torch.Tensor, steps: int = 50) -> torch.Tensor:
    """Images of these digits, (B, 1, 8, 8): noise is turned by v into an image, step by step."""
    x = torch.randn(len(labels), 1, 8, 8, generator=torch.Generator().manual_seed(0))
    x, turn = x.to(labels.device), math.pi / 2 / steps
    for step in range(steps, 0, -1):
        v = model(x, torch.full(labels.shape, step / steps, device=labels.device), labels)
        x = math.cos(turn) * x - math.sin(turn) * v
    return x.clamp(-1, 1)


def report(model: nn.Module, sums: dict, output: Path) -> dict:
    labels = torch.arange(10, device=model.label.weight.device).repeat_interleave(8)
    images = draw(model, labels).cpu().view(10, 8, 8, 8).transpose(1, 2).reshape(80, 64)
    plt.imsave(output / "samples.png", images.numpy().repeat(8, 0).repeat(8, 1), cmap="gray")
    return {"samples": output / "samples.png"}


def export(model: nn.Module, output: Path) -> None:
    save_model(model, str(output / "model.safetensors"))
