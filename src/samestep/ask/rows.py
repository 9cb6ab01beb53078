"""The rows that a step has trained on, and the steps that have trained on a row: computed, since a
line of metrics holds only the hash of its rows.

    python -m samestep rows runs/mine --step 67          number, source, place and text of each
    python -m samestep rows runs/mine --verify           compares all lines of metrics.jsonl
    python -m samestep when runs/mine 178
    python -m samestep when runs/mine "the horse sat on the mat"
    python -m samestep when runs/mine "rows.jsonl, line 12"

A row is its number, its place, or a part of its text. A text is found in rows as they are trained
on: a sequence may hold the end of one document and the beginning of another, and a place means the
sequence that begins there, and the one before, which may hold the beginning. Of a stream the order
is read, not computed: all its samples are read again. A run folder does not say what executes or
writes: give it last, as --task.cache_dir or --task.trust_remote_code. Exit codes: 0; 1 the rows
computed are not those that were trained on; 2 the input is wrong.
"""

import sys
from argparse import Namespace
from collections import defaultdict
from typing import Any

from samestep.ask.recorded_run import RecordedRun, print_line, tell
from samestep.base.console import one_line, plural
from samestep.base.errors import UserError, some


def rows(args: Namespace) -> int:
    """Prints the rows of a step, and compares its line of metrics.jsonl; without a step all."""
    record, step = RecordedRun(args.run), args.step
    lines = [each for each in record.intervals if each.last <= record.last]
    if step:
        positions = record.positions(step)
    if step and not args.verify:
        lines = [each for each in lines if each.first <= step <= each.last]
    data, wrong, samples = _read_rows(record, args), [], 0
    if step:
        print(f"step {step}: samples {positions[0]:,} to {positions[-1]:,} of the run")
        shown = data.lines(step)
        for text in shown.values():
            print_line(text)
        args.answer["rows"] = [{"row": each, "shown": text.strip()} for each, text in shown.items()]
    for first, last, line in lines:
        samples += record.positions(last)[-1] + 1 - record.positions(first)[0]
        if data.hash(first, last) != line["batch_hash"]:
            wrong.append(f"{first} to {last}")
    right = len(lines) - len(wrong)
    print(
        f"{right} of {plural(len(lines), 'line')} of metrics.jsonl, {plural(samples, 'sample')}: "
        "the rows that were trained on are those computed"
    )
    args.answer |= {"lines": len(lines), "samples": samples, "wrong_steps": wrong}
    for steps in wrong:
        print(f"  NOT those of steps {steps}")
    return int(bool(wrong))


def when(args: Namespace) -> None:
    """Prints the steps that have trained on each row that the words mean."""
    record = RecordedRun(args.run)
    data, first = _read_rows(record, args), record.history[0]["step"] + 1
    args.answer |= {"first_step": first, "last_step": record.last, "rows": []}
    if first > 1:
        print(f"the order is known from step {first} on alone")
    for word in args.row:
        if not word.strip():
            raise UserError("the text is empty; give a row, a text or a place")
        found = _scan(data, word) if data.is_stream else _compute(data, word)
        if not found:
            shown = one_line(word, 60)
            raise UserError(f"no row has the text or place {shown}, of those to train on")
        for line, steps in found.items():
            print_line(f"row {line}")
            told = f"not trained on until step {record.last:,}"
            if steps:
                told = f"{plural(len(steps), 'time')} until step {record.last:,}: "
                told += some([f"{step:,}" for step in steps], 20)
            print(f"  {told}")
            entry = {"asked": word, "row": int(line.split()[0]), "shown": line, "steps": steps}
            args.answer["rows"].append(entry)


def _read_rows(record: RecordedRun, args: Namespace) -> Any:
    tell("reads the rows of the run")
    from samestep.ask.recorded_rows import RecordedRows  # torch: 4 s

    return RecordedRows(record, args.flags)


def _compute(data: Any, word: str) -> dict[str, list[int]]:
    """The steps of the rows that a word means."""
    found, history = {}, data.record.history
    for digest in dict.fromkeys(entry["data"] for entry in history):
        first = next(entry["step"] for entry in history if entry["data"] == digest)
        part = data.part(first + 1)
        for row in part.find(word):
            line = part.line(row, part.view[row], word=word)
            found[line.strip()] = data.steps_of(row, digest)
    return found


def _scan(data: Any, word: str) -> dict[str, list[int]]:
    """The same of a stream."""
    record, found = data.record, defaultdict(list)
    print(f"a stream: reads the samples until step {record.last:,} again", file=sys.stderr)
    for step in range(record.history[0]["step"] + 1, record.last + 1):
        part = data.part(step)
        for number, row in data.samples(step):
            text = str(number) if word.isdecimal() else part.line(number, row, None)
            if word in text and (len(word) == len(text) or not word.isdecimal()):
                found[part.line(number, row, word=word).strip()].append(step)
    return found
