"""Trains each task in fp32 and in mixed precision: speed, memory, and the difference of losses.

    make bench-precision                                         # in the template: a table, a .json
    python benchmarks/precision.py --tasks seq2seq --steps 20
    python benchmarks/precision.py --mixed fp16 --name precision-gpu      # on a GPU

A row is a call of `samestep hardware precision` in a project of the task, with its smallest recipe.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import compare
from compare import HERE, say

TASKS = ("causal_lm", "text_classification", "image_classification", "seq2seq", "preference")


def measure(task: str, asked: argparse.Namespace) -> dict:
    """What `samestep hardware precision` finds in a project of this task."""
    folder = Path(tempfile.mkdtemp(prefix="bench"))
    try:
        project = compare.bake(folder, task=task, tracker="none")
        command = [sys.executable, "-m", "samestep", "hardware", "precision"]
        command += ["--config", "configs/train/smoke.yaml", "--mixed", asked.mixed]
        command += ["--steps", str(asked.steps), "--micro_batch_size", "8"]
        env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        found = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True)
        if found.returncode:
            sys.exit(f"{' '.join(command)}\n{found.stdout[-2000:]}{found.stderr[-2000:]}")
        report = json.loads((project / "runs/hardware/hardware.json").read_text())
        asked.output.mkdir(parents=True, exist_ok=True)
        picture = asked.output / f"{asked.name}-{task.replace('_', '-')}.png"
        if asked.pictures:
            shutil.copy(project / "runs/hardware/precision.png", picture)
        return report["precision"]["facts"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def describe(report: dict) -> str:
    """A table in Markdown, and a sentence about the machine."""
    from rich import box
    from rich.table import Table

    columns = ["task", "speed, fp32", report["mixed"], "ratio", "peak memory"]
    columns += ["largest difference of a step's loss", "eval_loss, fp32", report["mixed"], "scores"]
    shown = Table(*columns, box=box.MARKDOWN)
    for task, facts in report["tasks"].items():
        speed = next(name for name in facts if name.endswith("_per_second"))
        one, other, ratio = facts[speed].values()
        loss, its, _ = facts["eval_loss"].values()
        scores = [
            f"{name} {values['difference']:+.3g}"
            for name, values in facts.items()
            if "difference" in values and "loss" not in name and "baseline" not in name
        ]
        cells = [f"{one:,.0f} {speed.removesuffix('_per_second')}/s", f"{other:,.0f}"]
        cells += [f"{ratio:.2f}", f"{[*facts['peak_memory_gb'].values()][2]:.2f}"]
        cells += [f"{[*facts['losses of a step'].values()][0]:.2%}", f"{loss:.4f}", f"{its:.4f}"]
        shown.add_row(task, *cells, ", ".join(scores[:2]))
    return f"{compare.markdown(shown)}\n\n{report['steps']} steps. {compare.about(report)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--mixed", default="bf16", help="the precision beside fp32")
    parser.add_argument("--pictures", action="store_true", help="keep the curves of each task")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="folder of results")
    parser.add_argument("--name", default="precision", help="name of the files of results")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/")
    asked = parser.parse_args()
    report = {**compare.about_machine(), "load": [os.getloadavg()[0]]}
    report |= {"mixed": asked.mixed, "steps": asked.steps, "tasks": {}}
    for task in asked.tasks:
        say(task)
        report["tasks"][task] = measure(task, asked)
    compare.publish(report, describe, asked, "make bench-precision")


if __name__ == "__main__":
    main()
