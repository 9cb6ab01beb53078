"""The rows that a step has trained on: computed, since a line of metrics holds only their hash.

    python -m samestep rows runs/mine --step 67          number, source, place and text of each
    python -m samestep rows runs/mine --verify           compares all lines of metrics.jsonl

Exit codes: 0; 1 the rows computed are not those that were trained on; 2 the input is wrong.
"""

from samestep.ask.record import Record, answer
from samestep.programs import make_parser


def main() -> int:
    parser = make_parser("rows", __doc__)
    parser.add_argument("run", help="folder of a run, such as runs/default")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--step", type=int, metavar="N", help="the step, from 1 on")
    asked.add_argument("--verify", action="store_true", help="of all lines of metrics.jsonl")
    args = parser.parse_args()
    return answer(parser, tell, args.run, args.step)


def tell(run: str, step: int | None) -> int:
    """Prints the rows of a step, and compares its line of metrics.jsonl; without a step all."""
    record = Record(run)
    lines = [each for each in record.intervals if each.last <= record.last]
    if step is not None:
        positions = record.positions(step)
        lines = [each for each in lines if each.first <= step <= each.last]
    from samestep.ask.data import RunData  # torch: 4 s

    data, wrong, samples = RunData(record), [], 0
    if step is not None:
        print(f"step {step}: samples {positions[0]:,} to {positions[-1]:,} of the run")
        for number, row in data.samples(step):
            print(data.part(step).line(number, row))
    for first, last, line in lines:
        samples += record.positions(last)[-1] + 1 - record.positions(first)[0]
        if data.hash(first, last) != line["batch_hash"]:
            wrong.append(f"{first} to {last}")
    print(
        f"{len(lines) - len(wrong)} of {len(lines)} lines of metrics.jsonl, {samples:,} samples: "
        "the rows that were trained on are those computed"
    )
    for steps in wrong:
        print(f"  NOT those of steps {steps}")
    return int(bool(wrong))
