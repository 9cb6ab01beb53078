"""A task for tests: a plain nn.Module on numbers, with faults to order. No transformers."""

import os
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import PartialState

RANK = int(os.environ.get("RANK", 0))
PREPARED: list[int] = []


@dataclass
class TaskConfig:
    samples: int = 37
    """Training rows."""
    held_out: int = 11
    """Validation rows."""
    dropout: float = 0.0
    """Dropout between the two layers."""
    poisoned: int = -1
    """Sample id from which on the loss is `poison`."""
    poison: str = "nan"
    """What the loss of a poisoned sample is."""
    poison_rank: int = -1
    """Only the loss of this process is poisoned, and not its gradient; -1: both, everywhere."""
    fail_where: str = ""
    """Function that raises, on process `fail_rank`: prepare_data, views, row or build_model."""
    fail_rank: int = 1
    """The process that fails."""
    fail_kind: str = "ValueError"
    """What it raises."""
    row_seconds: float = 0.0
    """Time to read a training row."""
    prepare_seconds: float = 0.0
    """Time to prepare the data."""
    prepare_host: str = ""
    """The host on which preparing takes this time, and fails; empty: all."""
    hang_at: int = -1
    """Sample id at which a process stops answering."""
    signal_at: int = field(default=-1, metadata={"changes": "nothing"})
    """Sample id at which the process that reads it gets `signal`."""
    signal: str = field(default="SIGKILL", metadata={"changes": "nothing"})
    """A signal, by its name."""
    seed: int = 0
    """Of the data."""
    silent: int = 0
    """Rows without items in the loss: those whose id this number divides; 0: none."""
    width: int = 32
    """Of the hidden layer."""
    fail_report: bool = False
    """Whether `report` fails."""


class Numbers(torch.utils.data.Dataset):
    def __init__(self, cfg: TaskConfig, first: int, size: int, seconds: float):
        self.cfg, self.first, self.size, self.seconds = cfg, first, size, seconds

    def __len__(self):
        return self.size

    def __getitem__(self, i: int) -> dict:
        training = self.first == 0  # validation rows are read before the processes meet
        fail(self.cfg, "row", training and i == 5)
        if self.seconds:
            time.sleep(self.seconds)
        if training and i == self.cfg.hang_at and RANK == self.cfg.fail_rank:
            os.kill(os.getpid(), signal.SIGSTOP)
        if training and i == self.cfg.signal_at and PartialState._shared_state:
            os.kill(os.getpid(), getattr(signal, self.cfg.signal))
        draw = torch.Generator().manual_seed(1000 * self.cfg.seed + self.first + i)
        x = torch.randn(8, generator=draw)
        poison = float(self.cfg.poison) if i == self.cfg.poisoned else 0.0
        # 1 to 4 items in the loss: their number differs between samples.
        counted = torch.arange(4) <= i % 4
        if self.cfg.silent and i % self.cfg.silent == 0:
            counted = torch.zeros(4, dtype=torch.bool)
        return {"x": x, "y": x[:4] * x[4:], "counted": counted, "poison": poison}


def fail(cfg: TaskConfig, where: str, now: bool = True) -> None:
    if cfg.fail_where == where and RANK == cfg.fail_rank and now:
        raise {"ValueError": ValueError, "TypeError": TypeError}[cfg.fail_kind](f"no {where} here")


def views(cfg: TaskConfig) -> tuple:
    if cfg.prepare_host in ("", socket.gethostname()):
        if cfg.prepare_seconds and not PREPARED:  # a start calls this function twice
            print("preparing", flush=True)
            time.sleep(cfg.prepare_seconds)
        PREPARED.append(1)
        fail(cfg, "prepare_data")
    fail(cfg, "views")
    train = Numbers(cfg, 0, cfg.samples, cfg.row_seconds)
    return train, Numbers(cfg, 500, cfg.held_out, 0.0)


def collate(rows: list[dict]) -> dict:
    batch = {name: torch.stack([row[name] for row in rows]) for name in ("x", "y", "counted")}
    return batch | {"poison": torch.tensor([row["poison"] for row in rows])}


def count(batch: dict) -> int:
    return int(batch["counted"].sum())


def build_model(cfg: TaskConfig) -> torch.nn.Module:
    fail(cfg, "build_model")
    model = torch.nn.Sequential(
        torch.nn.Linear(8, cfg.width),
        torch.nn.Tanh(),
        torch.nn.Dropout(cfg.dropout),
        torch.nn.Linear(cfg.width, 4),
    )
    model.poison_rank, model.fail_report = cfg.poison_rank, cfg.fail_report
    return model


def loss_sum(model: torch.nn.Module, batch: dict) -> torch.Tensor:
    losses = (model(batch["x"]) - batch["y"]) ** 2
    loss = losses[batch["counted"]].sum()
    bare = getattr(model, "module", model)
    poison = batch["poison"].sum()
    if bare.poison_rank in (-1, RANK):
        return loss + poison if bare.poison_rank >= 0 else loss * (1 + poison)
    return loss


@torch.no_grad()
def eval_sums(model: torch.nn.Module, batch: dict) -> dict:
    losses = (model(batch["x"]) - batch["y"]) ** 2
    rows = torch.ones(len(losses))
    return {
        "loss": losses[batch["counted"]].sum(), "terms": batch["counted"].sum(), "rows": rows.sum()
    }  # fmt: skip


def metrics(sums: dict) -> dict:
    return {"loss": float(sums["loss"] / sums["terms"]), "rows": float(sums["rows"])}


def report(model: torch.nn.Module, sums: dict, output: Path) -> dict:
    if model.fail_report:
        raise TypeError("no picture\nof this")
    return {}


def export(model: torch.nn.Module, output: Path) -> None:
    torch.save(model.state_dict(), output / "weights.pt")
    return {}
