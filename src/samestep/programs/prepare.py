"""Prepares the data, and no more: on a machine without a GPU, before the training.

    python -m samestep prepare
    python -m samestep prepare --config configs/train/default.yaml --task.cache_dir /shared/cache
    make prepare RECIPE=default ARGS="--task.cache_dir /shared/cache"
    python -m samestep prepare --verify                  reads all that is there, and compares it
    python -m samestep prepare --prune                   removes data that no run here names

It takes the recipe and the flags of train.py, and calls the same function of task.py. It makes no
run folder. Data that is there is only checked. Interrupted, it starts again.

Exit codes: 0 the data is there; 2 the input is wrong; 75 stopped on request.
"""

import shutil
import sys
from pathlib import Path

from samestep.base.console import print_on_main
from samestep.base.files import read_json_object
from samestep.hardware.project import read_project
from samestep.launch import shutdown
from samestep.prepared import prepared
from samestep.text.lanes import ShardStream


def prepare() -> None:
    """Prepares the data, and prints what is there in a line; raises ValueError for bad input."""
    own = ("--verify", "--prune")
    project = read_project([word for word in sys.argv[1:] if word not in own], __doc__)
    folder = getattr(project.data, "folder", project.data)
    verifies = "--verify" in sys.argv and hasattr(project.data, "folder")
    if verifies and not prepared.is_intact(folder, verify=True):
        raise ValueError(f"{folder} is damaged: start again without --verify to prepare it anew")
    if "--prune" in sys.argv and isinstance(folder, Path):
        prune(folder)
    where = f" in {folder}" if isinstance(folder, Path) else ""
    train, validation = project.views
    rows = f"{len(train):,} rows to train on"
    if isinstance(train, ShardStream):
        rows = f"a stream of {len(train.shards):,} shards to train on"
    print_on_main(f"prepared{where}: {rows}, {len(validation):,} to evaluate on")


def prune(kept: Path) -> None:
    """Removes the prepared folders beside this one that no manifest in runs/ names, and says so.

    A manifest also names those of earlier steps of its run, in its history.
    """
    named = {kept.name}
    for manifest in map(read_json_object, Path("runs").rglob("manifest.json")):
        named |= {each.get("prepared") for each in [manifest, *manifest.get("history", [])]}
    for folder in sorted(kept.parent.iterdir()):
        if (folder / "prepared.json").is_file() and folder.name not in named:
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            shutil.rmtree(folder)
            print_on_main(f"removed {folder}: {size / 1e6:,.1f} MB")


def main() -> None:
    """Runs the program: one line for bad input, and the exit codes above."""
    shutdown.run_alone(prepare)
