"""The log of a run: means of losses, notes of unusual steps, scores, times."""

import json
from typing import Any

import torch

from samestep.base.errors import UserError, some
from samestep.report import speed, tracking
from samestep.run.loading import TrainLoader
from samestep.run.run import Run
from samestep.state import provenance
from samestep.step import monitor


class RunLog:
    """Counts steps, and writes lines of metrics; see tracking.Log for where they go."""

    def __init__(self, run: Run, loader: TrainLoader):
        self.run, self.loader, self.step, self.lr = run, loader, run.first_step, 0.0
        settings, micro_batches = run.start.manifest["config"], sum(run.plan.shares)
        self.lines = tracking.Log(run.accelerator, settings, run.first_step, run.last_step)
        self.monitor = monitor.StepMonitor(
            run.accelerator, run.ranks, micro_batches, run.cfg.max_skipped_steps
        )
        self.profiler = speed.Profiler(run.meter, run.cfg.profile_steps, run.output)
        manifest = run.start.manifest
        parts = ("config", "data", "code", "library")
        digests = {n: provenance.short_hash(json.dumps(manifest[n]).encode()) for n in parts}
        self.note(started=manifest["hardware"] | digests)
        if run.resume_point.changed:
            self.note(event="changed", changes=run.resume_point.changed)
        if run.shares:
            self.note(event="shares", shares=run.shares)

    def note(self, **entries: Any) -> None:
        """Writes a line about the newest step."""
        self.lines.write({"step": self.step, **entries})

    def start_step(self, step: int) -> None:
        """Before a step."""
        self.step = step
        self.profiler.start_step(step)

    def add(
        self, num_items: int, losses: list[torch.Tensor], norm: torch.Tensor, lr: float
    ) -> None:
        """After a step: its items in the loss, its losses on this process, the norm of its
        gradient, its learning rate. Does not wait for the device.
        """
        self.lr = lr
        self.profiler.end_step(self.step)
        self.monitor.add(self.step, num_items, self.run.plan.run(), losses, norm)
        about = f"{self.run.parameters:,} parameters to train; {num_items:,} {self.run.unit} a step"
        self.lines.advance(self.step, about)

    def write_means(self) -> None:
        """Writes a line about the steps since the last one. Waits for the device.

        Raises UserError if too many steps in a row were skipped.
        """
        run, rows = self.run, self.loader.rows
        numbers, notes, reason = self.monitor.read()
        for note in notes:
            end = run.samples(note["step"])
            if not rows.is_stream:
                ids = rows.ids(range(end - run.cfg.global_batch_size, end))
                note = {**note, "sample_ids": ids}
            self.lines.write(note)
        samples = run.samples(self.step)
        line: dict[str, float] = {"samples": samples, **rows.count_samples(samples)}
        if not rows.is_stream:
            line["epoch"] = samples / len(rows)
        self.note(**line, **numbers, lr=self.lr, **run.meter.read())
        if reason:
            step, found = note["step"], [*map(str, note.get("sample_ids", ()))]
            named = f", whose rows are {some(found, 8)}" if found else ""
            again = f"python -m samestep replay {run.output} --step {step}"
            raise UserError(f"{reason}. Step {step}{named}: {again}")
