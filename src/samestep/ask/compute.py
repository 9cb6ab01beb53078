"""Trains up to a step of a run again, and computes what is asked about it.

`samestep replay` starts it in a scratch folder, in each of its processes, with the flags of
train.py. The middle of a step, its learning rate and the optimizer are those of train.py itself.
"""

import samestep.base.preflight  # noqa: F401  # isort: skip
import contextlib
import copy
import io
import json
import math
import os
import re
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
from samestep.core import batches, monitor, sharding, weights
from samestep.core.exact import step_gradients
from samestep.core.gradient import StepGradients
from samestep.core.monitor import skip_unless_finite
from samestep.core.ranks import Ranks
from samestep.project import device, shutdown, startup
from samestep.project.loading import TrainLoader
from samestep.project.run import Run
from samestep.project.saving import Saver
from samestep.project.startup import RunStart


def norms_by_layer(gradients: StepGradients) -> dict[str, float]:
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


class Question:
    """What is asked about a step, with the weights before it."""

    def __init__(self, run: Run, model: Any, gradients: StepGradients, rows: Any, step: int):
        self.run, self.model, self.gradients, self.step = run, model, gradients, step
        self.rows, end = rows, run.samples(step)
        self.train, _ = startup.find_project()
        self.positions = [*rows.sort(range(end - run.plan.samples, end))]
        self.samples = rows.__getitems__(self.positions)
        self.rows_depend = getattr(run.task, "rows_depend", bool)()

    def compute(self, kept: Callable[[int], bool] = lambda _: True) -> dict[str, Any]:
        """The loss, the norm of each layer, and the items of the step, of these samples alone."""
        run, plan, window, has_rows, items = self.run, self.run.plan, [], [], 0
        any_kept = [each for each in self.samples if kept(each[0])][:1]
        for number in plan.run():
            samples = plan.positions(self.samples, number)
            left = [each for each in samples if kept(each[0])]
            seeds = self.rows.seeds(plan.positions(self.positions, number), [i for i, _ in samples])
            batches.seed_host(int(seeds.sum()))  # collate may draw
            batch, (count, _), _ = batches.collate(run.task, left or any_kept)
            window.append((number, batch))
            has_rows.append(bool(left))
            items += count * len(left[:1]) * run.ranks.layout.leads
        (items,) = run.ranks.sum_over_ranks(items)
        flags = iter(has_rows)

        def loss_sum(model: Any, batch: Any) -> torch.Tensor:
            return run.task.loss_sum(model, batch) * next(flags)

        asked = copy.copy(run)
        if not all(has_rows):  # each process computes as many micro-batches as in training
            asked.task = SimpleNamespace(**vars(run.task) | {"loss_sum": loss_sum})
        losses = self.train.compute_step(
            asked, self.model, self.gradients, self.step, window, items
        )
        self.gradients.reduce()
        found = self.describe(losses, items)
        for parameter in self.gradients.parameters:
            parameter.grad = None
        return found

    def describe(self, losses: list[torch.Tensor], items: int) -> dict[str, Any]:
        """The same of a gradient that is complete, before it is clipped."""
        plan, layers = self.run.plan, norms_by_layer(self.gradients)
        (total,), _ = monitor.read_steps(self.run.ranks, plan.count, [plan.run()], [losses])
        norm = math.sqrt(sum(value**2 for value in layers.values()))
        return {"loss": total / max(items, 1), "items": items, "norm": norm, "layers": layers}

    @torch.no_grad()
    def rows_alone(self) -> list[dict[str, Any]]:
        """The loss of each row alone, without dropout."""
        found, task, plan = [], self.run.task, self.run.plan
        micro_batches = [n for n in range(plan.count) for _ in plan.positions(self.samples, n)]
        self.model.eval()
        sharding.share_buffers(self.model, self.run.ranks.layout.fsdp)
        with weights.eager(self.model):
            for number, sample in zip(micro_batches, self.samples, strict=True):
                batches.seed_micro_batch(0, 1, sample[0])
                batch, (items, _), _ = batches.collate(task, [sample])
                batch = send_to_device(batch, self.run.accelerator.device)
                loss = float(self.model(task.loss_sum, batch)) / max(items, 1)
                found.append(
                    {"micro_batch": number, "row": sample[0], "items": items, "loss": loss}
                )
        self.model.train()
        return found


def main(start: RunStart, ranks: Ranks, stop: shutdown.StopRequest) -> int:
    """Writes answer.json."""
    train, _ = startup.find_project()
    folder = Path(os.environ["SAMESTEP_REPLAY"])
    asked = json.loads((folder / "question.json").read_text())
    if asked["data"] not in ("", start.manifest["data"]["fingerprint"]):
        raise UserError(f"the data have changed since step {asked['step']}: it cannot be repeated")
    cfg, run = start.cfg, Run(start, ranks, stop)
    accelerator = Accelerator(project_dir=cfg.output_dir, **device.accelerator_options(cfg))
    run.set_accelerator(accelerator)
    rows, step = run.train_rows(), asked["step"]
    if not rows.is_stream:  # before minutes of training
        end = run.samples(step)
        check_without({*asked["without"]}, rows.ids(range(end - cfg.global_batch_size, end)))
    if getattr(run.task, "rows_depend", bool)() and (asked["without"] or asked["gradients"]):
        raise UserError("rows_depend: rows of this task mean nothing alone, or left out")
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
    answer: dict[str, Any] = {"lines": [], "hardware": run.hardware, "first": step}
    answer["changed"] = [each for each in run.resume_point.remarks if each[:7] == "changed"]

    model.train()
    run.meter.start()
    loader.prefetch()
    while step < asked["last"]:
        step += 1
        window, items = loader.next_step()
        lr = train.lr_at(step, cfg, run.last_step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        question = None
        if step == asked["step"]:
            question = Question(run, model, gradients, loader.rows, step)
            answer |= ask(question, asked, Part(loader.rows, start.data)) | {"lr": lr}
        losses = train.compute_step(run, model, gradients, step, window, items)
        loader.prefetch()
        gradients.reduce()
        if question:
            answer |= question.describe(losses, items)
        norm = gradients.clip(cfg.max_grad_norm)
        skip_unless_finite(optimizer, norm, items)
        optimizer.step()
        optimizer.zero_grad()
        means.add(step, items, run.plan.run(), losses, norm)
        if step in asked["lines"]:
            numbers, _, _ = means.read()
            answer["lines"].append({"step": step, "lr": lr, **numbers, **run.meter.read()})
    if accelerator.is_main_process:
        (folder / "answer.json").write_text(json.dumps(answer))
    accelerator.wait_for_everyone()
    return 0


def ask(question: Question, asked: dict, part: Part) -> dict[str, Any]:
    """What is computed beside the step."""
    answer: dict[str, Any] = {"again": question.compute(), "rows": []}
    if question.rows_depend:
        return answer
    without, rows = {*asked["without"]}, question.rows_alone()
    check_without(without, [each["row"] for each in rows])
    if without:
        answer["without"] = question.compute(lambda row: row not in without)
    for each, (number, row) in zip(rows, question.samples, strict=True):
        each["text"] = part.line(number, row, asked["width"])
        if asked["gradients"]:
            each["norm"] = question.compute(lambda other: other == number)["norm"]  # noqa: B023
    return answer | {"rows": rows}


def check_without(without: set[int], ids: list[int]) -> None:
    if missing := sorted(without - {*ids}):
        raise UserError(f"--without {missing[0]} is not a row of the step; see samestep rows")
    if without and without == {*ids}:
        raise UserError("--without leaves no row of the step")


def silent(function: Callable) -> Callable:
    """The function, which prints nothing: an answer says what counts."""

    def call(*arguments: Any) -> Any:
        with contextlib.redirect_stdout(io.StringIO()):
            return function(*arguments)

    return call


if __name__ == "__main__":
    shutdown.run(silent(main), lambda: startup.find_project()[0].prepare(), "samestep replay")
