"""Measures what DDP's arguments cost or gain on two CPU processes.

    make bench-ddp                                               # in the template: a table, a .json
    python benchmarks/ddp.py --sizes small --rounds 2 --steps 5

All settings wait for their turns, as in steps.py; times are ratios to the default in the same
round: the median, and the middle half of the rounds. A process has one micro-batch in a step, since
static_graph goes with no more.
"""

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path
from statistics import median

import compare
from compare import HERE, say
from steps import Trained, running, take_turns
from work import SIZES, Work

PROCESSES = 2
DEFAULT = "the default"
SETTINGS: dict[str, dict[str, object]] = {
    DEFAULT: {},
    "bucket_cap_mb: 1": {"bucket_cap_mb": 1},
    "bucket_cap_mb: 100": {"bucket_cap_mb": 100},
    "find_unused_parameters: true": {"find_unused_parameters": True},
    "static_graph: true": {"static_graph": True},
    "broadcast_buffers: false": {"broadcast_buffers": False},
}


def measure(todo: Work, names: list[str], rounds: int, steps: int) -> list[dict]:
    """A row for each setting of these names."""
    say(f"{Path(todo.output).name}, {PROCESSES} x CPU")
    with running() as runs:
        for place, name in enumerate(names):
            flags = {"micro_batch_size": todo.size.batch // PROCESSES}
            env = {"BENCH_DDP": json.dumps(SETTINGS[name])}
            runs[name] = Trained(todo, f"ddp-{place}", 0, [1] * PROCESSES, env=env, **flags)
        for run in runs.values():
            run.train(3)  # with static_graph the second step makes other buckets
        found = take_turns(runs, rounds, steps)
    rows, base = [], found[DEFAULT]
    for name, each in found.items():
        ratios = {
            key: compare.middle([b / a for a, b in zip(base[key], each[key], strict=True)])
            for key in each
        }
        rows.append(
            {
                "step": Path(todo.output).name,
                "setting": name,
                "ms a step": f"{1e3 * median(each['seconds']):.1f}",
                "wall time": "{:.3f} ({:.3f} to {:.3f})".format(*ratios["seconds"]),
                "CPU time": f"{ratios['cpu'][0]:.3f}",
                "rounds": each,
            }
        )
    return rows


def describe(report: dict) -> str:
    """A table in Markdown, and a sentence about the machine."""
    from rich import box
    from rich.table import Table

    columns = ["step", "setting", "ms a step", "wall time", "CPU time"]
    shown = Table(*columns, box=box.MARKDOWN)
    for row in report["rows"]:
        shown.add_row(*(row[name] for name in columns))
    return f"{compare.markdown(shown)}\n\n{compare.about(report)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=[*SIZES])
    parser.add_argument("--settings", nargs="*", choices=SETTINGS, default=[*SETTINGS])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, help="steps in a round")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="folder of results")
    parser.add_argument("--name", default="ddp", help="name of the file of results")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/")
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench"))
    report = {**compare.about_machine(), "load": [os.getloadavg()[0]], "rows": []}
    try:
        say("baking a project")
        project = compare.bake(folder)
        for name in asked.sizes:
            todo = compare.prepare(project, SIZES[name], folder / name)
            names = [DEFAULT, *(each for each in asked.settings if each != DEFAULT)]
            steps = asked.steps or SIZES[name].steps
            report["rows"] += measure(todo, names, asked.rounds, steps)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    compare.publish(report, describe, asked, "make bench-ddp")


if __name__ == "__main__":
    main()
