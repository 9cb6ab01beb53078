"""Tries the body of the loop on a few rows before the first step: is the loss a sum over rows?"""

from collections.abc import Generator, Iterator
from typing import Any

from accelerate.utils import send_to_device

from samestep.base.console import print_on_main
from samestep.base.errors import UserError
from samestep.processes import alike, sharding
from samestep.step import context_parallel, trial
from samestep.step.loader import MicroBatch
from samestep.step.model import HALF, eager, keep_modes
from samestep.step.plan import StepPlan
from samestep.step.samples import collate
from samestep.step.seeds import seed_micro_batch
from samestep.step.step import Step

# Largest relative difference in fp32 and below: right losses show 2.3e-7 and 6.1e-6.
_LIMIT, _LIMIT_BELOW = 1e-4, 1e-3
# Below fp32 a script that differs by more ends: rounding does not explain it.
_LIMIT_OF_SCRIPTS = 5e-2


def try_loop(run: Any, step: Step) -> Iterator[Any]:
    """Give rows together to the body of the loop, then each alone, in eval mode: the loss of all
    must be the sum of the losses of each. `run` is the Training.

    Where random numbers are drawn it compares the loss per item of eight rows. For the passes in
    train mode before that see trial.backward_passes.
    """
    samples = run.run.samples  # the shortest first, the longest last
    rows = choose(samples, run.plan)
    before = _registered_states(run)
    with keep_modes(run.model), eager(run.model):
        for _ in trial.backward_passes(run.ranks, run.model) if run.run.tries_backward else ():
            yield from try_batch(run, step, rows)
        run.model.eval()
        with run.run.trial_mode():
            first = together = yield from try_batch(run, step, rows)
            if together.draws and len(samples) > 2:
                rows = samples
                together = yield from try_batch(run, step, rows)
            alone = []
            # Half of the loss of two rows, each with other random numbers, tells nothing.
            is_compared = not together.draws or len(samples) > 2
            if is_compared and not (run.rows_depend or run.ranks.layout.cp > 1):
                for number, row in enumerate(rows, 1):
                    alone.append((yield from try_batch(run, step, [row], number)))
    step.losses = []
    if _registered_states(run) != before:
        raise UserError(
            "the loop over the batches changes a scheduler, or what is registered for checkpoints: "
            "it runs once for each batch, and before the first step; do that after the loop"
        )
    if alone:
        _compare(run, together, alone)
    _say(run, first, len(choose(samples, run.plan)))
    run.run.after_trial(run, first)
    if run.ranks.layout.fsdp:
        sharding.reshard(run.model)


def choose(samples: list[tuple], plan: StepPlan) -> list[tuple]:
    """Choose as many of these as a device takes, at most four, with the last one."""
    maximum = min(max(2, plan.largest), 4)
    return [*samples[: maximum - 1], *samples[maximum - 1 :][-1:]]


def try_batch(
    run: Any, step: Step, samples: list[tuple], number: int = 0, first: int | None = None
) -> Generator[Any, None, trial.Computed]:
    """Give these samples to the body of the loop as one batch; return a Computed. `number`: that of
    its random numbers, and `first` their seed, in place of the run's."""
    accelerator = run.accelerator
    seed_micro_batch(run.seed if first is None else first, 1, number)
    states = [trial.random_state(accelerator.device)]
    batch, (num_items, ids_hash), ids = collate(run.task, samples)
    states.append(trial.random_state(accelerator.device))
    micro_batch = MicroBatch(0, batch, num_items, ids_hash, ids)
    accelerator.gradient_accumulation_steps, accelerator.step = 1, 0
    step.losses = []
    batch = send_to_device(batch, accelerator.device)
    with context_parallel.split_rows(accelerator, batch):
        yield from step.compute(micro_batch, batch)
    trial.check_reduced(run.model)
    states.append(trial.random_state(accelerator.device))
    draws, collate_draws = states[2] != states[0], states[1] != states[0]
    return trial.Computed(batch, num_items, {"": step.losses[0]}, draws, collate_draws)


def _compare(run: Any, together: trial.Computed, alone: list[trial.Computed]) -> None:
    """Raise UserError where the loss is no sum over independent rows. In train.py it is a warning
    below fp32, and where a run resumes."""
    is_half = any(parameter.dtype in HALF for parameter in run.model.parameters())
    rounds = is_half or run.run.rounds or run.accelerator.mixed_precision != "no"
    limit, refuses = _LIMIT_OF_SCRIPTS if rounds else _LIMIT, True
    if run.run.warns_of_rounding:
        # A run that resumes has passed; trained weights may give small differences of large sums.
        refuses = not rounds and run.step == 0
        limit = _LIMIT if refuses else _LIMIT_BELOW
    if problem := trial.differ(run.run.loss_name, together, alone, limit):
        problem = f"{problem}; {run.run.loss_remedy}"
        if refuses:
            raise UserError(problem)
        print_on_main(f"warning: {problem}")


def _say(run: Any, computed: trial.Computed, rows: int) -> None:
    """Print the loss per item of the rows; all processes must call it."""
    layout, loss = run.ranks.layout, float(computed.sums[""])
    if layout.cp > 1:  # each process has the loss of its part of the rows
        loss *= layout.counts_losses
        parts = run.ranks.gather((loss, layout.counts_items))
        loss = sum(part for part, _ in parts) / sum(counts for _, counts in parts)
    if computed.collate_draws:
        print_on_main(
            f"{run.run.prefix}collate draws random numbers, by the micro-batch: micro_batch_size "
            "changes the result"
        )
    if computed.draws:
        print_on_main(
            f"{run.run.loss_name} draws random numbers without a row's generator: rows together "
            "and alone are compared by their loss per item"
        )
    line = f"{run.run.label}loss per item {loss / max(computed.num_items, 1):.3g} ({rows} rows)"
    if run.rows_depend:
        line += (
            "; rows_depend: it is not checked that rows are independent, and the result depends on "
            "micro_batch_size and on the number of processes"
        )
    print_on_main(line)


def _registered_states(run: Any) -> tuple[dict, dict]:
    """Return what tells whether schedulers and registered objects are as before."""
    packed, tensors = run.saver.state.pack_others()
    states = {name: str(value) for name, value in packed.items() if not name.startswith("group.")}
    return states, {name: alike.bit_sums(value).tolist() for name, value in tensors.items()}
