"""Rehearses your own command: kills it, stops it, and cuts its steps in other ways, and compares.

    python -m samestep rehearse -- torchrun --nproc-per-node 2 script.py --lr 3e-4
    python -m samestep rehearse --steps 8 -- python script.py
    python -m samestep rehearse --from runs/mine -- python script.py

The command trains a few steps in a temporary folder, several times: as it is; again, killed in the
middle of the step after a save; again, asked to stop; again; with other micro-batches; on other
numbers of processes. In each step the rows, the losses, the gradient and all that a checkpoint
holds must be the same, and after a kill also what the loop carries. A table names the first
difference, and what to write. The script uses samestep.Training, or is a project's train.py.

Exit codes: 0 all is the same; 1 something differs; 2 the command cannot be rehearsed.
"""

import functools
import json
import math
import os
import re
import shutil
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from samestep.ask import start_again
from samestep.ask.recorded_run import RecordedRun
from samestep.base.console import one_line, plural
from samestep.base.errors import UserError, some

VARIABLE = "SAMESTEP_REHEARSAL"
_TIMES = 20  # that a rounding may exceed what the last bit of each weight changes
_ASKED = re.compile(r"--(?:num_processes|nproc[-_]per[-_]node)(?:[= ])(\d+)")
_NUMBERS = ("attribute.", "registered.")  # begin names of a script's own numbers, if no tensors
# What to write, by what differs (the first of its row that fits) and where.
_CAUSES = [
    ("again", "batch|ids|items", "rows differ from start to start: seed what they draw, sort sets"),
    ("again", "", "call set_seed before the model is built, and draw from the global generators"),
    ("kill|stop", "batch|ids|items", "make a row a function of its number and augment's generator"),
    ("kill|stop", "carried", "make it an attribute of the model, or of an object with state_dict() "
     "and load_state_dict(): accelerator.register_for_checkpointing(it)"),
    ("kill|stop", r"group\.\d+\.lr", "register the scheduler, or set group['lr'] by step.number"),
    ("kill|stop", "", "draw in the body, from the global generators; carry what is registered"),
    ("processes", "batch|ids|items", "no row, collate or count may depend on the process"),
    ("processes", "loss", "the loss depends on the process: leave out rank and num_processes; "
     "rows of other processes need rows_depend=True"),
    ("processes", "norm of all buffer", "buffers follow the batches of one process: SyncBatchNorm"),
    ("processes", "", "change weights after step.clip only by what all processes have"),
]  # fmt: skip


class Start(NamedTuple):
    """What a start has recorded."""

    code: int
    line: str  # the last that it printed, or its error
    about: dict[str, Any]  # how it began; empty: it did not come to a step
    before: dict[str, Any]  # what the loop saw before the first step, by path
    steps: dict[int, dict[str, Any]]


def _read(code: int, record: Path) -> Start:
    """What all processes of a start have recorded."""
    about: dict[str, Any] = {}
    before: dict[str, Any] = {}
    steps: dict[int, dict[str, Any]] = {}
    for path in sorted(record.glob("*.jsonl")):
        of = "" if path.stem == "0" else f" of process {path.stem}"
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            loop = {f"{name}{of}": value for name, value in line.pop("loop").items()}
            if "step" not in line:
                about = about or line
                before |= loop
                continue
            empty = {"batches": {}, "losses": {}, "rank": {}, "loop": {}, "draws": False}
            step = steps.setdefault(line["step"], {**line, **empty})
            for number in map(int, line["batches"]):
                step["batches"][number] = line["batches"][str(number)]
                step["losses"][number] = line["losses"][str(number)]
                step["rank"][number] = path.stem
            step["draws"] |= line["draws"]
            step["loop"] |= loop
    lines = (record / "log").read_text(errors="replace").splitlines()
    said = [line for line in lines if re.match(r"[\w.]+(Error|\.py): ", line)]
    last = said[-1] if said else start_again.last_line(record / "log")
    if code == 124:
        last = "no end in time; see --timeout"
    return Start(code, one_line(last, 400), about, before, dict(sorted(steps.items())))


# ---- Comparison ----------------------------------------------------------------------------------


def _facts(step: dict, same_cut: bool, bits: bool) -> dict[str, Any]:
    """What is compared of a step, in the order of causes. To rounding, of weights the norm of all,
    since one whose gradient is rounding alone may move at random; and no numbers of a script, which
    may count batches."""
    numbers = sorted(step["batches"])
    batches = [step["batches"][number] for number in numbers]
    items = sum(each[1] for each in batches)
    facts: dict[str, Any] = {"ids of the rows": sum(each[0] for each in batches) % 2**64}
    facts["items in the loss"] = items
    if same_cut:
        facts |= {f"batch {number}": step["batches"][number][2] for number in numbers}
        facts |= {f"loss of batch {number}": step["losses"][number] for number in numbers}
    facts["loss"] = math.fsum(step["losses"].values()) / max(items, 1)
    facts["norm of the gradient"] = step["norm"]
    if bits:
        return facts | step["state"]
    squares: dict[str, float] = {}
    for name, value in step["state"].items():
        if not isinstance(value, list):
            facts |= {} if name.startswith(_NUMBERS) else {name: value}
            continue
        kind = re.match(r"registered\.\d+|\w+", name)[0]  # type: ignore[index]
        if kind.startswith(("model", "registered")) or (kind == "buffer" and same_cut):
            squares[kind] = squares.get(kind, 0.0) + value[2] ** 2
    return facts | {f"norm of all {kind}": math.sqrt(square) for kind, square in squares.items()}


def _apart(one: Any, two: Any) -> float:
    """How far two values are apart, as a part of the larger one."""
    if one == two:
        return 0.0
    if not (isinstance(one, float) and isinstance(two, float)):
        return math.inf
    if math.isnan(one) and math.isnan(two):
        return 0.0
    return abs(one - two) / max(abs(one), abs(two))


def _show(value: Any) -> str:
    if isinstance(value, list):
        return f"{value[0]} of norm {value[2]:.7g}" if len(value) > 2 else " ".join(value)
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _differing(one: dict, two: dict) -> dict[str, list]:
    """What has other values in two views of the loop, by path. What one of them lacks does not
    count, and a part of a collection where both have as many."""
    grown = [n.removesuffix("len()") for n in one if n.endswith(".len()") and two.get(n) != one[n]]
    parts = [n for n in one if n.startswith(tuple(grown)) and not n.endswith(".len()")]
    return {n: [one[n], two[n]] for n in one.keys() & two if one[n] != two[n] and n not in parts}


# ---- The rehearsal -------------------------------------------------------------------------------


class Table:
    """Starts a command in folders of its own; the rows of a rehearsal, as they become known."""

    def __init__(self, folder: Path, args: Namespace):
        self.folder, self.args, self.starts = folder, args, 0
        self.first, self.source = 0, None
        if args.run:
            record = RecordedRun(args.run)
            self.first = max(record.manifests, default=0)
            if not self.first:
                raise UserError(f"--from {args.run} has no checkpoint; give a run that has one")
            self.source = record.folder / "checkpoints" / f"step-{self.first:08d}"
        self.rows: list[dict[str, Any]] = []
        self.free: set[str] = set()  # what differs by itself, such as times
        self.base = self.start("uninterrupted")

    def start(
        self, name: str, command: Sequence[str] = (), envs: Sequence[dict] = (), **asked: Any
    ) -> Start:
        """Starts a command, or that which is rehearsed, in the folder of this name. asked: see
        training.rehearsal."""
        self.starts += 1
        run, record = self.folder / name / "run", self.folder / name / str(self.starts)
        record.mkdir(parents=True)
        if self.source and not run.exists():
            shutil.copytree(self.source, run / "checkpoints" / self.source.name)
        question = {"folder": str(run), "record": str(record), "processes": self.args.processes}
        question |= {"last": self.first + self.args.steps, "cut": 0, "save": 0, "kill": 0}
        question |= {"stop": 0, "rounds": False, **asked}
        more = {VARIABLE: json.dumps(question), "WANDB_MODE": "disabled"}
        print(f"... {name}", file=sys.stderr, flush=True)
        given = [*(command or self.args.command)], [env | more for env in envs or [{**os.environ}]]
        return _read(start_again.finished(*given, record / "log", self.args.timeout), record)

    def add(self, name: str, how: str, result: str, good: bool | None, *more: str) -> None:
        """Adds a line of the table. good: None where nothing was compared."""
        self.rows.append({"run": name, "how": how, "result": result, "good": good, "more": more})

    def failed(self, name: str, start: Start) -> None:
        first = min(start.steps, default=0)
        began = f"it begins at step {first}" if first else "no step was trained"
        self.add(name, "", f"{began}; exit code {start.code}: {start.line}", False)

    def describe(self) -> None:
        """The run as it is, and what it tells of more than kills."""
        about, steps = self.base.about, self.base.steps
        processes, first, last = about["processes"], *(f(steps) for f in (min, max))
        text = f"{plural(processes, 'process')}, batches of at most {about['size']} rows"
        more = []
        asked = _ASKED.search(" ".join(self.args.command))
        if asked and int(asked[1]) != processes:
            more.append(f"the command asks for {asked[1]} processes, and {processes} began")
        states = [step["state"] for step in steps.values()]
        values = {n: {str(state.get(f"model.{n}")) for state in states} for n in about["trained"]}
        still = [name for name, different in values.items() if len(different) == 1]
        if still:
            more.append(f"no step has changed {some(still, 3)}")
        rates = {n for n in states[0] if re.fullmatch(r"group\.\d+\.lr", n)}
        if rates and all(len({state[n] for state in states}) == 1 for n in rates):
            more.append(f"the learning rate is {_show(states[0][min(rates)])} in all these steps")
        self.add("as it is", f"steps {first} to {last}", text, True, *more)

    def break_run(self) -> None:
        """Kills the run in the middle, asks it to stop in the next start, and starts it again."""
        base = self.base.steps
        save = min(base) - 1 + len(base) // 2
        asked: list[tuple[str, str, range, dict]] = [
            ("the same again", "again", range(min(base), save + 1),
             {"save": save, "kill": save + 1}),
            (f"after kill -9 in step {save + 1}", "kill", range(save + 1, save + 2),
             {"stop": save + 1}),
            (f"after SIGTERM in step {save + 1}", "stop", range(save + 2, max(base) + 1), {}),
        ]  # fmt: skip
        for name, kind, expected, question in asked:
            start = self.start("broken", **question)
            if min(start.steps, default=0) != expected[0]:
                self.failed(name, start)
                return
            steps, more = [*expected], []
            if kind == "again":
                self.free |= {*_differing(self.base.before, start.before)}
                for step, two in start.steps.items():
                    one = base[step]
                    self.free |= {*_differing(one["loop"], two["loop"])}
                    moved = _differing(one["state"], two["state"])
                    numbers = [n for n, both in moved.items() if not isinstance(both[0], list)]
                    self.free |= {n for n in numbers if n.startswith(_NUMBERS)}
            found, carried = self.first_difference(start, steps, 0), self.carried(start, steps[0])
            lost = [name for name, both in carried.items() if isinstance(both[0], list)]
            causes = lost or [*carried]
            if found and re.match("batch|ids|items", found[0]):
                causes = []
            if found or lost:
                if causes:
                    now, then = (_show(carried[causes[0]][i]) for i in (1, 0))
                    text = f"{causes[0]} is {now}, uninterrupted {then}"
                    also = f"; so {some(causes[1:], 3)}" if causes[1:] else ""
                    more.append(f"in no checkpoint: {text}{also}")
                more.append(self.advice(kind, "carried" if causes else found[0]))
            elif carried:
                more.append(f"carried, without effect: {some([*carried], 3)}")
            if kind == "stop" and self.rows[-1]["good"] is False:
                more = []  # they stand there
            result = found[1] if found else "the same"
            if lost and not found:
                result = "the same, but for what the loop carries"
            self.add(name, f"{_span(steps)}, bits", result, not (found or lost), *more)

    def cut_otherwise(self) -> None:
        """Starts it with other micro-batches, and on other numbers of processes."""
        about, base = self.base.about, self.base.steps
        reasons = {
            "there is no other size": about["sizes"] < 2,
            "the model or the collate draws, by the micro-batch":
                about["draws"] or any(step["draws"] for step in base.values()),
            "rows_depend, so the result depends on them": about["rows_depend"],
        }  # fmt: skip
        if reason := next((text for text, holds in reasons.items() if holds), ""):
            self.add("other micro-batches", "", f"not compared: {reason}", None)
        else:
            start = self.start("other micro-batches", cut=1)
            self.compare("other micro-batches", "micro", start)
        for count in self.args.processes:
            name = plural(count, "process")
            if count == about["processes"]:
                continue
            if count not in about["others"]:
                self.add(name, "", "not compared: so many cannot have these micro-batches", None)
                continue
            path = self.folder / "uninterrupted/run/hardware.yaml"
            hardware = yaml.safe_load(path.read_text())
            variables = hardware.pop("environment")
            envs = start_again.environments(variables, hardware, count)
            self.compare(name, "processes", self.start(name, about["command"], envs))

    def compare(self, name: str, kind: str, start: Start) -> None:
        """Compares another cut of the steps."""
        about, base = self.base.about, self.base.steps
        if not start.steps:
            self.failed(name, start)
            return
        bits = about["exact"] and kind == "processes"
        close = 0 if bits else 4 * about["eps"]
        found = self.first_difference(start, [*base], close)
        if found and not bits:
            found = self.first_difference(start, [*base], close + self.rounding)
        how = "bits" if bits else "rounding"
        result = found[1] if found else "the same"
        more = [self.advice(kind, found[0])] if found else []
        self.add(name, f"{_span([*base])}, {how}", result, not found, *more)

    def first_difference(
        self, start: Start, steps: list[int], limit: float
    ) -> tuple[str, str] | None:
        """What differs in the first step in which two runs do, and a text. limit: 0: to the bit."""
        base, other = self.base.steps, start.steps
        for step in steps:
            if step not in other:
                return "", f"DIFFERS: step {step} was not trained"
            same_cut = {*base[step]["batches"]} == {*other[step]["batches"]}
            one, two = (_facts(each[step], same_cut, not limit) for each in (base, other))
            wrong = [n for n in one | two if not _apart(one.get(n), two.get(n)) <= limit]
            wrong = [name for name in wrong if name not in self.free]
            if not wrong:
                continue
            name, place = wrong[0], ""
            if number := re.match(r"(?:loss of )?batch (\d+)$", name):
                place = f" (process {other[step]['rank'][int(number[1])]})"
            text = f"DIFFERS in step {step}: {name}{place} is {_show(two.get(name))}, "
            text += f"uninterrupted {_show(one.get(name))}"
            if len(wrong) > 1:
                text += f"; and {len(wrong) - 1} more"
            return name, text
        return None

    def carried(self, start: Start, first: int) -> dict[str, list]:
        """What the loop carries over a kill and no checkpoint holds: it differs before the first
        step of a start, and after it."""
        base, but = self.base.steps, tuple(f"{name}." for name in self.args.but)
        if first - 1 not in base:
            return {}
        found = _differing(base[first - 1]["loop"], start.before)
        after = _differing(base[first]["loop"], start.steps[first]["loop"])
        names = sorted(found.keys() & after.keys() - self.free)
        return {name: found[name] for name in names if not f"{name}.".startswith(but)}

    def advice(self, kind: str, what: str) -> str:
        """What to write, by the row and by what differs."""
        for rows, things, text in _CAUSES if kind != "micro" else ():
            if re.fullmatch(rows, kind) and re.match(things, what):
                return text
        return self.base.about["remedy"]

    @functools.cached_property
    def rounding(self) -> float:
        """What rounding may change: a multiple of what differs where the last bit of all weights is
        another at the start."""
        start, apart = self.start("rounding", rounds=True), [0.0]
        for step in self.base.steps.keys() & start.steps:
            one, two = (_facts(each.steps[step], True, False) for each in (self.base, start))
            apart += [_apart(one[name], two.get(name)) for name in one]
        return _TIMES * max(each for each in apart if each < math.inf)


def _span(steps: list[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def rehearse(args: Namespace) -> int:
    """Prints the table; the exit code."""
    if not args.command:
        raise UserError("give your command after --")
    with tempfile.TemporaryDirectory(prefix="rehearse-") as temporary:
        folder = Path(args.keep or temporary).resolve()
        if args.keep and folder.exists() and any(folder.iterdir()):
            raise UserError(f"--keep {args.keep} is not empty; give another folder")
        table = Table(folder, args)
        if len(table.base.steps) < 3:
            reason = f"exit code {table.base.code}: {table.base.line}"
            if table.base.steps:
                reason = "fewer than three steps"
            raise UserError(f"the command cannot be rehearsed: {reason}")
        table.describe()
        table.break_run()
        table.cut_otherwise()
    code = int(any(row["good"] is False for row in table.rows))
    args.answer["rows"] = table.rows
    for row in table.rows:
        mark = {True: "ok", False: "NO", None: "--"}[row["good"]]
        print(f"{mark:3}{row['run']:24} {row['how']:22} {one_line(row['result'], 500)}")
        for line in row["more"]:
            print(f"     {one_line(line, 500)}")
    return code
