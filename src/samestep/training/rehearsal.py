"""What `samestep rehearse` asks of a run, and what it records of each step: see ask/rehearse.py.

A run reads the question from a variable of its environment. Its folder and the size of its
micro-batches are those of the question; one process or all are killed or stopped in a step; after
the last step the process ends, so what follows the loop does not run.
"""

import functools
import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from samestep.processes.alike import hash_bits
from samestep.processes.failures import Ended
from samestep.processes.sharding import full_tensor, local
from samestep.state import inventory, packing
from samestep.step import trial
from samestep.step.plan import count_micro_batches, number_of
from samestep.step.samples import collate, hash_entries
from samestep.step.seeds import BEFORE, seed_micro_batch
from samestep.step.step import Step

_LONGEST = 100  # entries of a collection that are looked at; of a longer one only their number
_LARGEST = 2**28  # bytes of a tensor that is looked at; a larger one is data


def read_question() -> dict[str, Any]:
    """Read the question of `samestep rehearse`, if it has started this process; else it is empty.

    folder: of the run. record: of what is recorded. processes: the numbers of them that are tried.
    cut: 0 for the largest micro-batches that all of these can have, 1 for other ones. last: the
    step after which the process ends. save: the step that is saved, or 0. kill: the step in which
    all processes are killed, or 0. stop: that in which the last one is asked to stop, or 0.
    rounds: whether the last bit of each weight is another at the start.
    """
    return json.loads(os.environ.get("SAMESTEP_REHEARSAL", "{}"))


def choose_size(samples: int, size: int | str, exact: bool, question: dict[str, Any]) -> int:
    """Return the micro_batch_size of the question, at most that of the run."""
    sizes, _ = _list_sizes(samples, number_of(size, samples), exact, question)
    return sizes[min(question["cut"], len(sizes) - 1)]


def _list_sizes(
    samples: int, size: int, exact: bool, question: dict[str, Any]
) -> tuple[list[int], list[int]]:
    """List sizes of micro-batches that cut a step differently, the largest first, but alike on each
    number of processes that is tried; return these numbers, too, without those that are too many.
    """
    here = int(os.environ.get("WORLD_SIZE", 1))
    devices = torch.cuda.device_count() or max(question["processes"])
    numbers = sorted({here, *(n for n in question["processes"] if n <= devices)})
    kind = (exact, False, "ACCELERATE_USE_FSDP" in os.environ)
    while True:
        found: dict[int, int] = {}
        for each in range(size, 0, -1):
            counts = {count_micro_batches(samples, each, ranks, *kind) for ranks in numbers}
            if len(counts) == 1 and 0 not in counts:
                found.setdefault(counts.pop(), each)
        others = [ranks for ranks in numbers if ranks != here]
        if found or not others:
            return [*found.values()] or [size], others
        numbers.remove(others[-1])


def change(cfg: Any, question: dict[str, Any]) -> None:
    """Let a run of train.py be one of a rehearsal, which leaves nothing of it elsewhere."""
    given = cfg.global_batch_size, cfg.micro_batch_size, cfg.exact, question
    cfg.output_dir, cfg.micro_batch_size = question["folder"], choose_size(*given)
    cfg.resume, cfg.tracker, cfg.profile_steps = "auto", "none", None


class Rehearsal:
    """Records the steps of a run, and breaks it: its methods take the place of a Training's."""

    def __init__(self, training: Any, question: dict[str, Any]):
        self.training, self.question = training, question
        self.batches: dict[int, list] = {}  # of the step: ids, items and bytes of each
        self.draws = False  # whether the model has drawn in the step
        self.add: Callable | None = None  # of the gradients, once there are any
        training.folder, training.begins_from = Path(question["folder"]), "auto"
        training.accelerator.trackers = []
        training.accelerator.init_trackers = lambda *_, **__: None
        training._save, training.look, training.steps = self.save, self.look, self.steps
        training.trials = [*training.trials, self.note_batches]
        training.end_stopped = self.end_stopped
        self.is_stopping, self.recorded = False, 0  # the newest step

    def write(self, **line: Any) -> None:
        """Write a line of this process's record."""
        path = Path(self.question["record"], f"{self.training.ranks.layout.rank}.jsonl")
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def steps(self, *given: Any, **named: Any) -> Iterator[Step]:
        """Yield the steps; before the first one note how the run begins."""
        run = self.training
        for step in type(run).steps(run, *given, **named):
            if self.add is None:
                self.begin(run)
                seed_micro_batch(run.seed, step.number, BEFORE)
            yield step

    def begin(self, run: Any) -> None:
        """Note how the run begins."""
        plan = run.plan
        given = plan.samples, plan.micro_batch_size, run.exact, self.question
        sizes, others = _list_sizes(*given)
        before = trial.random_state(run.accelerator.device)
        collate(run.task, run.run.samples)
        draws = trial.random_state(run.accelerator.device) != before
        self.write(
            processes=len(plan.shares), size=plan.largest, sizes=len(sizes), others=others,
            exact=run.exact, remedy=run.run.loss_remedy, eps=_eps(run),
            trained=[n for n, p in run.saver.state.parameters().items() if p.requires_grad],
            rows_depend=run.rows_depend, draws=draws, loop=_see_loop(run),
            command=[sys.executable, *sys.orig_argv[1:]],
        )  # fmt: skip
        if self.question["rounds"]:
            _change_last_bits(run)

    def note_batches(self, run: Any, step: Step) -> Iterator[Any]:
        """Note the micro-batches of a step, and let `end` look at each. Gives no batches."""
        if self.add is None:
            self.add, run.gradients.add = run.gradients.add, self.end
        self.draws = False
        for each in step.micro_batches:
            about = [int(each.ids_hash), each.num_items, hash_entries(each.batch)]
            self.batches[each.number] = about
        yield from ()

    def end(self, loss: torch.Tensor, num_items: int, number: int) -> None:
        """Note what was drawn; after a first micro-batch kill all, or ask the last to stop."""
        run, asked = self.training, self.question
        assert self.add
        self.add(loss, num_items, number)
        device = run.accelerator.device
        drawn, states = trial.random_state(device), trial.random_states(device)
        seed_micro_batch(run.seed, run.current.number, number)
        self.draws |= trial.random_state(device) != drawn
        trial.set_random_states(device, states)
        if len(run.current.losses) > 1:
            return
        layout = run.ranks.layout
        if run.current.number == asked["kill"]:
            os.kill(os.getpid(), signal.SIGKILL)
        if run.current.number == asked["stop"] and layout.rank == layout.processes - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def look(self) -> None:
        """Record a step at the end of the loop's body; after the last one end the process."""
        run, step = self.training, self.training.current
        tensors, entries = run.saver.state.collect(step.number)
        state: dict[str, Any] = {}
        for name, packed in entries.get("others", {}).items():  # DeepSpeed writes what it holds
            state |= {f"{name}{path}": value for path, value in _leaves(packed)}
        weights = {f"model.{name}" for name in run.saver.state.parameters()}
        for name, values in sorted(tensors.items()):
            is_buffer = name.startswith("model.") and name not in weights
            state[f"buffer of {name}" if is_buffer else name] = _describe(values)
        losses = dict(zip(self.batches, map(float, step.losses), strict=True))
        self.write(
            step=step.number, batches=self.batches, losses=losses, norm=float(step.norm),
            draws=self.draws, state=state, loop=_see_loop(run),
        )  # fmt: skip
        self.batches, self.recorded = {}, step.number
        if step.number == self.question["save"]:
            run.save()
            run.saver.wait()
        if step.is_last or step.number == self.question["last"]:
            raise Ended(0)

    def save(self) -> None:
        """Save only what the question wants, and what a stop saves."""
        if self.is_stopping or self.training.complete() == self.question["save"]:
            type(self.training)._save(self.training)

    def end_stopped(self) -> None:
        """Record a step that stops in its evaluation, before the end of the body; then stop."""
        run, self.is_stopping = self.training, True
        if run.current and self.recorded < run.current.number == run.complete():
            self.look()
        type(run).end_stopped(run)


# ---- What is described ---------------------------------------------------------------------------


def _eps(run: Any) -> float:
    """Return the last bit of the type in which a run computes, as a part of a number."""
    precision = {"bf16": torch.bfloat16, "fp16": torch.float16}
    own = next(p for p in run.model.parameters() if p.requires_grad).dtype
    return torch.finfo(precision.get(run.accelerator.mixed_precision, own)).eps


def _change_last_bits(run: Any) -> None:
    """Change the last bit of each weight that trains, up or down, the same on all processes."""
    generator, size = torch.Generator().manual_seed(0), _eps(run)
    for parameter in run.model.parameters():
        if parameter.requires_grad:
            values = local(parameter.data)
            signs = torch.randint(0, 2, values.shape, generator=generator) * 2 - 1
            values.mul_(1 + size * signs.to(values))


def _describe(values: torch.Tensor) -> list:
    """Return type, hash and norm of a tensor. Processes that share it call it together."""
    values = full_tensor(values.detach())
    kind = f"{values.dtype}{[*values.shape]}".removeprefix("torch.")
    size = torch.linalg.vector_norm(values.abs().float())
    return [kind, hash_bits([values])[:12], float(size)]


def _leaves(packed: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Give the numbers and texts of a state that is packed, by their paths."""
    if not isinstance(packed, dict):
        yield path, packed
        return
    ((kind, value),) = packed.items()
    if kind not in ("tensor", "array"):
        for name, each in value if kind in ("dict", "counter") else enumerate(value):
            yield from _leaves(each, f"{path}.{name}")


@functools.cache
def _is_own(module: str | None) -> bool:
    """Return whether a module is the user's, by where its file lies."""
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    installed = f"{os.sep}lib{os.sep}python" in file or "-packages" in file
    return os.path.isabs(file) and not installed and not f"{module}.".startswith("samestep.")


def _is_skipped(value: Any) -> bool:
    """Return whether the walk leaves out what a value holds: long collections, and objects of
    installed packages that have no state."""
    if isinstance(value, inventory.COLLECTIONS):
        return len(value) > _LONGEST
    return not _is_own(type(value).__module__) and not hasattr(value, "state_dict")


def _see_loop(run: Any) -> dict[str, Any]:
    """Describe what functions that call the loop, and the user's modules, can see, by its path."""
    scopes: list[tuple[str, dict]] = []  # each with the beginning of its paths
    frame: Any = sys._getframe(1)
    while frame:
        if _is_own(frame.f_globals.get("__name__")):
            scopes.append(("", frame.f_locals))
        frame = frame.f_back
    for name in [name for name in sys.modules if _is_own(name) and name != "__mp_main__"]:
        scopes.append(("" if name == "__main__" else f".{name}", vars(sys.modules[name])))
    roots = {}
    for i, (name, scope) in enumerate(scopes):
        roots[f"{i}{name}"] = {n: v for n, v in scope.items() if not n.startswith("__")}
    state = run.saver.state
    known = state.pack_registered()[1].values()
    slots, _ = inventory.list_slots(roots, state.model(), known, _is_skipped)
    found: dict[str, Any] = {}
    for path, slot in slots.items():
        for name, value in _parts(path.partition(".")[2], slot.get()):
            found.setdefault(name, value)
    return found


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Give the numbers, texts, tensors and generators in a value by their paths: of a tensor or a
    generator a list, of others a text."""
    if isinstance(value, inventory.COLLECTIONS):
        yield f"{path}.len()", repr(len(value))
        if len(value) > _LONGEST:
            return
    if getattr(value, "nbytes", 0) > _LARGEST:
        return
    packed, tensors = packing.pack(value, path)
    if isinstance(value, packing.GENERATORS):
        text = f"{packed} {hash_bits([*tensors.values()])}"
        yield path, ["generator", hashlib.sha256(text.encode()).hexdigest()[:12]]
        return
    for name, each in _leaves(packed):
        yield f"{path}{name}", repr(each)[:100]
    for name, tensor in tensors.items():
        yield name, _describe(tensor)
