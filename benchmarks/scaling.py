"""Measures how a baked project's throughput grows with the number of devices.

    make bench-scaling                                           # in the template: CPU processes
    python benchmarks/scaling.py --hardware multi_gpu_bf16 --processes 1 2 4 8 --micro_batch 32

Strong scaling: the step stays the same, and its micro-batches are dealt to more devices. Weak
scaling: the step grows with the devices, and the micro-batches of each stay as many. All numbers of
processes take their turns in each round, and each run is a launch of its own, whose first lines of
metrics do not count. Efficiency is the speed-up divided by the number of devices.

On a CPU a process computes with one thread; more processes than cores show what that costs.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median

import compare
from compare import say

KINDS = ("strong", "weak")
WARM = 2  # lines of metrics that do not count


def throughput(project: Path, asked: argparse.Namespace, kind: str, processes: int) -> float:
    """Loss terms a second: the median of a run's lines."""
    batch = asked.batch * (processes if kind == "weak" else 1)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    command += [f"configs/accelerate/{asked.hardware}.yaml", "--num_processes", str(processes)]
    settings = {
        "max_steps": asked.steps,
        "log_every": max(asked.steps // 10, 1),
        "global_batch_size": batch,
        "micro_batch_size": asked.micro_batch,
        "eval_every": 0,
        "save_every": 0,
        "warmup_steps": 0,
        "resume": "never",
        "check_export": "false",
        "output_dir": f"runs/{kind}-{processes}",
    }
    command += ["train.py", *(f"--{name}={value}" for name, value in settings.items())]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    found = subprocess.run(
        [*command, *asked.flags], cwd=project, env=env, capture_output=True, text=True
    )
    if found.returncode:
        sys.exit(f"{' '.join(command)}\n{found.stdout[-2000:]}{found.stderr[-2000:]}")
    text = (project / settings["output_dir"] / "metrics.jsonl").read_text()
    lines = [
        each["tokens_per_second"]
        for each in map(json.loads, text.splitlines())
        if "tokens_per_second" in each
    ]
    shutil.rmtree(project / settings["output_dir"])
    return median(lines[WARM:])


def rows_of(found: dict[str, dict[int, list[float]]]) -> list[dict]:
    """A row of the table for each kind and number of devices; ratios are those of one round."""
    rows = []
    for kind, by_number in found.items():
        first = min(by_number)
        for number, speeds in by_number.items():
            row = {"scaling": kind, "devices": number, "items/s": median(speeds)}
            speed_up = [first * each for each in compare.ratios(speeds, by_number[first])]
            row |= {"speed-up": speed_up[0], "range": speed_up[1:]}
            rows.append({**row, "efficiency": speed_up[0] / number})
    return rows


def describe(report: dict) -> str:
    """A table in Markdown."""
    cells = []
    for row in report["rows"]:
        low, high = row["range"]
        speed_up = f"{row['speed-up']:.2f} ({low:.2f} to {high:.2f})"
        line = [row["scaling"], row["devices"], f"{row['items/s']:,.0f}", speed_up]
        cells.append([*line, f"{row['efficiency']:.0%}"])
    columns = ["scaling", "devices", "items in the loss/s", "speed-up", "efficiency"]
    return compare.markdown(columns, cells)


def measure(asked: argparse.Namespace, folder: Path) -> dict:
    project = compare.bake(folder)
    found: dict[str, dict] = {kind: {number: [] for number in asked.processes} for kind in KINDS}
    for number in range(asked.rounds):
        for kind, processes in ((k, p) for p in asked.processes for k in KINDS):
            say(f"round {number + 1} of {asked.rounds}: {kind}, {processes}")
            speed = throughput(project, asked, kind, processes)
            found[kind][processes].append(speed)
    settings = {n: value for n, value in vars(asked).items() if n not in ("output", "name", "docs")}
    return {"asked": settings, "rows": rows_of(found)}


def main() -> None:
    parser = compare.parser_of(__doc__, "scaling")
    parser.add_argument("--hardware", default="cpu_multi", help="a YAML of configs/accelerate")
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--batch", type=int, default=64, help="samples of a step, on one device")
    parser.add_argument("--micro_batch", type=int, default=8, help="samples at once")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    asked, asked.flags = parser.parse_known_args()
    compare.publish(asked, "make bench-scaling", measure, describe)


if __name__ == "__main__":
    main()
