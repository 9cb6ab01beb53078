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
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch.nn.parallel import DistributedDataParallel

from samestep.base.console import print_on_main
from samestep.base.errors import Failed, UserError, is_out_of_memory
from samestep.base.files import read_json_object, replace_text
from samestep.processes import exclusions, sharding
from samestep.state import inventory, provenance
from samestep.step.gradient import StepGradients, TrainedWeights
from samestep.step.inputs import size_of
from samestep.step.plan import StepPlan, plan_step
from samestep.step.seeds import seed_micro_batch

_LARGEST_COPY = 100e6  # bytes that are copied before each step


class Memory:
    """Whether what all processes compute fits into their memory. run: the Training."""

    def __init__(self, run: Any):
        self.run, self.ranks = run, run.ranks
        self.recovers = self.searches = False  # whether an error of memory is none, and the search
        self.is_out = False  # this process, or another one that has said so
        self.is_known = False  # whether all know it
        self.has_failed = False  # this process, in this attempt
        self.place, self.row, self.size = "", -1, 0  # of the batch: its first row, its numbers
        self.computed = 0  # numbers in the largest batch that fitted
        self.has_remarked = False
        # What a forward pass changes, and the attributes of it that nothing reads: see trial.py.
        self.tensors: list[torch.Tensor] = []
        self.slots: list[inventory.Slot] = []
        self.results: list[inventory.Slot] = []
        model = run.model
        is_synced = any(isinstance(m, torch.nn.SyncBatchNorm) for m in model.modules())
        exclusions.check(
            {
                "micro_batch_size auto": True,
                "exact": run.exact,
                "a stream": run.rows.is_stream,
                "SyncBatchNorm": is_synced,
                "static_graph": getattr(model, "static_graph", False),
                "stages": run.ranks.layout.stages > 1,
            }
        )
        if isinstance(model, DistributedDataParallel):
            model.broadcast_buffers = False  # before the word: see RepeatableGradients

    # ---- An attempt

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """End the body where memory runs out. What it computed is free then: no frame holds it."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not (self.recovers and is_out_of_memory(error)):
                raise
            if self.ranks.layout.fsdp and not self.searches:
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
        if self.is_known:
            return True, 0
        out, total = self.ranks.sum_over_ranks(int(self.is_out), number)
        self.is_known = self.is_out = out > 0
        return self.is_out, total

    def start(self, place: str) -> None:
        """Start an attempt at a step, or at what else the place names."""
        self.is_out = self.is_known = self.has_failed = False
        self.place = place

    @contextlib.contextmanager
    def attempt_batch(self, batch: Any, ids: Any) -> Iterator[None]:
        """Compute a batch of rows with these numbers in the body."""
        self.row, self.size, self.recovers = int(ids[0]), size_of(batch), True
        try:
            with self.attempt():
                yield
        finally:
            self.recovers = False

    def say_plain(self) -> None:
        """Print once that a loss which was computed elsewhere cannot be computed again."""
        if not self.has_remarked:
            self.has_remarked = True
            print_on_main(
                "micro_batch_size auto: step.backward got a loss, so memory that runs out ends the "
                "run; give it a function, as step.backward(lambda: model(**batch).loss)"
            )

    # ---- A step

    def compute(self, step: Any) -> Iterator[Any]:
        """Give the batches of a step to the body of the loop, until all fit into all memories."""
        put_back, has_repeated = self.keep(), False
        while True:
            self.start(f"step {step.number}")
            yield from self.compute_once(step)
            is_larger = self.has_failed and self.size > self.computed
            is_out, larger = self.ask(int(is_larger))
            if not is_out:
                return
            put_back()
            again = "as it was"  # another program may have taken the memory for a moment
            if larger or has_repeated:
                if self.run.plan.largest == 1:
                    self.end_for_row()
                self.use(self.cut(self.run.plan.largest // 2))
                again = f"a step of {self.run.plan.describe()}"
            has_repeated = True
            place = f"{self.run.run.label}{self.place}"
            print_on_main(f"{place} ran out of memory, and is computed again: {again}")
            step.micro_batches = self.run.loader.read_again()

    @contextlib.contextmanager
    def search(self) -> Iterator[None]:
        """Compute rows in the body of which nobody knows whether they fit."""
        self.start("before the first step")
        self.searches = True
        try:
            with _asking(self):
                yield
        finally:
            self.searches = self.is_out = False

    def compute_once(self, step: Any) -> Iterator[Any]:
        """Give the batches of this process, until one does not fit."""
        run, step.losses = self.run, []
        run.gradients.start_step(run.plan)
        if step.prepare:
            step.prepare(step.micro_batches)
        for micro_batch in step.micro_batches:
            given = micro_batch.batch, run.accelerator.device
            with self.attempt_batch(micro_batch.batch, micro_batch.ids):
                batch = send_to_device(*given, non_blocking=True)
                seed_micro_batch(run.seed, step.number, micro_batch.number)
                yield from step.compute(micro_batch, batch)
            if self.is_out:
                return
            self.computed = max(self.computed, self.size)

    def row_does_not_fit(self) -> UserError:
        return UserError(
            f"{self.place}: row {self.row} alone does not fit into the memory of the device; "
            "shorten the longest rows, turn on gradient_checkpointing, or take fsdp2.yaml"
        )

    def end_for_row(self) -> None:
        """Raise UserError on all processes for the row that does not fit on some of them."""
        self.ranks.raise_everywhere(self.row_does_not_fit() if self.has_failed else None)

    def cut(self, size: int) -> StepPlan:
        """Return the plan of a step with micro-batches of at most so many rows."""
        plan, in_step = self.run.plan, self.ranks.layout.in_step
        return plan_step(plan.samples, size, len(plan.shares), rank=plan.rank, in_step=in_step)

    def use(self, plan: StepPlan) -> None:
        """Cut steps by this plan from here on; note its size with the hardware."""
        run, self.computed = self.run, 0
        if run.metrics:
            run.metrics.monitor.read_losses()  # of steps that were cut otherwise
            run.metrics.monitor.plan = plan
        run.plan = run.run.plan = plan
        run.manifest["hardware"]["micro_batch_size"] = plan.micro_batch_size
        if run.lock:
            provenance.write_hardware(run.folder, run.manifest)
        run.write_status("running", micro_batch_size=plan.micro_batch_size)

    def give_up(self) -> Exception:
        """Note half the size for the next start; return the error of this one. The others learn it
        where they communicate next."""
        run, size = self.run, self.run.plan.largest // 2
        if not size:
            return self.row_does_not_fit()
        hardware = {**run.manifest["hardware"], "micro_batch_size": size}
        provenance.write_hardware(run.folder, {"hardware": hardware})
        status = {**read_json_object(run.folder / "status.json"), "micro_batch_size": size}
        replace_text(run.folder / "status.json", json.dumps(status) + "\n")
        return Failed(
            f"{self.place} ran out of memory with micro-batches of {run.plan.largest} rows; the "
            f"next start takes {size}"
        )

    # ---- What a forward pass changes

    def watch(self, moved: list[str], slots: dict[str, inventory.Slot], results: set[str]) -> None:
        """Note what the first batch has changed: attributes by their paths, of which some are
        `results`, "buffer NAME" and "weight NAME"."""
        model = self.run.saver.state.model()
        named = {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
        named |= {f"weight {name}": weight for name, weight in model.named_parameters()}
        self.tensors = [named[name] for name in moved if name in named]
        self.results = [slot for path, slot in slots.items() if path in results]
        self.slots = [slot for path, slot in slots.items() if path not in results]

    def keep(self) -> Callable[[], None]:
        """Return a function that puts back what forward passes change, as it is now."""
        tensors = [(values, values.detach().clone()) for values in self.tensors]
        missing = [slot for slot in self.slots if slot.name not in slot._values()]
        slots = [(s, s.get(), inventory.copy_of(s.get())) for s in self.slots if s not in missing]
        size = sum(_bytes_of(copy) for *_, copy in [*tensors, *slots])
        if size > _LARGEST_COPY:
            raise UserError(
                f"micro_batch_size auto: forward passes change {size / 1e6:,.0f} MB of buffers and "
                "attributes, which would be copied before each step; give a number"
            )

        def put_back() -> None:
            for slot in [*missing, *self.results]:
                slot.remove()
            for slot, value, copy in slots:
                slot.set(inventory.fill(value, copy))
            for values, copy in tensors:
                values.data.copy_(copy)

        return put_back


def _bytes_of(value: Any) -> int:
    if isinstance(value, inventory.COLLECTIONS):
        return sum(map(_bytes_of, value.values() if isinstance(value, dict) else value))
    return getattr(value, "nbytes", 0)


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
def _asking(memory: Memory) -> Iterator[None]:
    """Let FSDP communicate nothing in the body before all processes have said that they are not out
    of memory; else raise on all of them."""
    if not memory.ranks.layout.fsdp:
        yield
        return
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as fsdp

    def ask(kind: type) -> Any:
        class Asking(kind):  # type: ignore[misc, valid-type]
            def __call__(self, *args: Any, **named: Any) -> Any:
                if memory.ask()[0]:
                    raise torch.OutOfMemoryError("another process is out of memory")
                return super().__call__(*args, **named)

        return Asking()

    modules = [module for _, module in sharding.fsdp_modules(memory.run.model)]
    for module in modules:
        module.set_custom_all_gather(ask(fsdp.DefaultAllGather))
        module.set_custom_reduce_scatter(ask(fsdp.DefaultReduceScatter))
    try:
        yield
    finally:
        for module in modules:
            module.set_custom_all_gather(fsdp.DefaultAllGather())
            module.set_custom_reduce_scatter(fsdp.DefaultReduceScatter())


class RepeatableGradients(StepGradients):
    """Gradients that DDP averages when all processes have computed all micro-batches: what it has
    begun to communicate cannot be taken back."""

    def __init__(self, accelerator: Accelerator, weights: TrainedWeights):
        super().__init__(accelerator, weights)
        self.exchange()  # DDP chooses its buckets anew after the first one
        for parameter in weights.parameters:
            parameter.grad = None

    def start_step(self, plan: StepPlan) -> None:
        super().start_step(plan)
        self.model.require_backward_grad_sync = False
        sharding.share_buffers(self.model, True)

    def reduce(self) -> None:
        """Bring the gradient of the whole step to the weights of each process."""
        if self.by_hand:
            self.average()
            return
        parameters = self.weights.parameters
        used = self.ranks.sum_over_ranks(*(int(p.grad is not None) for p in parameters))
        self.exchange()
        self.weights.drop_unused(used)

    def exchange(self) -> None:
        """Let DDP average gradients that are there: it does so when weights get one, here 0."""
        reducer, parameters = self.model.reducer, self.weights.parameters
        views = [parameter.view_as(parameter) for parameter in parameters]
        reducer._rebuild_buckets()  # as a forward pass would, where it communicates
        reducer.prepare_for_backward(views)
        torch.autograd.backward(views, [p.new_zeros(()).expand_as(p) for p in parameters])
        reducer._rebuild_buckets()
