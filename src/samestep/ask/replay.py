"""A step of a run, computed again: what its rows, its layers, and it without some rows give.

    python -m samestep replay runs/mine                        names steps to look at
    python -m samestep replay runs/mine --step 67
    python -m samestep replay runs/mine --step 67 --without 178 --gradients
    python -m samestep replay runs/words --step 7 -- python own_script.py

It trains again from the newest checkpoint before, in a scratch folder, with the settings of then
and the train.py and task.py of now, or by the command of a script after --. It prints what is
logged beside what it computes, to the bit. Without --step it names the steps that were skipped, and
those whose loss or norm has risen most over the line before. Exit codes: 0; 2 the input is wrong.
"""

import math
import time
from argparse import Namespace

from samestep.ask import start_again
from samestep.ask.recorded_run import RecordedRun, difference, print_line
from samestep.base.console import plural
from samestep.base.errors import UserError

NAMES = ("loss", "grad_norm", "lr", "batch_hash")  # that are compared
_NAMED = 3  # steps of the largest rises


def replay(args: Namespace) -> None:
    """Prints a step that is computed again; without one the steps to look at."""
    record, began = RecordedRun(args.run), time.perf_counter()
    if not args.step:
        _show_steps(record, args)
        return
    if not (record.config or args.command):
        raise UserError(
            f"{record.folder} was trained by a script: give its command, as in samestep replay "
            f"{record.folder} --step {args.step} -- python script.py"
        )
    question, trained, lines = record.replayed(args.step)
    question |= {"without": args.without or [], "gradients": args.gradients}
    found = start_again.answered(question, trained, args)
    told = {}
    if found["rows"] and not args.command:  # of a script's rows the numbers are known
        from samestep.ask.recorded_rows import RecordedRows  # torch: 4 s

        told = RecordedRows(record, args.flags).lines(args.step)
    args.answer |= {"step": args.step, "begin": question["begin"], "logged": lines, **found}
    origin = f"the checkpoint of step {question['begin']}" if question["begin"] else "the beginning"
    seconds = f"{time.perf_counter() - began:.0f} s"
    print_line(f"{record.folder}, step {args.step}, from {origin}, {seconds}")
    _show(found, lines, told, args)


def _show_steps(record: RecordedRun, args: Namespace) -> None:
    """Prints the steps that were skipped, and those of the largest rises."""
    if args.without:
        raise UserError("--without asks about a step; give --step")
    skipped = "skipped: loss or gradient was not finite"
    named = [(each["step"], skipped) for each in record.log if each.get("event") == "skipped"]
    for name in ("loss", "grad_norm"):
        named += [(step, f"{name} {text}") for _, step, text in _rises(record, name)[:_NAMED]]
    for step, text in named:
        print_line(f"step {step:>8}: {text}")
    args.answer["steps"] = [{"step": step, "what": text} for step, text in named]
    print(f"of {plural(len(record.intervals), 'line')} of metrics.jsonl; give a step by --step")


def _rises(record: RecordedRun, name: str) -> list[tuple[float, int, str]]:
    """By how much a number has risen over that of the line before, the step, and a text; the
    largest first. A line of several steps counts by the one with the largest loss."""
    found, before = [], None
    for _, last, line in record.intervals:
        about = line.get("worst", {**line, "step": last})
        value = about[name]
        if None not in (value, before) and value > before:
            found.append((value - before, about["step"], f"{value:.4g} after {before:.4g}"))
        before = line[name] if line[name] is not None else before
    return sorted(found, reverse=True)


def _show(found: dict, lines: list[dict], told: dict[int, str], args: Namespace) -> None:
    """Prints an answer."""
    for text in found["about"]:
        print_line(f"  {text}")
    pairs = [*zip(lines, found["lines"], strict=True)]
    same = [all(difference(a[n], b[n]) == "equal" for n in NAMES) for a, b in pairs]
    print(f"  {sum(same)} of {plural(len(same), 'line')} of metrics.jsonl equal to the bit\n")
    print(f"  line of step {lines[-1]['step']:<12} {'metrics.jsonl':>24} {'replay':>24}")
    for name in NAMES:
        before, now = lines[-1][name], found["lines"][-1][name]
        print_line(f"    {name:20} {before!s:>24} {now!s:>24}  {difference(before, now)}")
    twice = repr(found["layers"]) == repr(found["again"]["layers"])  # NaN, too
    print(
        f"\n  step {args.step} alone: loss {found['loss']:.6g}, norm {found['norm']:.6g}, "
        f"{found['items']:,} items; computed twice: {'equal' if twice else 'NOT EQUAL'}"
    )
    left = found.get("without", {"layers": {}})
    more = f", and without {', '.join(map(str, args.without))}" if args.without else ""
    print(f"\n  norm of the gradient by layer{more}")
    for name, value in found["layers"].items():
        print_line(f"    {name[-32:]:32} {value:10.4g} {left['layers'].get(name, '')!s:>10.10}")
    if args.without:
        print(f"    {'all':32} {found['norm']:10.6g} {left['norm']:10.6g}")
        print(f"    {'loss':32} {found['loss']:10.6g} {left['loss']:10.6g}")
    if not found["rows"]:
        print("\n  rows_depend: the rows of this task mean nothing alone")
        return
    print("\n  rows by the loss of each alone, without dropout: loss, items, row")
    # The largest first, and before that what is not finite.
    rows = sorted(found["rows"], key=lambda each: (math.isfinite(each["loss"]), -each["loss"]))
    for each in rows[: args.top]:
        norm = f" norm {each['norm']:.4g}" if args.gradients else ""
        line = told.get(each["row"], f"row {each['row']}")
        print_line(f"    {each['loss']:10.4g}{norm} {each['items']:6} {line}")
