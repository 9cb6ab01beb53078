"""A short distributed training with checks: gradients, weights, saving, and who writes."""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from samestep.base.console import IS_MAIN, one_line
from samestep.checkpoint import tensor_files, weights
from samestep.hardware import places
from samestep.hardware.project import Project
from samestep.hardware.report import Section
from samestep.hardware.short_run import NoMemory, ShortRun, Wrong, digests, everyone
from samestep.hardware.written import as_yaml
from samestep.processes import agreement
from samestep.processes.device import PROCESSES
from samestep.processes.ranks import Ranks
from samestep.processes.shutdown import STOPPED
from samestep.start.startup import resolved_config
from samestep.step.sharding import local, whole

NEEDS_PROJECT = True
OWN_LOOP = [sys.executable, "-m", "samestep.hardware.own_loop"]
STEPS = 3
ALONE = "left out: there is one process"
# Relative errors that are rounding, by the precision of the YAML: of a loss, and of the gradient of
# each weight. Sharded weights are rounded to 16 bits themselves, which autocast does not do.
LOSS = {"no": 1e-5, "bf16": 2e-3, "fp16": 1e-3}
GRADIENT = {"no": 1e-4, "bf16": 2e-2, "fp16": 1e-2}
SHARDED, TF32 = 5, 50  # times as much
FLOOR = 1e-3  # a weight's gradient counts as at least this fraction of the norm of all of them
SLEEP = 0.3  # seconds that one process is late for the barrier
SCALES = 16  # times that fp16 halves its loss scale until nothing overflows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of smoke: none; those of train.py choose recipe and model."""


def run(
    options: argparse.Namespace, project: Project, ranks: Ranks, device: torch.device
) -> Section:
    """Trains a few steps and checks them; all processes must call it."""
    section, hosts = Section("smoke"), ranks.gather(socket.gethostname())
    with working_folder(options.report, ranks, hosts) as folder:
        try:
            trial = ShortRun(project, ranks, hosts)
            # Processes that exchange weights of other shapes would hang.
            check_same(trial, {n: d.rpartition(" ")[0] for n, d in trial.started.items()}, "shapes")
        except Wrong as error:
            section.failures.append(f"to build the model: {error}")
            return section
        section.facts = {"what": describe_run(trial)}
        passed = 0
        for name, check in CHECKS.items():
            try:
                section.facts[name] = check(trial, folder)
                passed += section.facts[name].startswith("passed")
            except Wrong as error:
                section.facts[name] = "failed, see below"
                section.failures.append(f"{name}: {error}")
    left_out = len(CHECKS) - passed - len(section.failures)
    section.lines.append(f"{passed} passed, {len(section.failures)} failed, {left_out} left out")
    return section


def describe_run(trial: ShortRun) -> str:
    """What is trained here, and on what."""
    accelerator, size = trial.accelerator, sum(p.numel() for p in trial.model.parameters())
    precision = accelerator.mixed_precision.replace("no", "fp32")
    return (
        f"{type(trial.model).__name__}, {size:,} parameters\n"
        f"recipe {trial.project.recipe}\n"
        f"{PROCESSES} x {accelerator.device.type}, {precision}, distributed: "
        f"{accelerator.distributed_type.value}\n"
        f"{STEPS} steps of {trial.plan.describe(trial.layout.unit)}"
    )


@contextlib.contextmanager
def working_folder(report: Path, ranks: Ranks, hosts: list[str]) -> Iterator[Path]:
    """A folder for what the checks write, in that of the report; removed afterwards.

    Raises UserError if it cannot be created.
    """
    folder = report / ranks.from_main(f".smoke-{secrets.token_hex(4)}")

    def create() -> None:
        if IS_MAIN:
            folder.mkdir(parents=True)

    everyone(ranks, hosts, create, by_user=True)
    try:
        yield folder
    finally:
        if IS_MAIN:
            shutil.rmtree(folder, ignore_errors=True)


# ---- Comparing processes -------------------------------------------------------------------------


def odd_ones(values: np.ndarray, scales: np.ndarray, limit: float) -> dict[int, tuple[float, int]]:
    """The rows of `values`, (n, k), that are not like the median row: {row: (deviation, column)}.

    A deviation is the largest of a row, as a fraction of `scales`, (k,). Of two rows that differ
    nobody knows which one is wrong: both are. A row with a NaN is always wrong.
    """
    finite = np.isfinite(values).all(1)
    found = {int(row): (np.inf, int((~np.isfinite(values[row])).argmax())) for row in
             np.flatnonzero(~finite)}  # fmt: skip
    if not finite.any():
        return found
    away = np.abs(values - np.median(values[finite], axis=0)) / scales
    away *= 2 if finite.sum() == 2 else 1  # the median of two lies between them
    for row in np.flatnonzero(finite):
        if away[row].max() > limit:
            found[int(row)] = (float(away[row].max()), int(away[row].argmax()))
    return found


def sketch(gradient: dict[str, np.ndarray]) -> np.ndarray:
    """The norm of each weight's gradient, and its product with a fixed vector: shape (2 k,).

    Nearly all errors change one of them, and the processes can compare them all.
    """
    flat = [values.ravel() for values in gradient.values()]
    norms = [np.linalg.norm(values) for values in flat]
    products = [values @ np.cos(np.arange(values.size)) for values in flat]
    return np.array([*norms, *products])


def limit_of(table: dict[str, float], trial: ShortRun, sharded: bool = False) -> float:
    """The relative error that counts as rounding for this run."""
    limit = table.get(trial.precision, table["bf16"])
    limit *= TF32 if trial.cfg.tf32 and trial.precision == "no" else 1
    return limit * (SHARDED if sharded and trial.precision != "no" else 1)


def check_same(trial: ShortRun, own: dict[str, str], what: str) -> None:
    """Raises Wrong, which names the processes whose digests are not those of most."""
    everywhere = trial.ranks.gather(own)
    groups = places.group([tuple(each.items()) for each in everywhere])
    if len(groups) == 1:
        return
    most = max(groups.values(), key=len)
    if 2 * len(most) <= len(everywhere):  # nobody knows which ones are right
        names = [places.name(numbers, trial.hosts) for numbers in groups.values()]
        named, other = " and ".join(names[:4]), everywhere[next(iter(groups.values()))[0]]
        example = next(each for each in everywhere if each != other)
        text = f"{named} have different {what}"
    else:
        wrong = [rank for rank in range(len(everywhere)) if rank not in most]
        other, example = everywhere[most[0]], everywhere[wrong[0]]
        text = f"{places.name(wrong, trial.hosts)} has other {what} than the rest"
    names = [n for n in dict.fromkeys([*other, *example]) if other.get(n) != example.get(n)]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    raise Wrong(f"{text}: {names[0]}{more}")


# ---- The checks, in their order ------------------------------------------------------------------


def check_start(trial: ShortRun, folder: Path) -> str:
    """All processes have built the same model."""
    plugin = getattr(trial.accelerator.state, "fsdp_plugin", None)
    if PROCESSES == 1:
        return ALONE
    if plugin and plugin.cpu_ram_efficient_loading:
        return "left out: with fsdp_cpu_ram_efficient_loading only process 0 has the weights"
    check_same(trial, trial.started, "weights")
    return f"passed: the bytes of {len(trial.started)} weights"


def check_common(trial: ShortRun, folder: Path) -> str:
    """All processes compute the same loss and gradient of the same micro-batch, each alone."""
    try:
        trial.everyone(trial.move_copy)
        trial.share_copy()
        losses, gradient = trial.everyone(trial.gradient_alone, [(0, trial.common)])
    except Wrong as error:
        trial.alone = "no gradient of a process alone to compare with"
        trial.copy = None  # frees its memory
        if isinstance(error, NoMemory):
            trial.alone = "one device has no room for the whole model and its gradient"
            return f"left out: {trial.alone}"
        raise
    names, own = [*gradient], sketch(gradient)
    found = trial.ranks.gather((losses[0], own))
    loss = np.array([[each] for each, _ in found])
    size = np.abs(np.nanmedian(loss, axis=0)) + 1e-30
    bad_loss = odd_ones(loss, size, limit_of(LOSS, trial))
    sketches = np.stack([each for _, each in found])
    norms = np.median(sketches[:, : len(names)], axis=0)
    scales = np.maximum(norms, FLOOR * np.linalg.norm(norms)) + 1e-30
    bad = odd_ones(sketches, np.tile(scales, 2), limit_of(GRADIENT, trial))
    lines = []
    for rank in sorted({*bad_loss, *bad}):
        text = f"{places.name([rank], trial.hosts)}: loss {loss[rank, 0]:.6g}"
        if rank in bad:
            away, column = bad[rank]
            text += f", gradient of {names[column % len(names)]} {off_by(away)}"
        lines.append(text)
    limits = f"loss {limit_of(LOSS, trial):g}, gradient {limit_of(GRADIENT, trial):g}"
    if lines:
        more = f"; and {len(lines) - 8} more" if len(lines) > 8 else ""
        others = f"; the median loss is {np.nanmedian(loss):.6g}"
        others = "; one of the two is wrong" if len(lines) == PROCESSES == 2 else others
        raise Wrong(f"{'; '.join(lines[:8])}{more}{others} (limits: {limits})")
    if PROCESSES == 1:
        return "passed: both are finite"
    return f"passed: within {limits}, relative to the median process"


def off_by(deviation: float) -> str:
    """A relative error in words."""
    return f"is off by {deviation:.2g} of its norm" if np.isfinite(deviation) else "is not finite"


def check_gradients(trial: ShortRun, folder: Path) -> str:
    """The gradient of a step is the sum of those that the processes compute alone."""
    if not trial.alone:
        numbered = [*zip(trial.plan.run(), trial.window, strict=True)]
        _, first = trial.everyone(trial.gradient_alone, numbered[:1])
        losses, own = trial.everyone(trial.gradient_alone, numbered)
    trial.everyone(trial.prepare)
    deviation = {}  # of this process: before and after the exchange
    averaged, layout = trial.layout.averaged, trial.layout

    def before() -> None:
        """Compares this process's gradient, unless the exchange of the processes has begun."""
        begun = layout.sharded or len(trial.window) == 1
        if not (trial.alone or trial.cfg.exact or begun):
            deviation["own"] = deviate(
                trial.summed(), lambda name: first[name] * (averaged / trial.terms)
            )

    def after() -> None:
        """Compares the gradient of the step, whose parts are added up in float64."""
        if not (trial.alone or layout.deepspeed):
            squares = []

            def right(name: str) -> np.ndarray:
                values = own[name].astype(np.float64) * layout.leads
                total = trial.ranks.sum_arrays(values) / trial.terms
                squares.append(np.square(total).sum())
                return total

            deviation["sum"] = deviate(trial.summed(), right)
            loss = trial.ranks.sum_arrays(np.array([math.fsum(losses) * layout.leads]))
            trial.first = (loss.item() / trial.terms, math.sqrt(sum(squares)))

    for _ in range(SCALES if trial.precision == "fp16" else 1):
        trial.finite = trial.step(1, before, after)
        if trial.finite:
            break
    if trial.alone:
        return f"left out: {trial.alone}"
    if layout.deepspeed:
        return "left out: DeepSpeed adds up gradients and uses them inside of backward"
    if trial.precision == "fp8":
        return "left out: in fp8 the model that is prepared computes in another precision"
    found, limits = trial.ranks.gather(deviation), limit_of(GRADIENT, trial, layout.sharded)
    texts = {"own": "its own gradient, before the exchange,", "sum": "the sum of gradients"}
    for kind, text in texts.items():
        wrong = {
            rank: each[kind]
            for rank, each in enumerate(found)
            if kind in each and not each[kind][0] <= limits
        }
        if wrong:
            away, name = max(wrong.values(), key=lambda each: (np.isnan(each[0]), each[0]))
            place = places.name([*wrong], trial.hosts)
            raise Wrong(f"{place}: {text} of {name} {off_by(away)} (limit: {limits:g})")
    worst = max(each["sum"][0] for each in found)
    return f"passed: off by {worst:.1g} at most (limit: {limits:g})"


def deviate(
    found: Iterator[tuple[str, np.ndarray]], right: Callable[[str], np.ndarray]
) -> tuple[float, str]:
    """The largest relative error of a weight's gradient, and its name; a NaN is the largest."""
    names, errors, norms = [], [], []
    for name, values in found:
        expected = right(name)
        names.append(name)
        errors.append(np.linalg.norm(values - expected))
        norms.append(np.linalg.norm(expected))
    relative = np.array(errors) / (np.maximum(norms, FLOOR * np.linalg.norm(norms)) + 1e-30)
    worst = relative.argmax()
    return float(relative[worst]), names[worst]


def check_steps(trial: ShortRun, folder: Path) -> str:
    """After some steps the weights have changed, and are the same on all processes."""
    if trial.finite is None:  # after a step that failed, the next may hang
        return "left out: the first step failed"
    for step in range(2, STEPS + 1):
        trial.finite = trial.step(step) and trial.finite
    if not trial.finite:
        raise Wrong("a step was skipped, since its gradient was not finite")
    if trial.layout.deepspeed:
        return "left out: DeepSpeed keeps the weights in parts of its own"
    now, trial.same = digests(trial.parameters(), whole), False
    check_same(trial, now, "weights")
    trial.same = True
    if now == trial.before:
        raise Wrong(f"{STEPS} steps of the optimizer have changed no weight")
    how = ", gathered from their parts," if trial.layout.sharded else ""
    return f"passed: the bytes of {len(now)} weights{how} after {STEPS} steps"


def check_barrier(trial: ShortRun, folder: Path) -> str:
    """Nobody leaves a barrier before the last process, which comes late, has entered it."""
    if PROCESSES == 1:
        return ALONE
    trial.ranks.gather(None)  # all begin here
    began = time.perf_counter()
    if trial.layout.rank == PROCESSES - 1:
        time.sleep(SLEEP)
    trial.accelerator.wait_for_everyone()
    waits = trial.ranks.gather(time.perf_counter() - began)
    early = [rank for rank, wait in enumerate(waits) if wait < SLEEP / 2]
    if early:
        raise Wrong(f"{places.name(early, trial.hosts)} did not wait for process {PROCESSES - 1}")
    return f"passed: all waited for process {PROCESSES - 1}"


def check_saving(trial: ShortRun, folder: Path) -> str:
    """A checkpoint gives back the bytes of weights and optimizer state that were saved."""
    ranks, state = trial.ranks, trial.state
    if state is None:
        return "left out: the model could not be prepared"
    if not trial.same:
        return "left out: a checkpoint has one copy of weights that are not the same"

    def see() -> None:
        if not agreement.appears(folder):
            raise ValueError(
                f"{folder} of process 0 is not there; put --report on a disk that all machines "
                "share, as output_dir of train.py"
            )

    trial.everyone(see)
    if trial.layout.deepspeed:
        return "left out: DeepSpeed writes and reads checkpoints by itself"
    before = trial.everyone(state.collect)
    saved = digests(before)
    share = tensor_files.take_share(before, ranks)
    trial.everyone(tensor_files.write_share, share, folder)
    size = sum(path.stat().st_size for path in folder.glob(tensor_files.NAMES)) / 1e6
    with torch.no_grad():  # all that the checkpoint has to bring back
        for name, values in before.items():
            if name.startswith(("state.", "model.")):
                local(values.detach()).zero_()
    manifest = {"optimizer": weights.settings_as_text(state.settings)}
    trial.everyone(state.load, folder, manifest, {})
    loaded = digests(trial.everyone(state.collect))
    wrong = [name for name in saved if loaded.get(name) != saved[name]]
    found = ranks.gather(wrong)
    if any(found):
        places_wrong = [rank for rank, each in enumerate(found) if each]
        name = found[places_wrong[0]][0]
        raise Wrong(f"{places.name(places_wrong, trial.hosts)}: {name} came back changed")
    return f"passed: the bytes of {len(saved)} tensors, {size:,.1f} MB"


def check_main(trial: ShortRun, folder: Path) -> str:
    """One process of the run is the main one, and one of each machine; only the main one writes."""
    accelerator, rank = trial.accelerator, trial.layout.rank

    def write() -> None:
        if accelerator.is_main_process:
            (folder / f"written-by-{rank}").touch()

    trial.everyone(write)
    written = sorted(path.name for path in folder.glob("written-by-*"))
    # Several launchers on one host count as several machines.
    machine = (socket.gethostname(), os.environ.get("GROUP_RANK", "0"))
    facts = (accelerator.is_main_process, accelerator.is_local_main_process, machine, written)
    everywhere = trial.ranks.gather(facts)
    mains = [rank for rank, (main, *_) in enumerate(everywhere) if main]
    if mains != [0]:
        raise Wrong(f"main is {places.name(mains, trial.hosts) if mains else 'no process'}")
    if everywhere[0][3] != ["written-by-0"]:
        raise Wrong(f"process 0 alone should write, and there is {', '.join(everywhere[0][3])}")
    machines = places.group([machine for _, _, machine, _ in everywhere])
    for (host, _), numbers in machines.items():
        leaders = [r for r in numbers if everywhere[r][1]]
        if len(leaders) != 1:
            raise Wrong(f"{host} has {len(leaders)} local main processes: {places.ranges(leaders)}")
    count = len(machines)
    each = f"each of {count} machines" if count > 1 else "the machine"
    return f"passed: process 0 alone writes; {each} has one"


def check_loop(trial: ShortRun, folder: Path) -> str:
    """The first step of train.py, as its owner has it, has the loss and gradient found here."""
    if (first := trial.first) is None or trial.precision == "fp8":
        return "left out: there is nothing to compare with"
    trial.release()
    cfg, ranks = trial.cfg, trial.ranks
    recipe_cfg = dataclasses.replace(
        cfg,
        max_steps=3,
        num_epochs=0.0,
        global_batch_size=trial.plan.samples,
        micro_batch_size=trial.plan.micro_batch_size,
        device_shares="equal" if cfg.device_shares == "auto" else cfg.device_shares,
        log_every=1,
        tracker="none",
        profile_steps=None,
        async_save=False,
        output_dir=str(folder / "run"),
        timeout=min(cfg.timeout, 300),  # a process that skips its share lets the others wait
    )
    recipe = folder / "recipe.yaml"

    def write() -> None:
        if IS_MAIN:
            recipe.write_text(as_yaml(resolved_config(recipe_cfg)), encoding="utf-8")

    trial.everyone(write)
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = ranks.from_main(probe.getsockname()[1])
    own = ("TORCHELASTIC_", "EXIT_CODE_FILE", "VERIFIED_FILE")
    env = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    env |= {"MASTER_PORT": str(port)}
    command = [*OWN_LOOP, "--config", str(recipe)]
    step = subprocess.run(command, env=env, capture_output=True, text=True)
    said = step.stderr.strip().splitlines()[-1:] if step.returncode != STOPPED else []
    wrong = {text for each in ranks.gather(said) for text in each}
    if wrong:
        raise Wrong(f"it ended with an error: {one_line('; '.join(sorted(wrong)))}")

    def compare() -> str:
        if not IS_MAIN:
            return ""
        lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        line = next(line for line in map(json.loads, lines) if "loss" in line)
        limits = limit_of(LOSS, trial), limit_of(GRADIENT, trial, trial.layout.sharded)
        for name, right, limit in zip(("loss", "grad_norm"), first, limits, strict=True):
            found = line[name]  # null: a step of fp16 that was skipped
            if found is not None and not abs(found - right) <= limit * abs(right):
                return f"its first step has {name} {found:.6g}, and {right:.6g} is right"
        return ""

    problem = ranks.from_main(trial.everyone(compare))
    if problem:
        raise Wrong(problem)
    return f"passed: loss {first[0]:.5g}, norm of the gradient {first[1]:.5g}"


CHECKS: dict[str, Callable[[ShortRun, Path], str]] = {
    "same weights at the start": check_start,
    "same loss and gradient": check_common,
    "gradients are added up": check_gradients,
    "same weights after steps": check_steps,
    "barrier": check_barrier,
    "save and load": check_saving,
    "main process": check_main,
    "the loop of train.py": check_loop,
}
