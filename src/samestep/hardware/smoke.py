"""Starts train.py on one device and on all, for three steps each, and compares what it logs.

The samples, losses and norms of gradients must be the same, to rounding. Those of the first step
must also be what the functions of task.py give without train.py.
"""

import dataclasses
import json
import math
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate.utils import send_to_device
from torch.distributed.elastic.utils.distributed import get_free_port

from samestep.base.console import one_line, print_on_main
from samestep.hardware import devices
from samestep.hardware.devices import Devices
from samestep.hardware.project import Project
from samestep.hardware.report import Section
from samestep.processes.device import allow_tf32, compile_blocks
from samestep.processes.ranks import is_out_of_memory
from samestep.settings import contract
from samestep.start.startup import resolved_config
from samestep.step import batches
from samestep.step.batches import StepPlan

STEPS = 3
SAMPLES = 4  # in a micro-batch, at most
TURNS = 2  # micro-batches of a process, on average: so gradients accumulate
SECONDS = 1800  # of a run
LOSS_SCALE = 1024  # of gradients in fp16, which are computed without accelerate's scaler
# Relative errors that are rounding in the first step, by the precision of the YAML.
LIMITS = {
    "no": {"loss": 1e-5, "grad_norm": 1e-4},
    "bf16": {"loss": 2e-3, "grad_norm": 2e-2},
    "fp16": {"loss": 1e-3, "grad_norm": 1e-2},
}
LATER, SHARDED, TF32 = 10, 5, 50  # times as much: later steps, weights in 16 bits, TF32
SHARDING = ("FSDP", "DEEPSPEED", "parallelism_config")


class Wrong(Exception):
    """A check that did not pass."""


def run(used: Devices, project: Project, folder: Path) -> Section:
    """Runs train.py, and compares."""
    section = Section("smoke")
    with tempfile.TemporaryDirectory(prefix=".smoke-", dir=folder) as name:
        trial = Trial(used, project, Path(name))
        section.facts = {
            "recipe": str(project.recipe),
            "YAML": f"{used.yaml}, mixed_precision {used.precision}",
            "step": trial.plan.describe(),
        }
        checks = {"train.py on one device": trial.train_alone}
        checks["the first step by task.py alone"] = trial.compare_with_task
        if used.count > 1:
            checks[f"train.py on {used.count} devices"] = trial.train_together
            checks["the same lines"] = trial.compare_runs
        for what, check in checks.items():
            try:
                section.facts[what] = check()
            except Wrong as error:
                section.facts[what] = "failed, see below"
                section.failures.append(f"{what}: {error}")
    passed = sum(str(fact).startswith("passed") for fact in section.facts.values())
    failed = len(section.failures)
    left_out = len(checks) - passed - failed
    section.lines.append(f"{passed} passed, {failed} failed, {left_out} left out")
    return section


class Trial:
    """Short runs of a project: the lines of metrics of each, and what they are compared with."""

    def __init__(self, used: Devices, project: Project, folder: Path):
        self.used, self.project, self.folder = used, project, folder
        self.alone: list[dict] = []
        self.together: list[dict] = []
        self.has_batch_norm = False
        cfg, size = project.cfg, min(SAMPLES, project.cfg.micro_batch_size)
        shares = "equal" if cfg.device_shares == "auto" else cfg.device_shares
        samples = size * TURNS * used.count
        self.plan = batches.plan_step(samples, size, used.count, cfg.exact, shares)
        self.cfg = dataclasses.replace(
            cfg,
            max_steps=STEPS,
            num_epochs=0.0,
            global_batch_size=samples,
            micro_batch_size=self.plan.micro_batch_size,
            device_shares=shares,
            learning_rate=cfg.learning_rate or 1e-3,
            warmup_steps=0,
            log_every=1,
            save_every=0,
            tracker="none",
            profile_steps=None,
            async_save=False,
            timeout=min(cfg.timeout, 300),  # a process that skips its share lets the others wait
        )
        text = yaml.safe_dump(resolved_config(self.cfg), sort_keys=False, allow_unicode=True)
        (folder / "recipe.yaml").write_text(text, encoding="utf-8")

    def limit(self, name: str, step: int = 1) -> float:
        """The relative difference that counts as rounding."""
        limit = LIMITS.get(self.used.precision, LIMITS["bf16"])[name]
        if step > 1:
            limit *= LATER
        if self.used.precision == "no":
            return limit * (TF32 if self.cfg.tf32 else 1)
        text = self.used.yaml.read_text(encoding="utf-8")
        return limit * (SHARDED if any(word in text for word in SHARDING) else 1)

    # ---- Runs of train.py ------------------------------------------------------------------------

    def train_alone(self) -> str:
        """Trains in one process, under a YAML of its own."""
        path = self.folder / "one.yaml"
        values = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO"}
        text = yaml.safe_dump({**values, "use_cpu": self.used.kind == "cpu"})
        path.write_text(text, encoding="utf-8")
        path = self.used.yaml if self.used.count == 1 else path
        self.alone = self.train("alone", path, 1, "--device_shares", "equal")
        return f"passed: {STEPS} steps"

    def train_together(self) -> str:
        """Trains in a process on each device."""
        self.together = self.train("together", self.used.yaml, self.used.count)
        return f"passed: {STEPS} steps"

    def train(self, name: str, path: Path, processes: int, *flags: str) -> list[dict]:
        """The lines of metrics of a run; raises Wrong, with the run's own words, if it failed."""
        print_on_main(f"train.py on {processes} x {self.used.kind}: {STEPS} steps")
        output = self.folder / name
        launch = {
            "config_file": path, "num_processes": processes, "mixed_precision": self.used.precision,
            "num_machines": 1, "machine_rank": 0, "main_process_port": get_free_port(),
            "num_cpu_threads_per_process": max(torch.get_num_threads() // processes, 1),
        }  # fmt: skip
        words = [word for key, value in launch.items() for word in (f"--{key}", value)]
        train = ["train.py", "--config", self.folder / "recipe.yaml", "--output_dir", output]
        module = ["-m", "accelerate.commands.launch", "--quiet"]
        code, printed = devices.run(
            *module, *words, *devices.PREFIX, *train, *flags, seconds=SECONDS
        )
        if code is None:
            raise Wrong(f"it did not end within {SECONDS} s")
        if code:
            raise Wrong(f"it ended with an error: {reason(printed)}")
        text = (output / "metrics.jsonl").read_text(encoding="utf-8")
        lines = [line for line in map(json.loads, text.splitlines()) if "grad_norm" in line]
        if [line["step"] for line in lines] != [*range(1, STEPS + 1)]:
            raise Wrong(f"it has logged the steps {[line['step'] for line in lines]}")
        return lines

    # ---- Comparisons -----------------------------------------------------------------------------

    def compare_runs(self) -> str:
        """One device and all of them train the same samples, with the same losses."""
        if not self.alone or not self.together:
            return "left out: train.py ended with an error"
        if self.has_batch_norm and self.used.kind == "cuda":
            return "left out: BatchNorm takes its statistics from all devices"
        for one, other in zip(self.alone, self.together, strict=True):
            if one["batch_hash"] != other["batch_hash"]:
                raise Wrong(f"step {one['step']} trains other samples")
            self.compare(one, other, f"on {self.used.count} devices")
        return "passed: samples, losses, norms of gradients"

    def compare_with_task(self) -> str:
        """The first step has the loss and the gradient that task.py gives for its samples."""
        if not self.alone:
            return "left out: train.py ended with an error"
        if self.used.precision == "fp8":
            return "left out: train.py makes layers of fp8"
        try:
            right = self.compute_step()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return "left out: one device has no room for the whole model and its gradient"
        self.compare(right, self.alone[0], "by train.py")
        return f"passed: loss {right['loss']:.5g}, norm of the gradient {right['grad_norm']:.5g}"

    def compare(self, right: dict[str, Any], found: dict[str, Any], where: str) -> None:
        """Raises Wrong unless the loss and the norm of the gradient of a step are the same."""
        for name in ("loss", "grad_norm"):
            a, b, step = right[name], found[name], found["step"]
            skipped = None in (a, b)  # null: not finite
            if skipped and self.used.precision == "fp16" and name == "grad_norm":
                continue  # its scaler looks for a scale
            if skipped or not abs(a - b) <= self.limit(name, step) * abs(a):
                values = ["not finite" if each is None else f"{each:.7g}" for each in (b, a)]
                raise Wrong(f"step {step}: {name} {where} is {values[0]}, and {values[1]} is right")

    def compute_step(self) -> dict[str, float]:
        """Loss and norm of the gradient of the first step, without train.py and accelerate."""
        project, cfg, task = self.project, self.cfg, self.project.task
        device = torch.device(self.used.name(0))
        allow_tf32(cfg.tf32)
        model = project.build_model(cfg.gradient_checkpointing).to(device)
        norms = torch.nn.modules.batchnorm._BatchNorm
        self.has_batch_norm = any(isinstance(each, norms) for each in model.modules())
        if cfg.compile:
            compile_blocks(model)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.used.precision)
        scale = LOSS_SCALE if dtype == torch.float16 else 1
        plan = StepPlan(self.plan.samples, self.plan.micro_batch_size, (sum(self.plan.shares),))
        positions = project.rows.sort(range(plan.samples))
        losses, num_items = [], 0
        for number in plan.run():
            batch = project.batch(plan.positions(positions, number))
            num_items += task.count(batch)
            batch = send_to_device(batch, device)
            batches.seed_micro_batch(cfg.seed, 1, number)
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                loss = task.loss_sum(model, batch)
            contract.check_loss(loss)
            (loss.float() * scale).backward()
            losses.append(loss.item())
        gradients = [p.grad.double().norm().item() for p in model.parameters() if p.grad is not None]
        num_items = max(num_items, 1)
        norm = math.hypot(*gradients) / scale / num_items
        return {"loss": math.fsum(losses) / num_items, "grad_norm": norm}


def reason(printed: str) -> str:
    """What train.py has said about its error; otherwise the last line."""
    lines = [line for line in printed.splitlines() if line.strip()] or ["it printed nothing"]
    told = re.findall(r"^train\.py: (.+?)(?:; traceback: .*)?$", printed, re.MULTILINE)
    errors = [line for line in lines if re.match(r"\w*(Error|Exception)\b", line)]
    return one_line("; ".join(dict.fromkeys(told)) or [*lines[-1:], *errors][-1], 600)
