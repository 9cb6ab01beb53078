"""Measures what `exact` costs a baked project: the time of a step with and without it.

    make bench-steps                               # in the template: a table, a .json
    python benchmarks/steps.py --sizes small --processes 1 2 --rounds 2 --steps 2

Both runs compute the same micro-batches, and wait for their turns as in compare.py.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import median

import compare
from compare import BAKED, Run
from work import SIZES, Work

MICRO_BATCH = 2  # samples
COLUMNS = ["step", "processes", "ms a step", "with exact", "wall time", "CPU time"]


def time_exact(todo: Work, processes: int, rounds: int, steps: int) -> dict[str, dict]:
    """For `exact` false and true: seconds and CPU seconds a step in each round."""
    micro_batches = todo.size.batch // MICRO_BATCH // processes
    size = replace(todo.size, micro_batches=micro_batches, counted=0)
    name, runs = Path(todo.output).name, {}
    found: dict[str, dict] = {"false": {}, "true": {}}
    try:
        for exact in found:
            here = replace(todo, size=size, output=f"{todo.output}/{processes}-{exact}")
            runs[exact] = Run(BAKED, here, processes, BENCH_FLAGS=f"--exact={exact}")
        for run in runs.values():
            run.train(3)
        compare.take_turns(runs, found, f"{name}, {processes} x CPU", rounds, steps)
    finally:
        for run in runs.values():
            run.end()
    return found


def measure(asked: argparse.Namespace, folder: Path) -> dict:
    project, found = compare.bake(folder), {}
    for name in asked.sizes:
        todo, steps = compare.prepare(project, SIZES[name], folder / name), SIZES[name].steps
        found[name] = {
            processes: time_exact(todo, processes, asked.rounds, asked.steps or steps)
            for processes in asked.processes
        }
    return {"measured": found}


def describe(report: dict) -> str:
    """A row for each size and number of processes."""
    rows = []
    for name, by_processes in report["measured"].items():
        for processes, found in by_processes.items():
            plain, exact = found["false"], found["true"]
            row = [name, processes]
            row += [f"{1e3 * median(each['seconds']):.1f}" for each in (plain, exact)]
            wall = compare.ratios(exact["seconds"], plain["seconds"])
            row.append("{:.3f} ({:.3f} to {:.3f})".format(*wall))
            row.append(f"{compare.ratios(exact['cpu'], plain['cpu'])[0]:.3f}")
            rows.append(row)
    return compare.markdown(COLUMNS, rows)


def main() -> None:
    parser = compare.parser_of(__doc__, "steps")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=[*SIZES])
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, help="steps in a round")
    compare.publish(parser.parse_args(), "make bench-steps", measure, describe)


if __name__ == "__main__":
    main()
