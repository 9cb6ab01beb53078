"""A few training steps of the project's own model, so small that every process can check them."""

import copy
import gc
import hashlib
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate.utils import send_to_device

from samestep.base.console import one_line
from samestep.checkpoint import weights
from samestep.hardware import places
from samestep.hardware.project import Project
from samestep.processes import device
from samestep.processes.device import PROCESSES
from samestep.processes.ranks import Ranks, UserError, as_user_error, catch, is_out_of_memory
from samestep.settings import contract
from samestep.step import batches, monitor, sharding
from samestep.step.batches import StepPlan
from samestep.step.sharding import local, whole
from samestep.step.stopwatch import Stopwatch
from samestep.step.sums import StepGradients

SAMPLES = 4  # in a micro-batch, at most
TURNS = 2  # micro-batches of a process in a step: so gradients accumulate
LOSS_SCALE = 1024  # of gradients in fp16 that are computed without accelerate's scaler

Gradients = dict[str, np.ndarray]  # by the name of the weight in the task's model


class Wrong(Exception):
    """A check that did not pass: raised on all processes together, with the same text."""


class NoMemory(Wrong):
    """A device has no room for what was tried."""


def everyone(
    ranks: Ranks, hosts: list[str], function: Callable, *arguments: Any, by_user: bool = False
) -> Any:
    """Calls a function on all processes; if it fails on some, all raise Wrong, which names these.

    `by_user`: a ValueError is one of the user's input, and becomes UserError.
    """
    value, problem = catch(as_user_error()(function), *arguments)
    if isinstance(problem, Wrong):  # of a call inside, which all processes have made
        raise problem
    input_error = by_user and isinstance(problem, UserError)
    text = str(problem) if input_error else describe_error(problem) if problem else ""
    full = problem is not None and is_out_of_memory(problem.__cause__ or problem)
    found = ranks.gather((text, input_error, full))
    texts = places.group([text for text, *_ in found])
    if {*texts} == {""}:
        return value
    named = [f"{places.name(n, hosts)}: {text}" for text, n in texts.items() if text]
    if all(mine for text, mine, _ in found if text):
        raise UserError("; ".join(named if "" in texts else map(str, texts)))
    full = all(full for text, _, full in found if text)
    raise (NoMemory if full else Wrong)("; ".join(named))


def describe_error(error: Exception) -> str:
    """Kind, text and place of an error in one line."""
    error = error.__cause__ if isinstance(error, UserError) and error.__cause__ else error
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    where = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return f"raised {type(error).__name__}: {one_line(error)}{where}"


def digests(named: dict[str, torch.Tensor], part: Callable = local) -> dict[str, str]:
    """Type, shape and 16 hex digits of the SHA-256 of each tensor; of a DTensor, of this part.

    If `part` is `whole`, all processes must call it: they gather one tensor after the other.
    """
    found = {}
    for name, values in named.items():
        values = part(values.detach())
        bits = values.cpu().contiguous().flatten().view(torch.uint8).numpy()
        digest = hashlib.sha256(bits).hexdigest()[:16]
        found[name] = f"{values.dtype} {tuple(values.shape)} {digest}"
    return found


class ShortRun:
    """The model of a project, as train.py would train it, and a copy that no process shares."""

    def __init__(self, project: Project, ranks: Ranks, hosts: list[str]):
        self.project, self.cfg, self.ranks, self.hosts = project, project.cfg, ranks, hosts
        self.layout = project.layout
        self.finite: bool | None = None  # whether all steps were; None: none is done
        self.first: tuple[float, float] | None = None  # loss and norm of the first step
        self.alone = ""  # why there is no gradient of a process alone
        self.same = True  # whether all processes have the same weights, as far as is known
        self.state: weights.TrainingState | None = None  # of the model that is prepared
        with ranks.fail_together(), as_user_error():
            self.accelerator = device.make_accelerator(self.cfg)
            self.plan = small_plan(project)
        sharding.configure_deepspeed(self.accelerator, self.plan, self.cfg.max_grad_norm)
        self.model = everyone(ranks, hosts, self.build, by_user=True)
        self.model = weights.sync_batch_norms(
            self.model, self.accelerator, self.plan, self.cfg.device_shares
        )
        self.started = digests(dict(self.model.named_parameters()))
        self.precision = self.accelerator.mixed_precision
        self.copy, self.problem = catch(copy.deepcopy, self.model)
        positions = project.rows.sort(range(self.plan.samples))
        parts = [self.plan.positions(positions, number) for number in range(sum(self.plan.shares))]
        self.common = everyone(ranks, hosts, project.batch, parts[0])
        own = [parts[number] for number in self.plan.run()]
        self.window = everyone(ranks, hosts, lambda: [*map(project.batch, own)])
        count = everyone(ranks, hosts, lambda: sum(map(project.task.count, self.window)))
        self.terms = max(*ranks.sum_over_ranks(count * self.layout.leads), 1)

    def build(self) -> torch.nn.Module:
        """The model, as train.py builds it."""
        model = self.project.build_model()
        if self.cfg.gradient_checkpointing:
            weights.enable_gradient_checkpointing(model)
        sharding.check_model_shares_rows(model, self.layout)
        return model

    def everyone(self, function: Callable, *arguments: Any) -> Any:
        """See `everyone`."""
        return everyone(self.ranks, self.hosts, function, *arguments)

    # ---- Alone

    def move_copy(self) -> None:
        """Moves the copy to the device; it computes as the model that is prepared."""
        if self.problem:
            raise self.problem
        context = sharding.compute_context(self.accelerator, self.cfg.exact)
        self.copy = weights.TaskModule(self.copy.to(self.accelerator.device), context)
        if self.cfg.compile:
            device.compile_blocks(self.copy)

    def share_copy(self) -> None:
        """Gives all copies the weights and buffers of the main process."""
        if PROCESSES > 1:
            for values in (*self.copy.parameters(), *self.copy.buffers()):
                dist.broadcast(values.detach(), 0)

    def gradient_alone(self, numbered: list[tuple[int, dict]]) -> tuple[list[float], Gradients]:
        """The summed losses of micro-batches, and their gradient, without any other process.

        Each micro-batch comes with its number in the step, which seeds dropout.
        """
        accelerator, losses = self.accelerator, []
        scale = LOSS_SCALE if self.precision == "fp16" else 1
        self.copy.train().zero_grad()
        for number, batch in numbered:
            batch = send_to_device(batch, accelerator.device)
            batches.seed_micro_batch(self.cfg.seed, 1, number)
            with accelerator.autocast():
                loss = self.copy(self.project.task.loss_sum, batch)
            contract.check_loss(loss)
            (loss.float() * scale).backward()
            losses.append(loss.item())
        gradients = {}
        for name, parameter in self.copy.model.named_parameters():
            if parameter.requires_grad:
                values = parameter.detach() if parameter.grad is None else parameter.grad
                values = values.cpu().float() / scale * (parameter.grad is not None)
                gradients[weights.bare_name(name)] = values.numpy()
        return losses, gradients

    # ---- Together

    def prepare(self) -> None:
        """What train.py does before its first step."""
        self.copy = None
        accelerator, model = self.accelerator, self.model
        sharding.split_matrices(model, accelerator, self.layout)
        optimizer = self.project.build_optimizer(model, self.cfg)
        settings = weights.optimizer_settings(optimizer)
        module = weights.wrap(model, optimizer, accelerator, self.cfg)
        with sharding.whole_buffers(module, accelerator):
            self.module, self.optimizer = accelerator.prepare(module, optimizer)
        self.module.train()
        stopwatch = Stopwatch(accelerator.device)
        self.gradients = StepGradients(
            accelerator, self.ranks, self.module, self.cfg.exact, stopwatch
        )
        self.state = weights.TrainingState(accelerator, self.module, self.optimizer, settings)
        self.before = digests(self.parameters(), whole)

    def release(self) -> None:
        """Frees the memory of the model and of its optimizer."""
        self.model = self.module = self.optimizer = self.gradients = self.state = None
        gc.collect()
        if self.accelerator.device.type == "cuda":
            torch.cuda.empty_cache()

    def parameters(self) -> dict[str, torch.Tensor]:
        """The weights by their names in the task's model, the frozen ones among them."""
        bare = weights.bare_model(self.accelerator, self.module)
        return {weights.bare_name(name): p for name, p in bare.named_parameters()}

    def summed(self) -> Iterator[tuple[str, np.ndarray]]:
        """The gradient that each weight has now, whole, without the factor of fp16's scaler.

        One after the other: all of them may have no room. All processes must take them.
        """
        scale = self.accelerator.scaler.get_scale() if self.accelerator.scaler else 1
        for name, p in self.parameters().items():
            if p.requires_grad:
                gradient = torch.zeros_like(p) if p.grad is None else p.grad
                yield name, whole(gradient.detach()).cpu().double().numpy() / scale

    def step(self, step: int, first: Callable = bool, last: Callable = bool) -> bool:
        """A step as in train.py; whether its gradient was finite, so that the weights changed.

        `first` is called after the first micro-batch, `last` before the gradient is clipped.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = self.cfg.learning_rate or 1e-3
        accelerator, plan = self.accelerator, self.plan
        self.gradients.begin(plan)
        scale = self.gradients.averaged / max(self.terms, 1)
        together = min(plan.shares)  # micro-batches that every process has
        for turn, (number, batch) in enumerate(zip(plan.run(), self.window, strict=True)):
            # Context parallelism cuts the rows of a batch in place.
            batch = send_to_device(dict(batch), accelerator.device)
            batches.seed_micro_batch(self.cfg.seed, step, number)
            accumulating = accelerator.accumulate(self.module)
            with accumulating, self.gradients.micro_batch(number, batch):
                if turn < together:
                    loss = self.everyone(self.module, self.project.task.loss_sum, batch)
                else:
                    loss = self.module(self.project.task.loss_sum, batch)
                accelerator.backward(loss * monitor.one_or_nan(loss) * scale)
                if turn == 0:
                    first()
        self.gradients.complete()
        last()
        norm = self.gradients.clip(self.cfg.max_grad_norm)
        monitor.skip_unless_finite(self.optimizer, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return bool(norm.isfinite())


def small_plan(project: Project) -> StepPlan:
    """The plan of a step with two micro-batches of a few samples for each process."""
    cfg, layout = project.cfg, project.layout
    size = min(SAMPLES, project.plan.micro_batch_size)
    shares = "equal" if cfg.device_shares == "auto" else cfg.device_shares
    samples = size * TURNS * layout.replicas
    return batches.plan_step(
        samples, size, layout.replicas, cfg.exact, shares, layout.replica, layout.sharded
    )
