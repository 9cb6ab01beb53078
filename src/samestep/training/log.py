"""The log of a run: means of losses, notes of unusual steps, scores, times."""

import math
from typing import Any

import numpy as np

from samestep.base import run_folder
from samestep.base.console import is_main
from samestep.base.errors import UserError, attempt, catch, some
from samestep.report.speed import Profiler
from samestep.report.tracking import Log
from samestep.state.checkpoints import check_disk_space
from samestep.step.monitor import StepMonitor
from samestep.step.step import Step


class RunLog:
    """Counts the steps of a Training, and writes lines of metrics, where tracking.Log says."""

    def __init__(self, run: Any, max_steps: int):
        self.rows, self.meter, self.samples = run.rows, run.meter, run.samples
        self.step = run.step  # the newest
        self.lines = Log(run.accelerator, run.folder, self.step, max_steps, run.run.shows_lines)
        self.monitor = StepMonitor(run.accelerator, run.ranks, run.plan, run.max_skipped_steps)
        self.profiler = Profiler(self.meter, run.run.profile_steps, run.folder)
        # What a step computes, for a line after the first one; {items} stands for its items.
        self.about = run.run.about
        self.rate: Any = 0.0  # its learning rate
        self.values: dict[str, Any] = {}  # of the script, for the next line
        self.highest: list[float] = []  # losses of the newest lines, of each the highest

    def note(self, **entries: Any) -> None:
        """Write a line about the newest step."""
        self.lines.write({"step": self.step, **entries})
        if "save_seconds" in entries:
            _, full = catch(check_disk_space, self.lines.folder / "checkpoints")
            if isinstance(full, ValueError):
                self.notice("disk", self.step, str(full))

    def notice(self, kind: str, step: int, text: str) -> None:
        """Note in status.json what a person would be told."""
        if is_main():
            given = self.lines.folder, kind, step, text
            attempt("status.json was not written", run_folder.notice, *given)

    def watch(self, line: dict[str, Any]) -> None:
        """Notice a loss that is above the median of 20 lines before by a fifth, and by five times
        the spread of their middle half; and a process for which the others wait a fifth of the
        time."""
        about = line.get("worst", {**line, "step": self.step})
        before, loss = self.highest[-20:], about["loss"]
        if len(before) > 7:
            low, median, high = np.quantile(before, [0.25, 0.5, 0.75])
            if loss > median + max(abs(median) / 5, 5 * (high - low)):
                text = f"loss {loss:.4g}; the median of {len(before)} lines before is {median:.4g}"
                self.notice("spike", about["step"], text)
        if math.isfinite(loss):
            self.highest = [*before, loss]
        if (waits := line.get("peer_wait", 0)) > 0.2:
            text = f"the others wait for process {line['slowest']}, {waits:.0%} of the time"
            self.notice("straggler", self.step, text)

    def start_step(self, number: int) -> None:
        self.step = number
        self.profiler.start_step(number)

    def add(self, step: Step, values: dict[str, Any]) -> None:
        """Add a step whose weights are updated. Does not wait for the device."""
        self.monitor.steps.append(step)
        self.rate, self.values = step.learning_rate, self.values | values
        self.profiler.end_step(step.number)
        self.lines.advance(step.number, self.about.format(items=f"{step.items:,}"))

    def write_means(self) -> None:
        """Write a line about the steps since the last one, if there are any. Waits for the device;
        all processes call it.

        Raises UserError if too many steps in a row were skipped.
        """
        if not self.monitor.steps:
            return
        rows, size = self.rows, self.samples(self.step) - self.samples(self.step - 1)
        numbers, notes, reason = self.monitor.read()
        for note in notes:
            if not rows.is_stream:
                end = self.samples(note["step"])
                note = {**note, "sample_ids": rows.ids(range(end - size, end))}
            self.lines.write(note)
            text = "not trained on: its loss or gradient is not finite, or no item is in the loss"
            self.notice("skipped", note["step"], text)
        samples = self.samples(self.step)
        line: dict[str, Any] = {"samples": samples, **rows.count_samples(samples)}
        if not rows.is_stream:
            line["epoch"] = samples / len(rows)
        line |= {**numbers, "lr": float(self.rate), **self.meter.read()}
        self.watch(line)
        values, self.values = self.values, {}
        if taken := line.keys() & values.keys():
            raise UserError(f"log: a line has {some(sorted(taken))} of itself; give another name")
        self.note(**line, **values)
        if reason:
            step, ids = note["step"], [*map(str, note.get("sample_ids", ()))]
            named = f", whose rows are {some(ids, 8)}" if ids else ""
            again = f"python -m samestep replay {self.lines.folder} --step {step}"
            raise UserError(f"{reason}. Step {step}{named}: {again}")
