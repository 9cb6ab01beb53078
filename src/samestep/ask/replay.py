"""A step of a run, computed again: what its rows, its layers, and it without some rows give.

    python -m samestep replay runs/mine                        names steps that stand out
    python -m samestep replay runs/mine --step 67
    python -m samestep replay runs/mine --step 67 --without 178 --gradients

It trains again from the newest checkpoint before, in a scratch folder, with the settings of then
and the train.py and task.py of now. It prints what is logged beside what it computes, to the bit,
and draws replay-N.png in the folder of the run. Exit codes: 0; 2 the input is wrong.
"""

import json
import math
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from samestep.ask import again
from samestep.ask.record import Record, answer
from samestep.base.console import one_line
from samestep.base.errors import UserError
from samestep.core import checkpoints
from samestep.programs import make_parser

NAMES = ("loss", "grad_norm", "lr", "batch_hash")  # that are compared
_WINDOW, _THRESHOLD = 20, 5  # lines of a running median; deviations from it that stand out


def main() -> int:
    parser = make_parser("replay", __doc__)
    add = parser.add_argument
    add("run", help="folder of a run, such as runs/default")
    add("--step", type=int, metavar="N", help="the step; without it: those that stand out")
    add("--without", type=int, nargs="+", default=[], metavar="ROW", help="rows to leave out")
    add("--top", type=int, default=8, metavar="K", help="rows to print (default: 8)")
    add("--gradients", action="store_true", help="the norm of each row's gradient, too")
    add("--processes", type=int, default=0, metavar="P", help="default: as many as it had")
    args = parser.parse_args()
    return answer(parser, _show_spikes if args.step is None else replay, args)


# ---- Steps that stand out ------------------------------------------------------------------------


def _find_spikes(record: Record) -> list[tuple[int, str, float]]:
    """Steps that stand out, why, and by how many deviations: those that were skipped, and losses
    and norms far above the median of the lines before. Of a line the worst step counts, too."""
    found, before = [], {"loss": [], "grad_norm": []}
    for line in record.log:
        if line.get("event") == "skipped":
            found.append((line["step"], "skipped: loss or gradient was not finite", math.inf))
    for _, last, line in record.intervals:
        worst = line.get("worst") or {"step": last}
        for name, values in before.items():
            step, value = max(
                [(last, line[name]), (worst["step"], worst.get(name))],
                key=lambda each: -math.inf if each[1] is None else each[1],
            )
            if value is None:
                continue
            middle = statistics.median(values or [value])
            spread = 1.4826 * statistics.median([abs(each - middle) for each in values or [0]])
            above = (value - middle) / max(spread, abs(middle) / 100, 1e-12)
            if len(values) >= 4 and above > _THRESHOLD:
                text = f"{name} {value:.4g}, {above:.1f} deviations above the median {middle:.4g}"
                found.append((step, text, above))
            values[:] = [*values, value][-_WINDOW:]
    return sorted(found)


def _show_spikes(args: Any) -> None:
    record = Record(args.run)
    found = _find_spikes(record)
    for step, text, _ in found:
        print(f"step {step:>8}: {text}")
    print(f"{len(found)} found in {len(record.intervals)} lines of metrics.jsonl")
    if found:
        worst = max(found, key=lambda each: each[2])
        print(f"the largest: python -m samestep replay {record.folder} --step {worst[0]}")


# ---- A step --------------------------------------------------------------------------------------


def check(record: Record, step: int) -> None:
    """Raises UserError for a run that cannot be asked."""
    sharding = record.manifest(step).get("hardware", {}).get("sharding", "none")
    if (
        {part.split()[0] for part in sharding.split(", ")}
        - {"none", "FSDP2", "dp_replicate"}
        - {"dp_shard"}
    ):
        raise UserError(
            f"step {step} was trained with {sharding}; DeepSpeed, tensor and context parallelism "
            "and pipelines cannot be replayed"
        )


def replay(args: Any) -> int:
    record, step, began = Record(args.run), args.step, time.perf_counter()
    entry, (first, last, _) = record.entry(step), record.interval(step)
    check(record, step)
    checkpoint = record.checkpoint_before(first)
    if not checkpoint and record.history[0]["step"]:
        raise UserError(f"there is no checkpoint before step {step} to begin from")
    begin = checkpoints.step_of(checkpoint) if checkpoint else 0
    lines = {each.last: each.line for each in record.intervals if begin < each.last <= last}
    question = {"step": step, "last": last, "lines": [*lines], "data": entry["data"]}
    question |= {"without": args.without, "gradients": args.gradients}
    with tempfile.TemporaryDirectory(prefix="replay-") as scratch:
        folder = Path(scratch)
        (folder / "question.json").write_text(json.dumps(question))
        words = ["-m", "samestep.ask.compute", "--config", again.write_recipe(record, step, folder)]
        words += ["--resume", str(checkpoint.resolve()) if checkpoint else "never"]
        words += ["--accept_changes"]  # data are compared there
        envs = again.environments(record, step, args.processes)
        if code := again.start(words, [env | {"SAMESTEP_REPLAY": scratch} for env in envs]):
            return code
        found = json.loads((folder / "answer.json").read_text())
    origin = f"the checkpoint of step {begin}" if begin else "the beginning"
    print(f"{record.folder}, step {step}, from {origin}, {time.perf_counter() - began:.0f} s")
    show(found, [*lines.values()], args)
    if "NO_PICTURE" not in os.environ:
        print(draw(found, record.folder / f"replay-{step}.png", step))
    return 0


def difference(before: Any, now: Any) -> str:
    """How far two values are apart."""
    if before == now or (before is None and now != now):  # a line has null for NaN
        return "equal"
    if isinstance(before, float) and isinstance(now, float):
        return f"{abs(now - before) / max(abs(before), 1e-30):.1e} apart"
    return "DIFFERS"


def show(found: dict, lines: list[dict], args: Any) -> None:
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
    for each in _by_loss(found["rows"])[: args.top]:
        norm = f" norm {each['norm']:.4g}" if args.gradients else ""
        print(f"    {each['loss']:10.4g}{norm} {each['items']:6} {each['line']}")


def _by_loss(rows: list[dict]) -> list[dict]:
    """The largest first, and before that what is not finite."""
    return sorted(rows, key=lambda each: (math.isfinite(each["loss"]), -each["loss"]))


def draw(found: dict, output: Path, step: int) -> Path:
    """Draws the losses of the rows, and the norms by layer."""
    from matplotlib.figure import Figure

    from samestep.base.pictures import save_figure

    figure = Figure(figsize=(9, 4), dpi=150, layout="constrained")
    rows, layers = figure.subplots(1, 2)
    shown = _by_loss(found["rows"])
    rows.bar([str(each["row"]) for each in shown], [each["loss"] for each in shown])
    rows.set(title=f"step {step}: loss of each row alone")
    layers.plot([*found["layers"]], [*found["layers"].values()], "o-", label="the step")
    if "without" in found:
        layers.plot([*found["without"]["layers"].values()], "o-", label="without the rows")
    layers.set(title="norm of the gradient by layer", yscale="log")
    layers.legend()
    for axes in (rows, layers):
        axes.tick_params(axis="x", rotation=90, labelsize=6)
    return save_figure(figure, output)
