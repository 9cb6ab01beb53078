"""Saves checkpoints, while training waits or in the background, and continues from them."""

import math
import shutil
import threading
import time
from typing import Any

import torch

from samestep.base import run_folder
from samestep.base.console import print_on_main
from samestep.base.errors import catch
from samestep.checkpoint import checkpoints, tensor_files
from samestep.checkpoint.weights import TrainingState
from samestep.processes.ranks import SAVE_THREAD, Ranks, as_user_error
from samestep.settings.contract import Stream
from samestep.step import deepspeed
from samestep.training.log import RunLog
from samestep.training.run import Run


class Saver:
    """Commits checkpoints of the weights and of the optimizer's state. With `async_save`, a save
    copies this process's share to host memory, and a thread writes, hashes and commits it."""

    def __init__(self, run: Run, model: torch.nn.Module, optimizer: Any):
        self.run, self.accelerator, self.ranks = run, run.accelerator, run.ranks
        self.main = run.accelerator.is_main_process
        self.state = TrainingState(run.accelerator, model, optimizer, run.optimizer_settings)
        self.step = 0  # of the newest checkpoint of this run
        self.scored = False  # whether it holds the scores of its step
        self.best_loss = run.resume_point.best_loss
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
        with self.ranks.fail_together(), as_user_error():
            if checkpoint:
                self.state.load(checkpoint, saved, run.start.manifest)
            elif self.main:  # AdamW will keep two moments of each weight
                folder = run.output / "checkpoints"
                checkpoints.check_disk_space(folder, 3 * run.trained_bytes)
        self.thread_ranks = self.ranks.for_thread() if self.asynchronous else self.ranks
        if not checkpoint:
            return 0, None
        print_on_main(f"{'evaluating' if run.cfg.eval_only else 'continuing from'} {checkpoint}")
        same = run.resume_point.same_validation(run.start.manifest)
        self.step, self.scored = run.first_step, same and "eval_loss" in saved
        known = self.scored and not run.cfg.eval_only
        return run.first_step, {"eval_loss": saved["eval_loss"]} if known else None

    def should_save(self, step: int, scores: dict | None) -> bool:
        """Whether these are the best scores so far, or the checkpoint of this step lacks them."""
        best = self.run.cfg.export == "best" and scores and scores["eval_loss"] < self.best_loss
        return bool(best or (scores and step == self.step and not self.scored))

    def save(self, step: int, scores: dict | None, log: RunLog) -> None:
        """Saves a step, or begins to. A step that is saved already only gets its scores."""
        run, found = self.run, {"eval_loss": scores["eval_loss"]} if scores else {}
        if run.cfg.eval_only:
            return
        if step == self.step:
            self.add_scores(found)
            return
        numbers = {"samples": run.samples(step), "processes": self.accelerator.num_processes}
        if isinstance(run.start.views[0], Stream):
            numbers["lanes"] = run.gather_lanes()
        began = time.perf_counter()
        with run.meter.paused():
            self.commit({**run.start.manifest, "step": step, **numbers, **found})
        self.best_loss = min([self.best_loss, *found.values()])
        self.step, self.scored = step, bool(found)
        more = {"in_background": True} if self.asynchronous else {}  # it may still fail
        log.note(save_seconds=time.perf_counter() - began, **more)

    def add_scores(self, found: dict) -> None:
        """Adds scores to the newest checkpoint, if it is of this run."""
        resume_point, folder = self.run.resume_point, self.run.output / "checkpoints"
        if self.scored or not found:
            return
        goes_on = self.step == self.run.first_step  # nothing was saved since
        if goes_on and (resume_point.changed or resume_point.checkpoint.parent != folder):
            return
        self.wait()
        self.best_loss, self.scored = min([self.best_loss, *found.values()]), True
        with self.ranks.fail_together():
            if self.main:
                path = checkpoints.checkpoint_folder(folder, self.step)
                checkpoints.write_manifest(path, checkpoints.read_manifest(path) | found)

    def commit(self, manifest: dict) -> None:
        """Commits a checkpoint, or begins to, once the last one is done. All processes must call
        it. An error in the background is `run.problem`; `wait` and the next save raise it."""
        self.wait()
        share = None
        if not self.ranks.layout.deepspeed:
            with self.ranks.fail_together(), as_user_error():
                tensors = self.state.collect()
            share = tensor_files.take_share(tensors, self.ranks)
        if not self.asynchronous:
            self.write(self.ranks, share, manifest)
            return
        with self.ranks.fail_together(), as_user_error():
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
            with ranks.fail_together(), as_user_error():
                parts = share.parts if share else deepspeed.partitions(self.state.optimizer)
                self.state.check_finite(parts)
                if self.main:
                    self.run.start.lock.check_folder()
                    checkpoints.make_partial_folder(partial)
            with ranks.fail_together(), as_user_error(), checkpoints.report_full_disk(partial):
                if share:
                    tensor_files.write_share(share, partial)
                else:
                    self.accelerator.save_state(partial, exclude_frozen_parameters=True)
            with ranks.fail_together():
                layout = ranks.layout
                hashed = checkpoints.hash_files(partial, layout.rank, layout.processes)
            files = {name: about for each in ranks.gather(hashed) for name, about in each.items()}
            with ranks.fail_together(), as_user_error():
                if self.main:
                    committed = checkpoints.commit(partial, manifest, files)
                    checkpoints.prune(committed, self.run.cfg.keep_checkpoints)
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

    def log_commits(self, log: RunLog) -> None:
        """Writes a line about each save in the background that is now done."""
        while self.done:
            log.note(**self.done.pop(0))

    def finish(self, log: RunLog) -> None:
        """Waits for the last save, and closes the log."""
        self.wait()
        self.log_commits(log)
        if log.lines:
            log.lines.close()

    def load_best(self) -> int | None:
        """Loads the weights with the smallest eval_loss; their step, None if there are none."""
        run, best, loss, saved, lost = self.run, None, math.inf, {}, []
        with self.ranks.fail_together(), as_user_error():
            if self.main:
                folder = run.output / "checkpoints"
                best, loss, _ = checkpoints.find_best(folder, run.start.manifest)
                saved = checkpoints.verify(best) if best else {}
                lost = run_folder.lost_best(run.output, loss)
        best, loss, saved = self.ranks.from_main((best, loss, saved))
        for line in lost:
            print_on_main(line)
        if best is None:
            print_on_main(
                "no checkpoint has a finite eval_loss: the last model is exported, not the best"
            )
            return None
        with self.ranks.fail_together(), as_user_error():
            self.state.load_weights(best, saved, run.start.manifest)
        step = checkpoints.step_of(best)
        which = "the best checkpoint left" if lost else "the best evaluation"
        print_on_main(f"{which} was that of step {step}: {loss:.5g}")
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
