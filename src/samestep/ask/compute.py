"""Trains up to a step of a run again, and computes what is asked about it.

`samestep replay` starts it in a scratch folder, in each of its processes, with the flags of
train.py. The middle of a step, its learning rate and the optimizer are those of train.py itself.
"""

import samestep.base.preflight  # noqa: F401  # isort: skip
import copy
import json
import math
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device

from samestep.ask.data import Part
from samestep.base.errors import UserError
from samestep.launch import device, shutdown
from samestep.processes import sharding
from samestep.processes.ranks import Ranks
from samestep.run import startup
from samestep.run.loading import TrainLoader
from samestep.run.run import Run
from samestep.run.saving import Saver
from samestep.run.startup import RunStart
from samestep.step import monitor, seeds
from samestep.step.exact import step_gradients
from samestep.step.gradient import StepGradients
from samestep.step.model import eager
from samestep.step.monitor import skip_unless_finite
from samestep.step.samples import collate


def _norms_by_layer(gradients: StepGradients) -> dict[str, float]:
    """The norm of the gradient of each layer."""
    squares: dict[str, float] = defaultdict(float)
    scaler = gradients.accelerator.scaler
    for name, parameter in zip(gradients.names, gradients.parameters, strict=True):
        if parameter.grad is not None:
            layer = re.match(r".*?\.\d+(?=\.|$)", name)
            name = layer[0] if layer else re.sub(r"\.(weight|bias)$", "", name)
            grad = sharding.full_tensor(parameter.grad).detach().double()
            squares[name] += float(grad.square().sum())
    scale = scaler.get_scale() if scaler else 1.0  # of fp16's losses
    return {name: math.sqrt(value) / scale for name, value in squares.items()}


class _Question:
    """What is asked about a step, with the weights before it."""

    def __init__(self, run: Run, model: Any, gradients: StepGradients, rows: Any, step: int):
        self.run, self.model, self.gradients, self.step = run, model, gradients, step
        self.rows, end = rows, run.samples(step)
        self.positions = [*rows.sort(range(end - run.plan.samples, end))]
        self.samples = rows.__getitems__(self.positions)

    def compute(self, kept: Callable[[int], bool] = lambda _: True) -> dict[str, Any]:
        """The step with these samples alone. Each process computes as many micro-batches as in
        training: the loss of one without a sample counts nothing."""
        run, plan, window, counts = self.run, self.run.plan, [], []
        some = [each for each in self.samples if kept(each[0])][:1]
        for number in plan.run():
            samples = plan.positions(self.samples, number)
            left = [each for each in samples if kept(each[0])]
            self.rows.seed_collate(plan.positions(self.positions, number))
            batch, (count, _), _ = collate(run.task, left or some)
            window.append((number, batch))
            counts.append(count if left else 0)
        (items,) = run.ranks.sum_over_ranks(sum(counts) * run.ranks.layout.leads)
        asked, flags = copy.copy(run), iter([count > 0 for count in counts])

        def loss_sum(model: Any, batch: Any) -> torch.Tensor:
            return run.task.loss_sum(model, batch) * next(flags)

        if not all(counts):
            asked.task = SimpleNamespace(**vars(run.task) | {"loss_sum": loss_sum})
        train, _ = startup.find_project()
        losses = train.compute_step(asked, self.model, self.gradients, self.step, window, items)
        self.gradients.reduce()
        found = self.describe(losses, items)
        for parameter in self.gradients.parameters:
            parameter.grad = None
        return found

    def describe(self, losses: list[torch.Tensor], items: int) -> dict[str, Any]:
        """The loss, items and norms of a gradient that is complete, before it is clipped."""
        plan, layers = self.run.plan, _norms_by_layer(self.gradients)
        (total,), _ = monitor.read_steps(self.run.ranks, plan.count, [plan.run()], [losses])
        norm = math.hypot(*layers.values())
        return {"loss": total / max(items, 1), "items": items, "norm": norm, "layers": layers}

    @torch.no_grad()
    def rows_alone(self, part: Part) -> list[dict[str, Any]]:
        """The loss of each row alone, without dropout."""
        found = []
        self.model.eval()
        sharding.share_buffers(self.model, self.run.ranks.layout.fsdp)
        with eager(self.model):
            for sample in self.samples:
                seeds.seed_micro_batch(0, 1, sample[0])
                batch, (items, _), _ = collate(self.run.task, [sample])
                batch = send_to_device(batch, self.run.accelerator.device)
                loss = float(self.model(self.run.task.loss_sum, batch)) / max(items, 1)
                found.append({"row": sample[0], "items": items, "loss": loss})
                found[-1]["line"] = part.line(*sample)
        self.model.train()
        return found


def ask(question: _Question, asked: dict, part: Part) -> dict[str, Any]:
    """What is computed beside the step."""
    without, ids = {*asked["without"]}, {number for number, _ in question.samples}
    if missing := sorted(without - ids):
        raise UserError(f"--without {missing[0]} is not a row of the step; see samestep rows")
    if without == ids:
        raise UserError("--without leaves no row of the step")
    answer: dict[str, Any] = {"again": question.compute(), "rows": []}
    if getattr(question.run.task, "rows_depend", bool)():
        if without:
            raise UserError("rows_depend: rows of this task mean nothing alone, or left out")
        return answer
    answer["rows"] = question.rows_alone(part)
    if without:
        answer["without"] = question.compute(lambda row: row not in without)
    for each in answer["rows"] if asked["gradients"] else ():
        each["norm"] = question.compute(lambda row: row == each["row"])["norm"]  # noqa: B023
    return answer


def _read_question() -> dict[str, Any]:
    return json.loads(Path(os.environ["SAMESTEP_REPLAY"], "question.json").read_text())


def prepare() -> RunStart:
    """The start of a run on the data of then."""
    train, task = startup.find_project()
    return startup.prepare_run(train.Config, task, None, stored=_read_question()["prepared"])


def main(start: RunStart, ranks: Ranks, stop: shutdown.StopRequest) -> int:
    """Writes answer.json."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  the answer says it
    train, _ = startup.find_project()
    cfg, run, asked = start.cfg, Run(start, ranks, stop), _read_question()
    if asked["data"] not in ("", start.manifest["data"]["fingerprint"]):
        raise UserError(f"the data have changed since step {asked['step']}: it cannot be repeated")
    accelerator = Accelerator(project_dir=cfg.output_dir, **device.accelerator_options(cfg))
    run.set_accelerator(accelerator)
    model = run.build_model()
    if any(isinstance(each, torch.nn.modules.batchnorm._BatchNorm) for each in model.modules()):
        raise UserError("the model has BatchNorm, whose statistics a question would change")
    optimizer = train.build_optimizer(model, cfg)
    with run.preparing(model, optimizer) as module:
        model, optimizer = accelerator.prepare(module, optimizer)
    gradients = step_gradients(accelerator, ranks, model, cfg.exact)
    run.measure_shares(model)
    loader = TrainLoader(run)
    step, _ = Saver(run, model, optimizer).load()
    means = monitor.StepMonitor(accelerator, ranks, run.plan.count, 0)
    changed = [each for each in run.resume_point.remarks if each.startswith("changed")]
    answer: dict[str, Any] = {"lines": [], "about": [run.hardware, *changed]}

    model.train()
    run.meter.start()
    loader.prefetch()
    while step < asked["last"]:
        step, question = step + 1, None
        window, items = loader.next_step()
        lr = train.lr_at(step, cfg, run.last_step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        if step == asked["step"]:
            question = _Question(run, model, gradients, loader.rows, step)
            answer |= ask(question, asked, Part(loader.rows, start.data))
        losses = train.compute_step(run, model, gradients, step, window, items)
        loader.prefetch()
        gradients.reduce()
        if question:
            answer |= question.describe(losses, items)
        norm = gradients.clip(cfg.max_grad_norm)
        skip_unless_finite(optimizer, norm, items)
        seeds.seed_micro_batch(cfg.seed, step)
        optimizer.step()
        optimizer.zero_grad()
        means.add(step, items, run.plan.run(), losses, norm)
        if step in asked["lines"]:
            answer["lines"].append({"lr": lr, **means.read()[0], **run.meter.read()})
    if accelerator.is_main_process:
        Path(os.environ["SAMESTEP_REPLAY"], "answer.json").write_text(json.dumps(answer))
    return 0


if __name__ == "__main__":
    shutdown.run(main, prepare, "samestep replay")
