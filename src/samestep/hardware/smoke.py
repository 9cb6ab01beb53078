"""A step of train.py on all processes, with checks: loss, gradient, weights, and its checkpoint."""

import argparse
import dataclasses
import gc
import json
import math
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import yaml
from accelerate.utils import send_to_device

from samestep.base.console import IS_MAIN, one_line
from samestep.checkpoint import weights
from samestep.hardware import places
from samestep.hardware.own_loop import digest
from samestep.hardware.project import Project
from samestep.hardware.report import Section
from samestep.processes import agreement, device
from samestep.processes.device import PROCESSES
from samestep.processes.ranks import Ranks, UserError, as_user_error, catch, is_out_of_memory
from samestep.processes.shutdown import STOPPED
from samestep.settings import contract
from samestep.start.startup import resolved_config
from samestep.step import batches, sharding

OWN_LOOP = [sys.executable, "-m", "samestep.hardware.own_loop"]
SAMPLES = 4  # in a micro-batch, at most
TURNS = 2  # micro-batches of a process: so gradients accumulate
LOSS_SCALE = 1024  # of gradients in fp16, which are computed without accelerate's scaler
# Relative errors that are rounding, by the precision of the YAML: of a loss, and of a gradient.
# Sharded weights are rounded to 16 bits themselves, which autocast does not do.
LOSS = {"no": 1e-5, "bf16": 2e-3, "fp16": 1e-3}
GRADIENT = {"no": 1e-4, "bf16": 2e-2, "fp16": 1e-2}
SHARDED, TF32 = 5, 50  # times as much
FLOOR = 1e-3  # a weight's gradient counts as at least this fraction of the norm of all of them


class Wrong(Exception):
    """A check that did not pass: raised on all processes together, with the same text."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of smoke: none; those of train.py choose recipe and model."""


def run(
    options: argparse.Namespace, project: Project, ranks: Ranks, device: torch.device
) -> Section:
    """Checks a step; all processes must call it."""
    section, folder = Section("smoke"), options.report / ranks.from_main(secrets.token_hex(4))
    folder = folder.with_name(f".smoke-{folder.name}")
    try:
        with ranks.fail_together(), as_user_error():
            if IS_MAIN:
                folder.mkdir(parents=True)
        trial = Trial(project, ranks, folder)
        section.facts = {"what": trial.describe()}
        for name, check in CHECKS.items():
            try:
                section.facts[name] = check(trial)
            except Wrong as error:
                section.facts[name] = "failed, see below"
                section.failures.append(f"{name}: {error}")
                if check is check_start and "shapes" in str(error):  # an exchange would hang
                    break
    finally:
        if IS_MAIN:
            shutil.rmtree(folder, ignore_errors=True)
    said = [str(section.facts.get(name)) for name in CHECKS]
    passed = sum(each.startswith("passed") for each in said)
    left_out = len(CHECKS) - passed - len(section.failures)
    section.lines.append(f"{passed} passed, {len(section.failures)} failed, {left_out} left out")
    return section


class Trial:
    """The model of a project on each process alone, and a small step of its data."""

    def __init__(self, project: Project, ranks: Ranks, folder: Path):
        self.project, self.cfg, self.ranks, self.folder = project, project.cfg, ranks, folder
        self.layout, self.hosts = project.layout, ranks.gather(socket.gethostname())
        self.right: tuple[float, float] | None = None  # loss and norm of the gradient of the step
        self.states: list[dict] = []  # what own_loop has noted, of each process
        cfg, size = self.cfg, min(SAMPLES, project.plan.micro_batch_size)
        with ranks.fail_together(), as_user_error():
            self.accelerator = device.make_accelerator(cfg)
            self.plan = batches.plan_step(
                size * TURNS * self.layout.replicas,
                size,
                self.layout.replicas,
                cfg.exact,
                "equal" if cfg.device_shares == "auto" else cfg.device_shares,
                self.layout.replica,
                self.layout.sharded,
            )
            model = project.build_model()
            if cfg.gradient_checkpointing:
                weights.enable_gradient_checkpointing(model)
            sharding.check_model_shares_rows(model, self.layout)
            self.model = weights.sync_batch_norms(
                model, self.accelerator, self.plan, cfg.device_shares
            )
        self.precision = self.accelerator.mixed_precision

    def describe(self) -> str:
        """What is trained here, and on what."""
        size = sum(p.numel() for p in self.model.parameters())
        return (
            f"{type(self.model).__name__}, {size:,} parameters\n"
            f"recipe {self.project.recipe}\n"
            f"{PROCESSES} x {self.accelerator.device.type}, {self.precision.replace('no', 'fp32')},"
            f" distributed: {self.accelerator.distributed_type.value}\n"
            f"a step of {self.plan.describe(self.layout.unit)}"
        )

    def everyone(self, function: Callable, *arguments: Any) -> Any:
        """Calls a function on all processes; if it fails on some, all raise Wrong for these."""
        value, problem = catch(function, *arguments)
        text = f"raised {type(problem).__name__}: {one_line(problem)}" if problem else ""
        found = {t: n for t, n in places.group(self.ranks.gather(text)).items() if t}
        if found:
            named = [f"{places.name(n, self.hosts)}: {text}" for text, n in found.items()]
            raise Wrong("; ".join(named))
        return value

    def limit(self, table: dict[str, float]) -> float:
        """The relative error that counts as rounding for this run."""
        limit = table.get(self.precision, table["bf16"])
        if self.precision == "no":
            return limit * (TF32 if self.cfg.tf32 else 1)
        return limit * (SHARDED if self.layout.sharded else 1)

    def put_model(self) -> None:
        """Moves the model to the device; it computes as in training, with the main one's bytes."""
        context = sharding.compute_context(self.accelerator, self.cfg.exact)
        self.model = weights.TaskModule(self.model.to(self.accelerator.device), context)
        if self.cfg.compile:
            device.compile_blocks(self.model)

    def gradient(self, numbers: range) -> tuple[float, int, dict[str, np.ndarray]]:
        """The summed loss of these micro-batches of the step, its terms, and its gradient,
        computed on this process without any other."""
        scale, losses, terms = LOSS_SCALE if self.precision == "fp16" else 1, [], 0
        task, positions = self.project.task, self.project.rows.sort(range(self.plan.samples))
        self.model.train().zero_grad()
        for number in numbers:
            batch = self.project.batch(self.plan.positions(positions, number))
            terms += task.count(batch)
            batch = send_to_device(batch, self.accelerator.device)
            batches.seed_micro_batch(self.cfg.seed, 1, number)
            with self.accelerator.autocast():
                loss = self.model(task.loss_sum, batch)
            contract.check_loss(loss)
            (loss.float() * scale).backward()
            losses.append(loss.item())
        gradients = {}
        for name, parameter in self.model.model.named_parameters():
            if parameter.requires_grad:
                values = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                values = values.detach().cpu().float() / scale
                gradients[weights.bare_name(name)] = values.numpy()
        return math.fsum(losses), terms, gradients

    def run_own_loop(self, recipe: Path) -> None:
        """Runs a step of the owner's train.py on all processes; raises Wrong if it does not end as
        it should."""
        port = 0
        if IS_MAIN:
            with socket.socket() as probe:
                probe.bind(("", 0))
                port = probe.getsockname()[1]
        own = ("TORCHELASTIC_", "EXIT_CODE_FILE", "LAUNCHING")
        env = {name: value for name, value in os.environ.items() if not name.startswith(own)}
        env["MASTER_PORT"] = str(self.ranks.from_main(port))
        states = self.folder / f"state-{self.layout.rank}.json"
        states.unlink(missing_ok=True)
        command = [*OWN_LOOP, str(states), "--config", str(recipe)]
        ended = subprocess.run(command, env=env, capture_output=True, text=True)
        said = ended.stderr.strip().splitlines()[-1:] or [f"exit code {ended.returncode}"]
        said = said if ended.returncode != STOPPED else []
        wrong = {text for each in self.ranks.gather(said) for text in each}
        if wrong:
            raise Wrong(f"it ended with an error: {one_line('; '.join(sorted(wrong)))}")
        noted = self.everyone(lambda: json.loads(states.read_text()) if states.exists() else {})
        self.states = self.ranks.gather(noted)


# ---- Comparing processes -------------------------------------------------------------------------


def odd_ones(values: np.ndarray, scales: np.ndarray, limit: float) -> dict[int, tuple[float, int]]:
    """The rows of `values`, (n, k), that are not like the median row: {row: (deviation, column)}.

    A deviation is the largest of a row, as a fraction of `scales`, (k,). Of two rows that differ
    nobody knows which one is wrong: both are. A row with a NaN is always wrong.
    """
    finite = np.isfinite(values).all(1)
    rows = values[finite] if finite.any() else np.zeros_like(values[:1])
    away = np.abs(values - np.median(rows, axis=0)) / scales
    away *= 2 if finite.sum() == 2 else 1  # the median of two lies between them
    away[~np.isfinite(values)] = np.inf
    return {
        row: (float(each.max()), int(each.argmax()))
        for row, each in enumerate(away)
        if each.max() > limit
    }


def sketch(gradient: dict[str, np.ndarray]) -> np.ndarray:
    """The norm of each weight's gradient, and its product with a fixed vector: shape (2 k,).

    Nearly all errors change one of them, and the processes can compare them all.
    """
    flat = [values.ravel() for values in gradient.values()]
    norms = [np.linalg.norm(values) for values in flat]
    return np.array([*norms, *(values @ np.cos(np.arange(values.size)) for values in flat)])


def check_same(trial: Trial, own: Any, what: str) -> None:
    """Raises Wrong, which names the processes whose value is not that of most."""
    groups = places.group(trial.ranks.gather(own))
    if len(groups) == 1:
        return
    most = max(groups.values(), key=len)
    if 2 * len(most) <= PROCESSES:  # nobody knows which ones are right
        names = [places.name(numbers, trial.hosts) for numbers in groups.values()]
        raise Wrong(f"{' and '.join(names[:4])} have different {what}")
    wrong = [rank for rank in range(PROCESSES) if rank not in most]
    raise Wrong(f"{places.name(wrong, trial.hosts)} has other {what} than the rest")


# ---- The checks, in their order ------------------------------------------------------------------


def check_start(trial: Trial) -> str:
    """All processes have built the same model."""
    plugin = getattr(trial.accelerator.state, "fsdp_plugin", None)
    named = [*trial.model.named_parameters()]
    shapes = " ".join(f"{name} {tuple(each.shape)} {each.dtype}" for name, each in named)
    check_same(trial, shapes, "shapes of weights")
    if PROCESSES == 1:
        return "left out: there is one process"
    if plugin and plugin.cpu_ram_efficient_loading:
        return "left out: with fsdp_cpu_ram_efficient_loading only process 0 has the weights"
    check_same(trial, digest(each for _, each in named), "weights")
    return f"passed: the bytes of {len(named)} weights"


def check_common(trial: Trial) -> str:
    """All processes compute the same loss and gradient of the same micro-batch, each alone; and
    what those of the whole step are."""
    ranks, layout = trial.ranks, trial.layout
    try:
        trial.everyone(trial.put_model)
        if PROCESSES > 1:
            for values in (*trial.model.parameters(), *trial.model.buffers()):
                dist.broadcast(values.detach(), 0)
        loss, _, gradient = trial.everyone(trial.gradient, range(1))
        compare_alone(trial, loss, gradient)
        loss, terms, gradient = trial.everyone(trial.gradient, trial.plan.run())
        numbers = ranks.sum_arrays(np.array([loss, terms]) * layout.leads)
        terms = max(numbers[1], 1)
        squares = 0.0
        for values in gradient.values():  # their parts are added up in float64
            total = ranks.sum_arrays(values.astype(np.float64) * layout.leads)
            squares += np.square(total / terms).sum()
        trial.right = (numbers[0] / terms, math.sqrt(squares))
    except Wrong as error:
        if is_out_of_memory(RuntimeError(str(error))):
            return "left out: one device has no room for the whole model and its gradient"
        raise
    finally:
        trial.model = None
        gc.collect()
        if trial.accelerator.device.type == "cuda":
            torch.cuda.empty_cache()
    limits = f"loss {trial.limit(LOSS):g}, gradient {trial.limit(GRADIENT):g}"
    return f"passed: within {limits}, relative to the median process"


def compare_alone(trial: Trial, loss: float, gradient: dict[str, np.ndarray]) -> None:
    """Raises Wrong, which names the processes whose loss or gradient is not that of the others."""
    found = trial.ranks.gather((loss, sketch(gradient)))
    losses = np.array([[each] for each, _ in found])
    sketches = np.stack([each for _, each in found])
    middle = np.nanmedian(losses)
    bad_losses = odd_ones(losses, np.abs(middle) + 1e-30, trial.limit(LOSS))
    names = [*gradient]
    norms = np.median(sketches[:, : len(names)], axis=0)
    scales = np.maximum(norms, FLOOR * np.linalg.norm(norms)) + 1e-30
    bad = odd_ones(sketches, np.tile(scales, 2), trial.limit(GRADIENT))
    lines = []
    for rank in sorted({*bad_losses, *bad}):
        text = f"{places.name([rank], trial.hosts)}: loss {losses[rank, 0]:.6g}"
        if rank in bad:
            away, column = bad[rank]
            off = f"is off by {away:.2g} of its norm" if np.isfinite(away) else "is not finite"
            text += f", gradient of {names[column % len(names)]} {off}"
        lines.append(text)
    if lines:
        others = f"the median loss is {middle:.6g}"
        others = "one of the two is wrong" if len(lines) == PROCESSES == 2 else others
        raise Wrong(f"{'; '.join(lines[:8])}; {others}")


def check_loop(trial: Trial) -> str:
    """The first step of train.py, as its owner has it, has the loss and gradient found here."""
    cfg, folder = trial.cfg, trial.folder
    recipe = dataclasses.replace(
        cfg,
        max_steps=3,
        num_epochs=0.0,
        global_batch_size=trial.plan.samples,
        micro_batch_size=trial.plan.micro_batch_size,
        device_shares="equal" if cfg.device_shares == "auto" else cfg.device_shares,
        learning_rate=cfg.learning_rate or 1e-3,
        log_every=1,
        tracker="none",
        profile_steps=None,
        async_save=False,
        output_dir=str(folder / "run"),
        timeout=min(cfg.timeout, 300),  # a process that skips its share lets the others wait
    )
    file = folder / "recipe.yaml"

    def write() -> None:
        if IS_MAIN:
            text = yaml.safe_dump(resolved_config(recipe), sort_keys=False, allow_unicode=True)
            file.write_text(text, encoding="utf-8")

    def see() -> None:
        if not agreement.appears(folder):
            raise UserError(
                f"{folder} of process 0 is not there; put --report on a disk that all machines "
                "share, as output_dir of train.py"
            )

    trial.everyone(write)
    trial.everyone(see)
    trial.run_own_loop(file)
    if trial.right is None or trial.precision == "fp8":
        return "left out: it runs, and there is nothing to compare with"

    def compare() -> str:
        if not IS_MAIN:
            return ""
        lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        line = next(line for line in map(json.loads, lines) if "loss" in line)
        limits = trial.limit(LOSS), trial.limit(GRADIENT)
        for name, right, limit in zip(("loss", "grad_norm"), trial.right, limits, strict=True):
            found = line[name]  # null: a step of fp16 that was skipped
            if found is not None and not abs(found - right) <= limit * abs(right):
                return f"its first step has {name} {found:.6g}, and {right:.6g} is right"
        return ""

    problem = trial.ranks.from_main(trial.everyone(compare))
    if problem:
        raise Wrong(problem)
    return f"passed: loss {trial.right[0]:.5g}, norm of the gradient {trial.right[1]:.5g}"


def check_weights(trial: Trial) -> str:
    """After the step the weights have changed, and are the same on all processes."""
    if not trial.states:
        return "left out: train.py ended with an error"
    if trial.layout.deepspeed:
        return "left out: DeepSpeed keeps the weights in parts of its own"
    if trial.precision == "fp16" and not all("after" in each for each in trial.states):
        return "left out: the first step was skipped, as some of fp16 are"
    if any(each.get("before", [0])[0] == each.get("after", [0])[0] for each in trial.states):
        raise Wrong("a step of the optimizer has changed no weight")
    if trial.layout.sharded or trial.layout.tp > 1:
        return "passed: they have changed; each process has a part of its own"
    check_same(trial, trial.states[trial.layout.rank]["after"][0], "weights")
    return "passed: they have changed, and have the same bytes on all processes"


def check_saving(trial: Trial) -> str:
    """Started again, train.py has the bytes of weights and optimizer state that it had."""
    if not trial.states or not all("after" in each for each in trial.states):
        return "left out: train.py has made no step"
    if trial.layout.deepspeed:
        return "left out: DeepSpeed writes and reads checkpoints by itself"
    saved = [each["after"] for each in trial.states]
    trial.run_own_loop(trial.folder / "recipe.yaml")
    loaded = [each.get("before") for each in trial.states]
    wrong = [rank for rank in range(PROCESSES) if loaded[rank] != saved[rank]]
    if wrong:
        raise Wrong(f"{places.name(wrong, trial.hosts)}: weights or optimizer came back changed")
    return "passed: the bytes of weights and optimizer state"


CHECKS: dict[str, Callable[[Trial], str]] = {
    "same weights at the start": check_start,
    "same loss and gradient": check_common,
    "the loop of train.py": check_loop,
    "same weights after the step": check_weights,
    "save and load": check_saving,
}
