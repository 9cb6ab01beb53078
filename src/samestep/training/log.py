"""The log of a run: means of losses, notes of unusual steps, scores, times."""

from typing import Any

from samestep.base.errors import UserError, some
from samestep.report.speed import Profiler
from samestep.report.tracking import Log
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

    def note(self, **entries: Any) -> None:
        """Write a line about the newest step."""
        self.lines.write({"step": self.step, **entries})

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
        samples = self.samples(self.step)
        line: dict[str, Any] = {"samples": samples, **rows.count_samples(samples)}
        if not rows.is_stream:
            line["epoch"] = samples / len(rows)
        line |= {**numbers, "lr": float(self.rate), **self.meter.read()}
        values, self.values = self.values, {}
        if taken := line.keys() & values.keys():
            raise UserError(f"log: a line has {some(sorted(taken))} of itself; give another name")
        self.note(**line, **values)
        if reason:
            step, ids = note["step"], [*map(str, note.get("sample_ids", ()))]
            named = f", whose rows are {some(ids, 8)}" if ids else ""
            again = f"python -m samestep replay {self.lines.folder} --step {step}"
            raise UserError(f"{reason}. Step {step}{named}: {again}")
