"""Finds the first step in which two runs differ, and the cause.

    python -m samestep diff runs/a runs/b

It compares what the runs were made of (settings, code, data, versions and hardware), then their
rows, losses and states. In a project's folder it names the first row that differs, and the step
that has trained on it. Exit codes: 0 the same run; 1 they differ; 2 the input is wrong.
"""

from argparse import Namespace
from collections.abc import Mapping
from os.path import commonprefix
from typing import Any

import numpy as np

from samestep.ask import recorded_run
from samestep.ask.recorded_run import RecordedRun, difference
from samestep.base.console import one_line, plural
from samestep.base.errors import UserError


def show(what: str, text: str) -> None:
    print(f"{what:10} {one_line(text, 500)}")


def _is_equal(one: Any, two: Any) -> bool:
    """Whether two rows have the same values."""
    if isinstance(one, Mapping):
        return one.keys() == two.keys() and all(_is_equal(one[name], two[name]) for name in one)
    return np.array_equal(one, two)


def _first_row(records: list[RecordedRun], flags: list[str]) -> str:
    """The row that differs and was trained on first; empty: it is not known."""
    from samestep.ask.recorded_rows import RecordedRows  # torch: 4 s

    try:
        data = [RecordedRows(record, flags) for record in records]
    except UserError as reason:
        show("", f"the rows are not known: {reason}")
        return ""
    parts = [each.part(each.record.last) for each in data]
    digest, last = records[0].entry(records[0].last)["data"], records[0].last
    found = []
    for row in range(0 if data[0].is_stream else min(len(part.view) for part in parts)):
        if len(found) < 1000 and not _is_equal(*(part.view[row] for part in parts)):
            found.append((min(data[0].steps_of(row, digest), default=last + 1), row))
    if not found:
        return ""
    step, row = min(found)
    when = f"trained on in step {step}" if step <= last else "not trained on yet"
    text = f"row {row} [{parts[0].place(row)}], {when}"
    show("", f"{len(found)} rows differ; the first: {text}")
    texts = [part.text(part.view[row]) for part in parts]
    begin = max(len(commonprefix(texts)) - 30, 0)
    for name, each in zip("AB", texts, strict=True):
        show("", f"{name}: ...{each[begin : begin + 70]}...")
    return text


def _first_lines(records: list[RecordedRun]) -> list[int]:
    """Prints the first line of metrics.jsonl with other rows, and that with other numbers, of those
    that tell of the same steps; their steps."""
    one, two = ({each[:2]: each.line for each in record.intervals} for record in records)
    pairs = [(one[steps], two[steps]) for steps in one if steps in two]
    other = [a["step"] for a, b in pairs if a["batch_hash"] != b["batch_hash"]][:1]
    lines = plural(len(pairs), "line")
    show("rows", f"differ until step {other[0]}" if other else f"equal in {lines}")
    for a, b in pairs:
        for name in ("loss", "grad_norm", "lr"):
            if (apart := difference(a[name], b[name])) != "equal":
                show("loss", f"{name} of step {a['step']}: {a[name]} and {b[name]}, {apart}")
                return [*other, a["step"]]
    show("loss", f"equal to the bit in {lines}")
    return other


def _first_state(records: list[RecordedRun]) -> list[int]:
    """Prints the first step whose saved states differ, and the first weight; the step."""
    saves = [{each["step"]: each for each in record.saves()} for record in records]
    # States of two versions of the hash are compared by the first, if the checkpoints are there.
    states: list[dict] = [{}, {}]
    for step in saves[0].keys() & saves[1].keys():
        versions = [each[step]["version"] for each in saves]
        for of_record, each, record in zip(states, saves, records, strict=True):
            if versions[0] == versions[1]:
                of_record[step] = each[step]["state"]
            elif all(step in record.manifests for record in records):
                of_record[step] = record.state_at(step, min(versions))
    common = sorted(states[0])
    other = [step for step in common if states[0][step] != states[1][step]][:1]
    text = f"equal at {plural(len(common), 'step')}"
    if other:
        text = f"differs first at step {other[0]}"
    if other and all(other[0] in record.manifests for record in records):
        weights = [record.weights_at(other[0]) for record in records]
        text += f": {recorded_run.describe_weights(*weights)}"
    show("state", text)
    logged = [{each[:2] for each in record.intervals} for record in records]
    if not common and not logged[0] & logged[1]:
        raise UserError("no step was logged or saved by both runs: nothing to compare")
    return other


def diff(args: Namespace) -> int:
    """Prints what differs; the exit code."""
    records = [RecordedRun(folder) for folder in args.runs]
    causes = []
    facts = [recorded_run.facts_of(record.newest()) for record in records]
    changed = recorded_run.differing(*facts)
    for name, pair in changed.items():
        if name not in (*recorded_run.FREE, "settings output_dir"):
            causes.append(recorded_run.describe(name, *pair))
            show(name.partition(" ")[0], causes[-1])
    if "data fingerprint" in changed and (row := _first_row(records, args.flags)):
        causes.append(row)
    steps = _first_lines(records) if all(record.intervals for record in records) else []
    steps += _first_state(records)
    cause = "; ".join(causes)
    verdict = f"=> the same run{', in spite of ' if cause else ''}{cause}"
    if steps:
        cause = cause or "nothing that is recorded"
        verdict = f"=> they differ from the line of step {min(steps)} on: {cause}"
    args.answer |= {"first_step": min(steps, default=None), "causes": causes}
    print(one_line(verdict, 1000))
    return int(bool(steps))
