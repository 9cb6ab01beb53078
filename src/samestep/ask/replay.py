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

import json
import math
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from samestep.ask import again
from samestep.ask.record import Record
from samestep.base import run_folder
from samestep.base.console import one_line
from samestep.base.errors import UserError
from samestep.state import checkpoints

NAMES = ("loss", "grad_norm", "lr", "batch_hash")  # that are compared
_NAMED = 3  # steps of the largest rises


def answer(args: Namespace) -> int:
    if args.step:
        return replay(args)
    if args.without:
        raise UserError("--without asks about a step; give --step")
    record = Record(args.run)
    for line in record.log:
        if line.get("event") == "skipped":
            print(f"step {line['step']:>8}: skipped: loss or gradient was not finite")
    for name in ("loss", "grad_norm"):
        for _, step, text in _rises(record, name)[:_NAMED]:
            print(f"step {step:>8}: {name} {text}")
    print(f"of {len(record.intervals)} lines of metrics.jsonl; give a step by --step")
    return 0


def _rises(record: Record, name: str) -> list[tuple[float, int, str]]:
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


def replay(args: Namespace) -> int:
    record, step, began = Record(args.run), args.step, time.perf_counter()
    entry, (first, last, _) = record.entry(step), record.interval(step)
    sharding = record.manifest(step).get("hardware", {}).get("sharding", "none")
    kinds = {part.split()[0] for part in sharding.split(", ")}
    if kinds - {"none", "FSDP2", "dp_replicate", "dp_shard"}:
        raise UserError(
            f"step {step} was trained with {sharding}; DeepSpeed, tensor and context parallelism "
            "and pipelines cannot be replayed"
        )
    checkpoint = record.checkpoint_before(first)
    if not checkpoint and record.history[0]["step"]:
        raise UserError(f"there is no checkpoint before step {step} to begin from")
    begin = checkpoints.step_of(checkpoint) if checkpoint else 0
    start = str(checkpoint.resolve()) if checkpoint else "never"
    lines = {each.last: each.line for each in record.intervals if begin < each.last <= last}
    question = {"step": step, "last": last, "lines": [*lines], "without": args.without or []}
    question |= {"gradients": args.gradients, "checkpoint": start}
    question |= {"data": entry["data"], "prepared": entry["prepared"]}
    with tempfile.TemporaryDirectory(prefix="replay-") as scratch:
        folder = Path(scratch)
        (folder / "question.json").write_text(json.dumps(question))
        command = args.command or _train_again(record, step, folder, start)
        newest = record.hardware()
        hardware = record.manifest(step).get("hardware", newest)
        envs = again.environments(newest["environment"], hardware, args.processes)
        asked = {"SAMESTEP_REPLAY": scratch, "WANDB_MODE": "disabled"}
        if code := again.start(command, [env | asked for env in envs]):
            return code
        if not (folder / "answer.json").exists():
            raise UserError(f"the command ended before step {last}, with which it was to end")
        found = json.loads((folder / "answer.json").read_text())
        found["lines"] = [
            each for each in run_folder.read_metrics(folder / "run") if "loss" in each
        ]
    _describe_rows(record, step, found["rows"], known=not args.command)
    origin = f"the checkpoint of step {begin}" if begin else "the beginning"
    print(f"{record.folder}, step {step}, from {origin}, {time.perf_counter() - began:.0f} s")
    show(found, [*lines.values()], args)
    return 0


def _train_again(record: Record, step: int, folder: Path, start: str) -> list[str]:
    """The command that trains a project again up to a step."""
    if not record.config:
        raise UserError(
            f"{record.folder} was trained by a script: give its command, as in samestep replay "
            f"{record.folder} --step {step} -- python script.py"
        )
    recipe = again.write_recipe(record.settings(step) | {"save_every": 0}, folder)
    words = [sys.executable, "train.py", "--config", recipe, "--resume", start]
    return [*words, "--accept_changes"]  # data are compared there


def _describe_rows(record: Record, step: int, rows: list[dict], known: bool) -> None:
    """Adds what a person sees of each row; of a script's rows their numbers are known."""
    samples: dict[int, Any] = {}
    if known and rows:
        from samestep.ask.data import RunData  # torch: 4 s

        data = RunData(record)
        part, samples = data.part(step), dict(data.samples(step))
    for each in rows:
        number = each["row"]
        each["line"] = part.line(number, samples[number]) if number in samples else f"row {number}"


def difference(before: Any, now: Any) -> str:
    """How far two values are apart."""
    if before == now or (before is None and now != now):  # a line has null for NaN
        return "equal"
    if isinstance(before, float) and isinstance(now, float):
        return f"{abs(now - before) / max(abs(before), 1e-30):.1e} apart"
    return "DIFFERS"


def show(found: dict, lines: list[dict], args: Namespace) -> None:
    """Prints an answer."""
    for text in found["about"]:
        print(f"  {one_line(text, 500)}")
    pairs = [*zip(lines, found["lines"], strict=True)]
    same = [all(difference(a[n], b[n]) == "equal" for n in NAMES) for a, b in pairs]
    print(f"  {sum(same)} of {len(same)} lines of metrics.jsonl are equal to the bit\n")
    print(f"  line of step {lines[-1]['step']:<12} {'metrics.jsonl':>24} {'replay':>24}")
    for name in NAMES:
        before, now = lines[-1][name], found["lines"][-1][name]
        print(f"    {name:20} {before!s:>24} {now!s:>24}  {difference(before, now)}")
    twice = repr(found["layers"]) == repr(found["again"]["layers"])  # NaN, too
    print(
        f"\n  step {args.step} alone: loss {found['loss']:.6g}, norm {found['norm']:.6g}, "
        f"{found['items']:,} items; computed twice: {'equal' if twice else 'NOT EQUAL'}"
    )
    left = found.get("without", {"layers": {}})
    told = f", and without {', '.join(map(str, args.without))}" if args.without else ""
    print(f"\n  norm of the gradient by layer{told}")
    for name, value in found["layers"].items():
        print(f"    {name[-32:]:32} {value:10.4g} {left['layers'].get(name, '')!s:>10.10}")
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
        print(f"    {each['loss']:10.4g}{norm} {each['items']:6} {each['line']}")
