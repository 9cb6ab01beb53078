"""Saves checkpoints: while training waits, or in the background while it goes on."""

import shutil
import threading
import time

import torch

from training import checkpoints, tensor_files
from training.layout import this_layout
from training.ranks import SAVE_THREAD, Ranks, as_user_error
from training.startup import RunStart
from training.tracking import Log
from training.weights import TrainingState


class Saver:
    """Commits checkpoints of the tensors of a TrainingState.

    With `async_save`, a save copies this process's share of them to host memory, and a thread
    writes, hashes and commits it. At most one save is in flight.
    """

    def __init__(self, accelerator, ranks: Ranks, start: RunStart, state: TrainingState):
        self.accelerator, self.ranks, self.start, self.state = accelerator, ranks, start, state
        self.main = accelerator.is_main_process
        self.thread: threading.Thread | None = None
        self.problem: Exception | None = None  # of the last save in the background
        # Of each save in the background that is done: its step and seconds, until they are logged.
        self.done: list[tuple[int, float]] = []
        self.host: dict[str, torch.Tensor] = {}  # copies of the share, which are used again
        self.asynchronous = start.cfg.async_save
        self.thread_ranks = ranks.for_thread() if self.asynchronous else ranks

    def save(self, manifest: dict) -> None:
        """Commits a checkpoint, or begins to. All processes must call it.

        An error on one process ends all of them; older checkpoints stay. An error in the background
        is `problem`; `finish` and the next `save` raise it.
        """
        self.finish()
        share = None
        if not this_layout().deepspeed:
            with self.ranks.fail_together(), as_user_error():
                tensors = self.state.collect()
            share = tensor_files.take_share(tensors, self.ranks)
        if not self.asynchronous:
            self.write(self.ranks, share, manifest)
            return
        with self.ranks.fail_together(), as_user_error():
            share.parts = self.host = copy_to_host(share.parts, self.host)
        target, arguments = self.write_in_background, (share, manifest)
        self.thread = threading.Thread(target=target, args=arguments, name=SAVE_THREAD, daemon=True)
        self.thread.start()

    def write_in_background(self, share: tensor_files.Share, manifest: dict) -> None:
        """The body of the thread."""
        began = time.perf_counter()
        try:
            self.write(self.thread_ranks, share, manifest)
            self.done.append((manifest["step"], time.perf_counter() - began))
        except Exception as error:
            self.problem = error

    def write(self, ranks: Ranks, share: tensor_files.Share | None, manifest: dict) -> None:
        """All processes write their shares, then the main process makes the checkpoint valid."""
        partial = checkpoints.partial_folder(self.start.output / "checkpoints", manifest["step"])
        with ranks.fail_together(), as_user_error():
            self.state.check_finite(share.parts if share else self.state.partitions())
        try:
            with ranks.fail_together(), as_user_error():
                if self.main:
                    self.start.check_folder()
                    checkpoints.make_partial_folder(partial)
            with ranks.fail_together(), as_user_error(), checkpoints.report_full_disk(partial):
                if share:
                    tensor_files.write_share(share, partial)
                else:
                    self.accelerator.save_state(partial, exclude_frozen_parameters=True)
            with ranks.fail_together():
                layout = this_layout()
                hashed = checkpoints.hash_files(partial, layout.rank, layout.processes)
            digests = {
                name: digest for each in ranks.gather(hashed) for name, digest in each.items()
            }
            with ranks.fail_together(), as_user_error():
                if self.main:
                    committed = checkpoints.commit(partial, manifest, digests)
                    checkpoints.prune(committed, self.start.cfg.keep_checkpoints)
        finally:
            if self.main:  # frees the space of what did not become a checkpoint
                shutil.rmtree(partial, ignore_errors=True)

    def finish(self) -> None:
        """Waits for a save in the background, and raises its error. All processes must call it."""
        if self.asynchronous:
            if self.thread:
                self.thread.join()
            self.thread = None
            self.ranks.raise_everywhere(self.problem)

    def log_commits(self, log: Log, step: int) -> None:
        """Writes a line for each save in the background that is now done."""
        while self.done:
            committed, seconds = self.done.pop(0)
            log.write({"step": step, "committed_step": committed, "commit_seconds": seconds})


def copy_to_host(
    parts: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Copies of tensors in host memory, in these buffers where they fit.

    For a GPU they are pinned: such memory is fast to copy to, and slow to allocate.
    """
    copies = {}
    for name, part in parts.items():
        buffer = buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (part.shape, part.dtype):
            buffer = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
        copies[name] = buffer.copy_(part, non_blocking=part.is_cuda)
    if any(part.is_cuda for part in parts.values()):
        torch.cuda.synchronize()
    return copies
