"""Trains a part of a run again, from its receipt, and compares the states to the last bit.

    python -m samestep audit receipt.json --steps 0:20                      in a project's folder
    python -m samestep audit receipt.json --steps 0:20 --processes 2
    python -m samestep audit receipt.json --steps 20:40 --run runs/mine     from its checkpoint
    python -m samestep audit receipt.json --steps 0:20 --task.data my.jsonl
    python -m samestep audit receipt.json --steps 0:20 --run runs/words -- python own_script.py

What must be equal is compared first: code, data, settings, versions. A command after -- is run in a
copy of this folder without its runs, where it writes into RUN; it is ended when the last step is
saved. With `exact` the processes do not matter. Exit codes: 0 equal; 1 not equal; 2 refused.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import yaml

from samestep.ask import again, made, receipt
from samestep.ask.record import Record
from samestep.base.console import one_line, protect_output
from samestep.base.errors import UserError
from samestep.core import checkpoints
from samestep.programs import make_parser

# Beside those of `again`: settings of a start that leave no trace in the result.
QUIET = again.QUIET | {"check_export": False, "eval_every": 0, "keep_checkpoints": 0}
NOT_COPIED = (".git", ".venv", "__pycache__")


class Audit:
    """The steps `first` + 1 to `last` of a receipt; raises UserError for others."""

    def __init__(self, path: Path, steps: str, run: Path | None, anyway: bool):
        self.receipt, self.run, self.anyway = receipt.read(path), run, anyway
        self.facts = made.facts_of(self.receipt)
        self.saves = {save["step"]: save for save in self.receipt["saves"]}
        known = sorted({self.receipt["begins"], *self.saves})
        known = known if known[0] in (0, *self.saves) else known[1:]
        first, _, last = steps.partition(":")
        try:
            self.first, self.last = int(first or known[0]), int(last or known[-1])
        except ValueError:
            self.first = self.last = -1
        if not {self.first, self.last} <= {*known} or self.first >= self.last:
            shown = ", ".join(map(str, known))
            raise UserError(f"--steps {steps}: give A:B of steps {shown}, whose states are known")
        self.effects: dict[str, str] = {}  # see startup.change_effects
        self.told: set[str] = set()  # differences that were printed
        self.seen: set[int] = set()  # steps that were compared
        self.checkpoint = self.find_checkpoint() if self.first else None

    def find_checkpoint(self) -> Path:
        """The checkpoint of the first step, whose state is that of the receipt."""
        if not self.run:
            raise UserError(f"to go on after step {self.first} give --run, the folder of the run")
        record = Record(self.run)
        saved = record.manifests.get(self.first, {}).get("state")
        if saved != self.saves[self.first]["state"]:
            raise UserError(f"{self.run} has no checkpoint with the state of step {self.first}")
        made.weights_at(record, self.first)
        return checkpoints.checkpoint_folder(self.run / "checkpoints", self.first).absolute()

    def check(self, facts: made.Facts) -> None:
        """Compares what both are made of; raises UserError where other bits must be expected."""
        changed = made.differing(self.facts, facts)
        lines: dict[bool, list[str]] = {False: [], True: []}
        for name, pair in changed.items():
            matters = made.matters(name, self.facts["settings exact"], self.effects)
            left_out = name.startswith(("settings ", "data ")) and name not in self.facts
            if name in self.told or left_out or (name.startswith("settings ") and not matters):
                continue
            self.told.add(name)
            lines[matters].append(made.describe(name, *pair))
        if lines[True] and not self.anyway:
            names = ", --".join(self.receipt["left_out"])
            hint = f"; give --{names}, which the receipt leaves out" if names else ""
            words = "; ".join(lines[True])
            raise UserError(f"not what the receipt was made of: {words}{hint}; --anyway tries it")
        for matters, words in lines.items():
            if words:
                print(f"  differs, and {'must not' if matters else 'may'}: {'; '.join(words)}")

    def compare(self, record: Record, step: int) -> bool:
        """Prints whether the state of a new checkpoint is that of the receipt."""
        self.seen.add(step)
        self.check(made.facts_of(record.manifests[step]))
        save = self.saves[step]
        same = record.manifests[step]["state"] == save["state"]
        print(f"  step {step:6}: {'equal' if same else 'NOT EQUAL'} {save['state'][:16]}")
        if not same and "weights" in save:
            digits = [save["weights"][i : i + 8] for i in range(0, len(save["weights"]), 8)]
            given = dict(zip(self.receipt["names"], digits, strict=True))
            changed = checkpoints.differences(given, made.weights_at(record, step))
            print(f"    {len(changed)} of {len(given)} weights differ, the first: {min(changed)}")
        return same

    def follow(self, started: list[subprocess.Popen], folder: Path, log: Path) -> bool:
        """Compares checkpoints as they come, until the last or another state; whether all were
        equal."""
        while self.last not in self.seen:
            codes = [each.poll() for each in started]
            for path in reversed(checkpoints.list_checkpoints(folder / "checkpoints")):
                step = checkpoints.step_of(path)
                is_new = self.first < step <= self.last and step in self.saves.keys() - self.seen
                if is_new and not self.compare(Record(folder), step):
                    return False
            if self.last not in self.seen and (None not in codes or any(codes)):
                said = [line for line in log.read_text(errors="replace").splitlines() if line]
                reason = one_line(said[-1]) if said else "it printed nothing"
                raise UserError(f"the run ended before step {self.last} was saved: {reason}")
            time.sleep(0.05)
        return True


def prepare(audit: Audit, scratch: Path, flags: list[str], processes: int) -> tuple[list, list]:
    """The command that trains again in this project, and the environment of each process; compares
    code and data before."""
    from samestep.project import startup

    train, task = startup.find_project()
    recipe = scratch / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(audit.receipt["config"] | QUIET), encoding="utf-8")
    words = ["--config", str(recipe), "--output_dir", str(scratch / "run"), *flags]
    words += ["--resume", str(audit.checkpoint or "never"), "--accept_changes", "true"]
    start = startup.prepare_run(train.Config, task, None, [*words, "--check", "true"])
    audit.effects, every = startup.change_effects(start.cfg), start.cfg.save_every
    if every and every != "epoch" and audit.last % every and audit.last != max(audit.saves):
        raise UserError(f"step {audit.last} was saved by a stop; give a multiple of {every}")
    variables, hardware = audit.receipt["environment"], audit.receipt["hardware"]
    envs = again.environments_of(variables, hardware, processes)
    found = made.facts_of(start.manifest) | {"hardware processes": len(envs)}
    audit.check(audit.facts | found)  # what is not known yet is compared with the first checkpoint
    return [sys.executable, "train.py", *words], envs


def copy_folder(audit: Audit, copied: Path) -> Path:
    """Copies this folder without the folders of runs, but for the checkpoint to begin from; the
    folder of the run there."""

    def leave_out(folder: str, names: list[str]) -> list[str]:
        return [n for n in names if n in NOT_COPIED or Path(folder, n, "checkpoints").is_dir()]

    if not audit.run or not (copied / audit.run).resolve().is_relative_to(copied.resolve()):
        raise UserError("give --run, the folder below this one where the command writes")
    shutil.copytree(Path(), copied, symlinks=True, ignore=leave_out)
    run = copied / audit.run
    if audit.checkpoint:
        shutil.copytree(audit.checkpoint, run / "checkpoints" / audit.checkpoint.name)
    return run


def train_again(audit: Audit, flags: list[str], command: list[str], processes: int) -> bool:
    """Trains in a scratch folder; whether all states were equal."""
    with tempfile.TemporaryDirectory(prefix="audit-") as folder:
        place, run, envs = Path(), Path(folder, "run"), [dict(os.environ)]
        if command:
            place = Path(folder, "copy")
            run = copy_folder(audit, place)
        else:
            command, envs = prepare(audit, Path(folder), flags, processes)
        log, started = Path(folder, "log"), []
        try:
            with open(log, "w") as file:
                streams: dict = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
                for env in envs:
                    started.append(subprocess.Popen(command, cwd=place, env=env, **streams))
            return audit.follow(started, run, log)
        finally:
            for each in started:
                kill(each)


def kill(started: subprocess.Popen) -> None:
    """Kills a process and all that it has started."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(started.pid).children(recursive=True):
            child.kill()
    started.kill()
    started.wait()


def main() -> int:
    protect_output()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what it has started ends, too
    parser = make_parser("audit", __doc__)
    parser.add_argument("receipt", type=Path, help="file that samestep receipt has written")
    parser.add_argument("--steps", default=":", metavar="A:B", help="default: all")
    parser.add_argument("--run", type=Path, help="folder of the run, to go on from step A")
    parser.add_argument("--processes", type=int, default=0, help="default: as many as the run had")
    parser.add_argument("--anyway", action="store_true", help="train in spite of differences")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    args, flags = parser.parse_known_args(words[:end])
    began = time.monotonic()
    try:
        audit = Audit(args.receipt, args.steps, args.run, args.anyway)
        print(f"audit of {args.receipt}, steps {audit.first} to {audit.last}", flush=True)
        equal = train_again(audit, flags, words[end + 1 :], args.processes)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    verdict = "the same run, to the bit" if equal else "NOT the run of the receipt"
    print(f"=> {verdict}; {time.monotonic() - began:.0f} s")
    return int(not equal)
