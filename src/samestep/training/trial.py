"""Tries the body of the loop on a few rows before the first step: is the loss a sum over rows?"""

from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch.nn.parallel import DistributedDataParallel

from samestep.base.console import print_on_main
from samestep.base.errors import UserError, some
from samestep.processes import alike, sharding
from samestep.state import inventory, packing, state_hash
from samestep.state.weights import TrainingState
from samestep.step import context_parallel, trial
from samestep.step.exact import ExactGradients
from samestep.step.gradient import StepGradients, TrainedWeights
from samestep.step.model import HALF, eager, keep_modes
from samestep.step.samples import collate
from samestep.step.seeds import seed_micro_batch
from samestep.step.step import Step

# Largest relative difference in fp32 and below: right losses show 2.3e-7 and 6.1e-6.
_LIMIT, _LIMIT_BELOW = 1e-4, 1e-3
# Of a batch that is computed twice, where the device may round otherwise: of loss and gradient.
_REPEATED, _REPEATED_GRADIENT = 1e-5, 1e-3
# Below fp32 a script that differs by more ends: rounding does not explain it.
_LIMIT_OF_SCRIPTS = 5e-2


def try_loop(run: Any, step: Step) -> Iterator[Any]:
    """Give rows together to the body of the loop, then each alone, in eval mode: the loss of all
    must be the sum of the losses of each. `run` is the Training.

    A pipeline brings its own gradients, and is not tried.

    Where random numbers are drawn it compares the loss per item of eight rows. Before that it
    computes a batch twice in train mode: see _try_twice.
    """
    if run.gradients is not None:  # not before the first step
        return
    samples = run.run.samples  # the shortest first, the longest last
    rows = choose(samples, run)
    before, put_back = _registered_states(run), run.saver.state.keep()
    if run.memory or run.prepared != [p.requires_grad for p in run.model.parameters()]:
        run.model.require_backward_grad_sync = False  # DDP would wait for weights that do not train
    with keep_modes(run.model), eager(run.model):
        if not (run.ranks.layout.deepspeed or getattr(run.model, "static_graph", False)):
            yield from _try_twice(run, step, rows, put_back)
        run.model.eval()
        with run.run.trial_mode():
            first = together = yield from try_batch(run, step, rows)
            several = len(samples) > 2 and not (run.memory and run.plan.largest < len(samples))
            if together.draws and several:
                rows = samples
                together = yield from try_batch(run, step, rows)
            alone = []
            # Half of the loss of two rows, each with other random numbers, tells nothing.
            is_compared = not together.draws or several
            if is_compared and not (run.rows_depend or run.ranks.layout.cp > 1):
                for number, row in enumerate(rows, 1):
                    alone.append((yield from try_batch(run, step, [row], number)))
    step.losses = []
    if _registered_states(run) != before:
        raise UserError(
            "the loop over the batches changes a scheduler, or what is registered for checkpoints: "
            "it runs once for each batch, and before the first step; do that after the loop"
        )
    put_back()
    if alone:
        limit, ends = tolerance(run)
        if problem := trial.differ(run.run.loss_name, together, alone, limit):
            complain(f"{problem}; {run.run.loss_remedy}", ends)
    _say(run, first, len(choose(samples, run)))
    run.run.after_trial(run, first)
    if run.ranks.layout.fsdp:
        sharding.reshard(run.model)
    weights = TrainedWeights(run.accelerator, run.ranks, run.model, run.prepared)
    kind = ExactGradients if run.exact else StepGradients
    run.gradients = kind(run.accelerator, weights)
    run.gradients.waits = run.memory is not None
    run.meter.stopwatch.watch(run.model)


def _try_twice(
    run: Any, step: Step, rows: list[tuple], put_back: Callable[[], None]
) -> Iterator[Any]:
    """Give a batch to the body of the loop twice, in train mode, with the same seed, after all that
    a checkpoint holds was put back. What is other then is the loop's own, and would be lost.

    DDP gets one more with its communication: it chooses its buckets anew after its first backward
    pass (pytorch/pytorch#44326), and rounds in another way with others: a resumed run has the same.
    """
    state, model = run.saver.state, run.model
    waits = not getattr(model, "find_unused_parameters", False)
    with trial.nothing_changes(model, put_back):
        before = _changeable(state)
        first = yield from try_batch(run, step, rows)
        gradients, leaves = _gradients(model), step.leaves
        _check_dense(model)
        if run.run.tries_backward and waits and not run.ranks.layout.sharded:
            trial.check_all_used(run.ranks, model)
        after = _changeable(state)
        moved = [name for name in after if after[name] != before.get(name, inventory.NOTHING)]
        slots = {path: slot for path, slot in state.inventory.slots.items() if path in moved}
        held = {path: slot.get() for path, slot in slots.items()}
        values = {n: (slots[n], value, inventory.copy_of(value)) for n, value in held.items()}
        tensors = {path for path, value in held.items() if inventory.has_tensors(value)}
    with trial.nothing_changes(model, put_back):
        second = yield from try_batch(run, step, rows)
        _check_repeated(run, (first, gradients), (second, _gradients(model)))
        _check_leaves(run, leaves, step.leaves)
        again = state.inventory.texts() if tensors else {}
    is_state = yield from _find_state(run, step, rows, values, second, put_back)
    is_state |= {path for path, value in held.items() if isinstance(value, packing.GENERATORS)}
    # What a device computes in another way the second time tells nothing.
    left = [path for path in sorted(tensors - is_state) if again.get(path) == after[path]]
    memory = yield from _find_memory(run, step, rows, left, after, put_back)
    state.inventory.results |= tensors - is_state - memory
    _note_moved(run, moved, is_state, memory)
    if run.memory and first.draws:
        print_on_main(
            "micro_batch_size auto: what the model or the collate draws, such as masks of dropout, "
            "follows the cut: another size gives others"
        )
    if run.memory:
        run.memory.watch(moved, slots, tensors - is_state - memory)
    exchanges = isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync
    if exchanges and run.run.tries_backward and waits:
        with trial.nothing_changes(model, put_back, exchanges=True):
            yield from try_batch(run, step, rows)


def _changeable(state: TrainingState) -> dict[str, str]:
    """Return a text for all that a forward pass may change, also "buffer NAME", "weight NAME"."""
    model, texts = state.model(), state.inventory.texts()
    texts |= {f"buffer {n}": alike.hash_bits([buffer]) for n, buffer in model.named_buffers()}
    weights = [(n, p) for n, p in model.named_parameters() if not p.requires_grad]
    return texts | {f"weight {name}": alike.hash_bits([p]) for name, p in weights}


def _check_dense(model: torch.nn.Module) -> None:
    """Raise UserError for a gradient that cannot be clipped, nor added up by several processes."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not alike.is_dense(parameter.grad):
            raise UserError(
                f"the gradient of {trial.own_name(name)} is sparse, and torch clips none: make its "
                "module with sparse=False"
            )


def _gradients(model: torch.nn.Module) -> list[torch.Tensor | None]:
    """Return this process's gradients of all weights that train."""
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    return [None if grad is None else sharding.local(grad) for grad in grads]


def _check_repeated(run: Any, first: tuple, second: tuple) -> None:
    """Raise UserError where a batch has another loss or gradient the second time: to the bit where
    the device computes the same bits; elsewhere it is a line above 1e-5, for gradients 1e-3."""
    losses = [computed.sums[""].detach().double().nan_to_num() for computed, _ in (first, second)]
    same_bits = run.accelerator.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
    apart = float((losses[0] - losses[1]).abs() / losses[0].abs().clamp(min=trial.SMALLEST))
    far = not torch.equal(*losses) if same_bits else apart > _REPEATED
    for one, other in zip(first[1], second[1], strict=True):
        if one is None or other is None:
            far = far or one is not other
            continue
        limit = 0.0 if same_bits else _REPEATED_GRADIENT * float(one.nan_to_num().norm())
        far = far or float((one.nan_to_num() - other.nan_to_num()).norm()) > limit
    if not any(run.ranks.sum_over_ranks(int(far))):
        return
    complain(
        f"{run.run.loss_name} or gradient of the same batch is another the second time "
        f"({losses[0]:.9g}, then {losses[1]:.9g}): the loop over the batches keeps something of "
        "its own, such as a running mean, a generator or a queue of rows, in no checkpoint. "
        "Draw from the global generators, which are seeded; change a mean after that loop, from "
        "step.loss, in an object that accelerator.register_for_checkpointing has got",
        ends=same_bits,
    )


def _check_leaves(run: Any, first: list[torch.Tensor], second: list[torch.Tensor]) -> None:
    """Raise UserError for a weight outside of the model that the loss depends on, and that no
    optimizer has. Leaves of one batch alone are its inputs."""
    if run.ranks.layout.sharded:  # autograd sees gathered weights
        return
    again = {id(leaf) for leaf in second}
    weights = [p for group in run.optimizer.param_groups for p in group["params"]]
    tensors = (*weights, *run.model.parameters(), *run.model.buffers())
    known = {0, *map(inventory.memory_of, tensors)}
    for leaf in first:
        if id(leaf) in again and inventory.memory_of(leaf) not in known:
            raise UserError(
                f"{run.run.loss_name} depends on a weight of shape {(*leaf.shape,)} outside of the "
                "model, which no optimizer has and no checkpoint holds: make it a part of the "
                "model and give it to the optimizer, or call requires_grad_(False)"
            )


def _find_state(
    run: Any, step: Step, rows: list[tuple], values: dict[str, tuple], second: trial.Computed,
    put_back: Callable[[], None],
) -> Generator[Any, None, set[str]]:  # fmt: skip
    """Return the attributes on which the loss depends: it is another one when they have the values
    that a batch has given them. values: by path, the attribute, that value, and a copy of it."""

    def differs(paths: list[str]) -> Generator[Any, None, bool]:
        with trial.nothing_changes(run.model, put_back):
            for path in paths:
                slot, value, copy = values[path]
                slot.set(inventory.fill(value, copy))
            computed = yield from try_batch(run, step, rows)
            return not torch.equal(computed.sums[""], second.sums[""])

    def find(paths: list[str]) -> Generator[Any, None, set[str]]:
        if not paths or not (yield from differs(paths)):
            return set()
        if len(paths) == 1:
            return {*paths}
        middle = len(paths) // 2
        first = yield from find(paths[:middle])
        second = yield from find(paths[middle:])
        return first | second or {*paths}  # none of them alone

    return (yield from find(sorted(values)))


def _find_memory(
    run: Any, step: Step, rows: list[tuple], paths: list[str], after: dict[str, str],
    put_back: Callable[[], None],
) -> Generator[Any, None, set[str]]:  # fmt: skip
    """Return those of these attributes that a batch does not set anew: they are others after it
    where they hold what another batch has left, such as a queue that fills. after: their texts."""
    paths = sorted({*paths}.union(*run.ranks.gather(paths)))
    if not paths:
        return set()
    samples, known = run.run.samples, run.saver.state.inventory
    other = samples[: len(rows)] if len(samples) > len(rows) else rows[:1] * len(rows)
    with trial.nothing_changes(run.model, put_back):
        yield from try_batch(run, step, other)
        slots = {path: slot for path, slot in known.list_now().items() if path in paths}
        left = [(slot, slot.get(), inventory.copy_of(slot.get())) for slot in slots.values()]
    with trial.nothing_changes(run.model, put_back):
        for slot, value, copy in left:
            slot.set(inventory.fill(value, copy))
        yield from try_batch(run, step, rows)
        now = known.texts()
    return {path for path in paths if now.get(path) != after.get(path)}


def _note_moved(run: Any, moved: list[str], is_state: set[str], memory: set[str]) -> None:
    """Note what the forward pass changes: what is saved, and what it does to the result. memory:
    what the loss of the first batch does not depend on, but perhaps one later."""
    known = run.saver.state.inventory
    known.saved |= is_state | memory
    known.hashed |= is_state
    weights = [name.removeprefix("weight ") for name in moved if name.startswith("weight ")]
    buffers = [name.removeprefix("buffer ") for name in moved if name.startswith("buffer ")]
    if run.exact and (names := sorted({*weights, *is_state})):
        raise UserError(
            f"exact: a forward pass changes {some(names, 3)}, so the result depends on which "
            "process computes what; change it after the loop over the batches, from what is the "
            "same on all processes, or set exact to false"
        )
    if run.exact and buffers:
        raise UserError(
            f"exact: the model changes its buffer {buffers[0]} while it trains, so the result "
            "depends on which process computes what; use GroupNorm or LayerNorm in place of "
            "BatchNorm, or set exact to false"
        )
    changed = sorted(is_state)
    if run.ranks.layout.processes > 1:
        changed += sorted(buffers)
    if changed:
        print_on_main(
            f"warning: training changes {some(changed, 3)}, on each process by its own "
            "batches: the result depends on the number of processes and on micro_batch_size"
        )
    if memory:
        print_on_main(
            f"warning: a forward pass adds to {some(sorted(memory), 3)}, which the loss of the "
            "first batch does not depend on: if one later does, or an evaluation, the result "
            "depends on the number of processes and on micro_batch_size, and a checkpoint has "
            "what is on the first process"
        )


def choose(samples: list[tuple], run: Any) -> list[tuple]:
    """Choose as many of these as a device takes, at most four, with the last one."""
    fewest = 1 if run.memory else 2
    maximum = min(max(fewest, run.plan.largest), 4)
    return [*samples[: maximum - 1], *samples[maximum - 1 :][-1:]]


def try_batch(
    run: Any, step: Step, samples: list[tuple], number: int = 0, first: int | None = None
) -> Generator[Any, None, trial.Computed]:
    """Give these samples to the body of the loop as one batch; return a Computed. `number`: that of
    its random numbers, and `first` their seed, in place of the run's."""
    accelerator = run.accelerator
    seed_micro_batch(run.seed if first is None else first, 1, number)
    states = [trial.random_state(accelerator.device)]
    micro_batch = collate(run.task, samples)
    states.append(trial.random_state(accelerator.device))
    accelerator.gradient_accumulation_steps, accelerator.step = 1, 0
    step.losses = []
    batch = send_to_device(micro_batch.batch, accelerator.device)
    with context_parallel.split_rows(accelerator, batch):
        yield from step.compute(micro_batch, batch)
    trial.check_reduced(run.model)
    if not run.ranks.layout.deepspeed:  # which puts nothing back
        known = run.saver.state.inventory
        known.installs |= inventory.count_hooks(known.model) != known.hooks
    states.append(trial.random_state(accelerator.device))
    draws, collate_draws = states[2] != states[0], states[1] != states[0]
    return trial.Computed(batch, micro_batch.num_items, {"": step.losses[0]}, draws, collate_draws)


def tolerance(run: Any) -> tuple[float, bool]:
    """Return the largest relative difference that rounding explains, and whether the run ends where
    it is larger: in train.py that is a warning below fp32, and where a run resumes."""
    is_half = any(parameter.dtype in HALF for parameter in run.model.parameters())
    rounds = is_half or run.run.rounds or run.accelerator.mixed_precision != "no"
    if not run.run.warns_of_rounding:
        return _LIMIT_OF_SCRIPTS if rounds else _LIMIT, True
    # A run that resumes has passed; trained weights may give small differences of large sums.
    ends = not rounds and run.step == 0
    return _LIMIT if ends else _LIMIT_BELOW, ends


def complain(problem: str, ends: bool) -> None:
    """Raise UserError where a problem ends the run; elsewhere it is a warning."""
    if ends:
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


def _registered_states(run: Any) -> tuple[str, str]:
    """Return what tells whether schedulers and registered objects are as before."""
    if run.ranks.layout.deepspeed:
        return "", ""
    packed, tensors = run.saver.state.pack_registered()
    packed = {name: state_hash.without_numbers(state) for name, state in packed.items()}
    return repr(packed), alike.hash_bits([*tensors.values()])
