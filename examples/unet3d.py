"""A whole task on volumes: a small 3D U-Net finds a ball and a box in noise.

Make it your task.py, and put your own scans in place of Volumes. Noise and mirroring belong to the
row, and the loss is a sum over voxels: so the hardware does not change the result.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_model
from torch import nn

CLASSES, UNIT = 3, "voxels"  # the ground, a ball, a box


@dataclass
class TaskConfig:
    samples: int = 600
    """Volumes; the first 50 are evaluated on."""
    side: int = 16
    """Voxels along each side of a volume, a multiple of 4."""
    width: int = 8
    """Channels at full resolution, a multiple of 4."""


@dataclass
class Volumes(torch.utils.data.Dataset):
    """Rows (image, float32 (1, S, S, S); classes, int64 (S, S, S)), drawn by their numbers."""

    side: int
    numbers: range
    noisy: bool  # for validation; in training `augment` draws the noise

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, i: int) -> tuple:
        generator, side = torch.Generator().manual_seed(self.numbers[i]), self.side
        places = torch.stack(torch.meshgrid(*[torch.arange(side)] * 3, indexing="ij"))
        classes = torch.zeros(side, side, side, dtype=torch.int64)
        for kind in (1, 2):
            center, size = torch.rand(2, 3, 1, 1, 1, generator=generator)
            distance = (places / side - 0.2 - 0.6 * center).abs() / (0.25 - kind / 20 + size / 10)
            classes[(distance.norm(dim=0) if kind == 1 else distance.amax(0)) < 1] = kind
        row = ((classes > 0).float()[None], classes)
        return augment(row, generator) if self.noisy else row


def views(cfg: TaskConfig) -> tuple[Volumes, Volumes]:
    """Each volume is made when it is read."""
    return Volumes(cfg.side, range(50, cfg.samples), False), Volumes(cfg.side, range(50), True)


def augment(row: tuple, generator: torch.Generator) -> tuple:
    """Mirrors along some axes and adds noise; the generator belongs to the row and the epoch."""
    axes = [axis for axis in (-1, -2, -3) if torch.rand(1, generator=generator) < 0.5]
    image, classes = (each.flip(axes) for each in row)
    return image + torch.randn(image.shape, generator=generator) / 2, classes


def collate(rows: list[tuple]) -> dict:
    return dict(zip(("image", "classes"), map(torch.stack, zip(*rows, strict=True)), strict=True))


def count(batch: dict) -> int:
    return batch["classes"].numel()  # one loss term a voxel


def layer(kind: type, inputs: int, width: int, size: int, **options: int) -> nn.Sequential:
    """With GroupNorm, because the statistics of BatchNorm depend on how a step is cut."""
    return nn.Sequential(kind(inputs, width, size, **options), nn.GroupNorm(4, width), nn.SiLU())


class Level(nn.Module):
    """A level of the U, (B, width, S, S, S) to the same shape; those below have half its side."""

    def __init__(self, inputs: int, width: int, below: int):
        super().__init__()
        self.enter, self.below = layer(nn.Conv3d, inputs, width, 3, padding=1), None
        if below:
            down = layer(nn.Conv3d, width, 2 * width, 2, stride=2)
            up = layer(nn.ConvTranspose3d, 2 * width, width, 2, stride=2)
            self.below = nn.Sequential(down, Level(2 * width, 2 * width, below - 1), up)
            self.leave = layer(nn.Conv3d, 2 * width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        return self.leave(torch.cat([x, self.below(x)], dim=1)) if self.below else x


def build_model(cfg: TaskConfig) -> nn.Module:
    return nn.Sequential(Level(1, cfg.width, 2), nn.Conv3d(cfg.width, CLASSES, 1))


def loss_sum(model: nn.Module, batch: dict) -> torch.Tensor:
    """Cross entropy over a list of voxels: for volumes GPUs have no deterministic kernel."""
    logits = model(batch["image"]).float().movedim(1, -1).flatten(0, -2)
    return nn.functional.cross_entropy(logits, batch["classes"].flatten(), reduction="sum")


def eval_sums(model: nn.Module, batch: dict) -> dict:
    """The loss; for each class its right voxels, and the sum of its own and those taken for it."""
    pair = torch.stack([batch["classes"], model(batch["image"]).argmax(1)]).flatten(1)
    true, taken = nn.functional.one_hot(pair, CLASSES)
    either, right = (true + taken).sum(0), (true * taken).sum(0)
    return {"loss": loss_sum(model, batch), "right": right, "either": either}


def metrics(sums: dict) -> dict:
    """The mean loss of a voxel, in nats, and the Dice score of each kind of object."""
    loss, dice = 2 * sums["loss"] / sums["either"].sum(), 2 * sums["right"] / sums["either"]
    return {"loss": float(loss), "dice_ball": float(dice[1]), "dice_box": float(dice[2])}


def export(model: nn.Module, output: Path) -> None:
    save_model(model, str(output / "model.safetensors"))
