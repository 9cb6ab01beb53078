"""micro_batch_size auto: memory that runs out ends no run, and changes no result.

The gradient of a step is a sum over its rows, so its cut into micro-batches changes rounding alone.
All processes say one word after their last backward pass, and before gradients are communicated: if
one is out of memory, all compute the step again with half the rows. FSDP2 communicates in each
pass: there it ends the run, and the next start takes half.
"""

import contextlib
import gc
import json
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from samestep.base.console import print_on_main
from samestep.base.errors import Failed, UserError, is_out_of_memory
from samestep.base.files import read_json_object, replace_text
from samestep.processes import exclusions, sharding
from samestep.state import inventory, provenance
from samestep.state.inventory import Slot
from samestep.step.inputs import size_of
from samestep.step.loader import StepLoader
from samestep.step.plan import plan_step

_LARGEST_COPY = 100e6  # bytes that are copied before each step
SEARCH = "before the first step"  # the place of what is tried then


class Memory:
    """Whether what all processes compute fits into their memory. run: the Training."""

    def __init__(self, run: Any):
        self.run, self.ranks = run, run.ranks
        self.place = ""  # what is tried, and may run out of memory; else that is an error
        self.is_out = self.has_failed = False  # a process, if it has said so; this one
        self.is_known = False  # whether all know that one is out
        self.row, self.size = -1, 0  # of the batch that is tried: its first one; its numbers
        self.computed = 0  # numbers in the largest batch that fitted
        self.has_remarked = False
        self.moved: list[Slot] = []  # what forward passes change
        self.results: list[Slot] = []  # of it what nothing reads
        synced = [m for m in run.model.modules() if isinstance(m, torch.nn.SyncBatchNorm)]
        there = {"exact": run.exact, "a stream": run.rows.is_stream, "SyncBatchNorm": synced}
        there["stages"] = run.ranks.layout.stages > 1
        there["static_graph"] = getattr(run.model, "static_graph", False)
        exclusions.check({"micro_batch_size auto": True, **there})
        if isinstance(run.model, DistributedDataParallel):
            run.model.broadcast_buffers = False  # before the word; see `compute`

    # ---- An attempt

    def start(self, place: str) -> None:
        """Try what the place names; empty: memory that runs out is an error."""
        self.place = place
        self.is_out = self.has_failed = self.is_known = False

    @contextlib.contextmanager
    def attempt(self, given: Any = None) -> Iterator[None]:
        """End the body where memory runs out; what it computed is free then: no frame holds it.

        given: the batch that is computed in it and the numbers of its rows; or a function, or a
        loss, which was computed elsewhere: there memory that runs out is an error.
        """
        if isinstance(given, tuple):
            self.row, self.size = int(given[1][0]), size_of(given[0])
        if torch.is_tensor(given) and not self.has_remarked:
            self.has_remarked = True
            print_on_main(
                "micro_batch_size auto: step.backward got a loss, so memory that runs out ends the "
                "run; give it a function, as step.backward(lambda: model(**batch).loss)"
            )
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if torch.is_tensor(given) or not (self.place and is_out_of_memory(error)):
                raise
            if self.ranks.layout.fsdp and self.place != SEARCH:
                raise self.give_up() from error
            self.is_out = self.has_failed = True
            traceback.clear_frames(error.__traceback__)
            error.__traceback__ = error.__context__ = error.__cause__ = None
        if self.is_out:
            if self.ranks.layout.fsdp:
                _reset(self.run.model)
            gc.collect()
            if torch.accelerator.is_available():
                torch.accelerator.memory.empty_cache()  # what is free may lie in pieces

    def ask(self, number: int = 0) -> tuple[bool, int]:
        """Return whether a process is out of memory, and the sum of a number over all. It is the
        next communication of all processes, wherever they are."""
        total = 0
        if not self.is_known:
            out, total = self.ranks.sum_over_ranks(int(self.has_failed), number)
            self.is_known = self.is_out = out > 0
        return self.is_out, total

    def compute(self, step: Any) -> Iterator[Any]:
        """Give the batches of a step to the body of the loop, until all fit into all memories."""
        run, put_back, has_repeated = self.run, self.keep(), False
        while True:
            self.start(f"step {step.number}")
            step.losses = []
            if isinstance(run.model, DistributedDataParallel):
                sharding.share_buffers(run.model, True)
            yield from step.compute_all()
            is_out, larger = self.ask(int(self.has_failed and self.size > self.computed))
            if not is_out:
                break
            put_back()
            again = "as it was"  # another program may have taken the memory for a moment
            if larger or has_repeated:
                self.use(run.plan.largest // 2)
                again = f"a step of {run.plan.describe()}"
            has_repeated = True
            place = f"{run.run.label}{self.place}"
            print_on_main(f"{place} ran out of memory, and is computed again: {again}")
            self.read_again(step)
        self.place = ""
        self.computed = max(self.computed, *(size_of(each.batch) for each in step.micro_batches))

    def read_again(self, step: Any) -> None:
        """Read the batches of the step as the plan cuts it now; the next one is not fetched yet."""
        run = self.run
        run.loader = StepLoader(run, run.samples(step.number - 1), run.loader.left + 1)
        run.loader.prefetch()
        step.micro_batches, _ = run.loader.next_step()

    def use(self, size: int) -> None:
        """Cut steps into micro-batches of at most so many rows from here on; note it with the
        hardware. 0: raise UserError on all processes, since a row does not fit on some."""
        run, plan, layout = self.run, self.run.plan, self.ranks.layout
        if not size:
            problem = self.row_does_not_fit() if self.has_failed else None
            self.ranks.raise_everywhere(problem)
        given = plan.samples, size, layout.replicas
        plan = plan_step(*given, rank=layout.replica, in_step=layout.in_step)
        if run.metrics:
            run.metrics.monitor.read_losses()  # of steps that were cut otherwise
            run.metrics.monitor.plan = plan
        run.plan = run.run.plan = plan
        self.computed = 0
        run.manifest["hardware"]["micro_batch_size"] = size
        if run.lock:
            provenance.write_hardware(run.folder, run.manifest)
        run.write_status("running", micro_batch_size=size)

    def row_does_not_fit(self) -> UserError:
        return UserError(
            f"{self.place}: row {self.row} alone does not fit into the memory of the device; "
            "shorten the longest rows, turn on gradient_checkpointing, or take fsdp2.yaml"
        )

    def give_up(self) -> Exception:
        """Note half the size for the next start; return the error that ends this process."""
        run, size = self.run, self.run.plan.largest // 2
        if not size:
            return self.row_does_not_fit()
        run.manifest["hardware"]["micro_batch_size"] = size
        provenance.write_hardware(run.folder, run.manifest)
        status = read_json_object(run.folder / "status.json") | {"micro_batch_size": size}
        replace_text(run.folder / "status.json", json.dumps(status) + "\n")
        rows = f"micro-batches of {run.plan.largest} rows"
        return Failed(f"{self.place} ran out of memory with {rows}; the next start takes {size}")

    # ---- What a forward pass changes

    def watch(self, moved: list[str], slots: dict[str, Slot], results: set[str]) -> None:
        """Note what the first batch has changed: attributes by their paths, of which some are
        `results`, "buffer NAME" and "weight NAME"."""
        for path in moved:
            slot = slots.get(path)
            if not slot:
                owner, _, name = path.partition(" ")[2].rpartition(".")
                module = self.run.saver.state.model().get_submodule(owner)
                held = module._buffers if name in module._buffers else module._parameters
                slot = Slot(held, name)
            (self.results if path in results else self.moved).append(slot)

    def keep(self) -> Callable[[], None]:
        """Return a function that puts back what forward passes change, as it is now."""
        kept = [(s, s.name in s.values(), s.get(), inventory.copy_of(s.get())) for s in self.moved]
        size = sum(_bytes_of(copy) for *_, copy in kept)
        if size > _LARGEST_COPY:
            raise UserError(
                f"micro_batch_size auto: forward passes change {size / 1e6:,.0f} MB of buffers and "
                "attributes, which would be copied before each step; give a number"
            )

        def put_back() -> None:
            for slot, is_there, value, copy in kept:
                if is_there:
                    slot.set(inventory.fill(value, copy))
                else:
                    slot.remove()
            for slot in self.results:
                slot.remove()

        return put_back


def _bytes_of(value: Any) -> int:
    if isinstance(value, inventory.COLLECTIONS):
        return sum(map(_bytes_of, value.values() if isinstance(value, dict) else value))
    return getattr(value, "nbytes", 0)


# ---- FSDP2 ---------------------------------------------------------------------------------------


def _reset(model: Any) -> None:
    """Take FSDP out of a pass that was broken off. torch's reset leaves the gradients of weights
    that were gathered then, and the next pass would add to them."""
    model.reset_iter_state()
    for _, module in sharding.fsdp_modules(model):
        for group in module._get_fsdp_state()._fsdp_param_groups:
            for each in group.fsdp_params:
                each.unsharded_accumulated_grad = None
                if hasattr(each, "_unsharded_param"):
                    each._unsharded_param.grad = None


@contextlib.contextmanager
def asking(memory: Memory) -> Iterator[None]:
    """Let FSDP communicate nothing in the body before all processes have said that they are not out
    of memory; else raise on all of them."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as fsdp

    def ask_before(call: Callable) -> Callable:
        def ask(*args: Any, **named: Any) -> Any:
            if memory.ask()[0]:
                raise torch.OutOfMemoryError("another process is out of memory")
            return call(*args, **named)

        return ask

    kinds: Any = fsdp.DefaultAllGather, fsdp.DefaultReduceScatter
    calls = [kind.__call__ for kind in kinds]
    for kind in kinds:
        kind.__call__ = ask_before(kind.__call__)
    try:
        yield
    finally:
        for kind, call in zip(kinds, calls, strict=True):
            kind.__call__ = call
