"""What happens before the processes of a run meet: config, data, and where to go on.

Each process does it by itself, for data may take longer to prepare than processes wait for each
other. `--check` is this part alone.
"""

import dataclasses
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import checkpoints
import command_line
import data_order
import process
import task
import tracking
from process import UserError, ask
from tracking import IS_MAIN


@dataclass
class Start:
    """What is known without a model: how a step is cut, its data, and where the run goes on."""

    cfg: Any  # train.Config
    output: Path
    lock: Any  # held until the process ends
    micro: int  # samples in a micro-batch
    accumulation: int  # micro-batches of a process in a step
    data: tuple  # to train and to evaluate on
    max_steps: int
    facts: dict  # for the manifests of this run
    checkpoint: Path | None = None
    manifest: dict = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    finished: bool = False


def read_config(config_class: type, about: str) -> Any:
    """The config of this run, from its defaults, the recipe and flags; raises UserError."""
    commands = about.split("\n\n")[1].strip()
    cfg, recipe = ask(command_line.parse, config_class, sys.argv[1:], commands)
    cfg.output_dir = cfg.output_dir or f"runs/{recipe.stem}"
    if bool(cfg.max_steps) == bool(cfg.num_epochs):
        raise UserError(
            f"max_steps is {cfg.max_steps} and num_epochs {cfg.num_epochs:g}, but one must be 0: "
            "give --max_steps 0 to train by epochs, --num_epochs 0 to train by steps"
        )
    if cfg.seed >= 2**63:
        raise UserError(f"seed is {cfg.seed}: give a number below 2**63")
    return cfg


def cut(cfg: Any, processes: int) -> tuple[int, int]:
    """Samples in a micro-batch, and micro-batches of a process in a step."""
    share, rest = divmod(cfg.global_batch_size, processes)
    if rest:
        near = " or ".join(str(n * processes) for n in (share, share + 1) if n)
        raise UserError(
            f"global_batch_size is {cfg.global_batch_size}, which {processes} processes cannot "
            f"share equally; give {near}"
        )
    micro = max(n for n in range(1, min(share, cfg.micro_batch_size) + 1) if share % n == 0)
    return micro, share // micro


def prepare_run(config_class: type, about: str) -> Start:
    """Reads, prepares and checks all that needs no model; raises UserError.

    `about` is train.py's docstring, whose second paragraph are its commands.
    """
    cfg = read_config(config_class, about)
    output = Path(cfg.output_dir)
    processes = process.PROCESSES
    if cfg.config_file:
        processes = max(processes, ask(command_line.read_hardware, Path(cfg.config_file)))
    micro, accumulation = cut(cfg, processes)
    lock = ask(checkpoints.lock, output, not cfg.check) if IS_MAIN else None
    cfg.tracker = "none" if cfg.eval_only else cfg.tracker
    ask(tracking.check, cfg.tracker)

    ask(task.prepare_data, cfg.task)
    data = train_data, eval_data = ask(task.datasets, cfg.task)
    if not len(train_data) or not len(eval_data):
        raise UserError(
            f"task.datasets gives {len(train_data)} rows to train and {len(eval_data)} to evaluate "
            "on; it needs one of each"
        )
    max_steps = cfg.max_steps or math.ceil(cfg.num_epochs * len(train_data) / cfg.global_batch_size)
    facts = {"config": dataclasses.asdict(cfg)}
    facts["data"] = {
        "samples": len(train_data),
        "fingerprint": data_order.fingerprint(train_data),
        "validation": data_order.fingerprint(eval_data),
    }
    facts["identity"] = ask(task.identity, cfg.task) if hasattr(task, "identity") else ""
    start = Start(cfg, output, lock, micro, accumulation, data, max_steps, facts)
    if IS_MAIN:  # to find a checkpoint every byte of it is read: once is enough
        folder = output / "checkpoints"
        found = ask(checkpoints.find, folder, cfg.resume, cfg.eval_only)
        start.checkpoint, start.manifest, start.remarks = found
        if cfg.eval_only and not start.checkpoint:
            raise UserError(f"eval_only: there is no checkpoint in {folder}; train first")
        if start.checkpoint:
            start.changed = ask(checkpoints.compare, start.checkpoint, start.manifest, facts)
        ended = checkpoints.read_status(output).get("state") == "finished"
        ended = ended and start.manifest.get("step", 0) >= max_steps
        start.finished = ended and not cfg.eval_only
        if not start.finished and not cfg.eval_only:
            ask(checkpoints.check_room, folder)
    return start
