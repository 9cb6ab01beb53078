"""The fields that every run has. Those that decide the mathematics are in train.py."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from samestep.base.fields import NOTHING, ROUNDING, NonNegativeInt, PositiveFloat, PositiveInt
from samestep.settings.config import ONE_COMMAND, UNSAVED

Workers = Annotated[int, Field(ge=0, le=256)]
Seconds = Annotated[int, Field(ge=1, le=31_536_000)]  # a year


@dataclass
class RunConfig:
    """The folder of a run, what one start does, trackers, and how the hardware is used."""

    # Run
    output_dir: str = field(default="", metadata=NOTHING)
    """Folder of the run; empty: runs/ and the recipe's file name."""
    resume: str = field(default="auto", metadata=UNSAVED)
    """auto: resume from the newest checkpoint in output_dir; or never; or a checkpoint's path."""
    accept_changes: bool = field(default=False, metadata=ONE_COMMAND)
    """Resume from a checkpoint although data or settings that affect the result have changed."""
    check: bool = field(default=False, metadata=ONE_COMMAND)
    """Check everything that needs no model, show a row, a batch and the result, and stop."""
    json: bool = field(default=False, metadata=ONE_COMMAND)
    """With check: print the answer as one JSON object; its lines go to standard error."""
    eval_only: bool = field(default=False, metadata=ONE_COMMAND)
    """Evaluate the newest checkpoint (with export best: the best), or the one that resume names."""
    timeout: Seconds = field(default=1800, metadata=NOTHING)
    """Seconds that a process waits for the others before the run ends with an error."""

    # Length and batches
    device_shares: Literal["equal", "auto"] | list[PositiveFloat] = field(
        default="equal", metadata=NOTHING
    )
    """How the micro-batches of a step are assigned to the processes: equal; a list with the speed
    of each, such as [2, 1]; or auto, by speeds that are measured at each start. Results stay the
    same to rounding, with exact to the last bit."""
    num_workers: Workers | None = field(default=None, metadata=NOTHING)
    """Worker processes that load data for each training process; 0: it loads its own data; null: up
    to 4 on a GPU for a task that augments its rows, otherwise 0."""

    # Optimizer
    max_skipped_steps: NonNegativeInt = field(default=10, metadata=NOTHING)
    """Steps in a row that may be skipped because their loss or gradient is not finite; then the run
    ends. 0: any number."""

    # Evaluation and checkpoints
    keep_checkpoints: NonNegativeInt = field(default=2, metadata=NOTHING)
    """Newest checkpoints to keep, besides the one with the best eval_loss; 0: all."""
    keep_every: NonNegativeInt = field(default=0, metadata=NOTHING)
    """Keep each checkpoint whose step is a multiple of this for good; give a multiple of
    save_every. 0: none."""
    async_save: bool = field(default=False, metadata=NOTHING)
    """Write checkpoints in the background: training waits only for a copy to host memory, which
    takes as much memory as the checkpoint. Not with DeepSpeed."""
    mirror: str = field(default="", metadata=NOTHING)
    """URL of a copy of output_dir that outlives the machine, as s3://bucket/runs/mine: each save is
    copied there behind training, and a start takes the newest valid checkpoint of both."""
    mirror_grace: Seconds = field(default=25, metadata=NOTHING)
    """Seconds after a signal in which the checkpoint of a stop is copied to the mirror."""

    check_export: bool = field(default=False, metadata=NOTHING)
    """Load the exported model by transformers, and compare its outputs with those of the trained
    one, or its tensors: a few seconds, and a line in the model card."""

    # Logging
    tracker: Literal["wandb", "trackio", "tensorboard", "none"] = field(
        default="none", metadata=NOTHING
    )
    """Where metrics go besides metrics.jsonl."""
    project: str = field(default="accelerate", metadata=NOTHING)
    """The tracker's project."""
    offline: bool = field(default=False, metadata=NOTHING)
    """W&B: send nothing; `wandb sync` uploads the run later. (Without a key, nothing is sent.)"""
    upload_code: bool = field(default=False, metadata=NOTHING)
    """W&B: also upload the code, the git commit and the uncommitted changes."""
    profile_steps: list[PositiveInt] | None = field(default=None, metadata=NOTHING)
    """First and last step to profile, such as [10, 13]; with [10, 13, 1000] again every 1000 steps.
    Writes traces, memory and a table of the longest operations into profile/ in the run folder."""

    # Speed, memory and determinism
    find_unused_parameters: bool = field(default=False, metadata=ROUNDING)
    """DDP: allow weights that some rows do not use. Costs a walk over the graph in each step."""
    tf32: bool = field(default=False, metadata=ROUNDING)
    """On a GPU in fp32: round the inputs of matrix products and convolutions to TF32, which is much
    faster and keeps 3 digits."""
    deterministic: bool = False
    """On a GPU: slower kernels; a resumed run is then bitwise identical to an uninterrupted one."""
