"""Commits checkpoints of a run, in the background if it is to, with their scores."""

import functools
import math
import threading
import time
from pathlib import Path
from typing import Any

import torch

from samestep.base import run_folder
from samestep.base.console import print_on_main
from samestep.base.errors import attempt, catch
from samestep.base.run_folder import RunLock
from samestep.processes.ranks import SAVE_THREAD, Ranks
from samestep.state import checkpoints, deepspeed, state_hash, tensor_files
from samestep.state.mirror import Mirror
from samestep.state.weights import TrainingState


class Saver:
    """Commits checkpoints of the weights and of the optimizer's state in `output`/checkpoints.

    All processes call its methods together.

    output: the folder of the run. lock: that of the folder, on the main process.
    state: what a checkpoint holds. manifest: the entries that all checkpoints have.
    keep, keep_every: which checkpoints stay, see checkpoints.prune.
    mirror: where they are copied to.
    in_background: whether a thread writes, hashes and commits a copy in host memory.
    """

    def __init__(
        self, output: Path, ranks: Ranks, state: TrainingState, manifest: dict,
        lock: RunLock | None, mirror: Mirror, *, keep: int, keep_every: int = 0,
        in_background: bool = False,
    ):  # fmt: skip
        self.output, self.folder, self.ranks = output, output / "checkpoints", ranks
        self.state, self.manifest, self.lock, self.mirror = state, manifest, lock, mirror
        self.keep, self.keep_every, self.in_background = keep, keep_every, in_background
        self.main = ranks.layout.rank == 0
        self.step = 0  # of the newest checkpoint
        self.previous = ""  # its entry in the chain: see state_hash.chain_hash
        self.hashed: dict[str, Any] = {}  # the hash of its state, and the seconds that it took
        self.best: list | None = None  # the step and the eval_loss of the best checkpoint
        self.takes_scores = False  # whether the newest is one of this run, and has no scores yet
        self.scores: dict = {}  # entries that the manifest of the newest is yet to get
        self.thread: threading.Thread | None = None
        self.thread_ranks = ranks.for_thread() if in_background else ranks
        self.problem: Exception | None = None  # of the thread
        self.committed: list[dict] = []  # lines about saves in the background, until logged
        self.host: dict[str, torch.Tensor] = {}  # copies of what is saved in the background

    def restore(self, path: Path, saved: dict) -> None:
        """Restore a checkpoint, which has the manifest `saved`."""
        with self.ranks.fail_together():
            self.state.load(path, saved, self.manifest)
        self.step = saved["step"]
        self.previous = state_hash.chain_hash(saved)

    # ---- A checkpoint

    def save(self, step: int, samples: int, lanes: list[int] | None = None) -> dict[str, Any]:
        """Save this step, or begin to, once the last one is saved; return entries for its line.

        samples: of the run up to its end. lanes: the last sample of each lane of a stream.
        """
        self.wait()
        tensors, entries = self.state.collect(step)
        manifest = {**self.manifest, "step": step, "samples": samples, "best": self.best, **entries}
        if lanes is not None:
            manifest["lanes"] = lanes
        share = None  # DeepSpeed writes what it holds
        if not self.ranks.layout.deepspeed:
            with self.ranks.fail_together():
                share = tensor_files.take_share(tensors, self.ranks, self.state.alone)
            if self.ranks.layout.stages == 1:  # else each knows the tensors of its stage
                manifest["tensors"] = share.index
        if not self.in_background:
            self.write(self.ranks, share, manifest)
            self.note_saved(step)
            self.step, self.takes_scores = step, True
            return self.hashed
        assert share
        with self.ranks.fail_together():
            self.host = share.parts = _host_copies(share.parts, self.host)
        self.step, self.takes_scores = step, True
        self.thread = threading.Thread(
            target=self.write_in_background, args=(share, manifest), name=SAVE_THREAD, daemon=True
        )
        self.thread.start()
        return {"in_background": True}  # it may still fail

    def write(self, ranks: Ranks, share: tensor_files.Share | None, manifest: dict) -> None:
        """Write the shares of all processes; then the main process makes the checkpoint valid."""
        with ranks.fail_together():
            parts = share.parts if share else deepspeed.partitions(self.state.optimizer)
            self.state.check_finite(parts)
            if self.lock:
                self.lock.check_folder()
            self.mirror.check()
        with checkpoints.writing(self.folder, manifest["step"], ranks) as partial:
            with ranks.fail_together(), checkpoints.report_full_disk(partial):
                if share:
                    tensor_files.write_share(share, partial)
                else:
                    self.state.accelerator.save_state(partial, exclude_frozen_parameters=True)
            with ranks.fail_together(), checkpoints.report_full_disk(partial):
                number, count = ranks.place_in_node
                own = share.files if share else checkpoints.list_files(partial)[number::count]
                hashed = checkpoints.hash_files(partial, own)
            node = ranks.nodes[ranks.layout.rank]
            found = {}
            for name, each in hashed.items():
                found[name] = node, each["bytes"], bytes.fromhex(each["sha256"])
            found = ranks.union(found)
            if any(ranks.nodes):  # the first of each node writes the manifest
                found, manifest = ranks.from_main((found, manifest))
            files = {n: {"bytes": size, "sha256": sha.hex()} for n, (_, size, sha) in found.items()}
            here = {name: files[name] for name, (place, *_) in found.items() if place == node}
            # DeepSpeed's files have no hash of the state.
            own = own if share else None
            self.hashed = state_hash.describe_state(partial, own, ranks, manifest)
            entries = {n: value for n, value in self.hashed.items() if n != "hash_seconds"}
            manifest |= {**entries, "previous": self.previous}
            if any(ranks.nodes):  # each has what its processes wrote
                manifest["folders"] = len({*ranks.nodes})
            is_first = ranks.place_in_node[0] == 0
            with ranks.fail_together():
                if is_first:
                    committed = checkpoints.commit(partial, manifest, files, here)
            held = self.mirror.hold(manifest["step"], ranks)
            best = manifest.get("best") or [None]
            if is_first:
                kept = self.keep, best[0], self.keep_every, held, not any(ranks.nodes)
                attempt("older checkpoints stay", checkpoints.prune, committed, *kept)
        self.previous = state_hash.chain_hash(manifest)

    def note_saved(self, step: int) -> None:
        """Write into the status that a checkpoint of this step is there."""
        if self.main:
            write = functools.partial(run_folder.write_status, self.output, saved=step)
            attempt("status.json does not have the newest checkpoint", write)

    # ---- In the background

    def write_in_background(self, share: tensor_files.Share, manifest: dict) -> None:
        """Write a checkpoint. Its error is `problem`; `wait` and the next step raise it."""
        began = time.perf_counter()
        _, self.problem = catch(self.write, self.thread_ranks, share, manifest)
        if not self.problem:
            seconds = time.perf_counter() - began
            line = {"committed_step": manifest["step"], "commit_seconds": seconds, **self.hashed}
            self.committed.append(line)

    def join(self) -> None:
        if self.thread:
            self.thread.join()
        self.thread = None

    def wait(self) -> None:
        """Wait for a save in the background, and raise its error. All processes must call it."""
        if self.in_background:
            self.join()
            self.ranks.raise_everywhere(self.problem)
            self.write_scores()

    def take_committed(self) -> list[dict]:
        """Return lines about the saves in the background, and the uploads, that are done."""
        lines, self.committed = self.committed, []
        for line in lines:
            self.note_saved(line["committed_step"])
        mirrored = self.mirror.take_notes()
        for line in mirrored:
            write = functools.partial(run_folder.write_status, mirrored_step=line["mirrored_step"])
            attempt("status.json was not written", write, self.output)
        return lines + mirrored

    # ---- Scores

    def add_scores(self, step: int, scores: dict) -> None:
        """Add the scores of a step to its checkpoint, if it has one. All processes must call it.

        A checkpoint that is being saved in the background gets them when it is done.
        """
        if step != self.step or not self.takes_scores or "eval_loss" not in scores:
            return
        loss = scores["eval_loss"]
        if math.isfinite(loss) and (self.best is None or loss < self.best[1]):
            self.best = [step, loss]
        self.takes_scores, self.scores = False, {"eval_loss": loss, "best": self.best}
        if not self.in_background:
            self.write_scores()

    def write_scores(self) -> None:
        """Write the scores of the newest checkpoint into its manifest."""
        entries, self.scores = self.scores, {}
        with self.ranks.fail_together():
            if self.lock and entries:
                self.lock.check_folder()
                failure = f"the scores of step {self.step} are not in its checkpoint"
                attempt(failure, checkpoints.add_to_manifest, self.folder, self.step, entries)
                self.mirror.push(self.step)

    def load_best(self) -> int | None:
        """Load the weights with the smallest eval_loss; return their step, None without any."""
        best: Any = (None, {}, "")
        is_newest = self.best is not None and self.best[0] == self.step  # it is loaded
        if self.best and not is_newest:
            self.mirror.bring(self.best[0])
        with self.ranks.fail_together():
            if self.main and not is_newest:
                best = checkpoints.find_best(self.folder, self.best)
        path, saved, lost = self.ranks.from_main(best)
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
    """Copy to host memory, that of the copies `before` where these have the same shapes: pinned for
    a GPU, whose allocation takes longer than the copy."""
    copies = {}
    for name, part in parts.items():
        copy = before.get(name)
        if copy is None or (copy.shape, copy.dtype) != (part.shape, part.dtype):
            copy = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
        copies[name] = copy.copy_(part, non_blocking=part.is_cuda)
    if any(part.is_cuda for part in parts.values()):
        torch.cuda.synchronize()
    return copies
