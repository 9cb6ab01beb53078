"""The rows that a step has trained on: computed, since a line of metrics holds only their hash.

    python -m samestep rows runs/mine --step 67
    python -m samestep rows runs/mine --verify

It prints the number, the source, the place and the text of each row. --verify computes the rows of
all steps, and compares each line of metrics.jsonl. Exit codes: 0 they are those that were trained
on; 1 they are not; 2 the input is wrong.
"""

from samestep.ask.record import Record, answer
from samestep.base.errors import UserError
from samestep.programs import make_parser


def main() -> int:
    parser = make_parser("rows", __doc__)
    parser.add_argument("run", help="folder of a run, such as runs/default")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--step", type=int, metavar="N", help="the step, from 1 on")
    asked.add_argument("--verify", action="store_true", help="of all lines of metrics.jsonl")
    parser.add_argument("--width", type=int, default=60, help="characters of a text (default: 60)")
    args = parser.parse_args()
    if args.verify:
        return answer(parser, verify, args.run)
    return answer(parser, show, args.run, args.step, args.width)


def show(run: str, step: int, width: int) -> int:
    """Prints the rows of a step."""
    record = Record(run)
    positions = record.positions(step)
    from samestep.ask.data import RunData  # torch: 4 s

    data = RunData(record)
    print(f"step {step}: samples {positions[0]:,} to {positions[-1]:,} of the run")
    for number, row in data.samples(step):
        print(data.part(step).line(number, row, width))
    if step > max((each.last for each in record.intervals), default=0):
        print("metrics.jsonl has no line about this step: nothing to compare with")
        return 0
    first, last, line = record.interval(step)
    same = data.hash(first, last) == line["batch_hash"]
    told = "is that of these rows" if same else "DIFFERS"
    print(
        f"the batch_hash of steps {first} to {last} in metrics.jsonl {told}: {line['batch_hash']}"
    )
    return int(not same)


def verify(run: str) -> int:
    """Compares the rows of all steps with metrics.jsonl."""
    record, wrong, samples = Record(run), [], 0
    from samestep.ask.data import RunData

    data = RunData(record)
    lines = [each for each in record.intervals if each.last <= record.last]
    if not lines:
        raise UserError(f"{record.folder}/metrics.jsonl has no line with a loss to compare with")
    for first, last, line in lines:
        samples += sum(len(record.positions(step)) for step in range(first, last + 1))
        if data.hash(first, last) != line["batch_hash"]:
            wrong.append(f"{first} to {last}")
    right = len(lines) - len(wrong)
    print(
        f"{right} of {len(lines)} lines of metrics.jsonl, {samples:,} samples: the rows that were "
        "trained on are those computed"
    )
    for steps in wrong:
        print(f"  NOT those of steps {steps}")
    return int(bool(wrong))
