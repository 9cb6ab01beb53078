"""Measures what `exact` costs a baked project: the time of a step with and without it.

    make bench-steps                               # in the template: a table, a .json
    python benchmarks/steps.py --sizes small --processes 1 2 --rounds 2 --steps 2

Both runs compute the same micro-batches, and wait for their turns as in compare.py.
"""

import argparse
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

import compare
from compare import BAKED, HERE, Run, say
from work import SIZES, Work

MICRO_BATCH = 2  # samples
COLUMNS = ["step", "processes", "ms a step", "with exact", "wall time", "CPU time"]


def measure(todo: Work, processes: int, rounds: int, steps: int) -> dict:
    """The times of each round, and a row of the table."""
    size = replace(todo.size, micro_batches=todo.size.batch // MICRO_BATCH // processes)
    name, runs = Path(todo.output).name, {}
    found: dict[str, list[dict]] = {"false": [], "true": []}
    try:
        for exact in found:
            here = replace(todo, size=size, output=f"{todo.output}/{processes}-{exact}")
            runs[exact] = Run(BAKED, here, processes, BENCH_FLAGS=f"--exact={exact}")
        for run in runs.values():
            run.train(3)
        for number in range(rounds):
            say(f"{name}, {processes} x CPU: round {number + 1} of {rounds}")
            for exact in sorted(runs, reverse=number % 2):
                runs[exact].train(1)  # its data comes back into the caches
                found[exact].append(runs[exact].train(steps))
    finally:
        for run in runs.values():
            run.end()
    pairs = list(zip(found["false"], found["true"], strict=True))
    wall, cpu = (
        compare.middle([b[each] / a[each] for a, b in pairs]) for each in ("seconds", "cpu")
    )
    row = [name, processes]
    for exact in found:
        row.append(f"{1e3 * median(each['seconds'] for each in found[exact]):.1f}")
    row += ["{:.3f} ({:.3f} to {:.3f})".format(*wall), f"{cpu[0]:.3f}"]
    return {"row": row, "rounds": found}


def describe(report: dict) -> str:
    """A table in Markdown, and a sentence about the machine."""
    rows = [each["row"] for each in report["measured"]]
    return f"{compare.markdown(COLUMNS, rows)}\n\n{compare.about(report)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=[*SIZES])
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, help="steps in a round")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="folder of results")
    parser.add_argument("--name", default="steps", help="name of the file of results")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/")
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench"))
    report = {**compare.about_machine(), "load": [os.getloadavg()[0]], "measured": []}
    try:
        say("baking a project")
        project = compare.bake(folder)
        for name in asked.sizes:
            todo = compare.prepare(project, SIZES[name], folder / name)
            for processes in asked.processes:
                steps = asked.steps or SIZES[name].steps
                report["measured"].append(measure(todo, processes, asked.rounds, steps))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    compare.publish(report, describe, asked, "make bench-steps")


if __name__ == "__main__":
    main()
