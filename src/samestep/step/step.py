"""One step of the optimizer, as the loop of a script sees it: batches, gradient, update."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import send_to_device
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper

from samestep.base.errors import UserError, as_user_error
from samestep.step import context_parallel, inputs, trial
from samestep.step.samples import MicroBatch
from samestep.step.seeds import seed_micro_batch


class Step:
    """`for batch in step` gives the batches of this process; then comes `clip`, then the optimizer.

    run: the Training.
    number: of the step, from 1.
    items: in its loss, over all processes.
    loss: the mean loss of these, after the last batch of every `log_every`-th step; else None.
    prepare(list of MicroBatch): if you set it, it gets all of this process before the first one is
        computed, and may add to their batches: a loss over the global batch needs that.
    """

    def __init__(
        self, run: Any, number: int, micro_batches: list[MicroBatch], items: int, last: bool
    ):
        self.run, self.number, self.micro_batches = run, number, micro_batches
        self.items, self.is_last = items, last
        self.loss: float | None = None
        self.losses: list[torch.Tensor] = []  # of the batches so far, each a sum, ()
        self.total: float | None = None  # the sum of all losses, over all processes, once read
        self.norm: torch.Tensor | None = None  # of the gradient, before it is clipped, ()
        self.learning_rate: Any = None  # of the first parameter group, when it was clipped
        self.prepare: Callable[[list[MicroBatch]], None] | None = None
        self.gradient = "not begun"  # then "not added up", "added up", "clipped", "used"
        self.batch: MicroBatch | None = None  # the newest
        self.leaves: list[torch.Tensor] = []  # that the loss of the newest batch depends on

    def due(self, every: int | str) -> bool:
        """Return whether what is due `every` so many steps or "epoch" (0: at the end) is now."""
        if every == "epoch":
            passes = self.run.epochs
            return self.is_last or passes(self.number) > passes(self.number - 1)
        return self.is_last or (every > 0 and self.number % int(every) == 0)

    # ---- The gradient

    def __iter__(self) -> Iterator[Any]:
        self.check_order("not begun", "another loop over the batches")
        self.gradient, run = "not added up", self.run
        for give_others in run.trials:  # a few rows, before the first step
            yield from give_others(run, self)
        yield from run.memory.compute(self) if run.memory else self.compute_all()
        self.reduce()

    def compute_all(self) -> Iterator[Any]:
        """Give the batches of this process to the body of the loop."""
        run = self.run
        run.gradients.weights.start_step()
        run.gradients.start_step(run.plan)
        if self.prepare:
            self.prepare(self.micro_batches)
        for micro_batch in self.micro_batches:
            with run.attempt((micro_batch.batch, micro_batch.ids)):
                batch = send_to_device(micro_batch.batch, run.accelerator.device, non_blocking=True)
                with context_parallel.split_rows(run.accelerator, batch):
                    seed_micro_batch(run.seed, self.number, micro_batch.number)  # dropout
                    yield from self.compute(micro_batch, batch)
            if run.memory and run.memory.is_out:
                return

    def compute(self, micro_batch: MicroBatch, batch: Any) -> Iterator[Any]:
        """Give a batch to the body of the loop, which computes its gradient."""
        calls, passes = len(self.losses), self.run.accelerator.step
        self.batch = micro_batch
        yield batch
        calls = len(self.losses) - calls
        if calls != 1:
            raise UserError(f"step.backward was called {calls} times for a batch; call it once")
        if self.run.accelerator.step - passes != 1:
            raise UserError(
                "the loop computes a batch outside of `with accelerator.accumulate(model)`; put "
                "the forward pass and step.backward inside, once for each batch"
            )

    def backward(
        self, loss: torch.Tensor | Callable[[], torch.Tensor], mean: bool = False
    ) -> torch.Tensor:
        """Add the gradient of a batch: of the sum of the losses of its items, or of their mean.
        Return that sum, detached; NaN where memory ran out, and the step is computed again.

        loss: a float32 of shape (), or a function that computes it.
        mean: whether it is a mean. One of your own divides by 0 where no item is in the loss, and
            its gradient is NaN: give the sum. F.cross_entropy's mean may be given.
        """
        memory, calls = self.run.memory, len(self.losses)
        with self.run.attempt(loss):
            self.add_gradient(loss, mean)
        if memory and memory.is_out:
            self.losses[calls:] = [torch.tensor(math.nan)]
        return self.losses[-1]

    def add_gradient(self, loss: Any, mean: bool) -> None:
        """Add the gradient of a loss, or of what a function computes: see `backward`."""
        run, batch = self.run, self.batch
        assert batch
        if callable(loss):
            loss = loss()
        if mean:
            # Where no item is in the loss, its mean is 0 / 0.
            loss = loss * batch.num_items if batch.num_items else loss.nan_to_num() * 0
        if not batch.counts:
            loss = loss * 0
        if run.gradients is None:  # the loop is tried
            with as_user_error():
                inputs.check_loss(loss, torch.is_grad_enabled())
            self.leaves = trial.leaves_of(loss)
        elif run.gradients.weights.steps == 1 and not self.losses and not run.memory:
            with run.ranks.fail_together():
                inputs.check_loss(loss)
        self.losses.append(loss.detach())
        if run.gradients is not None:
            loss = loss * (1 + 0 * loss.detach())  # NaN unless it is finite: all skip the step
            run.gradients.add(loss, self.items, batch.number)
        elif torch.is_grad_enabled():  # else it computes losses alone
            run.accelerator.backward(loss)

    def reduce(self) -> None:
        """Bring the gradient of the whole step to all processes, after its last batch, and read the
        loss where it is due."""
        run, self.micro_batches = self.run, []
        run.loader.prefetch()  # the next step, while the device computes this one
        run.gradients.reduce()
        # What the optimizer and the script draw from here on is the same on all processes.
        seed_micro_batch(run.seed, self.number)
        self.gradient = "added up"
        if self.number % run.log_every == 0:
            run.metrics.monitor.read_losses(self)
            assert self.total is not None
            self.loss = self.total / self.items if self.items else math.nan

    # ---- The update

    def clip(self, max_norm: float = 0) -> torch.Tensor:
        """Scale the gradient down to this norm, 0: never; return its norm before that, float32 ().

        If it is not finite, or no item is in the loss, the optimizer's next step changes nothing.
        """
        if not max_norm >= 0:
            raise UserError(f"step.clip({max_norm}) would turn the gradient; give a norm, or 0")
        self.check_order("added up", "step.clip")
        run = self.run
        self.norm = run.gradients.clip(max_norm)
        skip_unless_finite(run.optimizer, self.norm, self.items)
        self.learning_rate = run.optimizer.param_groups[0]["lr"]
        self.gradient = "clipped"
        return self.norm

    def check_order(self, wanted: str, what: str) -> None:
        """Raise UserError for what comes too early, or twice."""
        if self.gradient != wanted:
            raise UserError(
                f"{what} in step {self.number}, whose gradient is {self.gradient}: first `for "
                "batch in step` to its end, then step.clip(...), then optimizer.step(), each once"
            )

    def check_complete(self) -> None:
        """Raise UserError unless the optimizer has used the gradient."""
        run = self.run
        if run.ranks.layout.deepspeed and self.gradient == "clipped":  # it stepped in `backward`
            self.gradient = "used"
        skipped = run.accelerator.scaler and run.optimizer.step_was_skipped  # of fp16
        if self.gradient != "clipped" or not skipped:
            self.check_order("used", "the end of the loop's body")


def watch_optimizer(run: Any) -> None:
    """Let the optimizer make one step where it is due, and no other, and clear no part of it."""
    inner = run.optimizer.optimizer
    if run.ranks.layout.deepspeed:
        return

    depth = 0  # a step() that calls super().step() has the hooks of both

    def use(*_: Any) -> None:
        nonlocal depth
        if run.current and not depth:
            run.current.check_order("clipped", "optimizer.step()")
            run.current.gradient = "used"
        depth += 1

    def leave(*_: Any) -> None:
        nonlocal depth
        depth -= 1

    def clear(*args: Any, **named: Any) -> None:
        if run.current and run.current.gradient == "not added up":
            raise UserError(
                "optimizer.zero_grad() in the loop over the batches deletes the gradients of those "
                "before; leave it out: each step begins without gradients"
            )
        zero_grad(*args, **named)

    inner.register_step_pre_hook(use)
    inner.register_step_post_hook(leave)
    zero_grad, inner.zero_grad = inner.zero_grad, clear


def skip_unless_finite(
    optimizer: AcceleratedOptimizer, norm: torch.Tensor, num_items: int = 1
) -> None:
    """Make the next optimizer.step() change nothing if the gradient's norm is not finite, or if no
    item was in the loss: weights would decay.

    PyTorch's fused optimizers check `found_inf` on the device. For others the CPU waits for the
    norm and removes the gradients, without which an optimizer changes neither weights nor moments.
    """
    if isinstance(optimizer, DeepSpeedOptimizerWrapper):  # it has skipped the step in `backward`
        return
    inner = optimizer.optimizer
    if not num_items:
        norm = norm * math.nan
    if not getattr(inner, "_step_supports_amp_scaling", False):
        if not norm.isfinite():
            inner.zero_grad(set_to_none=True)
    elif optimizer.scaler is None:
        inner.found_inf = (~norm.isfinite()).float()
    else:
        if not hasattr(inner, "_samestep_norm"):
            inner.register_step_pre_hook(_add_overflow)
        inner._samestep_norm = norm


def _add_overflow(inner: Any, *_: Any) -> None:
    """Add the norm to the `found_inf` of fp16's scaler, which looks at single gradients only.

    The norm of finite gradients may overflow; clipping makes them 0 then: pytorch/pytorch#46849.
    """
    inner.found_inf = torch.maximum(inner.found_inf, (~inner._samestep_norm.isfinite()).float())
