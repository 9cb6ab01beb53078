"""The steps that have trained on a row: computed, by the order of the rows backwards.

    python -m samestep when runs/mine 178
    python -m samestep when runs/mine "the horse sat on the mat"
    python -m samestep when runs/mine "rows.jsonl, line 12"

A row is its number, its place, or a part of its text. A text is found in rows as they are trained
on: a sequence may hold the end of one document and the beginning of another, and a place means the
sequence that begins there, and the one before, which may hold the beginning. Of a stream the order
is read, not computed: all its samples are read again. Exit codes: 0; 2 the input is wrong.
"""

import sys
from argparse import Namespace
from collections import defaultdict
from typing import Any

from samestep.ask.record import Record
from samestep.base.console import one_line
from samestep.base.errors import UserError, some


def answer(args: Namespace) -> None:
    record = Record(args.run)
    from samestep.ask.data import RunData  # torch: 4 s

    data, first = RunData(record), record.history[0]["step"] + 1
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
            told = some([f"{step:,}" for step in steps], 20) or "none"
            print(f"row {line}\n  {len(steps)} times until step {record.last:,}: {told}")


def _compute(data: Any, word: str) -> dict[str, list[int]]:
    """The steps of the rows that a word means."""
    found, history = {}, data.record.history
    for digest in dict.fromkeys(entry["data"] for entry in history):
        first = next(entry["step"] for entry in history if entry["data"] == digest)
        part = data.part(first + 1)
        for row in part.find(word):
            found[part.line(row, part.view[row]).strip()] = data.steps_of(row, digest)
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
                found[part.line(number, row).strip()].append(step)
    return found
