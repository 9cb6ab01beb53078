"""Saves checkpoints: while training waits, or in the background while it goes on."""

import contextlib
import mmap
import shutil
import threading
import time

import numpy as np
import torch

from training import checkpoints, tensor_files
from training.layout import this_layout
from training.ranks import SAVE_THREAD, Ranks, as_user_error
from training.startup import RunStart
from training.tracking import Log
from training.weights import TrainingState

ALIGNMENT = 64  # bytes, of each tensor in host memory


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
        self.host = HostCopies()
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
            share.parts = self.host.copy(share.parts)
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


class HostCopies:
    """Copies of tensors in one piece of host memory, which later copies of the same shapes reuse.

    For a GPU it is pinned: such memory is fast to copy to, and slow to allocate. torch would round
    its size up to a power of two (pytorch#150517).
    """

    def __init__(self):
        self.memory = np.empty(0, np.uint8)
        self.copies: dict[str, torch.Tensor] = {}
        self.shapes: dict[str, tuple] = {}  # and dtypes, by name
        self.pinned = False

    def copy(self, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies that are valid until the next call."""
        on_gpu = any(part.is_cuda for part in parts.values())
        shapes = {name: (part.shape, part.dtype) for name, part in parts.items()}
        if shapes != self.shapes:
            self.allocate(parts, on_gpu)
            self.shapes = shapes
        for name, part in parts.items():
            self.copies[name].copy_(part, non_blocking=part.is_cuda)
        if on_gpu:
            torch.cuda.synchronize()
        return self.copies

    def allocate(self, parts: dict[str, torch.Tensor], on_gpu: bool) -> None:
        """Makes room for copies of these tensors, in place of the old ones."""
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self.memory.ctypes.data)
        self.copies, self.memory, self.pinned = {}, np.empty(0, np.uint8), False  # frees the old
        sizes = [-(-part.nbytes // ALIGNMENT) * ALIGNMENT for part in parts.values()]
        pages = mmap.mmap(-1, max(sum(sizes), 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory, start = np.frombuffer(pages, np.uint8), 0
        for (name, part), size in zip(parts.items(), sizes, strict=True):
            # Storages of their own: of several views of one, write_share makes copies.
            piece = torch.from_numpy(self.memory[start : start + part.nbytes])
            self.copies[name] = piece.view(part.dtype).view(part.shape)
            start += size
        if on_gpu:
            pages.madvise(mmap.MADV_DONTFORK)  # copy-on-write would part them from the GPU
            self.pinned = pin(self.memory)


def pin(memory: np.ndarray) -> bool:
    """Pins memory; False where the system does not allow it, and copies to it are slower."""
    if int(torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 1)) == 0:
        return True
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")  # takes CUDA's error, which the next kernel would raise
    return False
