"""What scores, streams and saves in the background add to core's Saver."""

import math
import threading
import time
from typing import Any

import torch

from samestep.base.console import print_on_main
from samestep.base.errors import attempt, catch
from samestep.processes.ranks import SAVE_THREAD
from samestep.run.log import RunLog
from samestep.run.run import Run
from samestep.state import checkpoints, saver, tensor_files
from samestep.state.weights import TrainingState
from samestep.step.inputs import Stream


class Saver(saver.Saver):
    """Commits checkpoints of a run. With `async_save`, a save copies this process's share to host
    memory, and a thread writes, hashes and commits it."""

    def __init__(self, run: Run, model: torch.nn.Module, optimizer: Any):
        prepared = run.accelerator, model, optimizer
        state = TrainingState(*prepared, run.ranks.layout, run.optimizer_settings)
        start, keep = run.start, run.cfg.keep_checkpoints
        super().__init__(run.output, run.ranks, state, start.manifest, keep, start.lock)
        self.run, self.keep_every = run, run.cfg.keep_every
        self.takes_scores = False  # whether the newest is one of this run, and has no scores yet
        self.best = run.resume_point.best  # the step and the eval_loss of the best checkpoint
        self.scores: dict = {}  # entries that the manifest of the newest is yet to get
        self.thread: threading.Thread | None = None
        self.done: list[dict] = []  # lines about saves in the background, until they are logged
        self.host: dict[str, torch.Tensor] = {}  # copies of what is saved in the background
        self.asynchronous = run.cfg.async_save

    def load(self) -> tuple[int, dict | None]:
        """Continues from the checkpoint where the run starts, if there is one.

        Returns its step, and its scores; None if that step has to be evaluated.
        """
        run, resume_point = self.run, self.run.resume_point
        checkpoint, saved = resume_point.checkpoint, resume_point.saved
        if checkpoint:
            self.restore(checkpoint, saved)
        else:
            with self.ranks.fail_together():
                if self.main:  # AdamW will keep two moments of each weight
                    checkpoints.check_disk_space(self.folder, 3 * run.trained_bytes)
        self.thread_ranks = self.ranks.for_thread() if self.asynchronous else self.ranks
        if not checkpoint:
            return 0, None
        print_on_main(f"{'evaluating' if run.cfg.eval_only else 'continuing from'} {checkpoint}")
        scored = "eval_loss" in saved and resume_point.same_validation(self.manifest)
        self.takes_scores = resume_point.own and not (scored or resume_point.changed)
        return run.first_step, {"eval_loss": saved["eval_loss"]} if scored else None

    def about(self, step: int) -> dict[str, Any]:
        """The manifest of a checkpoint of this step."""
        about = super().about(step) | {"best": self.best}
        if isinstance(self.run.start.views[0], Stream):
            about["lanes"] = self.run.gather_lanes()
        return about

    def save(self, step: int, log: RunLog) -> None:
        """Saves a step, or begins to, once the last one is saved, unless it is saved already."""
        if step == self.step:
            return
        began = time.perf_counter()
        with self.run.meter.paused():
            self.wait()
            if self.asynchronous:
                self.begin_to_save(step)
            else:
                self.save_step(step)
        self.takes_scores = True
        more = {"in_background": True} if self.asynchronous else self.hashed  # it may still fail
        log.note(save_seconds=time.perf_counter() - began, **more)

    def add_scores(self, step: int, scores: dict) -> None:
        """Adds the scores of a step to its checkpoint, if it has one. All processes must call it.

        A checkpoint that is being saved in the background gets them when it is done.
        """
        if step != self.step or not self.takes_scores:
            return
        loss = scores["eval_loss"]
        if math.isfinite(loss) and (self.best is None or loss < self.best[1]):
            self.best = [step, loss]
        self.takes_scores, self.scores = False, {"eval_loss": loss, "best": self.best}
        if not self.asynchronous:
            self.write_scores()

    def write_scores(self) -> None:
        """Writes the scores of the newest checkpoint into its manifest."""
        found, self.scores = self.scores, {}
        with self.ranks.fail_together():
            if self.lock and found:
                self.lock.check_folder()
                failure = f"the scores of step {self.step} are not in its checkpoint"
                attempt(failure, checkpoints.add_to_manifest, self.folder, self.step, found)

    def begin_to_save(self, step: int) -> None:
        """Copies a step to host memory, and lets a thread write it. Its error is `run.problem`;
        `wait` and the next save raise it."""
        share, manifest = self.collect(step)
        self.step = step
        with self.ranks.fail_together():
            self.host = share.parts = _host_copies(share.parts, self.host)
        self.thread = threading.Thread(
            target=self.write_in_background, args=(share, manifest), name=SAVE_THREAD, daemon=True
        )
        self.thread.start()

    def write_in_background(self, share: tensor_files.Share, manifest: dict) -> None:
        began = time.perf_counter()
        _, self.run.problem = catch(self.write, self.thread_ranks, share, manifest)
        if not self.run.problem:
            seconds = time.perf_counter() - began
            line = {"committed_step": manifest["step"], "commit_seconds": seconds, **self.hashed}
            self.done.append(line)

    def wait(self) -> None:
        """Waits for a save in the background, and raises its error. All processes must call it."""
        if self.asynchronous:
            if self.thread:
                self.thread.join()
            self.thread = None
            self.ranks.raise_everywhere(self.run.problem)
            self.write_scores()

    def log_commits(self, log: RunLog) -> None:
        """Writes a line about each save in the background that is now done."""
        while self.done:
            line = self.done.pop(0)
            log.note(**line)
            self.note_saved(line["committed_step"])

    def finish(self, log: RunLog) -> None:
        """Waits for the last save, and closes the log."""
        self.wait()
        self.log_commits(log)
        log.lines.close()

    def load_best(self) -> int | None:
        """Loads the weights with the smallest eval_loss; their step, None if there are none."""
        found: Any = (None, {}, "")
        is_newest = self.best is not None and self.best[0] == self.step  # it is loaded
        with self.ranks.fail_together():
            if self.main and not is_newest:
                found = checkpoints.find_best(self.folder, self.best)
        path, saved, lost = self.ranks.from_main(found)
        if lost:
            print_on_main(f"{lost}: the last model is exported, not the best")
            return None
        if path:
            with self.ranks.fail_together():
                self.state.load_weights(path, saved, self.manifest)
        assert self.best is not None
        step, loss = self.best
        print_on_main(f"the best evaluation was that of step {step}: {loss:.5g}")
        return step


def _host_copies(
    parts: dict[str, torch.Tensor], before: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Copies in host memory, that of the copies `before` where these have the same shapes: pinned
    for a GPU, whose allocation takes longer than the copy."""
    copies = {}
    for name, part in parts.items():
        copy = before.get(name)
        if copy is None or (copy.shape, copy.dtype) != (part.shape, part.dtype):
            copy = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
        copies[name] = copy.copy_(part, non_blocking=part.is_cuda)
    if any(part.is_cuda for part in parts.values()):
        torch.cuda.synchronize()
    return copies
