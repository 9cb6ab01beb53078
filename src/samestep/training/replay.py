"""What `samestep replay` asks the loop of a run: a step computed again, and its rows alone.

The run's own program trains again from a checkpoint, in a scratch folder. Before the batches of the
step that is asked about, its loop gets others: rows alone, and the step without some rows.
"""

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from samestep.base.errors import UserError
from samestep.processes import sharding
from samestep.processes.failures import Ended
from samestep.step import trial
from samestep.step.gradient import TrainedWeights
from samestep.step.model import eager, keep_modes
from samestep.step.samples import collate
from samestep.step.step import Step
from samestep.training.trial import try_batch


def read_question() -> dict[str, Any]:
    """Read the question of `samestep replay`, if it has started this process; else it is empty.

    folder: that of question.json and of the answer. step: that is asked about. last: with which the
    run ends. lines: the steps whose lines of metrics.jsonl are written. without: rows to leave out.
    gradients: whether those of each row are computed. checkpoint: from which it begins, or "never".
    data: the fingerprint of the rows. prepared: the name of the prepared data of then.
    """
    if not (folder := os.environ.get("SAMESTEP_REPLAY")):
        return {}
    return {"folder": folder, **json.loads(Path(folder, "question.json").read_text())}


class Replay:
    """Answers a question: `log` takes the place of a Training's, `clip` that of the gradients'."""

    def __init__(self, training: Any, question: dict[str, Any]):
        self.training, self.question, self.step = training, question, question["step"]
        self.without = {*question["without"]}
        self.answer: dict[str, Any] = {"rows": []}
        training.folder, training.max_skipped_steps = Path(question["folder"], "run"), 0
        training.begins_from, training.accept_changes = question["checkpoint"], True
        training.save = training._save = training.write_line = lambda: None
        training.trials = [self.check_data, *training.trials, self.ask]
        training.log = self.log

    def check_data(self, run: Any, step: Step) -> Iterator[Any]:
        """Raise UserError for other data than those of then. Gives no batches."""
        if self.question["data"] not in ("", run.manifest["data"]["fingerprint"]):
            raise UserError(f"the data have changed since step {self.step}: it cannot be repeated")
        yield from ()

    def clip(self, max_norm: float) -> Any:
        """Describe the step that is asked about, whose gradient is complete; then clip it."""
        run = self.training
        if run.current.number == self.step:
            self.answer |= self.describe(run.current)
        return type(run.gradients).clip(run.gradients, max_norm)

    def log(self, step: Step, **values: Any) -> None:
        """Write the lines that are compared alone; after the last one end the process."""
        run = self.training
        is_new = run.step != step.number
        run.log_every = 1 if step.number in self.question["lines"] else step.number + 1
        type(run).log(run, step, **values)
        if is_new and step.number == self.question["last"]:
            changed = [text for text in run.point.remarks if text.startswith("changed")]
            self.answer["about"] = [run.run.hardware, *changed]
            if run.accelerator.is_main_process:
                Path(self.question["folder"], "answer.json").write_text(json.dumps(self.answer))
            raise Ended(0)

    def ask(self, run: Any, step: Step) -> Iterator[Any]:
        """Give the step that is asked about, each row alone, and the step without some rows."""
        if step.number != self.step:
            return
        run.gradients.clip = self.clip
        rows, plan = run.rows, run.plan
        end = run.samples(step.number)
        self.positions = [*rows.sort(range(end - plan.samples, end))]
        self.samples = rows.__getitems__(self.positions)
        ids = {number for number, _ in self.samples}
        if missing := sorted(self.without - ids):
            raise UserError(f"--without {missing[0]} is not a row of the step; see samestep rows")
        if self.without == ids:
            raise UserError("--without leaves no row of the step")
        if run.rows_depend and self.without:
            raise UserError("rows_depend: rows of this task mean nothing alone, or left out")
        with trial.nothing_changes(run.model, run.saver.state.keep(), exchanges=True):
            self.answer["again"] = yield from self.compute(step, ids)
            if run.rows_depend:
                return
            yield from self.compute_rows(run, step)
            if self.without:
                self.answer["without"] = yield from self.compute(step, ids - self.without)
            for entry in self.answer["rows"] if self.question["gradients"] else ():
                alone = yield from self.compute(step, {entry["row"]})
                entry["norm"] = alone["norm"]

    def compute(self, step: Step, kept: set[int]) -> Generator[Any, None, dict[str, Any]]:
        """Compute the step with these samples alone; return what `describe` does. Each process
        computes as many micro-batches as in training: one without a sample counts nothing."""
        run, plan, micro_batches = self.training, self.training.plan, []
        filler = [sample for sample in self.samples if sample[0] in kept][:1]
        for number in plan.run():
            assigned = plan.positions(self.samples, number)
            samples = [sample for sample in assigned if sample[0] in kept]
            run.rows.seed_collate(plan.positions(self.positions, number))
            made = collate(run.task, samples or filler)._replace(number=number)
            if not samples:
                made = made._replace(num_items=0, counts=False)
            micro_batches.append(made)
        items = sum(batch.num_items for batch in micro_batches) * run.ranks.layout.counts_items
        (items,) = run.ranks.sum_over_ranks(items)
        whole = step.micro_batches, step.items
        step.micro_batches, step.items = micro_batches, items
        yield from step.compute_all()
        run.gradients.reduce()
        result = self.describe(step)
        for parameter in run.gradients.weights.parameters:
            parameter.grad = None
        step.micro_batches, step.items = whole
        step.losses, step.total = [], None
        return result

    def compute_rows(self, run: Any, step: Step) -> Iterator[Any]:
        """Compute the loss of each row alone, without dropout."""
        with keep_modes(run.model), eager(run.model):
            run.model.eval()
            sharding.share_buffers(run.model, run.ranks.layout.fsdp)
            gradients, run.gradients = run.gradients, None  # losses alone
            with run.run.trial_mode():
                for sample in self.samples:
                    computed = yield from try_batch(run, step, [sample], sample[0], first=0)
                    items, loss = computed.num_items, float(computed.sums[""])
                    entry = {"row": sample[0], "items": items, "loss": loss / max(items, 1)}
                    self.answer["rows"].append(entry)
            run.gradients, step.losses = gradients, []
        if run.ranks.layout.fsdp:
            sharding.reshard(run.model)

    def describe(self, step: Step) -> dict[str, Any]:
        """Return loss, items and norms of a gradient that is complete, before it is clipped."""
        run = self.training
        layers = _norms_by_layer(run.gradients.weights, run.accelerator.scaler)
        run.metrics.monitor.read_losses(step)
        assert step.total is not None
        loss, norm = step.total / max(step.items, 1), math.hypot(*layers.values())
        return {"loss": loss, "items": step.items, "norm": norm, "layers": layers}


def _norms_by_layer(weights: TrainedWeights, scaler: Any) -> dict[str, float]:
    """Return the norm of the gradient of each layer. scaler: fp16's, or None."""
    squares: dict[str, float] = defaultdict(float)
    for name, parameter in zip(weights.names, weights.parameters, strict=True):
        if parameter.grad is not None:
            layer = re.match(r".*?\.\d+(?=\.|$)", name)
            name = layer[0] if layer else re.sub(r"\.(weight|bias)$", "", name)
            grad = sharding.full_tensor(parameter.grad).detach().double()
            squares[name] += float(grad.square().sum())
    scale = scaler.get_scale() if scaler else 1.0
    return {name: math.sqrt(value) / scale for name, value in squares.items()}
