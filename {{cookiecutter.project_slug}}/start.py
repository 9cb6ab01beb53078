"""What happens before the processes of a run meet: config, data, and where to go on.

Each process does it by itself, for data may take longer to prepare than processes wait for each
other. `--check` is this part alone.
"""

import contextlib
import dataclasses
import json
import math
import platform
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import checkpoints
import command_line
import contract
import data_order
import process
import task
import tracking
from process import UserError, ask
from tracking import IS_MAIN, escaped, one_line

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft", "numpy")


@dataclass
class Start:
    """What is known without a model: how a step is cut, its data, and where the run goes on."""

    cfg: Any  # train.Config
    output: Path
    lock: Any  # checkpoints.Lock, held until the process ends; None off the main process
    micro: int  # samples in a micro-batch
    accumulation: int  # micro-batches of a process in a step
    data: tuple  # to train and to evaluate on
    max_steps: int
    facts: dict  # for the manifests of this run
    checkpoint: Path | None = None
    manifest: dict = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    finished: str = ""  # why there is nothing left to do
    settings: str = ""  # digest of what a finished run was trained with

    def check_folder(self) -> None:
        """Raises FileNotFoundError if the run folder is gone; for the main process."""
        self.lock.check()


def read_config(config_class: type, about: str) -> tuple[Any, list[str]]:
    """The config of this run, from its defaults, the recipe and flags, and remarks on it.

    Raises UserError.
    """
    commands = about.split("\n\n")[1].strip()
    cfg, recipe, remarks = ask(command_line.parse, config_class, sys.argv[1:], commands)
    cfg.output_dir = cfg.output_dir or f"runs/{recipe.stem}"
    if escaped(cfg.output_dir) != cfg.output_dir:
        name = one_line(cfg.output_dir, 100)
        raise UserError(f"output_dir is {name}, which a terminal cannot show; give another")
    for name, value in checkpoints.flat(dataclasses.asdict(cfg)).items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{name} is {value!r}, which config.yaml cannot hold: {error}"
            ) from None
    return cfg, remarks


def effects(config_class: type, prefix: str = "") -> dict[str, str]:
    """What a change of each field does to a run that continues, by the fields' metadata."""
    found = {}
    for each in dataclasses.fields(config_class):
        found[prefix + each.name] = each.metadata.get("changes", "result")
        if dataclasses.is_dataclass(each.type):
            found |= effects(each.type, f"{prefix}{each.name}.")
    return found


def resolved(cfg: Any) -> dict[str, Any]:
    """The settings of a run, as config.yaml and manifests have them: without those of one start."""
    unsaved = [f.name for f in dataclasses.fields(cfg) if not f.metadata.get("saved", True)]
    return {n: value for n, value in dataclasses.asdict(cfg).items() if n not in unsaved}


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that the numbers depend on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def cut(cfg: Any, processes: int) -> tuple[int, int]:
    """Samples in a micro-batch, and micro-batches of a process in a step."""
    share, rest = divmod(cfg.global_batch_size, processes)
    if rest:
        near = " or ".join(str(n * processes) for n in (share, share + 1) if n)
        raise UserError(
            f"global_batch_size is {cfg.global_batch_size}, which {processes} processes cannot "
            f"share equally; give {near}"
        )
    small = [n for n in range(1, math.isqrt(share) + 1) if share % n == 0]
    divisors = small + [share // n for n in small]
    micro = max(n for n in divisors if n <= cfg.micro_batch_size)
    return micro, share // micro


def prepare_run(config_class: type, about: str) -> Start:
    """Reads, prepares and checks all that needs no model; raises UserError.

    `about` is train.py's docstring, whose second paragraph are its commands.
    """
    cfg, remarks = read_config(config_class, about)
    ask(contract.check_names)
    output = Path(cfg.output_dir)
    processes = process.PROCESSES
    if cfg.config_file:
        processes = ask(command_line.read_hardware, Path(cfg.config_file))
    elif cfg.check:  # of launch.py, without a YAML
        ask(command_line.launched, "num_machines", 1)
        processes = ask(command_line.launched, "num_processes", 1)
    micro, accumulation = cut(cfg, processes)
    lock = ask(checkpoints.Lock, output, not cfg.check) if IS_MAIN else None
    try:
        cfg.tracker = "none" if cfg.eval_only else cfg.tracker
        ask(tracking.check, cfg.tracker, cfg.project)
        ask(task.prepare_data, cfg.task)
        data = ask(task.datasets, cfg.task)
        ask(contract.check_datasets, data)
        start = Start(cfg, output, lock, micro, accumulation, data, cfg.max_steps, {})
        start.remarks = remarks
        start.facts = facts_of(cfg, data)
        if IS_MAIN:  # to find a checkpoint every byte of it is read: once is enough
            ask(find_checkpoint, start, effects(config_class))
        return start
    except BaseException:
        if lock:
            lock.undo()
        raise


def facts_of(cfg: Any, data: tuple) -> dict:
    """What the manifests of this run say of it: settings, data, vocabulary or classes, versions."""
    train_data, eval_data = data
    if not len(train_data) or not len(eval_data):
        raise UserError(
            f"task.datasets gives {len(train_data)} rows to train and {len(eval_data)} to evaluate "
            "on; it needs one of each"
        )
    about = {"samples": len(train_data)}  # fingerprints also find rows that cannot be read
    about["fingerprint"] = ask(data_order.fingerprint, train_data)
    about["validation"] = ask(data_order.fingerprint, eval_data)
    if hasattr(task, "digest"):  # of every byte
        about["fingerprint"] = ask(task.digest, cfg.task)
    identity = ask(task.identity, cfg.task) if hasattr(task, "identity") else ""
    facts = {"config": resolved(cfg), "data": about, "identity": identity}
    return {**facts, "versions": versions()}


def find_checkpoint(start: Start, changes: dict[str, str]) -> None:
    """Where the run goes on, how far, and whether it has ended; raises ValueError if it cannot."""
    cfg, output, facts = start.cfg, start.output, start.facts
    folder = output / "checkpoints"
    start.checkpoint, start.manifest, passed_over = checkpoints.find(
        folder, cfg.resume, cfg.eval_only
    )
    start.remarks += [f"passed over: {reason}" for reason in passed_over]
    step, samples = start.manifest.get("step", 0), start.manifest.get("samples", 0)
    if cfg.num_epochs:
        total = math.ceil(cfg.num_epochs * facts["data"]["samples"])
        start.max_steps = step + max(0, -(-(total - samples) // cfg.global_batch_size))
    if cfg.warmup_steps >= start.max_steps and not cfg.eval_only:
        start.remarks.append(
            f"the learning rate rises to the end: warmup_steps is {cfg.warmup_steps}, and the run "
            f"has {start.max_steps} steps"
        )
    if start.max_steps * cfg.global_batch_size >= 2**62:  # positions are 64-bit integers
        raise ValueError(
            f"{start.max_steps} steps of {cfg.global_batch_size} samples are too many: lower "
            "max_steps, num_epochs or global_batch_size"
        )
    if cfg.eval_only:  # how a model was trained does not matter to its evaluation
        changes = {n: each if n.startswith("task.") else "nothing" for n, each in changes.items()}
    if start.checkpoint:
        accept = cfg.accept_changes
        start.changed = checkpoints.compare(
            start.checkpoint, start.manifest, facts, changes, accept
        )
        before, now = start.manifest.get("versions", {}), facts["versions"]
        moved = [f"{n} {before[n]} -> {now.get(n)}" for n in before if before[n] != now.get(n)]
        if moved:
            start.remarks.append(f"other versions, which may round otherwise: {', '.join(moved)}")
    elif cfg.eval_only:
        raise ValueError(f"eval_only: there is no checkpoint in {folder}; train first")
    if cfg.eval_only:
        return
    start.settings = checkpoints.digest_of(checkpoints.comparable(facts, changes))
    status, trained = checkpoints.read_status(output), (output / "model").exists()
    if start.checkpoint and start.checkpoint.resolve().parent == folder.resolve():
        # Without its model a finished run exports once more.
        if status.get("state") == "finished" and step >= start.max_steps and trained:
            start.finished = f"{step} steps"
    elif trained or status.get("state") == "finished":
        # Its checkpoints were deleted: another training would end by replacing the model.
        if not trained or status.get("settings") != start.settings:
            raise ValueError(
                f"{output} holds a finished run, whose checkpoints are gone and whose settings may "
                "have been others: give another --output_dir"
            )
        start.finished = "its checkpoints are gone, its model is there"
    if not start.finished:
        checkpoints.check_room(folder)
