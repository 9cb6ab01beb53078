"""The log of a run: means of losses, notes of unusual steps, scores, times."""

from collections.abc import Callable
from typing import Any

from samestep.base.errors import UserError, some
from samestep.report.speed import Profiler, SpeedMeter
from samestep.report.tracking import Log
from samestep.step.monitor import StepMonitor
from samestep.step.samples import SampleDataset
from samestep.step.step import Step


class RunLog:
    """Counts steps, and writes lines of metrics; see tracking.Log for where they go.

    samples(step): samples of the run up to the end of a step.
    about: what a step computes, for a line after the first one; {items} stands for its items.
    """

    def __init__(
        self, lines: Log, monitor: StepMonitor, meter: SpeedMeter, profiler: Profiler,
        rows: SampleDataset, samples: Callable[[int], int], first_step: int, about: str,
    ):  # fmt: skip
        self.lines, self.monitor, self.meter, self.profiler = lines, monitor, meter, profiler
        self.rows, self.samples, self.about = rows, samples, about
        self.step = first_step  # the newest
        self.rate: Any = 0.0  # its learning rate
        self.values: dict[str, Any] = {}  # of the script, for the next line

    def note(self, **entries: Any) -> None:
        """Write a line about the newest step."""
        self.lines.write({"step": self.step, **entries})

    def start_step(self, number: int) -> None:
        """Note that the computation of a step begins."""
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
