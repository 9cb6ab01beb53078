"""Where a run starts: its newest valid checkpoint, and what has changed since."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from accelerate import Accelerator

from samestep.base import run_folder
from samestep.base.console import print_on_main
from samestep.base.errors import catch
from samestep.base.files import read_text
from samestep.processes.ranks import Ranks
from samestep.state import checkpoints, provenance
from samestep.state.mirror import Mirror


@dataclass
class ResumePoint:
    """Where a run starts. The main process finds it, and tells the others."""

    checkpoint: Path | None = None  # to resume from
    in_folder: bool = False  # whether it lies in that of this run; a run may begin from another's
    saved: dict = field(default_factory=dict)  # its manifest
    best: list | None = None  # the step and the eval_loss of the best evaluation that was saved
    verified: bool = False  # whether all bytes of its files were
    micro_batch_size: int = 0  # that auto has found on this hardware; 0: none
    remarks: list[str] = field(default_factory=list)  # lines to print
    # Accepted changes of settings, and of code: what was before, and is now.
    changed: dict[str, list] = field(default_factory=dict)

    def find(
        self, output: Path, resume: str = "auto", evaluates: bool = False, hashed: bool = True,
        mirror: Mirror | None = None, check: Callable | None = None,
        broken: dict[Path, str] | None = None,
    ) -> None:  # fmt: skip
        """Find the checkpoint to start from: see checkpoints.find_checkpoint.

        evaluates: whether the run only evaluates. hashed: whether all bytes are verified.
        mirror: what is newer there comes into the folder. check: see Store.download.
        broken: see checkpoints.find_checkpoint.

        Raises ValueError where checkpoints exist but none can be used.
        """
        folder = output / "checkpoints"
        if output.exists() and not output.is_dir():
            raise ValueError(f"the folder of the run, {output}, is a file; give another")
        given = folder, resume, evaluates, hashed, broken
        result, problem = catch(checkpoints.find_checkpoint, *given)
        self.verified = hashed
        if mirror and not (problem and resume == "never"):
            is_here = result and result[0] and result[0].resolve().parent == folder.resolve()
            found, lines = mirror.fetch(result[1] if is_here else {}, check)
            self.remarks += lines
            if found:  # and verified; what is newer here is damaged
                place = checkpoints.checkpoint_folder(folder, found["step"])
                result, problem = (place, found, result[2] if result else []), None
                self.verified = True
            elif problem and mirror.url and checkpoints.are_parts(folder):
                self.remarks.append(f"{folder} has parts of checkpoints that the mirror never had")
                result, problem = (None, {}, []), None
        if problem:
            raise problem
        self.checkpoint, self.saved, passed_over = result
        self.remarks += [f"passed over: {reason}" for reason in passed_over]
        if self.checkpoint:
            self.in_folder = self.checkpoint.resolve().parent == folder.resolve()
        elif (output / "metrics.jsonl").exists() and not (output / "model").exists():
            self.remarks.append(f"{output} has no checkpoint yet: it begins again at step 1")

    def compare(
        self, manifest: dict, accept: bool, effects: dict, defaults: dict, project: Path | None
    ) -> None:
        """Note what has changed since the checkpoint; raise UserError for what must not change.

        manifest: that of this start. accept: whether changes of settings are accepted.
        effects, defaults: of each setting, see checkpoints.check_settings. project: the folder of
        the program.
        """
        if self.checkpoint:
            given = self.checkpoint, self.saved, manifest, effects, accept, defaults
            self.changed = checkpoints.check_settings(*given)
            self.changed |= provenance.changed_code(self.saved, manifest, project)
            lines = provenance.describe_changes(self.changed)
            self.remarks += [f"changed since the checkpoint: {line}" for line in lines]

    def say(self, hardware: dict) -> None:
        """Print the remarks, and what differs in the hardware of now."""
        for remark in self.remarks:
            print_on_main(remark)
        if line := provenance.hardware_line(self.saved.get("hardware", hardware), hardware):
            print_on_main(line)

    def find_size(self, output: Path, hardware: dict, sharded: bool) -> None:
        """Find the micro_batch_size of auto, as of the checkpoint, or of a start on this hardware
        that has saved nothing yet; add it to the hardware. The main process calls it.

        sharded: whether a start that ran out of memory has noted half of it.
        """
        written, _ = catch(lambda: yaml.safe_load(read_text(output / "hardware.yaml")))
        written = written if isinstance(written, dict) else {}
        known = [self.saved.get("hardware", {}), written]
        for before in reversed(known) if sharded else known:
            same = {name: before.get(name) for name in hardware} == hardware
            if same and not self.micro_batch_size:
                self.micro_batch_size = before.get("micro_batch_size", 0)
        if self.micro_batch_size:
            hardware["micro_batch_size"] = self.micro_batch_size

    def same_validation(self, manifest: dict) -> bool:
        """Return whether the checkpoint was evaluated on the rows of today, as settings say."""
        return True

    def write_running(self, output: Path) -> None:
        """Write into the status that this process runs; the main process calls it."""
        saved = self.saved.get("step", 0) if self.in_folder else 0
        before = {} if saved else {"noticed": {}}
        run_folder.write_status(output, "running", saved=saved, **before)


def find_together(
    ranks: Ranks, mirror: Mirror, find: Callable[[dict[Path, str]], ResumePoint]
) -> Any:
    """Return where the run starts, as the main process finds it, once all have verified its files:
    each hashes its share. All processes call it.

    find: finds it, without checkpoints that are known to be broken, and why.
    """
    broken: dict[Path, str] = {}
    while True:
        point = ResumePoint()
        with ranks.fail_together():
            if ranks.layout.rank == 0:
                point = find(broken)
        point = ranks.from_main(point)
        mirror.find_nodes(ranks)
        if not point.checkpoint or point.verified:
            return point
        reason = checkpoints.verify_together(point.checkpoint, point.saved["files"], ranks)
        if not reason:
            return point
        broken[point.checkpoint] = reason


def describe_run(accelerator: Accelerator, step: str, kept: str = "") -> str:
    """Say what runs on what. `step`: its samples as a product. `kept`: of the weights."""
    precision = accelerator.mixed_precision.replace("no", "fp32")
    return (
        f"{accelerator.num_processes} x {accelerator.device.type}, {precision}, {kept}"
        f"distributed: {accelerator.distributed_type.value}; a step of {step}"
    )
