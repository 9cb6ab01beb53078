"""The rows that a step has trained on: computed, since a line of metrics holds only their hash.

    python -m samestep rows runs/mine --step 67          number, source, place and text of each
    python -m samestep rows runs/mine --verify           compares all lines of metrics.jsonl

Exit codes: 0; 1 the rows computed are not those that were trained on; 2 the input is wrong.
"""

from argparse import Namespace

from samestep.ask.record import Record


def answer(args: Namespace) -> int:
    """Prints the rows of a step, and compares its line of metrics.jsonl; without a step all."""
    record, step = Record(args.run), args.step
    lines = [each for each in record.intervals if each.last <= record.last]
    if step:
        positions = record.positions(step)
    if step and not args.verify:
        lines = [each for each in lines if each.first <= step <= each.last]
    from samestep.ask.data import RunData  # torch: 4 s

    data, wrong, samples = RunData(record), [], 0
    if step:
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
