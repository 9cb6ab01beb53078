"""The rows that a step has trained on: computed, since a line of metrics holds only their hash.

    python -m samestep rows runs/mine --step 67
    python -m samestep rows runs/mine --verify

It prints the number, the source, the place and the text of each row. --verify computes the rows of
all steps, and compares each line of metrics.jsonl. Exit codes: 0 they are those that were trained
on; 1 they are not; 2 the input is wrong.
"""

from samestep.ask.record import Record
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
    try:
        record = Record(args.run)
        if args.step is not None:
            record.check_step(args.step)
        return verify(record) if args.verify else show(record, args.step, args.width)
    except (ValueError, OSError) as error:
        parser.error(str(error))


def show(record: Record, step: int, width: int) -> int:
    from samestep.ask.data import RunData  # torch: 4 s

    data = RunData(record)
    part, positions = data.part(step), record.positions(step)
    print(f"step {step}: samples {positions[0]:,} to {positions[-1]:,} of the run")
    for number, row in data.samples(step):
        print(part.line(number, row, width))
    if not any(each.first <= step <= each.last for each in record.intervals):
        print("metrics.jsonl has no line about this step: nothing to compare with")
        return 0
    interval = record.interval(step)
    same = data.hash(interval.first, interval.last) == interval.line["batch_hash"]
    what = f"the batch_hash of steps {interval.first} to {interval.last} in metrics.jsonl"
    print(f"{what} {'is that of these rows' if same else 'DIFFERS'}: {interval.line['batch_hash']}")
    return int(not same)


def verify(record: Record) -> int:
    from samestep.ask.data import RunData

    data, wrong, samples = RunData(record), [], 0
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
