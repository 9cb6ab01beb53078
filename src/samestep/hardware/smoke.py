"""Starts train.py on one device and on all, for three steps each, and compares what it logs.

Samples, losses and norms of gradients must be the same, to rounding. Those of the first step must
also be what the functions of task.py give without train.py.
"""

import dataclasses
import math
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import yaml
from torch.distributed.elastic.utils.distributed import get_free_port

from samestep.base import run_folder
from samestep.base.console import one_line, print_on_main
from samestep.hardware import devices
from samestep.hardware.devices import Devices, Section, Wrong
from samestep.hardware.project import Project
from samestep.run.startup import resolved_config
from samestep.step import seeds
from samestep.step.plan import StepPlan, plan_step

_STEPS = 3
_SAMPLES = 4  # in a micro-batch
_TURNS = 4  # micro-batches of a process: what unequal shares need, see count_micro_batches


def run(section: Section, used: Devices, project: Project, folder: Path) -> None:
    """Runs train.py, and adds what was compared to the section; raises Wrong."""
    cfg, size = project.cfg, min(_SAMPLES, project.cfg.micro_batch_size)
    shares = "equal" if cfg.device_shares == "auto" else cfg.device_shares
    samples = size * _TURNS * used.count
    plan = plan_step(samples, size, used.count, cfg.exact, shares)
    section.facts["YAML"] = os.path.relpath(used.yaml)
    section.facts |= {"precision": used.precision, "step": plan.describe()}
    short = dataclasses.replace(
        cfg, max_steps=_STEPS, num_epochs=0.0, warmup_steps=0, log_every=1, save_every=0,
        global_batch_size=samples, micro_batch_size=size, device_shares=shares,
        learning_rate=cfg.learning_rate or 1e-3, tracker="none", profile_steps=None,
        timeout=min(cfg.timeout, 300),  # a process that skips its share lets the others wait
    )  # fmt: skip
    # The relative error that is rounding, of the norm of the gradient; a tenth of it of the loss.
    limit = {"no": 1e-2 if cfg.tf32 else 1e-3, "fp8": 0.5}.get(used.precision, 0.1)
    one = used
    if used.count > 1:
        yaml_of_one = "cpu" if used.kind == "cpu" else "single_gpu"
        one = used._replace(count=1, yaml=Path(f"configs/accelerate/{yaml_of_one}.yaml"))
    for left in folder.glob(".smoke-*"):  # of one that was stopped
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".smoke-", dir=folder) as name:
        place = Path(name)
        text = yaml.safe_dump(resolved_config(short), sort_keys=False, allow_unicode=True)
        (place / "recipe.yaml").write_text(text, encoding="utf-8")
        alone = train(one, place, "--device_shares", "equal")
        together = train(used, place) if used.count > 1 else []
    model = project.build_model(torch.device(used.kind))  # last: it keeps memory of the GPU
    right = compute_step(project, model, plan, used.precision)
    compare(section, "train.py on one device, with task.py", one, limit, right, alone[:1])
    name = f"train.py on {used.count} devices, with one"
    norms = torch.nn.modules.batchnorm._BatchNorm
    if used.kind == "cuda" and any(isinstance(each, norms) for each in model.modules()):
        section.facts[name] = "left out: statistics of BatchNorm are those of all devices"
    elif together:
        compare(section, name, used, limit, alone, together)
    passed = [*section.facts.values()].count("passed")
    section.lines.append(f"{passed} comparisons passed, 0 failed")


def train(used: Devices, place: Path, *flags: str) -> list[dict]:
    """The lines of metrics of a run of train.py; raises Wrong, with its own words, if it failed."""
    print_on_main(f"train.py on {used.count} x {used.kind}: {_STEPS} steps")
    options = {
        "config_file": used.yaml, "num_processes": used.count, "mixed_precision": used.precision,
        "num_machines": 1, "machine_rank": 0, "main_process_port": get_free_port(),
        "num_cpu_threads_per_process": max(torch.get_num_threads() // used.count, 1),
    }  # fmt: skip
    launch = ["-m", "accelerate.commands.launch", "--quiet"]
    launch += [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    output = place / f"run-{used.count}"
    words = ["train.py", "--config", place / "recipe.yaml", "--output_dir", output, *flags]
    code, printed = devices.run([sys.executable, *launch, *devices.PREFIX, *words])
    if code == 0:
        steps = [line for line in run_folder.read_metrics(output) if "grad_norm" in line]
        if len(steps) != _STEPS:
            raise Wrong(f"train.py on {used.count} x {used.kind} trained {len(steps)} steps")
        return steps
    told = re.findall(r"^train\.py: (.+?)(?:; traceback: .*)?$", printed, re.MULTILINE)
    why = "; ".join(dict.fromkeys(told)) or " ".join(printed.splitlines()[-1:])
    if code is None:
        why = f"it hangs, for {devices.MINUTES} minutes"
    raise Wrong(f"train.py on {used.count} x {used.kind} ended: {one_line(why, 600)}")


def compare(
    section: Section, name: str, used: Devices, limit: float, right: list[dict], found: list[dict]
) -> None:
    """Raises Wrong unless the steps have the same samples, losses and norms of gradients."""
    where = f"on {used.count} x {used.kind}"
    for step, (expected, line) in enumerate(zip(right, found, strict=False), 1):
        if expected.get("batch_hash", line["batch_hash"]) != line["batch_hash"]:
            raise Wrong(f"step {step} {where} trains other samples than on one device")
        for field in ("loss", "grad_norm"):
            a, b = expected.get(field), line[field]  # None: not finite
            if used.precision == "fp16" and field == "grad_norm" and None in (a, b):
                continue  # its scaler looks for a scale
            rounding = limit if field == "grad_norm" else limit / 10
            if None in (a, b) or not abs(a - b) <= rounding * abs(a):
                raise Wrong(f"step {step}: {field} {where} is {b}, and {a} is right")
    section.facts[name] = "passed"


def compute_step(
    project: Project, model: torch.nn.Module, plan: StepPlan, precision: str
) -> list[dict]:
    """Loss and norm of the gradient of the first step, without train.py and accelerate."""
    num_items, losses, scale = 0, [], 1024 if precision == "fp16" else 1
    positions = project.rows.sort(range(plan.samples))
    for number in range(sum(plan.shares)):
        batch = project.batch(plan.positions(positions, number))
        num_items += project.task.count(batch)
        seeds.seed_micro_batch(project.cfg.seed, 1, number)
        losses.append(project.add_gradients(model, batch, precision, scale).item())
    gradients = [p.grad.double().norm().item() for p in model.parameters() if p.grad is not None]
    divisor = max(num_items, 1)
    norm = math.hypot(*gradients) / scale / divisor
    return [{"loss": math.fsum(losses) / divisor, "grad_norm": norm}]
