"""Saves checkpoints, while training waits or in the background, and continues from them."""

import math
import shutil
import threading
import time
from typing import Any

import torch

from samestep.base import run_folder
from samestep.base.console import print_on_main
from samestep.base.errors import attempt, catch
from samestep.core import checkpoints, deepspeed, tensor_files
from samestep.core.inputs import Stream
from samestep.core.ranks import SAVE_THREAD, Ranks
from samestep.core.weights import TrainingState
from samestep.project.log import RunLog
from samestep.project.run import Run


class Saver:
    """Commits checkpoints of the weights and of the optimizer's state. With `async_save`, a save
    copies this process's share to host memory, and a thread writes, hashes and commits it."""

    def __init__(self, run: Run, model: torch.nn.Module, optimizer: Any):
        self.run, self.accelerator, self.ranks = run, run.accelerator, run.ranks
        self.main = run.accelerator.is_main_process
        prepared = run.accelerator, model, optimizer
        self.state = TrainingState(*prepared, run.ranks.layout, run.optimizer_settings)
        self.step = 0  # of the newest checkpoint
        self.takes_scores = False  # whether it is one of this run, and has no scores yet
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
        run, checkpoint = self.run, self.run.resume_point.checkpoint
        saved = self.run.resume_point.saved
        with self.ranks.fail_together():
            if checkpoint:
                self.state.load(checkpoint, saved, run.start.manifest)
            elif self.main:  # AdamW will keep two moments of each weight
                folder = run.output / "checkpoints"
                checkpoints.check_disk_space(folder, 3 * run.trained_bytes)
        self.thread_ranks = self.ranks.for_thread() if self.asynchronous else self.ranks
        if not checkpoint:
            return 0, None
        print_on_main(f"{'evaluating' if run.cfg.eval_only else 'continuing from'} {checkpoint}")
        resume_point = run.resume_point
        scored = "eval_loss" in saved and resume_point.same_validation(run.start.manifest)
        self.step = run.first_step
        self.takes_scores = resume_point.own and not (scored or resume_point.changed)
        if not scored or run.cfg.eval_only:
            return run.first_step, None
        return run.first_step, {"eval_loss": saved["eval_loss"]}

    def save(self, step: int, log: RunLog) -> None:
        """Saves a step, or begins to, unless it is saved already."""
        run = self.run
        if step == self.step:
            return
        manifest = {**run.start.manifest, "step": step, "samples": run.samples(step)}
        manifest |= {"processes": self.accelerator.num_processes, "best": self.best}
        if isinstance(run.start.views[0], Stream):
            manifest["lanes"] = run.gather_lanes()
        began = time.perf_counter()
        with run.meter.paused():
            self.commit(manifest)
        self.step, self.takes_scores = step, True
        more = {"in_background": True} if self.asynchronous else {}  # it may still fail
        log.note(save_seconds=time.perf_counter() - began, **more)
        if not self.asynchronous:
            self.note_saved(step)

    def note_saved(self, step: int) -> None:
        """Writes into the status that a checkpoint of this step is there."""
        if self.main:
            run_folder.write_status(self.run.output, "running", saved=step)

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
            if self.main and found:
                self.run.start.lock.check_folder()
                folder = self.run.output / "checkpoints"
                failure = f"the scores of step {self.step} are not in its checkpoint"
                attempt(failure, checkpoints.add_to_manifest, folder, self.step, found)

    def commit(self, manifest: dict) -> None:
        """Commits a checkpoint, or begins to, once the last one is done. All processes must call
        it. An error in the background is `run.problem`; `wait` and the next save raise it."""
        self.wait()
        share = None
        if not self.ranks.layout.deepspeed:
            with self.ranks.fail_together():
                tensors, manifest["others"] = self.state.collect()
            share = tensor_files.take_share(tensors, self.ranks)
        if not self.asynchronous:
            self.write(self.ranks, share, manifest)
            return
        with self.ranks.fail_together():
            self.host = share.parts = host_copies(share.parts, self.host)
        self.thread = threading.Thread(
            target=self.write_in_background, args=(share, manifest), name=SAVE_THREAD, daemon=True
        )
        self.thread.start()

    def write_in_background(self, share: tensor_files.Share, manifest: dict) -> None:
        began = time.perf_counter()
        _, self.run.problem = catch(self.write, self.thread_ranks, share, manifest)
        if not self.run.problem:
            seconds = time.perf_counter() - began
            self.done.append({"committed_step": manifest["step"], "commit_seconds": seconds})

    def write(self, ranks: Ranks, share: tensor_files.Share | None, manifest: dict) -> None:
        """All processes write their shares, then the main process makes the checkpoint valid."""
        partial = self.run.output / "checkpoints" / f".step-{manifest['step']:08d}.partial"
        try:
            with ranks.fail_together():
                parts = share.parts if share else deepspeed.partitions(self.state.optimizer)
                self.state.check_finite(parts)
                if self.main:
                    self.run.start.lock.check_folder()
                    checkpoints.make_partial_folder(partial)
            with ranks.fail_together(), checkpoints.report_full_disk(partial):
                if share:
                    tensor_files.write_share(share, partial)
                else:
                    self.accelerator.save_state(partial, exclude_frozen_parameters=True)
            with ranks.fail_together():
                layout = ranks.layout
                hashed = checkpoints.hash_files(partial, layout.rank, layout.processes)
            files = {name: about for each in ranks.gather(hashed) for name, about in each.items()}
            with ranks.fail_together():
                if self.main:
                    committed = checkpoints.commit(partial, manifest, files)
                    best = manifest["best"] and manifest["best"][0]
                    checkpoints.prune(committed, self.run.cfg.keep_checkpoints, best)
        finally:
            if self.main:  # frees the space of what did not become a checkpoint
                shutil.rmtree(partial, ignore_errors=True)

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
        if log.lines:
            log.lines.close()

    def load_best(self) -> int | None:
        """Loads the weights with the smallest eval_loss; their step, None if there are none."""
        run, found = self.run, (None, {}, "")
        is_newest = self.best is not None and self.best[0] == self.step  # it is loaded
        with self.ranks.fail_together():
            if self.main and not is_newest:
                found = checkpoints.find_best(run.output / "checkpoints", self.best)
        path, saved, lost = self.ranks.from_main(found)
        if lost:
            print_on_main(f"{lost}: the last model is exported, not the best")
            return None
        if path:
            with self.ranks.fail_together():
                self.state.load_weights(path, saved, run.start.manifest)
        assert self.best is not None
        step, loss = self.best
        print_on_main(f"the best evaluation was that of step {step}: {loss:.5g}")
        return step


def host_copies(
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
