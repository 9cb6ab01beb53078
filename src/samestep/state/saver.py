"""Commits checkpoints of a run."""

import functools
import shutil
from pathlib import Path
from typing import Any

from samestep.base import run_folder
from samestep.base.errors import attempt
from samestep.base.run_folder import RunLock
from samestep.processes import alike
from samestep.processes.ranks import Ranks
from samestep.state import checkpoints, deepspeed, state_hash, tensor_files
from samestep.state.weights import TrainingState


class Saver:
    """Commits checkpoints of the weights and of the optimizer's state in `output`/checkpoints.

    All processes call its methods together. `manifest`: the entries that all checkpoints have.
    `lock`: that of the run folder, on the main process.
    """

    def __init__(
        self, output: Path, ranks: Ranks, state: TrainingState, manifest: dict, keep: int,
        lock: RunLock | None,
    ):  # fmt: skip
        self.output, self.folder, self.ranks = output, output / "checkpoints", ranks
        self.state, self.manifest, self.keep, self.lock = state, manifest, keep, lock
        self.main = ranks.layout.rank == 0
        self.keep_every = 0  # steps between checkpoints that are kept for good
        self.step = 0  # of the newest checkpoint
        self.saved: dict = {}  # the manifest of the checkpoint from which the run resumes
        self.previous = ""  # its entry in the chain: see state_hash.chain_hash
        self.hashed: dict[str, Any] = {}  # the hash of its state, and the seconds that it took

    def about(self, step: int) -> dict[str, Any]:
        """The manifest of a checkpoint of this step."""
        return {**self.manifest, "step": step, "samples": self.samples(step)}

    def samples(self, step: int) -> int:
        """Samples of the run up to the end of this step."""
        size = self.manifest["config"]["global_batch_size"]
        return checkpoints.samples_at(step, self.saved, size)

    def restore(self, path: Path, saved: dict) -> None:
        """Restores a checkpoint, which has the manifest `saved`."""
        with self.ranks.fail_together():
            self.state.load(path, saved, self.manifest)
        self.saved, self.step = saved, saved["step"]
        self.previous = state_hash.chain_hash(saved)

    def save_step(self, step: int) -> None:
        """Saves this step, unless it is saved already."""
        if step != self.step:
            self.write(self.ranks, *self.collect(step))
            self.step = step
            self.note_saved(step)

    def collect(self, step: int) -> tuple[tensor_files.Share | None, dict]:
        """What this process writes of a step, and the manifest of the checkpoint."""
        alike.check_alike(self.ranks, self.state.module, f"after step {step}")
        manifest, share = self.about(step), None
        if not self.ranks.layout.deepspeed:  # which writes what it holds
            with self.ranks.fail_together():
                tensors, manifest["others"] = self.state.collect()
            share = tensor_files.take_share(tensors, self.ranks)
        return share, manifest

    def write(self, ranks: Ranks, share: tensor_files.Share | None, manifest: dict) -> None:
        """All processes write their shares, then the main process makes the checkpoint valid."""
        partial = self.folder / f".step-{manifest['step']:08d}.partial"
        try:
            with ranks.fail_together():
                parts = share.parts if share else deepspeed.partitions(self.state.optimizer)
                self.state.check_finite(parts)
                if self.lock:
                    self.lock.check_folder()
                if self.main:
                    checkpoints.make_partial_folder(partial)
            with ranks.fail_together(), checkpoints.report_full_disk(partial):
                if share:
                    tensor_files.write_share(share, partial)
                else:
                    self.state.accelerator.save_state(partial, exclude_frozen_parameters=True)
            with ranks.fail_together(), checkpoints.report_full_disk(partial):
                layout = ranks.layout
                hashed = checkpoints.hash_files(partial, layout.rank, layout.processes)
            files = {name: about for each in ranks.gather(hashed) for name, about in each.items()}
            # DeepSpeed's files have no hash of the state.
            self.hashed = state_hash.describe_state(partial, [*files] if share else [], ranks)
            manifest |= {"state": self.hashed["state"], "previous": self.previous}
            with ranks.fail_together():
                if self.main:
                    committed = checkpoints.commit(partial, manifest, files)
                    best = manifest.get("best") or [None]
                    kept = self.keep, best[0], self.keep_every
                    attempt("older checkpoints stay", checkpoints.prune, committed, *kept)
            self.previous = state_hash.chain_hash(manifest)
        finally:
            if self.main:  # frees the space of what did not become a checkpoint
                shutil.rmtree(partial, ignore_errors=True)

    def note_saved(self, step: int) -> None:
        """Writes into the status that a checkpoint of this step is there."""
        if self.main:
            failure = "status.json does not have the newest checkpoint"
            attempt(failure, functools.partial(run_folder.write_status, self.output, saved=step))
