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
from torch.distributed.elastic.utils.distributed import get_free_port

from samestep.base.console import IS_MAIN, one_line
from samestep.checkpoint import weights
from samestep.hardware.own_loop import digest
from samestep.hardware.project import Project, plan_of
from samestep.hardware.report import Section, by_value, group, place_of
from samestep.processes import device
from samestep.processes.device import PROCESSES
from samestep.processes.ranks import Ranks, as_user_error, catch, is_out_of_memory
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


def run(
    options: argparse.Namespace, project: Project, ranks: Ranks, device: torch.device
) -> Section:
    """Checks a step; all processes must call it."""
    section = Section("smoke")
    folder = options.report / f".smoke-{ranks.from_main(secrets.token_hex(4))}"
    try:
        with ranks.fail_together(), as_user_error():
            trial = Trial(project, ranks, folder)
        size = sum(p.numel() for p in trial.model.parameters())
        kind = trial.accelerator.distributed_type.value
        section.facts = {
            "model": f"{type(trial.model).__name__}, {size:,} parameters",
            "recipe": str(project.recipe),
            "processes": f"{PROCESSES} x {device.type}, distributed: {kind}",
            "precision": trial.precision.replace("no", "fp32"),
            "step": trial.plan.describe(trial.layout.unit),
        }
        for name, check in CHECKS.items():
            try:
                section.facts[name] = check(trial)
            except Wrong as error:
                section.facts[name] = "failed, see below"
                section.failures.append(f"{name}: {error}")
                if check is check_start:  # an exchange of other shapes would hang
                    break
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    passed = sum(str(fact).startswith("passed") for fact in section.facts.values())
    left_out = len(CHECKS) - passed - len(section.failures)
    section.lines.append(f"{passed} passed, {len(section.failures)} failed, {left_out} left out")
    return section


class Trial:
    """The model of a project on each process alone, and a small step of its data."""

    def __init__(self, project: Project, ranks: Ranks, folder: Path):
        self.project, self.ranks, self.folder = project, ranks, folder
        self.layout, self.hosts = project.layout, ranks.gather(socket.gethostname())
        self.right: tuple[float, float] | None = None  # loss and norm of the gradient of the step
        self.states: list[dict] = []  # what own_loop has noted, of each process
        cfg, size = project.cfg, min(SAMPLES, project.plan.micro_batch_size)
        self.cfg = dataclasses.replace(
            cfg,
            max_steps=3,
            num_epochs=0.0,
            global_batch_size=size * TURNS * self.layout.replicas,
            micro_batch_size=size,
            device_shares="equal" if cfg.device_shares == "auto" else cfg.device_shares,
            learning_rate=cfg.learning_rate or 1e-3,
            log_every=1,
            tracker="none",
            profile_steps=None,
            async_save=False,
            output_dir=str(folder / "run"),
            timeout=min(cfg.timeout, 300),  # a process that skips its share lets the others wait
        )
        folder.mkdir(parents=True, exist_ok=True)
        self.recipe = folder / f"recipe-{self.layout.rank}.yaml"
        text = yaml.safe_dump(resolved_config(self.cfg), sort_keys=False, allow_unicode=True)
        self.recipe.write_text(text, encoding="utf-8")
        self.accelerator = device.make_accelerator(cfg)
        self.precision = self.accelerator.mixed_precision
        self.plan = plan_of(self.cfg, self.layout)
        model = project.build_model(cfg.gradient_checkpointing)
        sharding.check_model_shares_rows(model, self.layout)
        self.model = weights.sync_batch_norms(model, self.accelerator, self.plan, cfg.device_shares)

    def everyone(self, function: Callable, *arguments: Any) -> Any:
        """Calls a function on all processes; if it fails on some, all raise Wrong for these."""
        value, problem = catch(function, *arguments)
        text = f"raised {type(problem).__name__}: {one_line(problem)}" if problem else ""
        found = {t: n for t, n in group(self.ranks.gather(text)).items() if t}
        if found:
            named = [f"{place_of(n, self.hosts)}: {text}" for text, n in found.items()]
            raise Wrong("; ".join(named))
        return value

    def limit(self, table: dict[str, float]) -> float:
        """The relative error that counts as rounding for this run."""
        limit = table.get(self.precision, table["bf16"])
        if self.precision == "no":
            return limit * (TF32 if self.cfg.tf32 else 1)
        return limit * (SHARDED if self.layout.sharded else 1)

    def gradient(self, numbers: range) -> tuple[float, int, dict[str, np.ndarray]]:
        """The summed loss of these micro-batches of the step, its num_items, and its gradient,
        computed on this process without any other, as in training."""
        scale, losses, num_items = LOSS_SCALE if self.precision == "fp16" else 1, [], 0
        task, positions = self.project.task, self.project.rows.sort(range(self.plan.samples))
        self.model.zero_grad()
        for number in numbers:
            batch = self.project.batch(self.plan.positions(positions, number))
            num_items += task.count(batch)
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
        return math.fsum(losses), num_items, gradients

    def run_own_loop(self) -> None:
        """Runs a step of the owner's train.py on all processes; raises Wrong if it does not end as
        it should."""
        own = ("TORCHELASTIC_", "EXIT_CODE_FILE", "LAUNCHING")
        env = {name: value for name, value in os.environ.items() if not name.startswith(own)}
        env["MASTER_PORT"] = str(self.ranks.from_main(get_free_port()))
        states = self.folder / f"state-{self.layout.rank}.json"
        states.unlink(missing_ok=True)
        command = [*OWN_LOOP, str(states), "--config", str(self.recipe)]
        ended = subprocess.run(command, env=env, capture_output=True, text=True)
        said = ended.stderr.strip().splitlines()[-1:] or [f"exit code {ended.returncode}"]
        said = said if ended.returncode != STOPPED else []
        wrong = {text for each in self.ranks.gather(said) for text in each}
        if wrong:
            raise Wrong(f"it ended with an error: {one_line('; '.join(sorted(wrong)))}")
        noted = self.everyone(lambda: json.loads(states.read_text()) if states.exists() else {})
        self.states = self.ranks.gather(noted)


# ---- Comparing processes -------------------------------------------------------------------------


def sketch(loss: float, gradient: dict[str, np.ndarray]) -> np.ndarray:
    """The loss; the norm of each weight's gradient; its product with a fixed vector: (1 + 2 k,).

    Nearly all errors change one of them, and the processes can compare them all.
    """
    flat = [values.ravel() for values in gradient.values()]
    norms = [np.linalg.norm(values) for values in flat]
    return np.array([loss, *norms, *(values @ np.cos(np.arange(values.size)) for values in flat)])


def check_same(trial: Trial, own: str, what: str) -> None:
    """Raises Wrong, which names the processes, if not all have the same."""
    found = trial.ranks.gather(own)
    if len({*found}) > 1:
        text = by_value(found, trial.hosts).replace("\n", "; ")
        raise Wrong(f"{what} differ, by their digests: {text}")


# ---- The checks, in their order ------------------------------------------------------------------


def check_start(trial: Trial) -> str:
    """All processes have built the same model."""
    if PROCESSES == 1:
        return "left out: there is one process"
    plugin = getattr(trial.accelerator.state, "fsdp_plugin", None)
    given = [*trial.model.parameters()]
    if plugin and plugin.cpu_ram_efficient_loading:
        check_same(trial, digest(torch.tensor(each.shape) for each in given), "shapes of weights")
        return "left out: with fsdp_cpu_ram_efficient_loading only process 0 has the weights"
    check_same(trial, digest(given), "weights")
    return f"passed: the bytes of {len(given)} weights"


def check_common(trial: Trial) -> str:
    """All processes compute the same loss and gradient of the same micro-batch, each alone; and
    what those of the whole step are."""
    ranks, layout, accelerator = trial.ranks, trial.layout, trial.accelerator

    def put_model() -> None:
        context = sharding.compute_context(accelerator, trial.cfg.exact)
        trial.model = weights.TaskModule(trial.model.to(accelerator.device), context)
        if trial.cfg.compile:
            device.compile_blocks(trial.model)

    try:
        trial.everyone(put_model)
        if PROCESSES > 1:  # the main process's buffers, and weights, which FSDP may not load here
            for values in (*trial.model.parameters(), *trial.model.buffers()):
                dist.broadcast(values.detach(), 0)
        loss, _, gradient = trial.everyone(trial.gradient, range(1))
        compare_alone(trial, loss, gradient)
        loss, num_items, gradient = trial.everyone(trial.gradient, trial.plan.run())
        numbers = ranks.sum_arrays(np.array([loss, num_items]) * layout.leads)
        num_items = max(numbers[1], 1)
        squares = 0.0
        for values in gradient.values():  # their parts are added up in float64
            total = ranks.sum_arrays(values.astype(np.float64) * layout.leads)
            squares += np.square(total / num_items).sum()
        trial.right = (numbers[0] / num_items, math.sqrt(squares))
    except Wrong as error:
        if is_out_of_memory(RuntimeError(str(error))):
            return "left out: one device has no room for the whole model and its gradient"
        raise
    finally:
        trial.model = None
        gc.collect()
        if accelerator.device.type == "cuda":
            torch.cuda.empty_cache()
    limits = f"loss {trial.limit(LOSS):g}, gradient {trial.limit(GRADIENT):g}"
    return f"passed: within {limits}, relative to the median process"


def compare_alone(trial: Trial, loss: float, gradient: dict[str, np.ndarray]) -> None:
    """Raises Wrong, which names the processes whose loss or gradient is not that of the others."""
    rows, names = np.stack(trial.ranks.gather(sketch(loss, gradient))), [*gradient]
    finite = rows[np.isfinite(rows).all(1)]
    middle = np.median(finite, axis=0) if len(finite) else np.zeros(rows.shape[1])
    norms = middle[1 : 1 + len(names)]
    scales = np.maximum(norms, FLOOR * np.linalg.norm(norms))
    away = np.abs(rows - middle) / (np.concatenate([np.abs(middle[:1]), scales, scales]) + 1e-30)
    away *= 2 if len(finite) == 2 else 1  # the median of two lies between them: both may be wrong
    away[~np.isfinite(rows)] = np.inf
    lines = []
    for rank, (off, *offs) in enumerate(away):
        text = f"{place_of([rank], trial.hosts)}: loss {rows[rank, 0]:.6g}"
        if max(offs) > trial.limit(GRADIENT):
            worst = f"off by {max(offs):.2g} of its norm" if max(offs) < np.inf else "not finite"
            text += f", gradient of {names[np.argmax(offs) % len(names)]} is {worst}"
        elif off <= trial.limit(LOSS):
            continue
        lines.append(text)
    if lines:
        others = f"the median loss is {middle[0]:.6g}"
        others = "one of the two is wrong" if len(lines) == PROCESSES == 2 else others
        raise Wrong(f"{'; '.join(lines[:8])}; {others}")


def check_loop(trial: Trial) -> str:
    """The first step of train.py, as its owner has it, has the loss and gradient found here."""
    trial.run_own_loop()
    if trial.right is None or trial.precision == "fp8":
        return "left out: it runs, and there is nothing to compare with"

    def compare() -> str:
        if not IS_MAIN:
            return ""
        lines = (trial.folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
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
    trial.run_own_loop()
    loaded = [each.get("before") for each in trial.states]
    wrong = [rank for rank in range(PROCESSES) if loaded[rank] != saved[rank]]
    if wrong:
        raise Wrong(f"{place_of(wrong, trial.hosts)}: weights or optimizer came back changed")
    return "passed: the bytes of weights and optimizer state"


CHECKS: dict[str, Callable[[Trial], str]] = {
    "same weights at the start": check_start,
    "same loss and gradient": check_common,
    "the loop of train.py": check_loop,
    "same weights after the step": check_weights,
    "save and load": check_saving,
}
