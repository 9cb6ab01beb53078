"""Trains a part of a run again, from its receipt, and compares the states to the last bit.

    python -m samestep audit receipt.json --steps 0:20                      in a project's folder
    python -m samestep audit receipt.json --steps 0:20 --processes 2
    python -m samestep audit receipt.json --steps 20:40 --run runs/mine     from its checkpoint
    python -m samestep audit receipt.json --steps 0:20 --task.data my.jsonl
    python -m samestep audit receipt.json --steps 0:20 --run runs/words -- python own_script.py

Code, data and versions are compared first. A command after -- is run in a copy of this folder
without its runs, where it writes into RUN. What trains is ended when the last step is saved. With
`exact` the processes do not matter. A receipt gives settings that decide the result; what executes,
writes or sends is given here, such as --task.trust_remote_code true. Exit codes: 0 equal; 1 not
equal; 2 wrong input.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path

from samestep.ask import receipt, recorded_run, start_again
from samestep.ask.recorded_run import RecordedRun, print_line, tell
from samestep.base.errors import UserError
from samestep.base.launching import PREFIXES
from samestep.state import checkpoints

NOT_COPIED = (".git", ".venv", "__pycache__")


class _Audited:
    """The steps `first` + 1 to `last` of a receipt; raises UserError for others."""

    def __init__(self, args: Namespace):
        self.is_script = bool(args.command)
        self.receipt, self.run, self.anyway = receipt.read(args.receipt), args.run, args.anyway
        self.saves = {save["step"]: save for save in self.receipt["saves"]}
        is_whole = not (self.receipt["begins"] or self.receipt["previous"])
        known = [0, *self.saves] if is_whole else [*self.saves]
        asked = re.fullmatch(r"(\d*):(\d*)", args.steps)
        steps = [int(asked[1] or known[0]), int(asked[2] or known[-1])] if asked else []
        if not asked or not {*steps} <= {*known} or steps[0] >= steps[1]:
            shown = ", ".join(map(str, known))
            raise UserError(f"--steps {args.steps}: give A:B of the steps {shown}")
        self.first, self.last = steps
        self.seen: set[int] = set()
        self.differs, self.states = [], []  # for --json
        self.checkpoint: Path | None = None
        if self.first and not self.run:
            raise UserError(f"to resume after step {self.first} give --run, the folder of the run")
        if self.first:
            record = RecordedRun(self.run)
            record.weights_at(self.first)
            save = self.saves[self.first]
            if record.state_at(self.first, save.get("version", 1)) != save["state"]:
                raise UserError(f"{self.run} has another state after step {self.first}")
            folder = self.run / "checkpoints"
            self.checkpoint = checkpoints.checkpoint_folder(folder, self.first).absolute()

    def check(self, manifest: dict) -> None:
        """Compares what both are made of, as far as it is known; raises UserError where other bits
        must be expected."""
        given, found = recorded_run.facts_of(self.receipt), recorded_run.facts_of(manifest)
        free = recorded_run.FREE
        if self.receipt["config"]["exact"]:
            free += recorded_run.LAYOUT
        for name, pair in recorded_run.differing(given, found).items():
            later = name not in found and name.startswith(recorded_run.LATER)
            hidden = name not in given and name.startswith(("settings ", "data "))
            if later or hidden:
                continue
            text = recorded_run.describe(name, *pair)
            if name not in free and not self.anyway:
                raise UserError(f"not what the receipt was made of: {text}; --anyway tries it")
            self.differs.append({"what": text, "may": name in free})
            print_line(f"  differs, and {'may' if name in free else 'must not'}: {text}")

    def compare(self, record: RecordedRun, step: int) -> bool:
        """Prints whether the state of a new checkpoint is that of the receipt."""
        save = self.saves[step]
        state = record.state_at(step, save.get("version", 1))
        self.seen.add(step)
        word = "equal" if state == save["state"] else "NOT EQUAL"
        self.states.append({"step": step, "state": save["state"], "equal": word == "equal"})
        print_line(f"  step {step:6}: {word} {save['state'][:16]}")
        if state != save["state"] and "weights" in save:
            digits = save["weights"]
            given = {n: digits[8 * i : 8 * i + 8] for i, n in enumerate(self.receipt["names"])}
            weights = record.weights_at(step, save.get("version", 1))
            known = {name: weights.get(name) for name in given}
            print_line(f"    differs: {recorded_run.describe_weights(given, known)}")
        return state == save["state"]

    def follow(self, started: list[subprocess.Popen], folder: Path, log: Path) -> bool:
        """Compares checkpoints as they come, until the last or another state; whether all were
        equal."""
        while self.last not in self.seen:
            codes = [each.poll() for each in started]
            for path in reversed(checkpoints.list_checkpoints(folder / "checkpoints")):
                step = checkpoints.step_of(path)
                if self.first < step <= self.last and step in self.saves.keys() - self.seen:
                    record = RecordedRun(folder)
                    if self.is_script and not self.seen:
                        self.check(record.manifests[step])
                    if not self.compare(record, step):
                        return False
            if self.last not in self.seen and (None not in codes or any(codes)):
                reason = start_again.last_line(log)
                raise UserError(f"the run ended before step {self.last} was saved: {reason}")
            time.sleep(0.05)
        return True


def _prepare(audited: _Audited, scratch: Path, args: Namespace) -> tuple[list, list]:
    """Compares code and data; the command that trains again, and the environments of processes."""
    from samestep.run import startup

    found = audited.receipt
    envs = start_again.environments(found["environment"], found["hardware"], args.processes)
    os.environ |= {n: text for n, text in envs[0].items() if n.startswith(PREFIXES)}  # precision
    words = start_again.words(found["config"], scratch, args.flags)
    words += ["--resume", str(audited.checkpoint or "never"), "--accept_changes", "true"]
    train, task = startup.find_project()
    manifest = startup.prepare_run(train.Config, task, None, [*words, "--check", "true"]).manifest
    hardware = manifest["hardware"] | {"processes": len(envs)}
    audited.check(manifest | {"config": {}, "hardware": hardware})  # settings are the receipt's
    return [sys.executable, "train.py", *words], envs


def _copy_folder(audited: _Audited, copied: Path) -> Path:
    """Copies this folder without the folders of runs, but for the checkpoint to begin from; the
    folder of the run there."""

    def leave_out(folder: str, names: list[str]) -> list[str]:
        return [n for n in names if n in NOT_COPIED or Path(folder, n, "checkpoints").is_dir()]

    if not audited.run or not (copied / audited.run).resolve().is_relative_to(copied.resolve()):
        raise UserError("give --run, the folder below this one where the command writes")
    shutil.copytree(Path(), copied, symlinks=True, ignore=leave_out)
    if audited.checkpoint:
        place = copied / audited.run / "checkpoints" / audited.checkpoint.name
        shutil.copytree(audited.checkpoint, place)
    return copied / audited.run


def audit(args: Namespace) -> int:
    """Trains in a scratch folder, and prints whether all states are equal; the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what it has started ends, too
    began, audited = time.monotonic(), _Audited(args)
    print_line(f"audit of {args.receipt}, steps {audited.first} to {audited.last}")
    with tempfile.TemporaryDirectory(prefix="audit-") as scratch:
        place, run, envs = Path(), Path(scratch, "run"), [dict(os.environ)]
        command = args.command
        if command:
            place = Path(scratch, "copy")
            run = _copy_folder(audited, place)
        else:
            command, envs = _prepare(audited, Path(scratch), args)
        log = Path(scratch, "log")
        tell(f"trains steps {audited.first + 1} to {audited.last} again")
        with start_again.started(command, envs, log, place) as started:
            equal = audited.follow(started, run, log)
    verdict = "the same run, to the bit" if equal else "NOT the run of the receipt"
    args.answer |= {"states": audited.states, "differs": audited.differs}
    print(f"=> {verdict}; {time.monotonic() - began:.0f} s")
    return int(not equal)
