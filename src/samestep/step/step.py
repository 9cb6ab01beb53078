"""One step of the optimizer, as the loop of a script sees it."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import send_to_device

from samestep.base.errors import UserError, as_user_error
from samestep.step import exact, inputs, monitor
from samestep.step.loader import MicroBatch, StepLoader
from samestep.step.model import bare_model
from samestep.step.seeds import seed_micro_batch
from samestep.training import script

if TYPE_CHECKING:
    from samestep.training.training import Training


class Step:
    """`for batch in step` gives the batches of this process; then comes `clip`, then the optimizer.

    number: of the step, from 1.
    items: in its loss, over all processes.
    loss: the mean loss of these, after the last batch of every `log_every`-th step; else None.
    """

    def __init__(self, training: "Training", number: int, loader: StepLoader):
        self.training, self.number, self.loader = training, number, loader
        self.window, facts = loader.next_step()
        self.items, self.loss = facts.num_items, None
        self.losses: list[torch.Tensor] = []  # of the batches so far, each a sum
        self.gradient = "not begun"  # then "not added up", "added up", "clipped", "used"
        self.num_items = 0  # in the loss of the newest batch

    def __iter__(self) -> Iterator[Any]:
        run = self.training
        script.check_order(self, "not begun", "another loop over the batches")
        self.gradient = "not added up"
        if not run.gradients:
            yield from script.try_loop(self)
            if run.exact:
                exact.sum_inside_blocks(bare_model(run.accelerator, run.model))
            run.gradients = exact.step_gradients(run.accelerator, run.ranks, run.model, run.exact)
        run.gradients.start_step(run.plan)
        for each in self.window:
            batch = send_to_device(each.batch, run.accelerator.device, non_blocking=True)
            seed_micro_batch(run.seed, self.number, each.number)  # dropout
            with run.gradients.micro_batch(each.number, batch):
                yield from self.compute(each, batch)
        self.loader.prefetch()  # while the device computes
        run.gradients.reduce()
        # What the optimizer and the script draw from here on is the same on all processes.
        seed_micro_batch(run.seed, self.number)
        self.gradient = "added up"
        if self.number % run.log_every == 0:
            (total,), norms = monitor.read_steps(
                run.ranks, run.plan.count, [run.plan.run()], [self.losses], run.norms
            )
            self.loss = total / self.items if self.items else math.nan
            run.not_finite += 1
            if all(map(math.isfinite, [self.loss, *norms])):
                run.not_finite = 0
            if run.not_finite == 10:
                raise UserError(
                    "the loss or the gradient was not finite 10 times in a row, up to step "
                    f"{self.number}; such steps do not change the weights: check the data, or give "
                    "a lower learning rate"
                )

    def compute(self, micro_batch: MicroBatch, batch: Any) -> Iterator[Any]:
        """Gives a batch to the body of the loop, which computes its gradient."""
        run, before = self.training, len(self.losses)
        self.num_items, passes = micro_batch.num_items, run.accelerator.step
        with run.accelerator.accumulate(run.model):
            yield batch
        script.check_backward(len(self.losses) - before, run.accelerator.step - passes)

    def backward(self, loss: torch.Tensor, mean: bool = False) -> None:
        """Adds the gradient of a batch: of the sum of the losses of its items, or of their mean.

        A mean of one's own divides by 0 where no item is in the loss, and its gradient is NaN: give
        the sum. F.cross_entropy's mean may be given.
        """
        if mean:
            # Where no item is in the loss, its mean is 0 / 0.
            loss = loss * self.num_items if self.num_items else loss.nan_to_num() * 0
        self.losses.append(loss.detach())
        gradients = self.training.gradients
        if gradients:
            scale = gradients.divisor / max(self.items, 1)
            loss = gradients.nan_if_not_finite(loss) * scale
        else:  # the loop is tried
            with as_user_error():
                inputs.check_loss(loss)
        self.training.accelerator.backward(loss)

    def clip(self, max_norm: float = 0) -> torch.Tensor:
        """Scales the gradient down to this norm, 0: never; gives its norm before that. The next
        step of the optimizer changes nothing if it is not finite, or no item is in the loss."""
        script.check_order(self, "added up", "step.clip")
        norm = self.training.gradients.clip(max_norm)
        monitor.skip_unless_finite(self.training.optimizer, norm, self.items)
        if not self.training.accelerator.scaler:  # which tries scales until the norm is finite
            self.training.norms = [norm]
        self.gradient = "clipped"
        return norm
