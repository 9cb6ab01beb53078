"""Measures how a baked project's throughput grows with the number of devices.

    make bench-scaling                                           # in the template: CPU processes
    python benchmarks/scaling.py --hardware multi_gpu_bf16 --processes 1 2 4 8 --micro_batch 32

Strong scaling: the global batch stays the same, and its micro-batches are distributed to more
devices. Weak scaling: the global batch grows with the devices. All numbers of processes take their
turns in each round, and each run is a launch of its own, whose first lines of metrics do not count.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import compare
from compare import say

WARM = 2  # lines of metrics that do not count


def throughput(project: Path, asked: argparse.Namespace, kind: str, processes: int) -> float:
    """Items in the loss a second: the median of a run's lines."""
    output = tempfile.mkdtemp(dir=project)
    batch = asked.batch * processes if kind == "weak" else asked.batch
    flags = (
        f"--global_batch_size {batch} --micro_batch_size {asked.micro_batch} "
        f"--max_steps {asked.steps} --log_every {max(asked.steps // 10, 1)} --warmup_steps 0 "
        f"--eval_every 0 --save_every 0 --check_export false --output_dir {output}"
    )
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    command += [f"configs/accelerate/{asked.hardware}.yaml", "--num_processes", str(processes)]
    command += ["train.py", *flags.split(), *asked.flags]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    found = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True)
    if found.returncode:
        sys.exit(f"{' '.join(command)}\n{found.stdout[-2000:]}{found.stderr[-2000:]}")
    text = Path(output, "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    return median(speeds[WARM:])


def measure(asked: argparse.Namespace, folder: Path) -> dict:
    project = compare.bake(folder)
    found = {kind: {number: [] for number in asked.processes} for kind in ("strong", "weak")}
    for number in range(asked.rounds):
        for kind, by_processes in found.items():
            for processes, speeds in by_processes.items():
                say(f"round {number + 1} of {asked.rounds}: {kind}, {processes}")
                speeds.append(throughput(project, asked, kind, processes))
    return {"found": found}


def describe(report: dict) -> str:
    """A row for each kind: items in the loss a second on the fewest devices, and speed-ups."""
    rows = []
    for kind, by_processes in report["found"].items():
        first, *others = by_processes.values()
        row = [kind, f"{median(first):,.0f} items/s"]
        for speeds in others:
            row.append("{:.2f} ({:.2f}-{:.2f})".format(*compare.ratios(speeds, first)))
        rows.append(row)
    return compare.markdown(["devices", *by_processes], rows)


def main() -> None:
    parser = compare.parser_of(__doc__, "scaling")
    parser.add_argument("--hardware", default="cpu_multi", help="a YAML of configs/accelerate")
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--batch", type=int, default=64, help="samples of a step, on one device")
    parser.add_argument("--micro_batch", type=int, default=8, help="samples at once")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    asked, asked.flags = parser.parse_known_args()
    compare.publish(asked, measure, describe)


if __name__ == "__main__":
    main()
