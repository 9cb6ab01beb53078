"""The search of micro_batch_size auto, before the first step: the largest that fits all processes.

The longest known row is computed 1, 2, 4, ... times, twice each: in the second pass gradients lie
in memory, as for later micro-batches; and beside room for what the optimizer will keep.
"""

import contextlib
import time
from collections.abc import Generator, Iterator
from typing import Any

import torch

from samestep.base.console import print_on_main
from samestep.step import trial
from samestep.step.inputs import entries_of, size_of
from samestep.step.model import eager
from samestep.step.samples import SampleDataset, collate
from samestep.step.step import Step
from samestep.training.memory import SEARCH, asking
from samestep.training.trial import try_batch

_SECONDS = 1.0  # of the passes of a size, after which a CPU takes it
_MOMENTS = 2  # that AdamW keeps of each weight
_USABLE = 0.9  # of a device's memory: the rest is for longer rows, and for memory in pieces


def find_size(run: Any, step: Step) -> Iterator[Any]:
    """Give the longest row to the body of the loop, more and more times; where the size is known,
    so many times, and more and more only if they do not fit any longer. run: the Training."""
    if run.gradients is not None:  # not before the first step
        return
    memory, began = run.memory, time.monotonic()
    known = 0 if run.plan.is_auto else run.plan.largest
    most = -(-run.plan.samples // len(run.plan.shares))
    size = fewest = min(2 if run.rows_depend else 1, most)  # a row alone may be no batch
    row = _longest_row(run, fewest)
    batch = collate(run.task, [row] * size).batch
    size = known or size
    memory.start(SEARCH)
    fitting, about, room = 0, "", []
    put_back, words = run.saver.state.keep(), contextlib.nullcontext()
    if run.ranks.layout.fsdp:
        words = asking(memory)
    with trial.nothing_changes(run.model, put_back), eager(run.model), words:
        with memory.attempt((batch, [row[0]])):
            if not run.optimizer.state:
                trained = [p for p in run.model.parameters() if p.requires_grad]
                room += [torch.empty_like(p) for p in trained for _ in range(_MOMENTS)]
        while True:
            left, fits_twice = yield from _compute(run, step, [row] * size)
            is_out, stops = memory.ask(int(not fits_twice))
            if is_out and known:
                known, size = 0, fewest
                memory.start(SEARCH)
                run.model.zero_grad(set_to_none=True)
                continue
            if is_out:
                break
            fitting, about = size, left
            if stops or size == most or known:
                break
            size = min(2 * size, most)
            run.model.zero_grad(set_to_none=True)
    room.clear()
    step.losses = []
    if not known:
        memory.use(fitting)
    memory.start("")
    memory.computed = fitting * memory.size // fewest
    if known:
        return
    memory.read_again(step)
    shape = max((entry.shape[1:] for entry in entries_of(batch) if torch.is_tensor(entry)), key=len)
    print_on_main(
        f"{run.run.label}micro_batch_size auto: {fitting} rows of {[*shape]} fit, {about} "
        f"({time.monotonic() - began:.2g} s); a step of {run.plan.describe()}"
    )


def _longest_row(run: Any, size: int) -> tuple:
    """Return the longest row, by its size in the view if that has sizes; else of the first rows."""
    rows = run.rows
    if rows.sizes is None:
        return max(run.run.samples, key=lambda s: size_of(collate(run.task, [s] * size).batch))
    place = int(rows.sizes.argmax())
    ((number, row),) = SampleDataset(rows.dataset).__getitems__([place])
    if rows.augment:
        row = rows.augment(row, torch.Generator().manual_seed(place))
    return number, row


def _compute(run: Any, step: Step, samples: list[tuple]) -> Generator[Any, None, tuple[str, bool]]:
    """Compute a batch twice; return what is left, and whether one of twice the rows will fit."""
    memory, device = torch.accelerator.memory, run.accelerator.device
    is_measured = device.type not in ("cpu", "mps")
    if is_measured:
        memory.reset_peak_memory_stats()
    began = time.monotonic()
    for _ in range(2):
        if not run.memory.is_out:
            with run.memory.attempt():
                yield from try_batch(run, step, samples)
    if not is_measured:
        seconds = time.monotonic() - began
        return f"whose passes take {seconds:.2g} s", seconds < _SECONDS
    torch.accelerator.synchronize()
    peak, held = memory.max_memory_allocated(), memory.memory_allocated()
    usable = memory.get_memory_info()[0] + memory.memory_reserved()
    return f"{(usable - peak) / 1e9:.1f} GB are left", held + 2 * (peak - held) < _USABLE * usable
