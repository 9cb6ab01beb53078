"""The steps that have trained on a row: computed, by the order of the rows backwards.

    python -m samestep when runs/mine 178
    python -m samestep when runs/mine "the horse sat on the mat"
    python -m samestep when runs/mine "rows.jsonl, line 12"

A row is its number, or a part of its text or place. A text is found in rows as they are trained on:
a sequence may hold the end of one document and the beginning of another. Of a stream the order is
read, not computed: all its samples are read again. Exit codes: 0; 2 the input is wrong.
"""

import sys
from collections import defaultdict

from samestep.ask.record import Record, answer
from samestep.base.console import one_line
from samestep.base.errors import UserError, some
from samestep.programs import make_parser


def main() -> int:
    parser = make_parser("when", __doc__)
    parser.add_argument("run", help="folder of a run, such as runs/default")
    parser.add_argument("row", nargs="+", metavar="ROW|TEXT", help="its number, text or place")
    parser.add_argument("--width", type=int, default=60, help="characters of a text (default: 60)")
    args = parser.parse_args()
    return answer(parser, when, args.run, args.row, args.width)


def when(run: str, words: list[str], width: int) -> None:
    record = Record(run)
    from samestep.ask.data import RunData  # torch: 4 s

    data = RunData(record)
    if begin := record.history[0]["step"]:
        print(f"the order is known from step {begin + 1} on alone")
    for word in words:
        (tell_streamed if data.is_stream else tell_computed)(data, record, word, width)


def tell_computed(data, record: Record, word: str, width: int) -> None:
    """Prints the rows that a word means, and the steps of each."""
    count = 0
    for digest in dict.fromkeys(entry["data"] for entry in record.history):
        first = next(entry for entry in record.history if entry["data"] == digest)
        part = data.part(first["step"] + 1)
        for row in part.find(word):
            count += 1
            steps = data.steps_of(row, digest)
            print(f"row {part.line(row, part.view[row], width).strip()}")
            told = some([f"{step:,}" for step in steps], 20) or "none"
            print(f"  trained on {len(steps)} times until step {record.last:,}: {told}")
    if not count:
        raise UserError(f"no row has the text {one_line(word, 60)}")


def tell_streamed(data, record: Record, word: str, width: int) -> None:
    print(f"a stream: reads the samples of steps 1 to {record.last:,} again", file=sys.stderr)
    found, word = defaultdict(list), " ".join(word.split())
    for step in range(record.history[0]["step"] + 1, record.last + 1):
        part = data.part(step)
        for number, row in data.samples(step):
            if word == str(number) or (
                not word.isdecimal() and word in part.line(number, row, None)
            ):
                found[part.line(number, row, width).strip()].append(step)
    for text, steps in found.items():
        print(f"sample {text}\n  steps {', '.join(map(str, steps))}")
    if not found:
        raise UserError(
            f"no sample of steps 1 to {record.last:,} has the text {one_line(word, 60)}"
        )
