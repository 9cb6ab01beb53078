"""Finds the first step in which two runs differ, and the cause.

    python -m samestep diff runs/a runs/b

It compares what the runs were made of (settings, code, data, versions, hardware), then their rows,
losses and states. In a project's folder it names the first row that differs, and the step that has
trained on it. Exit codes: 0 the same run; 1 they differ; 2 the input is wrong.
"""

import os
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from samestep.ask import made
from samestep.ask.record import Record
from samestep.base.console import one_line, protect_output
from samestep.base.errors import UserError
from samestep.core import checkpoints
from samestep.programs import make_parser

ROUNDING = ("versions ", "hardware ")  # facts that change a result by rounding at most


def show(what: str, text: str) -> None:
    print(f"{what:10} {one_line(text, 500)}")


def compare_facts(records: list[Record]) -> dict[str, list[str]]:
    """Prints what the runs were made of, where it differs: `result` and `rounding`, by effect."""
    changed = made.differing(*(made.facts_of(made.newest(record)) for record in records))
    effects: dict[str, str] = {}
    if any(name.startswith("settings ") for name in changed) and Path("train.py").is_file():
        from samestep.project import config, startup

        fields = config.fields_of(startup.find_project()[0].Config).items()
        effects = {name: field.metadata.get("changes", "result") for name, (_, field) in fields}
    causes: dict[str, list[str]] = {"result": [], "rounding": []}
    for name, pair in changed.items():
        if name != "settings output_dir" and made.matters(name, False, effects):
            group, _, short = name.partition(" ")
            rounds = name.startswith(ROUNDING) or effects.get(short) == "rounding"
            text = made.describe(name, *pair)
            show(group, text)
            causes["rounding" if rounds else "result"].append(text)
    return causes


def read_data(records: list[Record]) -> list:
    """The rows of each run; none where they are not known."""
    from samestep.ask.data import RunData  # torch: 4 s

    try:
        return [RunData(record) for record in records]
    except UserError as reason:
        show("", f"the rows are not known: {reason}")
        return []


def first_row(records: list[Record]) -> str:
    """The row that differs and was trained on first; empty: it is not known."""
    data = read_data(records)
    if not data or any(each.is_stream for each in data):
        return ""
    one, (part, other) = data[0], [each.part(each.record.last) for each in data]
    found = []
    for row in range(min(len(part.rows.dataset), len(other.rows.dataset))):
        pair = [each.rows.dataset[row] for each in (part, other)]
        if not is_equal(*pair) and len(found) < 1000:
            steps = one.steps_of(row, part.entry["data"])
            texts = [one.text(part, each) for each in pair]
            found.append((min(steps, default=1 << 60), row, texts))
    if not found:
        return ""
    step, row, texts = min(found)
    when = f"trained on in step {step}" if step <= one.record.last else "not trained on yet"
    place = one.place(part, row)
    text = f"row {row}{f' ({place})' if place else ''}, {when}"
    show("", f"{len(found)} rows differ; the first: {text}")
    at = len(os.path.commonprefix(texts))
    for name, each in zip("AB", texts, strict=True):
        show("", f"{name}: ...{each[max(at - 30, 0) : at + 40]}...")
    return text


def is_equal(one: Any, two: Any) -> bool:
    """Whether two rows have the same values."""
    if isinstance(one, Mapping):
        return one.keys() == two.keys() and all(is_equal(one[name], two[name]) for name in one)
    return np.array_equal(one, two)


def first_other_rows(records: list[Record]) -> list[tuple[int, str]]:
    """The first step with other rows, by their numbers: computed, where the rows are known."""
    sums = []
    for record in records:
        lines = record.intervals
        totals = accumulate(int(each.line["batch_hash"], 16) for each in lines)
        sums.append({each.last: n % 2**64 for each, n in zip(lines, totals, strict=True)})
    common = [step for step in sums[0] if step in sums[1]]  # log_every may differ
    other = [step for step in common if sums[0][step] != sums[1][step]]
    if not other:
        show("rows", f"the same in all {len(common)} lines of metrics.jsonl that both have")
        return []
    first = max((step for step in common if step < other[0]), default=0) + 1
    data = read_data(records)
    for step in range(first, other[0] + 1) if data else ():
        if sorted(data[0].ids(step)) != sorted(data[1].ids(step)):
            show("rows", f"step {step} is the first with other rows")
            return [(step, f"step {step}")]
    show("rows", f"other rows in steps {first} to {other[0]}")
    return [(other[0], f"the line of step {other[0]}")]


def first_other_numbers(records: list[Record]) -> list[tuple[int, str, float]]:
    """The first line that differs, and the relative difference."""
    lines = [{each[:2]: each.line for each in record.intervals} for record in records]
    common = [steps for steps in lines[0] if steps in lines[1]]
    for steps in common:
        for name in ("loss", "grad_norm", "lr"):
            a, b = (each[steps].get(name) for each in lines)
            if a != b:
                apart = abs(a - b) / max(abs(a), 1e-30) if a and b else 1.0
                show("loss", f"{name} of step {steps[1]}: {a} and {b}, {apart:.1e} apart")
                return [(steps[1], f"the line of step {steps[1]}", apart)]
    show("loss", f"equal to the bit in all {len(common)} lines that both have")
    return []


def first_other_state(records: list[Record]) -> list[tuple[int, str]]:
    """The first step whose saved states differ."""
    states = [{each["step"]: each["state"] for each in made.saves_of(r)} for r in records]
    common = [step for step in states[0] if step in states[1]]
    for step in common:
        if states[0][step] != states[1][step]:
            text = f"differs first at step {step}"
            if all(step in record.manifests for record in records):
                weights = [made.weights_at(record, step) for record in records]
                changed = checkpoints.differences(*weights)
                text += f": {len(changed)} of {len(weights[0])} weights, first {min(changed)}"
            show("state", text)
            return [(step, f"the checkpoint of step {step}")]
    show("state", f"equal at the {len(common)} steps that both have saved")
    if not common and not all(record.intervals for record in records):
        raise UserError("the runs have no step in common that both have logged or saved")
    return []


def compare(records: list[Record]) -> int:
    """Prints what differs; the exit code."""
    causes = compare_facts(records)
    if f"other {made.DATA['fingerprint']}" in causes["result"] and (row := first_row(records)):
        causes["result"].append(row)
    rows, numbers = [], []
    if all(record.intervals for record in records):
        rows, numbers = first_other_rows(records), first_other_numbers(records)
    found = rows + [each[:2] for each in numbers] + first_other_state(records)
    cause = "; ".join(causes["result"] or causes["rounding"])
    if not found:
        print(one_line(f"=> the same run{', in spite of ' if cause else ''}{cause}", 1000))
        return 0
    small = not (causes["result"] or rows) and all(apart < 1e-4 for *_, apart in numbers)
    kind = "rounding, or as small," if small else "another result"
    begin = f"=> {kind} from {min(found)[1]} on; cause: "
    print(one_line(begin + (cause or "nothing that is recorded"), 1000))
    return 1


def main() -> int:
    protect_output()
    parser = make_parser("diff", __doc__)
    parser.add_argument("runs", nargs=2, type=Path, metavar="RUN", help="folders of two runs")
    args = parser.parse_args()
    try:
        return compare([Record(run) for run in args.runs])
    except (ValueError, OSError) as error:
        parser.error(str(error))
